"""The loss of a model over all training samples, computed by several processes."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist

from gradstream.data.base import Dataset
from gradstream.errors import ConfigError, UserCodeError
from gradstream.model.base import Model
from gradstream.model.buffers import buffers_of, load_buffers

Vector: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]

BATCH_SIZE = 256


class FullLoss:
    """f(x): the mean of a model's loss over all training samples, and its gradient, at any parameters x.

    It is the loss that a run trains, so layers behave as in training. BatchNorm takes the statistics of batches of
    `batch_size` samples, and dropout draws the same masks at every x: f is a function of x alone. Sums are float64,
    whatever dtype the model has.

    In a process group of torch.distributed each rank computes every size-th batch. Rank 0 calls the object, and the
    others `serve`.

    Args:
        model: the model.
        data: its training samples, which have ids.
        batch_size: samples of one batch.

    Attributes:
        model: the model.

    Raises:
        ConfigError: the data set is a stream, or it is empty.
    """

    def __init__(self, model: Model, data: Dataset, *, batch_size: int = BATCH_SIZE) -> None:
        self._num_samples = data.num_samples or 0
        if not self._num_samples or not hasattr(data, "batch"):
            raise ConfigError(
                f"{data.name} has no samples that can be read again by their ids, and the full loss is over all "
                "samples: give a data set with num_samples and batch(ids)"
            )
        self.model, self._data = model, data
        self._ids = np.array_split(np.arange(self._num_samples), -(-self._num_samples // batch_size))
        self._group = dist.is_initialized() and dist.get_world_size() > 1
        self._rank, self._size = (dist.get_rank(), dist.get_world_size()) if self._group else (0, 1)
        self._parameters = torch.empty(model.layout.elems, dtype=model.layout.dtype)
        self._gradient = torch.empty_like(self._parameters)
        self._total = torch.empty(model.layout.elems + 1, dtype=torch.float64)  # and the loss
        self._x = torch.empty_like(self._total)  # and whether there is one
        self._buffers = buffers_of(model)

    def __call__(self, x: Vector) -> tuple[float, Vector]:
        """(f(x), ∇f(x)), the gradient as (E,) float64, in new memory.

        Raises:
            UserCodeError: the model or the data set raised.
        """
        self._x[:-1] = torch.from_numpy(x)
        self._x[-1] = 1.0
        if self._group:
            dist.broadcast(self._x, 0)
        self._compute()
        return float(self._total[-1]), self._total[:-1].numpy().copy()

    def serve(self) -> None:
        """Computes this rank's share of every call of rank 0, until rank 0 has closed its object."""
        while True:
            dist.broadcast(self._x, 0)
            if not self._x[-1]:
                return
            self._compute()

    def close(self) -> None:
        """Lets the other ranks return from `serve`."""
        if self._group:
            self._x[-1] = 0.0
            dist.broadcast(self._x, 0)

    def _compute(self) -> None:
        self._parameters.copy_(self._x[:-1])
        self._total.zero_()
        for number in range(self._rank, len(self._ids), self._size):
            ids = self._ids[number]
            try:
                batch = self._data.batch(ids)
                loss = self.model.gradient(
                    self._parameters, batch, self._gradient, seed=number, report=lambda n: None
                )
            except Exception as error:
                raise UserCodeError(f"the full loss, samples {ids[0]} to {ids[-1]}: {error!r}") from error
            weight = batch.num_samples if self.model.reduction == "mean" else 1
            self._total[:-1].add_(self._gradient, alpha=weight)
            self._total[-1] += weight * loss
        if self._buffers:  # running means that the batches have moved
            load_buffers(self.model, self._buffers)
        if self._group:
            dist.all_reduce(self._total)
        self._total /= self._num_samples
