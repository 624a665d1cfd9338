"""The arithmetic of one gradient: reads samples, differentiates the model, clips, and checks the result.

    Σ or mean over the minibatch  ◀── k parts, one after the other, summed in one more vector
    clip_value: each element to [-c, c]      clip_norm: g ← g · min(1, c / |g|)

A worker clips its own mean gradient before any exchange, so the norm of the mean over workers does not exceed c
either. With one worker, clipping equals PyTorch's `clip_grad_norm_`.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from gradstream.data.base import BatchPlan, BatchRef, Feed
from gradstream.data.plan import parts_of
from gradstream.errors import GradstreamError, NonFiniteError, UserCodeError
from gradstream.memory import Vector
from gradstream.model.base import Batch, Model, usable
from gradstream.model.rows import RowGradient
from gradstream.runtime.base import Report, Runtime, Work
from gradstream.worker.computed import ComputedGradient, Result, SampleBatch

BLOCK_ELEMS = 1 << 17
"""Length of a block. A norm adds the squares of blocks in float64, so it does not depend on the number of threads."""


@dataclass(frozen=True, slots=True)
class Clip:
    """Limits for a worker's mean gradient.

    Args:
        norm: largest norm over all parameters; None for no limit.
        value: largest absolute value of an element; None for no limit. Applied before `norm`.
    """

    norm: float | None = None
    value: float | None = None

    def __bool__(self) -> bool:
        return self.norm is not None or self.value is not None

    def apply(self, gradient: torch.Tensor, num_summed: int, rows: RowGradient | None = None) -> float | None:
        """Clips in place.

        Args:
            gradient: (E,), finite.
            num_summed: number of samples that it is the sum over; 1 for a mean.
            rows: the part of it for row-sparse tensors.

        Returns:
            Norm of the mean gradient before `norm` was applied; None without `norm`.

        Raises:
            NonFiniteError: the norm overflows.
        """
        if self.value is not None:
            gradient.clamp_(-self.value * num_summed, self.value * num_summed)
            if rows is not None:
                rows.clamp(self.value * num_summed)
        if self.norm is None:
            return None
        vectors = (gradient, *(values.flatten() for values in (rows.values() if rows else ())))
        length = (
            math.sqrt(math.fsum(square for vector in vectors for square in _squares(vector))) / num_summed
        )
        if not math.isfinite(length):
            raise NonFiniteError(
                "the norm of the gradient overflows, so it cannot be clipped; scale the loss, or lower the learning "
                "rate"
            )
        if length > self.norm:
            gradient.mul_(self.norm / length)
            if rows is not None:
                rows.scale(self.norm / length)
        return length


class GradientSource(Protocol):
    """Computes the gradients of one worker: from the job's model (`Differentiator`), or in a user's loop.

    Attributes:
        elsewhere: another thread computes them while the arithmetic thread waits.
    """

    elsewhere: bool

    def milestones(self, gradient: ComputedGradient) -> Sequence[int]:
        """The numbers of elements that `compute` reports."""
        ...

    def passes(self, batch: SampleBatch) -> int:
        """Number of gradients of the model that it takes, one after the other."""
        ...

    def read(self, ref: BatchRef, step: int) -> tuple[Batch, ...]:
        """The samples of a minibatch, part by part."""
        ...

    def compute(self, parameters: torch.Tensor, gradient: ComputedGradient, report: Report) -> Result:
        """Writes a gradient at `parameters` (E,) into its vector and `rows`."""
        ...


@runtime_checkable
class JointSource(GradientSource, Protocol):
    """A source whose gradients several processes compute together, so not in one call on one thread."""

    async def compute_jointly(self, parameters: Vector, gradient: ComputedGradient) -> Result:
        """Replaces `compute`."""
        ...


async def differentiate(
    runtime: Runtime, source: GradientSource, parameters: Vector, gradient: ComputedGradient
) -> Result:
    """Computes a gradient: on the arithmetic thread, or with the other processes of a split replica."""
    if isinstance(source, JointSource):
        return await source.compute_jointly(parameters, gradient)
    vector = gradient.vector
    return await runtime.compute(
        lambda report: source.compute(parameters.tensor, gradient, report),
        work=Work(
            "gradient",
            samples=gradient.samples - gradient.later_samples,
            elems=len(vector),
            passes=source.passes(gradient.batch) - gradient.later,
            elsewhere=source.elsewhere,
        ),
        reads=[parameters.all],
        writes=[vector.all],
        milestones=source.milestones(gradient),
        on_progress=gradient.ready.advance,
        shape_only=Result(math.nan),
    )


class Differentiator:
    """Computes the gradients of one worker from the job's model and data, on the arithmetic thread.

    Args:
        model: the worker's own instance of the model.
        feed: reads the samples of minibatches.
        plan: divides joined minibatches into parts. The gradients of the parts are computed one after the
            other, and summed in that order.
        rank: rank of the worker.
        seed: seed of the run.
        now: clock, in nanoseconds.
        clip: bounds of each gradient; None for none.
        measures: whether the gradients of parts are measured: see `coordinator.growing_batches`.
    """

    elsewhere = False

    def __init__(
        self,
        model: Model,
        feed: Feed,
        plan: BatchPlan,
        *,
        rank: int,
        seed: int,
        now: Callable[[], int],
        clip: Clip | None = None,
        measures: bool = False,
    ) -> None:
        self._measures = measures
        self._squares: list[float] = []  # |g|² of the parts of the current gradient
        self._sizes: set[int] = set()  # and their samples
        self._model = model
        self._feed = feed
        self._plan = plan
        self._rank = rank
        self._seed = seed
        self._clip = clip or Clip()
        self._now = now
        self._read_ns = 0  # spent on reading the samples of the current gradient

    def milestones(self, gradient: ComputedGradient) -> Sequence[int]:
        """See `GradientSource`: the ends of tensors, or only the very end."""
        layout = self._model.layout
        ends = (layout if gradient.rows is None else layout.rest).milestones
        return ends[-1:] if self._held(gradient.mean) else ends

    def _held(self, mean: bool) -> bool:
        """Whether elements are final only when the whole gradient is computed."""
        return bool(self._clip) or self._measures or (mean and self._model.reduction == "sum")

    def passes(self, batch: SampleBatch) -> int:
        """See `GradientSource`."""
        return len(batch.samples or parts_of(self._plan, batch.ref))

    def read(self, ref: BatchRef, step: int) -> tuple[Batch, ...]:
        """See `GradientSource`."""
        return tuple(self._read(part, step) for part in parts_of(self._plan, ref))

    def compute(self, parameters: torch.Tensor, gradient: ComputedGradient, report: Report) -> Result:
        """See `GradientSource`. The minibatch must have samples; they are read unless it brings them.

        Raises:
            UserCodeError, GradientError, DataError: the message names worker, step, data epoch and minibatch.
        """
        self._read_ns = 0
        self._squares, self._sizes = [], set()
        try:
            loss, norm = self._computed(parameters, gradient, report)
        except NonFiniteError as error:
            return Result(math.nan, None, self._read_ns / 1e9, str(error))
        return Result(loss, norm, self._read_ns / 1e9, squares=tuple(self._squares))

    def _computed(
        self, parameters: torch.Tensor, gradient: ComputedGradient, report: Report
    ) -> tuple[float, float | None]:
        """Loss and length of a gradient. Raises NonFiniteError if it cannot be used."""
        into, rows = gradient.vector.tensor, gradient.rows
        held = self._held(gradient.mean)
        looked = None if held or rows is not None else Looked(gradient, report)
        loss = self._summed(parameters, gradient, _unreported if held else looked or report)
        num_summed = gradient.samples if self._model.reduction == "sum" else 1
        if gradient.mean and num_summed > 1:
            into.mul_(1 / num_summed)
            if rows is not None:
                rows.scale(1 / num_summed)
            num_summed = 1
        unseen = _parts(gradient) if looked is None else [into[gradient.sound :]]
        if math.isinf(loss) or not all(map(usable, unseen)):
            what = f"loss is {loss}" if math.isinf(loss) else "gradient has a NaN or an infinity"
            raise NonFiniteError(f"{self._where(gradient.batch.ref, gradient.step)}: the {what}")
        if len(self._squares) > 1 and len(self._sizes) == 1:  # an epoch may end with smaller parts
            self._squares.append(_square(into) / num_summed**2)
        else:
            self._squares = []
        norm = None
        if self._clip:
            with self._users_code(gradient.batch.ref, gradient.step, "model"):
                norm = self._clip.apply(into, num_summed, rows)
        if held:
            report(len(into))
        return loss, norm

    def _summed(self, parameters: torch.Tensor, gradient: ComputedGradient, report: Report) -> float:
        """Σ wᵢgᵢ over the parts, wᵢ = nᵢ/n for means; elements of the last part are reported as they become final."""
        batch, into = gradient.batch, gradient.vector.tensor
        sums = None if gradient.sums is None else gradient.sums.tensor
        parts = batch.samples or (self._read(part, gradient.step) for part in parts_of(self._plan, batch.ref))
        loss, num_done = 0.0, 0
        for index, part in enumerate(part for part in parts if part.num_samples):
            weight = part.num_samples / batch.num_samples if self._model.reduction == "mean" else 1.0
            num_done += part.num_samples
            if num_done == batch.num_samples:
                final = _Final(into, sums if index else None, weight, report, self._measured(part))
                loss += weight * self._differentiate(parameters, gradient, part, index, weight, into, final)
                break
            assert sums is not None
            target = into if index else sums
            loss += weight * self._differentiate(
                parameters, gradient, part, index, weight, target, _unreported
            )
            self._measured(part)(target)
            if index:
                sums.add_(into, alpha=weight)
            elif weight != 1.0:
                sums.mul_(weight)
        return loss

    def _measured(self, part: Batch) -> Callable[[torch.Tensor], None]:
        """Returns a function that measures a part's gradient, block by block, before others are added."""
        if not self._measures:
            return _unmeasured
        summed = part.num_samples if self._model.reduction == "sum" else 1
        self._squares.append(0.0)
        self._sizes.add(part.num_samples)

        def measure(block: torch.Tensor) -> None:
            self._squares[-1] += _square(block) / summed**2

        return measure

    def _differentiate(
        self,
        parameters: torch.Tensor,
        gradient: ComputedGradient,
        part: Batch,
        index: int,
        weight: float,
        into: torch.Tensor,
        report: Report,
    ) -> float:
        seed = hash_seed(self._seed, self._rank, gradient.step, index)
        beside: dict[str, Any] = {}  # only some models accept rows
        tables = gradient.rows if gradient.rows is not None and gradient.rows.tables else None
        if tables is not None:
            beside["rows"] = RowGradient(tables.tables, into.dtype)
        absent = "; the data has no targets: gradstream.from_arrays(inputs, targets) gives it some"
        ref, step = gradient.batch.ref, gradient.step
        with self._users_code(ref, step, "model", "" if part.targets is not None else absent):
            loss = self._model.gradient(parameters, part, into, seed=seed, report=report, **beside)
        if tables is not None:
            tables.add_all(beside["rows"], weight)
        return loss

    def _read(self, ref: BatchRef, step: int) -> Batch:
        begun_ns = self._now()
        with self._users_code(ref, step, "data set"):
            read = self._feed.read(ref)
        self._read_ns += self._now() - begun_ns
        return read

    @contextmanager
    def _users_code(self, ref: BatchRef, step: int, whose: str, hint: str = "") -> Iterator[None]:
        """Adds worker, step and minibatch to an error of the user's code, and keeps its traceback."""
        try:
            yield
        except GradstreamError as error:
            error.args = (f"{self._where(ref, step)}: {error}", *error.args[1:])
            raise
        except (Exception, SystemExit) as error:
            message = f"{self._where(ref, step)}: the {whose} raised {type(error).__name__}: {error}{hint}"
            raise UserCodeError(message, traceback.format_exc()) from error

    def _where(self, ref: BatchRef, step: int) -> str:
        return f"worker-{self._rank}, step {step} (data epoch {ref.epoch}, batch {ref.batch})"


