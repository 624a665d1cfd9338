"""Question: are DistBelief's Figures 4 and 5 found again, in shape, where time is virtual?

Figure 4 shows accuracy over time for one replica by SGD, 20 by Downpour, 20 and 200 by Downpour with Adagrad,
all from one warm start; Figure 5 the time to a fixed accuracy over the number of machines. Here a replica is
one machine, the network has 101,770 parameters, and each line has the best rate of one grid.

    nice -n 19 python bench/distbelief_figures.py          # all that is missing of it, two runs at a time
    python bench/distbelief_figures.py --page              # no runs: record, plots and page of what is there
    python bench/distbelief_figures.py --quick --into DIR  # a small one, elsewhere

Each finished run is a line of bench/results/distbelief.jsonl, so that it can be stopped and started again.
Keeps bench/results/distbelief.json, and the plots and tables of docs/strategies/distbelief.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import gradstream as gs
from gradstream.cluster.machine import describe_machine, git_commit
from gradstream.simulate import simulate
from marks import put, table
from study import ledger, page, plots, subject
from study.findings import samples_to
from study.methods import BATCH, Method
from study.runs import Key, Setting, row_of

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGES = ROOT / "bench" / "results", ROOT / "docs" / "strategies"

SHARDS = 10
"""Machines of the parameter server: 200 replicas would wait for the card of one."""
COUNTS = (1, 5, 20, 60, 200)
TARGET = 0.82
"""Test accuracy that Figure 5 counts to."""
WARM_RATE, WARM_EPOCHS, WARM_SEED = 0.01, 1, 99
FIGURE_4 = ("sgd-1", "sgd-20", "adagrad-20", "adagrad-200")
"""The paper's lines."""

WHOLE = ledger.Budget(rates=(0.0003, 0.001, 0.003, 0.01, 0.03), epochs=6, tuning_seed=0, seeds=(1, 2, 3))
QUICK = ledger.Budget(rates=(0.003,), epochs=1, tuning_seed=0, seeds=())


def methods() -> list[Method]:
    """Downpour by number of replicas and rule; one replica with a fixed rate is SGD."""
    made = []
    for rule in ("sgd", "adagrad"):
        for count in COUNTS:
            name = "SGD" if count == 1 else f"Downpour {count}"
            title = f"{name}{' + Adagrad' if rule == 'adagrad' else ''}"
            options = {"overlap": False}
            adagrad = rule == "adagrad"
            made.append(Method(f"{rule}-{count}", title, "downpour", options, adagrad=adagrad, workers=count))
    return made


def warm_start() -> tuple[dict[str, np.ndarray[Any, Any]], list[float]]:
    """Parameters after one replica alone has gone through the data once; and as a point of curves."""
    run = simulate(
        subject.model(),
        subject.data(),
        strategy="downpour",
        strategy_options={"overlap": False},
        optimizer=gs.SGD(lr=WARM_RATE),
        workers=1,
        batch_size=BATCH,
        epochs=WARM_EPOCHS,
        metrics={"train": subject.train_accuracy},
        seed=WARM_SEED,
    )
    found = run.evaluate(subject.data(watched=True))
    return dict(run.parameters), [0, 0.0, 2 * (found.accuracy or 0.0), found.metrics["train"]]


def seconds_to(row: ledger.Row, accuracy: float) -> float | None:
    """Virtual seconds until this accuracy was first reached; None where it never was."""
    by_time = {"curve": [[point[1], 0.0, point[2]] for point in row["curve"]]}
    return samples_to(by_time, accuracy)


def epoch_s(row: ledger.Row) -> float:
    """Virtual seconds of a pass over the data, by the last evaluation on the way.

    The run ends later: the last receipts come with the next sign of life, a quarter of a second apart.
    """
    samples, seconds = row["curve"][-2][:2]
    return float(seconds / samples * subject.data().num_samples)


def findings(rows: ledger.Rows, budget: ledger.Budget) -> dict[str, Any]:
    """By method: the curve of its best rate, and the least time to the target over all rates."""
    found = {}
    for method in methods():
        tuned = [rows.get(Key(method.name, lr, budget.tuning_seed, budget.epochs)) for lr in budget.rates]
        there = [row for row in tuned if row is not None]
        best = ledger.best_rate(rows, method.name, budget)
        seeds = [rows.get(Key(method.name, best or 0, seed, budget.epochs)) for seed in budget.seeds]
        reported = [row for row in seeds if row is not None]
        times = [(s, row["lr"]) for row in there if (s := seconds_to(row, TARGET)) is not None]
        quickest = min(times, default=None)
        shown = reported or sorted(there, key=lambda row: row["accuracy"])[-1:]
        found[method.name] = {
            "title": method.title,
            "workers": method.workers,
            "by_rate": {f"{row['lr']:g}": row["accuracy"] for row in there},
            "rate": best,
            "seeds": len(reported),
            "accuracy": statistics.fmean(row["accuracy"] for row in reported) if reported else None,
            "train_accuracy": statistics.fmean(r["curve"][-1][3] for r in reported) if reported else None,
            "staleness_mean": there[0]["staleness_mean"] if there else None,
            "epoch_s": epoch_s(there[0]) if there else None,
            "curve": mean_curve(shown),
            "seconds": quickest and quickest[0],
            "seconds_rate": quickest and quickest[1],
        }
    return found


