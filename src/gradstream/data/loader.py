"""A torch `DataLoader` as a data set, whose data several workers share.

* Over a map-style data set, samples have ids: gradstream divides the order of the sampler among the workers, and reads
  the samples with the settings of the loader.
* With a batch sampler, or batch_size=None, batches have numbers: worker b mod W reads batch b of an epoch.
* Over an IterableDataset, nothing has a number: each worker reads all of it and keeps every W-th batch. To read only a
  part, use `from_stream`.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Iterable
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

from gradstream.data.base import DEFAULT_BATCH_SIZE, BatchPlan, Dataset, Feed, Ids, PartitionSpec
from gradstream.data.feed import plan_samples
from gradstream.data.isolation import Isolated, mixed, seeded, seeded_iterator
from gradstream.data.mapped import MapDataset, SeededFeed, check_mapped, check_targets, held_out_of
from gradstream.data.plan import EpochPlan, Order
from gradstream.data.read_ahead import ReadAhead, loader_like, with_own_tracebacks
from gradstream.data.stream import StreamDataset, interleaved_part
from gradstream.errors import ConfigError, DataError

Loader = DataLoader[Any]


def from_loader(
    loader: Loader, test: Any = None, *, targets: str | None = None, name: str | None = None
) -> MapDataset | StreamDataset:
    """A data set from a torch `DataLoader`.

    Its settings have this meaning with several workers:

    * `batch_size`: size of each worker's minibatch; the job needs none then.
    * `shuffle=True`: a new order in each epoch, by the seed of the run. `shuffle=False`: the order of the data set.
      Another sampler: its order, drawn again in each epoch (`set_epoch` is called, its `generator` and the global ones
      are seeded by run seed and epoch); it must be the same on all workers. A `DistributedSampler` is refused, since
      gradstream divides the data itself.
    * `drop_last`: skips the last minibatch of each partition, or the last round, if it is short.
    * `collate_fn`, `num_workers`, `prefetch_factor`, `persistent_workers`, `timeout`, `pin_memory`: as in torch, in the
      process of each worker. `num_workers` processes of each worker read samples ahead. They must know the next
      samples, so each worker has its own partition (`assignment="partitions"`); minibatches that it takes over from
      others at the end it reads in its own process.
    * `multiprocessing_context`: "fork" by default. Others need a data set in a module that the processes can import.
    * `worker_init_fn`: called in each of those processes.
    * `generator`: seeded by the run; its own seed has no effect.
    * `batch_sampler`, or `batch_size=None`: batch b of an epoch goes to worker b mod W.
    * an `IterableDataset`: each worker runs the loader over all of it and keeps every W-th batch, so it must return the
      same batches on all workers. `epochs=` needs a `__len__`. To read only a part on each worker, use `from_stream`.

    Args:
        loader: a loader for one machine.
        test: held-out samples: a map-style data set, a loader over one, or a gradstream data set.
        targets: key of the targets if batches are dicts.
        name: name for messages and records.

    Raises:
        ConfigError: it is no DataLoader, or a setting is not supported; the message says what to do.
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
        interleaved=True,
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
    """The samples of a map-style data set in the order of a sampler, read with the settings of a loader."""

    def __init__(self, name: str, loader: Loader, targets: str | None, test: Dataset | None) -> None:
        super().__init__(name, loader.dataset, loader.collate_fn, targets, test)
        self.loader = loader
        sampler: Any = loader.sampler
        whole = len(sampler) == self.num_samples
        # The plan shuffles by itself, so torch's shuffling sampler is not drawn from.
        self._shuffled = whole and type(sampler) is RandomSampler and not sampler.replacement
        self._num_drawn = len(sampler)
        if not self._num_drawn:
            raise DataError(f"data set {name!r}: the loader's sampler draws no samples; expected at least 1")

    def plan(self, spec: PartitionSpec) -> EpochPlan:
        """The plan of the sampler's order. Raises ConfigError if the job has another batch size."""
        size = self.loader.batch_size
        batch_size = spec.batch_size
        if batch_size not in (DEFAULT_BATCH_SIZE, size):
            raise ConfigError(
                f"batch_size={batch_size!r}, but the DataLoader of {self.name!r} has batch_size={size}: leave out the "
                "job's batch_size"
            )
        assert size is not None
        # Processes that read ahead must know the next samples.
        partitioning = (
            "partitions" if spec.partitioning == "queue" and self.loader.num_workers else spec.partitioning
        )
        spec = dataclasses.replace(spec, batch_size=size, partitioning=partitioning)
        order = None if self._shuffled else order_of(self.loader, self.num_samples, spec.seed, self.name)
        return plan_samples(self._num_drawn, spec, order=order, drop_last=self.loader.drop_last)

    def feed(self, plan: BatchPlan, rank: int, seed: int) -> Feed:
        """A feed that reads in this process, or ahead in processes of the loader."""
        assert isinstance(plan, EpochPlan)
        if self.loader.num_workers:
            return ReadAhead(self, self.loader, plan, rank, seed)
        return SeededFeed(self, plan, seed)


