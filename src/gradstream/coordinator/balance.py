"""Shares of a round by measured speed, as a pure state machine: measurements go in, sizes come out.

Before each rebalance window of rounds (`data.shares`) every worker reports how many samples it has gone
through, and how long their gradients took. Once all have reported, `data.shares.better` decides the sizes
once, and all workers get the same.

A lost worker gets no samples from the next window on; until then another one computes its part. A new process in its
place asks for the sizes of the round with which it begins, and has a part again from the next window on.
"""

from __future__ import annotations

from collections.abc import Sequence

from gradstream.data.base import BatchPlan
from gradstream.data.joined import JoinedPlan
from gradstream.data.plan import RoundPlan
from gradstream.data.shares import WorkerSpeed, begins_window, better
from gradstream.telemetry.events import SharesEvent

Round = tuple[int, int]
"""(data epoch, round of it)."""


class ShareBalance:
    """Decides how many samples of a round each worker takes.

    Args:
        plan: the coordinator's plan, which gets each decision, so that it knows the samples of each worker.

    Attributes:
        sizes: by rank, the present number of samples.
    """

    KEPT = ("sizes", "_speeds", "_asked", "_decided")
    """See `durable.state`."""

    def __init__(self, plan: BatchPlan) -> None:
        assert isinstance(plan, RoundPlan | JoinedPlan)
        self.sizes: Sequence[int] = plan.sizes(0, 0)
        self._plan = plan
        self._speeds = [WorkerSpeed() for _ in self.sizes]
        self._asked: dict[int, Round] = {}  # by rank, before which round
        self._decided: Round | None = None

    def took(self, rank: int, before: Round, measured: WorkerSpeed) -> None:
        """Takes the speed that a worker measured before this round. Repeating it changes nothing."""
        if self._asked.get(rank) != before:
            self._asked[rank] = before
            self._speeds[rank].measured(measured)

    def joined(self, rank: int) -> None:
        """Forgets what the process has measured in whose place a worker takes part."""
        self._speeds[rank] = WorkerSpeed()
        self._asked.pop(rank, None)

    def decide(self, present: Sequence[int]) -> SharesEvent | None:
        """Decides the sizes if all workers of the ranks `present` wait for it."""
        rounds = {self._asked.get(rank) for rank in present}
        before = rounds.pop() if len(rounds) == 1 else None
        if before is None or before == self._decided:
            return None
        self._decided = before
        sizes = better(self.sizes, {rank: self._speeds[rank] for rank in present})
        changed = sizes != tuple(self.sizes)
        self.sizes = sizes
        self._plan.reassign(*before, sizes)
        per_s = [round(speed.per_s or 0.0, 3) for speed in self._speeds]
        return SharesEvent(
            epoch=before[0], batch=before[1], samples=list(sizes), per_s=per_s, changed=changed
        )

    def decided(self, before: Round) -> Sequence[int] | None:
        """Returns the sizes from this round on; None while they are not decided.

        Inside of a window, and in the first round of the run, they are known: there a new process asks.
        """
        first = self._plan.nth(0, 0)
        if not begins_window(before[1]) or before == (first.epoch, first.batch):
            return self._plan.sizes(*before)
        return self.sizes if before == self._decided else None
