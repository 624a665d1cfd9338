"""Finished runs as lines of a file, and what is to be run next: a study can be stopped and started again.

What is due follows from what is there, so nothing is planned twice: first each rate of the grid under one
seed, then the best rate under the seeds that are reported.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from study.methods import Method
from study.runs import Key

__all__ = ["Budget", "Row", "Rows", "best_rate", "due", "read_rows", "work_off"]

Row = Mapping[str, Any]
Rows = Mapping[Key, Row]


@dataclass(frozen=True)
class Budget:
    """The same for every method.

    Args:
        rates: the grid of learning rates.
        epochs: passes over the data of each run.
        tuning_seed: under which the grid is gone through.
        seeds: under which the best rate is reported.
    """

    rates: tuple[float, ...]
    epochs: int
    tuning_seed: int
    seeds: tuple[int, ...]


def key_of(row: Row) -> Key:
    return Key(**{entry.name: row[entry.name] for entry in fields(Key)})


def read_rows(path: Path) -> dict[Key, Row]:
    """The rows of a file by their keys; a last line that was torn is left out."""
    if not path.exists():
        return {}
    lines = path.read_text().splitlines(keepends=True)
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return {key_of(row): row for row in rows}


def best_rate(rows: Rows, method: str, budget: Budget) -> float | None:
    """The rate of the highest accuracy in tuning, the smallest such; None while tuning is not complete."""
    tuned = [rows.get(Key(method, lr, budget.tuning_seed, budget.epochs)) for lr in budget.rates]
    if not all(tuned):
        return None
    return float(max(tuned, key=lambda row: (row["accuracy"], -row["lr"]))["lr"])  # type: ignore[index]


def due(methods: Sequence[Method], rows: Rows, begun: Collection[Key], budget: Budget) -> Key | None:
    """The next run to begin; None where all that can be known to be needed is done or under way."""
    tuning = [Key(m.name, lr, budget.tuning_seed, budget.epochs) for m in methods for lr in budget.rates]
    best = {method.name: best_rate(rows, method.name, budget) for method in methods}
    reported = [
        Key(name, lr, seed, budget.epochs)
        for name, lr in best.items()
        if lr is not None
        for seed in budget.seeds
    ]
    return next((key for key in (*tuning, *reported) if key not in rows and key not in begun), None)


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
        f"{row['method']:<24} lr {row['lr']:<8g} seed {row['seed']}  accuracy {row['accuracy']:.3f}{failed}  "
        f"staleness {tau}  {row['virtual_s'] or 0:.1f} s virtual, {row['wall_s']:.1f} s here",
        flush=True,
    )
