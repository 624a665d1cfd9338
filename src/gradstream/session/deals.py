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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from gradstream.session.loaders_part import Takeover

Part = list[tuple[Any, int | None]]
"""A worker's minibatches of an epoch, each with the samples that it counts; None if that cannot be seen."""


def deal(parts: Mapping[int, Part], rounds: Sequence[int], lost: Mapping[int, int]) -> None:
    """Moves the minibatches of lost workers that are not in the model to the ends of the others' parts.

    Args:
        parts: the minibatches of each worker by rank; those that are left have equally many. Changed in place.
        rounds: the round of each column so far, ascending.
        lost: by rank of each lost worker, the first round that was made without it.
    """
    rest: Part = []
    for rank in sorted(lost.keys() & parts.keys()):
        first = bisect_left(rounds, lost[rank])
        rest += [one for one in parts[rank][first:] if one[1] != 0]
        del parts[rank][first:]
    left = sorted(parts.keys() - lost.keys())
    for number in range(0, len(rest), len(left)):
        for place, rank in enumerate(left, number):
            is_there = place < len(rest)
            parts[rank].append(rest[place] if is_there else (rest[number][0], 0))


class EpochDeal:
    """One epoch of a loader, as a worker goes through it.

    A round may begin in one epoch and end in the next. So what a lost worker had left of an epoch may be known only
    when the next one is under way, and is dealt out at the end of that.

    Args:
        number: number of the epoch.
        before: the epoch before of the same loader; None in the first.
        takeover: the session's place in the run.
        rank: rank of this worker.
        num_workers: number of workers at the beginning.
        part_of: returns the minibatches of an epoch and a rank.
    """

    def __init__(
        self,
        number: int,
        before: EpochDeal | None,
        takeover: Takeover,
        rank: int,
        num_workers: int,
        part_of: Callable[[int, int], Part],
    ) -> None:
        self._number = number
        self._before = before
        self._part_of = part_of
        self._takeover = takeover
        self._rank = rank
        self._num_workers = num_workers
        earlier = None if before is None else before._before
        if before is not None and earlier is not None:
            oldest, earlier._before = earlier._before, None  # loaders remember the order of a few epochs
            takeover.own_data |= oldest is not None and not oldest._is_whole
            before._before = None if earlier._is_whole else earlier
        self._parts: dict[int, Part] = {}  # by rank, once a worker is lost
        self._rounds: list[int | None] = []  # of each minibatch; None: not known yet in a resumed loop
        self._begun: tuple[int, int] | None = None  # hand-overs and steps of the loop before

    def next(self) -> None:
        """Notes the round of the next minibatch."""
        if self._begun is None:
            self._begun = self._done
        number = self._takeover.steps()
        if number is not None:  # whoever skips iterations of a resumed run has numbers below 0
            self._rounds = [min(number, 0) if one is None else one for one in self._rounds]
        self._rounds.append(number)

    def rest(self) -> Iterator[Part]:
        """What this worker takes of the lost ones' minibatches, one after the other, until none is left."""
        if self._before is not None:
            yield from self._before.rest()
        bridge = self._takeover.bridge
        if bridge is None or self._begun is None or self._begun == self._done:
            return  # no step was made of this epoch: a validation
        while lost := bridge.lost(self._num_workers):
            own, done = self._all_parts()[self._rank], len(self._rounds)
            deal(self._parts, self._known_rounds, lost)
            if len(own) == done:
                return
            for one in own[done:]:
                self.next()
                yield [one]

    def left(self) -> dict[int, int]:
        """By rank of a lost worker, its minibatches that are in no round, though the others have gone past them."""
        bridge, found = self._takeover.bridge, {} if self._before is None else self._before.left()
        lost = {} if bridge is None else bridge.lost(self._num_workers)
        for rank, number in lost.items():
            first, done = bisect_left(self._known_rounds, number), len(self._rounds)
            rest = self._all_parts()[rank][first:done] if first < done else []
            found[rank] = found.get(rank, 0) + sum(samples != 0 for _, samples in rest)
        return found

    def _all_parts(self) -> dict[int, Part]:
        """The minibatches of each rank: drawn again, once a worker is lost."""
        if not self._parts:
            self._parts = {rank: self._part_of(self._number, rank) for rank in range(self._num_workers)}
        return self._parts

    @property
    def _known_rounds(self) -> list[int]:
        return [0 if one is None else one for one in self._rounds]

    def used(self) -> None:
        """Does nothing: a minibatch that the loop has not used is in no round, on any worker."""

    @property
    def _is_whole(self) -> bool:
        """Whether all of its rounds are over."""
        number = self._takeover.steps()
        return not self._rounds or (number is not None and (self._rounds[-1] or 0) < number)

    @property
    def _done(self) -> tuple[int, int] | None:
        bridge = self._takeover.bridge
        return None if bridge is None else (bridge.counts.batches, bridge.counts.steps)
