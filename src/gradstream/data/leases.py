"""Leases of minibatches: which worker has which minibatch, and which it gets next.

A plan has one sequence of minibatches for all workers, or one for each. A worker gets the next minibatches of its own
sequence, unless another sequence is an epoch behind: a worker that has finished its part of an epoch helps the others
to finish theirs. Minibatches that a lost worker had without a receipt are assigned again.

The minibatches of a sequence have numbers k over all epochs (`BatchPlan.nth`).
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from gradstream.data.base import BatchPlan, BatchRef

# ---- receipts ----------------------------------------------------------------------------
# The receipts of one batch sequence, and the minibatches of it that can still be assigned.
#
# A sequence numbers its minibatches from 0 over all epochs. It keeps a low-water mark, below which every number has
# its receipt, and the few receipts above it. So its memory depends on the disorder of receipts, not on the length of
# the run.

Piece = tuple[int, int]
"""(k, count): `count` consecutive numbers of a sequence, from k on."""


@dataclass(slots=True)
class Receipts:
    """The numbers that have a receipt. Numbers below 0 always have one: they precede a resume."""

    low: int = 0  # every number below has a receipt
    ahead: set[int] = field(default_factory=set)  # receipts at or above `low`

    @property
    def count(self) -> int:
        """The number of receipts for numbers from 0 on."""
        return self.low + len(self.ahead)

    def received(self, k: int) -> bool:
        """Whether number k has a receipt."""
        return k < self.low or k in self.ahead

    def add(self, k: int) -> bool:
        """Records a receipt. Returns False if it was there already."""
        if self.received(k):
            return False
        self.ahead.add(k)
        while self.low in self.ahead:
            self.ahead.remove(self.low)
            self.low += 1
        return True

    def next_missing(self, k: int) -> int:
        """The first number from k on without a receipt."""
        k = max(k, self.low)
        while k in self.ahead:
            k += 1
        return k

    def num_missing(self, begin: int, end: int) -> int:
        """The number of numbers in [begin, end) without a receipt."""
        begin = max(begin, self.low)
        return max(0, end - begin) - sum(begin <= k < end for k in self.ahead)


@dataclass(slots=True, kw_only=True)
class AssignableBatches(Receipts):
    """A batch sequence 0 … total-1 whose minibatches are assigned to workers."""

    total: int
    fresh: int = 0  # numbers from here on were never assigned
    returned: list[Piece] = field(default_factory=list)  # heap: assigned and taken back without a receipt

    def first(self) -> int | None:
        """Number of the first minibatch to assign: no worker has it, and it has no receipt. None if there is none."""
        while self.returned and self.received(self.returned[0][0]):
            k, count = heapq.heappop(self.returned)
            if count > 1:
                heapq.heappush(self.returned, (k + 1, count - 1))
        if self.returned:
            return self.returned[0][0]
        self.fresh = self.next_missing(self.fresh)
        return self.fresh if self.fresh < self.total else None

    def take(self, most: int, stop: int) -> Piece:
        """Assigns up to `most` consecutive numbers from the first one on, all below `stop`."""
        if not self.returned:
            piece = self.fresh, min(most, stop - self.fresh)
            self.fresh += piece[1]
            return piece
        k, count = heapq.heappop(self.returned)
        if count > most:
            heapq.heappush(self.returned, (k + most, count - most))
        return k, min(most, count)

    def give_back(self, piece: Piece) -> None:
        """Takes minibatches back from a worker that will not compute them."""
        heapq.heappush(self.returned, piece)

    def num_free(self, stop: int | None = None) -> int:
        """How many minibatches below `stop` no worker has; a few too many if some given back have receipts by now."""
        fresh = max(0, (self.total if stop is None else min(stop, self.total)) - self.fresh)
        return fresh + sum(count for k, count in self.returned if stop is None or k < stop)


# ---- leases ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Unassigned:
    """The minibatches that can be assigned to a worker, or units if sizes differ.

    Args:
        epoch: number of minibatches of the oldest epoch that has some.
        run: number of minibatches up to the end of the run.
    """

    epoch: int
    run: int


@dataclass(frozen=True, slots=True)
class Copy:
    """A minibatch that a second worker may compute.

    Args:
        holder: rank of the worker that has it.
        sequence, k, count: the minibatch.
        after: minibatches without a receipt that the holder got later than this one.
    """

    holder: int
    sequence: int
    k: int
    count: int
    after: int


class Leases:
    """Assigns the minibatches of a ledger to workers, without I/O.

    Args:
        plan: the division of the data.
        sequences: the minibatches by partition, with the receipts that the ledger adds.
        helping: whether a worker that has finished its own sequence of an epoch gets minibatches of all others.
            Otherwise it gets those of lost workers, and of those that wait, only.
        in_passes: whether no minibatch is assigned before all of the epoch before have their receipts. A worker that
            would have nothing to do may then get one that another worker has (the backup tasks of Dean et al. 2012).

    Attributes:
        helping: as given; True where there is one sequence for all workers.
        in_passes: as given.
    """

    KEPT = ("_leased", "_again", "_refused", "_lost")
    """See `coordinator.durable`."""

    CACHES = ("_changes",)
    """For values that others derive from its state, and derive anew after a restart."""

    def __init__(
        self, plan: BatchPlan, sequences: Sequence[AssignableBatches], *, helping: bool, in_passes: bool
    ) -> None:
        self.helping = helping or plan.num_partitions == 1
        self._plan = plan
        self._sequences = sequences
        self.in_passes = in_passes
        self._leased: defaultdict[int, dict[tuple[int, int], int]] = defaultdict(dict)
        """By worker, its assigned minibatches: (sequence, k) -> count."""
        self._again: set[tuple[int, int]] = set()  # those of them that another worker had before
        self._refused: set[tuple[int, int]] = set()  # minibatches whose gradient was refused
        self._lost: set[int] = set()
        self._changes = 0  # see `version`

    # ---- what a worker can get, and gets ------------------------------------------------

    def unassigned(self, taker: int) -> Unassigned:
        """The minibatches that can be assigned to a worker now; none for a lost worker."""
        number = None if taker in self._lost else self._next_sequence(taker)
        if number is None:
            return Unassigned(0, 0)
        k = self._sequences[number].first()
        assert k is not None
        behind = self._plan.nth(number, k).epoch + 1
        open_numbers = [other for other in range(len(self._sequences)) if self._is_open(other, taker)]
        stops = {other: self._plan.batches_before(other, behind) for other in open_numbers}
        epoch = sum(self._sequences[other].num_free(stop) for other, stop in stops.items())
        if self.in_passes:
            return Unassigned(epoch, epoch)
        return Unassigned(epoch, sum(self._sequences[other].num_free() for other in open_numbers))

    def hand_out(self, taker: int, limit: int, size: int = 1) -> tuple[BatchRef, ...]:
        """Assigns up to `limit` minibatches to a worker, those of the oldest epoch first.

        Args:
            taker: rank of the worker.
            limit: most minibatches. A lost worker gets none.
            size: units of each; fewer at the end of an epoch, and for minibatches that another worker had.
        """
        handed: list[BatchRef] = []
        while len(handed) < limit and taker not in self._lost:
            number = self._next_sequence(taker)
            if number is None:
                break
            sequence = self._sequences[number]
            first, again = sequence.first(), bool(sequence.returned)
            assert first is not None
            k, count = sequence.take(size, self._stop(number, first))
            handed.append(self._assign(taker, number, k, count, again=again))
        return tuple(handed)

    def _next_sequence(self, taker: int) -> int | None:
        """The sequence of a worker's next minibatch: one with the oldest epoch, its own before others.

        A sequence that only its own worker reads fast is left to that worker, until it is lost or no other is left.
        """
        if len(self._sequences) == 1:
            k = self._sequences[0].first()
            return None if k is None or (self.in_passes and self._is_ahead(k)) else 0
        best: tuple[tuple[float, int, int], int] | None = None
        for number, sequence in enumerate(self._sequences):
            k = sequence.first()
            if k is None or not self._is_open(number, taker):
                continue
            epoch: float = self._plan.nth(number, k).epoch
            if not (self._plan.seekable or number == taker or number in self._lost):
                epoch = math.inf  # after everything else
            rank = epoch, int(number != taker), -sequence.num_free()
            if best is None or rank < best[0]:
                best = rank, number
        return None if best is None else best[1]

    def _is_open(self, number: int, taker: int) -> bool:
        """Whether a worker may get minibatches of a sequence."""
        return self.helping or number == taker or number in self._lost

    def _is_ahead(self, k: int) -> bool:
        """Whether a minibatch of the one sequence belongs to an epoch before which receipts are missing."""
        return self._sequences[0].low < self._plan.batches_before(0, self._plan.nth(0, k).epoch)

    def _stop(self, number: int, k: int) -> int:
        """The first number after the epoch of a sequence's k-th minibatch."""
        end = self._plan.batches_before(number, self._plan.nth(number, k).epoch + 1)
        return min(self._sequences[number].total, end)

    @property
    def version(self) -> tuple[int, int]:
        """Differs whenever a minibatch has changed hands or got its receipt."""
        return self._changes, sum(sequence.count for sequence in self._sequences)

    def copies(self) -> list[Copy]:
        """The minibatches without a receipt that one worker alone has; none unless in passes."""
        if not self.in_passes:
            return []
        holders: defaultdict[tuple[int, int], list[Copy]] = defaultdict(list)
        for worker, leased in self._leased.items():
            left = [place for place in leased if not self._sequences[place[0]].received(place[1])]
            for number, place in enumerate(left, 1):
                holders[place].append(Copy(worker, *place, leased[place], len(left) - number))
        return [copy for copy, *others in holders.values() if not others]

    def takes(self, rank: int) -> bool:
        """Whether a worker may get minibatches at all: it is not lost."""
        return rank not in self._lost

    def hand_out_copy(self, taker: int, copy: Copy) -> BatchRef:
        """Assigns one of `copies` to a worker, too."""
        return self._assign(taker, copy.sequence, copy.k, copy.count, again=True)

    def _assign(self, taker: int, number: int, k: int, count: int, *, again: bool) -> BatchRef:
        self._leased[taker][number, k] = count
        self._changes += 1
        if again:
            self._again.add((number, k))
        return self._ref(number, k, count)

    def _ref(self, number: int, k: int, count: int) -> BatchRef:
        return replace(self._plan.nth(number, k), count=count)

    # ---- what becomes of a minibatch ----------------------------------------------------

    def in_hand(self, worker: int) -> int:
        """The number of minibatches that a worker has without a receipt."""
        return sum(not self._sequences[number].received(k) for number, k in self._leased[worker])

    def put_down(self, worker: int, number: int, k: int) -> None:
        """Notes that a worker is done with a minibatch, whether or not it had it."""
        self._leased[worker].pop((number, k), None)
        self._changes += 1

    def refuse(self, number: int, k: int) -> None:
        """Notes that the gradient of a minibatch was refused, until others get the minibatch."""
        self._refused.add((number, k))

    def forget_refusal(self, number: int, k: int) -> bool:
        """Forgets that the gradient of a minibatch was refused. Returns whether it was."""
        refused = (number, k) in self._refused
        self._refused.discard((number, k))
        return refused

    def forget_again(self, number: int, k: int) -> bool:
        """Forgets that a minibatch was assigned to another worker before. Returns whether it was."""
        again = (number, k) in self._again
        self._again.discard((number, k))
        return again

    def give_back(self, ref: BatchRef) -> None:
        """Lets others have a minibatch that nobody has, and that is in no chunk."""
        k = self._plan.batches_before(ref.partition, ref.epoch) + ref.batch
        self._free(ref.partition, k, ref.count)

    def _free(self, number: int, k: int, count: int) -> None:
        self._again.discard((number, k))
        self._refused.discard((number, k))
        self._sequences[number].give_back((k, count))

    # ---- what becomes of a worker -------------------------------------------------------

    def lost(self, rank: int) -> int:
        """Takes back the minibatches of a lost worker, for others. A second call changes nothing.

        Returns:
            The number of minibatches that the worker had.
        """
        self._lost.add(rank)
        return self._take_back(rank)

    def fence(self, rank: int) -> tuple[BatchRef, ...]:
        """Marks a worker as lost. Returns its minibatches without a receipt, which nobody has from now on.

        Each of them may be in the model: `Ledger.receipt` or `give_back` says so once that is known.
        """
        self._lost.add(rank)
        self._changes += 1
        leased = self._leased.pop(rank, {})
        return tuple(self._ref(number, k, count) for (number, k), count in leased.items())

    def rejoined(self, rank: int) -> None:
        """Lets a lost worker take part again, as a new process that has no minibatches yet."""
        self._lost.discard(rank)

    def _take_back(self, rank: int) -> int:
        self._changes += 1
        leased = self._leased.pop(rank, {})
        for (number, k), count in leased.items():
            self._free(number, k, count)
        return len(leased)
