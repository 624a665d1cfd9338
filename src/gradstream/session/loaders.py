"""A worker's part of a DataLoader: a DataLoader with the same settings, class and attributes."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from gradstream.data.left_over import Epoch
from gradstream.errors import ConfigError
from gradstream.session.loaders_divided import is_divided
from gradstream.session.loaders_draw import EqualDraws
from gradstream.session.loaders_part import LoaderPart, length_of
from gradstream.session.loaders_takeover import EpochSteps, TakeoverOrder

__all__ = ["DealtBatches", "DealtLoader", "DealtStream", "part_of_loader"]

AT_ONCE = 64
"""Minibatches, as numbers, that are drawn at once. An order may have no end."""

MOST_ORDERS = 4
"""Epochs whose minibatches are remembered, as numbers: a lost worker may have been some epochs behind."""


class Drawn:
    """What one iteration over a sampler has drawn.

    Args:
        epoch: which it is of, from 0.

    Attributes:
        counts: how many samples each minibatch counts: those that were drawn and not yet noted.
    """

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.counts: deque[int | None] = deque()


class DealtBatches:
    """The minibatches of one worker, as sample numbers, out of a sampler's. Else it is as that sampler.

    Args:
        batches: the sampler. At each iteration it gives the minibatches of an epoch, as lists of numbers;
            or, for a loader that does not collate, whatever its dataset is asked for.
        part: the worker's.
        collated: whether the loader makes minibatches out of samples.

    Attributes:
        drawn: by the latest iteration. A new one in each; the loader may draw ahead.
        orders: by epoch, all minibatches of those that may yet be asked for, where somebody takes over what
            lost workers leave.
    """

    def __init__(self, batches: Iterable[Any], part: LoaderPart, *, collated: bool) -> None:
        self._batches: Any = batches
        self._part = part
        self._collated = collated
        self._draws = EqualDraws(part.seed)
        self.drawn: Drawn | None = None
        self.orders: dict[int, TakeoverOrder] = {}

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is that of this epoch, from 0; each one after it that of the next."""
        self._draws.epoch = epoch
        for sampler in (self._batches, getattr(self._batches, "sampler", None)):
            tell = getattr(sampler, "set_epoch", None)
            if tell is not None:
                tell(epoch)

    def __iter__(self) -> Iterator[Any]:
        drawn = self.drawn = Drawn(self._draws.epoch)
        batches = self._drawn()
        if self._part.takeover is not None and hasattr(self._batches, "__len__"):  # else it may have no end
            while len(self.orders) >= MOST_ORDERS:
                del self.orders[min(self.orders)]
            order = self.orders[drawn.epoch] = TakeoverOrder()
            batches = order.noted(batches)
        for batch, count in self._part.taken(batches, self._cut, self._size):
            drawn.counts.append(count)
            yield batch

    def parts(self, epoch: int) -> list[int]:
        """How many minibatches of an epoch in `orders` are each worker's."""
        order, part = self.orders[epoch], self._part
        if not part.split:
            return [dataclasses.replace(part, rank=rank).count(len(order)) for rank in range(part.world_size)]
        sizes = [1 if (size := self._size(batch)) is None else size for batch in order]
        return [sum(size > rank for size in sizes) for rank in range(part.world_size)]

    def part_of(self, epoch: int, rank: int) -> list[tuple[Any, int | None]]:
        """A worker's minibatches of an epoch in `orders`, each with the samples that it counts."""
        part = dataclasses.replace(self._part, rank=rank)
        return list(part.taken(self.orders[epoch], self._cut, self._size))

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

    _part: LoaderPart
    _number: int  # of those whose minibatches are taken over, from 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # notes what torch's iterator gives
        sampler: DealtBatches = self._index_sampler
        sampler.drawn = None
        batches = super().__iter__()  # draws at once where it has processes
        return self._counted(batches, sampler, sampler.drawn)

    def _counted(self, batches: Iterator[Any], sampler: DealtBatches, drawn: Drawn | None) -> Iterator[Any]:
        try:
            yield from self._dealt(batches, sampler, drawn)
        finally:
            self._part.over()

    def _dealt(self, batches: Iterator[Any], sampler: DealtBatches, drawn: Drawn | None) -> Iterator[Any]:
        takeover, steps = self._part.takeover if torch.is_grad_enabled() else None, None
        for batch in batches:
            drawn = sampler.drawn if drawn is None else drawn
            if drawn is None or not drawn.counts:
                raise ConfigError(
                    f"shard: the __iter__ of {type(self).__name__} gives minibatches that its sampler was "
                    "not asked for: it keeps an iterator from before. Shard a plain DataLoader instead"
                )
            if takeover is not None:
                steps = steps or EpochSteps(takeover, Epoch(self._number, drawn.epoch))
                steps.next()
            samples = drawn.counts.popleft()
            self._part.note(length_of((batch,)) if samples is None else samples)
            yield batch
        if steps is not None:
            try:
                yield from self._left_over(sampler, steps)
            except GeneratorExit:  # the loop may have left a minibatch unused
                steps.used()
                raise

    def _left_over(self, sampler: DealtBatches, steps: EpochSteps) -> Iterator[Any]:
        """What lost workers have left, block by block, up to the end of it."""
        parts: dict[tuple[int, int], list[tuple[Any, int | None]]] = {}
        while (block := steps.take(sampler.parts, sampler.orders)) is not None:
            where = block.epoch.number, block.rank
            if where not in parts:
                parts[where] = sampler.part_of(*where)
            chosen = parts[where][block.first : block.first + block.size]
            for batch, (_, samples) in zip(self._loaded([batch for batch, _ in chosen]), chosen, strict=True):
                self._part.note(length_of((batch,)) if samples is None else samples)
                yield batch

    def _loaded(self, batches: list[Any]) -> Iterator[Any]:
        """Minibatches, told by their numbers, as this loader would make them: here, one after the other."""
        place = "batch_sampler" if self.batch_sampler is not None else "sampler"
        alone = {"num_workers": 0, "prefetch_factor": None, "persistent_workers": False, "timeout": 0}
        # A generator of the user's own stays as on the other workers: none of its numbers is used up.
        state = {**vars(self), **alone, place: batches, "generator": None, "_iterator": None}
        made: DealtLoader = object.__new__(type(self))
        vars(made).update(state)
        return super(DealtLoader, made).__iter__()


