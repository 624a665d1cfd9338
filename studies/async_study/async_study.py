"""Question: which way of training asynchronously is best, when each is tuned alike?

30 virtual machines with 4 samples each train a network of 101,770 parameters on real data, by every
asynchronous method that gradstream has, beside the synchronous ones and single machines; then fewer methods
on uneven machines, on data that is divided by label, with a convolutional network; and DistBelief's Figures 4
and 5. Time is virtual, gradients and strategies are the real ones. Every method has the same budget.

    nice -n 19 python studies/async_study/async_study.py  # all that is missing of it, two runs at a time
    python studies/async_study/async_study.py --only uneven  # one scene
    python studies/async_study/async_study.py --page  # no runs: plots and pages of the record
    python studies/async_study/async_study.py --quick --into DIR  # a small one, elsewhere

Each finished run is a line of build/studies/async_study.jsonl, so that it can be stopped and started again.
Keeps record.json, and the plots and tables of README.md, and those of docs/strategies/.
"""

from __future__ import annotations

import datetime
import sys
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gradstream.machine.description import describe_machine, git_commit

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))
from common import ROOT, command_line, keep, kept, put, work_folder
from study import ledger, page, plots, subject
from study.findings import findings
from study.methods import BY_NAME
from study.runs import Key, row_of
from study.scenes import BATCH_COUNTS, FIGURE_4, SCENES, Scene, warm_start

DRAWN = (
    "single",
    "synchronous",
    "allreduce",
    "downpour",
    "downpour-adagrad",
    "softsync-30-aware",
    "ssp",
    "elastic",
    "dc-asgd-a",
    "averaging",
    "diloco",
)
"""Methods whose curves are drawn; tables have all."""


def quick_scenes() -> list[Scene]:
    """Half an epoch at most, two rates and a seed, of few methods."""
    equal, _, four, _, by_label, *_ = SCENES
    brief = {"epochs": 0.4, "rates": (0.01, 3.0), "rungs": ((1.0, 1),), "seeds": (1,)}
    return [
        replace(equal, methods=(BY_NAME["single"], BY_NAME["downpour"]), timed=("single",), **brief),
        replace(
            by_label, methods=(BY_NAME["downpour"],), timed=(), **(brief | {"epochs": 0.1, "rates": (0.01,)})
        ),
        replace(four, methods=FIGURE_4[1:2], epochs=0.2, rates=(0.003,), rungs=((1.0, 1),), seeds=(1,)),
    ]


def record_of(scenes: Sequence[Scene], rows: ledger.Rows) -> dict[str, Any]:
    machine = describe_machine({})
    machine.pop("argv")
    every = [unit for scene in scenes for unit in ledger.units(scene, rows)]
    return {
        "question": "which way of training asynchronously is best, when each is tuned alike?",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commits": sorted({row["commit"][:12] for row in rows.values() if row["commit"]}),
        "machine": machine,
        "config": {
            "sample_s": subject.SAMPLE_S,
            "jitter": subject.JITTER,
            "bandwidth_bytes_s": subject.BANDWIDTH_BYTES_S,
            "speeds": subject.SLOW,
        },
        "runs": len(rows),
        "hours": round(sum(row["cpu_s"] for row in rows.values()) / 3600, 1),
        "complete": all(key in rows for unit in every for key in ledger.needed(unit, rows)),
        "target": ledger.TARGET,
        "scenes": {scene.name: findings(scene, rows) for scene in scenes},
    }


def draw(record: dict[str, Any], folder: Path) -> None:
    """The plots, of what there is of them."""
    equal = record["scenes"]["equal"]
    found = {name: one for name in DRAWN if (one := equal["units"].get(name))}
    if lines := {one["title"]: one["curve"] for one in found.values() if one.get("curve")}:
        longest_s = 2 * equal["equal_s"] if equal["equal_s"] else max(line[-1][1] for line in lines.values())
        plots.curves(lines, folder / "study-curves.svg", epoch=subject.TRAIN_SAMPLES, longest_s=longest_s)
    if found:
        plots.sensitivity(
            {one["title"]: one["by_rate"] for one in found.values()}, folder / "study-rates.svg"
        )
    four = record["scenes"].get("figure-4", {"units": {}})["units"].values()
    if lines := {one["title"]: one["curve"] for one in four if one.get("curve")}:
        plots.over_time(lines, folder / "distbelief-figure-4.svg")
    five = record["scenes"].get("figure-5", {"units": {}})["units"]
    by_rule = {
        title: [
            (count, one["seconds"], one["seconds_deviation"])
            for count in BATCH_COUNTS
            if (one := five.get(f"{rule}-{count}", {})).get("seconds") is not None
        ]
        for rule, title in page.RULES.items()
    }
    if any(by_rule.values()):
        plots.time_to(by_rule, folder / "distbelief-figure-5.svg", ledger.TARGET)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--quick", action="store_true", help="a small one")
    parser.add_argument("--page", action="store_true", help="run nothing")
    parser.add_argument("--only", choices=[scene.name for scene in SCENES], help="run one scene only")
    parser.add_argument("--processes", type=int, default=2, help="at a time")
    parser.add_argument("--into", type=Path, help="where everything goes, instead of the repository")
    given = parser.parse_args()
    results = given.into or Path(__file__).resolve().parent
    path, commit = (given.into or work_folder()) / "async_study.jsonl", git_commit(ROOT)
    path.parent.mkdir(parents=True, exist_ok=True)
    scenes = quick_scenes() if given.quick else list(SCENES)
    wanted = [scene for scene in scenes if given.only in (None, scene.name)]
    by_name = {(scene.name, method.name): (scene, method) for scene in wanted for method in scene.methods}

    def next_due(rows: ledger.Rows, begun: Collection[Key]) -> Key | None:
        return ledger.due(wanted, rows, begun)

    def work(key: Key) -> ledger.Row:
        scene, method = by_name[key.scene, key.method]
        return {**row_of(scene, method, key), "commit": commit}

    if not given.page:
        for scene in wanted:  # read, and warmed up, once, before there are processes
            scene.data(0), scene.data(1)
        if any(scene.watched for scene in wanted):
            warm_start()
        ledger.work_off(next_due, work, path, processes=given.processes)
        record = record_of(scenes, ledger.read_rows(path))
        if not record["complete"]:
            sys.exit("scenes are missing, so the record stays as it is")
        keep(results / "record.json", record)
    record = kept(results / "record.json")
    draw(record, results)
    for name, tables in page.tables(record).items():
        for place, text in tables.items():
            print(f"\n{place}\n{text}")
        if given.into is None:
            put(page.path_of(name), tables)


if __name__ == "__main__":
    main()
