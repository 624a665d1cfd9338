"""Question: what do large batches cost, and when do they stop to save updates?

Two small models on the subset of Fashion-MNIST, trained by gradstream on virtual time: sharpness and accuracy over the
batch size, by method, each tuned alike; a small-batch start of a large batch; growing batches beside falling rates;
updates to a loss, and the noise scale beside the critical batch; ways out of strict saddles.

    nice python studies/large_batch_study/large_batch_study.py  # what is missing: two hours of two cores in all
    nice python studies/large_batch_study/large_batch_study.py --most 400  # stops after so many seconds
    python studies/large_batch_study/large_batch_study.py --page  # trains nothing: plots and tables of the record

`--only saddle` and the like do one part. Two calls at once share the work if they do different parts.
Each run is a line of build/studies/large_batch_study.jsonl; the record is record.json, its
plots are in docs/, and bench/tables.py writes its tables.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gradstream.machine.description import describe_machine, git_commit

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))
from common import ROOT, command_line, keep, kept, now, work_folder
from large_batch import critical, minima, page, plots, saddles
from large_batch.ledger import Key, Row, Rows, Scale, read_rows

PARTS = {
    "batch": minima,
    "start": minima,
    "growth": minima,
    "line": minima,
    "count": critical,
    "noise": critical,
    "saddle": saddles,
}
MODULES = (minima, critical, saddles)
QUICK = Scale(
    models=("dense",),
    samples=200,
    epochs=3,
    batches=(20, 100),
    counts=(20, 200),
    tuning=(101,),
    seeds=(1, 2),
    target=2.2,
    enough=0.3,
    exits=30,
)


def next_due(rows: Rows, scale: Scale, only: tuple[str, ...]) -> Key | None:
    """The first run that is missing; what is due follows from what is there."""
    return next((key for key in all_due(rows, scale) if key not in rows and key.part in only), None)


def all_due(rows: Rows, scale: Scale) -> Iterator[Key]:
    """All runs that can be named so far."""
    for module in MODULES:
        yield from module.due(rows, scale)


def record_of(rows: Rows, scale: Scale) -> dict[str, Any]:
    """The figures of what is there."""
    figures: dict[str, Any] = {}
    for module in MODULES:
        figures |= module.found(rows, scale)
    return {
        "question": (__doc__ or "").splitlines()[0],
        "date": now(),
        "commit": git_commit(ROOT),
        **describe_machine({}),
        "epochs": scale.epochs,
        "seeds": len(scale.seeds),
        "runs": len(rows),
        "cpu_s": round(sum(row["cpu_s"] for row in rows.values())),
        "complete": next_due(rows, scale, tuple(PARTS)) is None,
        "found": figures,
    }


def main() -> None:
    """Runs what is missing, and keeps the record."""
    parser = command_line(__doc__)
    parser.add_argument("--most", type=float, default=math.inf, help="seconds after which no run is begun")
    parser.add_argument("--only", choices=PARTS, action="append", help="run one part; may be given again")
    parser.add_argument("--model", choices=minima.MODELS, help="train one model")
    parser.add_argument("--page", action="store_true", help="train nothing")
    parser.add_argument("--quick", action="store_true", help="a small one")
    parser.add_argument("--into", type=Path, help="where everything goes, instead of the repository")
    given = parser.parse_args()
    begun_s, folder = time.monotonic(), given.into or Path(__file__).resolve().parent
    torch.set_num_threads(1)
    scale = QUICK if given.quick else Scale()
    path, only = (given.into or work_folder()) / "large_batch_study.jsonl", tuple(given.only or PARTS)
    path.parent.mkdir(parents=True, exist_ok=True)
    wanted = replace(scale, models=(given.model,)) if given.model else scale
    while (
        not given.page
        and time.monotonic() - begun_s < given.most
        and (key := next_due(read_rows(path), wanted, only))
    ):
        row: Row = PARTS[key.part].row_of(key, scale)
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(*key, row, flush=True)
    if not given.page:
        record = record_of(read_rows(path), scale)
        if not record["complete"]:
            sys.exit("runs are missing, so the record stays as it is")
        keep(folder / "record.json", record)
    record = kept(folder / "record.json")
    plots.draw(record, folder)
    for place, text in page.tables(record).items():
        print(f"\n{place}\n{text}")


if __name__ == "__main__":
    main()
