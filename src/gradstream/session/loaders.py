"""A worker's part of a DataLoader: a DataLoader with the same settings, class and attributes."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from gradstream.errors import ConfigError
from gradstream.session.loaders_divided import is_divided
from gradstream.session.loaders_draw import EqualDraws
from gradstream.session.loaders_part import Part, length_of

__all__ = ["DealtBatches", "DealtLoader", "DealtStream", "part_of_loader"]

AT_ONCE = 64
"""Minibatches, as numbers, that are drawn at once. An order may have no end."""


class DealtBatches:
    """The minibatches of one worker, as sample numbers, out of a sampler's. Else it is as that sampler.

    Args:
        batches: the sampler. At each iteration it gives the minibatches of an epoch, as lists of numbers;
            or, for a loader that does not collate, whatever its dataset is asked for.
        part: the worker's.
        collated: whether the loader makes minibatches out of samples.

    Attributes:
        counts: how many samples each minibatch of the latest iteration counts: those that were drawn and
            not yet noted. A new one in each iteration; the loader may draw ahead.
    """

    def __init__(self, batches: Iterable[Any], part: Part, *, collated: bool) -> None:
        self._batches: Any = batches
        self._part = part
        self._collated = collated
        self._draws = EqualDraws(part.seed)
        self.counts: deque[int | None] | None = None

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is that of this epoch, from 0; each one after it that of the next."""
        self._draws.epoch = epoch
        for sampler in (self._batches, getattr(self._batches, "sampler", None)):
            tell = getattr(sampler, "set_epoch", None)
            if tell is not None:
                tell(epoch)

    def __iter__(self) -> Iterator[Any]:
        counts: deque[int | None] = deque()
        self.counts = counts
        for batch, count in self._part.taken(self._drawn(), self._cut, self._size):
            counts.append(count)
            yield batch

    def __len__(self) -> int:
        return self._part.count(len(self._batches))  # a sampler has one, or says not

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # before __init__ there is no sampler to ask
            raise AttributeError(name)
        return getattr(self._batches, name)

    def _drawn(self) -> Iterator[Any]:
        for batch in self._draws.over(lambda: iter(self._batches), AT_ONCE):
            yield batch if hasattr(batch, "__getitem__") or not self._collated else list(batch)

    def _cut(self, batch: Any, which: slice) -> Any:
        if self._collated or isinstance(batch, list):
            return batch[which]
        raise ConfigError(
            f"shard: split=True, but the DataLoader has batch_size=None and its sampler gives {batch!r}: "
            "expected lists of sample numbers. Deal its minibatches instead, with split=False"
        )

    def _size(self, batch: Any) -> int | None:
        return len(batch) if self._collated or isinstance(batch, list) else None


class DealtLoader(DataLoader[Any]):
    """A worker's part of a DataLoader. Made by `part_of_loader`; notes each minibatch that it gives."""

    _part: Part

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # notes what torch's iterator gives
        sampler: DealtBatches = self._index_sampler
        sampler.counts = None
        batches = super().__iter__()  # draws at once where it has processes
        return self._counted(batches, sampler, sampler.counts)

    def _counted(
        self, batches: Iterator[Any], sampler: DealtBatches, counts: deque[int | None] | None
    ) -> Iterator[Any]:
        try:
            for batch in batches:
                counts = sampler.counts if counts is None else counts
                if not counts:
                    raise ConfigError(
                        f"shard: the __iter__ of {type(self).__name__} gives minibatches that its "
                        "sampler was not asked for: it keeps an iterator from before. Shard a plain "
                        "DataLoader instead"
                    )
                samples = counts.popleft()
                self._part.note(length_of((batch,)) if samples is None else samples)
                yield batch
        finally:
            self._part.over()


class DealtStream(DataLoader[Any]):
    """A worker's part of a DataLoader of an IterableDataset. It goes through all of it."""

    _part: Part
    _draws: EqualDraws | None

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # leaves out what is of others
        begin = super().__iter__
        return self._part.noted(begin() if self._draws is None else self._draws.over(begin, 1))

    def __len__(self) -> int:
        return self._part.count(super().__len__())


def part_of_loader(loader: DataLoader[Any], part: Part) -> DataLoader[Any]:
    """The part of one worker.

    Raises:
        ConfigError: the loader is a part already, or another worker's, or has an order that differs.
    """
    if isinstance(loader, DealtLoader | DealtStream):
        raise ConfigError("shard: the loader is this worker's part already; call shard once")
    divided = is_divided(loader, part)
    if divided:  # the user has done it: only count
        part = dataclasses.replace(part, rank=0, world_size=1, split=False)
    state = {**vars(loader), "_part": part, "_iterator": None, "in_order": True}
    if isinstance(loader.dataset, IterableDataset):
        if not (divided or loader.in_order):
            raise ConfigError(
                "shard: a DataLoader of an IterableDataset with in_order=False: each worker would see its "
                "minibatches in an order of its own, so some would be taken twice. Make it with in_order=True"
            )
        return _made(loader, DealtStream, state | {"_draws": None if divided else EqualDraws(part.seed)})
    collated = loader.batch_sampler is not None
    place = "batch_sampler" if collated else "sampler"
    state[place] = DealtBatches(getattr(loader, place), part, collated=collated)
    return _made(loader, DealtLoader, state)


def _made(loader: DataLoader[Any], base: type, state: dict[str, Any]) -> DataLoader[Any]:
    """A loader of the user's own class, as he has set it up, but for what `base` does and `state` has."""
    kind = type(loader)
    own = base if kind is DataLoader else type(kind.__name__, (base, kind), {})
    made: DataLoader[Any] = object.__new__(own)
    vars(made).update(state)
    return made
