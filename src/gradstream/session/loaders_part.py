"""Decides which minibatches a worker takes, and how many samples each counts.

It also recognises DataLoaders whose sampler or dataset already divides the data (those of torch, accelerate and
others). Dividing such a loader again would leave most samples unused. An object that divides data has two attributes:
the number of processes, and the index of this process.
"""

from __future__ import annotations

import random
import threading
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Protocol, TypeVar
from zlib import crc32

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from gradstream.errors import ConfigError
from gradstream.session.bridge import LoopBridge
from gradstream.session.places import LoaderPlace
from gradstream.session.roster import Roster
from gradstream.untrusted import say

T = TypeVar("T")

# ---- the session's loaders --------------------------------------------------------------

Dealt = tuple[Any, int | None]
"""A minibatch, most often as sample indices, and the samples that it counts; None if that cannot be seen."""


def packed(batch: Any) -> Any:
    """A list of integers as an array of eight bytes each; anything else unchanged."""
    if type(batch) is not list or any(type(one) is bool for one in batch[:1]):
        return batch
    try:
        return array("q", batch)
    except (TypeError, OverflowError):
        return batch


class Deals(Protocol):
    """What says which minibatches of a loader this worker takes: see `LoaderDeals` and `LoaderDraws`."""

    def saved(self) -> dict[str, Any]:
        """What a newcomer has to know, as JSON."""
        ...

    def load(self, came: Mapping[str, Any]) -> None:
        """Goes on, in a run that had begun, from what `saved` of another worker has returned."""
        ...


class DealsOfRounds(Deals, Protocol):
    """What all workers know alike in rounds: see `LoaderDeals`."""

    @property
    def is_finite(self) -> bool:
        """Whether the sampler has a length."""
        ...

    @property
    def mark(self) -> tuple[int, int]:
        """What is equal on workers that have dealt the same."""
        ...

    def has_round(self, number: int) -> bool:
        """Whether the loop has taken a minibatch for this round."""
        ...

    def left(self) -> Counter[int]:
        """By rank of a lost worker, its minibatches that are in no round, though the loop has ended."""
        ...


class Draws(Deals, Protocol):
    """What this worker has asked for: see `LoaderDraws`."""

    def report(self) -> None:
        """Waits until the coordinator knows what the next step uses."""
        ...


class Takeover:
    """A session's place in the run, for its loaders.

    Args:
        steps: returns the number of the loop's next step, or None while unknown. A resumed run begins at 0, and
            iterations that it skips have negative numbers.
        roster: which workers make which rounds.
        rank: rank of this worker.
        num_at_first: number of workers at the run's beginning. By it the length of a loader is told that a loop has not
            begun, so that a schedule made of it is the same on all workers, whenever they come.
        in_rounds: all loops make their rounds together, and deal out the minibatches themselves: see `deals`. Else the
            coordinator deals them out: see `draws`.
        steps_a_round: H, where loops make local steps between two exchanges; else 1.

    Attributes:
        bridge: reaches the coordinator; None before the loop can make steps.
        first_of_phase: number of the first round of the present phase; None in a loop without phases.
        deals, draws: by number of a loader, what deals out or draws its minibatches.
        own_data: the loop has used minibatches, or samples, of no loader of which others could take over the rest.
        is_unclear: returns whether nobody knows with which step the loop uses its minibatches.
        is_last: returns whether the loop is in its last epoch, in which it may wait for what others leave.
        is_again: returns whether the loop goes through a step once more that is in the model already.
    """

    def __init__(
        self,
        steps: Callable[[], int | None],
        roster: Roster,
        rank: int = 0,
        *,
        num_at_first: int,
        in_rounds: bool = False,
        steps_a_round: int = 1,
    ) -> None:
        self.num_at_first = num_at_first
        self.steps = steps
        self.roster = roster
        self.rank = rank
        self.in_rounds = in_rounds
        self.steps_a_round = steps_a_round
        self.first_of_phase: int | None = None
        self.own_data = False
        self.is_unclear: Callable[[], bool] = lambda: self.own_data
        self.is_last: Callable[[], bool] = lambda: False
        self.is_again: Callable[[], bool] = lambda: False
        self.deals: dict[int, DealsOfRounds] = {}
        self.draws: dict[int, Draws] = {}
        self._came: Mapping[int, Mapping[str, Any]] = {}
        self.bridge: LoopBridge | None = None
        self._num_loaders = self._num_questions = 0

    def number_of_question(self) -> int:
        """The number of a new question to the coordinator."""
        self._num_questions += 1
        return self._num_questions

    def report(self) -> None:
        """Waits until the coordinator knows which minibatches the loop's next step uses."""
        for draws in self.draws.values():
            draws.report()

    def number(self) -> int:
        """The number of a new loader, equal on all workers since their scripts make the same loaders."""
        self._num_loaders += 1
        return self._num_loaders - 1

    def add(self, number: int, one: Deals) -> None:
        """Adds what deals out or draws the minibatches of the loader of this number."""
        if number in self._came:
            one.load(self._came[number])

    def fall_out(self) -> None:
        """Notes that the loops have not dealt the same minibatches, so nobody knows who has taken which."""
        self.own_data = True

    @property
    def mark(self) -> int:
        """See `worker.loop.Loop.mark`."""
        places = [deals.mark for _, deals in sorted(self.deals.items())]
        return 2 + crc32(repr(places).encode())

    @property
    def _loaders(self) -> dict[int, Deals]:
        return {**self.deals, **self.draws}

    def saved(self) -> dict[int, dict[str, Any]]:
        """What a newcomer has to know, as JSON, by number of a loader."""
        return {number: one.saved() for number, one in self._loaders.items()}

    def load(self, came: Mapping[int, Mapping[str, Any]]) -> None:
        """Goes on, in a run that had begun, from what `saved` of another worker has returned."""
        self._came = came
        for number, one in self._loaders.items():
            if number in came:
                one.load(came[number])