def mean_curve(rows: Sequence[ledger.Row]) -> list[list[float]]:
    """[samples, seconds, test accuracy, training accuracy], over the seeds."""
    points = zip(*(row["curve"] for row in rows), strict=False)
    return [[statistics.fmean(one[axis] for one in point) for axis in range(4)] for point in points]


def tables(record: dict[str, Any]) -> dict[str, str]:
    """What the page shows, by place."""
    found = {name: one for name, one in record["findings"].items() if one["by_rate"]}

    def text(value: float | None, form: str, unit: str = "", scale: float = 1.0) -> str:
        return "" if value is None else f"{scale * value:{form}}{unit}"

    def reached(one: dict[str, Any] | None) -> str:
        """An empty cell is one that was not run."""
        if one is None or one["rate"] is None or one["seconds"] is not None:
            return "" if one is None else text(one["seconds"], ".2f")
        return "never"

    four = [
        [
            found[name]["title"],
            text(found[name]["rate"], "g"),
            text(found[name]["accuracy"], ".1f", " %", 100),
            text(found[name]["train_accuracy"], ".1f", " %", 100),
            text(found[name]["staleness_mean"], ".1f"),
            text(found[name]["epoch_s"], ".2f"),
        ]
        for name in found
    ]
    rules = {rule: {one["workers"]: one for name, one in found.items() if name.startswith(rule)} for rule in
             ("sgd", "adagrad")}  # fmt: skip
    five = [
        [
            {"sgd": "fixed rate", "adagrad": "Adagrad"}[rule],
            *(reached(by_count.get(count)) for count in COUNTS),
        ]
        for rule, by_count in rules.items()
    ]
    head = ["", "rate", "test accuracy", "training accuracy", "staleness, mean", "seconds an epoch"]
    return {
        "state": page.state(record, len(COUNTS) * 2),
        "figure-4": table(head, four),
        "figure-5": table([f"seconds to {100 * TARGET:.0f} %, replicas:", *map(str, COUNTS)], five),
    }


def record_of(rows: ledger.Rows, budget: ledger.Budget) -> dict[str, Any]:
    machine = describe_machine({})
    machine.pop("argv")
    return {
        "question": "are DistBelief's Figures 4 and 5 found again, in shape?",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": git_commit(ROOT),
        "machine": machine,
        "warm_start": {"rate": WARM_RATE, "epochs": WARM_EPOCHS, "seed": WARM_SEED},
        "shards": SHARDS,
        "target": TARGET,
        "budget": asdict(budget),
        "runs": len(rows),
        "findings": findings(rows, budget),
    }


def draw(record: dict[str, Any], folder: Path) -> None:
    found = record["findings"]
    lines = {found[name]["title"]: found[name]["curve"] for name in FIGURE_4 if found[name]["curve"]}
    if lines:
        plots.over_time(lines, folder / "distbelief-figure-4.svg")
    by_rule = {
        title: [(one["workers"], one["seconds"]) for name, one in found.items() if name.startswith(rule)]
        for rule, title in (("sgd", "fixed rate"), ("adagrad", "Adagrad"))
    }
    if any(seconds for points in by_rule.values() for _, seconds in points):
        plots.time_to(by_rule, folder / "distbelief-figure-5.svg", TARGET)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one epoch at one rate, of few replicas")
    parser.add_argument("--page", action="store_true", help="run nothing")
    parser.add_argument("--processes", type=int, default=2, help="at a time")
    parser.add_argument("--into", type=Path, help="where everything goes, instead of the repository")
    given = parser.parse_args()
    results, pages = given.into or RESULTS, given.into or PAGES
    budget, path = (QUICK if given.quick else WHOLE), results / "distbelief.jsonl"
    wanted = [method for method in methods() if not given.quick or method.workers == 5]
    by_name, commit = {method.name: method for method in wanted}, git_commit(ROOT)
    if not given.page:
        world = subject.cluster(shards=SHARDS)
        begin, point = warm_start()
        setting = Setting(world, begin=begin, watched=True, looks=3, long=1.0)

        def work(key: Key) -> ledger.Row:
            row = row_of(by_name[key.method], key, setting)
            return {**row, "curve": [point, *row["curve"]], "commit": commit}

        ledger.work_off(partial(_due, wanted, budget), work, path, processes=given.processes)
    record = record_of(ledger.read_rows(path), budget)
    (results / "distbelief.json").write_text(json.dumps(record, indent=1) + "\n")
    draw(record, pages)
    for name, text in tables(record).items():
        print(f"\n{name}\n{text}")
    if (pages / "distbelief.md").exists():
        put(pages / "distbelief.md", tables(record))


def _due(wanted: list[Method], budget: ledger.Budget, rows: ledger.Rows, begun: Any) -> Key | None:
    return ledger.due(wanted, rows, begun, budget)


if __name__ == "__main__":
    main()
