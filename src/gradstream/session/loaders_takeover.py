"""What lost workers have left of an epoch, taken over by a worker at the end of its own part.

The coordinator knows which steps of a lost worker are in the model. A loader knows all minibatches of the
epoch, since it draws the order of all of them. So the coordinator names what is left by its place in the lost
worker's part, and the loader makes it. What is counted here is which minibatches are behind which step: that
is known only where each step of an epoch has the same number of them.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from gradstream.data.left_over import Block, Epoch
from gradstream.session.bridge import LoopBridge

__all__ = ["EpochSteps", "Takeover", "TakeoverOrder"]


class TakeoverOrder:
    """The minibatches of an epoch as their sampler has given them: most often lists of sample numbers.

    Attributes:
        whole: whether the epoch was drawn to its end.
    """

    def __init__(self) -> None:
        self.whole = False
        self._batches: list[Any] = []

    def noted(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The same minibatches, each remembered when it is taken."""
        for batch in batches:
            self._batches.append(_packed(batch))
            yield batch
        self.whole = True

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        return (batch.tolist() if isinstance(batch, array) else batch for batch in self._batches)


def _packed(batch: Any) -> Any:
    """A list of integers in eight bytes each; anything else as it is."""
    if type(batch) is not list or any(type(one) is bool for one in batch[:1]):
        return batch
    try:
        return array("q", batch)
    except (TypeError, OverflowError):
        return batch


class Takeover:
    """Asks for what lost workers have left, for all loaders of a session.

    Args:
        steps: the number of the loop's next step. A resumed run begins at 0, and what it passes by lies
            below. None while that is not known.

    Attributes:
        handover: reaches the coordinator; None before there are steps.
    """

    def __init__(self, steps: Callable[[], int | None]) -> None:
        self.steps = steps
        self.handover: LoopBridge | None = None
        self._num_loaders = 0

    def number(self) -> int:
        """Of a new loader: the same on all workers, whose scripts make the same loaders."""
        self._num_loaders += 1
        return self._num_loaders - 1


class EpochSteps:
    """Which steps the minibatches of an epoch are behind; and at its end, what there is to take over.

    Args:
        takeover: of the session.
        epoch: which one.
    """

    def __init__(self, takeover: Takeover, epoch: Epoch) -> None:
        self._takeover = takeover
        self._epoch = epoch
        self._begin: int | None = None  # the first step
        self._given = 0  # minibatches of the own part
        self._per_step: int | None = None  # 0: not always as many
        self._asked: int | None = None  # the step that what was taken over last is behind
        self._parts: list[int] = []  # how many minibatches are each worker's, once this is asked for

    def next(self) -> None:
        """The loop asks for the next minibatch of its own part."""
        self._look()
        self._given += 1

    def take(self, parts: Callable[[int], list[int]], orders: dict[int, TakeoverOrder]) -> Block | None:
        """What to take over next; None where there is nothing.

        Args:
            parts: how many minibatches of an epoch in `orders` are each worker's.
            orders: by epoch, the minibatches of all workers.
        """
        if self._asked is None:
            self._look()
        steps, handover = self._takeover.steps(), self._takeover.handover
        if steps is None or self._begin is None or steps == self._begin or handover is None:
            return None  # no steps are made with it: a validation
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
        return handover.take_over(self._epoch, self._begin, steps, self._parts, self._per_step or 0, oldest)

    def used(self) -> bool:
        """Whether what was taken over last is behind one step, as it should be. Else that is told."""
        if self._asked is None or self._takeover.steps() == self._asked + 1:
            return True
        self._tell(unclear=True)
        return False

    def _is_whole(self, orders: dict[int, TakeoverOrder], back: int) -> bool:
        order = orders.get(self._epoch.number - back)
        return order is not None and order.whole

    def _look(self) -> None:
        steps = self._takeover.steps()
        if steps is None:
            return
        if self._begin is None:
            # Of a resumed loop that is known after its first minibatch: it passes by, or has made a step.
            self._begin = 0 if self._given and steps > 0 else steps - self._given
            self._tell()
        made = steps - self._begin
        if self._per_step is None and made:
            self._per_step = self._given if made == 1 else 0
        if self._per_step and made != self._given // self._per_step:
            self._per_step = 0
            self._tell(unclear=True)

    def _tell(self, *, unclear: bool = False) -> None:
        handover = self._takeover.handover
        if handover is not None and self._begin is not None:
            handover.begun(self._epoch, self._begin, unclear=unclear)
