"""A worker's part of data that cannot be indexed: a DataLoader of an IterableDataset, or an iterable of minibatches.

A worker reads all minibatches, and yields its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from gradstream.errors import ConfigError
from gradstream.session.loaders_part import CommonRandomState, LoaderPart, made_of


class ShardedStream(DataLoader[Any]):
    """A worker's part of a DataLoader of an IterableDataset: reads all minibatches, yields its own."""

    _part: LoaderPart
    _common_random: CommonRandomState | None

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # wraps torch's iterator
        begin = super().__iter__
        return self._part.noted(
            begin() if self._common_random is None else self._common_random.iterate(begin, 1)
        )

    def __len__(self) -> int:
        return self._part.count(super().__len__())


def stream_of(loader: DataLoader[Any], part: LoaderPart, *, divided: bool) -> DataLoader[Any]:
    """Makes a worker's part of a DataLoader of an IterableDataset.

    Args:
        loader: the user's loader.
        part: the worker's part.
        divided: the dataset yields this worker's part already.

    Raises:
        ConfigError: the order of the minibatches would differ between workers.
    """
    if not (divided or loader.in_order):
        raise ConfigError(
            "session.shard: got a DataLoader of an IterableDataset with in_order=False: each worker would "
            "see the minibatches in a different order, and some would be used twice. Make the loader "
            "with in_order=True"
        )
    random = None if divided else CommonRandomState(part.seed)
    state = {"_part": part, "_iterator": None, "in_order": True, "_common_random": random}
    return made_of(loader, ShardedStream, {**vars(loader), **state})


class ShardedIterable:
    """One worker's share of an iterable of minibatches: some whole minibatches, or some samples of each.

    Args:
        batches: all minibatches. If workers get whole ones, those of other workers are made and dropped.
        part: how to divide, and which share to take.
    """

    def __init__(self, batches: Iterable[Any], part: LoaderPart) -> None:
        self._batches = batches
        self._part = part

    def __iter__(self) -> Iterator[Any]:
        return self._part.noted(self._batches)

    def __len__(self) -> int:
        return self._part.count(len(self._batches))  # type: ignore[arg-type]  # TypeError if they have none
