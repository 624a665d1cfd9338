"""A worker's part of data that was made for one process.

Minibatches are dealt in turn: worker r of W takes the minibatches r, r + W, r + 2W, ... of the order
in which one process would take them. Or each is split: worker r takes the samples r, r + W, ... of it.
Either way order, sizes, dropped remainders and samplers are the user's own. Under a synchronous
strategy a round is made of W minibatches of one process, joined, or of one, put together again; a
worker for which the last round has none repeats one, which counts no samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from gradstream.errors import ConfigError
from gradstream.session.loaders import part_of_loader
from gradstream.session.loaders_part import LoaderPart, length_of

__all__ = ["Dealt", "LoaderPart", "length_of", "part_of"]


class Dealt:
    """Those of some minibatches that a worker takes, or its part of each, at every iteration.

    Args:
        batches: what to iterate over. Minibatches of others are made and thrown away.
        part: the worker's.
    """

    def __init__(self, batches: Iterable[Any], part: LoaderPart) -> None:
        self._batches = batches
        self._part = part

    def __iter__(self) -> Iterator[Any]:
        return self._part.noted(self._batches)

    def __len__(self) -> int:
        return self._part.count(len(self._batches))  # type: ignore[arg-type]  # or TypeError, as its own


def part_of(data: Any, part: LoaderPart) -> Any:
    """The part of one worker: see `Session.shard`."""
    if isinstance(data, DataLoader):
        return part_of_loader(data, part)
    if isinstance(data, IterableDataset):
        raise ConfigError(
            "shard: an IterableDataset: shard its DataLoader, or cut it by session.rank yourself"
        )
    if isinstance(data, Dataset):
        size = len(data)  # type: ignore[arg-type]  # map-style: has a length
        if part.aligned and size % part.world_size:
            raise ConfigError(
                f"shard: a Dataset of {size} samples for {part.world_size} workers that make all steps "
                "together: parts of different lengths would make different numbers of steps. Shard its "
                f"DataLoader instead, or leave out {size % part.world_size} samples"
            )
        return Subset(data, part.of(range(size)))
    if isinstance(data, np.ndarray | torch.Tensor) and not part.split:
        return part.of(data)
    if isinstance(data, Dealt):
        raise ConfigError("shard: these are this worker's minibatches already; call shard once")
    if isinstance(data, Iterable):
        return Dealt(data, part)
    raise ConfigError(
        f"shard: got {type(data).__name__}; expected a DataLoader, a Dataset, arrays or minibatches"
    )
