"""Reassigns the rest of lost workers' data to other workers, in runs with a user's training loop.

Each worker has a part of every epoch of a loader and reads it in order, with a fixed number of minibatches for each
step. So the receipts of its steps, and the step with which each epoch began, tell which minibatches of its part are in
the model. The others are reassigned in blocks of one step to workers that have finished their own part. A block is done
when the step of its new worker has a receipt. If that worker is lost before, another one gets the block.

The rest of a worker is unknown if some of its steps lie in no such epoch or have no fixed number of minibatches.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gradstream.data.leases import Receipts

MOST_EPOCHS = 1 << 16
"""Most epochs that a worker may begin besides one for each of its steps, since each takes memory."""

NEVER = 1 << 62
"""The first step of an epoch that was not begun; no worker makes so many steps."""


class Epoch(NamedTuple):
    """An epoch of a loader. All workers number loaders and epochs alike, from 0."""

    loader: int
    number: int


class Block(NamedTuple):
    """The minibatches of one step of a lost worker.

    Args:
        epoch: their epoch.
        rank: rank of the lost worker.
        first: number of the first one in the worker's part.
        size: number of minibatches.
    """

    epoch: Epoch
    rank: int
    first: int
    size: int


@dataclass(slots=True)
class LoopEpochs:
    """The reports of a worker about its loop."""

    begun: dict[Epoch, int] = field(default_factory=dict)  # the first step of each epoch
    taken: dict[Block, int] = field(default_factory=dict)  # the step of this worker that has it
    covered: int = 0  # its steps before this one lie in epochs that it has finished
    gap: bool = False  # some steps lie in no epoch


class Reassignment:
    """Reassigns the minibatches of lost workers. No I/O.

    Args:
        steps: receipts of the steps of each worker that brings data.
    """

    KEPT = ("_loops", "_lost", "_sizes", "_unclear", "_next", "_again", "_num_taken")
    """See `coordinator.durable`."""

    def __init__(self, steps: Sequence[Receipts]) -> None:
        self._steps = steps
        self._loops = [LoopEpochs() for _ in steps]
        self._lost: list[int] = []
        self._sizes: dict[Epoch, tuple[tuple[int, ...], int]] = {}  # minibatches by worker, and per step
        self._unclear: set[Epoch] = set()  # the minibatches of a step are unknown
        self._next: dict[tuple[Epoch, int], int] = {}  # by lost worker: steps from this one on are free
        self._again: defaultdict[tuple[Epoch, int], deque[Block]] = defaultdict(deque)  # free blocks besides
        self._num_taken = 0  # reassigned minibatches in the model, when last counted

    def begun(self, rank: int, epoch: Epoch, step: int, *, unclear: bool = False) -> None:
        """Notes that a worker's loop begins an epoch.

        Args:
            rank: rank of the worker.
            epoch: the epoch.
            step: number of its first step in the epoch.
            unclear: whether the number of minibatches differs from step to step.
        """
        loop = self._loops[rank]
        if epoch not in loop.begun and len(loop.begun) >= MOST_EPOCHS + self._steps[rank].count:
            loop.gap = True
        elif loop.begun.setdefault(epoch, step) != step or unclear:
            self._unclear.add(epoch)

    def lost(self, rank: int) -> None:
        """Notes that a worker is lost. Blocks that it has taken over without a receipt are free again."""
        self._settle(rank)
        for block in self._loops[rank].taken:
            self._again[block.epoch, block.rank].append(block)
        self._loops[rank].taken.clear()
        self._lost.append(rank)

    def take(
        self, rank: int, epoch: Epoch, begin: int, step: int, parts: Sequence[int], per_step: int, oldest: int
    ) -> Block | None:
        """Reassigns a block to a worker that has finished its part of an epoch, or the previous block.

        Args:
            rank: rank of the worker.
            epoch: the epoch that it has finished.
            begin: its first step in that epoch.
            step: its next step, in which it computes the block.
            parts: number of minibatches of each worker's part of the epoch.
            per_step: number of minibatches of each step; 0 if it differs from step to step.
            oldest: the first epoch of the loader from which it can take over a block.

        Returns:
            The block; None if none is free. The same one again for the same step.
        """
        sizes, loop = (tuple(parts), per_step), self._loops[rank]
        unclear = not per_step or self._sizes.get(epoch, sizes) != sizes
        self.begun(rank, epoch, begin, unclear=unclear)
        loop.gap = loop.gap or begin > loop.covered
        loop.covered = max(loop.covered, step)
        if epoch not in loop.begun:
            return None
        self._sizes.setdefault(epoch, sizes)
        self._settle(rank)
        if (asked_again := [block for block, taken in loop.taken.items() if taken == step]) and step >= 0:
            return asked_again[0]  # the answer was lost
        # The minibatches of steps below 0 were in the model when the run was resumed.
        block = None if step < 0 else self._free(epoch, oldest)
        if block is not None:
            loop.taken[block] = step
        return block

    @property
    def num_taken(self) -> int:
        """The number of reassigned minibatches in the model."""
        self._settle(*range(len(self._loops)))
        return self._num_taken

    def missing(self, rank: int) -> int | None:
        """The number of minibatches of a lost worker that are not in the model; None if unknown.

        It counts epochs that other workers have finished.
        """
        self._settle(*range(len(self._loops)))
        if not self._is_known(rank):
            return None
        taken = [block for loop in self._loops for block in loop.taken if block.rank == rank]
        again = [block for (_, of), blocks in self._again.items() if of == rank for block in blocks]
        return sum(block.size for block in taken + again) + sum(
            self._num_free(epoch, rank) for epoch in self._sizes
        )

    def handed_out(self, rank: int, step: int) -> bool:
        """Whether another worker has taken over a step of a lost one."""
        return any(
            self._range(epoch, rank)[0] <= step < after
            for (epoch, of), after in self._next.items()
            if of == rank
        )

    def ended(self, rank: int, steps: int) -> None:
        """Notes that a worker's loop has ended, after so many steps."""
        loop = self._loops[rank]
        loop.gap = loop.gap or steps > loop.covered

    def _is_known(self, rank: int) -> bool:
        """Whether all steps lie in epochs of loaders, and all workers have begun these epochs."""
        if not self._sizes or any(loop.gap for loop in self._loops):
            return False
        if not self._unclear.isdisjoint(self._sizes):
            return False
        living = [other for other in range(len(self._loops)) if other not in self._lost]
        return all(
            epoch in self._loops[other].begun or (epoch in self._sizes and not self._sizes[epoch][0][other])
            for epoch in self._sizes.keys() | self._loops[rank].begun.keys()
            for other in living
        )

    def _settle(self, *ranks: int) -> None:
        """Forgets the blocks of these workers that are in the model."""
        for rank in ranks:
            taken = self._loops[rank].taken
            for block, step in list(taken.items()):
                if self._steps[rank].next_missing(step) != step:
                    del taken[block]
                    self._num_taken += block.size

    def _free(self, epoch: Epoch, oldest: int) -> Block | None:
        """Takes the first free block of these epochs."""
        for number in range(oldest, epoch.number + 1):
            candidate = Epoch(epoch.loader, number)
            if candidate not in self._sizes or candidate in self._unclear:
                continue
            parts, per_step = self._sizes[candidate]
            for rank in self._lost:
                where = candidate, rank
                if self._again[where]:
                    return self._again[where].popleft()
                begin, end = self._range(candidate, rank)
                if candidate in self._unclear:
                    break
                step = self._steps[rank].next_missing(self._next.get(where, begin))
                if step < end:
                    self._next[where] = step + 1
                    first = (step - begin) * per_step
                    return Block(candidate, rank, first, min(per_step, parts[rank] - first))
        return None

    def _num_free(self, epoch: Epoch, rank: int) -> int:
        """The number of a lost worker's minibatches in an epoch that were never reassigned."""
        parts, per_step = self._sizes[epoch]
        begin, end = self._range(epoch, rank)
        steps, begin_free = self._steps[rank], self._next.get((epoch, rank), begin)
        last = steps.num_missing(max(begin_free, end - 1), end)  # the last step may have fewer minibatches
        return steps.num_missing(begin_free, end) * per_step - last * ((end - begin) * per_step - parts[rank])

    def _range(self, epoch: Epoch, rank: int) -> tuple[int, int]:
        """The first step of a worker's part of an epoch, and the step after the last one."""
        parts, per_step = self._sizes[epoch]
        begin = self._begin(epoch, rank)
        return begin, begin - (-parts[rank] // per_step)

    def _begin(self, epoch: Epoch, rank: int) -> int:
        """The first step of a worker in an epoch; `NEVER` if it has made none there.

        A worker may be lost before its report of that has come. Then the epoch began after the one before, if it has
        steps that are in the model. With several loaders they may belong to another one, and the epoch is unclear.
        """
        begun, steps = self._loops[rank].begun, self._steps[rank]
        before = Epoch(epoch.loader, epoch.number - 1)
        if epoch in begun or rank not in self._lost:
            return begun.get(epoch, NEVER)
        if before.number >= 0 and (before not in self._sizes or not self._sizes[before][1]):
            return NEVER
        end = 0 if before.number < 0 else self._range(before, rank)[1]
        if max(steps.ahead, default=steps.low - 1) < end:
            return NEVER
        if any(other.loader != epoch.loader for other in (*begun, *self._sizes)):
            self._unclear.add(epoch)
            return NEVER
        return end
