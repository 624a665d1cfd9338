"""Figures of a study, as pure functions of its rows."""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

from study.ledger import Budget, Row, Rows, best_rate
from study.methods import BATCH, WORKERS, Method
from study.runs import CHANCE, Key

__all__ = ["ITERATION", "NEAR", "TARGET", "at_time", "findings", "samples_to"]

ITERATION = WORKERS * BATCH
"""Samples of an iteration, however many updates are made of them."""
TARGET = 0.82
"""Test accuracy that "iterations needed" counts to."""
NEAR = 0.02
"""A rate is as good as the best one within so much accuracy."""
CLOCK = "downpour"
"""Whose end is the equal virtual time."""


def at_time(row: Row, seconds: float) -> float:
    """Accuracy after so many virtual seconds: of the evaluations before and after, in proportion."""
    if row["failed"]:
        return CHANCE
    times = [0.0, *(point[1] for point in row["curve"])]
    accuracies = [CHANCE, *(point[2] for point in row["curve"])]
    return _between(times, accuracies, seconds)


def samples_to(row: Row, accuracy: float) -> float | None:
    """Samples gone through when this accuracy was first reached; None where it never was."""
    before = (0.0, CHANCE)
    for samples, _, reached in row["curve"]:
        if reached >= accuracy:
            share = (accuracy - before[1]) / (reached - before[1])
            return float(before[0] + share * (samples - before[0]))
        before = (samples, reached)
    return None


def findings(methods: Sequence[Method], rows: Rows, budget: Budget) -> dict[str, Any]:
    """By method: what its best rate gives, what each rate gives, and what an iteration costs.

    A method some of whose runs are still missing has what can be said without them.
    """
    clock = _reported(rows, CLOCK, budget)
    equal_s = statistics.fmean(row["virtual_s"] for row in clock) if clock else None
    return {
        "equal_s": equal_s,
        "target": TARGET,
        "methods": {method.name: _of_one(method, rows, budget, equal_s) for method in methods},
    }


def _of_one(method: Method, rows: Rows, budget: Budget, equal_s: float | None) -> dict[str, Any]:
    tuned = {lr: rows.get(Key(method.name, lr, budget.tuning_seed, budget.epochs)) for lr in budget.rates}
    by_rate = {f"{lr:g}": row["accuracy"] for lr, row in tuned.items() if row is not None}
    best, reported = best_rate(rows, method.name, budget), _reported(rows, method.name, budget)
    found: dict[str, Any] = {
        "title": method.title,
        "strategy": method.strategy,
        "options": dict(method.options),
        "exponent": method.exponent,
        "by_rate": by_rate,
        "failed": [f"{lr:g}" for lr, row in tuned.items() if row is not None and row["failed"]],
        "rate": best,
        "seeds": len(reported),
    }
    if best is not None:
        top = max(by_rate.values())
        found["near"] = sum(accuracy >= top - NEAR for accuracy in by_rate.values()) / len(by_rate)
    if reported:
        found |= _of_reported(reported, equal_s)
    return found


def _of_reported(reported: Sequence[Row], equal_s: float | None) -> dict[str, Any]:
    accuracies = [row["accuracy"] for row in reported]
    iteration_s = statistics.fmean(row["virtual_s"] * ITERATION / row["curve"][-1][0] for row in reported)
    needed = [samples_to(row, TARGET) for row in reported]
    reached = [samples / ITERATION for samples in needed if samples is not None]
    iterations = statistics.fmean(reached) if len(reached) == len(reported) else None
    return {
        "accuracy": statistics.fmean(accuracies),
        "deviation": statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0,
        "accuracies": accuracies,
        "at_equal_s": None if equal_s is None else statistics.fmean(at_time(r, equal_s) for r in reported),
        "virtual_s": statistics.fmean(row["virtual_s"] for row in reported),
        "iteration_s": iteration_s,
        "iterations": iterations,
        "seconds": None if iterations is None else iterations * iteration_s,
        "staleness_mean": _mean(row["staleness_mean"] for row in reported),
        "staleness_max": max((row["staleness_max"] or 0 for row in reported), default=0),
        "updates": statistics.fmean(row["updates"] for row in reported),
        "moved_bytes": statistics.fmean(row["moved_bytes"] for row in reported),
        "curve": _mean_curve(reported),
    }


def _reported(rows: Rows, method: str, budget: Budget) -> list[Row]:
    best = best_rate(rows, method, budget)
    if best is None:
        return []
    found = [rows.get(Key(method, best, seed, budget.epochs)) for seed in budget.seeds]
    return [row for row in found if row is not None]


def _mean(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _mean_curve(reported: Sequence[Row]) -> list[list[float]]:
    """[samples, seconds, accuracy] over the seeds, point by point."""
    whole = [row["curve"] for row in reported if not row["failed"]]
    points: list[Mapping[int, Any]] = [list(point) for point in zip(*whole, strict=False)]  # type: ignore[misc]
    return [[statistics.fmean(one[axis] for one in point) for axis in range(3)] for point in points]


def _between(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """Piecewise linear through the points; the last y behind them."""
    place = bisect_left(xs, x)
    if place >= len(xs):
        return ys[-1]
    if place == 0 or xs[place] == xs[place - 1]:
        return ys[place]
    share = (x - xs[place - 1]) / (xs[place] - xs[place - 1])
    return ys[place - 1] + share * (ys[place] - ys[place - 1])
