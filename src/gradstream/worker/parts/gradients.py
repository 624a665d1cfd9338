"""The gradient of a minibatch, computed by all parts of a replica together.

    each part has its part of the gradient
    all parts agree: finite?  its length over all parts?  ─▶ scaled or refused, the same in every part

Where the length is not asked for, a part's elements may leave as they become final, while parts below compute.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch

from gradstream.data.base import BatchRef, Feed
from gradstream.errors import InternalError
from gradstream.memory import Span, Vector
from gradstream.model.base import Batch, usable
from gradstream.runtime.base import Report, Runtime, Work
from gradstream.runtime.base import Report as Progress
from gradstream.split.part_model import PartModel
from gradstream.strategies.base import GroupStrategy
from gradstream.telemetry.events import PartEvent
from gradstream.worker.computed import ComputedGradient, Result, SampleBatch
from gradstream.worker.config import WorkerConfig
from gradstream.worker.gradient import BLOCK_ELEMS, hash_seed
from gradstream.worker.parts.agreement import Agreement
from gradstream.worker.parts.channel import PartChannel
from gradstream.worker.parts.messages import PartReport

# ---- meter -------------------------------------------------------------------------------
# `PartMeter`: divides the time that a part spends on gradients into computing and waiting for other parts.

T = TypeVar("T")


class PartMeter:
    """Counts the seconds of one process of a split replica.

    All time of a gradient in which the process computes nothing is waiting: for values, for gradients, or for what
    the other parts report.

    Args:
        runtime: of the process.
        rank: rank of the replica.
        part: the part that the process holds.
    """

    def __init__(self, runtime: Runtime, rank: int, part: int) -> None:
        self._runtime = runtime
        self._rank = rank
        self._part = part
        self._own_ns = 0  # of the gradient in progress
        self._minibatches = self._compute_ns = self._wait_ns = 0

    @contextmanager
    def minibatch(self, begun_ns: int) -> Iterator[None]:
        """Measures the body, which computes one gradient, from `begun_ns` to the end of the body."""
        self._own_ns = 0
        yield
        self._minibatches += 1
        self._compute_ns += self._own_ns
        self._wait_ns += self._runtime.now() - begun_ns - self._own_ns

    async def compute(
        self, fn: Callable[[], T], *, work: Work, reads: Sequence[Span] = (), writes: Sequence[Span] = ()
    ) -> T:
        """See `Runtime.compute`."""
        return await self.compute_in_steps(lambda _: fn(), work=work, reads=reads, writes=writes)

    async def compute_in_steps(self, fn: Callable[[Report], T], *, work: Work, **how: Any) -> T:
        """The same of a function that reports what is final; `how` are arguments of `Runtime.compute`."""
        begun_ns = self._runtime.now()
        result: T = await self._runtime.compute(fn, work=work, **how)
        self._own_ns += self._runtime.now() - begun_ns
        return result

    async def compute_here(
        self, fn: Callable[[], T], *, work: Work, reads: Sequence[Span] = (), writes: Sequence[Span] = ()
    ) -> T:
        """As `compute`, in the calling thread, which holds the memory already."""
        del work, reads, writes
        return self.count(fn)[0]

    def count(self, fn: Callable[[], T]) -> tuple[T, float]:
        """Computes in the calling thread. Returns the result, and the seconds."""
        begun_ns = self._runtime.now()
        result = fn()
        own_ns = self._runtime.now() - begun_ns
        self._own_ns += own_ns
        return result, own_ns / 1e9

    def report(self) -> list[PartEvent]:
        """What was counted since the last call; nothing if no gradient was done."""
        if not self._minibatches:
            return []
        event = PartEvent(
            rank=self._rank,
            part=self._part,
            minibatches=self._minibatches,
            compute_s=self._compute_ns / 1e9,
            wait_s=self._wait_ns / 1e9,
        )
        self._minibatches = self._compute_ns = self._wait_ns = 0
        return [event]


# ---- gradients ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PartPlace:
    """The objects that one process of a split replica uses to work with the other processes of that replica.

    No such process can compute a gradient, or report a minibatch, without the others.

    Args:
        gradients: computes this part's gradients together with the other parts.
        pushed: callback; gets the minibatches whose gradients this part's shards have applied.
        agreement: lets the parts agree on whether a gradient is finite, and how long it is.
        feed_of: from a worker's rank, makes the object that reads that worker's minibatches; returns None on all
            parts but part 0, which alone reads data.
    """

    gradients: PartSource
    pushed: Callable[[Sequence[BatchRef]], None]
    agreement: Agreement
    feed_of: Callable[[int], Feed | None]

    def source_of(self, rank: int) -> PartSource:
        """The source of another worker's gradients, on this replica's model."""
        return self.gradients.of_rank(rank, self.feed_of(rank))


class PartSource(ABC):
    """Computes one part's gradients. Implements `worker.gradient.JointSource`.

    Args:
        config: of the process.
        runtime: of the process.
        model: the part's model.
        channel: to the other parts.
        agreement: see `Agreement`.
        feed: reads minibatches, on part 0; None on others.

    Attributes:
        meter: counts the time of this process.
        redoing: computes the minibatches of lost replicas; this source itself, where its pipeline is empty between
            two gradients.
        exchanges: others wait for this part's gradients: shards, or the same part of other replicas.
    """

    elsewhere = False

    def __init__(
        self,
        config: WorkerConfig,
        runtime: Runtime,
        model: PartModel,
        channel: PartChannel,
        agreement: Agreement,
        feed: Feed | None,
    ) -> None:
        self.model = model
        self.meter = PartMeter(runtime, config.rank, model.part)
        self._runtime = runtime
        self._channel = channel
        self._agreement = agreement
        self._feed = feed
        self._rank = config.rank
        self._seed = config.plan.job.seed
        self._clip = config.clip
        self.exchanges = config.plan.workers > 1 or not isinstance(config.plan.strategy, GroupStrategy)
        self.redoing: PartSource = self

    def of_rank(self, rank: int, feed: Feed | None) -> PartSource:
        """Computes the gradients of another worker, with its samples and its random numbers."""
        other = copy(self)
        other._rank, other._feed = rank, feed
        return other

    def milestones(self, gradient: ComputedGradient) -> Sequence[int]:
        """See `GradientSource`: only the very end."""
        return [len(gradient.vector)]

    def passes(self, batch: SampleBatch) -> int:
        """See `GradientSource`."""
        return 1

    def read(self, ref: BatchRef, step: int) -> tuple[Batch, ...]:
        """See `GradientSource`."""
        assert self._feed is not None
        return (self._feed.read(ref),)

    def compute(self, parameters: torch.Tensor, gradient: ComputedGradient, report: Progress) -> Result:
        """Raises InternalError: see `compute_jointly`."""
        raise InternalError("a part alone was asked for a gradient")

    async def compute_jointly(self, parameters: Vector, gradient: ComputedGradient) -> Result:
        """Computes this part's gradient at `parameters` into its vector, while the other parts compute theirs.

        Raises:
            UserCodeError, GradientError: this part's piece of the model failed.
            PeerLostError: another part was lost.
        """
        begun_ns = self._runtime.now()
        async with self._turn(gradient.batch.ref):
            with self.meter.minibatch(begun_ns):
                return await self._compute_jointly(parameters, gradient)

    def _turn(self, ref: BatchRef) -> AbstractAsyncContextManager[None]:
        """The time in which all parts compute this gradient, and no other one; any time, where they need none."""
        del ref
        return nullcontext()

    @abstractmethod
    async def _compute_jointly(self, parameters: Vector, gradient: ComputedGradient) -> Result: ...

    async def _report(self, gradient: ComputedGradient, computed: Computed) -> tuple[PartReport, int]:
        """(what this part knows of its gradient, number of samples that it is the sum over). Bounds its elements."""
        into, num_summed = gradient.vector, gradient.batch.num_samples if self.model.reduction == "sum" else 1
        unseen = len(into) - gradient.sound
        report = await self.meter.compute(
            lambda: self._look(into.tensor, computed, num_summed, gradient.sound),
            work=Work("copy", elems=unseen, brief=not unseen),
            reads=[into.all],
            writes=[into.all] if self._clip.value is not None else [],
        )
        return report, num_summed

    async def _scale(self, gradient: ComputedGradient, scale: float, num_summed: int) -> None:
        """Makes the gradient final: times a factor, and a mean where that is asked for."""
        into = gradient.vector
        if gradient.mean and num_summed > 1:
            scale /= num_summed
        if scale != 1.0:
            await self.meter.compute(
                lambda: into.tensor.mul_(scale), work=Work("copy", elems=len(into)), writes=[into.all]
            )
        gradient.ready.advance(len(into))

    def _look(self, into: torch.Tensor, computed: Computed, num_summed: int, seen: int) -> PartReport:
        """What this part knows of its gradient, whose first `seen` elements are known to be finite. Bounds them."""
        loss, refused = computed.loss, computed.refused
        if not refused and not usable(into[seen:]):
            refused = f"the gradient of part {self.model.part} has a NaN or an infinity"
        if refused:
            return PartReport("gradient", refused=refused)
        if self._clip.value is not None:
            into.clamp_(-self._clip.value * num_summed, self._clip.value * num_summed)
        squares = 0.0
        if self._clip.norm is not None:
            parts = range(0, len(into), BLOCK_ELEMS)
            squares = math.fsum(
                torch.linalg.vector_norm(into[start : start + BLOCK_ELEMS]).item() ** 2 for start in parts
            )
        known = None if loss is None or math.isnan(loss) else loss
        return PartReport("gradient", squares=squares, loss=known)

    async def _read(self, gradient: ComputedGradient, cuts: Sequence[int]) -> tuple[Values | None, float]:
        """(values of the minibatch, seconds of reading); on a part that does not read, (None, 0)."""
        if (feed := self._feed) is None:
            return None, 0.0
        batch, begun_ns = gradient.batch, self._runtime.now()
        work = Work("read", samples=batch.num_samples)
        read = await self.meter.compute(lambda: feed.read(batch.ref), work=work)
        return Values(self.model, read, cuts), (self._runtime.now() - begun_ns) / 1e9

    def where(self, gradient: ComputedGradient) -> str:
        """The place of a gradient in the run, for messages."""
        ref = gradient.batch.ref
        return f"worker-{self._rank}, step {gradient.step} (data epoch {ref.epoch}, batch {ref.batch})"

    def stage_seed(self, step: int, micro_batch: int) -> int:
        """Seed of the random numbers of a micro-batch."""
        return hash_seed(self._seed, self._rank, step, micro_batch)


class Computed:
    """What a part knows of a gradient that it has computed.

    Attributes:
        loss: of the samples for which this part computes it; None if for none.
        refused: why the gradient cannot be used; "" if it can.
    """

    def __init__(self) -> None:
        self.loss: float | None = None
        self.refused = ""


class AgreedSource(PartSource):
    """Computes a part's elements of each gradient. The parts agree on it: all of them use it, or none does."""

    def _turn(self, ref: BatchRef) -> AbstractAsyncContextManager[None]:
        return self._agreement.turn(ref)

    async def _compute_jointly(self, parameters: Vector, gradient: ComputedGradient) -> Result:
        computed, read_s = await self._compute(parameters, gradient)
        mine, num_summed = await self._report(gradient, computed)
        if not mine.refused and self._leaves_early(gradient):
            gradient.sound = len(gradient.vector)
            gradient.ready.advance(gradient.sound)
        await self._share_buffers()
        agreed = await self._agreement.reach(mine, self._clip, num_summed)
        if not agreed.refused:
            await self._scale(gradient, agreed.scale, num_summed)
        refused = agreed.refused and f"{self.where(gradient)}: {agreed.refused}"
        return Result(agreed.loss, agreed.norm, read_s, refused)

    def _leaves_early(self, gradient: ComputedGradient) -> bool:
        """Whether elements may be pushed before the other parts have theirs: what they agree on changes none.

        As in a replica of one process: if a part's gradient turns out not to be finite, what has left stays in use.
        """
        return not self._clip and not (gradient.mean and self.model.reduction == "sum")

    async def _share_buffers(self) -> None:
        await self._agreement.share_buffers()

    @abstractmethod
    async def _compute(self, parameters: Vector, gradient: ComputedGradient) -> tuple[Computed, float]:
        """Computes this part's elements. Returns what is known of them, and the seconds of reading samples."""


