"""Buffers: what a model holds besides its parameters, of each replica its own, such as running means.

They are not trained and not exchanged while training goes on. Where one model is wanted, for
evaluation or a checkpoint, those of all workers are averaged, weighted by samples gone through.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from gradstream.errors import ConfigError

__all__ = ["Buffers", "average_buffers", "buffers_of", "load_buffers", "with_buffers"]

Buffers = Mapping[str, np.ndarray[Any, Any]]
"""Arrays by the user's own names."""


def buffers_of(model: object) -> dict[str, np.ndarray[Any, Any]]:
    """Copies of a model's buffers; {} of one that has none, or knows no such thing."""
    give = getattr(model, "buffers", None)
    return {} if give is None else dict(give())


def load_buffers(model: object, buffers: Buffers) -> None:
    """Sets a model's buffers, where it has some. Names that it does not know are passed over.

    Raises:
        ConfigError: one is missing, or of another shape.
    """
    take = getattr(model, "load_buffers", None)
    if take is not None:
        take(buffers)


@contextmanager
def with_buffers(model: object, buffers: Buffers) -> Iterator[None]:
    """A model with other buffers for a while. Raises ConfigError as `load_buffers` does."""
    own = buffers_of(model)
    try:
        if buffers:
            load_buffers(model, buffers)
        yield
    finally:
        load_buffers(model, own)


def average_buffers(replicas: Sequence[tuple[float, Buffers]]) -> dict[str, np.ndarray[Any, Any]]:
    """One set of buffers out of several replicas'.

    Of floating-point ones the mean, weighted; computed in float64. Of integers and booleans (a count
    of batches, a flag) the largest. The mean of running variances is an approximation: it leaves out
    how far the means of the replicas are apart.

    Args:
        replicas: (samples it has gone through, its buffers) of each. If no replica has any samples,
            all weigh the same.

    Raises:
        ConfigError: replicas differ in names or shapes.
    """
    if not replicas:
        return {}
    shapes = [{name: array.shape for name, array in buffers.items()} for _, buffers in replicas]
    if any(other != shapes[0] for other in shapes[1:]):
        raise ConfigError(f"replicas have buffers of different names or shapes: {shapes}")
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
