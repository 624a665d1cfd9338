"""The samples of each data epoch that are in the model, from which a resumed run continues.

They are positions in the order of each epoch, which does not depend on the number of workers or on the sizes of their
minibatches. So another number of workers continues at the right sample.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from gradstream.errors import ConfigError
from gradstream.untrusted import check_value

MAX_DIGITS = 15

Run = tuple[int, int]
"""Positions [start, stop) in the order of an epoch."""


@dataclass(frozen=True, slots=True)
class DataProgress:
    """The samples in the model.

    Args:
        epochs: all samples of data epochs 0 … epochs-1 are in the model.
        parts: by later epoch, the runs of positions in the model, sorted and apart from one another.
    """

    epochs: int = 0
    parts: Mapping[int, Sequence[Run]] = field(default_factory=dict)

    @property
    def horizon(self) -> int:
        """The first of the data epochs of which nothing is in the model."""
        return max([self.epochs, *(epoch + 1 for epoch in self.parts)])

    def runs(self, epoch: int, num_samples: int) -> Sequence[Run]:
        """The runs of an epoch of `num_samples` samples that are in the model."""
        if epoch < self.epochs:
            return ((0, num_samples),)
        return self.parts.get(epoch, ())

    def count(self, num_samples: int, epoch: int | None = None) -> int:
        """The number of samples in the model, of all epochs or of one."""
        if epoch is None:
            return self.epochs * num_samples + sum(self.count(num_samples, epoch) for epoch in self.parts)
        return sum(stop - start for start, stop in self.runs(epoch, num_samples))

    def left(self, epoch: int, num_samples: int) -> Sequence[Run]:
        """The runs of an epoch that are not in the model."""
        edges = [0, *(edge for run in self.runs(epoch, num_samples) for edge in run), num_samples]
        gaps = list(pairwise(edges))[::2]
        return tuple((start, stop) for start, stop in gaps if start < stop)

    def as_json(self) -> dict[str, Any]:
        """The value for a JSON document, which `of_json` reads."""
        parts = {str(epoch): [list(run) for run in runs] for epoch, runs in self.parts.items()}
        return {"epochs": self.epochs, "parts": parts}

    @classmethod
    def of_json(cls, record: Mapping[str, Any]) -> DataProgress:
        """The progress from a value that `as_json` has made. Raises ConfigError for another value."""
        try:
            check_value(dict(record), Mapping[str, int | Mapping[str, Sequence[Run]]], "done")
            parts = {_number(epoch): merged(map(_run, runs)) for epoch, runs in record["parts"].items()}
            return cls(_number(record["epochs"]), parts)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"the record of the samples in the model is damaged ({error!r}): resume from another checkpoint"
            ) from error


def _number(value: int | str) -> int:
    number = int(value) if len(str(value)) <= MAX_DIGITS else -1
    if number < 0:
        raise ValueError(f"{str(value)[:40]!r}: expected a number from 0 on")
    return number


def _run(run: Run) -> Run:
    return _number(run[0]), _number(run[1])


def merged(runs: Iterable[Run]) -> tuple[Run, ...]:
    """The same positions as sorted runs that do not touch one another, without empty ones."""
    out: list[Run] = []
    for start, stop in sorted(runs):
        if start >= stop:
            continue
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(stop, out[-1][1]))
        else:
            out.append((start, stop))
    return tuple(out)
