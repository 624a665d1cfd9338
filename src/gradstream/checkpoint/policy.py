"""`Policy`: when checkpoints are made, and which are kept. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gradstream.checkpoint.manifest import Evaluated
from gradstream.errors import ConfigError

FIRST_S = 60.0
"""Seconds after which the first checkpoint is due, if the interval is a longer time."""

_SECONDS = {"s": 1.0, "sec": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True, slots=True)
class Every:
    """An interval between checkpoints, in steps, data epochs or seconds."""

    amount: float
    unit: Literal["steps", "epochs", "seconds"]


def parse_every(value: int | str | None) -> Every | None:
    """Parses an interval: 500, "epoch", "90s", "10min", "2h"; None for none.

    Raises:
        ConfigError: `value` is something else.
    """
    if value is None:
        return None
    if value == "epoch":
        return Every(1, "epochs")
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return Every(value, "steps")
    if isinstance(value, str) and (match := re.fullmatch(r"(\d+(?:\.\d+)?) ?([a-z]+)", value)):
        seconds = float(match[1]) * _SECONDS.get(match[2], math.nan)
        if seconds > 0:
            return Every(seconds, "seconds")
    raise ConfigError(
        f"checkpoint_every={value!r}: expected a number of steps of at least 1, 'epoch', a time such as "
        "'90s', '10min' or '2h', or None for no checkpoint before the run is stopped"
    )


@dataclass(frozen=True, slots=True)
class KeptCheckpoint:
    """A checkpoint in the run directory."""

    folder: str
    step: int
    evaluated: Evaluated | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """When a checkpoint is due, and which are kept.

    An interval of time is not longer than the run had been going on at its last checkpoint, or `FIRST_S`: a run that
    dies young loses at most half of its time.

    Args:
        every: interval between checkpoints; None makes one only when the run is stopped.
        keep_last: number of the newest checkpoints to keep, at least 1.
        keep_best: whether to also keep the checkpoint with the best evaluation.
    """

    every: Every | None = None
    keep_last: int = 2
    keep_best: bool = True

    def due(self, *, steps: int, epochs: int, seconds: float, before_s: float = math.inf) -> bool:
        """Whether a checkpoint is due.

        Args:
            steps, epochs, seconds: since the last checkpoint.
            before_s: how long the run had been going on at that time.
        """
        if self.every is None or steps <= 0:
            return False
        if self.every.unit == "seconds":
            return seconds >= min(self.every.amount, max(FIRST_S, before_s))
        return {"steps": steps, "epochs": epochs}[self.every.unit] >= self.every.amount

    def __str__(self) -> str:
        """When checkpoints are made, in words."""
        if self.every is None:
            return "a checkpoint is made when the run is stopped, and at no other time"
        amount, unit = self.every.amount, self.every.unit
        if unit == "seconds" and amount > FIRST_S:
            return f"the first checkpoint comes after {FIRST_S:g} s, later ones at most {_time(amount)} apart"
        every = _time(amount) if unit == "seconds" else f"{amount:g} {unit}" if amount > 1 else unit[:-1]
        return f"a checkpoint comes every {every}"

    def superfluous(self, there: Sequence[KeptCheckpoint]) -> list[KeptCheckpoint]:
        """Returns the checkpoints of `there` that are not kept. `there` is sorted, oldest first."""
        wanted = {checkpoint.folder for checkpoint in there[-max(1, self.keep_last) :]}
        judged = [checkpoint for checkpoint in there if checkpoint.evaluated is not None]
        if self.keep_best and judged:
            # Several may have the same evaluation; the oldest was made closest to it.
            best = max(
                judged,
                key=lambda checkpoint: checkpoint.evaluated.rank if checkpoint.evaluated else (0.0, 0.0, 0.0),
            )
            wanted.add(best.folder)
        return [checkpoint for checkpoint in there if checkpoint.folder not in wanted]


def _time(seconds: float) -> str:
    """A time in words: "10 min"."""
    units = {"h": 3600.0, "min": 60.0, "s": 1.0}
    name = next((name for name, unit_s in units.items() if seconds >= unit_s), "s")
    return f"{seconds / units[name]:g} {name}"