class StreamEnds:
    """The ends of the epochs of one session's streams.

    Args:
        bridge: returns what reaches the coordinator; None before the loop can make steps.
        made: returns numbers that change with every step that the loop makes, or skips in a resumed run, and with
            every backward.
        present: returns the ranks of the workers that make the rounds, alike on all of them.

    Attributes:
        files_divided: the script has divided names of files.
    """

    def __init__(
        self,
        bridge: Callable[[], LoopBridge | None],
        made: Callable[[], object],
        present: Callable[[], Sequence[int]],
    ) -> None:
        self.bridge = bridge
        self.made = made
        self.present = present
        self.files_divided = False
        self._num_loaders = 0

    def number(self) -> int:
        """The number of a new loader, equal on all workers since their scripts make the same loaders."""
        self._num_loaders += 1
        return self._num_loaders - 1


# ---- common order -----------------------------------------------------------------------
# Random numbers that are equal on all workers while a DataLoader draws its order.
#
# Workers divide the minibatches without exchanging messages, so each must draw the same order, whatever its process
# has drawn before.

global_generators = threading.RLock()
"""Held by who draws from them: several workers may be threads of a process."""


class CommonRandomState:
    """Iterates with the same state of the global generators of torch, `random` and numpy on all workers.

    Between two elements the generators have the process's own state, which is not disturbed.

    Args:
        seed: seed of the states, the same on all workers.

    Attributes:
        epoch: number of the next iteration, from 0. An iteration adds 1 when its first element is taken:
            torch also makes iterators that it never uses.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.epoch = 0

    def iterate(self, begin: Callable[[], Iterator[Any]], at_once: int) -> Iterator[Any]:
        """The elements of the iterator that `begin` returns, drawn `at_once` at a time."""
        states, source = _seeded((self._seed << 20) + self.epoch), None
        self.epoch += 1
        while True:
            with global_generators:
                outside = _swap(states)
                try:
                    source = begin() if source is None else source
                    elements = list(islice(source, at_once))
                finally:
                    states = _swap(outside)
            yield from elements
            if len(elements) < at_once:
                return


_States = tuple[torch.Tensor, Any, Any]


def _seeded(seed: int) -> _States:
    return (
        torch.Generator().manual_seed(seed).get_state(),
        random.Random(seed).getstate(),
        np.random.RandomState(seed % 2**32).get_state(),
    )


def _swap(states: _States) -> _States:
    """Sets the states of the generators, and returns those before."""
    before = (torch.get_rng_state(), random.getstate(), np.random.get_state())  # noqa: NPY002  # the user's samplers use them
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])  # noqa: NPY002
    return before


# ---- a worker's part --------------------------------------------------------------------


class Ahead:
    """Minibatches that a trainer takes some time before it uses them, in the order in which they were taken.

    A trainer that accumulates may take all minibatches of a step at once. Whatever follows from a minibatch (its
    samples count, its place is passed) follows when it is used, so a loop that takes ahead is like a loader whose
    processes draw ahead.

    Attributes:
        is_taking: what is taken now is used later.
        counts: samples of the minibatches that wait; 0 for a repeat, None if unknown.
    """

    def __init__(self) -> None:
        self.is_taking = False
        self.counts: deque[int | None] = deque()
        self._waiting: deque[list[Callable[[], object]]] = deque()

    def begin(self) -> None:
        """The next minibatch is taken."""
        if self.is_taking:
            self._waiting.append([])

    def cancel(self) -> None:
        """There was no further minibatch."""
        if self.is_taking:
            self._waiting.pop()

    def do(self, what: Callable[[], object]) -> None:
        """Does what follows from the minibatch that was taken last: now, or when it is used."""
        if self.is_taking and self._waiting:
            self._waiting[-1].append(what)
        else:
            what()

    def take(self, samples: int | None, note: Callable[[], object]) -> None:
        """The minibatch was taken: `note` is called now, or when it is used."""
        if self.is_taking:
            self.counts.append(samples)
        self.do(note)

    def use(self) -> None:
        """The loop uses the oldest minibatch that it has taken ahead."""
        if self.counts:
            self.counts.popleft()
        for what in self._waiting.popleft() if self._waiting else ():
            what()


_NAMES = (("num_replicas", "rank"), ("num_processes", "process_index"), ("world_size", "rank"))
"""Attributes of most samplers, including torch's; of accelerate's; of those of mmengine and `datasets`."""


@dataclass(frozen=True, slots=True)
class LoaderPart:
    """One worker's part of the data.

    Args:
        rank, world_size: r and W.
        seed: with the epoch, seeds the generators while the order of a DataLoader is drawn.
        split: each minibatch is split among the workers; otherwise whole minibatches are distributed.
        note: called with the number of samples of each minibatch that the worker takes: 0 for a repeat,
            None if unknown.
        aligned: all workers take the same number of minibatches. If the last round has none for a worker, it
            repeats one that counts no samples.
        over: called when the loop goes through an iteration no further: with True at its end, with False if the loop
            has broken it off.
        takeover: asks for the minibatches of lost workers; None if nobody takes them over.
        ask: called when the loop asks for a minibatch, before it is loaded.
        ends: where each worker reads its own part, finds the end of an epoch; None outside a session.
        place: the loop's place in the loader; None if it is not known.
        ahead: minibatches that are taken ahead.
        tell: tells the user something.
    """

    rank: int
    world_size: int
    seed: int
    split: bool
    note: Callable[[int | None], None]
    aligned: bool = False
    over: Callable[[bool], None] = lambda ended: None
    takeover: Takeover | None = None
    ask: Callable[[], None] = lambda: None
    ends: StreamEnds | None = None
    place: LoaderPlace | None = None
    ahead: Ahead = field(default_factory=Ahead)
    tell: Callable[[str], None] = say

    def alone(self) -> LoaderPart:
        """The part of a worker whose data has only its own minibatches: all of them."""
        return replace(self, rank=0, world_size=1, split=False, takeover=None)

    def of(self, samples: Any) -> Any:
        """Every W-th element from the r-th on, of anything that can be sliced."""
        return samples[self.rank :: self.world_size]

    def count(self, total: int) -> int:
        """Number of minibatches that the worker takes out of `total`; an upper bound if each is split."""
        if self.split:
            return total
        workers = self.world_size if self.takeover is None else self.takeover.num_at_first
        return len(range(0 if self.aligned else self.rank % workers, total, workers))

    def taken(
        self,
        batches: Iterable[Any],
        cut: Callable[[Any, slice], Any],
        size: Callable[[Any], int | None],
        first: int = 0,
    ) -> Iterator[tuple[Any, int | None]]:
        """The worker's minibatches out of those of one process: every W-th or, with `split`, a piece of each.

        Each comes with its number of counted samples.

        Args:
            batches: the minibatches of one process.
            cut: returns a slice of the samples of a minibatch.
            size: returns the number of samples of a minibatch, or None if unknown.
            first: number of the first of these minibatches.
        """
        if self.split:
            for batch in batches:
                piece = cut(batch, slice(self.rank, None, self.world_size))
                samples = size(piece)
                if samples is None and isinstance(piece, list | tuple | str):
                    samples = len(piece)
                if samples != 0:
                    yield piece, samples
                elif self.aligned:
                    yield cut(batch, slice(1)), 0
            return
        number, repeat = first - 1, None  # -1: as after a whole round
        for number, batch in enumerate(batches, first):
            own = number % self.world_size == self.rank
            if (
                own or repeat is None
            ):  # a worker without a minibatch repeats the first, since the last may be short
                repeat = batch
            if own:
                yield batch, size(batch)
        if self.aligned and number % self.world_size < self.rank:
            yield repeat, 0

    def asked(self, batches: Iterable[T]) -> Iterator[T]:
        """The same minibatches. Says before each, and before their end, that the loop asks for one."""
        source, place = iter(batches), self.place
        while True:
            self.ahead.begin()
            self.ahead.do(self.ask if place is None else place.asks)
            try:
                batch = next(source)
            except StopIteration:
                self.ahead.cancel()
                if place is not None:
                    place.ended = True
                return
            if place is not None:
                self.ahead.do(place.takes)
            yield batch

    def noted(self, batches: Iterable[Any], first: int = 0) -> Iterator[Any]:
        """The worker's minibatches, already loaded, out of those of one process. Notes their samples."""
        return self.passed(self.taken(batches, cut_of, length_of, first))

    def passed(self, taken: Iterable[tuple[Any, int | None]]) -> Iterator[Any]:
        """The worker's minibatches. Notes their samples, which come with them."""
        ended = False
        try:
            for batch, samples in self.asked(taken):
                self.note(samples)
                yield batch
            ended = True
        finally:
            self.over(ended)


