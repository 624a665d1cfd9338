"""Takes over a lost worker's minibatches of an epoch, when a worker has finished its own part.

The coordinator knows which steps of a lost worker are in the model. A loader knows all minibatches of the
epoch, since it draws the order of all of them. So the coordinator names the rest by its place in the lost
worker's part, and the loader makes those minibatches. This module counts which minibatches belong to which
step, which is known only where every step of an epoch uses the same number of them.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from gradstream.data.reassignment import Block, Epoch
from gradstream.session.bridge import LoopBridge


class TakeoverOrder:
    """The minibatches that a sampler has drawn in an epoch, most often as lists of sample indices.

    Attributes:
        whole: whether the sampler has drawn all minibatches of the epoch.
    """

    def __init__(self) -> None:
        self.whole = False
        self._batches: list[Any] = []

    def noted(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The same minibatches; remembers each when it is taken."""
        for batch in batches:
            self._batches.append(_packed(batch))
            yield batch
        self.whole = True

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        return (batch.tolist() if isinstance(batch, array) else batch for batch in self._batches)


def _packed(batch: Any) -> Any:
    """A list of integers as an array of eight bytes each; anything else unchanged."""
    if type(batch) is not list or any(type(one) is bool for one in batch[:1]):
        return batch
    try:
        return array("q", batch)
    except (TypeError, OverflowError):
        return batch


class Takeover:
    """Lets the loaders of a session take over minibatches of lost workers, which the coordinator assigns.

    Args:
        steps: returns the number of the loop's next step, None while it is not known. A resumed run begins
            at 0; iterations that it skips have numbers below.

    Attributes:
        bridge: reaches the coordinator; None before the loop can make steps.
    """

    def __init__(self, steps: Callable[[], int | None]) -> None:
        self.steps = steps
        self.bridge: LoopBridge | None = None
        self._num_loaders = 0

    def number(self) -> int:
        """The number of a new loader: equal on all workers, since their scripts make the same loaders."""
        self._num_loaders += 1
        return self._num_loaders - 1


class EpochSteps:
    """Counts which steps used the minibatches of an epoch, and asks at its end for those of lost workers.

    Args:
        takeover: connection of the session to the coordinator.
        epoch: the epoch of one loader.
    """

    def __init__(self, takeover: Takeover, epoch: Epoch) -> None:
        self._takeover = takeover
        self._epoch = epoch
        self._begin: int | None = None  # the first step
        self._given = 0  # minibatches of this worker's own part
        self._per_step: int | None = None  # minibatches of a step; 0: not always the same number
        self._asked: int | None = None  # the step for which a block was taken over last
        self._parts: list[int] = []  # number of minibatches of each worker, once it is needed

    def next(self) -> None:
        """Counts the next minibatch of the worker's own part."""
        self._count()
        self._given += 1

    def take(self, parts: Callable[[int], list[int]], orders: dict[int, TakeoverOrder]) -> Block | None:
        """The block of minibatches to take over next; None if there is none.

        Args:
            parts: returns the number of minibatches of each worker in an epoch of `orders`.
            orders: minibatches of all workers, by epoch.
        """
        if self._asked is None:
            self._count()
        steps, bridge = self._takeover.steps(), self._takeover.bridge
        if steps is None or self._begin is None or steps == self._begin or bridge is None:
            return None  # the loop makes no steps with this epoch: a validation
        if not self.used():
            return None
        if self._asked is None:
            if not (self._per_step and self._given % self._per_step == 0 and self._is_whole(orders, 0)):
                self._per_step = 0
            self._parts = parts(self._epoch.number) if self._per_step else []
        self._asked, back = steps, 0
        while self._is_whole(orders, back + 1):
            back += 1
        oldest = self._epoch.number - back
        return bridge.take_over(self._epoch, self._begin, steps, self._parts, self._per_step or 0, oldest)

    def used(self) -> bool:
        """Whether the loop has made exactly one step since it took over a block, or has taken none over.

        If not, it tells the coordinator that the steps of this epoch's minibatches are unclear: then no worker takes
        over minibatches of the epoch.
        """
        if self._asked is None or self._takeover.steps() == self._asked + 1:
            return True
        self._report(unclear=True)
        return False

    def _is_whole(self, orders: dict[int, TakeoverOrder], back: int) -> bool:
        order = orders.get(self._epoch.number - back)
        return order is not None and order.whole

    def _count(self) -> None:
        steps = self._takeover.steps()
        if steps is None:
            return
        if self._begin is None:
            # In a resumed loop this is known after the first minibatch: it was skipped, or a step was made.
            self._begin = 0 if self._given and steps > 0 else steps - self._given
            self._report()
        made = steps - self._begin
        if self._per_step is None and made:
            self._per_step = self._given if made == 1 else 0
        if self._per_step and made != self._given // self._per_step:
            self._per_step = 0
            self._report(unclear=True)

    def _report(self, *, unclear: bool = False) -> None:
        bridge = self._takeover.bridge
        if bridge is not None and self._begin is not None:
            bridge.begun(self._epoch, self._begin, unclear=unclear)
