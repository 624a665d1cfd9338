"""What do checkpoints cost? The same job without them and with one about every so many seconds.

    python studies/checkpoint_cost/checkpoint_cost.py  # four minutes
    python studies/checkpoint_cost/checkpoint_cost.py --every 60 --seconds 300  # what a difference of 1 % takes

Baseline: the job without checkpoints, in the same call, before and after. A checkpoint costs the time for
which workers stand still, and what its writing takes from training that goes on beside it; both are in the
difference of samples per second. What one costs is that difference over all that were made; the share of
step time at another interval T is cost / T. How far the two runs without any lie apart says what the
difference is worth. Prints figures, and keeps them with machine, commit and date in
record.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import gradstream as gs
from gradstream.job.files import load_job
from gradstream.machine.description import describe_machine, git_commit
from gradstream.run.local.environment import node_environment

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))
from common import ROOT, keep, now

WIDTH = 1024
CLASSES = 16
ELEMS = "CHECKPOINT_COST_ELEMS"


def build(elems: int) -> nn.Module:
    """Two wide layers of about so many parameters."""
    hidden = max(1, round(elems / (WIDTH + CLASSES + 1)))
    return nn.Sequential(nn.Linear(WIDTH, hidden), nn.ReLU(), nn.Linear(hidden, CLASSES))


def job() -> gs.Job:
    """The job of every node; its size is in their environment, since nodes read this file again."""
    elems = int(os.environ[ELEMS])
    rng = np.random.default_rng(0)
    data = gs.from_arrays(
        rng.standard_normal((4096, WIDTH), dtype=np.float32), rng.integers(0, CLASSES, 4096)
    )
    model = gs.from_torch(lambda: build(elems), nn.functional.cross_entropy)
    return gs.Job(
        model, data, strategy="downpour", optimizer=gs.optim.Momentum(lr=1e-4), batch_size=64, epochs=10**6
    )


def measure(every: str | None, seconds: float) -> dict[str, Any]:
    """One run of so many seconds."""
    chosen = load_job(f"{Path(__file__).resolve()}:job")
    with tempfile.TemporaryDirectory(dir=".") as folder:  # on the disk of who measures: /tmp may be memory
        run = gs.train(
            chosen, checkpoint_every=every, until=gs.until(seconds=seconds), run_dir=Path(folder) / "run"
        )
    made = [event for event in run.events if event["event"] == "checkpoint"]
    return {
        "every": every,
        "samples_per_s": run.summary["samples_per_s"],
        "train_s": run.summary["train_s"],
        "checkpoints": len(made),
        "failed": sum(event["event"] == "checkpoint_failed" for event in run.events),
        "paused_s": statistics.median(event["paused_s"] for event in made) if made else 0.0,
        "total_s": statistics.median(event["total_s"] for event in made) if made else 0.0,
        "size_bytes": made[-1]["size_bytes"] if made else 0,
        "peak_own_bytes": run.summary["peak_own_bytes"],
        "num_parameters": run.summary["num_parameters"],
    }


def main() -> None:
    """Without, with, without."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elems", type=int, default=74_770_901)
    parser.add_argument("--every", type=float, default=20.0, help="seconds between checkpoints")
    parser.add_argument("--seconds", type=float, default=65.0, help="of training in each of the three runs")
    given = parser.parse_args()
    os.environ[ELEMS] = str(given.elems)
    rows = [measure(every, given.seconds) for every in (None, f"{given.every:g}s", None)]
    plain = statistics.mean([rows[0]["samples_per_s"], rows[2]["samples_per_s"]])
    lost = 1 - rows[1]["samples_per_s"] / plain
    cost_s = lost * rows[1]["train_s"] / max(1, rows[1]["checkpoints"])
    record = {
        "rows": rows,
        "share_lost": lost,
        "share_standing": rows[1]["paused_s"] / given.every,
        "cost_per_checkpoint_s": cost_s,
        "share_at_10min": cost_s / 600,
        "spread_of_the_plain_runs": abs(rows[0]["samples_per_s"] - rows[2]["samples_per_s"]) / plain,
        "asked": vars(given),
        "date": now(),
        "commit": git_commit(ROOT),
        "torch": torch.__version__,
        "machine": describe_machine(node_environment(2)),
    }
    print(json.dumps(record, indent=1))
    keep(Path(__file__).with_name("record.json"), record)


if __name__ == "__main__":
    main()
