"""When checkpoints are made, and which of them are kept. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gradstream.checkpoint.manifest import Evaluated
from gradstream.errors import ConfigError

__all__ = ["Every", "KeptCheckpoint", "Policy", "parse_every"]

_SECONDS = {"s": 1.0, "sec": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True, slots=True)
class Every:
    """An interval: so many steps, data epochs, or seconds."""

    amount: float
    unit: Literal["steps", "epochs", "seconds"]


def parse_every(value: int | str | None) -> Every | None:
    """The interval that a user has written: 500, "epoch", "90s", "10min", "2h"; None for never.

    Raises:
        ConfigError: it is none of these.
    """
    if value is None:
        return None
    if value == "epoch":
        return Every(1, "epochs")
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return Every(value, "steps")
    if isinstance(value, str) and (found := re.fullmatch(r"(\d+(?:\.\d+)?) ?([a-z]+)", value)):
        seconds = float(found[1]) * _SECONDS.get(found[2], math.nan)
        if seconds > 0:
            return Every(seconds, "seconds")
    raise ConfigError(
        f"checkpoint_every={value!r}: expected a number of steps of at least 1, 'epoch', a time such as "
        "'90s', '10min' or '2h', or None for no checkpoint before the run is stopped"
    )


@dataclass(frozen=True, slots=True)
class KeptCheckpoint:
    """A checkpoint that is there."""

    folder: str
    step: int
    evaluated: Evaluated | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """When a checkpoint is due, and which are kept.

    Args:
        every: None makes one only when the run is stopped.
        keep_last: how many of the newest are kept, at least 1.
        keep_best: whether the one with the best evaluation is kept besides.
    """

    every: Every | None = None
    keep_last: int = 2
    keep_best: bool = True

    def due(self, *, steps: int, epochs: int, seconds: float) -> bool:
        """Whether one is due, so many steps, data epochs and seconds after the last."""
        if self.every is None or steps <= 0:
            return False
        done = {"steps": steps, "epochs": epochs, "seconds": seconds}[self.every.unit]
        return done >= self.every.amount

    def superfluous(self, there: Sequence[KeptCheckpoint]) -> list[KeptCheckpoint]:
        """Those of `there`, oldest first, that can go. Never the newest."""
        wanted = {one.folder for one in there[-max(1, self.keep_last) :]}
        judged = [one for one in there if one.evaluated is not None]
        if self.keep_best and judged:
            # Several may tell of one evaluation: the oldest is the closest to it.
            best = max(judged, key=lambda one: one.evaluated.rank if one.evaluated else (0.0, 0.0))
            wanted.add(best.folder)
        return [one for one in there if one.folder not in wanted]