class LateValues:
    """The values of a minibatch, which the thread of passes reads when it first needs one.

    Args:
        read: reads them.
        meter: counts the time.

    Attributes:
        read_s: seconds of reading.
    """

    def __init__(self, read: Callable[[], Values], meter: PartMeter) -> None:
        self.read_s = 0.0
        self._read = read
        self._meter = meter

    @cached_property
    def _values(self) -> Values:
        values, self.read_s = self._meter.count(self._read)
        return values

    def of(self, name: str, micro_batch: int) -> torch.Tensor:
        """The value of a micro-batch."""
        return self._values.of(name, micro_batch)


class Values:
    """The values of a minibatch by name, cut into micro-batches.

    Args:
        model: gives the names.
        batch: the minibatch.
        cuts: edges of the micro-batches.
    """

    def __init__(self, model: PartModel, batch: Batch, cuts: Sequence[int]) -> None:
        self._values = model.values(batch)
        self._cuts = cuts

    def of(self, name: str, micro_batch: int) -> torch.Tensor:
        """The value of a micro-batch."""
        return self._values[name][self._cuts[micro_batch] : self._cuts[micro_batch + 1]]


def nothing(name: str, micro_batch: int) -> torch.Tensor:
    """In place of the minibatch, on a part that does not read it. Raises InternalError."""
    raise InternalError(f"{name!r}: only part 0 reads minibatches")
