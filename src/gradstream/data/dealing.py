"""Deals out the minibatches of users' own loops where workers make no common rounds. Pure.

An epoch of a loader is a pool of places 0, 1, …: its minibatches in the order of one process, which every worker draws.
A worker asks for places when its loop needs minibatches. Worker r of W gets r, r + W, r + 2W, …, so that all make
about as many steps, whatever their speed. It says with which step it uses a place, before it pushes that step. So the
receipts of steps tell which places are in the model.

    lost       what it had without a receipt is free, and what it had not asked for as well: workers that are through
               with their own part of an epoch get it, also in a later epoch
    come       the others give up a part of what they have not asked for
    ended      a loop that breaks an epoch off leaves nothing of it to others; of epochs that it never began, all

A place that nobody gets before all loops end is told as missing.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

MOST_POOLS = 1 << 10
"""Epochs of all loaders that are known; the oldest are over."""

MOST_IN_HAND = 1 << 16
"""Most places that a worker may have: its loader's processes draw some ahead, and a step may have many."""


NOBODY = -1
"""Rank of what no worker ever had."""


class Epoch(NamedTuple):
    """An epoch of a loader. All workers number loaders and epochs alike, from 0."""

    loader: int
    number: int


class LoopBatch(NamedTuple):
    """A minibatch: its index in the order of one process; where each is split, the index of one of the pieces."""

    epoch: Epoch
    number: int


Run = tuple[int, int, int]
"""Places (start, stop, step), as of `range`."""


