"""A worker's part of data that was made for one process.

Minibatches are dealt in turn: worker r of W takes the minibatches r, r + W, r + 2W, ... of the order
in which one process would take them. Or each is split: worker r takes the samples r, r + W, ... of it.
Either way order, sizes, dropped remainders and samplers are the user's own. Under a synchronous
strategy a round is made of W minibatches of one process, joined, or of one, put together again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Subset
from torch.utils.data.distributed import DistributedSampler

from gradstream.errors import ConfigError

__all__ = ["Dealt", "DealtBatches", "Part", "length_of", "part_of"]

_SETTINGS = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "persistent_workers",
)
"""Of a DataLoader: what stays when its minibatches become others."""


@dataclass(frozen=True, slots=True)
class Part:
    """Whose part of the data is taken, and how.

    Args:
        rank, world_size: r and W.
        seed: with the number of an iteration it seeds torch's generator while the order of a
            DataLoader is drawn, so that all workers draw the same one.
        split: minibatches are split, not dealt.
        note: told each minibatch that is taken from an iterable.
    """

    rank: int
    world_size: int
    seed: int
    split: bool
    note: Callable[[Any], None]

    def of(self, samples: Any) -> Any:
        """Every W-th, from the r-th on, of what can be sliced."""
        return samples[self.rank :: self.world_size]

    def count(self, total: int) -> int:
        """How many of so many minibatches it has: those of one sample may be split to nothing."""
        return total if self.split else len(range(self.rank, total, self.world_size))


class DealtBatches:
    """The minibatches of one worker, as lists of sample numbers, out of a batch sampler's.

    Args:
        batches: gives the minibatches of one epoch at each iteration.
        part: whose.
    """

    def __init__(self, batches: Iterable[list[int]], part: Part) -> None:
        self._batches = batches
        self._part = part
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is that of this epoch, from 0; each one after it that of the next."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed((self._part.seed << 20) + self._epoch)
            order = list(self._batches)
        self._epoch += 1
        if self._part.split:
            return (own for batch in order if (own := self._part.of(batch)))
        return iter(self._part.of(order))

    def __len__(self) -> int:
        return self._part.count(len(self._batches))  # type: ignore[arg-type]  # a sampler has one, or says not


class Dealt:
    """Those of some minibatches that a worker takes, or its part of each, at every iteration.

    Args:
        batches: what to iterate over. Minibatches of others are made and thrown away.
        part: whose.
    """

    def __init__(self, batches: Iterable[Any], part: Part) -> None:
        self._batches = batches
        self._part = part

    def __iter__(self) -> Iterator[Any]:
        part = self._part
        if part.split:
            pieces = (_split(batch, part) for batch in self._batches)
            taken = (piece for piece in pieces if length_of(piece) != 0)
        else:
            taken = islice(iter(self._batches), part.rank, None, part.world_size)  # type: ignore[assignment]
        for batch in taken:
            part.note(batch)
            yield batch

    def __len__(self) -> int:
        return self._part.count(len(self._batches))  # type: ignore[arg-type]  # or TypeError, as its own


def part_of(data: Any, part: Part) -> Any:
    """The part of one worker: see `Session.shard`."""
    if isinstance(data, DataLoader):
        return _part_of_loader(data, part)
    if isinstance(data, IterableDataset):
        raise ConfigError(
            "shard: an IterableDataset: shard its DataLoader, or cut it by session.rank yourself"
        )
    if isinstance(data, Dataset):
        size = len(data)  # type: ignore[arg-type]  # map-style: has a length
        return Subset(data, part.of(range(size)))
    if isinstance(data, np.ndarray | torch.Tensor) and not part.split:
        return part.of(data)
    if isinstance(data, Iterable):
        return Dealt(data, part)
    raise ConfigError(
        f"shard: got {type(data).__name__}; expected a DataLoader, a Dataset, arrays or minibatches"
    )


def _part_of_loader(loader: DataLoader[Any], part: Part) -> Any:
    if isinstance(loader.dataset, IterableDataset):
        return Dealt(loader, part)
    batches: BatchSampler | None = loader.batch_sampler  # type: ignore[assignment]
    if isinstance(getattr(batches, "sampler", loader.sampler), DistributedSampler):
        return loader  # the user has cut it already
    if batches is None:
        raise ConfigError("shard: a DataLoader with batch_size=None: shard its dataset instead")
    settings: dict[str, Any] = {name: getattr(loader, name) for name in _SETTINGS}
    if loader.num_workers:
        settings["prefetch_factor"] = loader.prefetch_factor
    return DataLoader(loader.dataset, batch_sampler=DealtBatches(batches, part), **settings)


def _split(batch: Any, part: Part) -> Any:
    """The worker's samples of a tree of arrays, or of a list of numbers."""
    if isinstance(batch, Mapping):
        return {key: _split(value, part) for key, value in batch.items()}
    if isinstance(batch, list | tuple) and length_of(batch) is not None:
        pieces = [_split(value, part) for value in batch]
        return type(batch)(*pieces) if hasattr(batch, "_fields") else type(batch)(pieces)
    if isinstance(batch, torch.Tensor | np.ndarray) and not batch.ndim:
        return batch
    return part.of(batch)


def length_of(values: Any) -> int | None:
    """Length of the first tensor or array, of one dimension at least, in a tree of them; None without."""
    if isinstance(values, torch.Tensor | np.ndarray):
        return len(values) if values.ndim else None
    if isinstance(values, Mapping):
        values = values.values()
    elif not isinstance(values, list | tuple):
        return None
    return next((found for value in values if (found := length_of(value)) is not None), None)
