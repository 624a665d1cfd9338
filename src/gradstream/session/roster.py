"""Who makes which rounds: workers are lost, and come, between two of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

FIRST = -(1 << 53)
"""Before all rounds."""


class Change(NamedTuple):
    """From a round on, these workers make the rounds.

    Args:
        number: number of the round.
        ranks: their ranks, ascending.
        entered: those of them that have come with this round, perhaps in the place of a lost worker of that rank.
    """

    number: int
    ranks: tuple[int, ...]
    entered: tuple[int, ...] = ()


class Roster:
    """Which workers make which rounds, as far as is known.

    Args:
        num_workers: number of workers at the beginning.

    Attributes:
        changes: ascending by round. The first says who was there at the beginning.
    """

    def __init__(self, num_workers: int) -> None:
        self.changes = [Change(FIRST, tuple(range(num_workers)))]
        self._is_known = False  # who was there at the beginning

    def change(self, number: int, ranks: Sequence[int], entered: Sequence[int] = ()) -> None:
        """Notes who makes the rounds from this one on. The first call says who has begun the run."""
        if self._is_known and not entered and tuple(sorted(ranks)) == self.now:
            return
        number, self._is_known = number if self._is_known else FIRST, True
        before = self.changes.pop() if self.changes[-1].number == number else None
        new = {*entered, *(() if before is None else before.entered)}
        self.changes.append(Change(number, tuple(sorted(ranks)), tuple(sorted(new.intersection(ranks)))))

    def of(self, number: int) -> tuple[int, ...]:
        """The workers of a round; in a resumed run, rounds before it have negative numbers."""
        return next(change.ranks for change in reversed(self.changes) if change.number <= number)

    @property
    def now(self) -> tuple[int, ...]:
        """The workers of the newest rounds."""
        return self.changes[-1].ranks

    def since(self, rank: int, number: int) -> int | None:
        """The round with which a worker of round `number` has come; None if it was there from the beginning."""
        came = [
            change.number for change in self.changes if change.number <= number and rank in change.entered
        ]
        return came[-1] if came else None

    @property
    def lost(self) -> set[int]:
        """The ranks of workers that were lost, also where another process has come in their place."""
        return {
            rank
            for before, after in pairwise(self.changes)
            for rank in before.ranks
            if rank not in after.ranks or rank in after.entered
        }

    @property
    def newest(self) -> tuple[int, ...]:
        """Of the present workers, those that came last; () if all were there at the beginning."""
        number = self.changes[-1].number
        came = {rank: since for rank in self.now if (since := self.since(rank, number)) is not None}
        return tuple(rank for rank, since in came.items() if since == max(came.values()))

    @property
    def first(self) -> int:
        """The rank of the worker that has been there for longest; of several, the lowest."""
        number = self.changes[-1].number
        since = {rank: self.since(rank, number) for rank in self.now}
        return min(
            self.now, key=lambda rank: (FIRST if since[rank] is None else since[rank], rank), default=0
        )

    def saved(self) -> list[Any]:
        """As JSON."""
        return [list(change) for change in self.changes]

    def load(self, saved: Iterable[tuple[int, Sequence[int], Sequence[int]]]) -> None:
        """Takes what `saved` of another worker has returned."""
        self._is_known = True
        self.changes = [Change(number, tuple(ranks), tuple(entered)) for number, ranks, entered in saved]
