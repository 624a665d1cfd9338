"""A worker's part of data that cannot be indexed: a DataLoader of an IterableDataset, or an iterable of minibatches.

Where the dataset says how it is divided (see `own_part_of`), each worker reads only its own part. The parts may have
different lengths, which nobody knows before the end. So loops in rounds ask at the end of their part whether others
take more minibatches, and repeat one for each of those. It counts no samples.

Otherwise each worker reads all minibatches, and yields its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader

from gradstream.data.dealing import Epoch
from gradstream.errors import ConfigError, GradstreamError
from gradstream.session.division import is_loading_pipeline, own_part_of, reads_own_files, without_splitters
from gradstream.session.loaders_part import CommonRandomState, LoaderPart, StreamEnds, length_of, made_of
from gradstream.worker.loop import LoopContext

# ---- stream ends -------------------------------------------------------------------------
# Ends an epoch at the same number of minibatches on all workers, where each reads its own part.
#
# A worker tells nobody how far it is until it hears that another has used up its part. So a run whose parts are equally
# long exchanges one message for each worker and epoch.


class EpochEnd:
    """Finds the end of one epoch.

    Args:
        ends: the session's.
        epoch: number of the loader, and of its epoch.
        taken: number of minibatches that were taken before the state of the loader was loaded.
    """

    def __init__(self, ends: StreamEnds, epoch: Epoch, taken: int) -> None:
        self._ends = ends
        self._epoch = epoch
        self._taken = taken
        self._has_read = False
        self._begun = ends.made()
        self._telling: Future[None] | None = None
        self._event_loop: asyncio.AbstractEventLoop | None = None  # once some worker has no more
        self._changed = asyncio.Event()

    @property
    def is_training(self) -> bool:
        """Whether the loop has made steps; else this may be a validation, perhaps on one worker alone."""
        return self._ends.made() != self._begun

    def took(self) -> None:
        """Notes that the worker takes a minibatch of its own part."""
        self._taken += 1
        self._has_read = True
        bridge = self._ends.bridge()
        if self._telling is None and bridge is not None:
            with suppress(RuntimeError):  # the run has ended
                self._telling = bridge.spawn(self._tell)
        elif self._event_loop is not None:
            with suppress(RuntimeError):  # the run has ended
                self._event_loop.call_soon_threadsafe(self._changed.set)

    async def _tell(self, context: LoopContext) -> None:
        told = 0
        with suppress(GradstreamError):  # the loop hears of it at its next step
            while True:
                self._changed.clear()
                if told == self._taken:
                    await self._changed.wait()
                told = self._taken
                await context.endings.epoch_part(self._epoch, told, done=False)
                self._event_loop = asyncio.get_running_loop()

    def goes_on(self) -> bool:
        """Whether the worker, which has no more of its own, repeats a minibatch, since another one takes one.

        Waits for workers that still read. A loop that makes no steps, a validation, asks nobody.

        Raises:
            GradstreamError: the error that ended the worker.
        """
        bridge = self._ends.bridge()
        if bridge is None or bridge.ended or (self._has_read and not self.is_training):
            self.close()
            return False
        self._stop()
        more = bridge.ask(lambda context: context.endings.epoch_part(self._epoch, self._taken, done=True))
        self._taken += more
        return more

    def close(self) -> None:
        """Notes that the loop has left the epoch, perhaps before its end: nobody waits for this worker."""
        if self._telling is not None:
            self._stop()
            bridge = self._ends.bridge()
            assert bridge is not None
            with suppress(RuntimeError):  # the run has ended
                bridge.spawn(self._leave)

    async def _leave(self, context: LoopContext) -> None:
        is_training = self.is_training
        with suppress(GradstreamError):
            await context.endings.epoch_part(self._epoch, self._taken * is_training, done=is_training)

    def _stop(self) -> None:
        if self._telling is not None:
            self._telling.cancel()
            self._telling = None


# ---- streams -----------------------------------------------------------------------------


class _Stream:
    """What a DataLoader of an IterableDataset and an iterable have in common: places, and their states.

    Attributes:
        place: (iteration of the training, minibatches that were drawn in it).
    """

    _part: LoaderPart
    _number: int  # index among the session's streams, from 0
    _is_own = False  # the source has only this worker's part
    _place = (0, 0)
    _begun: object = None  # the steps before the iteration of `_place`, once it has begun
    _is_over = False  # the source of that iteration has no more
    _is_empty = False  # there are fewer parts than workers, and this one has none
    _loaded: Mapping[str, Any] | None = None

    def _read(self, loaded: Mapping[str, Any] | None) -> Iterator[Any]:
        """Reads the source, from the start or from a loaded state of it."""
        raise NotImplementedError

    def _read_all(self) -> Iterator[Any]:
        """Reads all data, for a worker whose own part is empty."""
        return iter(())

    def __iter__(self) -> Iterator[Any]:
        if not torch.is_grad_enabled():  # a validation: not the place of the training
            yield from self._part.noted(self._read(None))
            return
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            self._place = loaded["epoch"], loaded["taken"]
        elif self._begun is not None:  # the loop has left that iteration before its end
            self._next_place()
        self._begun, self._is_over = self._made, loaded is not None and bool(loaded["over"])
        first = self._place[1]
        batches = iter(()) if self._is_over else self._read(loaded)
        if loaded is not None and loaded["source"] is None:
            next(islice(batches, first, first), None)  # reads them again
        counted = self._counted(batches)
        if self._is_own:
            yield from self._part.passed(self._in_step(counted, first))
        elif not self._is_over:
            yield from self._part.noted(counted, first)
        self._next_place()

    def _next_place(self) -> None:
        """The iteration is over. If it had no steps, it was a validation, perhaps on this worker alone."""
        is_training = self._part.ends is None or self._made != self._begun
        self._place, self._begun, self._is_over = (self._place[0] + is_training, 0), None, False

    @property
    def _made(self) -> object:
        return () if self._part.ends is None else self._part.ends.made()

    def _counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self._place = self._place[0], self._place[1] + 1
            yield batch
        self._is_over = True

    def _in_step(self, batches: Iterator[Any], taken: int) -> Iterator[tuple[Any, int | None]]:
        """All minibatches of the source, then one of them again until all workers have no more, with their samples."""
        part = self._part
        ends = part.ends if part.aligned else None
        end = None if ends is None else EpochEnd(ends, Epoch(self._number, self._place[0]), taken)
        repeat: Any = None
        try:
            for batch in batches:
                repeat = batch if repeat is None else repeat
                if end is not None:
                    end.took()
                yield batch, length_of((batch,))
            while end is not None and end.goes_on():
                repeat = next(self._read_all(), None) if repeat is None else repeat
                if repeat is None:
                    return
                self._place = self._place[0], self._place[1] + 1
                yield repeat, 0
        finally:
            if end is not None:
                end.close()

    def _state(self) -> dict[str, Any]:
        if self._loaded is not None:
            return dict(self._loaded)
        epoch, taken = self._place
        return {"epoch": epoch, "taken": taken, "over": self._is_over}


class ShardedStream(_Stream, DataLoader[Any]):  # type: ignore[misc]  # wraps torch's iterator
    """A worker's part of a DataLoader of an IterableDataset.

    It saves its place: by the state of the user's loader or dataset if they have one, else by the number of
    minibatches, which are then read again.
    """

    _common_random: CommonRandomState | None
    _draw = 0  # number of the iteration for `_common_random`
    _whole: DataLoader[Any] | None  # the user's loader, if this one reads a part of its dataset
    _divided: tuple[int, int]  # which part, and of how many
    _rank: int

    def _read(self, loaded: Mapping[str, Any] | None) -> Iterator[Any]:
        if not self._divide():
            return
        source = None if loaded is None else loaded["source"]
        if source is not None:
            self._load_source(source)
        begin, common = super(_Stream, self).__iter__, self._common_random  # torch's own
        batches: Iterator[Any]
        if common is None:
            batches = iter(begin())
        else:
            self._draw = common.epoch = common.epoch if loaded is None else loaded["draw"]
            batches = common.iterate(begin, 1)
        yield from islice(batches, 1)
        if source is not None and getattr(self.dataset, "_starting_state_dict", None):
            # A dataset of `datasets` would begin the next epoch at the loaded state again.
            self.dataset.load_state_dict({})  # type: ignore[attr-defined]
        yield from batches

    def _read_all(self) -> Iterator[Any]:
        return iter(()) if self._whole is None else iter(self._whole)

    def _divide(self) -> bool:
        """Divides the data among the workers that are there now. Returns whether this worker has a part."""
        ends = self._part.ends
        if self._whole is None or ends is None or not self._part.aligned:
            return True
        present = ends.present()
        if self._rank not in present:  # the others have divided the epoch without this worker
            return False
        which = present.index(self._rank), len(present)
        if which != self._divided:
            self._divided, self._iterator = which, None
            most = which[1]
            while (own := own_part_of(self._whole.dataset, min(which[0], most - 1), most)) is None:
                most -= 1
            processes = own.processes(self._whole.num_workers)
            vars(self).update(dataset=own.dataset, num_workers=processes)  # torch forbids to set it
            self._is_empty = which[0] >= most
        return not self._is_empty

    def __len__(self) -> int:
        return self._part.count(super().__len__())

    def state_dict(self) -> dict[str, Any]:
        """The place of the training loop, after the last minibatch that it has taken."""
        state = self._state()
        if self._loaded is None:
            state["draw"] = self._draw + state["over"]  # then it is not drawn again
            is_inside = state["taken"] and not state["over"]
            state["source"] = self._source_state() if is_inside else None
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Sets the place at which the next iteration of the training loop begins."""
        self._loaded = dict(state)
        if self._common_random is not None:
            self._common_random.epoch = state["draw"]

    def _source_state(self) -> Any:
        if (own := getattr(super(), "state_dict", None)) is not None:
            return own()
        return self.dataset.state_dict() if self._dataset_seeks else None  # type: ignore[attr-defined]

    def _load_source(self, state: Any) -> None:
        own = getattr(super(), "load_state_dict", None)
        (self.dataset.load_state_dict if own is None else own)(state)  # type: ignore[attr-defined]

    @property
    def _dataset_seeks(self) -> bool:
        """Whether the dataset's own state is the place of the loop: no process has read ahead."""
        return not self.num_workers and hasattr(self.dataset, "state_dict") and not _has_buffer(self.dataset)


