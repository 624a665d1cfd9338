"""The arithmetic of one gradient: samples read, differentiated in parts, clipped, looked at.

    Σ or mean over the minibatch  ◀── k parts, one after the other, through one more vector
    clip_value: each element to [-c, c]      clip_norm: g ← g · min(1, c / |g|)

Clipping is of what this worker brings, before any exchange, in units of the mean gradient. The mean
of clipped gradients is no longer than c either; with one worker it is what `clip_grad_norm_` does.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from gradstream.data.base import BatchPlan, BatchRef, Feed
from gradstream.data.joined import parts_of
from gradstream.errors import GradientError, GradstreamError, UserCodeError
from gradstream.model.base import Model
from gradstream.model.batch import Batch
from gradstream.model.check import finite
from gradstream.model.factors import FactorPairs
from gradstream.model.rows import RowGradient
from gradstream.runtime.base import Report

__all__ = ["Clip", "Differentiator", "GradientSource", "Result", "hash_seed"]

BLOCK_ELEMS = 1 << 17
"""A norm is the root of the sum of these blocks' squares in float64: the same with any number of threads."""


@dataclass(frozen=True, slots=True)
class Clip:
    """Bounds of a worker's mean gradient.

    Args:
        norm: of its length, over all parameters; None for none.
        value: of each element; None for none. Comes first where both are given.
    """

    norm: float | None = None
    value: float | None = None

    def __bool__(self) -> bool:
        return self.norm is not None or self.value is not None

    def apply(self, gradient: torch.Tensor, num_summed: int, rows: RowGradient | None = None) -> float | None:
        """Clips in place.

        Args:
            gradient: (E,), finite.
            num_summed: samples it is the sum over; 1 for a mean.
            rows: what else it has.

        Returns:
            The length of the mean gradient before `norm` was applied; None without `norm`.

        Raises:
            GradientError: the length is beyond what its dtype can hold.
        """
        if self.value is not None:
            gradient.clamp_(-self.value * num_summed, self.value * num_summed)
            if rows is not None:
                rows.clamp(self.value * num_summed)
        if self.norm is None:
            return None
        squares = [
            torch.linalg.vector_norm(part[start : start + BLOCK_ELEMS]).item() ** 2
            for part in (gradient, *(values.flatten() for values in (rows.values() if rows else ())))
            for start in range(0, len(part), BLOCK_ELEMS)
        ]
        length = math.sqrt(math.fsum(squares)) / num_summed
        if not math.isfinite(length):
            raise GradientError("the gradient's length is beyond what its dtype can hold; scale the loss")
        if length > self.norm:
            gradient.mul_(self.norm / length)
            if rows is not None:
                rows.scale(self.norm / length)
        return length


@dataclass(frozen=True, slots=True)
class Result:
    """What is known of a gradient besides its elements.

    Args:
        loss: mean or sum over samples, as the model's `reduction` says; NaN where unknown.
        norm: length of the mean gradient before clipping; None where it is not clipped by length.
        read_s: of the time that it took, what reading samples took.
    """

    loss: float
    norm: float | None = None
    read_s: float = 0.0


class GradientSource(Protocol):
    """Where the gradients of one worker come from: see `Differentiator`.

    Attributes:
        elsewhere: another thread computes them, and that of arithmetic waits for it.
    """

    elsewhere: bool

    def milestones(self, *, mean: bool, rows: bool = False) -> Sequence[int]:
        """What `gradient` reports."""
        ...

    def read(self, ref: BatchRef, step: int) -> tuple[Batch, ...]:
        """The samples of a minibatch."""
        ...

    def gradient(
        self,
        parameters: torch.Tensor,
        ref: BatchRef,
        into: torch.Tensor,
        *,
        num_samples: int,
        step: int,
        mean: bool,
        report: Report,
        samples: Sequence[Batch] | None = None,
        sums: torch.Tensor | None = None,
        factors: FactorPairs | None = None,
        rows: RowGradient | None = None,
    ) -> Result:
        """Writes the gradient of a minibatch at `parameters` (E,) into `into` (E,), `factors` and `rows`."""
        ...


