"""Question: how far apart may exchanges be, and what do codecs cost, when each method is tuned alike?

4, 8 and 32 virtual machines with 4 samples each train a network of 101,770 parameters for 5 epochs: local SGD, DiLoCo
and its kin, gossip, with 1 to 500 minibatches between two exchanges, and synchronous training with codecs. Gradients,
strategies and codecs are the real ones. The grid of rates is that of `async_study.py`.

    nice -n 19 python studies/local_study/local_study.py  # all that is missing of it: some four hours of an idle core
    python studies/local_study/local_study.py --page  # no runs: the tables of the record
    python studies/local_study/local_study.py --only local-4

Each finished run is a line of build/studies/local_study.jsonl, so that it can be stopped and started again.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from gradstream.machine.description import git_commit

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))
sys.path.append(str(Path(__file__).resolve().parents[1] / "async_study"))
from common import ROOT, command_line, keep, kept, origin, put, table, work_folder
from local import CODECS, COUNTS, KINDS, PERIODS, SCENES, joined, local
from study import ledger
from study.findings import findings
from study.page import state
from study.runs import Key, row_of
from study.subject import TRAIN_SAMPLES

RECORD = Path(__file__).with_name("record.json")
PAGE = RECORD.with_name("README.md")
BUDGETS_MB = (0.3, 1.0, 3.0, 10.0, 30.0)
"""Bytes of a worker, sent and received, that accuracies are compared at."""


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--page", action="store_true", help="run nothing")
    parser.add_argument("--only", choices=[scene.name for scene in SCENES], help="run one scene only")
    parser.add_argument("--processes", type=int, default=1, help="at a time")
    given = parser.parse_args()
    path, commit = work_folder() / "local_study.jsonl", git_commit(ROOT)
    wanted = [scene for scene in SCENES if given.only in (None, scene.name)]
    by_name = {(scene.name, method.name): (scene, method) for scene in wanted for method in scene.methods}

    def next_due(rows: ledger.Rows, begun: Collection[Key]) -> Key | None:
        return ledger.due(wanted, rows, begun)

    def work(key: Key) -> ledger.Row:
        scene, method = by_name[key.scene, key.method]
        return {**row_of(scene, method, key), "commit": commit}

    if not given.page:
        for scene in wanted:  # read once, before there are processes
            scene.data(0), scene.data(1)
        ledger.work_off(next_due, work, path, processes=given.processes)
        rows = ledger.read_rows(path)
        if ledger.due(SCENES, rows, ()) is not None:
            sys.exit("scenes are missing, so the record stays as it is")
        keep(RECORD, record_of(rows))
    record = kept(RECORD)
    put(PAGE, {**tables(record), "local-study-state": state(record)})


def record_of(rows: ledger.Rows) -> dict[str, Any]:
    """The figures of all runs."""
    return {
        "question": (__doc__ or "").splitlines()[0],
        **origin(),
        "runs": len(rows),
        "commits": sorted({str(row["commit"])[:12] for row in rows.values()}),
        "hours": round(sum(row["cpu_s"] for row in rows.values()) / 3600, 1),
        "complete": True,
        "scenes": {scene.name: findings(scene, rows) for scene in SCENES},
    }


def tables(record: Mapping[str, Any]) -> dict[str, str]:
    """By place on the page."""
    found: dict[str, str] = {}
    for workers in COUNTS:
        units = record["scenes"][f"local-{workers}"]["units"]
        head = ["accuracy in %", *(f"H = {period}" for period in PERIODS)]
        lines = [
            [title, *(_accuracy(units.get(local(kind, workers, period).name)) for period in PERIODS)]
            for kind, (title, *_) in KINDS.items()
        ]
        for codec in ("", *CODECS):
            method = joined(workers, codec)
            lines.append([method.title, _accuracy(units.get(method.name)), *[""] * (len(PERIODS) - 1)])
        found[f"local-study-{workers}"] = table(head, lines)
        budgets = ["within … MB of a worker", *(f"{budget:g}" for budget in BUDGETS_MB)]
        lines = []
        for kind, (title, *_) in KINDS.items():
            several = [units.get(local(kind, workers, period).name) for period in PERIODS]
            lines.append([title, *(_best_within(several, budget, workers) for budget in BUDGETS_MB)])
        for codec in ("", *CODECS):
            method = joined(workers, codec)
            one = [units.get(method.name)]
            lines.append([method.title, *(_best_within(one, budget, workers) for budget in BUDGETS_MB)])
        found[f"local-study-{workers}-bytes"] = table(budgets, lines)
    return found


def _accuracy(unit: Mapping[str, Any] | None) -> str:
    if not unit or "accuracy" not in unit:
        return ""
    return f"{100 * unit['accuracy']:.1f} ± {100 * unit['deviation']:.1f}"


def _best_within(units: list[Mapping[str, Any] | None], budget_mb: float, workers: int) -> str:
    """The best mean accuracy that any of some units has before its workers have moved so many bytes each."""
    best = 0.0
    for unit in units:
        for samples, _, accuracy, *_ in (unit or {}).get("curve", []):
            moved_mb = unit["total_bytes"] / workers * samples / (unit["epochs"] * TRAIN_SAMPLES) / 1e6  # type: ignore[index]
            if moved_mb <= budget_mb:
                best = max(best, accuracy)
    return f"{100 * best:.1f}" if best else ""


if __name__ == "__main__":
    main()
