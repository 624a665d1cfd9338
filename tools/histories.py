"""What every strategy did on virtual time, as hashes: kept before a change of structure, compared after it.

    python tools/histories.py --into tools/histories.json     # keeps them
    python tools/histories.py                                 # compares; status 1 where one differs

Of each run three hashes: of the final parameters; of the numbers in its events in their order, so of every
time, count and size; of the events as they are written. New names of events change the third alone.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import gradstream as gs
from gradstream.runtime.simulation import Exponential
from gradstream.runtime.storage import MemoryStorage

KEPT = Path(__file__).with_suffix(".json")
FEATURES, SAMPLES = 1500, 96


def outputs(parameters: Any, inputs: Any) -> Any:
    """X w."""
    return inputs @ parameters["w"]


def gradients(parameters: Any, inputs: Any, targets: Any) -> tuple[float, dict[str, Any]]:
    """Of Σ (X w - y)² / 2, summed by numpy in one order."""
    error = np.asarray(inputs) @ parameters["w"] - np.asarray(targets)
    return float(error @ error / 2), {"w": np.asarray(inputs).T @ error}


def error(outputs: Any, targets: Any) -> float:
    """Mean absolute error."""
    return float(np.mean(np.abs(np.asarray(outputs) - np.asarray(targets))))


def job(**options: Any) -> dict[str, Any]:
    """Linear regression on whole numbers: small, and of the same bits on every machine."""
    rng = np.random.default_rng(3)
    x = np.rint(np.clip(rng.standard_normal((SAMPLES, FEATURES)), -2, 2))
    y = np.rint(rng.standard_normal(SAMPLES))
    model = gs.from_functions(
        init=lambda seed: {"w": np.zeros(FEATURES)}, outputs=outputs, gradients=gradients
    )
    data = gs.from_arrays(x, y, test_inputs=x[:32], test_targets=y[:32])
    return {
        "model": model,
        "data": data,
        "batch_size": 4,
        "epochs": 2,
        "seed": 5,
        "metrics": {"error": error},
        **options,
    }


STRATEGIES: dict[str, gs.Strategy] = {
    "synchronous": gs.Synchronous(),
    "synchronous-backup": gs.Synchronous(backup=1),
    "downpour": gs.Downpour(),
    "downpour-warm": gs.Downpour(warm_start=4, waves=2, wave_every=3, finish_alone=3),
    "downpour-5-3": gs.Downpour(push_every=5, fetch_every=3, overlap=False),
    "softsync": gs.Softsync(splits=2),
    "staleness-aware": gs.strategies.StalenessAware(),
    "dc-asgd": gs.strategies.DCASGD(),
    "asysg": gs.strategies.AsySG(gradients=2),
    "ssp": gs.SSP(bound=2),
    "elastic": gs.ElasticAveraging(every=3),
    "eamsgd": gs.strategies.EAMSGD(every=3),
    "averaging": gs.ParameterAveraging(every=4),
    "diloco": gs.DiLoCo(every=4),
    "local-sgd": gs.LocalSGD(every=4),
    "hogwild": gs.Hogwild(),
    "allreduce": gs.AllReduce(),
    "allreduce-ring": gs.AllReduce(algorithm="ring"),
    "allreduce-tree": gs.AllReduce(algorithm="complete-tree"),
    "allreduce-butterfly": gs.AllReduce(algorithm="butterfly"),
}
WORLDS = {
    "even": gs.sim.SimulationConfig(
        costs={"gradient": gs.sim.Cost(base_s=0.01), "apply": gs.sim.Cost(base_s=1e-3)}
    ),
    "uneven": gs.sim.SimulationConfig(
        costs={"gradient": gs.sim.Cost(base_s=0.01, jitter=Exponential()), "apply": gs.sim.Cost(base_s=1e-3)},
        network=gs.sim.Network(link=gs.sim.Link(latency_s=1e-3, jitter_s=1e-3), bandwidth_bytes_s=1e7),
    ),
}


def runs() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Name of a run, its job and what `simulate` is told besides."""
    for name, strategy in STRATEGIES.items():
        serves = isinstance(strategy, gs.strategies.ServerStrategy)
        common = {"strategy": strategy, "workers": 3, "optimizer": gs.optim.SGD(lr=2**-12)}
        if serves:
            common["servers"] = 2
        for world_name, config in WORLDS.items():
            evaluation = {"evaluate_every": 6} if world_name == "uneven" else {}
            yield f"{name}, {world_name}", job(**common, **evaluation), {"config": config}
        if serves:
            rule = gs.optim.Adagrad(lr=2**-8) if name in ("synchronous", "downpour") else common["optimizer"]
            kept = job(**{**common, "optimizer": rule}, checkpoint_every=9, clip_norm=50.0)
            yield f"{name}, checkpoints", kept, {"config": WORLDS["uneven"], "storage": MemoryStorage()}
        if strategy.survives_worker_loss:
            yield f"{name}, a death", job(**common), {"config": WORLDS["uneven"], "script": killed}


async def killed(cluster: Any) -> None:
    """Worker 1 dies in the middle of the first epoch."""
    await cluster.virtual.runtime("director").sleep(0.1)
    cluster.kill("worker-1")


def numbers(value: Any) -> Iterator[float]:
    """All numbers of a value, in its order."""
    if isinstance(value, dict):
        for entry in value.values():
            yield from numbers(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from numbers(entry)
    elif isinstance(value, int | float):
        yield value


def hashes(run: gs.Run) -> dict[str, str]:
    """See the module."""
    vector = hashlib.sha256()
    for name in sorted(run.parameters):
        vector.update(np.ascontiguousarray(torch.as_tensor(run.parameters[name]).numpy()).tobytes())
    amounts = json.dumps(list(numbers(run.events)))
    return {
        "parameters": vector.hexdigest()[:16],
        "numbers": hashlib.sha256(amounts.encode()).hexdigest()[:16],
        "events": hashlib.sha256(json.dumps(run.events).encode()).hexdigest()[:16],
    }


def main() -> int:
    """Keeps or compares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--into", type=Path, help="keep the hashes in this file")
    parser.add_argument("--only", default="", help="runs whose names contain this")
    options = parser.parse_args()
    found = {}
    for name, asked, told in runs():
        if options.only in name:
            found[name] = hashes(gs.simulate(asked.pop("model"), asked.pop("data"), **told, **asked))
    if options.into:
        options.into.write_text(json.dumps(found, indent=1) + "\n")
        print(f"{len(found)} runs kept in {options.into}")
        return 0
    kept = json.loads(KEPT.read_text())
    wrong = 0
    for name, of_run in found.items():
        differ = [what for what in of_run if kept.get(name, {}).get(what) != of_run[what]]
        wrong += bool(set(differ) - {"events"})
        if differ:
            print(f"{name}: other {', '.join(differ)}")
    print(f"{len(found)} runs, {wrong} with other parameters or numbers")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
