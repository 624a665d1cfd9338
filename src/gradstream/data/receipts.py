"""The receipts of one batch sequence, and the minibatches of it that can still be assigned.

A sequence numbers its minibatches from 0 over all epochs. It keeps a low-water mark, below which every number has its
receipt, and the few receipts above it. So its memory depends on the disorder of receipts, not on the length of the run.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

Piece = tuple[int, int]
"""(k, count): `count` consecutive numbers of a sequence, from k on."""


@dataclass(slots=True)
class Receipts:
    """The numbers that have a receipt. Numbers below 0 always have one: they precede a resume."""

    low: int = 0  # every number below has a receipt
    ahead: set[int] = field(default_factory=set)  # receipts at or above `low`

    @property
    def count(self) -> int:
        """The number of receipts for numbers from 0 on."""
        return self.low + len(self.ahead)

    def received(self, k: int) -> bool:
        """Whether number k has a receipt."""
        return k < self.low or k in self.ahead

    def add(self, k: int) -> bool:
        """Records a receipt. Returns False if it was there already."""
        if self.received(k):
            return False
        self.ahead.add(k)
        while self.low in self.ahead:
            self.ahead.remove(self.low)
            self.low += 1
        return True

    def next_missing(self, k: int) -> int:
        """The first number from k on without a receipt."""
        k = max(k, self.low)
        while k in self.ahead:
            k += 1
        return k

    def num_missing(self, begin: int, end: int) -> int:
        """The number of numbers in [begin, end) without a receipt."""
        begin = max(begin, self.low)
        return max(0, end - begin) - sum(begin <= k < end for k in self.ahead)


@dataclass(slots=True, kw_only=True)
class AssignableBatches(Receipts):
    """A batch sequence 0 … total-1 whose minibatches are assigned to workers."""

    total: int
    fresh: int = 0  # numbers from here on were never assigned
    returned: list[Piece] = field(default_factory=list)  # heap: assigned and taken back without a receipt

    def first(self) -> int | None:
        """Number of the first minibatch to assign: no worker has it, and it has no receipt. None if there is none."""
        while self.returned and self.received(self.returned[0][0]):
            k, count = heapq.heappop(self.returned)
            if count > 1:
                heapq.heappush(self.returned, (k + 1, count - 1))
        if self.returned:
            return self.returned[0][0]
        self.fresh = self.next_missing(self.fresh)
        return self.fresh if self.fresh < self.total else None

    def take(self, most: int, stop: int) -> Piece:
        """Assigns up to `most` consecutive numbers from the first one on, all below `stop`."""
        if not self.returned:
            piece = self.fresh, min(most, stop - self.fresh)
            self.fresh += piece[1]
            return piece
        k, count = heapq.heappop(self.returned)
        if count > most:
            heapq.heappush(self.returned, (k + most, count - most))
        return k, min(most, count)

    def give_back(self, piece: Piece) -> None:
        """Takes minibatches back from a worker that will not compute them."""
        heapq.heappush(self.returned, piece)

    def num_free(self, stop: int | None = None) -> int:
        """How many minibatches below `stop` no worker has; a few too many if some given back have receipts by now."""
        fresh = max(0, (self.total if stop is None else min(stop, self.total)) - self.fresh)
        return fresh + sum(count for k, count in self.returned if stop is None or k < stop)
