"""A worker's part of data that was made for one process.

Either whole minibatches are distributed in turn: worker r of W takes minibatches r, r + W, r + 2W, ... in the order of
one process. Or each minibatch is split: worker r takes its samples r, r + W, ... Either way order, sizes, drop_last and
samplers are the user's own. Under a synchronous strategy, a round consists of W minibatches of one process, or of the
W pieces of a minibatch. If the last round has no minibatch for a worker, it repeats one that counts no samples.

A DataLoader becomes a DataLoader with the same settings, class and attributes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from gradstream.errors import ConfigError
from gradstream.session.deals import LoaderDeals
from gradstream.session.division import (
    are_file_names,
    is_loading_pipeline,
    is_table,
    own_files,
    own_rows,
    reads_own_files,
)
from gradstream.session.draws import LoaderDraws
from gradstream.session.loaders_part import (
    CommonRandomState,
    LoaderPart,
    Takeover,
    global_generators,
    is_divided,
    length_of,
    made_of,
)
from gradstream.session.streams import ShardedIterable, ShardedStream, iterable_of, stream_of

BATCHES_AHEAD = 64
"""Number of minibatches (as sample indices) drawn at once. A sampler may be infinite."""


class SamplerEpoch:
    """One iteration over a sampler.

    Args:
        epoch: number of the epoch, from 0.

    Attributes:
        counts: samples counted for each minibatch that is drawn and not yet yielded to the loop.
    """

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.counts: deque[int | None] = deque()


class ShardedBatchSampler:
    """Yields one worker's minibatches, as sample indices; otherwise behaves as the user's sampler.

    Args:
        batches: the user's sampler. Each iteration yields the minibatches of an epoch as lists of indices or, for
            a loader that does not collate, keys of its dataset.
        part: the worker's part of the data.
        collated: whether the loader makes minibatches out of samples.

    Attributes:
        latest: the latest iteration, which may be ahead of the loop; None before the first.
        deals: deals out or draws the minibatches; None if this worker always has the same part.
        skipped: minibatches of one process that the next iteration leaves out, since the loop has had them.
    """

    def __init__(self, batches: Iterable[Any], part: LoaderPart, *, collated: bool) -> None:
        self._batches: Any = batches
        self._part = part
        self._collated = collated
        self._random = CommonRandomState(part.seed)
        self.latest: SamplerEpoch | None = None
        self.deals: LoaderDeals | LoaderDraws | None = None
        self.skipped = 0

    @property
    def samplers(self) -> Sequence[Any]:
        """The user's sampler, and the one inside it."""
        return [one for one in (self._batches, getattr(self._batches, "sampler", None)) if one is not None]

    @property
    def generators(self) -> list[torch.Generator]:
        """The samplers' own generators, which decide the order of the next iteration."""
        found = [getattr(sampler, "generator", None) for sampler in self.samplers]
        return [one for one in found if isinstance(one, torch.Generator)]

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next iteration, from 0; each one after it adds 1."""
        self._random.epoch = epoch
        for sampler in self.samplers:
            set_epoch = getattr(sampler, "set_epoch", None)
            if set_epoch is not None:
                set_epoch(epoch)

    def seek(self, epoch: int, taken: int, generators: Sequence[torch.Tensor]) -> None:
        """Lets the next iteration begin after so many minibatches of this worker.

        Args:
            epoch: number of the epoch.
            taken: number of minibatches.
            generators: states of `generators` before the epoch.
        """
        self.set_epoch(epoch)
        self.skipped = taken * (1 if self._part.split else self._part.world_size)
        for generator, state in zip(self.generators, generators, strict=True):
            generator.set_state(state)

    @property
    def epoch(self) -> int:
        """Number of the next iteration."""
        return self._random.epoch

    def __iter__(self) -> Iterator[Any]:
        latest = self.latest = SamplerEpoch(self._random.epoch)
        batches, place = self._drawn(), self._part.place
        is_over, first, number = (False, 0, 0) if place is None else place.begin()
        if self.skipped and torch.is_grad_enabled():  # else a validation
            first = number = self.skipped
            self.skipped = 0
        by_place = place is None or not place.applies
        if self.deals is not None and self.deals.begin(
            latest.epoch, islice(batches, first if by_place else 0, None), number if by_place else 0
        ):  # where a resumed loop finds its place by its loaders, these pass over what is done
            while (dealt := self.deals.draw()) is not None:
                batch, count = dealt
                latest.counts.append(count)
                yield batch
            return
        if is_over:  # before the run was resumed
            deque(batches, maxlen=0)
            return
        for batch, count in self._part.taken(islice(batches, first, None), self._cut, self._size, number):
            latest.counts.append(count)
            yield batch

    def deal(self, takeover: Takeover, number: int) -> None:
        """Deals out the minibatches from now on, as those of the loader of this number."""
        part, place, is_finite = self._part, self._part.place, hasattr(self._batches, "__len__")
        if takeover.in_rounds:
            deals = self.deals = takeover.deals[number] = LoaderDeals(
                takeover, part.rank, part.split, self._cut, self._size, place, is_finite=is_finite
            )
            if place is not None:
                place.deals = deals
        elif is_finite:  # else it has no epochs
            self.deals = takeover.draws[number] = LoaderDraws(
                *(takeover, number, takeover.num_at_first, part.split, self._cut, self._size),
                lambda: len(self._batches),
                place,
            )
            if place is not None:
                place.any_size = True
        if self.deals is not None:
            takeover.add(number, self.deals)

    def __len__(self) -> int:
        count = self._part.count if self.deals is None else self.deals.count
        return count(len(self._batches))  # TypeError if the sampler has none

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # before __init__ there is no sampler
            raise AttributeError(name)
        return getattr(self._batches, name)

    def _drawn(self) -> Iterator[Any]:
        for batch in self._random.iterate(lambda: iter(self._batches), BATCHES_AHEAD):
            yield batch if hasattr(batch, "__getitem__") or not self._collated else list(batch)

    def _cut(self, batch: Any, which: slice) -> Any:
        if self._collated or isinstance(batch, list):
            return batch[which]
        raise ConfigError(
            f"session.shard: split=True, but the DataLoader has batch_size=None and its sampler gives {batch!r}; "
            "expected lists of sample indices. Distribute whole minibatches instead, with split=False"
        )

    def _size(self, batch: Any) -> int | None:
        return len(batch) if self._collated or isinstance(batch, list) else None


class ShardedLoader(DataLoader[Any]):
    """A worker's part of a DataLoader. Notes the samples of each minibatch that it yields.

    Its processes draw different random numbers on each worker, even if all scripts set the same seed. On worker 0 they
    draw what torch would draw.
    """

    _part: LoaderPart
    _place: tuple[int, int] = (0, 0)  # (epoch, minibatches that the training loop has taken in it)
    _drawn_from: Sequence[torch.Tensor] = ()  # the generators' states before that epoch
    _loaded_place: Mapping[str, Any] | None = None

    @property
    def is_dealt(self) -> bool:
        """Whether others can take over the minibatches of a lost worker."""
        return self._index_sampler.deals is not None

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # wraps torch's iterator
        sampler: ShardedBatchSampler = self._index_sampler
        sampler.latest = None
        deals, place = sampler.deals, self._part.place
        while place is not None and place.is_behind:  # what these epochs draw from generators counts
            deque(self._loaded(sampler, self.generator), maxlen=0)
        sampler.latest = None
        if torch.is_grad_enabled():  # else a validation
            loaded, self._loaded_place = self._loaded_place, None
            passed = 0 if place is None else place.passes
            self._place = (sampler.epoch, passed) if loaded is None else (loaded["epoch"], loaded["taken"])
            if loaded is not None:
                sampler.seek(*self._place, loaded["generators"])
            self._drawn_from = [generator.get_state() for generator in sampler.generators]
        begins_here = place is not None and place.places.has_entered_epoch
        while begins_here and deals is not None and deals.is_over:
            deque(self._loaded(sampler, self.generator), maxlen=0)
            sampler.latest = None
        if deals is not None and deals.is_over and self.num_workers:  # nothing for processes to do
            return self._loaded(sampler, self.generator)
        batches = super().__iter__()  # with worker processes this draws indices already
        return self._counted(batches, sampler, sampler.latest)

    def _get_iterator(self) -> Any:  # where torch seeds the loader's processes, from `generator`
        if not self.num_workers:
            with global_generators:
                return super()._get_iterator()
        if not self._part.rank:
            return super()._get_iterator()
        own = self.generator
        drawn = int(
            torch.empty((), dtype=torch.int64).random_(generator=own)
        )  # as torch: it advances alike everywhere
        self.generator = torch.Generator().manual_seed((drawn + self._part.rank) % 2**63)
        try:
            return super()._get_iterator()
        finally:
            self.generator = own

    def _counted(
        self, batches: Iterator[Any], sampler: ShardedBatchSampler, epoch: SamplerEpoch | None
    ) -> Iterator[Any]:
        ended = False
        try:
            yield from self._noted(batches, sampler, epoch)
            ended = True
        finally:
            self._part.ahead.do(partial(self._part.over, ended))

    def _noted(
        self, batches: Iterator[Any], sampler: ShardedBatchSampler, epoch: SamplerEpoch | None
    ) -> Iterator[Any]:
        deals, trains = sampler.deals, torch.is_grad_enabled()
        if (place := self._part.place) is not None:
            place.asks(at_beginning=True, ahead=epoch is not None)
        for batch in self._part.asked(batches):
            epoch = sampler.latest if epoch is None else epoch
            if epoch is None or not epoch.counts:
                raise ConfigError(
                    f"session.shard: the __iter__ of {type(self).__name__} yields minibatches that the sampler of "
                    "session.shard has not drawn, from an iterator made before shard. Shard a plain DataLoader "
                    "instead"
                )
            samples = epoch.counts.popleft()
            samples = length_of((batch,)) if samples is None else samples
            self._part.ahead.take(samples, partial(self._take, samples, deals, trains=trains))
            yield batch
        if trains:
            self._place, self._drawn_from = (self._place[0] + 1, 0), ()
        if deals is not None:
            yield from self._made(deals)
            self._part.ahead.do(deals.over)

    def _take(self, samples: int | None, deals: LoaderDeals | LoaderDraws | None, *, trains: bool) -> None:
        """Notes that the loop takes a minibatch."""
        if deals is not None:
            deals.take()
        self._part.note(samples)
        if trains:
            self._place = self._place[0], self._place[1] + 1

    @property
    def rest(self) -> int:
        """Number of minibatches that the loop takes in this iteration besides those that it has used.

        In rounds that is exact, as far as anybody knows now. Else there may be more, unless it is 0.
        """
        deals: LoaderDeals | LoaderDraws | None = self._index_sampler.deals
        if isinstance(deals, LoaderDeals):
            return deals.rest(self.total)
        return max(0, len(self) - self._place[1]) if deals is None else deals.rest()

    @property
    def total(self) -> int:
        """Number of minibatches of all workers in an epoch: those of one process."""
        return len(self._index_sampler._batches)

    def state_dict(self) -> dict[str, Any]:
        """The place of the training loop, after the last minibatch that it has taken."""
        if self._loaded_place is not None:
            return dict(self._loaded_place)
        epoch, taken = self._place
        states = self._drawn_from or [one.get_state() for one in self._index_sampler.generators]
        return {"epoch": epoch, "taken": taken, "workers": self._part.world_size, "generators": list(states)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Sets the place at which the next iteration of the training loop begins. Nothing is loaded twice.

        Raises:
            ConfigError: the state was saved by another number of workers.
        """
        part = self._part
        if state["workers"] != part.world_size:
            raise ConfigError(
                f"session.shard: the loader's state was saved by one of {state['workers']} workers, but there are "
                f"{part.world_size}: their parts differ"
            )
        self._loaded_place = dict(state)

    def _made(self, deals: LoaderDeals | LoaderDraws) -> Iterator[Any]:
        """Yields the minibatches that this worker takes over from lost workers."""
        for batch, samples in self._part.asked(iter(deals.draw, None)):
            made = next(self._loaded([batch]))
            samples = length_of((made,)) if samples is None else samples
            self._part.ahead.take(samples, partial(self._take, samples, deals, trains=False))
            yield made

    def _loaded(self, batches: Iterable[Any], generator: torch.Generator | None = None) -> Iterator[Any]:
        """Makes minibatches from their indices as this loader does, but in this process.

        By default the user's own generator does not advance, or it would differ between workers.
        """
        place = "batch_sampler" if self.batch_sampler is not None else "sampler"
        alone = {"num_workers": 0, "prefetch_factor": None, "persistent_workers": False, "timeout": 0}
        state = {**vars(self), **alone, place: batches, "generator": generator, "_iterator": None}
        made: ShardedLoader = object.__new__(type(self))
        vars(made).update(state)
        return super(ShardedLoader, made).__iter__()


