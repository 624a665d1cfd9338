"""Which samples of which data epochs are in the model already: what a resumed run begins from.

It is told in positions of each epoch's order, so it does not depend on how many workers there
were, or on the sizes of their minibatches: another number of workers goes on at the right sample.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from gradstream.errors import ConfigError
from gradstream.untrusted import check_value

__all__ = ["DataProgress", "Run", "merged"]

MAX_DIGITS = 15

Run = tuple[int, int]
"""Positions [start, stop) of an epoch's order."""


@dataclass(frozen=True, slots=True)
class DataProgress:
    """Samples that are in the model.

    Args:
        epochs: all samples of data epochs 0 … epochs-1 are.
        parts: of later epochs, runs of positions that are: sorted, apart from one another.
    """

    epochs: int = 0
    parts: Mapping[int, Sequence[Run]] = field(default_factory=dict)

    @property
    def horizon(self) -> int:
        """The first data epoch from which on nothing is done."""
        return max([self.epochs, *(epoch + 1 for epoch in self.parts)])

    def runs(self, epoch: int, num_samples: int) -> Sequence[Run]:
        """What is done of an epoch of `num_samples` samples."""
        if epoch < self.epochs:
            return ((0, num_samples),)
        return self.parts.get(epoch, ())

    def count(self, num_samples: int, epoch: int | None = None) -> int:
        """How many samples are done, of all epochs or of one."""
        if epoch is None:
            return self.epochs * num_samples + sum(self.count(num_samples, epoch) for epoch in self.parts)
        return sum(stop - start for start, stop in self.runs(epoch, num_samples))

    def left(self, epoch: int, num_samples: int) -> Sequence[Run]:
        """The rest of it."""
        edges = [0, *(edge for run in self.runs(epoch, num_samples) for edge in run), num_samples]
        gaps = list(pairwise(edges))[::2]
        return tuple((start, stop) for start, stop in gaps if start < stop)

    def as_json(self) -> dict[str, Any]:
        """As JSON holds it; `of_json` reads it."""
        parts = {str(epoch): [list(run) for run in runs] for epoch, runs in self.parts.items()}
        return {"epochs": self.epochs, "parts": parts}

    @classmethod
    def of_json(cls, record: Mapping[str, Any]) -> DataProgress:
        """What `as_json` has made. Raises ConfigError for anything else."""
        try:
            check_value(dict(record), Mapping[str, int | Mapping[str, Sequence[Run]]], "done")
            parts = {_number(epoch): merged(map(_run, runs)) for epoch, runs in record["parts"].items()}
            return cls(_number(record["epochs"]), parts)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"not an account of samples: {error!r}; expected epochs, and parts by epoch"
            ) from error


def _number(value: int | str) -> int:
    number = int(value) if len(str(value)) <= MAX_DIGITS else -1
    if number < 0:
        raise ValueError(f"{str(value)[:40]!r}: expected a number from 0 on")
    return number


def _run(run: Run) -> Run:
    return _number(run[0]), _number(run[1])


def merged(runs: Iterable[Run]) -> tuple[Run, ...]:
    """The same positions as sorted runs that do not touch one another. Empty runs go."""
    out: list[Run] = []
    for start, stop in sorted(runs):
        if start >= stop:
            continue
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(stop, out[-1][1]))
        else:
            out.append((start, stop))
    return tuple(out)
