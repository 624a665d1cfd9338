"""Deals out what lost workers had left of an epoch, where all loops make their rounds together.

Every worker draws the order of the whole epoch, and all take their minibatches in step: the c-th one of each is in the
same round. So each worker knows by itself which minibatches of a lost worker are not in the model, and who takes which
of them. That needs no message.

    column               0    1    2    3  |  4
    its round            7    8    9   10  | 11
    worker-0             a    b    c    d  |  g
    worker-1, lost       e    f   (g)  (h) |           before round 9 was whole
    worker-2             i    j    k    l  |  h

If another worker dies in the new columns, its rest is dealt out in the next ones. Where there are fewer minibatches
than workers, the last ones repeat a minibatch, which counts no samples.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from gradstream.session.loaders_part import Takeover

Part = list[tuple[Any, int | None]]
"""A worker's minibatches of an epoch, each with the samples that it counts; None if that cannot be seen."""


def deal(parts: Mapping[int, Part], rounds: Sequence[int], lost: Mapping[int, int]) -> None:
    """Moves the minibatches of lost workers that are not in the model to the ends of the others' parts.

    Args:
        parts: the minibatches of each worker by rank; those of survivors are equally many. Changed in place.
        rounds: the round of each column so far, ascending.
        lost: by rank of each lost worker, the first round that was made without it.
    """
    rest: Part = []
    for rank in sorted(lost.keys() & parts.keys()):
        first = bisect_left(rounds, lost[rank])
        rest += [one for one in parts[rank][first:] if one[1] != 0]
        del parts[rank][first:]
    survivors = sorted(parts.keys() - lost.keys())
    for number in range(0, len(rest), len(survivors)):
        for place, rank in enumerate(survivors, number):
            is_there = place < len(rest)
            parts[rank].append(rest[place] if is_there else (rest[number][0], 0))


class EpochDeal:
    """One epoch of a loader, as a worker goes through it.

    Args:
        number: number of the epoch.
        takeover: the session's place in the run.
        rank: rank of this worker.
        num_workers: number of workers at the beginning.
        part_of: returns the minibatches of an epoch and a rank; None if they are not known any more.
    """

    def __init__(
        self,
        number: int,
        takeover: Takeover,
        rank: int,
        num_workers: int,
        part_of: Callable[[int, int], Part | None],
    ) -> None:
        self._number = number
        self._takeover = takeover
        self._rank = rank
        self._num_workers = num_workers
        self._part_of = part_of
        self._parts: dict[int, Part] = {}  # by rank, once a worker is lost
        self._rounds: list[int | None] = []  # of each minibatch; None: not known yet in a resumed loop
        self._begun = self._done  # hand-overs and steps of the loop before
        self._is_ended = False  # the loop went through its own part to the end; else it may have broken off
        self._is_validation = False  # without a step of the loop
        self._is_closed = False

    def next(self) -> None:
        """Notes the round of the next minibatch."""
        number = self._takeover.steps()
        if (
            number is not None and None in self._rounds[-1:]
        ):  # whoever skips in a resumed run has numbers below 0
            self._rounds = [min(number, 0) if one is None else one for one in self._rounds]
        self._rounds.append(number)

    def end(self) -> None:
        """Notes that the loop has come to the end of its own part."""
        self._is_ended, self._is_validation = True, self._begun == self._done

    def rest(self) -> Iterator[Part]:
        """What this worker takes of the lost ones' minibatches, one after the other, until none is left."""
        while self._is_ended and not self._is_closed and (lost := self._lost) and self._knows_parts:
            own, done = self._parts[self._rank], len(self._rounds)
            deal(self._parts, self._known_rounds, lost)
            if len(own) == done:
                return
            for one in own[done:]:
                self.next()
                yield [one]

    def close(self) -> None:
        """Deals out nothing more of a validation: what is lost later was lost in training."""
        self._is_closed = self._is_validation

    def undealt(self) -> dict[int, int]:
        """By rank of a lost worker, its minibatches that are in no round, though the others have gone past them."""
        found, known, done = dict[int, int](), self._known_rounds, len(self._rounds)
        lost = {
            rank: first for rank, number in self._lost.items() if (first := bisect_left(known, number)) < done
        }
        dealt = sum(samples != 0 for part in self._parts.values() for _, samples in part[done:])
        if not (lost or dealt) or self._is_validation:
            return found
        if not self._is_ended or not self._knows_parts:
            self._takeover.own_data = (
                True  # the loop has broken off: workers have drawn it to different places
            )
            return found
        for rank, first in lost.items():
            found[rank] = sum(samples != 0 for _, samples in self._parts[rank][first:done])
        if dealt:  # and not used: the loop ended before
            rank = min(self._lost)
            found[rank] = found.get(rank, 0) + dealt
        return found

    @property
    def is_whole(self) -> bool:
        """Whether all of its rounds are over."""
        number = self._takeover.steps()
        return not self._rounds or (number is not None and (self._rounds[-1] or 0) < number)

    @property
    def _lost(self) -> dict[int, int]:
        bridge = self._takeover.bridge
        return {} if bridge is None else bridge.lost(self._num_workers)

    @property
    def _knows_parts(self) -> bool:
        """Whether the minibatches of all ranks are known: they are made once a worker is lost."""
        if not self._parts:
            parts = {rank: self._part_of(self._number, rank) for rank in range(self._num_workers)}
            self._parts = {rank: part for rank, part in parts.items() if part is not None}
        if len(self._parts) < self._num_workers:
            self._takeover.own_data = True
        return len(self._parts) == self._num_workers

    @property
    def _known_rounds(self) -> list[int]:
        return [0 if one is None else one for one in self._rounds]

    @property
    def _done(self) -> tuple[int, int] | None:
        bridge = self._takeover.bridge
        return None if bridge is None else (bridge.counts.batches, bridge.counts.steps)


class LoaderDeals:
    """The latest epochs of one loader.

    A round may begin in one epoch and end in the next. So what a lost worker had left of an epoch may be known only
    when the next one is under way, and is dealt out at the end of that.

    Args:
        takeover: the session's place in the run.
        rank: rank of this worker.
        num_workers: number of workers at the beginning.
        part_of: see `EpochDeal`.
    """

    MOST = 3
    """Epochs whose rounds may not be over."""

    def __init__(
        self, takeover: Takeover, rank: int, num_workers: int, part_of: Callable[[int, int], Part | None]
    ) -> None:
        self._takeover = takeover
        self._make = partial(
            EpochDeal, takeover=takeover, rank=rank, num_workers=num_workers, part_of=part_of
        )
        self._epochs: list[EpochDeal] = []
        self._undealt: Counter[int] = Counter()  # of epochs before these

    def begin(self, number: int) -> EpochDeal:
        """The loop begins an epoch."""
        while self._epochs and (self._epochs[0].is_whole or len(self._epochs) == self.MOST):
            oldest = self._epochs.pop(0)
            self._takeover.own_data |= not oldest.is_whole
            self._undealt.update(oldest.undealt())
        epoch = self._make(number)
        self._epochs.append(epoch)
        return epoch

    def rest(self, epoch: EpochDeal) -> Iterator[Part]:
        """What this worker takes of lost ones' minibatches at the end of an epoch, also of earlier ones."""
        epoch.end()
        for one in self._epochs:
            if one is not epoch:
                yield from one.rest()
        yield from epoch.rest()
        epoch.close()

    def undealt(self) -> Counter[int]:
        """See `EpochDeal.undealt`, of all epochs."""
        undealt = Counter(self._undealt)
        for epoch in self._epochs:
            undealt.update(epoch.undealt())
        return undealt
