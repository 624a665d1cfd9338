"""`JointGradient`: one worker computes the minibatches of several workers in a round as a single minibatch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from gradstream.data.base import BatchRef
from gradstream.memory import Vector
from gradstream.model.base import Batch, Reduction
from gradstream.runtime.base import Report
from gradstream.worker.computed import ComputedGradient, Result, SampleBatch
from gradstream.worker.gradient import GradientSource
from gradstream.worker.schedule import BatchSchedule


class JointGradient:
    """Implements `GradientSource`: the gradient of the minibatches that several ranks have in a round.

        g = Σ nᵢ gᵢ / Σ nᵢ    of means over samples,    Σ gᵢ    of sums

    Each gᵢ has the samples, random numbers and clipping of its rank. If any gᵢ is not finite, g is not used.

    Args:
        sources: by rank, the source of its gradients; all on this worker's model.
        schedule: sizes of minibatches.
        reduction: whether gradients are means or sums over their samples.
        part: (E,), memory for one gᵢ.
    """

    elsewhere = False

    def __init__(
        self,
        sources: Mapping[int, GradientSource],
        schedule: BatchSchedule,
        reduction: Reduction,
        part: Vector,
    ) -> None:
        self._sources = dict(sorted(sources.items()))
        self._schedule = schedule
        self._reduction = reduction
        self.part = part

    def size(self, ref: BatchRef) -> int:
        """Number of samples of all ranks' minibatches in the round of this one."""
        return sum(self._size(ref, rank) for rank in self._sources)

    def _size(self, ref: BatchRef, rank: int) -> int:
        return self._schedule.size(replace(ref, partition=rank)) or 0

    def milestones(self, gradient: ComputedGradient) -> Sequence[int]:
        """See `GradientSource`: only the end, since no element is final before the last rank's gradient is added."""
        return (len(gradient.vector),)

    def passes(self, batch: SampleBatch) -> int:
        """See `GradientSource`."""
        batches = {rank: replace(batch, ref=replace(batch.ref, partition=rank)) for rank in self._sources}
        return sum(
            self._sources[rank].passes(one) for rank, one in batches.items() if self._size(one.ref, rank)
        )

    def read(self, ref: BatchRef, step: int) -> tuple[Batch, ...]:
        """See `GradientSource`."""
        return self._sources[ref.partition].read(ref, step)

    def compute(self, parameters: torch.Tensor, gradient: ComputedGradient, report: Report) -> Result:
        """See `GradientSource`."""
        into, total, ref = gradient.vector.tensor, gradient.samples, gradient.batch.ref
        means = gradient.mean or self._reduction == "mean"
        loss, read_s, norm, vector = 0.0, 0.0, None, gradient.vector
        for rank, source in self._sources.items():
            samples = self._size(ref, rank)
            if not samples:
                continue
            batch = SampleBatch(replace(ref, partition=rank), samples)
            part = ComputedGradient(
                vector, batch, gradient.lr, gradient.step, gradient.mean, sums=gradient.sums
            )
            result = source.compute(parameters, part, lambda elems: None)
            if result.refused:
                return Result(math.nan, refused=result.refused)
            weight = samples / total if means else 1.0
            if vector is self.part:
                into.add_(vector.tensor, alpha=weight)
            elif weight != 1.0:
                into.mul_(weight)
            vector = self.part
            loss += result.loss * (samples / total if self._reduction == "mean" else 1.0)
            read_s += result.read_s
            norm = result.norm if norm is None else max(norm, result.norm or 0.0)
        report(len(into))
        return Result(loss, norm, read_s)
