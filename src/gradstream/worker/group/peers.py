"""One worker's collective operations on gradients in a group, and the update that they lead to.

A bucket is summed into the group's memory, which the update at the end of the round reads once. So no sum enters the
parameters before all sums of the round are complete.

A worker sends its last buckets only after it has checked the whole gradient. If that is not finite, it fills them with
NaN: every worker finds a NaN in its part of the sum, and all skip the round without another message.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from gradstream.memory import Span, Vector
from gradstream.model.base import finite, length
from gradstream.optim.base import Sums
from gradstream.optim.groups import Piece, add_up
from gradstream.runtime.base import Work
from gradstream.strategies import api
from gradstream.telemetry.meters import Contribution, NoiseMeter
from gradstream.wire import v1
from gradstream.worker.computed import UNKNOWN, ComputedGradient, SampleBatch
from gradstream.worker.group.setup import GroupMeter, GroupSetup
from gradstream.worker.replica import ReplicaContext
from gradstream.worker.schedule import Schedule


class UpdatedReplica(Protocol):
    """The replica that `GroupPeers` updates.

    Attributes:
        parameters: its parameters.
        version: number of updates in them.
        note: see `strategies.api.Peers`.
    """

    parameters: Vector
    version: int
    note: bytes

    @property
    def vectors(self) -> list[Vector]:
        """Parameters and the state of the update rule."""
        ...

    def turn(self) -> None:
        """See `GroupReplica.turn`."""
        ...

    def whole(self) -> Awaitable[None]:
        """See `GroupReplica`."""
        ...

    def mean_loss(self, gradient: ComputedGradient) -> float:
        """See `GroupReplica`."""
        ...

    def in_model(self, batch: SampleBatch) -> None:
        """The round of this minibatch is over."""
        ...


@dataclass(slots=True)
class _Round:
    """The exchange of one round.

    Args:
        counts: number of samples of each worker, by rank.
        lr: learning rate of the update, η.
        relative_rate: this worker's own rate over η.
        sums: each bucket's first element, and the location of its sum.
        weight: weight of this worker's gradient in the sums.
        square: sum of the squares of this worker's gradient, if measured.
        exact: no codec is used, since what some worker's loop has handed over is no gradient.
    """

    counts: Sequence[int] = ()
    lr: float = 0.0
    relative_rate: float = 1.0
    sums: list[tuple[int, Span]] = field(default_factory=list)
    weight: float = 0.0
    square: float = 0.0
    exact: bool = False

    @property
    def total(self) -> int:
        """Number of samples of all workers."""
        return sum(self.counts)


class GroupPeers:
    """Implements `strategies.api.Peers`: one worker's collective operations on gradients, with the other workers.

    Args:
        replica: replica of this worker, which is updated.
        context: see `GroupReplica`.
        setup: see `GroupReplica`.
        meter: counts the exchanges, and the time that they take.

    Attributes:
        counts: memory for what `tell` sends, or for two numbers of each tensor.
    """

    def __init__(
        self, replica: UpdatedReplica, context: ReplicaContext, setup: GroupSetup, meter: GroupMeter
    ) -> None:
        self.sharded = setup.sharded
        self.buckets = setup.buckets.bounds
        self._held = setup.buckets.first_held if setup.sharded else self.buckets[-1][0]
        self._replica = replica
        self._context = context
        self._runtime = context.runtime
        self._setup = setup
        self._group = setup.group
        self._meter = meter
        self._round = _Round()
        self._made: ComputedGradient | None = None  # its update is made here, but perhaps not by all workers
        # what `tell` sends, one number of each rank after the other; or the sums of each tensor
        self._num_tensors = setup.updater.per_tensor if setup.sharded else 0
        each = (
            2 if isinstance(context.schedule, Schedule) else 3
        )  # a user's loop says whether it is exact, too
        numbers = max(each * setup.group.size, 2 * self._num_tensors)
        self.counts = setup.group.allocate(numbers, torch.float64, "counts")

    @property
    def note(self) -> bytes:
        """See `strategies.api.Peers`."""
        return self._replica.note

    @note.setter
    def note(self, note: bytes) -> None:
        """Sets the note; all workers set the same one between the same two rounds."""
        self._replica.note = note

    async def samples(self, gradient: api.Gradient) -> Sequence[int]:
        """See `strategies.api.Peers`. Known from the plan; otherwise the workers tell one another.

        All workers update at the rate η of the first worker that has samples, or their parameters would differ.
        In users' loops a gradient may have another rate η_i: it is then weighed by η_i/η.
        """
        assert isinstance(gradient, ComputedGradient)
        workers, exact = self._context.schedule.round_of(gradient.batch.ref), False
        if workers is None:
            if gradient.samples == UNKNOWN:
                await gradient.ready.reached(1)  # the user's loop reports the number of samples first
            own_loop = not isinstance(self._context.schedule, Schedule)
            told = await self.tell(
                gradient.samples, gradient.lr, *([float(gradient.exact)] if own_loop else [])
            )
            exact = any(any(rest) for _, _, *rest in told)
            by_rank = dict(zip(self._setup.ranks, told, strict=True))
            num_workers = max(self._context.num_workers, 1 + max(by_rank))  # more may have come
            of_all = (by_rank.get(rank, (0.0, 0.0)) for rank in range(num_workers))
            workers = [(round(samples), lr) for samples, lr, *_ in of_all]
            self._context.schedule.heard([samples for samples, _ in workers])
        lr = next((lr for samples, lr in workers if samples and lr), 0.0)
        counts = [samples for samples, _ in workers]
        for rank, stand_in in self._setup.stand_ins.items():
            counts[stand_in], counts[rank] = counts[stand_in] + counts[rank], 0
        own_lr = workers[self._context.rank][1]
        self._round = _Round(counts, lr, own_lr / lr if lr else 1.0, exact=exact)
        return counts

    async def tell(self, first: float, second: float = 0.0, *third: float) -> Sequence[tuple[float, ...]]:
        """Sends two numbers, or three, to the other workers, and returns those of all, in the order of ranks.

        It sums vectors in which each worker fills in only its own numbers, which is exact.
        """
        size, rank = self._group.size, self._group.rank
        numbers = (first, second, *third)
        told = self.counts[: len(numbers) * size]
        counts = told.tensor.zero_()
        counts[rank::size] = torch.tensor(numbers, dtype=counts.dtype)
        span = await self._group.allreduce(told)
        if counts.is_meta:  # in a shape-only simulation all workers are alike
            return [numbers] * size
        total = span.tensor.tolist()
        return [tuple(total[one::size]) for one in range(size)]

    async def allreduce(self, gradient: api.Gradient, bucket: api.Bucket, weight: float) -> None:
        """See `strategies.api.Peers`."""
        if not self._round.total:
            return
        weight *= self._round.relative_rate
        if self._setup.low_rank is not None and not self._round.exact:
            span, begun_ns = await self._ready(gradient, bucket), self._runtime.now()
            scale = math.nan if self._spoils(gradient) else weight
            step = self._replica.version + 1
            thin = await self._setup.low_rank.exchange(bucket, gradient.vector, scale, step=step)
            self._meter.exchanged(thin, begun_ns, whole=span.tensor.nbytes)
            self._round.sums.append((bucket[0], span))
            return
        span = await self._ready(gradient, bucket)
        if self._setup.coded is not None and not self._round.exact:
            begun_ns, step = self._runtime.now(), self._replica.version + 1
            sent = await self._setup.coded.allreduce(span, weight=weight, step=step)
            self._meter.exchanged(sent, begun_ns, whole=span.tensor.nbytes)
            self._round.sums.append((bucket[0], span))
            return
        await self._measure(span, weight)
        total = await self._timed(span, self._group.allreduce(span, weight=weight))
        self._round.sums.append((bucket[0], total))

    async def reduce_scatter(self, gradient: api.Gradient, bucket: api.Bucket, weight: float) -> None:
        """See `strategies.api.Peers`."""
        if self._round.total:
            span = await self._ready(gradient, bucket)
            weight *= self._round.relative_rate
            await self._measure(span, weight)
            mine = await self._timed(span, self._group.reduce_scatter(span, weight=weight))
            self._round.sums.append((self._setup.buckets.slice_in(bucket, self._group.rank)[0], mine))

    async def _ready(self, gradient: api.Gradient, bucket: api.Bucket) -> Span:
        """The bucket, once it is final.

        The last buckets are held back until the gradient is complete, since it may turn out not to be finite. While a
        bucket is missing, no worker makes an update.
        """
        assert isinstance(gradient, ComputedGradient)
        start, stop = bucket
        span = gradient.vector[start:stop]
        if gradient.task is not None and start >= self._held:
            await gradient.done()
        elif gradient.task is not None:
            await gradient.ready.reached(stop)
        if not gradient.samples:
            value = math.nan if self._spoils(gradient) else 0.0
            await self._runtime.compute(
                lambda _: span.tensor.fill_(value), work=Work("copy", elems=len(span)), writes=[span]
            )
        return span

    def _spoils(self, gradient: api.Gradient) -> bool:
        """Whether a gradient that the other workers expect in this round was refused."""
        return not gradient.samples and self._round.counts[self._context.rank] != 0

    async def _measure(self, span: Span, weight: float) -> None:
        """Adds a part of this worker's gradient to its square, before the group sums in the same memory."""
        if self._setup.noise is None or not self._setup.noise.due(self._replica.version + 1):
            return
        self._round.weight = weight
        self._round.square += await self._runtime.compute(
            lambda _: length(span.tensor) ** 2,
            work=Work("reduce", elems=len(span)),
            reads=[span],
            lane="exchange",
            shape_only=math.inf,
        )

    def _joined_square(self) -> float:
        """The square of the joined gradient, over this worker's slices of all buckets."""
        buckets, rank, found = self._setup.buckets, self._group.rank, list[float]()
        for bucket, (start, span) in zip(buckets.bounds, self._round.sums, strict=True):
            first, last = buckets.slice_in(bucket, rank)
            found.append(length(span.tensor[first - start : last - start]) ** 2)
        return math.fsum(found)

    def _note_squares(self, noise: NoiseMeter, joined: float) -> None:
        counts, own = self._round.counts, self._round.counts[self._context.rank]
        here = [Contribution(own, self._round.weight, self._round.square)] if own else []
        noise.add(self._replica.version + 1, [count for count in counts if count], here, joined)

    async def _timed(self, span: Span, exchange: Awaitable[Span]) -> Span:
        begun_ns = self._runtime.now()
        total = await exchange
        self._meter.exchanged([span], begun_ns)
        return total

    async def update(self, gradient: api.Gradient) -> None:
        """See `strategies.api.Peers`."""
        assert isinstance(gradient, ComputedGradient)
        await gradient.over()
        await self._replica.whole()
        if self._round.sums:
            await self._apply()
        if self._setup.spare:
            self._made = gradient  # in the model when all workers have made the update
        else:
            self._replica.in_model(gradient.batch)

    async def _apply(self) -> None:
        """Makes the update. Changes nothing if a worker's gradient was not finite."""
        sums, lr, updater = self._round.sums, self._round.lr, self._setup.updater
        tensor_sums = await self._tensor_sums() if self._num_tensors else None
        old, begun_ns = self._replica.vectors, self._runtime.now()
        if self._setup.spare:
            self._replica.turn()
        new = self._replica.vectors
        parameters, version = self._replica.parameters, self._replica.version
        changed = [parameters[start : start + len(span)] for start, span in sums]
        parts = [(start, span.tensor) for start, span in sums if len(span)]
        noise = self._setup.noise
        measured = noise is not None and noise.due(version + 1)

        def update(_: object) -> float:
            joined = self._joined_square() if measured else math.inf
            for source, target in zip(old, new, strict=True) if self._setup.spare else ():
                for start, part in parts:
                    target.tensor[start : start + len(part)].copy_(source.tensor[start : start + len(part)])
            if all(finite(part) for start, part in parts if start >= self._held):
                updater.update(parameters.tensor, parts, tensor_sums, lr=lr, step=version + 1)
            return joined

        joined = await self._runtime.compute(
            update,
            work=Work("apply", elems=sum(len(span) for _, span in sums)),
            reads=[span for _, span in sums],
            writes=[*changed, *(vector.all for vector in updater.state.values())],
            shape_only=math.inf,
        )
        if measured and noise is not None:
            self._note_squares(noise, joined)
        self._meter.updated(parameters, begun_ns)

    async def _tensor_sums(self) -> Mapping[int, Sums]:
        """The sums over each whole tensor, of which every worker has a part."""
        sums, updater, parameters = self._round.sums, self._setup.updater, self._replica.parameters
        parts = [(start, span.tensor) for start, span in sums if len(span)]
        step = self._replica.version + 1
        pieces = await self._runtime.compute(
            lambda _: updater.partial_sums(parameters.tensor, parts, step=step),
            work=Work("apply", elems=sum(len(span) for _, span in sums)),
            reads=[span for _, span in sums] + [vector.all for vector in self._replica.vectors],
            shape_only=list[Piece](),
        )
        told = self.counts[: 2 * self._num_tensors]
        counts, begun_ns = told.tensor.zero_(), self._runtime.now()
        for tensor, pair in add_up(pieces).items():
            counts[2 * tensor : 2 * tensor + 2] = torch.tensor(pair, dtype=counts.dtype)
        total = (await self._group.allreduce(told)).tensor
        self._meter.waited(begun_ns)
        if total.is_meta:
            return {}
        return {tensor: (first, second) for tensor, (first, second) in enumerate(total.view(-1, 2).tolist())}

    async def all_gather(self) -> None:
        """See `strategies.api.Peers`."""
        begun_ns, parameters = self._runtime.now(), self._replica.parameters
        # With one vector for all workers, nothing needs to be moved: they only wait for one another.
        whole = self.sharded and self._group.shares_memory
        for start, stop in [(0, len(parameters))] if whole else self.buckets:
            await self._group.all_gather(parameters[start:stop])
        self._meter.waited(begun_ns)
        if self._made is not None:
            made, self._made = self._made, None
            self._replica.in_model(made.batch)

    async def total_loss(self, gradient: api.Gradient) -> float:
        """See `strategies.api.Peers`."""
        assert isinstance(gradient, ComputedGradient)
        await gradient.done()
        samples = self._round.counts[self._context.rank]
        own = samples * self._replica.mean_loss(gradient) if samples else 0.0
        return sum(loss for loss, _ in await self.tell(own))

    async def command(self, commands: Sequence[v1.Command]) -> Sequence[float]:
        """See `strategies.api.Peers`."""
        from gradstream.server import procedure

        vectors = {"": self._replica.parameters, **self._setup.updater.state}
        used, outs = (
            {name: vectors[name] for name in procedure.names_of(commands)},
            procedure.outs_of(commands),
        )
        begun_ns = self._runtime.now()
        scalars = await self._runtime.compute(
            lambda _: procedure.perform(commands, {name: vector.tensor for name, vector in used.items()}),
            work=Work("apply", elems=len(commands) * len(self._replica.parameters)),
            reads=[vector.all for name, vector in used.items() if name not in outs],
            writes=[used[name].all for name in outs],
            shape_only=[0.0] * procedure.dots_of(commands),
        )
        self._meter.commanded(begun_ns)
        return scalars

    async def leave_out(self, batch: api.Minibatch) -> None:
        """See `strategies.api.Peers`."""
        assert isinstance(batch, SampleBatch)
        await self.tell(0.0)
        self._replica.in_model(batch)

    async def pass_note(self, note: bytes, root: int) -> bytes:
        """Broadcasts the note of rank `root` in the group."""
        length = round((await self.tell(len(note)))[root][0])
        if not length:
            return b""
        words = -(-length // 4)  # 32 bits fit into float64: groups send only floating-point numbers
        vector = self._runtime.memory.allocate(words, torch.float64, "note")
        if self._group.rank == root:
            vector.tensor.copy_(
                torch.from_numpy(np.frombuffer(note.ljust(4 * words, b"\0"), np.uint32).astype(float))
            )
        await self._group.broadcast(vector.all, root=root)
        passed = vector.tensor.numpy().astype(np.uint32).tobytes()[:length]
        self._runtime.memory.free(vector)
        return passed

    async def broadcast(self, vector: Vector, root: int = 0) -> None:
        """Broadcasts the elements of rank `root` in the group."""
        for start, stop in self.buckets:
            await self._group.broadcast(vector[start:stop], root=root)