# ---- numbered batches, and nothing numbered ---------------------------------------------


def _run(loader: Loader, rank: int, world: int, epoch: int, seed: int) -> Iterable[Any]:
    """Runs the whole loader in one data epoch, and yields every W-th batch: those of worker `rank`.

    All W workers run the loader with the same seeds, so they get the same batches, and each batch is used once.
    """
    if hasattr(loader.dataset, "set_epoch"):
        loader.dataset.set_epoch(epoch)
    mine = copy.copy(loader)
    mine.worker_init_fn = Isolated(loader.worker_init_fn)
    if loader.num_workers:
        mine.multiprocessing_context = loader.multiprocessing_context or "fork"
    mine.generator = torch.Generator().manual_seed(mixed(seed, epoch))
    return interleaved_part(seeded_iterator(lambda: with_own_tracebacks(mine), seed, epoch), rank, world)


def _run_share(loader: Loader, rank: int, world: int, epoch: int, seed: int) -> Iterable[Any]:
    """Reads only the batches of worker `rank` in one data epoch: batches rank, rank + W, … of the sampler."""
    generator = torch.Generator().manual_seed(mixed(seed, epoch, rank))
    if loader.batch_sampler is None:
        share = list(interleaved_part(drawn_by(loader.sampler, seed, epoch), rank, world))
        mine = loader_like(loader, generator, sampler=share, batch_size=None)
    else:
        share = list(interleaved_part(drawn_by(loader.batch_sampler, seed, epoch), rank, world))
        mine = loader_like(loader, generator, batch_sampler=share)
    return with_own_tracebacks(mine)


# ---- samplers ---------------------------------------------------------------------------


def order_of(loader: DataLoader[Any], num_samples: int, seed: int, name: str) -> Order:
    """The order that the loader's sampler draws in each data epoch, the same on every node. Caches two epochs."""
    if type(loader.sampler) is SequentialSampler:
        ids = np.arange(num_samples)
        return lambda epoch: ids
    num_drawn = len(loader.sampler)  # type: ignore[arg-type]  # a sampler with a batch size has one

    @functools.lru_cache(maxsize=2)
    def order(epoch: int) -> Ids:
        drawn = np.array(drawn_by(loader.sampler, seed, epoch), dtype=np.int64)
        if drawn.shape != (num_drawn,):
            raise DataError(
                f"the sampler of {name!r} drew samples of shape {drawn.shape} in data epoch {epoch}; expected "
                f"({num_drawn},): as many sample numbers as its len() says"
            )
        return drawn

    return order


def drawn_by(sampler: Any, seed: int, epoch: int) -> list[Any]:
    """Everything that a sampler draws in a data epoch, as a function of (seed, epoch)."""
    parts: list[Any] = [sampler, getattr(sampler, "sampler", None)]
    for part in parts:
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)
        if isinstance(getattr(part, "generator", None), torch.Generator):
            part.generator.manual_seed(mixed(seed, epoch))
    with seeded(seed, epoch):
        return list(sampler)