def _has_buffer(dataset: Any) -> bool:
    """Whether a dataset of `datasets` shuffles by a buffer, which its state leaves out."""
    inner = getattr(dataset, "_ex_iterable", None)
    while inner is not None:
        if "BufferShuffled" in type(inner).__name__:
            return True
        inner = getattr(inner, "ex_iterable", None)
    return False


def stream_of(loader: DataLoader[Any], part: LoaderPart, *, divided: bool) -> DataLoader[Any]:
    """Makes a worker's part of a DataLoader of an IterableDataset.

    Args:
        loader: the user's loader.
        part: the worker's part.
        divided: the dataset yields this worker's part already.

    Raises:
        ConfigError: the order of the minibatches would differ between workers.
    """
    state = {
        **vars(loader),
        "dataset": without_splitters(loader.dataset),
        "_part": part,
        "_iterator": None,
        "_is_own": divided,
        "_common_random": None,
    }
    state |= {"_number": 0 if part.ends is None else part.ends.number(), "_whole": None}
    if divided:
        return made_of(loader, ShardedStream, state)
    if part.ends is not None and part.ends.files_divided:
        raise ConfigError(
            f"session.shard: the script has divided names of files before, and the {type(loader.dataset).__name__} "
            "does not keep them as they were, so it may be divided twice, and samples lost. Shard either the names or "
            "the loader; a loader of other data before the names"
        )
    state["_common_random"] = CommonRandomState(part.seed)
    own = (
        None
        if part.split or part.world_size == 1
        else own_part_of(loader.dataset, part.rank, part.world_size)
    )
    if own is not None:
        state |= {"dataset": own.dataset, "num_workers": own.processes(loader.num_workers), "_whole": loader}
        state |= {"_part": part.alone(), "_is_own": True, "_divided": (part.rank, part.world_size)}
        return made_of(loader, ShardedStream, state | {"_rank": part.rank})
    if not loader.in_order:
        raise ConfigError(
            "session.shard: got a DataLoader of an IterableDataset with in_order=False: each worker would "
            "see the minibatches in a different order, and some would be used twice. Make the loader "
            "with in_order=True"
        )
    if part.rank == 0 and part.world_size > 1:
        say_that_all_read(loader.dataset, part)
    return made_of(loader, ShardedStream, state)


