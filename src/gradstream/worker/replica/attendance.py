"""A worker's presence in its run: whether it may begin a minibatch, and whether others wait for it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from gradstream.strategies import api
from gradstream.worker.batch_gate import BatchGate, Gate
from gradstream.worker.replica.step_meter import StepMeter


class Attendance:
    """Takes a worker through the gate before each minibatch, and pauses it while it has nothing to do.

    Nobody waits for a paused worker: neither for its clock nor for its updates.

    Args:
        gate: the gate.
        meter: told when a step begins: with the wait for clocks, where there are any.
        flush: returns when everything that the worker has computed is in the model.
        server: told when the worker is paused and resumed; None if it cannot be paused.
        before: awaited before each minibatch, where the worker waits for the clocks of others.
        waited_for: updates wait for this worker.
        late: the worker has joined after training had begun: nobody waits for it before it resumes.

    Attributes:
        between: the worker is between two minibatches.
        resumed: the worker was paused before its present minibatch.
        waited_for: see above.
    """

    def __init__(
        self,
        gate: BatchGate,
        meter: StepMeter,
        flush: Callable[[], Awaitable[None]],
        server: api.Server | None = None,
        before: Callable[[], Awaitable[None]] | None = None,
        waited_for: bool = False,
        late: bool = False,
    ) -> None:
        self.between = True
        self.resumed = False
        self.waited_for = waited_for
        self._gate = gate
        self._meter = meter
        self._flush = flush
        self._server = server
        self._before = before
        self._paused = late and (waited_for or before is not None)

    async def enter(self) -> Gate:
        """Returns when the worker may begin its next minibatch, or knows that it will not: see `BatchGate.gate`."""
        self.between = True
        begun_ns = None
        if self._before is not None:
            begun_ns = self._meter.now()
            await self.resume()
            await self._before()
        gate = await self._gate.gate(self.stand)
        if gate == "go":
            self.between = False
            self._meter.begin(begun_ns)
        elif gate == "over" and self._before is not None:
            await self._pause()
        return gate

    async def stand(self) -> None:
        """Brings everything into the model: the worker stands until it passes the gate again."""
        if self._gate.flush_others is not None:
            await self._gate.flush_others()
        await self._flush()
        if self.waited_for:
            await self._pause()
        self._gate.stand()

    async def leave(self) -> None:
        """The worker has no more minibatches: no clock waits for it any more."""
        if self._before is not None:
            await self._pause()

    async def resume(self) -> None:
        """Others wait for the worker from now on."""
        self.resumed, self._paused = self._paused, False
        if self.resumed:
            assert self._server is not None
            await self._server.resume()

    async def _pause(self) -> None:
        if not self._paused:
            assert self._server is not None
            self._paused = True
            await self._server.pause()
