"""A torch `DataLoader` as a data set: what its settings mean where several workers share the data.

over a map-style data set       samples are numbered: gradstream cuts the sampler's order among
the workers, and the loader's settings say how they are read
with a batch sampler of one's   batches are numbered: batch b of an epoch is worker (b mod W)'s, and
own, or batch_size=None         only that one reads it
over an IterableDataset         nothing is numbered: each worker goes through all of it and keeps
every W-th batch; to read only a part, use `from_stream`
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from gradstream.data.base import DEFAULT_BATCH_SIZE, BatchRef, Dataset, Division, Feed, Ids, Plan
from gradstream.data.collated import check_targets, collated
from gradstream.data.feed import plan_samples
from gradstream.data.isolation import Isolated
from gradstream.data.mapped import MapDataset, SeededFeed, check_mapped, held_out_of
from gradstream.data.plan import EpochPlan, Order
from gradstream.data.randomness import mixed, seeded, seeded_iterator
from gradstream.data.stream import StreamDataset, dealt
from gradstream.errors import ConfigError, DataError, UserCodeError
from gradstream.model.batch import Batch

__all__ = ["LoaderDataset", "LoaderFeed", "from_loader"]

Loader = DataLoader[Any]


def from_loader(
    loader: Loader,
    test: Any = None,
    *,
    targets: str | None = None,
    name: str | None = None,
) -> MapDataset | StreamDataset:
    """A data set from a torch `DataLoader`.

    What its settings mean with several workers:

    * `batch_size`: of each worker's minibatches, as the job's own is, which need not be given then.
    * `shuffle=True`: a new order in each epoch, by the run's seed. `shuffle=False`: the data set's
      order. A sampler of your own: its order, drawn anew in each epoch (`set_epoch` is called, its
      `generator` and the global ones are seeded by run seed and epoch); it must be the same
      wherever it is drawn. A `DistributedSampler` is refused: the cut is gradstream's.
    * `drop_last`: leaves out the last minibatch of each partition, or the last round, if it is short.
    * `collate_fn`, `num_workers`, `prefetch_factor`, `persistent_workers`, `timeout`, `pin_memory`: as in
      torch, in each worker's own process. With `num_workers` the samples are read ahead, by that many
      processes for each worker; what a lost worker has left is read by the others' own processes.
    * `multiprocessing_context`: "fork" unless given. Others need a data set that is defined in a module
      of its own, which the processes can import.
    * `worker_init_fn`: called in each of those processes.
    * `generator`: seeded by the run, so that its own seed has no effect.
    * a `batch_sampler` of your own, `batch_size=None`: batch b of an epoch goes to worker b mod W.
    * an `IterableDataset`: each worker runs the loader over all of it and keeps every W-th batch, so
      it must give the same batches everywhere. `epochs=` needs a `__len__`. Where each worker should
      read its own part only, use `from_stream`.

    Args:
        loader: as it would be used on one machine.
        test: held-out samples: a map-style data set or a loader over one, or a data set of gradstream's.
        targets: key of the targets where batches are dicts.
        name: for messages and records.

    Raises:
        ConfigError: it is no DataLoader, or has a setting that cannot be honoured. Says what to do.
        DataError: there are no samples.
    """
    if not isinstance(loader, DataLoader):
        raise ConfigError(
            f"from_loader: got {type(loader).__name__}, expected a torch.utils.data.DataLoader; "
            "for a data set alone use from_dataset, for an iterator from_stream"
        )
    check_targets(targets)
    name = name or type(loader.dataset).__name__
    _refuse_distributed(loader)
    _check_context(loader)
    numbered = loader.batch_size is not None or loader.batch_sampler is not None
    held = held_out_of(test, loader.collate_fn if numbered else default_collate, targets, name)
    iterable = isinstance(loader.dataset, IterableDataset)
    if not iterable:
        check_mapped(loader.dataset, name)
        if loader.batch_size is not None:
            return LoaderDataset(name, loader, targets, held)
    return StreamDataset(
        name,
        partial(_run if iterable else _run_share, loader),
        _length(loader),
        targets,
        held,
        dealt=True,
        lists_are_parts=loader.collate_fn is default_collate,
    )


def _refuse_distributed(loader: Loader) -> None:
    samplers = [loader.sampler, getattr(loader.batch_sampler, "sampler", None)]
    if any(isinstance(sampler, DistributedSampler) for sampler in samplers):
        raise ConfigError(
            "from_loader: the loader has a DistributedSampler, but gradstream divides the data among its "
            "workers itself; make the loader without it, with shuffle=True"
        )


def _check_context(loader: Loader) -> None:
    context = loader.multiprocessing_context
    if not loader.num_workers or context is None or context.get_start_method() == "fork":
        return
    for what in (type(loader.dataset), loader.collate_fn, loader.worker_init_fn):
        module = getattr(what, "__module__", None) or ""
        if module.startswith("__"):
            raise ConfigError(
                f"from_loader: processes of a {context.get_start_method()!r} context cannot import "
                f"{getattr(what, '__qualname__', what)}, which is defined in the job file: define it in a "
                'module of its own, or leave out multiprocessing_context (then it is "fork")'
            )


def _length(loader: Loader) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None


# ---- numbered samples -------------------------------------------------------------------


class LoaderDataset(MapDataset):
    """The samples of a map-style data set, in the sampler's order, read as the loader would."""

    def __init__(self, name: str, loader: Loader, targets: str | None, test: Dataset | None) -> None:
        super().__init__(name, loader.dataset, loader.collate_fn, targets, test)
        self.loader = loader
        sampler: Any = loader.sampler
        whole = len(sampler) == self.num_samples
        # torch's own shuffling is a permutation, which the plan makes for itself.
        self._shuffled = whole and type(sampler) is RandomSampler and not sampler.replacement
        self._num_drawn = len(sampler)
        if not self._num_drawn:
            raise DataError(f"data set {name!r}: its sampler draws no samples")

    def plan(self, division: Division) -> EpochPlan:
        """The sampler's order, cut among the workers. Raises ConfigError for another batch size."""
        size = self.loader.batch_size
        given = division.batch_size
        if given not in (DEFAULT_BATCH_SIZE, size):
            raise ConfigError(
                f"batch_size={given!r}, but the DataLoader of {self.name!r} has {size}: leave out the job's"
            )
        assert size is not None
        division = dataclasses.replace(division, batch_size=size)
        order = None if self._shuffled else _order_of(self.loader, self.num_samples, division.seed, self.name)
        return plan_samples(self._num_drawn, division, order=order, drop_last=self.loader.drop_last)

    def feed(self, plan: Plan, rank: int, seed: int) -> Feed:
        """Reads in this process, or ahead in processes of the loader's."""
        assert isinstance(plan, EpochPlan)
        if self.loader.num_workers:
            return LoaderFeed(self, plan, rank, seed)
        return SeededFeed(self, plan, seed)