class Differentiator:
    """Computes the gradients of one worker: the user's code, on the arithmetic thread.

    Args:
        model: this worker's own.
        feed: reads the samples of minibatches.
        plan: what is joined in a minibatch: its parts are differentiated one after the other, each
            in its own memory, and summed up in that order.
        rank: of this worker.
        seed: of the run.
        clip: bounds.
        now: nanoseconds.
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
    ) -> None:
        self._model = model
        self._feed = feed
        self._plan = plan
        self._rank = rank
        self._seed = seed
        self._clip = clip or Clip()
        self._now = now
        self._read_ns = 0  # reading samples of the gradient that is being computed

    def milestones(self, *, mean: bool, rows: bool = False) -> Sequence[int]:
        """What `gradient` reports: the ends of tensors, or only the very end."""
        layout = self._model.layout
        ends = (layout.rest if rows else layout).milestones
        return ends[-1:] if self._held(mean) else ends

    def _held(self, mean: bool) -> bool:
        """Whether nothing is final before the whole gradient is there."""
        return bool(self._clip) or (mean and self._model.reduction == "sum")

    def read(self, ref: BatchRef, step: int) -> tuple[Batch, ...]:
        """The samples of a minibatch, part by part: the user's code, on the arithmetic thread."""
        return tuple(self._read(part, step) for part in parts_of(self._plan, ref))

    def gradient(
        self,
        parameters: torch.Tensor,
        ref: BatchRef,
        into: torch.Tensor,
        *,
        num_samples: int,
        step: int,
        mean: bool,
        report: Report,
        samples: Sequence[Batch] | None = None,
        sums: torch.Tensor | None = None,
        factors: FactorPairs | None = None,
        rows: RowGradient | None = None,
    ) -> Result:
        """The gradient of a minibatch.

        Args:
            parameters: (E,), read.
            ref: names the minibatch.
            into: (E,), written.
            num_samples: how many it has, at least one.
            step: of this worker: for messages, and for the seed of dropout.
            mean: the mean over samples, also of a model that gives sums.
            report: called as `into` becomes final from the front.
            samples: what `read` gave; None reads them now.
            sums: (E,) to sum up parts in; needed where there are several.
            factors: take the sufficient factors of some layers; not for a minibatch in parts, nor for a mean.
            rows: takes the gradients of row-sparse tensors, and has none yet; `into` and `sums` are then
                those of `layout.rest`.

        Raises:
            UserCodeError, GradientError, DataError: naming worker, step, data epoch and minibatch.
        """
        self._read_ns = 0
        read = samples or (self._read(part, step) for part in parts_of(self._plan, ref))
        hold: Report = (lambda _: None) if self._held(mean) else report
        place = _Place(parameters, ref, step, factors or {}, rows)
        loss = self._summed(place, read, num_samples, into, sums, hold)
        num_summed = num_samples if self._model.reduction == "sum" else 1
        if mean and num_summed > 1:
            into.mul_(1 / num_summed)
            if rows is not None:
                rows.scale(1 / num_summed)
            num_summed = 1
        if math.isinf(loss) or not all(map(finite, _parts(into, factors or {}, rows))):
            what = f"loss is {loss}" if math.isinf(loss) else "gradient has a NaN or an infinity"
            raise GradientError(
                f"{self._where(ref, step)}: the {what}; lower the learning rate, scale the inputs, or "
                "clip the gradient. Nothing of it was applied where the exchange does not overlap"
            )
        norm = None
        if self._clip:
            with self._users_code(ref, step, "model"):
                norm = self._clip.apply(into, num_summed, rows)
        if self._held(mean):
            report(len(into))
        return Result(loss, norm, self._read_ns / 1e9)

    def _summed(
        self,
        at: _Place,
        parts: Iterable[Batch],
        num_samples: int,
        into: torch.Tensor,
        sums: torch.Tensor | None,
        report: Report,
    ) -> float:
        """Σ wᵢgᵢ over the parts, wᵢ = nᵢ/n for means; elements of the last one are final as they come."""
        loss = 0.0
        num_done = 0
        for index, part in enumerate(part for part in parts if part.num_samples):
            weight = part.num_samples / num_samples if self._model.reduction == "mean" else 1.0
            num_done += part.num_samples
            if num_done == num_samples:
                final = _Final(into, sums if index else None, weight, report)
                loss += weight * self._differentiate(at, part, index, weight, into, final)
                break
            assert sums is not None
            target = into if index else sums
            loss += weight * self._differentiate(at, part, index, weight, target, lambda _: None)
            if index:
                sums.add_(into, alpha=weight)
            elif weight != 1.0:
                sums.mul_(weight)
        return loss

    def _differentiate(
        self, at: _Place, part: Batch, index: int, weight: float, into: torch.Tensor, report: Report
    ) -> float:
        seed = hash_seed(self._seed, self._rank, at.step, index)
        beside: dict[str, Any] = {"factors": at.factors} if at.factors else {}  # only some models know of it
        if at.rows is not None and at.rows.tables:
            beside["rows"] = RowGradient(at.rows.tables, into.dtype)
        absent = "; the data has no targets: gradstream.from_arrays(inputs, targets) gives it some"
        with self._users_code(at.ref, at.step, "model", "" if part.targets is not None else absent):
            loss = self._model.gradient(at.parameters, part, into, seed=seed, report=report, **beside)
        if at.rows is not None and at.rows.tables:
            at.rows.add_all(beside["rows"], weight)
        return loss

    def _read(self, ref: BatchRef, step: int) -> Batch:
        begun_ns = self._now()
        with self._users_code(ref, step, "data set"):
            read = self._feed.read(ref)
        self._read_ns += self._now() - begun_ns
        return read

    @contextmanager
    def _users_code(self, ref: BatchRef, step: int, whose: str, hint: str = "") -> Iterator[None]:
        """What the user's code raises names the worker, step and minibatch, and keeps its traceback."""
        try:
            yield
        except GradstreamError as error:
            error.args = (f"{self._where(ref, step)}: {error}", *error.args[1:])
            raise
        except Exception as error:
            message = f"{self._where(ref, step)}: the {whose} raised {type(error).__name__}: {error}{hint}"
            raise UserCodeError(message, traceback.format_exc()) from error

    def _where(self, ref: BatchRef, step: int) -> str:
        return f"worker-{self._rank}, step {step} (data epoch {ref.epoch}, batch {ref.batch})"


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a gradient is taken: parameters (E,), minibatch, step of the worker; and where parts of it go."""

    parameters: torch.Tensor
    ref: BatchRef
    step: int
    factors: FactorPairs
    rows: RowGradient | None


@dataclass(slots=True)
class _Final:
    """A `Report` that adds the sum of the parts before to the elements that have become final."""

    into: torch.Tensor
    sums: torch.Tensor | None  # None where there is only this part
    weight: float
    report: Report
    done: int = 0

    def __call__(self, elems: int) -> None:
        if self.sums is not None and elems > self.done:
            block = slice(self.done, elems)
            if self.weight != 1.0:
                self.into[block].mul_(self.weight)
            self.into[block].add_(self.sums[block])
            self.done = elems
        self.report(elems)


def _parts(gradient: torch.Tensor, factors: FactorPairs, rows: RowGradient | None) -> Iterator[torch.Tensor]:
    """All numbers of a gradient, including sufficient factors."""
    done = 0
    for one in factors.values():
        if one.state != "refused":
            yield gradient[done : one.layer.start]
            yield one.delta
            yield one.x
            done = one.layer.stop
    yield gradient[done:]
    if rows is not None:
        yield from rows.values()


def hash_seed(seed: int, rank: int, step: int, part: int = 0) -> int:
    """A seed for one gradient's own randomness (dropout): a function of (seed, rank, step, part)."""
    value = seed * 0x9E3779B97F4A7C15 + rank * 0xBF58476D1CE4E5B9 + step * 0x94D049BB133111EB
    value = (value + part * 0xD6E8FEB86659FD93) & (2**64 - 1)
    value ^= value >> 31
    return value & (2**63 - 1)