def _squares(vector: torch.Tensor) -> Iterator[float]:
    """The squared lengths of the blocks of a vector."""
    for start in range(0, len(vector), BLOCK_ELEMS):
        yield torch.linalg.vector_norm(vector[start : start + BLOCK_ELEMS]).item() ** 2


def _square(vector: torch.Tensor) -> float:
    return math.fsum(_squares(vector))


def _unmeasured(block: torch.Tensor) -> None:
    """Does nothing: nobody asks for the variance of the gradients."""


def _unreported(elems: int) -> None:
    """A `Report` of elements that are not final yet."""


@dataclass(slots=True)
class _Final:
    """A `Report` of the last part: adds the sum of the earlier parts to each element before it reports it."""

    into: torch.Tensor
    sums: torch.Tensor | None  # None if there are no earlier parts
    weight: float
    report: Report
    measured: Callable[[torch.Tensor], None]
    done: int = 0

    def __call__(self, elems: int) -> None:
        if elems > self.done:
            block = slice(self.done, elems)
            self.measured(self.into[block])
            if self.sums is not None:
                if self.weight != 1.0:
                    self.into[block].mul_(self.weight)
                self.into[block].add_(self.sums[block])
            self.done = elems
        self.report(elems)


@dataclass(slots=True)
class Looked:
    """A `Report` that passes elements on only up to the first one that is not finite."""

    gradient: ComputedGradient
    report: Report
    broken: bool = False

    def __call__(self, elems: int) -> None:
        """See `Report`."""
        done = self.gradient.sound
        if elems <= done or self.broken:
            return
        if usable(self.gradient.vector.tensor[done:elems]):
            self.gradient.sound = elems
            self.report(elems)
        else:
            self.broken = True


def _parts(gradient: ComputedGradient) -> Iterator[torch.Tensor]:
    """All numbers of a gradient."""
    yield gradient.vector.tensor
    if gradient.rows is not None:
        yield from gradient.rows.values()


def hash_seed(seed: int, rank: int, step: int, part: int = 0) -> int:
    """The seed for the randomness (dropout) of one gradient, a function of only its arguments."""
    value = seed * 0x9E3779B97F4A7C15 + rank * 0xBF58476D1CE4E5B9 + step * 0x94D049BB133111EB
    value = (value + part * 0xD6E8FEB86659FD93) & (2**64 - 1)
    value ^= value >> 31
    return value & (2**63 - 1)
