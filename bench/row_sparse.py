"""What does a step move of a table with a million rows, of which it touches 100?

    python bench/row_sparse.py            # prints the ratios, writes bench/results/row_sparse.json
    python bench/row_sparse.py --rows 100000 --steps 40 --out /tmp/r.json

Two Downpour workers and a shard, as processes over TCP. Each step looks up 100 rows of an embedding, so its
gradient has that many (two of them are the same one now and then), and weighs 100 · dim elements. A fetch
brings what all workers have changed since the last one: as many rows for each of them. What a run does once
(initial parameters go to every worker) is taken out by running it twice, for some steps and for four times as
many: the differences, divided by the steps between, are bytes a step and worker, and seconds.

Baseline: the same with `nn.Embedding(sparse=False)`, for fewer steps. `lo_bytes` is what the loopback
interface counts, with all headers, results, acknowledgements and the run's own events: nothing else
may use it meanwhile.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import gradstream as gs
from common import RESULTS, keep
from gradstream.job.files import load_job
from gradstream.machine.description import describe_machine
from gradstream.run.local.environment import node_environment

SPEC = Path("row_sparse.json")  # in the working directory: nodes read this file again
TOUCHED = 100
PER_SAMPLE = 5
WORKERS = 2


class Bag(nn.Module):
    """(n, 5) row numbers to (n,): the sum of the elements of their rows, weighed."""

    def __init__(self, rows: int, dim: int, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, dim, sparse=sparse, _weight=torch.zeros(rows, dim))
        self.out = nn.Linear(dim, 1)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        """The weighed sum."""
        hidden: torch.Tensor = self.table(numbers).sum(1)
        outputs: torch.Tensor = self.out(hidden)
        return outputs[:, 0]


def job() -> gs.Job:
    """As the file in the working directory says."""
    spec = json.loads(SPEC.read_text())
    rng = np.random.default_rng(0)
    numbers = rng.integers(0, spec["rows"], (40_000, PER_SAMPLE))
    return gs.Job(
        gs.from_torch(lambda: Bag(spec["rows"], spec["dim"], spec["sparse"]), nn.functional.mse_loss),
        gs.from_arrays(numbers, rng.standard_normal(len(numbers)).astype("float32")),
        strategy="downpour",
        optimizer=gs.optim.SGD(lr=0.01),
        workers=WORKERS,
        batch_size=TOUCHED // PER_SAMPLE,
        steps=spec["steps"],
        chunk_elems=1 << 20,
        carrier=spec["carrier"],
        checkpoint_every=None,
    )


def loopback_bytes() -> int:
    """What the loopback interface has carried so far."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, figures = line.partition(":")
        if name.strip() == "lo":
            return int(figures.split()[0])
    return 0


def measure(**spec: Any) -> dict[str, float]:
    """Totals of one run."""
    SPEC.write_text(json.dumps(spec))
    before, begun = loopback_bytes(), time.monotonic()
    run = gs.train(load_job(f"{Path(__file__).resolve()}:job"), run_dir=Path(tempfile.mkdtemp(dir=".")))
    return {
        "pushed_bytes": run.summary["pushed_bytes"],
        "fetched_bytes": run.summary["fetched_bytes"],
        "lo_bytes": loopback_bytes() - before,
        "train_s": run.summary["train_s"],
        "whole_s": time.monotonic() - begun,
    }


def per_step(steps: int, **spec: Any) -> dict[str, float]:
    """Bytes of a worker and seconds, by step, without what a run does once."""
    few, many = measure(steps=steps, **spec), measure(steps=4 * steps, **spec)
    difference = {name: many[name] - few[name] for name in few}
    seconds = difference["train_s"] / (3 * steps)
    return {
        "pushed_bytes": difference["pushed_bytes"] / (3 * steps * WORKERS),
        "fetched_bytes": difference["fetched_bytes"] / (3 * steps * WORKERS),
        "lo_bytes": difference["lo_bytes"] / (3 * steps * WORKERS),
        "step_s": seconds,
        "samples_per_s": WORKERS * TOUCHED / PER_SAMPLE / seconds,
    }


def main() -> None:
    """Measures, prints and keeps."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--steps", type=int, default=250, help="of the shorter run, of each worker")
    parser.add_argument("--dense-steps", type=int, default=8, help="the same of the baseline; 0 for none")
    parser.add_argument("--carrier", default="tcp")
    parser.add_argument("--out", type=Path, default=RESULTS / "row_sparse.json")
    arguments = parser.parse_args()
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, cwd=Path(__file__).parent
    ).stdout.strip()
    size: dict[str, Any] = {
        "rows": arguments.rows,
        "dim": arguments.dim,
        "carrier": arguments.carrier,
    }
    weight_bytes = TOUCHED * arguments.dim * 4
    out = arguments.out.resolve()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        sparse = per_step(arguments.steps, sparse=True, **size)
        dense = per_step(arguments.dense_steps, sparse=False, **size) if arguments.dense_steps else None
    record: dict[str, Any] = {
        **size,
        "workers": WORKERS,
        "touched_rows": TOUCHED,
        "weight_bytes": weight_bytes,
        "sparse": sparse,
        "dense": dense,
        "pushed_ratio": sparse["pushed_bytes"] / weight_bytes,
        "fetched_ratio": sparse["fetched_bytes"] / (WORKERS * weight_bytes),
        "lo_ratio": sparse["lo_bytes"] / ((1 + WORKERS) * weight_bytes),
        "speedup": sparse["samples_per_s"] / dense["samples_per_s"] if dense else None,
        "machine": describe_machine(node_environment(WORKERS + 1)),
        "commit": commit,
        "utc": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
    }
    keep(out, record)
    for name in ("pushed_ratio", "fetched_ratio", "lo_ratio", "speedup"):
        print(f"{name:14} {record[name]:.3f}" if record[name] else f"{name:14} not measured")
    print(
        f"{sparse['samples_per_s']:,.0f} samples/s", f"dense {dense['samples_per_s']:,.1f}" if dense else ""
    )


if __name__ == "__main__":
    main()
