"""Question: which way of training asynchronously is best, when each is tuned alike?

30 virtual machines with 4 samples each train a network of 101,770 parameters on real data, by every
asynchronous method that gradstream has, beside the synchronous one and single machines. Time is virtual,
gradients and strategies are the real ones. Every method has the same budget: a grid of learning rates under
one seed, then its best rate under five others.

    nice -n 19 python bench/async_study.py          # all that is missing of it, two runs at a time
    python bench/async_study.py --only downpour     # methods whose names begin so
    python bench/async_study.py --page              # no runs: record, plots and page of what is there
    python bench/async_study.py --quick --into DIR  # a small one, elsewhere

Each finished run is a line of bench/results/async-study.jsonl, so that it can be stopped and started again.
Keeps bench/results/async-study.json, and the plots and tables of docs/strategies/study.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from gradstream.cluster.machine import describe_machine, git_commit
from marks import put
from study import findings, ledger, page, plots, subject
from study.methods import METHODS, Method
from study.runs import Key, Setting, row_of

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGES = ROOT / "bench" / "results", ROOT / "docs" / "strategies"

DRAWN = (
    "single",
    "synchronous",
    "downpour",
    "downpour-adagrad",
    "softsync-1",
    "softsync-15-aware",
    "softsync-30-aware",
    "ssp",
    "elastic",
    "dc-asgd-a",
    "averaging",
    "diloco",
)
"""Methods whose curves are drawn; tables have all."""

WHOLE = ledger.Budget(
    rates=(0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0), epochs=10, tuning_seed=0, seeds=(1, 2, 3, 4, 5)
)
QUICK = ledger.Budget(rates=(0.01, 3.0), epochs=1, tuning_seed=0, seeds=(1,))


def record_of(methods: list[Method], rows: ledger.Rows, budget: ledger.Budget) -> dict[str, Any]:
    machine = describe_machine({})
    machine.pop("argv")
    return {
        "question": "which way of training asynchronously is best, when each is tuned alike?",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": git_commit(ROOT),
        "machine": machine,
        "world": {
            "sample_s": subject.SAMPLE_S,
            "jitter": subject.JITTER,
            "bandwidth_bytes_s": subject.BANDWIDTH_BYTES_S,
        },
        "budget": asdict(budget),
        "runs": len(rows),
        "findings": findings.findings(methods, rows, budget),
    }


def draw(record: dict[str, Any], folder: Path) -> None:
    methods = record["findings"]["methods"]
    found = {name: methods[name] for name in DRAWN if name in methods and methods[name]["by_rate"]}
    lines = {one["title"]: one["curve"] for one in found.values() if one.get("curve")}
    equal_s = record["findings"]["equal_s"]
    if lines:
        longest_s = 3 * equal_s if equal_s else max(points[-1][1] for points in lines.values())
        epoch = subject.data().num_samples
        plots.curves(lines, folder / "study-curves.svg", epoch=epoch, longest_s=longest_s)
    if found:
        plots.sensitivity(
            {one["title"]: one["by_rate"] for one in found.values()}, folder / "study-rates.svg"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one epoch, two rates, a seed, two methods")
    parser.add_argument("--page", action="store_true", help="run nothing")
    parser.add_argument("--only", default="", help="methods whose names begin so")
    parser.add_argument("--processes", type=int, default=2, help="at a time")
    parser.add_argument("--into", type=Path, help="where everything goes, instead of the repository")
    given = parser.parse_args()
    results, pages = given.into or RESULTS, given.into or PAGES
    budget, path = (QUICK if given.quick else WHOLE), results / "async-study.jsonl"
    methods = list(METHODS)
    wanted = [method for method in methods if method.name.startswith(given.only)]
    if given.quick:
        wanted = methods = [m for m in wanted if m.name in ("single", "downpour")]
    setting = Setting(subject.cluster())
    by_name, commit = {method.name: method for method in METHODS}, git_commit(ROOT)

    def work(key: Key) -> ledger.Row:
        return {**row_of(by_name[key.method], key, setting), "commit": commit}

    if not given.page:
        subject.data()  # read once, before there are processes
        next_due = partial(_due, wanted, budget)
        ledger.work_off(next_due, work, path, processes=given.processes)
    record = record_of(methods, ledger.read_rows(path), budget)
    (results / "async-study.json").write_text(json.dumps(record, indent=1) + "\n")
    draw(record, pages)
    for name, text in page.study_tables(record).items():
        print(f"\n{name}\n{text}")
    if (pages / "study.md").exists():
        put(pages / "study.md", page.study_tables(record))


def _due(methods: list[Method], budget: ledger.Budget, rows: ledger.Rows, begun: Any) -> Key | None:
    return ledger.due(methods, rows, begun, budget)


if __name__ == "__main__":
    main()
