"""Deals out the minibatches of a loader to workers that make their rounds together, whoever they are at the moment.

Every worker draws the same order of the whole epoch, and all take their minibatches in step: the c-th one of each is in
the same round. Each column of this table is dealt when the loops draw it, to the workers that made the round before. So
each worker knows by itself who takes which minibatch, and which of them are in the model. That needs no message.

    column           0    1    2    3    4    5
    its round        7    8    9   10   11   12
    worker-0         a    d    g    i    k    n
    worker-1         b    e   (h)                   lost in round 9: h goes back, and is dealt before j
    worker-2         c    f         h    l    o
    worker-3                   -    j    m    p     came in round 9, with a minibatch that counts no samples

A loader's processes draw some columns ahead of the loop. What a lost worker had in these goes back too. Where there are
fewer minibatches than workers, the last ones repeat one that counts no samples.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, NamedTuple

import torch

from gradstream.session.loaders_part import Dealt, Takeover, packed
from gradstream.session.places import LoaderPlace
from gradstream.session.roster import FIRST

# ---- deals -------------------------------------------------------------------------------


class Item(NamedTuple):
    """A minibatch, or one of the pieces into which it is split.

    Args:
        epoch: number of the epoch.
        place: index of the minibatch in the order of one process.
        piece, pieces: which piece, and of how many.
    """

    epoch: int
    place: int
    piece: int = 0
    pieces: int = 1


@dataclass(slots=True)
class _Column:
    """The minibatches that the workers take at the same time.

    Args:
        drawn: number of the round that was next when it was dealt.
        iteration: index of the iteration in which it was dealt.
        items: by rank.
        redone: those of them that lost workers had before, with the ranks of these.
        round: its round, once the loop has taken it; None where a resumed loop does not know the number yet.
        is_unclear: the loop took it in an iteration without a step, so nobody knows what it was for.
    """

    drawn: int
    iteration: int
    items: dict[int, Item]
    redone: dict[Item, int] = field(default_factory=dict)
    round: int | None = None
    is_unclear: bool = False


@dataclass(slots=True)
class _Iteration:
    """An iteration over the loader.

    Args:
        number: number of its epoch, which decides its order.
        order: the minibatches of one process that are not dealt yet.
        begun: what the loop had made at its beginning.
        trains: gradients were on at its beginning.
        next_place: index of the next minibatch of `order`.
        num_drawn: number of minibatches that this worker has drawn.
        num_taken: of these, those that the loop has taken.
    """

    number: int
    order: Iterator[Any] = field(default_factory=lambda: iter(()))
    begun: tuple[int, int] | None = None
    trains: bool = True
    next_place: int = 0
    num_drawn: int = 0
    num_taken: int = 0


class LoaderDeals:
    """Deals out one loader's minibatches.

    Args:
        takeover: the session's place in the run.
        rank: rank of this worker.
        split: each minibatch is split among the workers.
        cut: returns a slice of the samples of a minibatch.
        size: returns the number of samples of a minibatch, or None if that cannot be seen.
        place: the loop's place in the loader, from which a resumed loop continues.
        is_finite: the sampler has a length.
    """

    def __init__(
        self,
        takeover: Takeover,
        rank: int,
        split: bool,
        cut: Callable[[Any, slice], Any],
        size: Callable[[Any], int | None],
        place: LoaderPlace | None = None,
        *,
        is_finite: bool = True,
    ) -> None:
        self.is_finite = is_finite
        self._takeover = takeover
        self._rank = rank
        self._split = split
        self._cut = cut
        self._size = size
        self._num_begun = 0  # iterations
        self._iteration = _Iteration(-1)
        self._columns: deque[_Column] = deque()  # dealt, and not in the model as far as this worker knows
        self._num_taken = 0  # the first columns, which the loop has taken
        self._returned: deque[tuple[Item, int]] = deque()  # what lost workers, of these ranks, had
        self._batches: dict[tuple[int, int], Any] = {}  # by epoch and place, of all items above
        self._repeat: Any = None  # the first minibatch of the epoch
        self._came: Mapping[str, Any] | None = None  # where the others are; None once this worker is there
        self._place = place
        self._is_resumed = False  # has read the place of a resumed run
        self._entered = FIRST  # with this round
        self._repeats = 0  # what a newcomer may still draw before its first round is over
        self._repeated = 0  # and has drawn, but not taken

    # ---- what the sampler and the loop do -----------------------------------------------

    def begin(self, number: int, order: Iterator[Any], first: int = 0) -> bool:
        """The loop begins an iteration, the epoch of this number, over the minibatches of one process.

        Args:
            number: number of the epoch.
            order: the minibatches, from `first` on.
            first: place of the first of them, not 0 if the loop continues at a saved place.

        Returns:
            True: all iterations are dealt.
        """
        self.over()
        place = None if self._came is not None or self._is_resumed else self._place
        resumed = None if place is None else place.resumed
        if resumed is not None and self._num_begun >= resumed["early"]:
            self._is_resumed = True
            self._came = {"over": resumed["over"], "place": resumed["place"]}
            self._returned.extend((Item(*item), rank) for *item, rank in resumed["returned"])
            self._batches = {item[:2]: None for item in self._items()}
        index, came = self._num_begun, self._came
        self._num_begun += 1
        self._iteration = iteration = _Iteration(number, order, self._made, torch.is_grad_enabled())
        iteration.next_place = first
        if came is None:
            return True
        passed = (
            order if index < came["over"] else islice(order, came["place"] if index == came["over"] else 0)
        )
        for done, batch in enumerate(passed):  # generators of the user's own advance as on the others
            self._keep(Item(number, done), batch, wanted=True)
            iteration.next_place = done + 1
            if not self.is_finite and index < came["over"]:
                break  # what is left of an iteration that was broken off has no end
        if index >= came["over"]:  # it is where the others are
            self._came = None
        return True

    @property
    def is_over(self) -> bool:
        """Whether the other workers have gone through the iteration that this newcomer's loop begins next."""
        return self._came is not None and self._num_begun < self._came["over"]

    def draw(self) -> Dealt | None:
        """This worker's next minibatch of the iteration; None if none is left."""
        if self._came is not None:
            return None  # the others have gone through it
        number = self._takeover.steps() or 0
        if number <= self._entered:  # the others have dealt what is taken with this newcomer's first round
            if not self._repeats:
                return None
            self._repeats, self._repeated = self._repeats - 1, self._repeated + 1
            self._iteration.num_drawn += 1
            return self._of(None)
        self._settle()
        column = _Column(number, self._num_begun, {})
        # With the first round of a phase all know who makes it.
        known = number - (number != self._takeover.first_of_phase)
        self._deal(column, self._takeover.roster.of(known))
        if not column.items:
            return None
        self._columns.append(column)
        self._iteration.num_drawn += 1
        return self._of(column.items.get(self._rank))

    def take(self) -> None:
        """The loop takes the next minibatch that was drawn."""
        number = self._takeover.steps()
        self._iteration.num_taken += 1
        if self._repeated:
            self._repeated -= 1
            if number is None or number <= self._entered:
                return  # in this newcomer's first round; later ones were dealt to the others before
        if self._num_taken < len(self._columns):
            if number is not None:  # whoever skips in a resumed run has numbers below 0
                for column in list(self._columns)[: self._num_taken]:
                    column.round = min(number, 0) if column.round is None else column.round
            self._columns[self._num_taken].round = number
            self._num_taken += 1

    def over(self) -> None:
        """The loop goes through this iteration no further. What was drawn ahead of it is dropped."""
        if self._came is not None:
            return  # a newcomer has not come to where the others are
        while len(self._columns) > self._num_taken:
            self._drop(self._columns.pop())
        iteration = self._iteration
        iteration.num_drawn = iteration.num_taken = 0
        if iteration.begun != self._made:
            return
        for column in self._columns:  # without a step
            if column.iteration == self._num_begun and iteration.trains:
                column.is_unclear = True
            elif column.iteration == self._num_begun:  # a validation: nothing of it is in any round
                self._drop(column)

    def count(self, total: int) -> int:
        """Number of this worker's minibatches out of so many, in the iteration that it is in, or in the next one.

        Before the first one it is what all workers have been told: see `Takeover`.
        """
        takeover = self._takeover
        workers = len(takeover.roster.now) if self._num_begun else takeover.num_at_first
        workers = 1 if self._split else workers
        return self._iteration.num_taken + self.rest(total) if self.is_open else -(-total // workers)

    def rest(self, total: int) -> int:
        """Of `count`, those that the loop has not taken yet."""
        self._settle()
        place, workers = self._iteration.next_place if self.is_open else 0, len(self._takeover.roster.now)
        if self._came is not None and self._num_begun == self._came["over"]:  # begins here
            place = self._came["place"]
        new, back = max(0, total - place), len(self._returned)
        dealt = max(len(self._columns) - self._num_taken, self._repeats + self._repeated)
        return dealt + (new + -(-back // workers) if self._split else -(-(new + back) // workers))

    def left(self) -> Counter[int]:
        """By rank of a lost worker, its minibatches that are in no round, though the loop has ended."""
        self._settle(at_end=True)
        number, left = self._takeover.steps() or 0, Counter(rank for _, rank in self._returned)
        for column in self._columns:
            if column.round is None or column.round >= number:
                left.update(column.redone.values())
        return left

    # ---- columns ------------------------------------------------------------------------

    def _settle(self, *, at_end: bool = False) -> None:
        """Lets go of columns that are in the model, and takes back what lost workers had in others."""
        number, roster = self._takeover.steps(), self._takeover.roster
        if number is None:
            return
        newest = max(number - 1, roster.changes[-1].number) if at_end else number - 1
        back: list[tuple[Item, int]] = []
        for index, column in enumerate(self._columns):
            is_over = index < self._num_taken and column.round is not None and column.round < number
            last = column.round if is_over and column.round is not None else newest
            for rank, item in list(column.items.items()):
                since = roster.since(rank, last)
                if rank in roster.of(last) and (since is None or since < column.drawn):
                    continue
                del column.items[rank]
                if column.is_unclear:
                    self._takeover.own_data = True
                    self._forget(item)
                else:
                    back.append((item, column.redone.get(item, rank)))
        self._returned.extend(sorted(back))
        while self._num_taken and self._columns[0].round is not None and self._columns[0].round < number:
            self._num_taken -= 1
            for item in self._columns.popleft().items.values():
                self._forget(item)

    def _deal(self, column: _Column, ranks: Sequence[int]) -> None:
        """Deals a column to these workers; nothing, if nothing is left."""
        if self._split and (place := self._next()) is not None:
            samples = self._size(_unpacked(self._batches[place]))
            some = ranks if samples is None else ranks[:samples]
            column.items = {rank: Item(*place, piece, len(ranks)) for piece, rank in enumerate(some)}
            return
        for rank in ranks:  # pieces come back when no minibatch is left
            if self._returned:
                item, had = self._returned.popleft()
                column.redone[item] = had
            elif not self._split and (place := self._next()) is not None:
                item = Item(*place)
            else:
                return
            column.items[rank] = item

    def _drop(self, column: _Column) -> None:
        """The loop does not use what it had drawn; what lost workers had goes back."""
        items, column.items = column.items, {}
        self._returned.extendleft(column.redone.items())
        for item in items.values():
            if item not in column.redone:
                self._forget(item)
        column.redone = {}

    def _next(self) -> tuple[int, int] | None:
        """Epoch and place of the next minibatch in the order of one process."""
        iteration = self._iteration
        for batch in iteration.order:
            item = Item(iteration.number, iteration.next_place)
            self._keep(item, batch)
            iteration.next_place += 1
            return item[:2]
        return None

    def _of(self, item: Item | None) -> Dealt:
        """The minibatch of an item; None: the repeat that counts no samples."""
        if item is None:
            iteration = self._iteration
            if self._repeat is None and (first := next(iteration.order, None)) is not None:
                iteration.order, self._repeat = chain([first], iteration.order), packed(first)
            repeat = _unpacked(self._repeat)
            # A piece of the usual size, since some layers refuse a single sample.
            pieces = len(self._takeover.roster.now)
            return (self._cut(repeat, slice(0, None, pieces)) if self._split else repeat), 0
        batch = _unpacked(self._batches[item[:2]])
        if item.pieces > 1:
            batch = self._cut(batch, slice(item.piece, None, item.pieces))
        samples = self._size(batch)
        if samples is None and self._split and isinstance(batch, list | tuple | str):
            samples = len(batch)
        return batch, samples

    def _keep(self, item: Item, batch: Any, *, wanted: bool = False) -> None:
        """Keeps a minibatch as long as a column or a lost worker has it.

        Args:
            item: the minibatch.
            batch: what the sampler has drawn.
            wanted: keep it only if it is one of those that have a place already.
        """
        if item.place == 0:
            self._repeat = packed(batch)
        if not wanted or item[:2] in self._batches:
            self._batches[item[:2]] = packed(batch)

    def _forget(self, item: Item) -> None:
        """Forgets a minibatch, unless another piece of it is still needed."""
        if item.pieces == 1 or not any(one[:2] == item[:2] for one in self._items()):
            self._batches.pop(item[:2], None)

    def _items(self) -> Iterator[Item]:
        """All items that somebody has, or had."""
        yield from (item for item, _ in self._returned)
        for column in self._columns:
            yield from column.items.values()

    # ---- state --------------------------------------------------------------------------

    @property
    def mark(self) -> tuple[int, int]:
        """What is equal on workers that have dealt the same: iterations, and the place in the present one."""
        return self._num_begun, self._iteration.next_place if self.is_open else 0

    @property
    def is_open(self) -> bool:
        """Whether the loop goes through an iteration."""
        return self._iteration.num_drawn > 0

    def has_round(self, number: int) -> bool:
        """Whether the loop has taken a minibatch for this round."""
        return any(column.round == number for column in self._columns)

    def resting(self, over: int) -> dict[str, Any]:
        """Where a resumed run goes on, as JSON: from the first minibatch that the loop has not taken.

        Args:
            over: number of iterations that the loop goes through no further.
        """
        if over == self._num_begun:
            self.over()
        self._settle()
        ahead = list(self._columns)[self._num_taken :]
        returned = [one for column in ahead for one in column.redone.items()] + list(self._returned)
        places = [
            item.place for column in ahead for item in column.items.values() if item not in column.redone
        ]
        place = 0 if over == self._num_begun else min(places, default=self._iteration.next_place)
        return {"place": place, "returned": [[*item, rank] for item, rank in returned]}

    def saved(self) -> dict[str, Any]:
        """What a newcomer has to know, as JSON. Call it while the loop waits for the exchange of a round."""
        return {
            "over": self._num_begun - self.is_open,
            "place": self._iteration.next_place,
            "round": (self._takeover.steps() or 0) - 1,
            "returned": [[*item, rank] for item, rank in self._returned],
            "taken": self._num_taken,
            "columns": [
                {
                    "drawn": [column.drawn, column.iteration],
                    "items": [[rank, *item] for rank, item in column.items.items()],
                    "redone": [[rank, *item] for item, rank in column.redone.items()],
                    "round": column.round,
                    "is_unclear": column.is_unclear,
                }
                for column in self._columns
            ],
        }

    def load(self, came: Mapping[str, Any]) -> None:
        """Goes on, in a run that had begun, from what `saved` of another worker has returned: perhaps once more."""
        self._came, self._repeated = came, 0
        self._columns.clear()
        self._returned.clear()
        for one in came["columns"]:
            items = {rank: Item(*item) for rank, *item in one["items"]}
            redone = {Item(*item): rank for rank, *item in one["redone"]}
            drawn, iteration = one["drawn"]
            self._columns.append(_Column(drawn, iteration, items, redone, one["round"], one["is_unclear"]))
        self._returned.extend((Item(*item), rank) for *item, rank in came["returned"])
        self._num_taken, self._entered = came["taken"], came["round"]
        for column in islice(self._columns, self._num_taken):
            column.iteration = -1  # of others
        in_round = sum(column.round == came["round"] for column in self._columns)
        # A newcomer's first round has one step, where a round of the others has several.
        in_round = -(-in_round // self._takeover.steps_a_round)
        self._repeats = len(self._columns) - self._num_taken + in_round
        self._batches = {item[:2]: None for item in self._items()}

    @property
    def _made(self) -> tuple[int, int] | None:
        """Rounds that the loop has submitted, and its steps; None before it can make any."""
        bridge = self._takeover.bridge
        return None if bridge is None else (bridge.counts.batches, bridge.counts.steps)


def _unpacked(batch: Any) -> Any:
    return batch.tolist() if isinstance(batch, array) else batch
