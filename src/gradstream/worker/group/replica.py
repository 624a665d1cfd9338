"""A replica that exchanges in a group of workers, without servers: it has all parameters and updates them itself."""

from __future__ import annotations

import asyncio
import math
import statistics
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import torch

from gradstream.memory import Vector
from gradstream.model.buffers import buffers_of, load_buffers
from gradstream.runtime.base import Work, awaited_later
from gradstream.strategies import api
from gradstream.telemetry.meters import Transfer, WaitAttribution
from gradstream.worker.computed import ComputedGradient, Result, SampleBatch
from gradstream.worker.group.peers import GroupPeers
from gradstream.worker.group.setup import GroupMeter, GroupSetup
from gradstream.worker.local_steps import LocalSteps
from gradstream.worker.replica import Replica, ReplicaContext, vector_of
from gradstream.worker.schedule import Schedule

# ---- rehearsal ---------------------------------------------------------------------------
# `rehearse`: measures how long a worker computes a gradient, by gradients that are not used.

TIMES = 4
"""The first gradient of a process may be slow for other reasons, and does not count."""


async def rehearse(
    context: ReplicaContext, parameters: Vector, into: Vector, sums: Vector | None, done: int
) -> float:
    """Computes the gradient of the worker's next minibatch, and leaves model and buffers unchanged.

    Args:
        context: parts of the replica.
        parameters: (E,), not changed.
        into: (E,), overwritten.
        sums: (E,), overwritten; for minibatches in parts.
        done: number of minibatches that the worker has gone through.

    Returns:
        Median seconds of `TIMES` gradients without the first; 0 if the worker has no samples in that minibatch.

    Raises:
        UserCodeError, GradientError, DataError: as for any gradient.
    """
    source, schedule, runtime = context.gradients, context.schedule, context.runtime
    assert isinstance(schedule, Schedule)  # users' loops have no phases
    if done >= schedule.num_batches:
        return 0.0
    ref = schedule.plan.nth(context.rank, done)
    samples = schedule.size(ref)
    if not samples:
        return 0.0
    batch, step = SampleBatch(ref, samples), context.first_step + done

    def compute(_: object) -> Result:
        before = buffers_of(context.model)
        gradient = ComputedGradient(into, batch, schedule.rate(ref), step, sums=sums)
        try:
            return source.compute(parameters.tensor, gradient, lambda elems: None)
        finally:
            if before:
                load_buffers(context.model, before)

    seconds = []
    for _ in range(TIMES):
        begun_ns = runtime.now()
        work = Work("gradient", samples=samples, elems=len(into), passes=source.passes(batch))
        await runtime.compute(
            compute,
            work=work,
            reads=[parameters.all],
            writes=[into.all],
            shape_only=Result(0.0),
        )
        seconds.append((runtime.now() - begun_ns) / 1e9)
    return statistics.median(seconds[1:])


# ---- group -------------------------------------------------------------------------------


