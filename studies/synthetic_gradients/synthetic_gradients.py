"""Question: what do predicted gradients cost in accuracy, and how much less do the parts of a model wait?

Three convolutions and a dense layer, each a part of its own, on the subset of Fashion-MNIST: minibatches of 50, Adam.
Backpropagation beside synthetic gradients with and without labels, and with synthetic inputs, at equal samples. Seeds
draw the weights, those of predictors, and the order. The waiting of each part is that of equal parts on virtual time.

    nice python studies/synthetic_gradients/synthetic_gradients.py  # what is missing: twenty minutes of a core in all
    nice python studies/synthetic_gradients/synthetic_gradients.py --most 600 # stops after so many seconds

Each run is a line of build/studies/synthetic_gradients.jsonl; the record is record.json.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

import gradstream as gs
from gradstream.machine.description import describe_machine, git_commit
from gradstream.pipeline import SyntheticGradients

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))
from common import ROOT, command_line, keep, now, work_folder

PICTURE = Path(__file__).with_name("pictures.png")
PARTS, BATCH, EPOCHS, HIDDEN = 4, 50, 6, 16
SEEDS, RATES = range(1, 6), (0.0003, 0.001, 0.003)
METHODS: dict[str, dict[str, Any]] = {
    "backpropagation": {},
    "labels": {"split": PARTS, "pipeline": SyntheticGradients(hidden=HIDDEN)},
    "no labels": {"split": PARTS, "pipeline": SyntheticGradients(labels=False, hidden=HIDDEN)},
    "labels, inputs": {"split": PARTS, "pipeline": SyntheticGradients(hidden=HIDDEN, inputs=True)},
}


def build() -> nn.Module:
    """(n, 1, 28, 28) to scores (n, 10)."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 5, stride=2, padding=2),
        nn.ReLU(),
        nn.Conv2d(8, 16, 5, stride=2, padding=2),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 7 * 7, 10),
    )


def trained(method: str, lr: float, seed: int) -> dict[str, Any]:
    """The row of a run: accuracy after each epoch, in percent, and the filters of the first layer."""
    run = gs.simulate(
        gs.from_torch(build, nn.functional.cross_entropy),
        gs.data.fashion_mnist(),
        strategy="allreduce",
        optimizer=gs.optim.Adam(lr=lr),
        workers=1,
        **METHODS[method],
        batch_size=BATCH,
        epochs=EPOCHS,
        evaluate_every="epoch",
        seed=seed,
    )
    by_epoch = {event["epoch"]: round(100 * event["accuracy"], 2) for event in run.evaluations}
    return {
        "method": method,
        "lr": lr,
        "seed": seed,
        "accuracy": [by_epoch[epoch] for epoch in sorted(by_epoch)],
        "filters": np.round(run.parameters["0.weight"][:, 0], 3).tolist() if seed == SEEDS[0] else None,
    }


# ---- waiting ----------------------------------------------------------------------------------------------


SCHEDULES: dict[str, dict[str, Any]] = {
    "gpipe, M = 1": {},
    "gpipe, M = 8": {"micro_batches": 8},
    "labels": METHODS["labels"],
    "labels, inputs": METHODS["labels, inputs"],
}
FORWARD_S, LATENCIES, STEPS = 8e-3, (0.0, 1.0), 40


def equal_layers() -> nn.Module:
    """As many layers as parts."""
    return nn.Sequential(*(nn.Linear(32, 32) for _ in range(PARTS)))


def waiting(schedule: str, latency: float) -> dict[str, Any]:
    """Equal parts: a backward takes two forwards, to predict half of one and to learn one and a half.

    Args:
        schedule: one of SCHEDULES.
        latency: of each message, in forwards.

    Returns:
        "wait": share of each part's time, in percent. "speed": minibatches in the time that one process takes for one.
    """
    sample_s, rng = FORWARD_S / 8, np.random.default_rng(0)
    x, y = rng.standard_normal((8 * STEPS, 32), np.float32), rng.integers(0, 32, 8 * STEPS)
    costs = {"forward": 1.0, "backward": 2.0, "predict": 0.5, "learn": 1.5}
    run = gs.simulate(
        gs.from_torch(equal_layers, nn.functional.cross_entropy),
        gs.from_arrays(x, y),
        strategy="allreduce",
        workers=1,
        batch_size=8,
        steps=STEPS,
        config=gs.sim.SimulationConfig(
            costs={kind: gs.sim.Cost(per_sample_s=times * sample_s) for kind, times in costs.items()},
            network=gs.sim.Network(
                bandwidth_bytes_s=math.inf, link=gs.sim.Link(latency_s=latency * FORWARD_S)
            ),
        ),
        **{"split": PARTS, **SCHEDULES[schedule]},
    )
    compute_s, wait_s = defaultdict[int, float](float), defaultdict[int, float](float)
    for event in run.events:
        if event["event"] == "part":
            compute_s[event["part"]] += event["compute_s"]
            wait_s[event["part"]] += event["wait_s"]
    whole_s = [compute_s[part] + wait_s[part] for part in range(PARTS)]
    return {
        "schedule": schedule,
        "latency": latency,
        "wait": [round(100 * wait_s[part] / whole_s[part], 1) for part in range(PARTS)],
        "speed": round(STEPS * PARTS * 3 * FORWARD_S / max(whole_s), 2),
    }


