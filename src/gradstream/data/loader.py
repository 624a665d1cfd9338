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
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    default_collate,
)

from gradstream.data.base import DEFAULT_BATCH_SIZE, BatchPlan, Dataset, Feed, PartitionSpec
from gradstream.data.collated import check_targets
from gradstream.data.feed import plan_samples
from gradstream.data.isolation import Isolated
from gradstream.data.mapped import MapDataset, SeededFeed, check_mapped, held_out_of
from gradstream.data.plan import EpochPlan
from gradstream.data.randomness import mixed, seeded_iterator
from gradstream.data.read_ahead import ReadAhead, in_own_words, loader_like
from gradstream.data.samplers import drawn_by, order_of
from gradstream.data.stream import StreamDataset, dealt
from gradstream.errors import ConfigError, DataError

__all__ = ["LoaderDataset", "from_loader"]

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
      wherever it is drawn. A `DistributedSampler` is refused: the partitioning is gradstream's.
    * `drop_last`: leaves out the last minibatch of each partition, or the last round, if it is short.
    * `collate_fn`, `num_workers`, `prefetch_factor`, `persistent_workers`, `timeout`, `pin_memory`: as in
      torch, in each worker's own process. With `num_workers` the samples are read ahead, by that many
      processes for each worker. So that they know what comes next, each worker has a partition of its own
      (`assignment="partitions"`); what it takes of others' at the end it reads in its own process.
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

    def plan(self, spec: PartitionSpec) -> EpochPlan:
        """The sampler's order, partitioning among the workers. Raises ConfigError for another batch size."""
        size = self.loader.batch_size
        given = spec.batch_size
        if given not in (DEFAULT_BATCH_SIZE, size):
            raise ConfigError(
                f"batch_size={given!r}, but the DataLoader of {self.name!r} has {size}: leave out the job's"
            )
        assert size is not None
        # Processes that read ahead have to know which samples come next.
        partitioning = (
            "partitions" if spec.partitioning == "queue" and self.loader.num_workers else spec.partitioning
        )
        spec = dataclasses.replace(spec, batch_size=size, partitioning=partitioning)
        order = None if self._shuffled else order_of(self.loader, self.num_samples, spec.seed, self.name)
        return plan_samples(self._num_drawn, spec, order=order, drop_last=self.loader.drop_last)

    def feed(self, plan: BatchPlan, rank: int, seed: int) -> Feed:
        """Reads in this process, or ahead in processes of the loader's."""
        assert isinstance(plan, EpochPlan)
        if self.loader.num_workers:
            return ReadAhead(self, self.loader, plan, rank, seed)
        return SeededFeed(self, plan, seed)


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
    return dealt(seeded_iterator(lambda: in_own_words(mine), seed, epoch), rank, world)


def _run_share(loader: Loader, rank: int, world: int, epoch: int, seed: int) -> Iterable[Any]:
    """The batches of a loader whose batches are numbered, but only those of one worker."""
    generator = torch.Generator().manual_seed(mixed(seed, epoch, rank))
    if loader.batch_sampler is None:
        share = list(dealt(drawn_by(loader.sampler, seed, epoch), rank, world))
        mine = loader_like(loader, generator, sampler=share, batch_size=None)
    else:
        share = list(dealt(drawn_by(loader.batch_sampler, seed, epoch), rank, world))
        mine = loader_like(loader, generator, batch_sampler=share)
    return in_own_words(mine)
