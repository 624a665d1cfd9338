"""A worker's side of shares by measured speed: it says what its gradients took, and does what is decided."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from gradstream.data.base import BatchRef
from gradstream.data.joined import JoinedPlan
from gradstream.data.plan import RoundPlan
from gradstream.data.shares import WorkerSpeed, begins_window, window_end

__all__ = ["ShareReporter", "ShareSource"]


class ShareSource(Protocol):
    """Whoever decides the shares: the coordinator, through `WorkerRequests`."""

    async def shares(self, ref: BatchRef, stretch: WorkerSpeed) -> Sequence[int]:
        """How many samples of a round each worker takes from `ref`'s round on."""
        ...


class ShareReporter:
    """Keeps a worker's plan at the shares that all workers go by.

    It knows nothing of strategies: minibatches pass it on their way out of the schedule, and the seconds
    of their gradients come from the events of steps.

    Args:
        plan: this worker's own.
        source: asked before each stretch of rounds but the first.
    """

    def __init__(self, plan: RoundPlan | JoinedPlan, source: ShareSource) -> None:
        self._plan = plan
        self._source = source
        self._steps = 0
        self._stretch = WorkerSpeed()

    def took(self, samples: int, seconds: float) -> None:
        """A gradient has been computed. The first one is left out: it pays for much that no other does."""
        self._steps += 1
        if self._steps > 1:
            self._stretch.took(samples, seconds)

    async def reach(self, ref: BatchRef) -> None:
        """This minibatch comes next: afterwards it is known which samples it has.

        Raises:
            PeerLostError, DeadlineError: the coordinator was lost.
        """
        if not begins_window(ref.batch):
            return
        sizes: Sequence[int] = self._plan.sizes(ref.epoch, ref.batch)
        if self._steps:
            sizes = await self._source.shares(ref, self._stretch)
            self._stretch = WorkerSpeed()
        self._plan.reassign(ref.epoch, ref.batch, sizes, until=window_end(ref.batch))
