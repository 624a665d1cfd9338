"""Question: what does `noise_scale=True` cost? It squares gradients in one of 16 rounds.

The same job in real processes, without and with it, by turns. Two figures for each strategy:

    on_over_off   median step with it, as the mean of its 16 positions, divided by that without; of all pairs
    excess        what the measured step and the next one take longer than the others of their run, over 16 steps

In runs without it the excess is what chance makes of it: the control.

    python studies/noise_scale_cost/noise_scale_cost.py  # 8,400,000 float32; writes record.json
    python studies/noise_scale_cost/noise_scale_cost.py --elems 1000000 --steps 96 --out ""
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

import gradstream as gs
from gradstream.job.files import load_job
from gradstream.telemetry.meters import EVERY

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))
from common import command_line, origin

WIDTH, CLASSES, SAMPLES = 1024, 16, 4096
ELEMS = "NOISE_SCALE_COST_ELEMS"


def job() -> gs.Job:
    """The job of every node; its size is in their environment, since nodes read this file again."""
    hidden = max(1, round(int(os.environ[ELEMS]) / (WIDTH + CLASSES + 1)))
    rng = np.random.default_rng(0)
    inputs = rng.standard_normal((SAMPLES, WIDTH), dtype=np.float32)
    data = gs.from_arrays(inputs, rng.integers(0, CLASSES, SAMPLES))

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, hidden), nn.ReLU(), nn.Linear(hidden, CLASSES))

    model = gs.from_torch(build, nn.functional.cross_entropy)
    return gs.Job(model, data, optimizer=gs.optim.SGD(lr=1e-3), workers=2, batch_size=64, epochs=1)


def positions(strategy: str, steps: int, *, on: bool) -> list[float]:
    """Median seconds of a step of the first worker, by its position in a period; the first is measured."""
    chosen = load_job(f"{Path(__file__).resolve()}:job")
    with tempfile.TemporaryDirectory() as folder:
        run = gs.train(
            chosen,
            strategy=strategy,
            noise_scale=on,
            steps=steps,
            run_dir=Path(folder) / "run",
            checkpoint_every=None,
        )
    ends = [one["time_s"] for one in run.history if one["rank"] == 0]
    assert len(ends) == steps and (run.summary["noise_scale_missing"] or run.summary["noise_scale"] or not on)
    durations = [after - before for before, after in itertools.pairwise(ends)][EVERY - 1 :]
    return [statistics.median(durations[first::EVERY]) for first in range(EVERY)]


def excess(found: list[float]) -> float:
    """What the first two positions take longer, as a share of all."""
    other = statistics.median(found[2:])
    return (found[0] + found[1] - 2 * other) / (EVERY * other)


def measured(strategy: str, steps: int, pairs: int) -> dict[str, Any]:
    """Figures of a strategy."""
    runs: dict[bool, list[list[float]]] = {False: [], True: []}
    for _ in range(pairs):
        for on, found in runs.items():
            found.append(positions(strategy, steps, on=on))
    off, on = ([statistics.mean(one) for one in runs[state]] for state in (False, True))
    ratios = [b / a for a, b in zip(off, on, strict=True)]
    return {
        "step_ms": round(1e3 * statistics.median(off), 2),
        "on_over_off": [round(one, 4) for one in sorted(ratios)],
        "excess": round(statistics.median(map(excess, runs[True])), 5),
        "excess_of_control": round(statistics.median(map(excess, runs[False])), 5),
    }


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--elems", type=int, default=8_400_000)
    parser.add_argument("--steps", type=int, default=168, help="of each run")
    parser.add_argument("--pairs", type=int, default=3, help="of runs without and with it")
    parser.add_argument("--out", default=str(Path(__file__).with_name("record.json")))
    options = parser.parse_args()
    os.environ[ELEMS] = str(options.elems)
    found = {
        "elems": options.elems,
        "steps": options.steps,
        **{name: measured(name, options.steps, options.pairs) for name in ("synchronous", "allreduce")},
        **origin(),
    }
    text = json.dumps(found, indent=1)
    print(text)
    if options.out:
        Path(options.out).write_text(text + "\n")


if __name__ == "__main__":
    main()
