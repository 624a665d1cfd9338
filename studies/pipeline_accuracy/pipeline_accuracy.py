"""Question: what does it cost in accuracy that a pipeline does not flush, and what does each method keep?

A network of 784-64-64-64-10 in 4 stages on the subset of Fashion-MNIST, 4 epochs of minibatches of 32, SGD with
momentum 0.9: GPipe, whose gradient is the synchronous one, beside PipeDream with weight stashing (and vertical
synchronization), PipeDream-2BW and delayed gradients. Each at the same learning rates, with the same samples in the
same order. Seeds draw the weights and the order.

    nice python studies/pipeline_accuracy/pipeline_accuracy.py  # what is missing: a few minutes in all
    nice python studies/pipeline_accuracy/pipeline_accuracy.py --most 100 # stops after so many seconds

Each run is a line of build/studies/pipeline_accuracy.jsonl; the record is record.json.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import gradstream as gs
from gradstream.machine.description import describe_machine, git_commit
from gradstream.pipeline.executor import PipelineExecutor, Stages
from gradstream.pipeline.schedule import Schedule, depths, in_flight, make_schedule
from gradstream.split.plan import SplitPlan

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))
from common import ROOT, command_line, keep, now, work_folder
from kit.pipeline_versions import StashedStages, weight_versions
from pipeline_layers import LayerStages, LocalChannel, chain_of_layers, initial_weights

SIZES, PARTS, BATCH, EPOCHS, MOMENTUM = (784, 64, 64, 64, 10), 4, 32, 4, 0.9
SEEDS, RATES = range(1, 6), (0.001, 0.003, 0.01, 0.03)
MICRO_BATCHES = {"gpipe": 4, "pipedream": 1, "pipedream-vertical": 1, "2bw": 4, "delayed": 1}


async def run_all(
    plan: SplitPlan, schedules: Sequence[Schedule], stages: Sequence[Stages], data: Any
) -> None:
    """All parts, in this process."""
    channel = LocalChannel()
    works = [
        PipelineExecutor(plan, part, stages[part], channel, data).run(each)
        for part, each in enumerate(schedules)
    ]
    await asyncio.gather(*works)


class Samples:
    """Images and labels of all micro-batches, in an order drawn from a seed."""

    def __init__(self, data: Any, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        order = torch.cat([torch.randperm(len(data["x"]), generator=generator) for _ in range(EPOCHS)])
        self.minibatches = len(order) // BATCH
        self._order, self._data = order, data

    def value(self, name: str, start: int, stop: int) -> Tensor:
        """A value of the samples [start, stop) of the order."""
        source: Tensor = self._data["x" if name == "inputs" else "y"]
        return source[self._order[start:stop]]


async def trained(method: str, lr: float, seed: int, data: Any) -> dict[str, Any]:
    """The row of a run."""
    name, count = method, MICRO_BATCHES[method]
    plan, samples = chain_of_layers(SIZES, PARTS), Samples(data, seed)
    weights = dict(enumerate(initial_weights(SIZES, PARTS, seed)))
    layers = LayerStages(SIZES, plan, weights, share=1 / count, lr=lr, momentum=MOMENTUM)
    size = BATCH // count
    versions_kept = [1] * PARTS
    if name == "gpipe":
        schedules = make_schedule(name, plan, count)
        for minibatch in range(samples.minibatches):
            start = minibatch * BATCH
            await run_all(
                plan,
                schedules,
                [layers] * PARTS,
                lambda value, m, start=start: samples.value(value, start + m * size, start + (m + 1) * size),
            )
            for stage, tensor in weights.items():
                await layers.update(stage, minibatch, tensor)
    else:
        total = samples.minibatches * count
        schedules = make_schedule(name, plan, total)
        versions = weight_versions(name, plan, schedules, micro_batches=count)
        stages = [
            StashedStages(layers, {part: weights[part]}, schedules[part], versions, count)
            for part in range(PARTS)
        ]
        await run_all(
            plan, schedules, stages, lambda value, m: samples.value(value, m * size, (m + 1) * size)
        )
        weights = {part: stages[part].stashes[part].newest for part in range(PARTS)}
        versions_kept = [stages[part].stashes[part].most for part in range(PARTS)]
    return {
        "method": method,
        "lr": lr,
        "seed": seed,
        "accuracy": accuracy(weights, data),
        "activations": layers.most_saved,
        "versions": versions_kept,
    }


def accuracy(weights: dict[int, Tensor], data: Any) -> float:
    """On the test images, in percent."""
    hidden, flat, begin = data["test_x"], torch.cat(list(weights.values())), 0
    for number, (width, units) in enumerate(pairwise(SIZES)):
        matrix = flat[begin : begin + width * units].view(units, width)
        bias = flat[begin + width * units : (begin := begin + width * units + units)]
        hidden = functional.linear(hidden, matrix, bias)
        hidden = hidden.relu() if number < len(SIZES) - 2 else hidden
    return 100 * float((hidden.argmax(1) == data["test_y"]).double().mean())


def loaded() -> dict[str, Tensor]:
    """The data set as four tensors."""
    data = gs.data.fashion_mnist()
    arrays = {"x": data.inputs, "y": data.targets, "test_x": data.test_inputs, "test_y": data.test_targets}
    tensors = {name: torch.as_tensor(array) for name, array in arrays.items()}
    return {name: tensor.flatten(1) if "x" in name else tensor for name, tensor in tensors.items()}


def expected(method: str) -> tuple[list[int], list[int]]:
    """Micro-batches of activations and versions of weights that each stage holds, by the formulas."""
    name, count = method, MICRO_BATCHES[method]
    plan = chain_of_layers(SIZES, PARTS)
    activations = list(in_flight(name, plan, count if name == "gpipe" else 1 << 30))
    versions = {
        "gpipe": [1] * PARTS,
        "pipedream": list(depths(plan)),
        "pipedream-vertical": [PARTS] * PARTS,
        "2bw": [2] * PARTS,
        "delayed": [1] * PARTS,
    }
    return activations, versions[method]


def summarised(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean and spread over seeds, by method and rate; the best rate of each; what was held, beside the formulas."""
    found: dict[str, Any] = {}
    for method in MICRO_BATCHES:
        by_rate: dict[str, Any] = {}
        for lr in RATES:
            values = [row["accuracy"] for row in rows if row["method"] == method and row["lr"] == lr]
            by_rate[str(lr)] = {
                "mean": statistics.mean(values),
                "sd": statistics.stdev(values),
                "seeds": len(values),
            }
        row = next(row for row in rows if row["method"] == method)
        activations, versions = expected(method)
        found[method] = {
            "rates": by_rate,
            "best": max(by_rate, key=lambda lr: by_rate[lr]["mean"]),
            "activations": row["activations"],
            "versions": row["versions"],
            "as the formula": (row["activations"], row["versions"]) == (activations, versions),
        }
    return found


