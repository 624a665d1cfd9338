"""`PhaseService`: tells nodes which phase of the job to join, before each one. The nodes' side is `phase_to_join`."""

from __future__ import annotations

from gradstream.coordinator.client.member import RunAbortedError, RunStoppedError
from gradstream.coordinator.client.presence import REDIAL_S
from gradstream.coordinator.nodes import COORDINATOR
from gradstream.errors import DeadlineError, PeerLostError
from gradstream.runtime.base import Runtime
from gradstream.runtime.deadlines import Deadlines
from gradstream.runtime.tasks import Wakeup
from gradstream.transport.base import Endpoint, Stream
from gradstream.wire import v1

# ---- phase service -----------------------------------------------------------------------

LOOK_S = 1.0
"""Seconds between two signs of life to a node that waits for a later phase."""


class PhaseService:
    """Serves "phase", through all phases of a run.

    Args:
        runtime: time.
        endpoint: endpoint of the coordinator.
    """

    def __init__(self, runtime: Runtime, endpoint: Endpoint) -> None:
        self._runtime = runtime
        self._now: v1.PresentPhase | None = None
        self._asking: dict[Wakeup, None] = {}
        self._answered = Wakeup()  # rings when a node has its answer
        endpoint.serve("phase", self._serve, model=False)

    def enter(self, number: int, resume: str) -> None:
        """Lets nodes join a phase.

        Args:
            number: number of the run's boundaries before it.
            resume: where it goes on, as JSON; "" where the run begins.
        """
        self._tell(v1.PresentPhase(number=number, resume=resume))

    async def end(self, last: v1.Notice, wait_s: float) -> None:
        """Tells the nodes that wait that no phase follows, by the run's last notice; for up to `wait_s`."""
        self._tell(
            v1.PresentPhase(end=last.status, error=last.error, reason=last.reason, culprit=last.culprit)
        )
        since_ns = self._runtime.now()
        while self._asking and (left_s := self._runtime.left_s(since_ns, wait_s)) > 0:
            await self._answered.rung(self._runtime, left_s)

    def _tell(self, now: v1.PresentPhase) -> None:
        self._now = now
        for wakeup in self._asking:
            wakeup.ring()

    async def _serve(self, stream: Stream) -> None:
        least, wakeup = v1.AskPhase.FromString(stream.opened.body).least, Wakeup()
        self._asking[wakeup] = None
        try:
            while (now := self._now) is None or not (now.end or now.number >= least):
                await stream.waiting([])
                await wakeup.rung(self._runtime, LOOK_S)
            await stream.send(v1.Frame(body=v1.Body(data=now.SerializeToString())))
        finally:
            del self._asking[wakeup]
            self._answered.ring()


# ---- phases ------------------------------------------------------------------------------
# Asks the coordinator which phase of the job to join. The coordinator's side is `phase_service`.


async def phase_to_join(
    runtime: Runtime, endpoint: Endpoint, deadlines: Deadlines, least: int
) -> tuple[int, str] | None:
    """Waits until a run is in a phase of its job, or in a later one.

    Args:
        runtime, endpoint: of this node.
        deadlines: `patience_s` bounds the time in which a new process of the coordinator has to answer.
        least: number of the run's boundaries before the first phase that this node may be needed in.

    Returns:
        The number of boundaries before the present phase, and where that goes on as JSON ("": the run begins). None:
        the run has finished.

    Raises:
        RunAbortedError, RunStoppedError: it has ended in another way.
        PeerLostError, DeadlineError: the coordinator cannot be reached.
    """
    request, lost_ns = v1.AskPhase(least=least), None
    while True:
        try:
            now = await endpoint.call(
                COORDINATOR,
                "phase",
                request,
                v1.PresentPhase,
                silence_s=deadlines.patience_s,
                new_connection=lost_ns is not None,
            )
            break
        except (PeerLostError, DeadlineError):
            lost_ns = lost_ns or runtime.now()
            if runtime.left_s(lost_ns, deadlines.patience_s) <= 0:
                raise
        await runtime.sleep(REDIAL_S)
    if now.end == v1.Notice.ABORTED:
        raise RunAbortedError(now.culprit, now.error, now.reason)
    if now.end == v1.Notice.STOPPED:
        raise RunStoppedError("the run was stopped; it can be resumed")
    return None if now.end else (now.number, now.resume)
