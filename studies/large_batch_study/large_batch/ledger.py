"""Runs as lines of a file, so that a study can be stopped and goes on; and how much is run in all."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple


class Key(NamedTuple):
    """Which run.

    Args:
        part: part of the study.
        model: what is trained.
        case: method, or what else the part compares.
        batch: samples of an update.
        lr: rate; a part says at which batch size.
        seed: of the weights and of the order of samples.
    """

    part: str
    model: str
    case: str
    batch: int
    lr: float
    seed: int


Row = dict[str, Any]
Rows = dict[Key, Row]


@dataclass(frozen=True)
class Scale:
    """How much is run.

    Args:
        models: names in `minima.MODELS`.
        samples: training images, at most 5,000.
        epochs: of a run, a multiple of 3.
        batches: batch sizes of minima; the first is the small one, the last the large one. 512 is 10 % of all images.
        counts: batch sizes whose steps to a loss are counted; they divide the samples, so that no step is smaller.
        tuning, seeds: seeds that choose rates, seeds that are reported.
        target: mean loss over all training images, up to which steps are counted.
        enough: accuracy on training images with which a run that counts ends: so high that the target lies before.
        exits: most updates out of a saddle.
    """

    models: tuple[str, ...] = ("dense", "cnn")
    samples: int = 5000
    epochs: int = 15
    batches: tuple[int, ...] = (128, 256, 512, 1024, 2048)
    counts: tuple[int, ...] = (20, 50, 100, 200, 500, 1000, 2500)
    tuning: tuple[int, ...] = (101, 102)
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    target: float = 0.6
    enough: float = 0.8
    exits: int = 500

    @property
    def small(self) -> int:
        """The small batch, at which rates are given."""
        return self.batches[0]

    @property
    def large(self) -> int:
        """The large batch."""
        return self.batches[-1]


def read_rows(path: Path) -> Rows:
    """The rows of a file; a line that was being written when the study was stopped is left out, and cut off."""
    if not path.exists():
        return {}
    whole = path.read_bytes()
    if not whole.endswith(b"\n"):
        path.write_bytes(whole[: whole.rfind(b"\n") + 1])
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {Key(*(row[field] for field in Key._fields)): row for row in rows}


def best_rate(
    rows: Rows, keys: Iterable[Key], figure: str, *, largest: bool, rates: Sequence[float]
) -> float | None:
    """The rate whose runs have the best mean of a figure; None while a run is missing, or if all have failed.

    Args:
        rows: finished runs.
        keys: all runs of the choice.
        figure: name of a row's field. A rate one of whose runs has None there is not chosen.
        largest: whether the largest mean is the best one.
        rates: of the keys.
    """
    by_rate: dict[float, list[float | None]] = {rate: [] for rate in rates}
    for key in keys:
        if key not in rows:
            return None
        by_rate[key.lr].append(rows[key][figure])
    means = {rate: statistics.fmean(found) for rate, found in by_rate.items() if None not in found}
    return (max if largest else min)(means, key=means.__getitem__) if means else None


def mean_sd(values: Iterable[float], digits: int = 3) -> list[float]:
    """Mean and standard deviation over seeds."""
    found = list(values)
    sd = statistics.stdev(found) if len(found) > 1 else 0.0
    return [round(statistics.fmean(found), digits), round(sd, digits)]
