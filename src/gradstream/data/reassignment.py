"""What lost workers have left of the epochs of users' own loops, and who takes it over.

Each worker has a part of every epoch of a loader, and goes through it in order, with a fixed number of
minibatches behind each step. So the receipts of its steps, and the step with which each epoch began, tell
which minibatches of its part are in the model. The others are handed out in blocks, one step each, to
workers that have come to the end of their own part. A block is done when its taker's step has a receipt; if
that worker is lost before, somebody else gets it.

What cannot be known is said to be unknown: steps that lie in no such epoch, or without a fixed number of
minibatches.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gradstream.data.receipts import Receipts

__all__ = ["Block", "Epoch", "Reassignment"]

MOST_EPOCHS = 1 << 16
"""Epochs that a worker may begin, besides one for each of its steps: each takes memory."""

NEVER = 1 << 62
"""The first step of an epoch that was not begun: no worker gets there."""


class Epoch(NamedTuple):
    """An epoch of a loader. All workers number loaders and epochs alike, from 0."""

    loader: int
    number: int


class Block(NamedTuple):
    """Minibatches behind one step.

    Args:
        epoch: of which they are.
        rank: of whose part.
        first: the first one, counted in that part.
        size: how many.
    """

    epoch: Epoch
    rank: int
    first: int
    size: int


@dataclass(slots=True)
class _Loop:
    """What a worker has said of its loop."""

    begun: dict[Epoch, int] = field(default_factory=dict)  # the first step of each epoch
    taken: dict[Block, int] = field(default_factory=dict)  # by which step it is in the model
    covered: int = 0  # its steps before this one lie in epochs whose end it has come to
    gap: bool = False  # others lie outside


class Reassignment:
    """Hands out what is left of lost workers' parts. No I/O.

    Args:
        steps: of each worker that brings data.
    """

    def __init__(self, steps: Sequence[Receipts]) -> None:
        self._steps = steps
        self._loops = [_Loop() for _ in steps]
        self._lost: list[int] = []
        self._sizes: dict[Epoch, tuple[tuple[int, ...], int]] = {}  # each worker's part; minibatches per step
        self._unclear: set[Epoch] = set()  # nobody can tell which minibatches of these are behind which step
        self._next: dict[tuple[Epoch, int], int] = {}  # of a lost worker: those from this step on are free
        self._again: defaultdict[tuple[Epoch, int], deque[Block]] = defaultdict(deque)  # so are these
        self._num_taken = 0  # minibatches that were taken over and are in the model, as far as looked at

    def begun(self, rank: int, epoch: Epoch, step: int, *, unclear: bool = False) -> None:
        """A worker's loop begins an epoch, with the step of this number.

        Args:
            rank: of the worker.
            epoch: which one.
            step: the number of its first step.
            unclear: not each of its steps has as many minibatches.
        """
        loop = self._loops[rank]
        if epoch not in loop.begun and len(loop.begun) >= MOST_EPOCHS + self._steps[rank].count:
            loop.gap = True
        elif loop.begun.setdefault(epoch, step) != step or unclear:
            self._unclear.add(epoch)

    def lost(self, rank: int) -> None:
        """A worker is gone. What it had taken over without a receipt is free again."""
        self._settle(rank)
        for block in self._loops[rank].taken:
            self._again[block.epoch, block.rank].append(block)
        self._loops[rank].taken.clear()
        self._lost.append(rank)

    def take(
        self, rank: int, epoch: Epoch, begin: int, step: int, parts: Sequence[int], per_step: int, oldest: int
    ) -> Block | None:
        """A worker has come to the end of its part of an epoch, or of a block that it took over.

        Args:
            rank: of the worker.
            epoch: whose end it has come to.
            begin: its first step in that epoch.
            step: its next step, which what it gets is behind.
            parts: how many minibatches of the epoch are each worker's.
            per_step: minibatches behind each of its steps; 0 where that differs.
            oldest: the first epoch of the loader of which it can take something over.

        Returns:
            What it takes over; None where there is nothing.
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
        # Steps below 0 are passed by: what is behind them was in the model when the run was resumed.
        block = None if step < 0 else self._free(epoch, oldest)
        if block is not None:
            loop.taken[block] = step
        return block

    @property
    def num_taken(self) -> int:
        """Minibatches that were taken over and are in the model."""
        self._settle(*range(len(self._loops)))
        return self._num_taken

    def missing(self, rank: int) -> int | None:
        """How many minibatches of a lost worker's part are not in the model, as far as others have got.

        None where that is unknown.
        """
        self._settle(*range(len(self._loops)))
        if not self._is_known(rank):
            return None
        taken = [block for loop in self._loops for block in loop.taken if block.rank == rank]
        again = [block for (_, of), blocks in self._again.items() if of == rank for block in blocks]
        return sum(block.size for block in taken + again) + sum(
            self._num_free(epoch, rank) for epoch in self._sizes
        )

    def ended(self, rank: int, steps: int) -> None:
        """A worker's loop has ended after so many steps."""
        loop = self._loops[rank]
        loop.gap = loop.gap or steps > loop.covered

    def _is_known(self, rank: int) -> bool:
        """Whether all steps lie in epochs of loaders, through which all others have gone, too."""
        if not self._sizes or any(loop.gap for loop in self._loops):
            return False
        if not self._unclear.isdisjoint(self._sizes):
            return False
        living = [one for one in range(len(self._loops)) if one not in self._lost]
        return all(
            epoch in self._loops[one].begun or (epoch in self._sizes and not self._sizes[epoch][0][one])
            for epoch in self._sizes.keys() | self._loops[rank].begun.keys()
            for one in living
        )

    def _settle(self, *ranks: int) -> None:
        """Forgets what these workers have taken over, as far as it is in the model."""
        for rank in ranks:
            taken = self._loops[rank].taken
            for block, step in list(taken.items()):
                if self._steps[rank].next_missing(step) != step:
                    del taken[block]
                    self._num_taken += block.size

    def _free(self, epoch: Epoch, oldest: int) -> Block | None:
        """The first free block of these epochs. It is not free any more."""
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
                step = self._steps[rank].next_missing(self._next.get(where, begin))
                if step < end:
                    self._next[where] = step + 1
                    first = (step - begin) * per_step
                    return Block(candidate, rank, first, min(per_step, parts[rank] - first))
        return None

    def _num_free(self, epoch: Epoch, rank: int) -> int:
        """Minibatches of a lost worker's part of an epoch that nobody has ever taken over."""
        parts, per_step = self._sizes[epoch]
        begin, end = self._range(epoch, rank)
        steps, begin_free = self._steps[rank], self._next.get((epoch, rank), begin)
        last = steps.num_missing(max(begin_free, end - 1), end)  # has fewer minibatches, it may be
        return steps.num_missing(begin_free, end) * per_step - last * ((end - begin) * per_step - parts[rank])

    def _range(self, epoch: Epoch, rank: int) -> tuple[int, int]:
        """A worker's steps of its part of an epoch: the first one, and the one after the last."""
        parts, per_step = self._sizes[epoch]
        begin = self._loops[rank].begun.get(epoch, NEVER)
        return begin, begin - (-parts[rank] // per_step)
