"""Asks the coordinator which minibatches of a loader this worker takes, where workers make no common rounds.

Every worker draws the order of the whole epoch; a place is the index of a minibatch in it (see `data.dealing`).

    loop takes a minibatch ──uses: place, step──▶ coordinator ──the next place──▶ loop takes it
                                                      ▲
                                     step ────────────┘ is not pushed before the coordinator knows what it uses

A loop waits for an answer only if its own work is shorter than a message and its answer.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from gradstream.data.dealing import LoopBatch
from gradstream.errors import ConfigError
from gradstream.session.loaders_part import Dealt, Takeover, packed
from gradstream.session.places import LoaderPlace
from gradstream.wire import v1
from gradstream.worker.loop import LoopContext

MOST_ORDERS = 4
"""Epochs whose minibatches (as indices) are kept: a lost worker may have been some epochs behind."""


FRESH = 1 << 20
"""Added to the numbers of loaders of a resumed loop that begins them anew: its epochs are others than before."""


class _Order:
    """The minibatches of an epoch in the order of one process, as far as they are needed."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._source = batches
        self._batches: list[Any] = []

    def get(self, index: int) -> Any:
        """The minibatch of this index; None if the epoch is shorter."""
        while len(self._batches) <= index:
            try:
                self._batches.append(packed(next(self._source)))
            except StopIteration:
                return None
        batch = self._batches[index]
        return batch.tolist() if isinstance(batch, array) else batch

    def end(self) -> int:
        """Goes to the end, since a generator of the user's own advances, and returns the number of minibatches."""
        self._batches.extend(map(packed, self._source))
        return len(self._batches)


