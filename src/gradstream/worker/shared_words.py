"""Words in shared memory by which workers that share one vector tell each other their progress."""

from __future__ import annotations

import numpy as np
import torch

from gradstream.collectives.shared_window import SharedWindow
from gradstream.sparse.updates import num_locks

LINE = 8
"""Words of a cache line. Each worker writes in a line of its own, which avoids false sharing."""

READY, BEFORE, COUNTS = 0, 1, 2


class SharedWords:
    """Shared memory in which workers see whether training has begun, each other's progress, and the locks.

    A word is read or written as a whole, so reading needs no lock.

    Args:
        words: (2 + W)·8 int64, zeros at first: a cache line for each fact.
        locks: int32, zeros at first; see `sparse.updates`.
        rank: rank of this worker.
    """

    def __init__(self, words: torch.Tensor, locks: torch.Tensor, rank: int) -> None:
        self.locks: np.ndarray[tuple[int], np.dtype[np.int32]] = locks.numpy()
        self._words = words.numpy()
        self._own = (COUNTS + rank) * LINE

    @classmethod
    async def of(cls, window: SharedWindow, rank: int, num_workers: int, elems: int) -> SharedWords:
        """The words of a run, in memory that all workers share. All workers call this together."""
        words = await window.common((COUNTS + num_workers) * LINE, torch.int64, "board")
        locks = await window.common(num_locks(elems, num_workers), torch.int32, "locks")
        return cls(words.tensor, locks.tensor, rank)

    @property
    def ready(self) -> bool:
        """Whether the first parameters and the data are in shared memory, so that training may begin."""
        return bool(self._words[READY * LINE])

    def begin(self, version: int) -> None:
        """Lets all workers begin. `version` minibatches are in the first parameters: above 0 in a resumed run."""
        self._words[BEFORE * LINE] = version
        self._words[READY * LINE] = 1

    def count(self) -> None:
        """Notes that one more minibatch of this worker is in the parameters."""
        self._words[self._own] += 1

    @property
    def version(self) -> int:
        """Number of minibatches of all workers in the parameters, lost workers included."""
        return int(self._words[BEFORE * LINE] + self._words[COUNTS * LINE :: LINE].sum())

    def owner(self, lock: int) -> int:
        """Rank of the worker that holds a lock; -1 for none."""
        return int(self.locks[lock]) - 1

    def free(self, lock: int, rank: int) -> bool:
        """Frees a lock of a dead worker; returns whether that worker still held it."""
        from gradstream.sparse.sweep import free

        return free(self.locks, lock, rank + 1)
