"""What workers that share one vector tell each other: words beside it, which outlive any of them."""

from __future__ import annotations

import numpy as np
import torch

from gradstream.collectives.shared_window import SharedWindow
from gradstream.sparse.updates import num_locks

__all__ = ["SharedWords"]

LINE = 8
"""Words of a cache line: each worker writes in its own, or it would go back and forth (false sharing)."""

READY, BEFORE, COUNTS = 0, 1, 2


class SharedWords:
    """How far each worker is, whether there are parameters, and the locks. Words are written one at a time.

    Args:
        words: int64, zeros at first; see `num_words`.
        locks: int32, zeros at first; see `sparse.updates`.
        rank: of this worker.
    """

    def __init__(self, words: torch.Tensor, locks: torch.Tensor, rank: int) -> None:
        self.locks: np.ndarray[tuple[int], np.dtype[np.int32]] = locks.numpy()
        self._words = words.numpy()
        self._own = (COUNTS + rank) * LINE

    @classmethod
    async def of(cls, window: SharedWindow, rank: int, num_workers: int, elems: int) -> SharedWords:
        """The words of a run; all workers ask for it at the same time. Pages of locks come with their use."""
        words = await window.common((COUNTS + num_workers) * LINE, torch.int64, "board")
        locks = await window.common(num_locks(elems, num_workers), torch.int32, "locks")
        return cls(words.tensor, locks.tensor, rank)

    @property
    def ready(self) -> bool:
        """Whether the vector holds parameters, and the data are where all find them."""
        return bool(self._words[READY * LINE])

    def begin(self, version: int) -> None:
        """They are there; `version` minibatches are in the parameters."""
        self._words[BEFORE * LINE] = version
        self._words[READY * LINE] = 1

    def count(self) -> None:
        """One more minibatch of this worker is in the parameters."""
        self._words[self._own] += 1

    @property
    def version(self) -> int:
        """How many minibatches are in the parameters, of all workers, dead ones included."""
        return int(self._words[BEFORE * LINE] + self._words[COUNTS * LINE :: LINE].sum())

    def owner(self, lock: int) -> int:
        """The rank that holds a lock; -1 for none."""
        return int(self.locks[lock]) - 1

    def free(self, lock: int, rank: int) -> bool:
        """Takes a lock from a rank that is dead; whether it had it still."""
        from gradstream.sparse.sweep import free

        return free(self.locks, lock, rank + 1)
