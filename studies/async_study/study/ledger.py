"""Finished runs as lines of a file, and what is to be run next: a study can be stopped and started again.

What is due follows from what is there, so nothing is planned twice: the rates of the grid by successive
halving under one seed, then the best of them under the seeds that are reported.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from study.methods import Method
from study.runs import CHANCE, Key
from study.scenes import TUNING_SEED, Scene
from study.subject import TRAIN_SAMPLES

Row = Mapping[str, Any]
Rows = Mapping[Key, Row]
TARGET = 0.82
"""Test accuracy that times are taken to."""


@dataclass(frozen=True)
class Unit:
    """What is tuned and reported: a method in a scene, with a budget."""

    scene: Scene
    method: Method
    epochs: float
    timed: bool = False

    @property
    def rates(self) -> tuple[float, ...]:
        """The grid of learning rates; 1 alone for a method without one."""
        return self.scene.rates if self.method.passes is None else (1.0,)

    @property
    def seeds(self) -> tuple[int, ...]:
        """Those that are reported; one where they change nothing."""
        return self.scene.seeds if self.method.passes is None else self.scene.seeds[:1]

    @property
    def name(self) -> str:
        """In records."""
        return f"{self.method.name}{'-timed' if self.timed else ''}"

    def key(self, lr: float, seed: int, share: float = 1.0) -> Key:
        """Of a run over a share of the epochs."""
        scene = self.scene.name if self.method.passes is None else self.scene.same or self.scene.name
        return Key(scene, self.method.name, lr, seed, round(self.epochs * share, 3))


# ---- what is due ----------------------------------------------------------------------------


def units(scene: Scene, rows: Rows) -> list[Unit]:
    """Of a scene; those with another budget of epochs are there once it is known how fast they are."""
    time_s, found = equal_s(scene, rows), []
    for method in scene.methods:
        unit = unit_of(scene, method)
        found.append(unit)
        pace = pace_s(unit, rows)
        if method.name in scene.timed and time_s is not None and pace is not None:
            epochs = round(time_s / pace / TRAIN_SAMPLES, 2)
            found.append(Unit(scene, method, epochs, timed=True))
    return found


def unit_of(scene: Scene, method: Method) -> Unit:
    """A method with the scene's budget, or its own."""
    return Unit(scene, method, float(method.passes or scene.epochs))


def equal_s(scene: Scene, rows: Rows) -> float | None:
    """Virtual seconds that the scene's clock takes for its epochs."""
    clock = next((method for method in scene.methods if method.name == scene.clock), None)
    pace = pace_s(Unit(scene, clock, scene.epochs), rows) if clock else None
    return None if pace is None else pace * scene.epochs * TRAIN_SAMPLES


def pace_s(unit: Unit, rows: Rows) -> float | None:
    """Virtual seconds a sample, of the first run: up to its last evaluation on the way.

    The run ends later: the last receipts come with the next sign of life, a quarter of a second apart.
    """
    row = rows.get(unit.key(unit.rates[0], TUNING_SEED, unit.scene.rungs[0][0]))
    if unit.method.passes is not None:
        row = rows.get(unit.key(unit.rates[0], unit.seeds[0]))
    if row is None or len(row["curve"]) < 2:
        return None
    samples, seconds = row["curve"][-2][:2]
    return float(seconds / samples)


def needed(unit: Unit, rows: Rows) -> Iterator[Key]:
    """Runs of a unit that can be known to be needed, done or not, in their order."""
    scene, rates = unit.scene, list(unit.rates)
    if scene.borrowed in (None, unit.method.name) and len(rates) > 1:
        for share, keep in scene.rungs:
            keys = [unit.key(lr, TUNING_SEED, share) for lr in rates]
            yield from keys
            if not all(key in rows for key in keys):
                return
            rates = sorted(
                sorted(rates, key=lambda lr: _score(scene, rows[unit.key(lr, TUNING_SEED, share)]))[:keep]
            )
    best = best_rate(unit, rows)
    if best is not None:
        yield from (unit.key(best, seed) for seed in unit.seeds)


