"""Predicates that find an update in a replay."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable

from gradstream.errors import ConfigError
from gradstream.replay.update import ReplayedUpdate

Found = Callable[[ReplayedUpdate], bool]

JUMP = 3.0
"""A loss of so many times the median of the losses before it is a jump."""
RECENT, FIRST = 32, 8
"""A median is of the 32 losses before, and of at least 8."""


def at_update(number: int) -> Found:
    """Finds the update of this number, from 1."""
    return lambda update: update.number == number


def of_step(worker: int, step: int) -> Found:
    """Finds the update with the gradient of a worker's step; ranks and steps count from 0."""
    return lambda update: update.worker == worker and step in update.steps


def at_chunk_version(version: int, chunk: int = 0) -> Found:
    """Finds the update that made this version of a chunk, from 1; the last one if several did.

    Raises:
        ConfigError: there is no such version, or no such chunk. Version 0 is the initial parameters.
    """
    if version < 1 or chunk < 0:
        raise ConfigError(f"version={version}, chunk={chunk}: expected at least 1, and a chunk from 0 on")

    def found(update: ReplayedUpdate) -> bool:
        if chunk >= len(update.applied_at):
            raise ConfigError(f"chunk={chunk}: the model has chunks 0 to {len(update.applied_at) - 1}")
        return update.applied_at[chunk] == version - 1

    return found


def not_finite() -> Found:
    """Finds the first update after which a parameter is not finite, or whose loss is infinite."""
    return lambda update: not update.finite or math.isinf(update.loss)


def loss_jump(times: float = JUMP) -> Found:
    """Finds the first update whose loss is more than `times` the median of the 32 losses before it."""
    recent: deque[float] = deque(maxlen=RECENT)

    def found(update: ReplayedUpdate) -> bool:
        loss = update.loss
        jumps = len(recent) >= FIRST and loss > times * statistics.median(recent)
        if math.isfinite(loss):
            recent.append(loss)
        return jumps

    return found
