"""Names of the update schemes, and the places of locks in shared memory. Imports nothing heavy."""

from __future__ import annotations

import importlib.util
from typing import Any, NamedTuple

from gradstream.errors import ConfigError

# ---- updates -----------------------------------------------------------------------------

UPDATES = ("atomic", "plain", "lock", "short_lock", "component_locks", "round_robin")

WHOLE = 0
"""Number of the lock of the whole vector."""

TURN, RANKS = 1, 2
"""Words beside it: the rank that has the turn, and the number of ranks among which the turn goes round."""

FIRST = 16
"""Number of the lock of component 0: one cache line behind the lock of the whole, which all workers write."""

LOOKS = 1 << 16
"""Looks at a lock before a worker asks whether the lock's holder is alive; they take some milliseconds."""


class LockAccess(NamedTuple):
    """A worker's access to the locks.

    Args:
        locks: int32 words of all locks, in shared memory.
        me: np.int32, rank of the worker + 1, which it writes into a lock that it holds.
        looks: number of looks at a lock that is not free, before the worker gives up.
    """

    locks: Any
    me: Any
    looks: int


def num_locks(elems: int, workers: int) -> int:
    """Number of 4-byte words of all locks: one for each component and each worker, and those of the whole."""
    return FIRST + elems + workers


def check_compiler(what: str) -> None:
    """Raises ConfigError if numba, which compiles `what`, is not installed."""
    if importlib.util.find_spec("numba") is None:
        raise ConfigError(
            f"{what} is compiled by numba, which is not installed: pip install 'gradstream[fast]'"
        )
