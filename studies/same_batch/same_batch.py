"""Question: is a batch of 1024 better as 1024 x 1, 16 x 64 or 1 x 1024, with few weights and with many?

Two networks on the subset of Fashion-MNIST: convolutions of 5,994 parameters, and a perceptron of 1,863,690. Both have
the same joined batch in each row, so the same accuracy but for rounding; the time differs.

* real: 1, 2 and 4 workers as processes on this machine, one thread each;
* virtual: 1 to 1024 workers, one on each machine. A gradient takes base + samples x per_sample seconds, fitted to
  gradients of 1 and of 256 samples on one idle core here. 10 Gbit/s, 50 us. Accuracy of 16 workers by
  the same arithmetic, times without any;
* scaling: 32 samples for each of 1 to 256 workers: samples a second, divided by those of one worker.

    python studies/same_batch/same_batch.py --real  # minutes of a quiet machine
    python studies/same_batch/same_batch.py --accuracy  # of 16 workers on virtual time
    python studies/same_batch/same_batch.py --virtual  # an hour, 12 GB; two at once may have --only few, --only many
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import gradstream as gs
from gradstream.job.files import load_job
from gradstream.strategies.allreduce import AllReduce

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))
sys.path.append(str(Path(__file__).resolve().parents[1] / "scaling"))
from common import command_line, kept, origin
from scaling import Scheme, step_s

RESULT = Path(__file__).with_name("record.json")
BATCH, EPOCHS, EACH = 1024, 20, 32
PARTS, WORKERS = (1, 16, 64, 256, 1024), (1, 32, 40, 64, 120, 128, 256)
NETWORK = gs.sim.Network(bandwidth_bytes_s=1.25e9, link=gs.sim.Link(latency_s=50e-6))


def few() -> nn.Module:
    """5,994 parameters."""
    convolutions = nn.Conv2d(1, 8, 5, stride=2), nn.ReLU(), nn.Conv2d(8, 16, 5, stride=2), nn.ReLU()
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(256, 10))


def many() -> nn.Module:
    """1,863,690 parameters."""
    hidden = nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU()
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(1024, 10))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], float]] = {"few": (few, 0.1), "many": (many, 0.03)}
"""By name, the network and its learning rate, with momentum 0.9; not tuned further."""

SCHEMES: dict[str, dict[str, Scheme]] = {
    "few": {"synchronous": Scheme(gs.Synchronous(), servers=1)},
    "many": {"synchronous": Scheme(gs.Synchronous(), servers=2)},
}
for schemes in SCHEMES.values():
    schemes["allreduce"] = Scheme(AllReduce(algorithm="halving-doubling"))
"""By network. A server for each chunk of a million parameters."""


def job() -> gs.Job:
    """The real run, from the environment: name of the network, and number of workers."""
    return gs.Job(**settings(os.environ["SAME_NETWORK"], int(os.environ["SAME_WORKERS"])))


def settings(name: str, workers: int) -> dict[str, Any]:
    """Of a run, whose joined batch has 1024 samples."""
    make, lr = NETWORKS[name]
    return {
        "model": gs.from_torch(make, nn.functional.cross_entropy),
        "data": gs.data.fashion_mnist(),
        "strategy": "allreduce",
        "optimizer": gs.optim.SGD(lr=lr, momentum=0.9),
        "workers": workers,
        "batch_size": BATCH // workers,
        "epochs": EPOCHS,
        "seed": 1,
    }


def real() -> dict[str, Any]:
    """Milliseconds of a step, and test accuracy, by network and number of workers."""
    found: dict[str, Any] = {}
    for name in NETWORKS:
        for workers in (1, 2, 4):
            os.environ.update(SAME_NETWORK=name, SAME_WORKERS=str(workers))
            with tempfile.TemporaryDirectory() as run_dir:
                run = gs.train(load_job(f"{__file__}:job"), run_dir=run_dir)
            steps = run.summary["steps"] // workers
            row = {
                "step_s": run.summary["train_s"] / steps,
                "accuracy": run.evaluate(gs.data.fashion_mnist()).accuracy,
            }
            found.setdefault(name, {})[str(workers)] = row
            print(name, workers, row, flush=True)
    return found


def cost_of(name: str) -> gs.sim.Cost:
    """Of a gradient here, on one core."""
    torch.set_num_threads(1)
    network, batch = NETWORKS[name][0](), gs.data.fashion_mnist().batch(np.arange(256))
    inputs, targets = torch.as_tensor(batch.inputs), torch.as_tensor(batch.targets)

    def seconds(samples: int, times: int) -> float:
        took = []
        for _ in range(times):
            begun = time.perf_counter()
            network.zero_grad()
            nn.functional.cross_entropy(network(inputs[:samples]), targets[:samples]).backward()
            took.append(time.perf_counter() - begun)
        return statistics.median(took)

    one_s, all_s = seconds(1, 200), seconds(256, 20)
    per_sample_s = (all_s - one_s) / 255
    return gs.sim.Cost(base_s=max(0.0, one_s - per_sample_s), per_sample_s=per_sample_s)


def virtual(names: Sequence[str], found: dict[str, Any], keep: Callable[[dict[str, Any]], None]) -> None:
    """Times on virtual machines: of the same batch in more parts, and of more workers.

    Args:
        names: of the networks.
        found: what an earlier run has found; it is completed.
        keep: takes it after each simulation.
    """
    for name, (make, _) in ((name, NETWORKS[name]) for name in names):
        sizes = [sum(p.numel() for p in layer.parameters()) for layer in make().children()][::-1]
        layers = [elems for elems in sizes if elems]
        if name not in found:
            cost = cost_of(name)
            found[name] = {"base_s": cost.base_s, "per_sample_s": cost.per_sample_s}
        row = found[name]
        cost = gs.sim.Cost(base_s=row["base_s"], per_sample_s=row["per_sample_s"])
        where = gs.sim.SimulationConfig(costs={"gradient": cost}, network=NETWORK, shape_only=True)
        for title, scheme in SCHEMES[name].items():
            times = row.setdefault(title, {"parts_s": {}, "each_s": {}})
            parts = [(workers, BATCH // workers, "parts_s") for workers in PARTS]
            for workers, batch, what in sorted(parts + [(workers, EACH, "each_s") for workers in WORKERS]):
                if str(workers) not in times[what]:
                    times[what][str(workers)] = step_s(layers, scheme, workers, batch=batch, where=where)
                    print(name, title, what, workers, times[what][str(workers)], flush=True)
                    keep(found)


def accuracies() -> dict[str, Any]:
    """Test accuracy of 16 workers on virtual time."""
    found: dict[str, Any] = {}
    for name, workers in (("few", 16), ("many", 16)):
        run = gs.simulate(**settings(name, workers))
        found.setdefault(name, {})[str(workers)] = run.evaluate(gs.data.fashion_mnist()).accuracy
        print(name, workers, found[name], flush=True)
    return found


def main() -> None:
    parser = command_line(__doc__)
    for name in ("real", "virtual", "accuracy"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--only", choices=NETWORKS, help="simulate one network")
    given = parser.parse_args()

    def keep(part: str, found: dict[str, Any]) -> None:
        record = kept(RESULT)
        record[part] = {**origin(), "networks": record.get(part, {}).get("networks", {}) | found}
        (new := RESULT.with_suffix(f".{os.getpid()}")).write_text(json.dumps(record, indent=1) + "\n")
        new.rename(RESULT)  # another process may read it

    if given.real:
        keep("real", real())
    if given.accuracy:
        keep("accuracy", accuracies())
    if given.virtual:
        record = kept(RESULT)
        names = [given.only] if given.only else list(NETWORKS)
        earlier = record.get("virtual", {}).get("networks", {})
        virtual(names, {name: earlier[name] for name in names if name in earlier}, partial(keep, "virtual"))


if __name__ == "__main__":
    main()
