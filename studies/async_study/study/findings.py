"""Figures of a scene, as pure functions of its rows."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from study.ledger import TARGET, Row, Rows, Unit, best_rate, equal_s, pace_s, seconds_to, units
from study.methods import BATCH, WORKERS
from study.scenes import TUNING_SEED, Scene

ITERATION = WORKERS * BATCH
"""Samples of an iteration, however many updates are made of them."""
NEAR = 0.02
"""A rate is as good as the best one within so much accuracy."""
BESIDE = ("synchronous", "allreduce", "downpour", "single-momentum")
"""What differences are taken to."""
_T_95 = (math.nan, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Student's t by degrees of freedom: 2.5 % lie beyond it."""


def findings(scene: Scene, rows: Rows) -> dict[str, Any]:
    """By unit: what its best rate gives, what each rate gives, and what an iteration costs.

    A unit some of whose runs are still missing has what can be said without them.
    """
    found = {unit.name: _of_one(unit, rows) for unit in units(scene, rows)}
    for one in found.values():
        one["minus"] = {
            name: interval(one["accuracies"], other["accuracies"])
            for name, other in found.items()
            if other is not one and name in BESIDE
        }
    return {
        "title": scene.title,
        "epochs": scene.epochs,
        "equal_s": equal_s(scene, rows),
        "clock": scene.clock,
        "rates": list(scene.rates),
        "rungs": [list(rung) for rung in scene.rungs],
        "seeds": list(scene.seeds),
        "units": found,
    }


def interval(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float] | None:
    """Mean of the differences, seed by seed, and half of the interval that has it in 95 of 100 cases.

    None where not all seeds of both are there, or they are one.
    """
    if len(ours) != len(theirs) or len(ours) < 2:
        return None
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    half = _T_95[len(ours) - 1] * statistics.stdev(differences) / math.sqrt(len(ours))
    return statistics.fmean(differences), half


def _of_one(unit: Unit, rows: Rows) -> dict[str, Any]:
    scene, best = unit.scene, best_rate(unit, rows)
    share = scene.rungs[0][0]
    tuned = {lr: rows.get(unit.key(lr, TUNING_SEED, share)) for lr in unit.rates}
    by_rate = {f"{lr:g}": row["accuracy"] for lr, row in tuned.items() if row is not None}
    found: dict[str, Any] = {
        "title": unit.method.title,
        "workers": unit.method.workers,
        "epochs": unit.epochs,
        "timed": unit.timed,
        "exponent": unit.method.exponent,
        "by_rate": by_rate,
        "failed": [f"{lr:g}" for lr, row in tuned.items() if row is not None and row["failed"]],
        "rate": best if unit.method.passes is None else None,
        "at_edge": best in (scene.rates[0], scene.rates[-1]),
        "accuracies": [],
    }
    if by_rate:
        found["near"] = sum(one >= max(by_rate.values()) - NEAR for one in by_rate.values()) / len(by_rate)
    if (pace := pace_s(unit, rows)) is not None:
        found["iteration_s"] = pace * ITERATION
    there = [] if best is None else [rows.get(unit.key(best, seed)) for seed in unit.seeds]
    reported = [row for row in there if row is not None]
    if reported and len(reported) == len(there):
        found |= _of_reported(reported)
    return found


def _of_reported(reported: Sequence[Row]) -> dict[str, Any]:
    accuracies = [row["accuracy"] for row in reported]
    times = [seconds for row in reported if (seconds := seconds_to(row, TARGET)) is not None]
    reached = len(times) == len(reported)
    return {
        "accuracies": accuracies,
        "accuracy": statistics.fmean(accuracies),
        "deviation": _deviation(accuracies),
        "train_accuracy": _mean(
            row["curve"][-1][3] if len(row["curve"][-1]) > 3 else None for row in reported
        ),
        "virtual_s": statistics.fmean(row["virtual_s"] for row in reported),
        "reached": len(times),
        "seconds": statistics.fmean(times) if reached else None,
        "seconds_deviation": _deviation(times) if reached else None,
        "staleness_mean": _mean(row["staleness_mean"] for row in reported),
        "staleness_max": max((row["staleness_max"] or 0 for row in reported), default=0),
        "updates": statistics.fmean(row["updates"] for row in reported),
        "moved_bytes": statistics.fmean(row["moved_bytes"] for row in reported),
        "total_bytes": statistics.fmean(row["moved_bytes"] * row.get("steps", 0) for row in reported),
        "curve": _mean_curve(reported),
    }


def _deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def _mean(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _mean_curve(reported: Sequence[Row]) -> list[list[float]]:
    """[samples, seconds, accuracy] over the seeds, point by point; training accuracy too, where watched."""
    whole = [row["curve"] for row in reported if not row["failed"]]
    points: list[Mapping[int, Any]] = [list(point) for point in zip(*whole, strict=False)]  # type: ignore[misc]
    return [
        [round(statistics.fmean(one[axis] for one in point), 4) for axis in range(len(point[0]))]
        for point in points
    ]