def _order_of(loader: Loader, num_samples: int, seed: int, name: str) -> Order:
    """What the loader's sampler draws in each data epoch; the last two epochs are remembered."""
    if type(loader.sampler) is SequentialSampler:
        ids = np.arange(num_samples)
        return lambda epoch: ids
    num_drawn = len(loader.sampler)  # type: ignore[arg-type]  # a sampler with a batch size has one

    @functools.lru_cache(maxsize=2)
    def order(epoch: int) -> Ids:
        drawn = np.array(_drawn(loader.sampler, seed, epoch), dtype=np.int64)
        if drawn.shape != (num_drawn,):
            raise DataError(
                f"the sampler of {name!r} drew {drawn.shape} in data epoch {epoch}, expected ({num_drawn},): "
                "as many sample numbers as its len() says"
            )
        return drawn

    return order


def _drawn(sampler: Any, seed: int, epoch: int) -> list[Any]:
    """Everything that a sampler draws in a data epoch, as a function of (seed, epoch)."""
    parts: list[Any] = [sampler, getattr(sampler, "sampler", None)]
    for part in parts:
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)
        if isinstance(getattr(part, "generator", None), torch.Generator):
            part.generator.manual_seed(mixed(seed, epoch))
    with seeded(seed, epoch):
        return list(sampler)


class _Ahead:
    """The batch sampler of a loader that reads ahead: minibatches of a plan, from some one on."""

    def __init__(self, plan: EpochPlan) -> None:
        self._plan = plan
        self.start = BatchRef(0, 0, 0)

    def __iter__(self) -> Iterator[list[int]]:
        first = self.start
        for batch in range(first.batch, self._plan.batches_in(first.partition, first.epoch)):
            yield self._plan.ids(BatchRef(first.epoch, first.partition, batch)).tolist()