def cut_of(batch: Any, which: slice) -> Any:
    """A slice of the samples of a tree of arrays, or of a list of indices."""
    if isinstance(batch, Mapping):
        return {key: cut_of(value, which) for key, value in batch.items()}
    if isinstance(batch, list | tuple) and length_of(batch) is not None:
        pieces = [cut_of(value, which) for value in batch]
        return type(batch)(*pieces) if hasattr(batch, "_fields") else type(batch)(pieces)
    if isinstance(batch, torch.Tensor | np.ndarray) and not batch.ndim:
        return batch
    return batch[which]


def length_of(values: Any) -> int | None:
    """Length of the first tensor or array in a tree that has a dimension; None if there is none."""
    if isinstance(values, torch.Tensor | np.ndarray):
        return len(values) if values.ndim else None
    if isinstance(values, Mapping):
        values = values.values()
    elif not isinstance(values, list | tuple):
        return None
    return next((found for value in values if (found := length_of(value)) is not None), None)


def is_divided(loader: DataLoader[Any], part: LoaderPart) -> bool:
    """Whether the loader's sampler already divides the data for this worker, as DistributedSampler does.

    Raises:
        ConfigError: the sampler takes another rank's part, or divides among another number of workers.
    """
    for divider in _nested(loader):
        for total, which in _NAMES:
            values = getattr(divider, total, None), getattr(divider, which, None)
            if not all(isinstance(number, int) for number in values):
                continue
            if values == (part.world_size, part.rank):
                return True
            raise ConfigError(
                f"session.shard: the loader's {type(divider).__name__} has {total}={values[0]}, "
                f"{which}={values[1]}; expected {total}={part.world_size}, {which}={part.rank}: "
                + (
                    "every worker would see all samples"
                    if values[0] == 1
                    else "some samples would not be seen"
                )
                + f". Make it with {total}=session.world_size, {which}=session.rank (it does not see a process "
                "group that is made later); or pass a loader without it, and shard divides the data"
            )
    return False


def _nested(loader: DataLoader[Any]) -> Iterator[Any]:
    """All objects that may divide the data: samplers inside samplers, or datasets inside iterable ones."""
    if isinstance(loader.dataset, IterableDataset):
        seen: list[Any] = [loader.dataset]
        names = ("dataset", "_distributed")  # the second: datasets.split_dataset_by_node
    else:
        seen, names = [loader.batch_sampler, loader.sampler], ("batch_sampler", "sampler")
    for candidate in seen:  # grows meanwhile
        yield candidate
        inner = [getattr(candidate, name, None) for name in names]
        seen += [found for found in inner if found is not None and not any(found is other for other in seen)]


def made_of(loader: DataLoader[Any], base: type, state: dict[str, Any]) -> DataLoader[Any]:
    """A loader of the user's own class, with the methods of `base` and the attributes `state`."""
    kind = type(loader)
    own = base if kind is DataLoader else type(kind.__name__, (base, kind), {})
    made: DataLoader[Any] = object.__new__(own)
    vars(made).update(state)
    return made