@dataclass(slots=True)
class Pool:
    """The minibatches of an epoch that no worker has.

    Args:
        total: their number, as the loader's length says.
        parts: by rank, the places for which a worker may still ask.
    """

    total: int
    parts: dict[int, list[Run]]
    is_exact: bool = False  # a worker has come to the end of the epoch
    beyond: int = 0  # how many places beyond `total` were dealt
    left: dict[int, list[Run]] = field(
        default_factory=dict
    )  # by rank of a lost worker, what it had not asked for
    free: deque[tuple[int, int]] = field(
        default_factory=deque
    )  # (place, rank of the lost worker that had it)
    begun: set[int] = field(default_factory=set)  # ranks of the workers that have asked for places

    def join(self, rank: int) -> None:
        """Gives a worker that has come its part: of what lost workers have left first, then some of each other part."""
        open_parts = [runs for runs in self.parts.values() if runs]
        wanted = sum(map(_length, [*open_parts, *self.left.values()])) // (1 + len(open_parts))
        part: list[Run] = []
        for runs in self.left.values():
            part += _cut_off(runs, wanted - _length(part))
        wanted -= _length(part)
        others = sum(map(_length, open_parts))
        for runs in open_parts:
            part += _cut_off(runs, _length(runs) * wanted // others)
        self.parts[rank] = part

    def fresh(self, rank: int) -> int | None:
        """The next place of a worker's own part; None if it has had all."""
        return _first(self.parts.get(rank, []))

    def divide(self, ranks: Sequence[int]) -> None:
        """Divides what no worker ever had, when a resumed run comes to it."""
        runs = self.left.pop(NOBODY, [])
        for number, rank in enumerate(ranks):
            self.parts[rank] = _cut_off(runs, _length(runs) // (len(ranks) - number))

    def further(self) -> tuple[int, int] | None:
        """A place besides, and the lost worker that had it, or `NOBODY`; None if there is none."""
        if self.free:
            return self.free.popleft()
        for rank, runs in self.left.items():
            if (first := _first(runs)) is not None:
                return first, rank
        if self.is_exact or any(self.parts.values()):
            return None
        self.beyond += 1  # the length may be too small: a worker finds out
        return self.total + self.beyond - 1, NOBODY

    def end(self, total: int) -> None:
        """Notes that the epoch has so many places."""
        end = self.total + self.beyond
        if end < total and not self.is_exact:
            self.left.setdefault(NOBODY, []).append((end, total, 1))
        self.is_exact = True
        self.free = deque(one for one in self.free if one[0] < total)
        for runs in (*self.parts.values(), *self.left.values()):
            runs[:] = [(start, min(stop, total), step) for start, stop, step in runs if start < total]


def _length(runs: Iterable[Run]) -> int:
    return sum(len(range(*run)) for run in runs)


def _first(runs: list[Run]) -> int | None:
    """Takes the first place away."""
    if not runs:
        return None
    start, stop, step = runs[0]
    runs[:1] = [(start + step, stop, step)] if start + step < stop else []
    return start


def _cut_off(runs: list[Run], count: int) -> list[Run]:
    """Takes so many places away, the last ones."""
    cut: list[Run] = []
    while runs and count > 0:
        start, stop, step = runs.pop()
        size = len(range(start, stop, step))
        middle = start + max(0, size - count) * step
        cut.append((middle, stop, step))
        count -= min(size, count)
        if middle > start:
            runs.append((start, middle, step))
    return cut


@dataclass(slots=True)
class Lease:
    """A place that a worker has.

    Args:
        had: rank of a lost worker that had it before; None if there was none.
        step: the step of the worker that uses it; None before its loop has taken it.
        samples: number of its samples, once it is taken.
    """

    had: int | None
    step: int | None = None
    samples: int = 0


Leases = dict[LoopBatch, Lease]
Process = tuple[int, int]
"""Rank and incarnation of a worker's process."""


class Dealing:
    """Deals out the places of all epochs to workers.

    Args:
        ranks: the workers of the beginning.
        received: returns whether a step of a worker stays in the model if the worker is lost: it has its receipt.

    Attributes:
        num_taken: places in the model that lost workers had before others.
        samples: by rank, the samples of places in the model that this worker has used.
    """

    KEPT = (
        *("_ranks", "_pools", "_hands", "_doubts", "_unclear", "_users", "_waiting", "_answers"),
        *("num_taken", "samples"),
    )
    """See `coordinator.durable`."""

    def __init__(self, ranks: Iterable[int], received: Callable[[int, int], bool]) -> None:
        self._received = received
        self._ranks = set(ranks)  # that are there, and whose loops have not ended
        self._pools: dict[Epoch, Pool] = {}
        self._hands: defaultdict[int, Leases] = defaultdict(dict)
        self._doubts: dict[
            Process, Leases
        ] = {}  # of lost processes, until others say which of their steps they have
        self._unclear: set[int] = set()  # workers that also use data that is not dealt
        self._users: set[int] = set()  # workers that have used a place
        self._waiting: set[int] = set()
        self._answers: dict[
            tuple[int, int], tuple[int, Sequence[LoopBatch]]
        ] = {}  # the last ones, by worker and loader
        self.num_taken = 0
        self.samples: Counter[int] = Counter()

    @property
    def is_used(self) -> bool:
        """Whether the loops take minibatches from here."""
        return bool(self._pools)

    # ---- what a worker says -------------------------------------------------------------

    def use(self, rank: int, place: LoopBatch, step: int, samples: int) -> None:
        """Notes with which step a worker uses a place that it has."""
        lease = self._hands[rank].get(place)
        if lease is not None:
            lease.step, lease.samples = step, samples
            self._users.add(rank)

    def drop(self, rank: int, place: LoopBatch) -> None:
        """Notes that a worker's loop does not use a place. Others get it only if they were to compute it anyway."""
        lease = self._hands[rank].pop(place, None)
        if lease is not None and lease.had is not None:
            self._free(place, lease.had)

    def end_epoch(self, epoch: Epoch, total: int) -> None:
        """Notes that a worker has come to the end of an epoch, which has so many places."""
        if epoch not in self._pools:
            return
        self._pools[epoch].end(total)
        for leases in self._hands.values():
            for place in [place for place in leases if place.epoch == epoch and place.number >= total]:
                del leases[place]

    def is_unclear(self, rank: int) -> None:
        """Notes that a worker also uses data that is not dealt, or that it does not know with which step."""
        self._unclear.add(rank)

    def deal(
        self, rank: int, asked: tuple[int, int], epoch: Epoch, total: int, oldest: int
    ) -> Sequence[LoopBatch]:
        """Deals places to a worker.

        Args:
            rank: rank of the worker.
            asked: (number of the request, most places). The same request, made again, has the same answer.
            epoch: the epoch that its loop is in.
            total: number of places of this epoch by the loader's length.
            oldest: number of the first epoch of this loader whose order the worker still knows.

        Returns:
            The places; fewer than asked for if no others can be had now.
        """
        self._settle(rank)
        self._waiting.discard(rank)
        number, wanted = asked
        if (earlier := self._answers.get((rank, epoch.loader), (0, ())))[0] == number:
            return earlier[1]
        places: list[LoopBatch] = []
        while len(places) < wanted and len(self._hands[rank]) < MOST_IN_HAND:
            if (found := self._find(rank, epoch, total, oldest)) is None:
                break
            place, had = found
            self._hands[rank][place] = Lease(had)
            places.append(place)
        if places:
            self._answers[rank, epoch.loader] = number, tuple(places)
        return places

    def rest(self, rank: int, epoch: Epoch) -> int:
        """Places of its own part of an epoch for which a worker may still ask."""
        pool = self._pools.get(epoch)
        return 0 if pool is None else _length(pool.parts.get(rank, ()))

    def _find(self, rank: int, epoch: Epoch, total: int, oldest: int) -> tuple[LoopBatch, int | None] | None:
        pool = self._pool(epoch, total)
        if not pool.parts:
            pool.divide(sorted(self._ranks))
        if rank not in pool.parts:
            pool.join(rank)
        pool.begun.add(rank)
        if (index := pool.fresh(rank)) is not None:
            return LoopBatch(epoch, index), None
        for number in range(max(oldest, epoch.number - MOST_POOLS), epoch.number + 1):
            one = Epoch(epoch.loader, number)
            if one in self._pools and (further := self._pools[one].further()) is not None:
                return LoopBatch(one, further[0]), None if further[1] == NOBODY else further[1]
        return None

    def _pool(self, epoch: Epoch, total: int) -> Pool:
        if epoch not in self._pools:
            while len(self._pools) >= MOST_POOLS:
                del self._pools[next(iter(self._pools))]
            ranks = sorted(self._ranks)
            parts = {
                rank: [(first, total, len(ranks))] if first < total else []
                for first, rank in enumerate(ranks)
            }
            self._pools[epoch] = Pool(total, parts)
        return self._pools[epoch]

    def waits(self, rank: int, epoch: Epoch, oldest: int) -> bool:
        """Whether a worker that has got nothing waits, in its last epoch: another one that is lost may leave it more.

        Workers that wait do not wait for one another.
        """
        self._waiting.add(rank)
        for other in self._ranks - self._waiting:
            self._settle(other)
            epochs = {place.epoch for place in self._hands[other]}
            parts = (one for one, pool in self._pools.items() if pool.parts.get(other))
            if any(one.loader == epoch.loader and one.number >= oldest for one in (*epochs, *parts)):
                return True
        return bool(self._doubts)

    # ---- what becomes of a worker -------------------------------------------------------

    def come(self, rank: int) -> None:
        """Notes that a worker has come. It gets its part of each epoch for which it asks."""
        self._forget(rank)
        self._ranks.add(rank)

    def ended(self, rank: int) -> None:
        """Notes that a worker's loop has ended. What it has not used of an epoch that it had begun is broken off."""
        self._settle(rank)
        self._ranks.discard(rank)
        self._waiting.discard(rank)
        for place in [place for place, lease in self._hands[rank].items() if lease.step is None]:
            self.drop(rank, place)
        for pool in self._pools.values():
            runs = pool.parts.pop(rank, [])
            if rank not in pool.begun:  # the others have begun it, and divide it as they do later ones
                pool.left.setdefault(NOBODY, []).extend(runs)

    def lost(self, process: Process) -> None:
        """Notes that a worker is lost. Others get what it had left, but for what the model may have: see `resolve`."""
        rank = process[0]
        self._settle(rank)
        self._ranks.discard(rank)
        self._waiting.discard(rank)
        for pool in self._pools.values():
            if runs := pool.parts.pop(rank, []):
                pool.left.setdefault(rank, []).extend(runs)
        self._doubts[process] = self._hands.pop(rank, {})

    def resolve(self, process: Process, received: Callable[[int], bool]) -> None:
        """Lets others have what the model does not have of a lost process; `received` says which steps it has."""
        rank = process[0]
        for place, lease in sorted(self._doubts.pop(process, {}).items()):
            if not self._is_done(rank, lease, received):
                self._free(place, rank if lease.had is None else lease.had)

    def missing(self, rank: int, steps: int) -> int | None:
        """The number of places of a lost worker, which has made so many steps, that are not in the model.

        Returns:
            None if it is unknown, since the worker has used other data, too.
        """
        if rank in self._unclear or not self._pools or (steps and rank not in self._users):
            return None
        for other in list(self._hands):
            self._settle(other)
        hands = (*self._hands.values(), *self._doubts.values())
        in_hand = sum(lease.had == rank for leases in hands for lease in leases.values())
        pools = self._pools.values()
        free = sum(had == rank for pool in pools for _, had in pool.free)
        left = sum(_length(pool.left.get(rank, ())) for pool in pools)
        return (
            in_hand + free + left + sum(len(one) for (other, _), one in self._doubts.items() if other == rank)
        )

    # ---- in a checkpoint ----------------------------------------------------------------

    def saved(self, made: Callable[[int, int], bool]) -> list[Any]:
        """What is not in the model, as JSON. Call it while no worker makes a step.

        Args:
            made: returns whether the checkpoint has a step of a worker.
        """
        saved = []
        in_hand = [
            place
            for rank, leases in self._hands.items()
            for place, lease in leases.items()
            if lease.step is None or not made(rank, lease.step)
        ]
        in_hand += [place for leases in self._doubts.values() for place in leases]
        for epoch, pool in self._pools.items():
            had = [place.number for place in in_hand if place.epoch == epoch]
            free = [number for number, _ in pool.free]
            runs = [run for part in (*pool.parts.values(), *pool.left.values()) for run in part]
            saved.append([*epoch, pool.total, pool.is_exact, pool.beyond, sorted(had + free), sorted(runs)])
        return saved

    def load(self, saved: Iterable[Any]) -> None:
        """Goes on, in a resumed run, from what `saved` has returned."""
        for loader, number, total, is_exact, beyond, free, runs in saved:
            left = {NOBODY: [(start, stop, step) for start, stop, step in runs]} if runs else {}
            ones = deque((int(one), NOBODY) for one in free)
            self._pools[Epoch(loader, number)] = Pool(total, {}, is_exact, beyond, left, ones)

    def _forget(self, rank: int) -> None:
        """A new process of a rank has its own part, and its own account."""
        for key in [key for key in self._answers if key[0] == rank]:
            del self._answers[key]
        for pool in self._pools.values():
            pool.parts.pop(rank, None)

    def _settle(self, rank: int) -> None:
        """Forgets the places of a worker that are in the model."""
        leases, received = self._hands[rank], partial(self._received, rank)
        for place in [place for place, lease in leases.items() if self._is_done(rank, lease, received)]:
            del leases[place]

    def _is_done(self, rank: int, lease: Lease, received: Callable[[int], bool]) -> bool:
        if lease.step is None or not received(lease.step):
            return False
        self.samples[rank] += lease.samples
        self.num_taken += lease.had is not None
        return True

    def _free(self, place: LoopBatch, had: int) -> None:
        if place.epoch in self._pools:
            self._pools[place.epoch].free.append((place.number, had))