# ---- the record -------------------------------------------------------------------------------------------


def summarised(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean and spread over seeds by method and rate, and the differences from backpropagation, seed by seed."""
    runs = {(row["method"], row["lr"], row["seed"]): row["accuracy"] for row in rows}
    found: dict[str, Any] = {}
    for method in METHODS:
        for lr in RATES:
            seeds = [seed for seed in SEEDS if (method, lr, seed) in runs]
            if len(seeds) < 2:
                continue
            curves = [runs[method, lr, seed] for seed in seeds]
            one = {
                "seeds": len(seeds),
                "curve": [round(statistics.mean(column), 2) for column in zip(*curves, strict=True)],
            }
            one["sd"] = round(statistics.stdev(curve[-1] for curve in curves), 2)
            pairs = [
                (runs[method, lr, s][-1], runs["backpropagation", lr, s][-1])
                for s in seeds
                if ("backpropagation", lr, s) in runs
            ]
            if method != "backpropagation" and len(pairs) > 1:
                less = [other - own for own, other in pairs]
                one["below"] = [round(statistics.mean(less), 2), round(statistics.stdev(less), 2)]
            found.setdefault(method, {})[str(lr)] = one
    return found


def draw(rows: list[dict[str, Any]], found: dict[str, Any], path: Path) -> None:
    """The filters of each method, one row of them each, at its best rate and the first seed."""
    scale, gap = 9, 6
    by_run = {(row["method"], row["lr"]): row["filters"] for row in rows if row["filters"]}
    lines = []
    for method, by_rate in found.items():
        best = max(by_rate, key=lambda rate: by_rate[rate]["curve"][-1])
        tiles = np.array(by_run[method, float(best)])
        reach = np.abs(tiles).max(axis=(1, 2), keepdims=True)
        grey = (127.5 * (1 + tiles / reach)).astype(np.uint8).repeat(scale, 1).repeat(scale, 2)
        lines.append(np.concatenate([np.pad(tile, gap // 2, constant_values=255) for tile in grey], axis=1))
    Image.fromarray(np.concatenate(lines)).save(path, optimize=True)


def main() -> None:
    """Runs what is missing, and keeps the record."""
    parser = command_line(__doc__)
    parser.add_argument("--most", type=float, default=math.inf, help="seconds after which no run is begun")
    most_s, begun_s = parser.parse_args().most, time.monotonic()
    torch.set_num_threads(1)
    path = work_folder() / "synthetic_gradients.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done = {(row["method"], row["lr"], row["seed"]) for row in rows}
    for key in [(method, lr, seed) for lr in RATES for seed in SEEDS for method in METHODS]:
        if key not in done and time.monotonic() - begun_s < most_s:
            rows.append(trained(*key))
            with path.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
            print(*key, rows[-1]["accuracy"], flush=True)
    left = len(RATES) * len(SEEDS) * len(METHODS) - len(rows)
    if left:
        sys.exit(f"{left} runs are left, so the record stays as it is")
    record = {
        "question": (__doc__ or "").splitlines()[0],
        "date": now(),
        "commit": git_commit(ROOT),
        **describe_machine({}),
        "parts": PARTS,
        "batch": BATCH,
        "epochs": EPOCHS,
        "hidden": HIDDEN,
        "complete": True,
        "found": summarised(rows),
        "waiting": [waiting(schedule, latency) for schedule in SCHEDULES for latency in LATENCIES],
    }
    keep(Path(__file__).with_name("record.json"), record)
    draw(rows, record["found"], PICTURE)


if __name__ == "__main__":
    main()
