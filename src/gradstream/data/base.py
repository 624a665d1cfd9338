"""Data sets, and who goes through which sample when.

The order of samples is a pure function of (seed, epoch, position): any worker, simulation or
resumed run can compute any batch without having seen the ones before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from gradstream.model.base import Batch

__all__ = ["BatchRef", "Dataset", "Ids"]

Ids = np.ndarray[Any, np.dtype[np.int64]]


class Dataset(Protocol):
    """Samples by id, and optionally held-out ones to evaluate on."""

    name: str
    num_samples: int
    num_test_samples: int

    def batch(self, ids: Ids) -> Batch:
        """The training samples with these ids, in this order."""
        ...

    def test_batch(self, ids: Ids) -> Batch:
        """The held-out samples with these ids, in this order."""
        ...


@dataclass(frozen=True, slots=True, order=True)
class BatchRef:
    """Names one minibatch: the `batch`-th of `partition` in data epoch `epoch` (all from 0)."""

    epoch: int
    partition: int
    batch: int


class Plan(Protocol):
    """Cuts each epoch's order into partitions and those into minibatches. Pure."""

    num_samples: int
    shares: Sequence[int]

    def batches_per_epoch(self, partition: int) -> int:
        """How many minibatches a partition has in each epoch."""
        ...

    def ids(self, ref: BatchRef) -> Ids:
        """Sample ids of a minibatch; empty where the partition has no share in it."""
        ...
