"""A worker's side of shares by measured speed: it reports the time of its gradients, and follows the decision."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from gradstream.data.base import BatchRef
from gradstream.data.joined import JoinedPlan
from gradstream.data.plan import RoundPlan
from gradstream.data.shares import MANY, WorkerSpeed, begins_window, window_end


class ShareSource(Protocol):
    """Decides the shares: the coordinator, through `WorkerRequests`."""

    async def shares(self, ref: BatchRef, stretch: WorkerSpeed) -> Sequence[int]:
        """Number of samples of each worker in a round, from the round of `ref` on."""
        ...


class ShareReporter:
    """Keeps a worker's plan at the shares that all workers follow.

    Args:
        plan: this worker's own plan.
        source: asked for the shares before each rebalance window but the first.
    """

    def __init__(self, plan: RoundPlan | JoinedPlan, source: ShareSource) -> None:
        self._plan = plan
        self._source = source
        self._late = False
        self._steps = 0
        self._stretch = WorkerSpeed()

    def join_late(self) -> None:
        """Has the plan follow the shares of the round with which this worker begins: the others have gone on."""
        self._late = True

    def took(self, samples: int, seconds: float) -> None:
        """Notes the time of a gradient.

        The first one is left out, since it includes much that happens only once, unless it is of many minibatches.
        """
        self._steps += 1
        if self._steps > 1 or (isinstance(self._plan, JoinedPlan) and self._plan.k >= MANY):
            self._stretch.took(samples, seconds)

    async def reach(self, ref: BatchRef) -> None:
        """Makes sure that the plan knows the samples of this minibatch, which is the worker's next.

        Raises:
            PeerLostError, DeadlineError: the coordinator was lost.
        """
        late, self._late = self._late, False
        if not begins_window(ref.batch) and not late:
            return
        sizes: Sequence[int] = self._plan.sizes(ref.epoch, ref.batch)
        if self._steps or late:
            sizes = await self._source.shares(ref, self._stretch)
            self._stretch = WorkerSpeed()
        self._plan.reassign(ref.epoch, ref.batch, sizes, until=window_end(ref.batch))