class LoaderDraws:
    """Draws one loader's minibatches.

    Args:
        takeover: the session's place in the run.
        number: number of the loader.
        workers: the ranks of the beginning; each minibatch is split into as many pieces, or is one.
        split: each minibatch is split.
        cut: returns a slice of the samples of a minibatch.
        size: returns the number of samples of a minibatch, or None if that cannot be seen.
        total: returns the number of minibatches of an epoch, as the sampler says.
        place: the loop's place in the loader.
    """

    is_finite = True

    def __init__(
        self,
        takeover: Takeover,
        number: int,
        workers: int,
        split: bool,
        cut: Callable[[Any, slice], Any],
        size: Callable[[Any], int | None],
        total: Callable[[], int],
        place: LoaderPlace | None = None,
    ) -> None:
        self._takeover = takeover
        self._loader = number
        self._pieces = workers if split else 1
        self._cut = cut
        self._size = size
        self._total = total
        self._place = place
        self._orders: dict[int, _Order] = {}  # by epoch
        self._epoch = -1
        self._num_begun = self._over = 0  # iterations: of this loop; that were over when this worker came
        self._begun: object = None  # what the loop had made when the iteration began
        self._num_drawn = 0
        self._granted = deque[LoopBatch]()
        self._drawn = deque[tuple[LoopBatch | None, int | None]]()  # that the loop has not taken
        self._uses: list[v1.Use] = []  # that the coordinator does not know yet
        self._rest = 0  # further minibatches of this worker's own part, by the last answer
        self._asked: Future[tuple[list[LoopBatch], int]] | None = None
        self._is_ended = False  # the epoch's number of minibatches is known
        self._is_dealt = False  # the iteration draws its minibatches
        self._taken_for: int | None = None  # the step of the minibatch that was taken last

    # ---- what the sampler and the loop do -----------------------------------------------

    def begin(self, number: int, order: Iterator[Any], first: int = 0) -> bool:
        """The loop begins an iteration, the epoch of this number, over the minibatches of one process.

        Returns:
            Whether its minibatches are drawn. False: each worker takes its own part, since the iteration is a
            validation, or comes before the loop has joined its run.

        Raises:
            ConfigError: the script has loaded a place, which another worker may have taken by now.
        """
        self.over()
        self._num_begun += 1
        self._is_dealt = self._takeover.bridge is not None and torch.is_grad_enabled()
        if not self._is_dealt:
            return False
        if first:
            raise ConfigError(
                "session.shard: under this strategy minibatches go to who asks, so a loader's state does not say which "
                "are done. Leave load_state_dict out: the loaders of a resumed run begin where it was"
            )
        while len(self._orders) >= MOST_ORDERS:
            del self._orders[next(iter(self._orders))]
        self._orders.pop(number, None)
        self._orders[number], self._epoch, self._num_drawn, self._is_ended = _Order(order), number, 0, False
        self._begun = self._made
        return True

    @property
    def is_over(self) -> bool:
        """Whether the other workers have gone through the iteration that this newcomer's loop begins next."""
        return self._num_begun < self._over

    def draw(self) -> Dealt | None:
        """This worker's next minibatch of the iteration; None if there is none at present."""
        if not self._is_dealt:
            return None
        order = self._orders[self._epoch]
        if self._num_begun > self._over:
            self._fill()
        if not self._granted:
            total = order.end() * self._pieces
            if not self._is_ended and self._num_begun > self._over:
                self._is_ended = True
                self._ask(0, total=total)
            return None
        place = self._granted.popleft()
        batch, samples = self._batch(place)
        if samples == 0:  # a piece of a minibatch with fewer samples than pieces: there is nothing to do
            self._uses.append(v1.Use(epoch=place.epoch.number, place=place.number, step=-1))
            return self.draw()
        self._num_drawn += 1
        self._drawn.append((place, samples))
        return batch, samples

    def take(self) -> None:
        """The loop takes the next minibatch that was drawn, for its next step."""
        place, samples = self._drawn.popleft() if self._is_dealt else (None, 0)
        if place is None:
            return
        if self._takeover.is_again():  # this step changes nothing, so the minibatch comes again
            self._granted.append(place)
            return
        step = self._takeover.steps()
        self._takeover.own_data |= step is None
        self._taken_for = step
        use = v1.Use(epoch=place.epoch.number, place=place.number, samples=samples or 0)
        if step is not None:
            use.step = step
        self._uses.append(use)
        self._ask(0 if self._granted else 1)

    def over(self) -> None:
        """The loop goes through this iteration no further. It does not use what was drawn ahead."""
        self.report()
        if self._num_drawn and self._begun == self._made and not self._drawn:
            self._takeover.own_data = True  # nobody knows what for
        ahead = [place for place, _ in self._drawn if place is not None] + list(self._granted)
        self._drawn.clear()
        self._granted.clear()
        self._num_drawn = 0
        if ahead:
            self._uses += [v1.Use(epoch=place.epoch.number, place=place.number) for place in ahead]
            self._ask(0)

    def count(self, total: int) -> int:
        """Number of this worker's minibatches out of so many of one process: see `LoaderDeals.count`."""
        takeover = self._takeover
        ranks = takeover.roster.now if self._num_begun else range(takeover.num_at_first)
        first = ranks.index(takeover.rank) if takeover.rank in ranks else 0
        if self._num_drawn:  # in an iteration, of which a newcomer gets a part
            self.report()
            return self._num_drawn + len(self._granted) + self._rest
        return len(range(first, total * self._pieces, len(ranks)))

    def rest(self) -> int:
        """Number of minibatches that the loop can take now, at least; 0 if none is left for it. May ask."""
        if not self._is_dealt or self._num_begun <= self._over:
            return 1  # draw() says
        self._fill()
        return len(self._drawn) + len(self._granted)

    def report(self) -> None:
        """Waits until the coordinator knows what the next step uses."""
        asked, self._asked = self._asked, None
        bridge = self._takeover.bridge
        if asked is not None and bridge is not None:
            places, self._rest = bridge.result(asked)
            self._granted.extend(place for place in places if self._has(place))

    def _batch(self, place: LoopBatch) -> Dealt:
        """The minibatch of a place, or the piece of one, and its number of samples."""
        batch = self._orders[place.epoch.number].get(place.number // self._pieces)
        if self._pieces > 1:
            batch = self._cut(batch, slice(place.number % self._pieces, None, self._pieces))
        samples = self._size(batch)
        if samples is None and self._pieces > 1 and isinstance(batch, list | tuple | str):
            samples = len(batch)
        return batch, samples

    # ---- questions ----------------------------------------------------------------------

    def _fill(self) -> None:
        """Asks for a place, unless there is one."""
        self.report()
        while not self._granted:
            in_hand = self._drawn or self._taken_for == self._takeover.steps()  # for which others may wait
            waits = self._takeover.is_last() and not in_hand
            self._ask(1, last=waits)
            assert self._asked is not None
            assert self._takeover.bridge is not None
            places, self._rest = self._takeover.bridge.result(self._asked)
            self._asked = None
            self._granted.extend(place for place in places if self._has(place))
            if not places:
                return

    def _has(self, place: LoopBatch) -> bool:
        """Whether there is a minibatch of this place. An epoch may have fewer than its sampler says."""
        order = self._orders[place.epoch.number]
        if order.get(place.number // self._pieces) is not None:
            return True
        self._is_ended = True
        self._ask(0, total=order.end() * self._pieces)
        return False

    def _ask(self, wanted: int, *, total: int | None = None, last: bool = False) -> None:
        """Sends a question, and does not wait for the answer but for that of the one before."""
        bridge = self._takeover.bridge
        if bridge is None:
            return
        self.report()
        oldest = self._epoch
        while oldest - 1 in self._orders:
            oldest -= 1
        request = v1.Draw(
            number=self._takeover.number_of_question(),
            loader=self._loader
            + (FRESH if self._place is not None and self._place.places.starts_over else 0),
            epoch=self._epoch,
            total=self._total() * self._pieces if total is None else total,
            ended=total is not None,
            wanted=wanted,
            oldest=oldest,
            last=last,
            unclear=self._takeover.is_unclear(),
            uses=self._uses,
        )
        self._uses = []
        self._asked = bridge.spawn(partial(_draw, request))

    # ---- state --------------------------------------------------------------------------

    def left(self) -> Counter[int]:
        """Nothing: the coordinator knows what lost workers had left."""
        return Counter()

    def saved(self) -> dict[str, Any]:
        """What a newcomer has to know, as JSON."""
        return {"over": max(0, self._num_begun - 1)}

    def load(self, came: Mapping[str, Any]) -> None:
        """Goes on, in a run that had begun, from what `saved` of another worker has returned."""
        self._over = came["over"]

    @property
    def _made(self) -> Sequence[int]:
        bridge = self._takeover.bridge
        return () if bridge is None else (bridge.counts.batches, bridge.counts.steps)


async def _draw(request: v1.Draw, context: LoopContext) -> tuple[list[LoopBatch], int]:
    with context.replica.away() if request.last else nullcontext():
        return await context.endings.draw(request)
