"""Buffers: arrays of a model besides its parameters, such as running means. Each replica has its own.

They are neither trained nor exchanged during training. For an evaluation or a checkpoint, which need one model,
the buffers of all workers are averaged, weighted by the samples that each has trained on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from gradstream.model.arrays import same_bits

Buffers = Mapping[str, np.ndarray[Any, Any]]
"""Arrays by the user's own names."""


def buffers_of(model: object) -> dict[str, np.ndarray[Any, Any]]:
    """Copies of a model's buffers; {} for a model without any."""
    give = getattr(model, "buffers", None)
    return {} if give is None else dict(give())


def load_buffers(model: object, buffers: Buffers) -> None:
    """Sets a model's buffers, if it has any. Names that the model does not know are ignored.

    Raises:
        ConfigError: a buffer is missing, or has another shape than one that the model never changes.
    """
    take = getattr(model, "load_buffers", None)
    if take is not None:
        take(buffers)


@contextmanager
def with_buffers(model: object, buffers: Buffers) -> Iterator[None]:
    """Inside, the model has these buffers. Raises ConfigError as `load_buffers` does."""
    own = buffers_of(model)
    try:
        if buffers:
            load_buffers(model, buffers)
        yield
    finally:
        load_buffers(model, own)


def average_buffers(replicas: Sequence[tuple[float, Buffers]]) -> dict[str, np.ndarray[Any, Any]]:
    """Averages the buffers of several replicas.

    What is equal everywhere stays as it is. Floating-point and complex buffers become the weighted mean, computed in
    double precision. Integers and booleans (a count of batches, a flag) become the largest. The mean of running
    variances is an approximation: it leaves out the distances between the replicas' means. Buffers whose shapes or
    dtypes differ, and those that not every replica has, have no mean: they are those of the first replica that
    has samples.

    Args:
        replicas: (number of samples that the replica has trained on, its buffers) of each replica. A replica
            without samples does not count. If no replica has any, all have the same weight.
    """
    counted = [(weight, buffers) for weight, buffers in replicas if weight] or [
        (1.0, one) for _, one in replicas
    ]
    if not counted:
        return {}
    weights = np.array([weight for weight, _ in counted], dtype=np.float64)
    return {
        name: _average(weights, [buffers[name] for _, buffers in counted if name in buffers])
        for name in counted[0][1]
    }


def _average(weights: np.ndarray[Any, Any], arrays: list[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    first = arrays[0]
    kinds = {(array.shape, array.dtype) for array in arrays}
    if len(arrays) < len(weights) or len(kinds) > 1 or all(same_bits(array, first) for array in arrays):
        return first
    several = np.stack(arrays)
    if first.dtype.kind not in "fc":
        return np.asarray(np.max(several, axis=0))
    wide = np.complex128 if first.dtype.kind == "c" else np.float64
    with np.errstate(invalid="ignore"):  # inf - inf is NaN, as it should be
        mean = np.tensordot(weights, several.astype(wide), axes=1) / weights.sum()
    return np.where((several == first).all(axis=0), first, np.asarray(mean).astype(first.dtype))
