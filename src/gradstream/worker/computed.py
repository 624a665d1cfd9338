"""A minibatch of samples, and the gradient that is computed of it: what a replica hands to its strategy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from gradstream.data.base import BatchRef
from gradstream.memory import Vector
from gradstream.model.batch import Batch
from gradstream.model.factors import FactorPairs
from gradstream.model.rows import RowGradient
from gradstream.runtime.base import ComputeProgress
from gradstream.worker.gradient import Result

__all__ = ["ComputedGradient", "SampleBatch"]


@dataclass(slots=True)
class SampleBatch:
    """A minibatch by name and size; its samples are read where the gradient is computed.

    Those of a stream have been read already: only so is their number known. It is `UNKNOWN` until the
    gradient is there where a loop of the user's computes it.
    """

    ref: BatchRef
    num_samples: int
    samples: tuple[Batch, ...] | None = None


@dataclass(slots=True)
class ComputedGradient:
    """A gradient that is being computed into `vector`, or has been.

    Args:
        vector: of the replica.
        batch: what it is of.
        refs: the minibatches that are in the model once it is.
        lr: its minibatch's learning rate.
        ready: how many elements from the front are final.
        task: computes it; None where there are no samples.
        on_known: called by `know`.
        factors: take the sufficient factors of some layers, in place of their part of the vector.
        rows: takes what is of row-sparse tensors; `vector` is then of the others alone.
    """

    vector: Vector
    batch: SampleBatch
    refs: tuple[BatchRef, ...]
    lr: float
    ready: ComputeProgress = field(default_factory=ComputeProgress)
    task: asyncio.Task[Result] | None = None
    on_known: Callable[[], None] | None = None
    factors: FactorPairs | None = None
    rows: RowGradient | None = None

    @property
    def samples(self) -> int:
        """Training samples behind it; may be `UNKNOWN` until it is done."""
        return self.batch.num_samples

    async def done(self) -> None:
        """See `strategies.api.Gradient`."""
        if self.task is not None:
            await asyncio.shield(self.task)

    def know(self, samples: int, lr: float) -> None:
        """Fills in what could not be known when it was asked for, before anything of it is ready."""
        self.batch.num_samples, self.lr = samples, lr
        if self.on_known is not None:
            self.on_known()
