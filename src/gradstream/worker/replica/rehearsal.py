"""`rehearse`: how long a worker computes a gradient, from gradients that nobody uses."""

from __future__ import annotations

import statistics

from gradstream.memory import Vector
from gradstream.model.buffers import buffers_of, load_buffers
from gradstream.runtime.base import Work
from gradstream.worker.computed import ComputedGradient, Result, SampleBatch
from gradstream.worker.replica.base import ReplicaContext
from gradstream.worker.schedule import Schedule

TIMES = 4
"""The first gradient of a process may be slow for other reasons, and does not count."""


async def rehearse(
    context: ReplicaContext, parameters: Vector, into: Vector, sums: Vector | None, done: int
) -> float:
    """Computes the gradient of the worker's next minibatch, and leaves the model as it was, with its buffers.

    Args:
        context: parts of the replica.
        parameters: (E,), not changed.
        into: (E,), overwritten.
        sums: (E,), overwritten; for minibatches in parts.
        done: number of minibatches that the worker has gone through.

    Returns:
        Seconds of a gradient, the median of `TIMES` but the first; 0 if the worker has no samples there.

    Raises:
        UserCodeError, GradientError, DataError: as for any gradient.
    """
    source, schedule, runtime = context.gradients, context.schedule, context.runtime
    assert isinstance(schedule, Schedule)  # loops of the user's own have no phases
    if done >= schedule.num_batches:
        return 0.0
    ref = schedule.plan.nth(context.rank, done)
    samples = schedule.size(ref)
    if not samples:
        return 0.0
    batch, step = SampleBatch(ref, samples), context.first_step + done

    def compute(_: object) -> Result:
        before = buffers_of(context.model)
        gradient = ComputedGradient(into, batch, schedule.rate(ref), step, sums=sums)
        try:
            return source.compute(parameters.tensor, gradient, lambda elems: None)
        finally:
            if before:
                load_buffers(context.model, before)

    found = []
    for _ in range(TIMES):
        begun_ns = runtime.now()
        work = Work("gradient", samples=samples, elems=len(into), passes=source.passes(batch))
        await runtime.compute(
            compute,
            work=work,
            reads=[parameters.all],
            writes=[into.all],
            shape_only=Result(0.0),
        )
        found.append((runtime.now() - begun_ns) / 1e9)
    return statistics.median(found[1:])
