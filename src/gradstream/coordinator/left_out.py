"""`LeftOut`: the rounds of lost workers, where workers exchange in pairs and rounds go on without them. Pure.

    worker r is lost            its part of each round that another worker has gone through is dropped
    a new process joins as r    nothing more is dropped: it copies another worker's state, and goes on in its round
    its first receipt comes     its part of the rounds before that one is dropped

What is dropped is in the summary of the run.
"""

from __future__ import annotations

from collections.abc import Iterable

from gradstream.data.base import BatchRef
from gradstream.data.ledger import Ledger


class LeftOut:
    """Drops what nobody computes.

    Args:
        ledger: the minibatches of the run.
    """

    KEPT = ("_gone", "_entering")
    """See `durable.state`."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._gone: set[int] = set()
        self._entering: set[int] = set()

    def lost(self, rank: int) -> None:
        """A worker is lost."""
        self._entering.discard(rank)
        self._gone.add(rank)
        self.settle()

    def joined(self, rank: int) -> None:
        """A new process has taken the place of a lost worker."""
        self._gone.discard(rank)
        self._entering.add(rank)

    def heard(self, rank: int, refs: Iterable[BatchRef], *, finished: bool) -> None:
        """Takes in receipts of a worker, which are in the ledger, and whether it is through with all rounds."""
        if rank in self._entering:
            plan = self._ledger.plan
            first = [plan.batches_before(rank, ref.epoch) + ref.batch for ref in refs]
            if first or finished:
                self._entering.discard(rank)
                self._ledger.leave_out(rank, min(first, default=self._ledger.most_begun))
        self.settle()

    def settle(self) -> None:
        """Drops the part of lost workers in rounds that others have gone through."""
        if self._gone:
            until = self._ledger.latest(but=self._gone) + 1
            for rank in sorted(self._gone):
                self._ledger.leave_out(rank, until)