class DealtStream(DataLoader[Any]):
    """A worker's part of a DataLoader of an IterableDataset. It goes through all of it."""

    _part: LoaderPart
    _draws: EqualDraws | None

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # leaves out what is of others
        begin = super().__iter__
        return self._part.noted(begin() if self._draws is None else self._draws.over(begin, 1))

    def __len__(self) -> int:
        return self._part.count(super().__len__())


def part_of_loader(loader: DataLoader[Any], part: LoaderPart) -> DataLoader[Any]:
    """The part of one worker.

    Raises:
        ConfigError: the loader is a part already, or another worker's, or has an order that differs.
    """
    if isinstance(loader, DealtLoader | DealtStream):
        raise ConfigError("shard: the loader is this worker's part already; call shard once")
    divided = is_divided(loader, part)
    if divided:  # the user has done it: only count
        part = dataclasses.replace(part, rank=0, world_size=1, split=False, takeover=None)
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
    state["_number"] = 0 if part.takeover is None else part.takeover.number()
    return _made(loader, DealtLoader, state)


def _made(loader: DataLoader[Any], base: type, state: dict[str, Any]) -> DataLoader[Any]:
    """A loader of the user's own class, as he has set it up, but for what `base` does and `state` has."""
    kind = type(loader)
    own = base if kind is DataLoader else type(kind.__name__, (base, kind), {})
    made: DataLoader[Any] = object.__new__(own)
    vars(made).update(state)
    return made
