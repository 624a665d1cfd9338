"""A replica that exchanges through the parameter server: its vectors, and the verbs of push and fetch.

Four vectors: parameters, spare (where the next fetch lands), gradient, accumulated; or, with momentum
and fetches that nobody computes beside, velocity instead of the spare one. They change roles instead
of being copied: adopting a fetch swaps parameters and spare, refreshing swaps parameters and
gradient, accumulating the first gradient of a period swaps the last two. Parameters of a worker's own
(`optimize`) take no accumulated vector, but those of the rule's state; what they exchange lies in the
spare one.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from gradstream.data.base import BatchRef
from gradstream.errors import InternalError, UserCodeError
from gradstream.memory import Memory, Vector
from gradstream.optim.schedules import nominal_rate
from gradstream.runtime.base import Work
from gradstream.server.client.arrival import Arrival
from gradstream.server.client.client import ServerClient
from gradstream.server.update import Update
from gradstream.strategies import api
from gradstream.worker.computed import ComputedGradient
from gradstream.worker.replica.arithmetic import ElasticPull, LocalStep, add_scaled
from gradstream.worker.replica.base import Replica, ReplicaContext
from gradstream.worker.replica.updater import Updater

__all__ = ["ServerReplica"]


class ServerReplica(Replica):
    """Implements `strategies.api.Worker` where there is a parameter server.

    Args:
        context: what every replica is made of.
        server: client of the parameter server, with a spare vector.
    """

    def __init__(self, context: ReplicaContext, server: ServerClient) -> None:
        super().__init__(context, partial(context.runtime.memory.allocate, exchanged=True), server.claims)
        self._server = server
        self._basis: Sequence[int] = [0] * server.chunks.num_chunks
        self._accumulated: Vector | None = None  # allocated by the first strategy that accumulates
        self._velocity: Vector | None = None  # allocated by the first local step with momentum
        self._updater: Updater | None = None  # of the first step by the run's own rule
        self._origin: Vector | None = None  # what the worker's own parameters began with, until it is pushed
        self._update_rule = context.update_rule
        self._num_updates = 0
        self._decays, self._scales = context.decays, context.scales
        self._taken = Update(None, 0, 0.0, self._basis, num_gradients=0)
        self._num_summed, self._sum_rate = 0, 0.0  # gradients in the sum, and its rate
        self._refs: list[BatchRef] = []
        self._takes_part = True

    @property
    def server(self) -> ServerClient:
        """See `strategies.api.Worker`."""
        return self._server

    @property
    def unpushed(self) -> int:
        """See `strategies.api.Worker`."""
        return len(self._refs)

    def retire(self) -> None:
        """See `Replica.retire`."""
        super().retire()
        self._accumulated, self._velocity, self._updater, self.server.back_buffer = None, None, None, None
        self._origin = None
        self._taken.vector = None

    async def newest(self) -> torch.Tensor:
        """See `Replica.newest`: a fetch beside the strategy's own."""
        memory = Memory(shape_only=self._runtime.memory.shape_only)
        vector = memory.allocate(self._layout.elems, self._layout.dtype, "evaluated")
        await self.server.fetch_into(vector)
        return vector.tensor

    async def _flush(self) -> None:
        if self._updater is not None:
            raise InternalError("a strategy whose workers optimize() says how to flush: batches(flush)")
        if self._taken.num_gradients or self._refs:  # a gradient of no samples needs its receipt all the same
            await self.server.push_soon(self.take_accumulated())
        await self.server.flush()

    def _memory_free(self, *, mean: bool) -> Coroutine[Any, Any, None] | None:
        # Not accumulated, the vector is the one that the push before may still be reading.
        return None if mean else self.server.flush()

    async def swap_in(self, arrival: Arrival) -> None:
        """See `strategies.api.Worker`."""
        await arrival.done()
        self.server.back_buffer, self.parameters = self.parameters, arrival.vector
        self.server.back_buffer.name, self.parameters.name = "spare", "parameters"
        self._computes_on(arrival)

    async def pull(self, *, own: bool = True, flush: bool = False, min_clock: int = 0) -> None:
        """See `strategies.api.Worker`; `flush` as in `ServerClient.fetch_soon`."""
        if min_clock and self._between:
            await self._stand()  # who waits for others, who may stand for a cut, stands for it too
        spare, self.server.back_buffer = self.server.back_buffer, self._gradient
        arrival = self.server.fetch_soon(own=own, flush=flush, min_clock=min_clock)
        await arrival.done()
        self._gradient, self.parameters, self.server.back_buffer = self.parameters, arrival.vector, spare
        self._gradient.name, self.parameters.name = "gradient", "parameters"
        self._computes_on(arrival)

    def _computes_on(self, arrival: Arrival) -> None:
        self._basis, self.clock = arrival.versions, arrival.clock
        self.version = min(arrival.versions, default=0)

    async def _pause(self) -> None:
        if self._takes_part:
            self._takes_part = False
            await self.server.pause()

    async def _resume(self) -> bool:
        if self._takes_part:
            return False
        self._takes_part = True
        await self.server.resume()
        return True

    async def gradient(self, batch: api.Minibatch) -> ComputedGradient:
        """See `strategies.api.Worker`."""
        gradient = await super().gradient(batch)
        if self._decays and gradient.samples:
            target, source = gradient.vector, self.parameters
            await self._work(
                lambda: add_scaled(target.tensor, source.tensor, self._decays), [source], [target]
            )
        return gradient

    def gradient_soon(self, batch: api.Minibatch) -> ComputedGradient:
        """See `strategies.api.Worker`."""
        if self._decays:
            raise UserCodeError(
                "gradient_soon() with weight decay, in a strategy that says decays_gradients: only "
                "gradient() adds the decay; use that, or leave decays_gradients out"
            )
        return super().gradient_soon(batch)

    async def apply(self, gradient: api.Gradient, lr: float | None = None) -> None:
        """See `strategies.api.Worker`."""
        if not gradient.samples:
            return
        rate = self._local_rate(gradient, lr)
        target, source = self.parameters, gradient.vector
        await self._work(
            lambda: add_scaled(target.tensor, source.tensor, self._scales, -rate), [source], [target]
        )

    async def accumulate(self, gradient: api.Gradient) -> None:
        """See `strategies.api.Worker`."""
        if not gradient.samples:
            self._count(gradient)
            return
        if self._begins_sum(gradient):
            await self._open_period(gradient.vector)
            self._gradient, self._accumulated = self._sum(), gradient.vector
        else:
            target, source = self._taken.vector, gradient.vector
            assert target is not None and target is not source
            weight = self._weight(gradient)
            await self._work(lambda: target.tensor.add_(source.tensor, alpha=weight), [source], [target])
        self._num_summed += 1
        self._count(gradient)

    def _begins_sum(self, gradient: api.Gradient) -> bool:
        """Whether a sum begins with this gradient, whose rate is the sum's then.

        What was summed up at a rate of 0 counts for nothing beside a gradient of another one.
        """
        assert isinstance(gradient, ComputedGradient)
        if self._num_summed and (self._sum_rate or not gradient.lr):
            return False
        self._num_summed, self._sum_rate = 0, gradient.lr
        return True

    def _weight(self, gradient: api.Gradient) -> float:
        """Of a gradient in the sum, which is applied at one rate η: η_i/η."""
        assert isinstance(gradient, ComputedGradient)
        return gradient.lr / self._sum_rate if self._sum_rate else 1.0

    async def local_step(
        self, gradient: api.Gradient, lr: float | None = None, *, momentum: float = 0.0
    ) -> None:
        """See `strategies.api.Worker`."""
        if not gradient.samples:
            self._count(gradient)
            return
        begins = self._begins_sum(gradient)
        if momentum == 0.0 and begins:
            await self.accumulate(gradient)  # which copies nothing
            await self.apply(gradient, lr)
            return
        velocity = self._velocity_of(momentum)
        if begins:
            await self._open_period(velocity)  # the sum over one step is the velocity itself
            total = None
        else:
            total = self._taken.vector = self._sum()
        rate, weight = self._local_rate(gradient, lr), self._weight(gradient)
        step = LocalStep(rate, self._scales, momentum, weight, second=self._num_summed == 1)
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
        self._num_summed += 1
        self._count(gradient)

    def _local_rate(self, gradient: api.Gradient, lr: float | None) -> float:
        """The minibatch's own rate; or `lr`, scaled as the schedule scales its own."""
        assert isinstance(gradient, ComputedGradient)
        return gradient.lr if lr is None else lr * (gradient.lr / nominal_rate(self._lr))

    async def _work(
        self, arithmetic: Callable[[], object], reads: Sequence[Vector], writes: Sequence[Vector]
    ) -> None:
        """Arithmetic over whole vectors that this worker's next verb waits for."""
        begun_ns = self._runtime.now()
        await self._runtime.compute(
            lambda _: arithmetic(),
            work=Work("copy", elems=len(writes[0])),
            reads=[vector.all for vector in reads],
            writes=[vector.all for vector in writes],
        )
        self._stopwatch.worked(begun_ns, self._runtime.now())

    async def _open_period(self, vector: Vector | None) -> None:
        """Begins the next update, with what `vector` will hold, once the last push has let go of its own."""
        await self.server.flush()
        self._taken.vector = vector
        if not self._taken.num_gradients:
            self._taken.base_version = self._basis

    def _sum(self) -> Vector:
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

    def _count(self, gradient: api.Gradient) -> None:
        assert isinstance(gradient, ComputedGradient)
        if gradient.samples:
            self._mean_in(gradient)
        self._taken.samples += gradient.samples
        self._taken.num_gradients += bool(gradient.samples)
        self._taken.lr = self._sum_rate if self._num_summed else gradient.lr
        self._refs.extend(gradient.refs)

    async def optimize(self, gradient: api.Gradient) -> None:
        """See `strategies.api.Worker`."""
        if gradient.samples:
            assert isinstance(gradient, ComputedGradient)
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
            if self._update_rule is None:
                raise InternalError('shards have the update rule: the strategy says pushes = "gradients"')
            layout = self._layout
            everything = [(0, layout.elems)]
            self._updater = Updater(self._runtime.memory, *self._update_rule, everything, layout.dtype)
        return self._updater

    async def pull_towards(self, arrival: Arrival, share: float) -> Update:
        """See `strategies.api.Worker`."""
        await arrival.done()
        pull, parameters, difference = ElasticPull(share), self.parameters, arrival.vector
        await self._work(lambda: pull(parameters.tensor, difference.tensor), [], [parameters, difference])
        self.server.back_buffer = difference
        self._computes_on(arrival)
        return self._take_own(difference)

    async def start_from(self, arrival: Arrival) -> None:
        """See `strategies.api.Worker`."""
        await arrival.done()
        start, parameters = arrival.vector, self.parameters
        await self._work(lambda: parameters.tensor.copy_(start.tensor), [start], [parameters])
        self.server.back_buffer = self._origin = start
        self._computes_on(arrival)

    async def take_outer_gradient(self) -> Update:
        """See `strategies.api.Worker`."""
        start, parameters = self._origin, self.parameters
        if start is None or start is not self.server.back_buffer:
            raise InternalError("take_outer_gradient() without w_start: call start_from() after each fetch")
        self._origin = None
        await self._work(lambda: start.tensor.sub_(parameters.tensor), [parameters], [start])
        return self._take_own(start)

    def take_parameters(self) -> Update:
        """See `strategies.api.Worker`."""
        return self._take_own(self.parameters)

    def take_state(self, beside: Update) -> Sequence[Update]:
        """See `strategies.api.Worker`."""
        return [
            replace(beside, vector=vector, target=name, on_done=None, refs=())
            for name, vector in self._own_updater().state.items()
        ]

    async def refresh_state(self) -> None:
        """See `strategies.api.Worker`."""
        state, spare = self._own_updater().state, self.server.back_buffer
        for name in state:
            self.server.back_buffer = self._gradient
            arrival = self.server.fetch_soon(vector=name)
            await arrival.done()
            self._gradient, state[name] = state[name], arrival.vector
            self._gradient.name, state[name].name = "gradient", name
            await self.server.flush()  # the new gradient's memory may still be read for a push
        self.server.back_buffer = spare
        self._num_updates = max(self._num_updates, self.step)  # a rule may do its first step otherwise

    def _take_own(self, vector: Vector) -> Update:
        self._taken.vector, self._taken.base_version = vector, self._basis
        return self.take_accumulated()

    def _mean_in(self, gradient: ComputedGradient) -> None:
        """The loss of one more minibatch, into the mean over all samples of the update."""
        taken, new = self._taken, gradient.samples
        loss = self._result.loss / (new if self.reduction == "sum" else 1)
        share = new / (taken.samples + new)
        taken.loss = loss if share == 1.0 else taken.loss + share * (loss - taken.loss)

    def take_accumulated(self) -> Update:
        """See `strategies.api.Worker`."""
        update, self._taken = self._taken, Update(None, 0, 0.0, self._basis, num_gradients=0)
        self._num_summed = 0
        refs, self._refs = tuple(self._refs), []
        update.on_done, update.refs = self._handed_out(refs), refs
        self._watch.handed_over(self.rank, update)
        return update

    def update(self, gradient: api.Gradient) -> Update:
        """See `strategies.api.Worker`."""
        assert isinstance(gradient, ComputedGradient)
        update = Update(
            gradient.vector if gradient.samples else None,
            gradient.samples,
            gradient.lr,
            self._basis,
            round=self.version,
            ready=gradient.ready if gradient.samples else None,
        )
        update.on_done = partial(self._acknowledged, update, self._handed_out(gradient.refs))
        update.refs = gradient.refs
        self._watch.handed_over(self.rank, update)
        gradient.on_known = partial(_fill_in, update, gradient)
        return update

    def _acknowledged(self, update: Update, receipt: Callable[[], None]) -> None:
        self._late = update.late
        receipt()


def _fill_in(update: Update, gradient: ComputedGradient) -> None:
    """What only a loop of the user's could tell."""
    update.samples, update.lr = gradient.samples, gradient.lr
    if not gradient.samples:
        update.vector = None
