"""Question: how close is a run on two processes to what its slowest part and its pipeline's bubble allow?

Two parts of one thread each, a module of 8 layers of 1,024 units cut in the middle, minibatches of 256 samples in 8
micro-batches, by `gs.train`. A minibatch cannot take less than c (M + K - 1) / M where the pipeline flushes, and c
where it does not: c is the time that the slower part computes for a minibatch, as the run reports it.

    python bench/pipeline_runs.py [--steps 120] [--repeats 3]

Prints, and keeps in bench/results/pipeline-runs.json, milliseconds of a minibatch, and what is allowed divided by it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import nn

import gradstream as gs
from gradstream.job.files import load_job
from gradstream.pipeline.schedule import FLUSHING
from gradstream.run.local.machine import describe_machine, git_commit

ROOT = Path(__file__).resolve().parents[1]
WIDTH, LAYERS, SAMPLES, PARTS, SKIPPED = 1024, 8, 256, 2, 10
MICRO_BATCHES = {"gpipe": 8, "1f1b": 8, "interleaved": 8, "zero-bubble": 8, "pipedream": 1, "2bw": 8}


def build() -> nn.Module:
    """The module."""
    return nn.Sequential(*(one for _ in range(LAYERS) for one in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))


def job() -> gs.Job:
    """What all runs have in common."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(8 * SAMPLES, WIDTH, generator=generator)
    targets = torch.randint(WIDTH, (8 * SAMPLES,), generator=generator)
    return gs.Job(
        gs.from_torch(build, nn.functional.cross_entropy),
        gs.from_arrays(inputs.numpy(), targets.numpy()),
        strategy="allreduce",
        optimizer=gs.optim.SGD(lr=0.001),
        workers=1,
        split=PARTS,
        batch_size=SAMPLES,
    )


def measured(pipeline: Any, steps: int) -> dict[str, float]:
    """The figures of one run."""
    with tempfile.TemporaryDirectory() as folder:
        run = gs.train(
            load_job(f"{__file__}:job"),
            pipeline=pipeline,
            micro_batches=MICRO_BATCHES[pipeline],
            steps=steps,
            run_dir=Path(folder) / "run",
        )
        events = list(run.events)
    times = [event["time_s"] for event in events if event["event"] == "step"][SKIPPED:]
    minibatch_s = (times[-1] - times[0]) / (len(times) - 1)
    compute_s, minibatches = Counter[int](), Counter[int]()
    for event in (event for event in events if event["event"] == "part"):
        compute_s[event["part"]] += event["compute_s"]
        minibatches[event["part"]] += event["minibatches"]
    slowest_s = max(compute_s[part] / minibatches[part] for part in range(PARTS))
    rounds, count = 1 + (pipeline == "interleaved"), MICRO_BATCHES[pipeline]
    bubble = (PARTS - 1) / (rounds * count) / (3 if pipeline == "zero-bubble" else 1)
    allowed_s = slowest_s * (1 + bubble if pipeline in FLUSHING else 1)
    return {"minibatch_s": minibatch_s, "slowest_s": slowest_s, "share": allowed_s / minibatch_s}


def main() -> None:
    """Measures each pipeline, in turn."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--repeats", type=int, default=3)
    asked = parser.parse_args()
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in MICRO_BATCHES}
    for _ in range(asked.repeats):
        for name in MICRO_BATCHES:
            rows[name].append(measured(name, asked.steps))
    found = {
        name: {key: statistics.median(row[key] for row in mine) for key in mine[0]}
        for name, mine in rows.items()
    }
    for name, row in found.items():
        print(
            f"{name:<12} {1e3 * row['minibatch_s']:6.1f} ms a minibatch, {row['share']:.2f} of what is allowed"
        )
    record = {
        "question": (__doc__ or "").splitlines()[0],
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": git_commit(ROOT),
        **describe_machine({}),
        "width": WIDTH,
        "layers": LAYERS,
        "samples": SAMPLES,
        "steps": asked.steps,
        "repeats": asked.repeats,
        "found": found,
    }
    (ROOT / "bench" / "results" / "pipeline-runs.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
