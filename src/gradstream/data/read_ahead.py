"""A feed whose samples the processes of a torch `DataLoader` read ahead, in the order of a plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from gradstream.data.base import BatchRef
from gradstream.data.isolation import Isolated, mixed, seeded
from gradstream.data.mapped import MapDataset, SeededFeed, collated
from gradstream.data.plan import EpochPlan
from gradstream.errors import UserCodeError
from gradstream.model.base import Batch

Loader = DataLoader[Any]


class _Ahead:
    """The batch sampler of a loader that reads ahead: successive minibatches of a plan."""

    def __init__(self, plan: EpochPlan) -> None:
        self._plan = plan
        self.begin(BatchRef(0, 0, 0))

    def begin(self, start: BatchRef) -> None:
        """Sets the range to read: from this minibatch to the end of the epoch, or as far as samples are known."""
        self.start, self.stop = start, self._plan.known_until(start)

    def __iter__(self) -> Iterator[list[int]]:
        first = self.start
        for batch in range(first.batch, self.stop):
            yield self._plan.ids(BatchRef(first.epoch, first.partition, batch)).tolist()


class ReadAhead:
    """Reads a worker's own minibatches ahead, in processes of a loader; reads other minibatches in this process.

    Args:
        data: the data set.
        loader: a loader over it, whose settings are used.
        plan: plan of the data set.
        rank: rank of the worker.
        seed: seed of the run. Random numbers of the processes are a function of (seed, epoch, rank) as long as no
            minibatch is skipped.
    """

    def __init__(self, data: MapDataset, loader: Loader, plan: EpochPlan, rank: int, seed: int) -> None:
        self._data = data
        self._plan = plan
        self._rank = rank
        self._seed = seed
        self._others = SeededFeed(data, plan, seed)
        self._ahead = _Ahead(plan)
        self._generator = torch.Generator()
        self._loader = loader_like(loader, self._generator, batch_sampler=self._ahead)
        self._items: Iterator[Any] = iter(())
        self._next: BatchRef | None = None

    def read(self, ref: BatchRef) -> Batch:
        """See `Feed`."""
        if ref.partition != self._rank or not self._plan.size(ref):
            return self._others.read(ref)
        if ref != self._next or ref.batch >= self._ahead.stop:
            self._begin(ref)
        try:
            item = next(self._items)
        except Exception as error:
            self._next = None
            raise _with_traceback(error) from error
        self._next = BatchRef(ref.epoch, ref.partition, ref.batch + 1)
        where = f"batch {ref.batch} of {self._data.name!r} (rank {ref.partition}, data epoch {ref.epoch})"
        return collated(item, self._data.targets, where, self._plan.ids(ref))

    def _begin(self, ref: BatchRef) -> None:
        self._ahead.begin(ref)
        seeds = (ref.epoch, ref.partition, *([ref.batch] if ref.batch else []))
        self._generator.manual_seed(mixed(self._seed, *seeds))
        with seeded(self._seed, *seeds):
            self._items = iter(self._loader)


def loader_like(loader: Loader, generator: torch.Generator, **batches: Any) -> Loader:
    """A loader with the settings of another one, and with `batches`: a batch sampler, or a sampler of batches."""
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


def _with_traceback(error: Exception) -> Exception:
    """The error that a process of a loader has raised, with its traceback. torch puts both into the message."""
    _, mark, raised = str(error).partition("Original Traceback (most recent call last):\n")
    if not mark:
        return error
    message = f"the data set raised {raised.rstrip().splitlines()[-1]}, in a process of the loader"
    return UserCodeError(message, "Traceback (most recent call last):\n" + raised)


def with_own_tracebacks(items: Iterable[Any]) -> Iterator[Any]:
    """The same items. An error of a process has the traceback of the user's code."""
    try:
        yield from items
    except Exception as error:
        raise _with_traceback(error) from error
