"""`PhaseService`: tells nodes which phase of the job to join, before each one. The nodes' side is `client.phases`."""

from __future__ import annotations

from gradstream.runtime.base import Runtime
from gradstream.runtime.wakeup import Wakeup
from gradstream.transport.base import Endpoint, Stream
from gradstream.wire import v1

LOOK_S = 1.0
"""Seconds between two signs of life to a node that waits for a later phase."""


class PhaseService:
    """Serves "stretch", through all phases of a run.

    Args:
        runtime: time.
        endpoint: endpoint of the coordinator.
    """

    def __init__(self, runtime: Runtime, endpoint: Endpoint) -> None:
        self._runtime = runtime
        self._now: v1.Stretch | None = None
        self._asking: dict[Wakeup, None] = {}
        self._answered = Wakeup()  # rings when a node has its answer
        endpoint.serve("stretch", self._serve, model=False)

    def enter(self, number: int, resume: str) -> None:
        """Lets nodes join a phase.

        Args:
            number: number of the run's boundaries before it.
            resume: where it goes on, as JSON; "" where the run begins.
        """
        self._tell(v1.Stretch(number=number, resume=resume))

    async def end(self, last: v1.Notice, wait_s: float) -> None:
        """Tells the nodes that wait that no phase follows, by the run's last notice; for up to `wait_s`."""
        self._tell(v1.Stretch(end=last.phase, reason=last.reason, culprit=last.culprit))
        since_ns = self._runtime.now()
        while self._asking and (left_s := self._runtime.left_s(since_ns, wait_s)) > 0:
            await self._answered.rung(self._runtime, left_s)

    def _tell(self, now: v1.Stretch) -> None:
        self._now = now
        for wakeup in self._asking:
            wakeup.ring()

    async def _serve(self, stream: Stream) -> None:
        least, wakeup = v1.AskStretch.FromString(stream.opened.body).least, Wakeup()
        self._asking[wakeup] = None
        try:
            while (now := self._now) is None or not (now.end or now.number >= least):
                await stream.waiting([])
                await wakeup.rung(self._runtime, LOOK_S)
            await stream.send(v1.Frame(body=v1.Body(data=now.SerializeToString())))
        finally:
            del self._asking[wakeup]
            self._answered.ring()