def _part_of_loader(loader: DataLoader[Any], part: LoaderPart) -> DataLoader[Any]:
    """Makes a loader of the minibatches, or parts of minibatches, that one worker takes.

    Raises:
        ConfigError: the loader is sharded already, or divided for another worker, or its order would differ
            between workers.
    """
    if isinstance(loader, ShardedLoader | ShardedStream):
        raise ConfigError(
            "session.shard: got a loader that session.shard returned; call shard once per loader"
        )
    divided = is_divided(loader, part) or reads_own_files(loader.dataset)
    if divided:  # it yields this worker's part already: only count its samples
        part = part.alone()
    if isinstance(loader.dataset, IterableDataset):
        return stream_of(loader, part, divided=divided)
    state = {**vars(loader), "_part": part, "_iterator": None, "in_order": True}
    collated = loader.batch_sampler is not None
    place = "batch_sampler" if collated else "sampler"
    state[place] = ShardedBatchSampler(getattr(loader, place), part, collated=collated)
    if loader.generator is None:
        for sampler in state[place].samplers:
            # torchdata's has drawn a seed of its own when it was made, on each worker another one.
            if type(sampler).__module__.startswith("torchdata.") and hasattr(sampler, "generator"):
                sampler.generator.manual_seed(part.seed)
    if part.place is not None:
        part.place.columns = 1 if part.split else part.world_size
        part.place.any_size = part.aligned and not divided
    if part.takeover is not None:
        state[place].deal(part.takeover, part.takeover.number())
    return made_of(loader, ShardedLoader, state)


