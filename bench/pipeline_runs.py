"""Question: how close is a run on two processes to what its slowest part and its pipeline's bubble allow?

Two parts of one thread each, a module of 8 layers of 1,024 units cut in the middle, minibatches of `--samples` in 8
micro-batches, by `gs.train`. A minibatch cannot take less than u + c (M + K - 1) / M where the pipeline flushes, and
u + c where it does not: c is the time that the slower part computes for a minibatch, as the run reports it, and u that
of its update, which comes between two minibatches. By turns, two processes train the same stages by the schedules of
torch.distributed.pipelining over gloo, with torch.optim.SGD. The median time of its `step` is u: one pass over the
memory of gradients and parameters, without a check.

    python bench/pipeline_runs.py [--steps 120] [--repeats 3] [--samples 256] [--only 1f1b 2bw]

Prints, and keeps in bench/results/pipeline-runs.json (of 1,024 samples in pipeline-runs-1024.json), milliseconds of a
minibatch, what is allowed divided by it, the same without u, and torch's divided by it (those without a flush beside
torch's 1F1B, zero-bubble beside it too).
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

import gradstream as gs
from common import RESULTS, ROOT, command_line, keep_part, kept, now
from gradstream.job.files import load_job
from gradstream.machine.description import describe_machine, git_commit
from gradstream.pipeline.schedule import FLUSHING

WIDTH, LAYERS, SAMPLES, PARTS, SKIPPED, LR = 1024, 8, 256, 2, 10, 0.001
ROWS = 8192
MICRO_BATCHES = {"gpipe": 8, "1f1b": 8, "interleaved": 8, "zero-bubble": 8, "pipedream": 1, "2bw": 8}
TORCHS: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
}


def build() -> nn.Module:
    """The module."""
    return nn.Sequential(*(one for _ in range(LAYERS) for one in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(ROWS, WIDTH, generator=generator)
    return inputs, torch.randint(WIDTH, (ROWS,), generator=generator)


def job() -> gs.Job:
    """What all runs have in common."""
    inputs, targets = samples()
    return gs.Job(
        gs.from_torch(build, nn.functional.cross_entropy),
        gs.from_arrays(inputs.numpy(), targets.numpy()),
        strategy="allreduce",
        optimizer=gs.optim.SGD(lr=LR),
        workers=1,
        split=PARTS,
        batch_size=SAMPLES,
    )


def measured(pipeline: Any, steps: int, size: int) -> dict[str, float]:
    """The figures of one run."""
    with tempfile.TemporaryDirectory() as folder:
        run = gs.train(
            load_job(f"{__file__}:job"),
            pipeline=pipeline,
            micro_batches=MICRO_BATCHES[pipeline],
            steps=steps,
            batch_size=size,
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
    passes_s = slowest_s * (1 + bubble if pipeline in FLUSHING else 1)
    return {"minibatch_s": minibatch_s, "slowest_s": slowest_s, "passes_s": passes_s}


def torch_measured(name: str, steps: int, size: int) -> tuple[float, float]:
    """(seconds of a minibatch, of an update) of a pair of processes that run torch's schedule."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            __file__,
            "--steps",
            str(steps),
            "--samples",
            str(size),
            "--torch",
            name,
            folder,
        ]
        pair = [
            subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True)
            for rank in range(PARTS)
        ]
        outputs = [process.communicate(timeout=300)[0] for process in pair]
        minibatch_s, update_s = map(float, outputs[0].split()[-2:])
        return minibatch_s, update_s