class LoaderFeed:
    """Reads a worker's own minibatches ahead in processes, and others as they are asked for.

    Args:
        data: the data set.
        plan: of it.
        rank: whose minibatches are read ahead.
        seed: of the run. What the processes draw is a function of (seed, epoch, rank) while nothing is
            skipped.
    """

    def __init__(self, data: LoaderDataset, plan: EpochPlan, rank: int, seed: int) -> None:
        self._data = data
        self._plan = plan
        self._rank = rank
        self._seed = seed
        self._others = SeededFeed(data, plan, seed)
        self._ahead = _Ahead(plan)
        self._generator = torch.Generator()
        self._loader = _like(data.loader, self._generator, batch_sampler=self._ahead)
        self._items: Iterator[Any] = iter(())
        self._next: BatchRef | None = None

    def read(self, ref: BatchRef) -> Batch:
        """See `Feed`."""
        if ref.partition != self._rank or not self._plan.size(ref):
            return self._others.read(ref)
        if ref != self._next:
            self._begin(ref)
        try:
            item = next(self._items)
        except Exception as error:
            self._next = None
            raise _said(error) from error
        self._next = BatchRef(ref.epoch, ref.partition, ref.batch + 1)
        where = f"batch {ref.batch} of {self._data.name!r} (rank {ref.partition}, data epoch {ref.epoch})"
        return collated(item, self._data.targets, where, self._plan.ids(ref))

    def _begin(self, ref: BatchRef) -> None:
        self._ahead.start = ref
        self._generator.manual_seed(mixed(self._seed, ref.epoch, ref.partition))
        with seeded(self._seed, ref.epoch, ref.partition):
            self._items = iter(self._loader)


def _like(loader: Loader, generator: torch.Generator, **batches: Any) -> Loader:
    """A loader with the settings of another, over `batches`: a batch sampler, or a sampler of batches."""
    processes: dict[str, Any] = {}
    if loader.num_workers:
        processes = {
            "prefetch_factor": loader.prefetch_factor,
            "persistent_workers": loader.persistent_workers,
            "multiprocessing_context": loader.multiprocessing_context or "fork",
            "timeout": loader.timeout,
        }
    return DataLoader(
        loader.dataset,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory and torch.cuda.is_available(),
        worker_init_fn=Isolated(loader.worker_init_fn),
        generator=generator,
        **batches,
        **processes,
    )


def _said(error: Exception) -> Exception:
    """What a process of a loader's raised, with its own traceback; torch puts both into the message."""
    _, mark, raised = str(error).partition("Original Traceback (most recent call last):\n")
    if not mark:
        return error
    message = f"the data set raised {raised.rstrip().splitlines()[-1]}, in a process of the loader's"
    return UserCodeError(message, "Traceback (most recent call last):\n" + raised)


# ---- numbered batches, and nothing numbered ---------------------------------------------


def _run(loader: Loader, rank: int, world: int, epoch: int, seed: int) -> Iterable[Any]:
    """Every W-th batch of a whole loader, under seeds that are the same on all workers."""
    if hasattr(loader.dataset, "set_epoch"):
        loader.dataset.set_epoch(epoch)
    mine = copy.copy(loader)
    mine.worker_init_fn = Isolated(loader.worker_init_fn)
    if loader.num_workers:
        mine.multiprocessing_context = loader.multiprocessing_context or "fork"
    mine.generator = torch.Generator().manual_seed(mixed(seed, epoch))
    return dealt(seeded_iterator(lambda: _words_of_its_own(mine), seed, epoch), rank, world)


def _run_share(loader: Loader, rank: int, world: int, epoch: int, seed: int) -> Iterable[Any]:
    """The batches of a loader whose batches are numbered, but only those of one worker."""
    generator = torch.Generator().manual_seed(mixed(seed, epoch, rank))
    if loader.batch_sampler is None:
        share = list(dealt(_drawn(loader.sampler, seed, epoch), rank, world))
        mine = _like(loader, generator, sampler=share, batch_size=None)
    else:
        share = list(dealt(_drawn(loader.batch_sampler, seed, epoch), rank, world))
        mine = _like(loader, generator, batch_sampler=share)
    return _words_of_its_own(mine)


def _words_of_its_own(items: Iterable[Any]) -> Iterator[Any]:
    try:
        yield from items
    except Exception as error:
        raise _said(error) from error