def main() -> None:
    """Runs what is missing, and keeps the record when nothing is."""
    parser = command_line(__doc__)
    parser.add_argument(
        "--most", type=float, default=float("inf"), help="seconds after which no run is begun"
    )
    most_s, begun_s = parser.parse_args().most, time.monotonic()
    torch.set_num_threads(1)
    path, data = work_folder() / "pipeline_accuracy.jsonl", loaded()
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done = {(row["method"], row["lr"], row["seed"]) for row in rows}
    keys = [
        (m, lr, seed) for seed in SEEDS for lr in RATES for m in MICRO_BATCHES if (m, lr, seed) not in done
    ]
    for number, (method, lr, seed) in enumerate(keys):
        if time.monotonic() - begun_s > most_s:
            print(f"{len(keys) - number} runs are left")
            return
        rows.append(asyncio.run(trained(method, lr, seed, data)))
        with path.open("a") as file:
            file.write(json.dumps(rows[-1]) + "\n")
    found = summarised(rows)
    for method, row in found.items():
        rates = "  ".join(f"{lr}: {r['mean']:.2f} ± {r['sd']:.2f}" for lr, r in row["rates"].items())
        print(f"{method:<20} {rates}  held {row['activations']} {row['versions']} {row['as the formula']}")
    record = {
        "question": (__doc__ or "").splitlines()[0],
        "date": now(),
        "commit": git_commit(ROOT),
        **describe_machine({}),
        "sizes": SIZES,
        "parts": PARTS,
        "batch": BATCH,
        "epochs": EPOCHS,
        "momentum": MOMENTUM,
        "found": found,
    }
    keep(Path(__file__).with_name("record.json"), record)


if __name__ == "__main__":
    main()
