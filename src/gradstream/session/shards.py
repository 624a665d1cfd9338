"""A worker's part of data that was made for one process.

Minibatches are dealt in turn: worker r of W takes the minibatches r, r + W, r + 2W, ... of the order
in which one process would take them. So under a synchronous strategy round k is made of the
minibatches kW to kW + W - 1, joined; sizes, dropped remainders and samplers are the user's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Subset
from torch.utils.data.distributed import DistributedSampler

from gradstream.errors import ConfigError

__all__ = ["Dealt", "DealtBatches", "part_of"]


class DealtBatches:
    """The minibatches of one worker, as lists of sample numbers, of a batch sampler's.

    Args:
        batches: gives the minibatches of one epoch at each iteration.
        rank, world_size: r and W.
        seed: with the number of the iteration it seeds torch's generator while the order is drawn,
            so that all workers draw the same one.
    """

    def __init__(self, batches: Iterable[list[int]], rank: int, world_size: int, seed: int) -> None:
        self._batches = batches
        self._rank = rank
        self._world_size = world_size
        self._seed = seed
        self._epoch = 0

    def __iter__(self) -> Iterator[list[int]]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed((self._seed << 20) + self._epoch)
            order = list(self._batches)
        self._epoch += 1
        return iter(order[self._rank :: self._world_size])

    def __len__(self) -> int:
        total = len(self._batches)  # type: ignore[arg-type]  # a batch sampler has one, or says that not
        return len(range(self._rank, total, self._world_size))


class Dealt:
    """Every W-th of some minibatches, at each iteration; the others are made and thrown away.

    Args:
        batches: what to iterate over.
        rank, world_size: r and W.
        note: told each minibatch that is taken.
    """

    def __init__(
        self, batches: Iterable[Any], rank: int, world_size: int, note: Callable[[Any], None]
    ) -> None:
        self._batches = batches
        self._rank = rank
        self._world_size = world_size
        self._note = note

    def __iter__(self) -> Iterator[Any]:
        for batch in islice(iter(self._batches), self._rank, None, self._world_size):
            self._note(batch)
            yield batch

    def __len__(self) -> int:
        total = len(self._batches)  # type: ignore[arg-type]  # or TypeError, as its own
        return len(range(self._rank, total, self._world_size))


def part_of(data: Any, rank: int, world_size: int, seed: int, note: Callable[[Any], None]) -> Any:
    """The part of worker `rank`: see `Session.shard`."""
    if isinstance(data, DataLoader):
        return _part_of_loader(data, rank, world_size, seed, note)
    if isinstance(data, IterableDataset):
        raise ConfigError(
            "shard: an IterableDataset: shard its DataLoader, or cut it by session.rank yourself"
        )
    if isinstance(data, Dataset):
        return Subset(data, range(rank, len(data), world_size))  # type: ignore[arg-type]  # map-style: has a length
    if isinstance(data, np.ndarray | torch.Tensor):
        return data[rank::world_size]
    if isinstance(data, Iterable):
        return Dealt(data, rank, world_size, note)
    raise ConfigError(
        f"shard: got {type(data).__name__}; expected a DataLoader, a Dataset, arrays or minibatches"
    )


def _part_of_loader(
    loader: DataLoader[Any], rank: int, world_size: int, seed: int, note: Callable[[Any], None]
) -> Any:
    if isinstance(loader.dataset, IterableDataset):
        return Dealt(loader, rank, world_size, note)
    batches: BatchSampler | None = loader.batch_sampler  # type: ignore[assignment]
    if isinstance(getattr(batches, "sampler", loader.sampler), DistributedSampler):
        return loader  # the user has cut it already
    if batches is None:
        raise ConfigError("shard: a DataLoader with batch_size=None: shard its dataset instead")
    settings: dict[str, Any] = {
        name: getattr(loader, name)
        for name in (
            "num_workers",
            "collate_fn",
            "pin_memory",
            "timeout",
            "worker_init_fn",
            "multiprocessing_context",
            "generator",
            "persistent_workers",
        )
    }
    if loader.num_workers:
        settings["prefetch_factor"] = loader.prefetch_factor
    dealt = DealtBatches(batches, rank, world_size, seed)
    return DataLoader(loader.dataset, batch_sampler=dealt, **settings)
