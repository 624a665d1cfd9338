"""Shares of a round by measured speed, as a pure state machine: what workers took goes in, sizes come out.

Before each stretch of rounds (`data.shares`) every worker says how many samples it has gone through, and
how long their gradients took. Once all have, one decision is made of it, and all get the same.

    sᵢ = samples / seconds         T(b) = maxᵢ bᵢ / sᵢ, how long a round computes
    b* = argmin T, Σ bᵢ = B        taken if T(b*) < (1 - m) · T(b), m = max(threshold, 2 · maxᵢ errorᵢ)

errorᵢ is the relative standard error of sᵢ: where times vary, what seems to be a gain may be none, and
shares that followed it would change for ever. Where a gradient has a fixed part besides, sᵢ depends on
bᵢ, and what is repeated converges to equal times all the same.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from gradstream.data.base import Plan
from gradstream.data.joined import JoinedPlan
from gradstream.data.plan import RoundPlan
from gradstream.data.shares import Speed, dealt
from gradstream.events import SharesEvent

__all__ = ["THRESHOLD", "Balance"]

THRESHOLD = 0.05
"""Of a round's computing time: what other shares must gain at least."""

SURE = 2.0
"""Standard errors."""

Round = tuple[int, int]
"""(data epoch, round of it)."""


class Balance:
    """Decides who takes how much of a round.

    Args:
        plan: the coordinator's own: it is told what was decided, so that it knows who went through what.
        threshold: see the module.
    """

    def __init__(self, plan: Plan, threshold: float = THRESHOLD) -> None:
        assert isinstance(plan, RoundPlan | JoinedPlan)
        self.sizes: Sequence[int] = plan.sizes(0, 0)
        self._plan = plan
        self._threshold = threshold
        self._speeds = [Speed() for _ in self.sizes]
        self._asked: dict[int, Round] = {}  # by rank, before which round
        self._decided: Round | None = None

    def took(self, rank: int, before: Round, stretch: Speed) -> None:
        """A worker says what its gradients took since it said so last, and comes to this round.

        Saying it twice changes nothing.
        """
        if self._asked.get(rank) != before:
            self._asked[rank] = before
            self._speeds[rank].measured(stretch)

    def decide(self, present: Sequence[int]) -> SharesEvent | None:
        """Decides if there is something to decide, and all workers who are in wait for it.

        Args:
            present: their ranks.
        """
        rounds = {self._asked.get(rank) for rank in present}
        before = rounds.pop() if len(rounds) == 1 else None
        if before is None or before == self._decided:
            return None
        self._decided = before
        sizes = self._best(present)
        changed = sizes != tuple(self.sizes)
        self.sizes = sizes
        self._plan.allot(*before, sizes)
        per_s = [round(speed.per_s or 0.0, 3) for speed in self._speeds]
        return SharesEvent(
            epoch=before[0], batch=before[1], samples=list(sizes), per_s=per_s, changed=changed
        )

    def decided(self, before: Round) -> Sequence[int] | None:
        """The sizes from this round on; None while they are not decided."""
        return self.sizes if before == self._decided else None

    def _best(self, present: Sequence[int]) -> tuple[int, ...]:
        """The sizes to go on with. A lost worker gets nothing; one that had nothing is given the median's."""
        known = {rank: self._speeds[rank].per_s for rank in present}
        typical = statistics.median([speed for speed in known.values() if speed] or [1.0])
        speeds = {rank: speed or typical for rank, speed in known.items()}
        shares = dict(zip(speeds, dealt(sum(self.sizes), list(speeds.values())), strict=True))
        best = tuple(shares.get(rank, 0) for rank in range(len(self.sizes)))
        if any((size > 0) != (rank in speeds) for rank, size in enumerate(self.sizes)):
            return best

        def longest_s(sizes: Sequence[int]) -> float:
            return max(sizes[rank] / speed for rank, speed in speeds.items())

        margin = max(self._threshold, SURE * max(self._speeds[rank].error for rank in speeds))
        gains = longest_s(best) < (1 - margin) * longest_s(self.sizes)
        return best if gains else tuple(self.sizes)