def say_that_all_read(dataset: Any, part: LoaderPart) -> None:
    """Says once a loader that each worker reads all of a dataset, and what to do about it."""
    what = "split=True" if part.split else "it does not say how it is divided"
    remedy = "" if part.split else ". With a method shard(num_shards, index), each reads its own part"
    part.tell(
        f"each of the {part.world_size} workers reads all of the {type(dataset).__name__}, and uses its "
        f"part of the minibatches, since {what}{remedy}"
    )


class ShardedIterable(_Stream):
    """One worker's share of an iterable of minibatches: some whole minibatches, or some samples of each.

    It saves its place: by the state of the iterable if it has one, else by the number of minibatches, which are then
    read again.

    Args:
        batches: all minibatches. If workers get whole ones, those of other workers are made and dropped.
        part: how to divide, and which share to take.
        is_own: `batches` has only this worker's part.
    """

    def __init__(self, batches: Iterable[Any], part: LoaderPart, *, is_own: bool = False) -> None:
        self._batches = batches
        self._part = part
        self._is_own = is_own
        self._number = 0 if part.ends is None else part.ends.number()

    def _read(self, loaded: Mapping[str, Any] | None) -> Iterator[Any]:
        if loaded is not None and loaded["source"] is not None:
            self._batches.load_state_dict(loaded["source"])  # type: ignore[attr-defined]
        yield from self._batches

    def __len__(self) -> int:
        return self._part.count(len(self._batches))  # type: ignore[arg-type]  # TypeError if they have none

    def state_dict(self) -> dict[str, Any]:
        """The place of the training loop, after the last minibatch that it has taken."""
        state = self._state()
        if self._loaded is None:
            seeks = hasattr(self._batches, "state_dict") and hasattr(self._batches, "load_state_dict")
            is_inside = state["taken"] and not state["over"]
            state["source"] = self._batches.state_dict() if seeks and is_inside else None  # type: ignore[attr-defined]
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Sets the place at which the next iteration of the training loop begins."""
        self._loaded = dict(state)


def iterable_of(batches: Any, part: LoaderPart) -> ShardedIterable:
    """Makes a worker's part of an iterable of minibatches."""
    if not is_loading_pipeline(batches) or part.split or part.world_size == 1:
        return ShardedIterable(batches, part)
    is_own = reads_own_files(batches.pipeline[0].dataset)
    own = own_part_of(batches, *((0, 1) if is_own else (part.rank, part.world_size)))
    if own is None:
        return ShardedIterable(batches, part)
    return ShardedIterable(own.dataset, part.alone(), is_own=True)
