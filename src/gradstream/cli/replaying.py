"""`gradstream replay`: where to stop, and how an update is shown."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

from gradstream.cli.report import print_result
from gradstream.errors import ConfigError, DivergedError
from gradstream.ext.replay import Replay, ReplayedUpdate
from gradstream.ext.replay import replay as replay_run
from gradstream.ext.replay.update import (
    StopCondition,
    at_chunk_version,
    at_update,
    loss_jump,
    not_finite,
    of_step,
)
from gradstream.run.result import Run

MANY = 16
"""Most sample ids to show."""


@dataclass(frozen=True, slots=True)
class ReplayQuery:
    """Where a replay stops, by the options of `gradstream replay`."""

    until_update: int | None
    worker: int | None
    step: int | None
    version: int | None
    chunk: int | None
    find: str | None

    def __str__(self) -> str:
        chosen = {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
        return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in chosen.items())

    @property
    def stops_at(self) -> StopCondition | None:
        """Whether to stop at an update; None never stops. Raises ConfigError for several places to stop."""
        if (self.worker is None) != (self.step is None):
            raise ConfigError("--worker and --step go together: --worker 2 --step 120")
        if self.chunk is not None and self.version is None:
            raise ConfigError("--chunk goes with --version: --version 40 --chunk 2")
        places: list[StopCondition] = []
        if self.until_update is not None:
            places.append(at_update(self.until_update))
        if self.worker is not None and self.step is not None:
            places.append(of_step(self.worker, self.step))
        if self.version is not None:
            places.append(at_chunk_version(self.version, self.chunk or 0))
        if self.find is not None:
            places.append(not_finite() if self.find == "nan" else loss_jump())
        if len(places) > 1:
            raise ConfigError(
                f"got {len(places)} places at which to stop; expected one: an update, a worker's step, a version, "
                "or --find"
            )
        return places[0] if places else None


def show_replay(run: Path, asked: ReplayQuery, *, watch: bool, anyway: bool, as_json: bool) -> None:
    """Replays a run, and prints the requested update, or a summary.

    Raises:
        ConfigError: there is no such update.
        DivergedError: the replay differs from the run.
        As `gradstream.ext.replay.replay`.
    """
    stops_at, stopped = asked.stops_at, None
    with replay_run(run, keep=False, anyway=anyway) as replay:
        for update in replay:
            if watch:
                click.echo(json.dumps(record_of(update)) if as_json else line_of(update))
            if stops_at is not None and stops_at(update):
                stopped = update
                break
    if stopped is not None:
        if not (watch and as_json):
            print_result(as_json, record_of(stopped), rows_of(stopped))
        return
    rows = [("updates", f"{replay.num_updates:,}"), ("ended", replay.ended)]
    if stops_at is None:
        rows.append(("parameters", _compared(run, replay)))
    elif asked.find is None:
        raise ConfigError(
            f"{asked}: none of the {replay.num_updates:,} updates that were replayed; {replay.ended}"
        )
    else:
        rows.append(("found", "none"))
    print_result(as_json, dict(rows), rows)


def _compared(run: Path, replay: Replay) -> str:
    """The result of comparing the parameters with those that the run kept. Raises DivergedError."""
    kept = Run.load(run).parameters
    if not kept:
        return "the run has kept none to compare with"
    if not same_bits(replay.parameters, kept):
        raise DivergedError(
            f"after {replay.num_updates} updates the parameters are not those in {run}: the model or the data do not "
            "return the same for the same input, or a module that the job file imports has changed"
        )
    return "the same bits as the run's own"


def same_bits(replayed: Mapping[str, np.ndarray[Any, Any]], kept: Mapping[str, np.ndarray[Any, Any]]) -> bool:
    """Whether all arrays of `replayed` are in `kept`, byte for byte."""
    return all(
        name in kept and kept[name].tobytes() == np.ascontiguousarray(array).tobytes()
        for name, array in replayed.items()
    )


def line_of(update: ReplayedUpdate) -> str:
    """An update in one line."""
    steps = _span(update.steps) or "?"
    return (
        f"{update.number:>6}  worker-{update.worker} step {steps:<9} "
        f"on {_span(update.computed_on):<9} at {_span(update.applied_at):<9} "
        f"stale {np.mean(update.staleness):5.2f}  loss {_number(update.loss):<9} "
        f"|gradient| {_number(update.gradient_norm):<9} |update| {_number(update.update_norm)}"
        + ("" if update.finite else "  NOT FINITE")
    )


def rows_of(update: ReplayedUpdate) -> list[tuple[str, str]]:
    """An update as a table."""
    batches = ", ".join(
        f"batch {ref.batch} of partition {ref.partition} in data epoch {ref.epoch}" for ref in update.batches
    )
    ids = update.samples
    more = f" and {len(ids) - MANY} more" if ids is not None and len(ids) > MANY else ""
    stale = update.staleness
    return [
        ("update", f"{update.number:,}"),
        ("worker", f"worker-{update.worker}, step {_span(update.steps) or '?'}, its push {update.sequence}"),
        ("minibatch", batches or "unknown"),
        ("samples", "without numbers" if ids is None else ", ".join(map(str, ids[:MANY])) + more),
        ("computed on", f"version {_span(update.computed_on)}"),
        ("applied to", f"version {_span(update.applied_at)}"),
        ("staleness", f"mean {np.mean(stale):.2f}, largest {max(stale)}, over {len(stale)} chunks"),
        ("learning rate", _number(update.lr)),
        ("|gradient|", _number(update.gradient_norm)),
        ("|update|", _number(update.update_norm)),
        ("loss", _number(update.loss)),
        ("parameters", "all finite" if update.finite else "some are NaN or infinite behind it"),
    ]


def record_of(update: ReplayedUpdate) -> dict[str, Any]:
    """An update as a JSON object; a number that is not finite becomes null."""

    def number(value: float) -> float | None:
        return value if math.isfinite(value) else None

    return {
        "update": update.number,
        "worker": update.worker,
        "push": update.sequence,
        "steps": list(update.steps),
        "batches": [[ref.epoch, ref.partition, ref.batch] for ref in update.batches],
        "samples": None if update.samples is None else list(update.samples),
        "computed_on": list(update.computed_on),
        "applied_to": list(update.applied_at),
        "staleness": list(update.staleness),
        "lr": update.lr,
        "gradient_norm": number(update.gradient_norm),
        "update_norm": number(update.update_norm),
        "loss": number(update.loss),
        "finite": update.finite,
    }


def _span(numbers: tuple[int, ...]) -> str:
    if not numbers:
        return ""
    low, high = min(numbers), max(numbers)
    return f"{low}" if low == high else f"{low} to {high}"


def _number(value: float) -> str:
    return "unknown" if math.isnan(value) else f"{value:.4g}"
