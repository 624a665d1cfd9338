"""`PartJointGradient`: a split replica computes the minibatches of several workers in a round, as one minibatch."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

from gradstream.errors import InternalError
from gradstream.memory import Vector
from gradstream.runtime.base import Runtime, Work
from gradstream.worker.computed import ComputedGradient, Result, SampleBatch
from gradstream.worker.gradient import JointSource
from gradstream.worker.joint_gradient import JointGradient


class PartJointGradient(JointGradient):
    """See `JointGradient`: the same sum, of gradients that all parts of the replica compute together.

    Args:
        runtime: of this process.
        sources, schedule, reduction, part: of a `JointGradient`.
    """

    def __init__(self, runtime: Runtime, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self._runtime = runtime

    async def compute_jointly(self, parameters: Vector, gradient: ComputedGradient) -> Result:
        """See `JointSource`."""
        into, total, ref = gradient.vector, gradient.samples, gradient.batch.ref
        means = gradient.mean or self._reduction == "mean"
        loss, read_s, norm, vector = 0.0, 0.0, None, into
        for rank, source in self._sources.items():
            samples = self._size(ref, rank)
            if not samples:
                continue
            if not isinstance(source, JointSource):
                raise InternalError(f"the gradients of worker-{rank} are not computed jointly")
            batch = SampleBatch(replace(ref, partition=rank), samples)
            part = ComputedGradient(vector, batch, gradient.lr, gradient.step, gradient.mean)
            result = await source.compute_jointly(parameters, part)
            if result.refused:
                return Result(math.nan, refused=result.refused)
            weight = samples / total if means else 1.0
            await self._runtime.compute(
                partial(_add, into, vector, weight),
                work=Work("copy", elems=len(into)),
                reads=[vector.all] if vector is not into else [],
                writes=[into.all],
            )
            vector = self.part
            loss += result.loss * (samples / total if self._reduction == "mean" else 1.0)
            read_s += result.read_s
            norm = result.norm if norm is None else max(norm, result.norm or 0.0)
        gradient.ready.advance(len(into))
        return Result(loss, norm, read_s)


def _add(into: Vector, vector: Vector, weight: float, _: object) -> None:
    """Adds a gradient to the sum; the first one is there already."""
    if vector is not into:
        into.tensor.add_(vector.tensor, alpha=weight)
    elif weight != 1.0:
        into.tensor.mul_(weight)