class GroupReplica(Replica):
    """Implements `strategies.api.GroupWorker`.

    Parameters and gradient lie in the group's memory, so that the group can work in place.

    Args:
        context: parts of every replica.
        setup: the group, and how it exchanges.
        on_transfer: see `GroupMeter`.
        whole: returns when all processes of this replica have the sums of a round; raises if one has lost its group.
        delay: see `GroupStrategy.delay`.

    Attributes:
        setup: see above.
        meter: counts the exchanges.
        group: see `strategies.api.GroupWorker`.
        note: see `strategies.api.Peers`.
    """

    def __init__(
        self,
        context: ReplicaContext,
        setup: GroupSetup,
        on_transfer: Callable[[Transfer], None],
        whole: Callable[[], Awaitable[None]],
        delay: int = 0,
    ) -> None:
        attribution = WaitAttribution()
        self.whole = whole
        self._delay = delay
        self._local = context.gradients if isinstance(context.gradients, LocalSteps) else None
        super().__init__(context, setup.group.allocate, attribution, setup.parameters)
        self.meter = GroupMeter(context.runtime, attribution, on_transfer)
        self.note = b""
        self._latest: ComputedGradient | None = None
        self._turned = False  # the vectors have an update that other workers may not have made yet
        self._take(setup)

    def _take(self, setup: GroupSetup) -> None:
        self.setup, self._spare, self._turned = setup, list(setup.spare), False
        self._gradients = setup.joint or self._context.gradients
        self._context.batch_gate.again(self.step - self._context.first_step)
        self.group = GroupPeers(self, self._context, setup, self.meter)

    # ---- another group --------------------------------------------------------------------

    @property
    def vectors(self) -> list[Vector]:
        """Parameters and the state of the update rule."""
        return [self.parameters, *self.setup.updater.state.values()]

    async def at_rest(self) -> None:
        """Waits for the computations of the round that was given up. Raises the error of its gradient."""
        if self._latest is not None:
            await self._latest.over()

    def give_up(self) -> list[Vector]:
        """Gives up the current round. Returns the vectors after the last whole round."""
        if self._turned:
            self.turn()
        return self.vectors

    def turn(self) -> None:
        """Swaps the vectors with the spare ones, so that an update leaves the old vectors intact.

        A second call, before `in_model`, reverts the update.
        """
        vectors, updater = self.vectors, self.setup.updater
        self.parameters, *states = self._spare
        updater.state = dict(zip(updater.state, states, strict=True))
        self._spare, self._turned = vectors, not self._turned

    def regroup(self, setup: GroupSetup) -> None:
        """Exchanges in another group from now on."""
        memory, before = self._runtime.memory, self.setup.joint
        for vector in (self._gradient, self.group.counts, *(() if before is None else (before.part,))):
            memory.free(vector)
        self._gradient = vector_of(self._landing, setup.group.allocate, "gradient")
        self.parameters = setup.parameters
        self._take(setup)

    def take(self, vectors: Sequence[Vector], version: int, note: bytes) -> None:
        """Goes on with these parameters, this state and this note."""
        parameters, *states = vectors
        if parameters is not self.parameters:
            for vector in self.vectors:
                self._runtime.memory.free(vector)
        updater = self.setup.updater
        self.parameters, self.version, self.note = parameters, version, note
        self.setup = replace(self.setup, parameters=parameters)
        updater.state = dict(zip(updater.state, states, strict=True))

    async def catch_up(self) -> None:
        """Skips rounds that continued without this worker: the parameters that it received contain them."""
        if missed := self._missed():
            self._handed_out(missed)()
            self._context.schedule.passed(SampleBatch(missed[-1], self._ahead_samples))
            self.skip_missed()
            self.samples, self._ahead_samples = self.samples + self._ahead_samples, 0
            await self._context.on_boundary(self, missed)

    # ---- before the first round -----------------------------------------------------------

    async def rehearse(self) -> float:
        """Seconds of a gradient that nobody uses; 0 if this worker has no samples: see `rehearsal`."""
        done = self.step - self._context.first_step
        return await rehearse(self._context, self.parameters, self._gradient, self._part_sums, done)

    async def asked_to_stand(self) -> None:
        """Returns when the coordinator stops this worker. Raises as `BatchGate.gate`."""
        await self._context.batch_gate.asked()

    # ---- see `GroupWorker` ----------------------------------------------------------------

    def ends_epoch(self, batch: api.Minibatch) -> bool:
        """See `strategies.api.GroupWorker`."""
        assert isinstance(batch, SampleBatch) and isinstance(self._context.schedule, Schedule)
        return self._context.schedule.ends_epoch(batch.ref)

    def mean_loss(self, gradient: ComputedGradient) -> float:
        """Mean loss over the samples of this worker's gradient; infinite where it, or the gradient, is not finite."""
        loss = self._mean_loss(gradient) if gradient.samples else math.inf
        return loss if math.isfinite(loss) else math.inf

    # ---- see `Replica` --------------------------------------------------------------------

    async def newest(self) -> torch.Tensor:
        """See `Replica.newest`: between two rounds, all workers have the same parameters."""
        return (self.setup.updater.state[self.evaluated] if self.evaluated else self.parameters).tensor

    async def _flush(self) -> None:
        """Does nothing: a round is in the model when the strategy continues after it."""

    def _new_gradient(self, batch: SampleBatch, *, mean: bool) -> ComputedGradient:
        if self.setup.joint is not None:
            batch.num_samples = self.setup.joint.size(batch.ref)
        gradient = self._latest = super()._new_gradient(batch, mean=mean)
        if self._local is not None and self._delay and self.setup.joint is None:
            schedule, number = self._context.schedule, self.step - self._context.first_step
            assert isinstance(schedule, Schedule)
            if schedule.goes_on_after(number):
                gradient.later, gradient.later_samples = schedule.at_end(batch, self._delay)
        return gradient

    def _start(self, batch: api.Minibatch, *, mean: bool) -> ComputedGradient:
        gradient = super()._start(batch, mean=mean)
        if gradient.task is not None and gradient.later:
            work = self._go_on(gradient, gradient.task)
            name = f"worker-{self.rank}-goes-on-{self.step}"
            gradient.rest = awaited_later(self._runtime.spawn(work, name=name))
        return gradient

    async def _go_on(self, gradient: ComputedGradient, before: Awaitable[Result]) -> None:
        """Trains on the last minibatches of a step while the earlier ones are exchanged."""
        result, local = await asyncio.shield(before), self._local
        if result.refused or local is None:
            return
        begun_ns = self._runtime.now()
        samples, elems = gradient.later_samples, len(gradient.vector)
        whole = await self._runtime.compute(
            lambda _: local.go_on(gradient, result),
            work=Work("gradient", samples=samples, elems=elems, passes=gradient.later),
            shape_only=result,
        )
        self._meter.computed(begun_ns, whole)

    def in_model(self, batch: SampleBatch) -> None:
        """The round of this minibatch is over."""
        self.version, self._turned = self.version + 1, False
        receipt = self._handed_out((batch.ref,))
        if self._context.schedule.takes_part:
            receipt()
