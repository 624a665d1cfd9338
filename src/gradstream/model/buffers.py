"""Buffers: arrays of a model besides its parameters, such as running means. Each replica has its own.

They are neither trained nor exchanged during training. For an evaluation or a checkpoint, which need one model,
the buffers of all workers are averaged, weighted by the samples that each has trained on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from gradstream.errors import ConfigError

Buffers = Mapping[str, np.ndarray[Any, Any]]
"""Arrays by the user's own names."""


def buffers_of(model: object) -> dict[str, np.ndarray[Any, Any]]:
    """Copies of a model's buffers; {} for a model without any."""
    give = getattr(model, "buffers", None)
    return {} if give is None else dict(give())


def load_buffers(model: object, buffers: Buffers) -> None:
    """Sets a model's buffers, if it has any. Names that the model does not know are ignored.

    Raises:
        ConfigError: a buffer is missing, or has another shape.
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

    Floating-point buffers become the weighted mean, computed in float64. Integers and booleans (a count of
    batches, a flag) become the largest. The mean of running variances is an approximation: it leaves out the
    distances between the replicas' means.

    Args:
        replicas: (number of samples that the replica has trained on, its buffers) of each replica. If no
            replica has any samples, all have the same weight.

    Raises:
        ConfigError: replicas differ in names or shapes.
    """
    if not replicas:
        return {}
    shapes = [{name: array.shape for name, array in buffers.items()} for _, buffers in replicas]
    if any(other != shapes[0] for other in shapes[1:]):
        raise ConfigError(
            f"buffers: got different names or shapes from the workers, {shapes}; expected the same on all: build "
            "the model alike on every worker"
        )
    weights = np.array([weight for weight, _ in replicas], dtype=np.float64)
    if not weights.any():
        weights = np.ones(len(replicas))
    return {name: _average(weights, [buffers[name] for _, buffers in replicas]) for name in shapes[0]}


def _average(weights: np.ndarray[Any, Any], arrays: list[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    first = arrays[0]
    if first.dtype.kind not in "fc" or len(arrays) == 1:
        return np.asarray(np.max(np.stack(arrays), axis=0))
    mean = np.tensordot(weights, np.stack(arrays).astype(np.float64), axes=1) / weights.sum()
    return np.asarray(mean).astype(first.dtype)
