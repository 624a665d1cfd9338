"""Asks the coordinator which phase of the job to join. The coordinator's side is `phase_service`."""

from __future__ import annotations

from gradstream.coordinator.client.member import RunAbortedError, RunStoppedError
from gradstream.coordinator.client.presence import REDIAL_S
from gradstream.coordinator.nodes import COORDINATOR
from gradstream.errors import DeadlineError, PeerLostError
from gradstream.runtime.base import Runtime
from gradstream.runtime.deadlines import Deadlines
from gradstream.transport.base import Endpoint
from gradstream.wire import v1


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
    request, lost_ns = v1.AskStretch(least=least), None
    while True:
        try:
            now = await endpoint.call(
                COORDINATOR,
                "stretch",
                request,
                v1.Stretch,
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
        raise RunAbortedError(now.culprit, now.reason)
    if now.end == v1.Notice.STOPPED:
        raise RunStoppedError("the run was stopped; it can be resumed")
    return None if now.end else (now.number, now.resume)
