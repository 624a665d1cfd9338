"""A replica that exchanges through the parameter server: its vectors, and the operations of push and fetch.

It has four vectors: parameters, back buffer (for the next fetch), gradient, and sum. With momentum, and if no fetch
overlaps computation, a velocity replaces the back buffer. Vectors change roles instead of being copied: `swap_in` swaps
parameters and back buffer, `pull` swaps parameters and gradient, and accumulating the first gradient of a period swaps
gradient and sum. A worker that updates its own parameters (`optimize`) has the update rule's state instead of a sum,
and pushes from the back buffer.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from typing_extensions import override

from gradstream.errors import InternalError, UserCodeError
from gradstream.memory import Memory, Vector
from gradstream.model.base import Layout
from gradstream.optim.schedules import nominal_rate
from gradstream.runtime.base import Work
from gradstream.server.client.client import ServerClient
from gradstream.server.client.fetch import Arrival
from gradstream.server.client.push import Update
from gradstream.strategies import api
from gradstream.worker.computed import ComputedGradient, SampleBatch
from gradstream.worker.replica import PausableGate, Replica, ReplicaContext, vector_of
from gradstream.worker.schedule import Schedule
from gradstream.worker.server.next_update import ElasticPull, LocalStep, NextUpdate, add_scaled
from gradstream.worker.server.stand_in import PresentRound, StandIn
from gradstream.worker.updater import Updater


class ServerReplica(Replica):
    """Implements `strategies.api.ServerWorker`.

    Args:
        context: parts of every replica.
        server: client of the parameter server, with a back buffer.

    Attributes:
        stand_in: computes the parts of lost workers in each round; None if no worker does.
    """

    def __init__(self, context: ReplicaContext, server: ServerClient) -> None:
        allocate = partial(context.runtime.memory.allocate, exchanged=True)
        super().__init__(context, allocate, server.claims)
        self.clock = 0
        self.server = server
        self.stand_in: StandIn | None = None
        self._base: Sequence[int] = [0] * server.chunks.num_chunks  # versions of the parameters
        self._next = NextUpdate(self._base)
        self._accumulated: Vector | None = None  # allocated by the first strategy that accumulates
        self._velocity: Vector | None = None  # allocated by the first local step with momentum
        self._updater: Updater | None = None  # made by the first step of the run's own rule
        self._num_updates = 0  # number of updates by that rule
        self._origin: Vector | None = None  # w_start of the worker's own parameters, until it is pushed
        self._pushed: Vector | None = (
            None  # its own parameters at their last push, where it continues from there
        )

    def _allocate(self, name: str, layout: Layout | None = None) -> Vector:
        return vector_of(layout or self._layout, partial(self._runtime.memory.allocate, exchanged=True), name)

    @override
    def retire(self) -> None:
        super().retire()
        self._accumulated = self._velocity = self._updater = self._origin = self._pushed = (
            self.server.back_buffer
        ) = None
        self._next.update.vector = None

    async def newest(self) -> torch.Tensor:
        """See `Replica.newest`: by a fetch that the strategy does not see."""
        memory = Memory(shape_only=self._runtime.memory.shape_only)
        vector = memory.allocate(self._layout.elems, self._layout.dtype, "evaluated")
        await self.server.fetch_into(vector, self.evaluated)
        return vector.tensor

    async def _flush(self) -> None:
        if self._updater is not None:
            raise InternalError(
                "the strategy calls optimize(), but not batches(flush=...); expected a flush function, which pushes "
                "the progress since the last push"
            )
        if self._next.refs:  # a gradient without samples needs its receipt too
            await self.server.push_soon(self.take_accumulated())
        await self.server.flush()

    def _memory_free(self, *, mean: bool) -> Coroutine[Any, Any, None] | None:
        # With `gradient_soon`, the push before may still be reading this vector.
        return None if mean else self.server.flush()

    # ---- minibatches --------------------------------------------------------------------

    @override
    def batches(
        self,
        flush: Callable[[], Awaitable[None]] | None = None,
        before: Callable[[], Awaitable[None]] | None = None,
        waited_for: bool = False,
    ) -> AsyncIterator[api.Minibatch]:
        gate = self._context.batch_gate
        self._pausable_gate = PausableGate(
            gate, self._meter, flush or self._flush, self.server, before, waited_for, self._context.late
        )
        return super().batches()

    @property
    def since(self) -> int:
        """See `strategies.api.ServerWorker`."""
        return self.step - self._context.first_step

    @property
    def resumed(self) -> bool:
        """See `strategies.api.ServerWorker`."""
        return self._pausable_gate.resumed

    @property
    def versions(self) -> Sequence[int]:
        """See `strategies.api.ServerWorker`."""
        return self._base

    @property
    def unpushed(self) -> int:
        """See `strategies.api.ServerWorker`."""
        return len(self._next.refs)

    # ---- fetches ------------------------------------------------------------------------

    async def swap_in(self, arrival: Arrival) -> None:
        """See `strategies.api.ServerWorker`."""
        await arrival.done()
        if self.stand_in is not None:
            await self.stand_in.settled()
        self.server.back_buffer, self.parameters = self.parameters, arrival.vector
        self.server.back_buffer.name, self.parameters.name = "spare", "parameters"
        self._computes_on(arrival)

    async def pull(self, *, own: bool = True, flush: bool = False, min_clock: int = 0) -> None:
        """See `strategies.api.ServerWorker`; `flush` as in `ServerClient.fetch_soon`."""
        if min_clock and self._pausable_gate.between:
            await self._pausable_gate.stand()  # the workers that it waits for may stand for a snapshot
        back_buffer, self.server.back_buffer = self.server.back_buffer, self._gradient
        arrival = self.server.fetch_soon(own=own, flush=flush, min_clock=min_clock)
        await arrival.done()
        self._gradient, self.parameters, self.server.back_buffer = (
            self.parameters,
            arrival.vector,
            back_buffer,
        )
        self._gradient.name, self.parameters.name = "gradient", "parameters"
        self._computes_on(arrival)

    def _computes_on(self, arrival: Arrival) -> None:
        new = dict.fromkeys(arrival.chunks)
        self._base = [arrival.versions[c] if c in new else known for c, known in enumerate(self._base)]
        self.version, self.clock = min(self._base, default=0), arrival.clock

    # ---- gradients ----------------------------------------------------------------------

    @override
    async def gradient(self, batch: api.Minibatch) -> ComputedGradient:
        gradient = self._start(batch, mean=True)
        await gradient.done()
        decays = self._context.rule.decays
        if decays and gradient.samples:
            target, source = gradient.vector, self.parameters
            await self._work(lambda: add_scaled(target.tensor, source.tensor, decays), [source], [target])
        return gradient

    @override
    def gradient_soon(self, batch: api.Minibatch) -> ComputedGradient:
        if self._context.rule.decays:
            raise UserCodeError(
                "gradient_soon() with weight decay, in a strategy that says decays_gradients: only "
                "gradient() adds the decay; use that, or leave decays_gradients out"
            )
        return super().gradient_soon(batch)

    async def apply(self, gradient: api.Gradient, lr: float | None = None) -> None:
        """See `strategies.api.ServerWorker`."""
        if not gradient.samples:
            return
        rate, scales = self._local_rate(gradient, lr), self._context.rule.scales
        target, source = self.parameters, gradient.vector
        await self._work(lambda: add_scaled(target.tensor, source.tensor, scales, -rate), [source], [target])

    async def accumulate(self, gradient: api.Gradient) -> None:
        """See `strategies.api.ServerWorker`."""
        assert isinstance(gradient, ComputedGradient)
        if not gradient.samples:
            self._count(gradient)
            return
        if self._next.begins_with(gradient):
            await self._open_period(gradient.vector)
            self._gradient, self._accumulated = self._sum_vector(), gradient.vector
        else:
            target, source = self._next.update.vector, gradient.vector
            assert target is not None and target is not source
            weight = self._next.weight(gradient)
            await self._work(lambda: target.tensor.add_(source.tensor, alpha=weight), [source], [target])
        self._count(gradient, summed=True)

    async def local_step(
        self, gradient: api.Gradient, lr: float | None = None, *, momentum: float = 0.0
    ) -> None:
        """See `strategies.api.ServerWorker`."""
        assert isinstance(gradient, ComputedGradient)
        if not gradient.samples:
            self._count(gradient)
            return
        begins = self._next.begins_with(gradient)
        if momentum == 0.0 and begins:
            await self.accumulate(gradient)  # copies nothing
            await self.apply(gradient, lr)
            return
        velocity = self._velocity_of(momentum)
        if begins:
            await self._open_period(velocity)  # over one step, the sum is the velocity itself
            total = None
        else:
            total = self._next.update.vector = self._sum_vector()
        rate, weight, second = (
            self._local_rate(gradient, lr),
            self._next.weight(gradient),
            self._next.num_summed == 1,
        )
        step = LocalStep(rate, self._context.rule.scales, momentum, weight, second)
        parameters = self.parameters
        await self._work(
            lambda: step(
                gradient.vector.tensor,
                parameters.tensor,
                None if total is None else total.tensor,
                None if velocity is None else velocity.tensor,
            ),
            [gradient.vector],
            [vector for vector in (parameters, total, velocity) if vector is not None],
        )
        self._count(gradient, summed=True)

    def _local_rate(self, gradient: api.Gradient, lr: float | None) -> float:
        """The rate of the minibatch; or `lr`, scaled as the schedule scales the nominal rate."""
        assert isinstance(gradient, ComputedGradient)
        return gradient.lr if lr is None else lr * (gradient.lr / nominal_rate(self._context.rule.lr))

    async def _work(
        self,
        arithmetic: Callable[[], object],
        reads: Sequence[Vector],
        writes: Sequence[Vector],
        work: Work | None = None,
    ) -> None:
        """Awaits arithmetic over whole vectors, unless `work` gives its amount."""
        begun_ns = self._runtime.now()
        await self._runtime.compute(
            lambda _: arithmetic(),
            work=work or Work("copy", elems=len(writes[0])),
            reads=[vector.all for vector in reads],
            writes=[vector.all for vector in writes],
        )
        self._meter.worked(begun_ns)

    async def _open_period(self, vector: Vector | None) -> None:
        """Begins the next update in `vector`, once the previous push no longer reads its vector."""
        await self.server.flush()
        self._next.update.vector = vector
        if not self._next.update.num_gradients:
            self._next.update.base_version = self._base

    def _sum_vector(self) -> Vector:
        if self._accumulated is None:
            self._accumulated = self._allocate("accumulated")
        return self._accumulated

    def _velocity_of(self, momentum: float) -> Vector | None:
        if momentum == 0.0:
            return None
        if self._velocity is None:
            self._velocity = self._allocate("velocity")
            self._velocity.tensor.zero_()
        return self._velocity

    def _count(self, gradient: ComputedGradient, *, summed: bool = False) -> None:
        per_sample = gradient.samples if self.reduction == "sum" else 1
        self._next.count(gradient, self._meter.result.loss / (per_sample or 1), summed=summed)

    # ---- the worker's own parameters ----------------------------------------------------

    async def optimize(self, gradient: api.Gradient) -> None:
        """See `strategies.api.ServerWorker`."""
        assert isinstance(gradient, ComputedGradient)
        if gradient.samples:
            updater, target, source = self._own_updater(), self.parameters, gradient.vector
            self._num_updates += 1
            sums, rate, step = [(0, source.tensor)], gradient.lr, self._num_updates
            await self._work(
                lambda: updater.update(target.tensor, sums, lr=rate, step=step),
                [source],
                [target, *updater.state.values()],
            )
        self._count(gradient)

    def _own_updater(self) -> Updater:
        if self._updater is None:
            rule, layout = self._context.rule.rule, self._layout
            if rule is None:
                raise InternalError('shards have the update rule: the strategy says pushes = "gradients"')
            self._updater = Updater(self._runtime.memory.allocate, *rule, [(0, layout.elems)], layout.dtype)
        return self._updater

    async def pull_towards(self, arrival: Arrival, share: float) -> Update:
        """See `strategies.api.ServerWorker`."""
        await arrival.done()
        pull, parameters, difference = ElasticPull(share), self.parameters, arrival.vector
        await self._work(lambda: pull(parameters.tensor, difference.tensor), [], [parameters, difference])
        self.server.back_buffer = difference
        self._computes_on(arrival)
        return self._take_own(difference)

    async def start_from(self, arrival: Arrival) -> None:
        """See `strategies.api.ServerWorker`."""
        await arrival.done()
        start, parameters = arrival.vector, self.parameters
        await self._work(lambda: parameters.tensor.copy_(start.tensor), [start], [parameters])
        self.server.back_buffer = self._origin = start
        self._computes_on(arrival)

    async def rebase_on(self, arrival: Arrival) -> None:
        """See `strategies.api.ServerWorker`."""
        await arrival.done()
        start, parameters, pushed = arrival.vector, self.parameters, self._pushed
        if pushed is None:
            raise InternalError("rebase_on() without a push of take_outer_gradient(goes_on=True) before it")
        await self._work(
            lambda: parameters.tensor.sub_(pushed.tensor).add_(start.tensor), [start, pushed], [parameters]
        )
        self.server.back_buffer = self._origin = start
        self._computes_on(arrival)

    async def mix_with(self, arrival: Arrival, share: float) -> None:
        """See `strategies.api.ServerWorker`."""
        await arrival.done()
        start, parameters, ranges = arrival.vector, self.parameters, self._ranges(arrival.chunks)

        def mix() -> None:
            for part in ranges:
                parameters.tensor[part].lerp_(start.tensor[part], 1 - share)

        await self._work(mix, [start], [parameters], _work_of(ranges))
        self.server.back_buffer = self._origin = start
        self._computes_on(arrival)

    def _ranges(self, chunks: Sequence[int]) -> list[slice]:
        """The elements of some chunks; neighbours make one range."""
        ranges: list[slice] = []
        for start, stop in map(self.server.chunks.bounds, sorted(chunks)):
            if ranges and ranges[-1].stop == start:
                start = ranges.pop().start
            ranges.append(slice(start, stop))
        return ranges

    async def take_outer_gradient(
        self, chunks: Sequence[int] | None = None, *, goes_on: bool = False
    ) -> Update:
        """See `strategies.api.ServerWorker`."""
        start, parameters = self._origin, self.parameters
        if start is None or start is not self.server.back_buffer:
            raise InternalError("take_outer_gradient() without w_start: call start_from() after each fetch")
        if chunks is None:
            self._origin = None
        ranges = self._ranges(range(len(self._base)) if chunks is None else chunks)

        def subtract() -> None:
            for part in ranges:
                start.tensor[part].sub_(parameters.tensor[part])

        if goes_on:
            pushed = self._pushed = self._pushed or self._allocate("parameters as pushed")
            await self._work(lambda: pushed.tensor.copy_(parameters.tensor), [parameters], [pushed])
        await self._work(subtract, [parameters], [start], _work_of(ranges))
        return self._without_ended_loop(self._take_own(start, chunks))

    def take_parameters(self) -> Update:
        """See `strategies.api.ServerWorker`."""
        return self._without_ended_loop(self._take_own(self.parameters))

    def _without_ended_loop(self, update: Update) -> Update:
        """Contributes nothing to an exchange for which a user's loop has made no step, since it has ended."""
        if not update.samples and not isinstance(self._context.schedule, Schedule):
            update.vector, update.num_gradients = None, 1  # 1: the others wait for it
        return update

    def _take_own(self, vector: Vector, chunks: Sequence[int] | None = None) -> Update:
        self._next.update.vector, self._next.update.base_version = vector, self._base
        return self._taken(chunks)

    def take_state(self, beside: Update) -> Sequence[Update]:
        """See `strategies.api.ServerWorker`."""
        return [
            replace(beside, vector=vector, target=name, on_done=None, refs=())
            for name, vector in self._own_updater().state.items()
        ]

    async def refresh_state(self) -> None:
        """See `strategies.api.ServerWorker`."""
        state, back_buffer = self._own_updater().state, self.server.back_buffer
        for name in state:
            self.server.back_buffer = self._gradient
            arrival = self.server.fetch_soon(vector=name)
            await arrival.done()
            self._gradient, state[name] = state[name], arrival.vector
            self._gradient.name, state[name].name = "gradient", name
            await self.server.flush()  # a push may still read the vector that gradients now land in
        self.server.back_buffer = back_buffer
        self._num_updates = max(self._num_updates, self.step)  # some rules make their first step differently

    # ---- pushes -------------------------------------------------------------------------

    def take_accumulated(self) -> Update:
        """See `strategies.api.ServerWorker`."""
        return self._taken()

    def _taken(self, chunks: Sequence[int] | None = None) -> Update:
        update = self._next.take(self._base, chunks)
        update.on_done = self._handed_out(update.refs)
        self._context.watch.handed_over(self.rank, update)
        return update

    def update(self, gradient: api.Gradient) -> Update:
        """See `strategies.api.ServerWorker`."""
        assert isinstance(gradient, ComputedGradient)
        update = Update(
            gradient.vector if gradient.samples else None,
            gradient.samples,
            gradient.lr,
            self._base,
            round=self.version,
            ready=gradient.ready if gradient.samples else None,
            refs=(gradient.batch.ref,),
        )
        update.on_done = partial(self._acknowledged, update, self._handed_out(update.refs))
        self._context.watch.handed_over(self.rank, update)
        gradient.on_known = partial(_fill_in, update, gradient)
        if self.stand_in is not None:
            ref, sums = gradient.batch.ref, self._part_sums
            self.stand_in.begin(
                PresentRound(self.parameters, self.version, self._base, ref, self.step, sums, gradient)
            )
        return update

    async def portion(self, gradient: api.Gradient) -> Update:
        """See `strategies.api.ServerWorker`."""
        assert isinstance(gradient, ComputedGradient)
        await gradient.done()
        update, ref = self.update(gradient), gradient.batch.ref
        update.ready, update.loss = None, self._mean_loss(gradient)
        update.round, update.portion = ref.epoch, 1 + self._context.schedule.place(ref)
        return update

    def leave_out(self, batch: api.Minibatch) -> Update:
        """See `strategies.api.ServerWorker`."""
        assert isinstance(batch, SampleBatch)
        done = self._handed_out((batch.ref,))
        return Update(None, 0, 0.0, self._base, num_gradients=0, refs=(batch.ref,), on_done=done)

    def _acknowledged(self, update: Update, receipt: Callable[[], None]) -> None:
        self._meter.late = update.late
        receipt()


def _work_of(ranges: Sequence[slice]) -> Work:
    return Work("copy", elems=sum(part.stop - part.start for part in ranges))


def _fill_in(update: Update, gradient: ComputedGradient) -> None:
    """Completes an update with the size and rate of a loop's minibatch, or with its refusal, once known."""
    if not gradient.samples and gradient.sound:
        update.sound = gradient.sound
        return
    update.samples, update.lr = gradient.samples, gradient.lr
    if not gradient.samples:
        update.vector = None