def torch_part(name: str, folder: str, rank: int, steps: int, size: int) -> tuple[float, float]:
    """One process of the pair. Returns its seconds of a minibatch, and of an update."""
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(f"{folder}/store", PARTS)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=PARTS)
    torch.manual_seed(0)
    layers, (inputs, targets) = [*build().children()], samples()
    count, rounds = MICRO_BATCHES[name], 1 + (name == "interleaved")
    example = torch.empty(size // count, WIDTH)
    each = len(layers) // (PARTS * rounds)
    numbers = range(rank, PARTS * rounds, PARTS)
    modules = [nn.Sequential(*layers[number * each : (number + 1) * each]) for number in numbers]
    stages = [
        PipelineStage(module, number, PARTS * rounds, torch.device("cpu"), input_args=(example,))
        for number, module in zip(numbers, modules, strict=True)
    ]
    schedule = TORCHS[name](stages if rounds > 1 else stages[0], count, loss_fn=nn.functional.cross_entropy)
    optimizer = torch.optim.SGD([one for module in modules for one in module.parameters()], lr=LR)
    times, updates = [], []
    for step in range(steps):
        begin = step * size % ROWS
        rows = slice(begin, begin + size)
        optimizer.zero_grad()
        if rank:
            losses: list[torch.Tensor] = []
            schedule.step(target=targets[rows], losses=losses)
            torch.stack(losses).mean().item()
        else:
            schedule.step(inputs[rows])
        begun = time.perf_counter()
        optimizer.step()
        times.append(time.perf_counter())
        updates.append(times[-1] - begun)
    torch.distributed.destroy_process_group()
    times = times[SKIPPED:]
    return (times[-1] - times[0]) / (len(times) - 1), statistics.median(updates[SKIPPED:])


def main() -> None:
    """Measures each pipeline, in turn."""
    parser = command_line(__doc__)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--samples", type=int, default=SAMPLES, help="of a minibatch")
    parser.add_argument("--only", nargs="+", choices=MICRO_BATCHES, default=[*MICRO_BATCHES])
    parser.add_argument("--torch", nargs=3, metavar=("NAME", "FOLDER", "RANK"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.torch:
        name, folder, rank = asked.torch
        print(*torch_part(name, folder, int(rank), asked.steps, asked.samples))
        return
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in asked.only}
    for _ in range(asked.repeats):
        for name in asked.only:
            row = measured(name, asked.steps, asked.samples)
            torch_s, update_s = torch_measured(name if name in TORCHS else "1f1b", asked.steps, asked.samples)
            ratios = {
                "share": (row["passes_s"] + update_s) / row["minibatch_s"],
                "share_of_passes": row["passes_s"] / row["minibatch_s"],
                "torch_ratio": torch_s / row["minibatch_s"],
            }
            rows[name].append({**row, "update_s": update_s, "torch_s": torch_s, **ratios})
    found = {
        name: {key: statistics.median(row[key] for row in mine) for key in mine[0]}
        for name, mine in rows.items()
    }
    for name, row in found.items():
        print(
            f"{name:<12} {1e3 * row['minibatch_s']:6.1f} ms a minibatch, {row['share']:.2f} of what is allowed "
            f"({row['share_of_passes']:.2f} without the update's {1e3 * row['update_s']:.1f} ms); torch "
            f"{1e3 * row['torch_s']:6.1f} ms, {row['torch_ratio']:.2f} times ours"
        )
    path, commit, part = RESULTS / "pipeline-runs.json", git_commit(ROOT), f"{asked.samples} samples"
    before = kept(path).get(part, {"commit": ""})
    same_code = str(before["commit"]).strip("+") == str(commit).strip("+")  # "+": the record itself differs
    if same_code and before["steps"] == asked.steps and before["repeats"] == asked.repeats:
        found = {**before["found"], **found}  # by another call with --only
    record = {
        "question": (__doc__ or "").splitlines()[0],
        "date": now(),
        "commit": commit,
        **describe_machine({}),
        "width": WIDTH,
        "layers": LAYERS,
        "samples": asked.samples,
        "steps": asked.steps,
        "repeats": asked.repeats,
        "found": {name: found[name] for name in MICRO_BATCHES if name in found},
    }
    keep_part(path, part, record)


if __name__ == "__main__":
    main()