def part_of(data: Any, part: LoaderPart) -> Any:
    """The part of `data` that one worker takes: see `Session.shard`."""
    if isinstance(data, DataLoader):
        return _part_of_loader(data, part)
    if isinstance(data, IterableDataset) and not is_loading_pipeline(data):
        raise ConfigError(
            "session.shard: got an IterableDataset, expected a DataLoader of it: shard the DataLoader, or divide "
            "the dataset by session.rank and session.world_size yourself"
        )
    if (isinstance(data, Dataset) and not isinstance(data, IterableDataset)) or is_table(data):
        size = len(data)
        if part.aligned and size % part.world_size:
            raise ConfigError(
                f"session.shard: got a Dataset of {size} samples; expected a multiple of the {part.world_size} "
                "workers, since all workers must make the same number of steps. Shard a DataLoader of the dataset "
                f"instead, or leave out {size % part.world_size} samples"
            )
        if is_table(data):
            return own_rows(data, part.rank, part.world_size)
        return Subset(data, part.of(range(size)))
    if isinstance(data, np.ndarray | torch.Tensor) and not part.split:
        return part.of(data)
    if isinstance(data, ShardedIterable):
        raise ConfigError(
            "session.shard: got an iterable that session.shard returned; call shard once for each"
        )
    if are_file_names(data):
        if part.ends is not None:
            part.ends.files_divided = True
        return own_files(data, part.rank, part.world_size)
    if isinstance(data, Iterable) and not isinstance(data, str | bytes):
        return iterable_of(data, part)
    raise ConfigError(
        f"session.shard: got {type(data).__name__}; expected a DataLoader, a Dataset, an array, a tensor, an "
        "iterable of minibatches or a list of names of files"
    )
