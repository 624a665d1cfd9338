"""What one update of a component is called, and where in shared memory its locks are. Nothing heavy."""

from __future__ import annotations

import importlib.util

from gradstream.errors import ConfigError

__all__ = ["FIRST", "LOOKS", "RANKS", "TURN", "UPDATES", "WHOLE", "check_compiler", "num_locks"]

UPDATES = ("atomic", "plain", "lock", "short_lock", "component_locks", "round_robin")

WHOLE = 0
"""Number of the lock of the whole vector."""

TURN, RANKS = 1, 2
"""Words beside it: the rank whose turn it is, and among how many ranks the turn goes round."""

FIRST = 16
"""Number of the lock of component 0: a cache line behind that of the whole, which all workers write."""

LOOKS = 1 << 16
"""At a lock, before a worker asks whether the one that holds it still lives: some milliseconds."""


def num_locks(elems: int, workers: int) -> int:
    """Words of 4 bytes that the locks take: one of each component and of each worker, and none shared."""
    return FIRST + elems + workers


def check_compiler(what: str) -> None:
    """Raises ConfigError where there is no numba, which makes machine code of `what`."""
    if importlib.util.find_spec("numba") is None:
        raise ConfigError(
            f"{what} is compiled by numba, which is not installed: pip install 'gradstream[fast]'"
        )
