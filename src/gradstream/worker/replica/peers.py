"""The verbs of a run without servers: gradients summed in a group of workers, updates made by each.

What a bucket is summed into is the group's memory; it is read once, by the update at the end of the
round. So nothing of a round is in the parameters before all of it can be.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import torch

from gradstream.collectives.buckets import Buckets
from gradstream.collectives.group import Group
from gradstream.data.base import BatchRef
from gradstream.memory import Span, Vector
from gradstream.model.factors import FactoredLayer
from gradstream.runtime.base import Runtime, Work
from gradstream.strategies import api
from gradstream.telemetry.events import GROUP
from gradstream.telemetry.traffic import Transfer
from gradstream.telemetry.wait_attribution import Kind, WaitAttribution
from gradstream.worker.computed import ComputedGradient
from gradstream.worker.replica.sufficient_factors import SufficientFactors, outside
from gradstream.worker.replica.updater import Updater

__all__ = ["GroupPeers", "GroupRounds"]


class GroupRounds(Protocol):
    """What the peers need of their replica."""

    parameters: Vector
    version: int

    def planned(self, ref: BatchRef) -> Sequence[tuple[int, float]] | None:
        """(samples, learning rate) of all workers in the round of a minibatch; None where nobody can know."""
        ...

    def in_model(self, gradient: ComputedGradient) -> None:
        """The round of this gradient is over."""
        ...


class GroupPeers:
    """Implements `strategies.api.GroupPeers`.

    Args:
        runtime: of this node.
        group: the workers.
        buckets: how the vector is cut.
        attribution: told for what this worker has waited: the exchange, or its own update.
        updater: the update rule, with the state that this worker keeps.
        sharded: of its own slices alone.
        replica: whose gradients these are.
        outer: layers that may be exchanged as factors.
        on_transfer: told of each exchange of a whole gradient.
    """

    def __init__(
        self,
        runtime: Runtime,
        group: Group,
        buckets: Buckets,
        attribution: WaitAttribution,
        updater: Updater,
        sharded: bool,
        replica: GroupRounds,
        outer: SufficientFactors | None = None,
        on_transfer: Callable[[Transfer], None] | None = None,
    ) -> None:
        self.updater = updater
        self.sharded = sharded
        self.num_rounds = 0
        self.exchanged_bytes = 0
        self._runtime = runtime
        self._group = group
        self._buckets = buckets
        self._bounds = buckets.bounds
        self._attribution = attribution
        self._replica = replica
        self._outer = outer
        self._on_transfer = on_transfer
        self._sums: list[tuple[int, Span]] = []  # of this round: where each begins, and where it lies
        self._total = 0  # samples of all workers in this round
        self._lr, self._relative_rate = 0.0, 1.0
        self._exchange_s = 0.0
        # samples of each rank, then their rates
        self._counts = group.allocate(2 * group.size, torch.float64, "counts")

    @property
    def owned(self) -> Sequence[tuple[int, int]]:
        """[start, stop) of this worker's slices of all buckets."""
        return self._buckets.owned(self._group.rank)

    @property
    def buckets(self) -> Sequence[api.Bucket]:
        """See `strategies.api.GroupPeers`."""
        return self._bounds

    async def samples(self, gradient: api.Gradient) -> Sequence[int]:
        """See `strategies.api.GroupPeers`. The plan says it; where there is none, the workers tell one another.

        All make the update at the learning rate η of the first worker that has samples, or their parameters
        would differ. A gradient whose own rate is η_i, in a loop of the user's, counts η_i/η of its weight.
        """
        assert isinstance(gradient, ComputedGradient)
        said = self._replica.planned(gradient.batch.ref)
        if said is None:
            if gradient.samples < 0:
                await gradient.ready.reached(
                    1
                )  # before, a loop of the user's has not said how many there are
            said = await self._told(gradient.samples, gradient.lr)
        self._sums.clear()
        self._total = sum(samples for samples, _ in said)
        self._lr = next((lr for samples, lr in said if samples and lr), 0.0)
        self._relative_rate = said[self._group.rank][1] / self._lr if self._lr else 1.0
        return [samples for samples, _ in said]

    async def _told(self, samples: int, lr: float) -> list[tuple[int, float]]:
        """Sums of one's own numbers and the others' zeros are exact."""
        size, rank, counts = self._group.size, self._group.rank, self._counts.tensor
        counts.zero_()
        counts[rank], counts[size + rank] = samples, lr
        span = await self._group.allreduce(self._counts.all)
        if counts.is_meta:  # a shape-only simulation: they are all alike
            return [(samples, lr)] * size
        total = span.tensor.tolist()
        return [(round(total[one]), total[size + one]) for one in range(size)]

    async def allreduce(self, gradient: api.Gradient, bucket: api.Bucket, weight: float) -> None:
        """See `strategies.api.GroupPeers`."""
        if not self._total:
            return
        weight *= self._relative_rate
        layers = await self._as_factors(gradient, bucket)
        if layers:
            await self._allreduce_around(gradient, bucket, weight, layers)
            return
        span = await self._ready(gradient, bucket)
        total = await self._timed(span, self._group.allreduce(span, weight=weight))
        self._sums.append((bucket[0], total))

    async def reduce_scatter(self, gradient: api.Gradient, bucket: api.Bucket, weight: float) -> None:
        """See `strategies.api.GroupPeers`."""
        if self._total:
            span = await self._ready(gradient, bucket)
            weight *= self._relative_rate
            mine = await self._timed(span, self._group.reduce_scatter(span, weight=weight))
            self._sums.append((self._buckets.slice_in(bucket, self._group.rank)[0], mine))

    async def _as_factors(self, gradient: api.Gradient, bucket: api.Bucket) -> Sequence[FactoredLayer]:
        """The layers in this bucket that are exchanged as factors."""
        if self._outer is None:
            return ()
        if bucket[0] == 0 and not self._outer.agreed:
            await gradient.done()
            await self._outer.agree(gradient.vector, gradient.samples)
        return [one for one in self._outer.layers if one.start < bucket[1] and bucket[0] < one.stop]

    async def _allreduce_around(
        self, gradient: api.Gradient, bucket: api.Bucket, weight: float, layers: Sequence[FactoredLayer]
    ) -> None:
        """The bucket without these layers, and the layers that end in it: into the gradient's own vector."""
        assert self._outer is not None
        await self._ready(gradient, bucket)
        vector = gradient.vector
        for start, stop in outside(bucket, layers):
            span = vector[start:stop]
            total = await self._timed(span, self._group.allreduce(span, weight=weight))
            if total != span:
                await self._copy(total, span)
        for layer in layers:
            if layer.stop <= bucket[1]:
                begun_ns = self._runtime.now()
                sent = await self._outer.exchange(layer, vector, weight)
                self._exchanged(sent, begun_ns)
        self._sums.append((bucket[0], vector[bucket[0] : bucket[1]]))

    async def _ready(self, gradient: api.Gradient, bucket: api.Bucket) -> Span:
        """The bucket, once nobody writes it any more.

        The last one waits for the end of the gradient, which may yet turn out not to be finite: before
        it has left no worker has everything, and makes an update.
        """
        assert isinstance(gradient, ComputedGradient)
        start, stop = bucket
        span = gradient.vector[start:stop]
        if not gradient.samples:
            await self._runtime.compute(
                lambda _: span.tensor.zero_(), work=Work("copy", elems=len(span)), writes=[span]
            )
        elif stop == len(gradient.vector):
            await gradient.done()
        else:
            await gradient.ready.reached(stop)
        return span

    async def _copy(self, source: Span, target: Span) -> None:
        await self._runtime.compute(
            lambda _: target.tensor.copy_(source.tensor),
            work=Work("copy", elems=len(target)),
            reads=[source],
            writes=[target],
            lane="exchange",
        )

    async def _timed(self, span: Span, exchange: Awaitable[Span]) -> Span:
        begun_ns = self._runtime.now()
        total = await exchange
        self._exchanged(span, begun_ns)
        return total

    def _exchanged(self, span: Span, begun_ns: int) -> None:
        self._exchange_s += (self._runtime.now() - begun_ns) / 1e9
        self._attribution.note(Kind.SHARD, GROUP, begun_ns, self._runtime.now())
        self.exchanged_bytes += span.tensor.nbytes

    async def update(self, gradient: api.Gradient) -> None:
        """See `strategies.api.GroupPeers`."""
        assert isinstance(gradient, ComputedGradient)
        await gradient.done()
        if self._sums:
            await self._apply()
        self._replica.version += 1
        self._replica.in_model(gradient)

    async def _apply(self) -> None:
        sums, parameters = self._sums, self._replica.parameters
        elems = sum(len(span) for _, span in sums)
        state, begun_ns = self.updater.state.values(), self._runtime.now()
        changed = [parameters[start : start + len(span)] for start, span in sums]
        await self._runtime.compute(
            lambda _: self.updater.update(
                parameters.tensor,
                [(start, span.tensor) for start, span in sums if len(span)],
                lr=self._lr,
                step=self._replica.version + 1,
            ),
            work=Work("apply", elems=elems),
            reads=[span for _, span in sums],
            writes=[*changed, *(vector.all for vector in state)],
        )
        self._attribution.note(Kind.OWN, self._runtime.node, begun_ns, self._runtime.now())
        self.num_rounds += 1
        if self._on_transfer is not None:
            self._on_transfer(Transfer("push", self._exchange_s, parameters.tensor.nbytes))
        self._exchange_s = 0.0

    async def all_gather(self) -> None:
        """See `strategies.api.GroupPeers`."""
        begun_ns, parameters = self._runtime.now(), self._replica.parameters
        # One vector for all has nothing to be moved, bucket by bucket: all wait for each other, once.
        bounds = [(0, len(parameters))] if self.sharded and self._group.shares_memory else self._bounds
        for start, stop in bounds:
            await self._group.all_gather(parameters[start:stop])
        self._attribution.note(Kind.SHARD, GROUP, begun_ns, self._runtime.now())

    async def broadcast(self, vector: Vector) -> None:
        """The elements that the worker of rank 0 has, to all."""
        for start, stop in self._bounds:
            await self._group.broadcast(vector[start:stop])

    async def close(self) -> None:
        """Leaves the group. Others that wait for this worker fail."""
        await self._group.close()