def best_rate(unit: Unit, rows: Rows) -> float | None:
    """What is left of the rates behind the last rung; None while tuning is not complete."""
    scene, rates = unit.scene, list(unit.rates)
    if len(rates) == 1:
        return rates[0]
    if scene.borrowed not in (None, unit.method.name):
        lender = next(method for method in scene.methods if method.name == scene.borrowed)
        return best_rate(Unit(scene, lender, scene.epochs), rows)
    for share, keep in scene.rungs:
        found = {lr: rows.get(unit.key(lr, TUNING_SEED, share)) for lr in rates}
        there = {lr: row for lr, row in found.items() if row is not None}
        if len(there) < len(found):
            return None
        rates = sorted(rates, key=lambda lr: _score(scene, there[lr]))[:keep]
    return rates[0]


def _score(scene: Scene, row: Row) -> tuple[float, ...]:
    """Less is better. Of two rates that are as good the smaller one is taken."""
    seconds = seconds_to(row, TARGET) if scene.best == "time" else 0.0
    return (float("inf") if seconds is None else seconds, -row["accuracy"], row["lr"])


def seconds_to(row: Row, accuracy: float) -> float | None:
    """Virtual seconds until this accuracy was reached, linearly between evaluations; None: it never was."""
    before = (0.0, CHANCE)
    for _, seconds, reached, *_ in row["curve"]:
        if reached >= accuracy:
            share = (accuracy - before[1]) / (reached - before[1])
            return float(before[0] + share * (seconds - before[0]))
        before = (seconds, reached)
    return None


def due(scenes: Sequence[Scene], rows: Rows, begun: Collection[Key]) -> Key | None:
    """The next run to begin; None where all that can be known to be needed is done or under way."""
    for scene in scenes:
        for unit in units(scene, rows):
            for key in needed(unit, rows):
                if key not in rows and key not in begun:
                    return key
    return None


# ---- the file -------------------------------------------------------------------------------


def key_of(row: Row) -> Key:
    return Key(**{entry.name: row[entry.name] for entry in fields(Key)})


def read_rows(path: Path) -> dict[Key, Row]:
    """The rows of a file by their keys; a last line that was torn is left out."""
    if not path.exists():
        return {}
    lines = path.read_text().splitlines(keepends=True)
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return {key_of(row): row for row in rows}


def work_off(
    next_due: Callable[[Rows, Collection[Key]], Key | None],
    work: Callable[[Key], Row],
    path: Path,
    *,
    processes: int,
) -> None:
    """Runs what is due, each run in a process of its own, until nothing is left.

    Args:
        next_due: says which run is next: (rows, those under way).
        work: makes its row.
        path: to which each row is added as it is there.
        processes: at a time.

    Raises:
        SystemExit: a run failed other than by growing beyond all bounds; its traceback is on the terminal.
    """
    _mend(path)
    running: dict[int, Key] = {}
    while True:
        rows = read_rows(path)
        key = next_due(rows, running.values()) if len(running) < processes else None
        if key is not None:
            running[_forked(work, key, path)] = key
            continue
        if not running:
            return
        pid, status = os.wait()
        key = running.pop(pid, None)
        if key is not None and status != 0:
            sys.exit(f"{key}: the run failed; start again to go on with the others once that is mended")
        if key is not None:
            _tell(read_rows(path)[key])


def _mend(path: Path) -> None:
    """Cuts a line off that was being written when the study was stopped."""
    if path.exists():
        whole = path.read_bytes()
        path.write_bytes(whole[: whole.rfind(b"\n") + 1])


def _forked(work: Callable[[Key], Row], key: Key, path: Path) -> int:
    """A child that does one run, writes its row, and ends."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    gc.disable()  # it ends soon, and a tenth of its time would go into looking for nothing
    try:
        line = json.dumps(work(key)) + "\n"
        with path.open("a") as file:
            file.write(line)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _tell(row: Row) -> None:
    failed = f" ({row['failed']})" if row["failed"] else ""
    tau = "-" if row["staleness_mean"] is None else f"{row['staleness_mean']:.1f}"
    print(
        f"{row['scene']:<10} {row['method']:<24} lr {row['lr']:<8g} seed {row['seed']}  "
        f"epochs {row['epochs']:<5g} "
        f"accuracy {row['accuracy']:.3f}{failed}  staleness {tau}  "
        f"{row['virtual_s'] or 0:.1f} s virtual, {row['cpu_s']:.1f} s here",
        flush=True,
    )
