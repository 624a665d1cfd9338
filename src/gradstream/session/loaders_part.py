"""Which minibatches a worker takes, and how many samples each of them counts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gradstream.session.loaders_takeover import Takeover

__all__ = ["LoaderPart", "cut_of", "length_of"]


@dataclass(frozen=True, slots=True)
class LoaderPart:
    """One worker's part of the data.

    Args:
        rank, world_size: r and W.
        seed: with the number of an epoch it seeds the generators while a DataLoader's order is drawn.
        split: each minibatch is split among the workers; otherwise whole minibatches are dealt.
        note: called with the number of samples of each minibatch that the worker takes: 0 for a repeat,
            None where the number cannot be seen.
        aligned: all workers take the same number of minibatches. A worker for which there is none in the
            last round takes a repeat, which counts no samples.
        over: called when the worker has gone through its minibatches, or takes no more of them.
        takeover: asks for what lost workers have left; None where nobody takes it over.
    """

    rank: int
    world_size: int
    seed: int
    split: bool
    note: Callable[[int | None], None]
    aligned: bool = False
    over: Callable[[], None] = lambda: None
    takeover: Takeover | None = None

    def of(self, samples: Any) -> Any:
        """Every W-th, from the r-th on, of anything that can be sliced."""
        return samples[self.rank :: self.world_size]

    def count(self, total: int) -> int:
        """How many of `total` minibatches the worker takes; when they are split, at most."""
        if self.split:
            return total
        return len(range(0 if self.aligned else self.rank, total, self.world_size))

    def taken(
        self,
        batches: Iterable[Any],
        cut: Callable[[Any, slice], Any],
        size: Callable[[Any], int | None],
    ) -> Iterator[tuple[Any, int | None]]:
        """The worker's minibatches out of those of one process, each with the samples that it counts.

        Args:
            batches: the minibatches of one process.
            cut: gives some samples of a minibatch.
            size: the number of samples of a minibatch, None where it cannot be seen.
        """
        if self.split:
            for batch in batches:
                piece = cut(batch, slice(self.rank, None, self.world_size))
                samples = size(piece)
                if samples is None and isinstance(piece, list | tuple | str):
                    samples = len(piece)
                if samples != 0:
                    yield piece, samples
                elif self.aligned:
                    yield cut(batch, slice(1)), 0
            return
        number, repeat = -1, None  # -1: as after a whole round
        for number, batch in enumerate(batches):
            own = number % self.world_size == self.rank
            if own or number == 0:  # a worker without any repeats the first: the last may be a short one
                repeat = batch
            if own:
                yield batch, size(batch)
        if self.aligned and number % self.world_size < self.rank:
            yield repeat, 0

    def noted(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The worker's minibatches out of those of one process, where these are made and not only numbers."""
        try:
            for batch, samples in self.taken(batches, cut_of, length_of):
                self.note(samples)
                yield batch
        finally:
            self.over()


def cut_of(batch: Any, which: slice) -> Any:
    """Some samples of a tree of arrays, or of a list of numbers."""
    if isinstance(batch, Mapping):
        return {key: cut_of(value, which) for key, value in batch.items()}
    if isinstance(batch, list | tuple) and length_of(batch) is not None:
        pieces = [cut_of(value, which) for value in batch]
        return type(batch)(*pieces) if hasattr(batch, "_fields") else type(batch)(pieces)
    if isinstance(batch, torch.Tensor | np.ndarray) and not batch.ndim:
        return batch
    return batch[which]


def length_of(values: Any) -> int | None:
    """Length of the first tensor or array, of one dimension at least, in a tree of them; None without."""
    if isinstance(values, torch.Tensor | np.ndarray):
        return len(values) if values.ndim else None
    if isinstance(values, Mapping):
        values = values.values()
    elif not isinstance(values, list | tuple):
        return None
    return next((found for value in values if (found := length_of(value)) is not None), None)
