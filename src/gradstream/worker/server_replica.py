"""A replica that exchanges through the parameter server: its vectors, and the verbs of push and fetch.

Four vectors: parameters, spare (where the next fetch lands), gradient, accumulated; or, with momentum
and fetches that nobody computes beside, velocity instead of the spare one. They change roles instead
of being copied: adopting a fetch swaps parameters and spare, refreshing swaps parameters and
gradient, accumulating the first gradient of a period swaps the last two.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from gradstream.data.base import BatchRef
from gradstream.memory import Memory, Vector
from gradstream.optim.schedules import nominal_rate
from gradstream.runtime.base import Work
from gradstream.server.client import Arrival, ServerClient, Update
from gradstream.strategies import base
from gradstream.worker.worker import ComputedGradient, Replica, ReplicaParts

__all__ = ["LocalStep", "ServerReplica"]

BLOCK_ELEMS = 1 << 17  # of four float32 vectors: 2 MiB


@dataclass(frozen=True, slots=True)
class LocalStep:
    """v ← momentum·v + g;  acc ← acc + v;  w ← w - lr·v, in blocks that stay in the processor's cache.

    Without a velocity v is g. One operation after the other over whole vectors would move each of them
    through memory again: at 74.77 M elements a step is bound by that.

    Args:
        lr: α.
        momentum: of v, 0 to 1.
        second: the step before was the first of its period: acc ← v, as that left it, before all else.
    """

    lr: float
    momentum: float = 0.0
    second: bool = False

    def __call__(
        self,
        gradient: torch.Tensor,
        parameters: torch.Tensor,
        accumulated: torch.Tensor | None,
        velocity: torch.Tensor | None,
    ) -> None:
        """All of one shape, (elems,); changes all but the gradient."""
        for start in range(0, len(gradient), BLOCK_ELEMS):
            block = slice(start, start + BLOCK_ELEMS)  # vector registers see the same elements as uncut
            direction = gradient[block]
            if velocity is not None:
                if accumulated is not None and self.second:
                    accumulated[block].copy_(velocity[block])
                direction = velocity[block].mul_(self.momentum).add_(direction)
            if accumulated is not None:
                accumulated[block].add_(direction)
            parameters[block].add_(direction, alpha=-self.lr)


class ServerReplica(Replica):
    """Implements `strategies.base.Worker` where there is a parameter server.

    Args:
        parts: what every replica is made of.
        server: client of the parameter server, with a spare vector.
    """

    def __init__(self, parts: ReplicaParts, server: ServerClient) -> None:
        super().__init__(parts, partial(parts.runtime.memory.allocate, exchanged=True), server.claims)
        self._server = server
        self._basis: Sequence[int] = [0] * server.chunks.num_chunks
        self._accumulated: Vector | None = None  # allocated by the first strategy that accumulates
        self._velocity: Vector | None = None  # allocated by the first local step with momentum
        self._taken = Update(None, 0, 0.0, self._basis, num_gradients=0)
        self._refs: list[BatchRef] = []

    @property
    def server(self) -> ServerClient:
        """See `strategies.base.Worker`."""
        return self._server

    def retire(self) -> None:
        """See `Replica.retire`."""
        super().retire()
        self._accumulated, self._velocity, self.server.spare = None, None, None
        self._taken.vector = None

    async def newest(self) -> torch.Tensor:
        """See `Replica.newest`: a fetch beside the strategy's own."""
        vector = Memory().allocate(self._layout.elems, self._layout.dtype, "evaluated")
        await self.server.fetch_into(vector)
        return vector.tensor

    async def _flush(self) -> None:
        if self._taken.num_gradients or self._refs:  # a gradient of no samples needs its receipt all the same
            await self.server.push_soon(self.take_accumulated())
        await self.server.settle()

    def _memory_free(self, *, mean: bool) -> Coroutine[Any, Any, None] | None:
        # Not accumulated, the vector is the one that the push before may still be reading.
        return None if mean else self.server.settle()

    async def adopt(self, arrival: Arrival) -> None:
        """See `strategies.base.Worker`."""
        await arrival.done()
        self.server.spare, self.parameters = self.parameters, arrival.vector
        self.server.spare.name, self.parameters.name = "spare", "parameters"
        self._computes_on(arrival.versions)

    async def refresh(self, *, own: bool = True, flush: bool = False) -> None:
        """See `strategies.base.Worker`; `flush` as in `ServerClient.fetch_soon`."""
        spare, self.server.spare = self.server.spare, self._gradient
        arrival = self.server.fetch_soon(own=own, flush=flush)
        await arrival.done()
        self._gradient, self.parameters, self.server.spare = self.parameters, arrival.vector, spare
        self._gradient.name, self.parameters.name = "gradient", "parameters"
        self._computes_on(arrival.versions)

    def _computes_on(self, versions: Sequence[int]) -> None:
        self._basis = versions
        self.version = min(versions, default=0)

    async def apply(self, gradient: base.Gradient, lr: float | None = None) -> None:
        """See `strategies.base.Worker`."""
        if not gradient.samples:
            return
        rate = self._local_rate(gradient, lr)
        target, source = self.parameters, gradient.vector
        await self._work(lambda: target.tensor.add_(source.tensor, alpha=-rate), [source], [target])

    async def accumulate(self, gradient: base.Gradient) -> None:
        """See `strategies.base.Worker`."""
        if not gradient.samples:
            self._count(gradient)
            return
        if self._taken.num_gradients == 0:
            await self._open_period(gradient.vector)
            self._gradient, self._accumulated = self._sum(), gradient.vector
        else:
            target, source = self._taken.vector, gradient.vector
            assert target is not None and target is not source
            await self._work(lambda: target.tensor.add_(source.tensor), [source], [target])
        self._count(gradient)

    async def descend(
        self, gradient: base.Gradient, lr: float | None = None, *, momentum: float = 0.0
    ) -> None:
        """See `strategies.base.Worker`."""
        num_before = self._taken.num_gradients
        if not gradient.samples:
            self._count(gradient)
            return
        if momentum == 0.0 and num_before == 0:
            await self.accumulate(gradient)  # which copies nothing
            await self.apply(gradient, lr)
            return
        velocity = self._velocity_of(momentum)
        if num_before == 0:
            await self._open_period(velocity)  # the sum over one step is the velocity itself
            total = None
        else:
            total = self._taken.vector = self._sum()
        step = LocalStep(self._local_rate(gradient, lr), momentum, second=num_before == 1)
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
        self._count(gradient)

    def _local_rate(self, gradient: base.Gradient, lr: float | None) -> float:
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
        await self.server.settle()
        self._taken = Update(vector, 0, 0.0, self._basis, num_gradients=0)

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

    def _count(self, gradient: base.Gradient) -> None:
        assert isinstance(gradient, ComputedGradient)
        self._taken.samples += gradient.samples
        self._taken.num_gradients += bool(gradient.samples)
        self._taken.learning_rate = gradient.lr
        self._refs.extend(gradient.refs)

    def take_accumulated(self) -> Update:
        """See `strategies.base.Worker`."""
        update, self._taken = self._taken, Update(None, 0, 0.0, self._basis, num_gradients=0)
        refs, self._refs = tuple(self._refs), []
        update.on_done, update.refs = self._handed_out(refs), refs
        self._watch.handed_over(self.rank, update)
        return update

    def update(self, gradient: base.Gradient) -> Update:
        """See `strategies.base.Worker`."""
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
    update.samples, update.learning_rate = gradient.samples, gradient.lr
    if not gradient.samples:
        update.vector = None
