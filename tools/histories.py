"""What every strategy did on virtual time: kept before a change of structure, compared after it.

    python tools/histories.py                                 # compares, as `make check` does
    python tools/histories.py --bits                          # to the bit: on the kind of processor that kept them
    python tools/histories.py --into tools/histories.json     # keeps them, where a change is meant

Every strategy, codec and update rule of the registry has runs here. Of each run are kept: three sums over its final
parameters, which processors round alike to four digits; hashes of all times, counts and sizes in its events in their
order, and of the events as they are written, without losses; and a hash of the bits of the parameters and of all
events. New names of events change the second hash alone, which is told and is no error.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import gradstream as gs
from gradstream.job.registry import FAMILIES, find_optimizer, find_strategy
from gradstream.runtime.simulation import Exponential
from gradstream.runtime.storage import MemoryStorage

KEPT = Path(__file__).with_suffix(".json")
FEATURES, SAMPLES = 1500, 96
TOLERANCE = 1e-4
"""Of sums over parameters, as a part of their norm."""


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


def job(dtype: Any = np.float64, **options: Any) -> dict[str, Any]:
    """Linear regression on whole numbers: small, and of the same bits on every machine."""
    rng = np.random.default_rng(3)
    x = np.rint(np.clip(rng.standard_normal((SAMPLES, FEATURES)), -2, 2)).astype(dtype)
    y = np.rint(rng.standard_normal(SAMPLES)).astype(dtype)
    model = gs.from_functions(
        init=lambda seed: {"w": np.zeros(FEATURES, dtype)}, outputs=outputs, gradients=gradients
    )
    data = gs.from_arrays(x, y, test_inputs=x[:32], test_targets=y[:32])
    return {
        "model": model,
        "data": data,
        "batch_size": 4,
        "epochs": 2,
        "seed": 5,
        "metrics": {"error": error},
        "workers": 3,
        "optimizer": gs.optim.SGD(lr=2**-12),
        **options,
    }


def layers() -> nn.Module:
    """A network of four layers, which can be split."""
    return nn.Sequential(
        nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 7), nn.ReLU(), nn.Linear(7, 8), nn.Tanh(), nn.Linear(8, 4)
    ).double()


def network(**options: Any) -> dict[str, Any]:
    """A small network on random classes."""
    rng = np.random.default_rng(5)
    x, y = rng.standard_normal((36, 6)), rng.integers(0, 4, 36)
    data = gs.from_arrays(x, y, test_inputs=x[:12], test_targets=y[:12])
    model = gs.from_torch(layers, nn.functional.cross_entropy)
    given = {
        "workers": 2,
        "batch_size": 6,
        "epochs": 2,
        "chunk_elems": 64,
        "optimizer": gs.optim.SGD(lr=0.05),
    }
    return {"model": model, "data": data, **given, **options}


@dataclass
class History:
    """One run: its job, and what `simulate` is told besides."""

    name: str
    job: dict[str, Any]
    told: dict[str, Any] = field(default_factory=dict)

    def kept(self) -> dict[str, Any]:
        """Makes the run. What is kept of it."""
        asked = dict(self.job)
        run = gs.simulate(asked.pop("model"), asked.pop("data"), **self.told, **asked)
        arrays = [torch.as_tensor(run.parameters[name]).numpy() for name in sorted(run.parameters)]
        vector = np.concatenate([array.ravel() for array in arrays]).astype(np.float64)
        norm = float(np.linalg.norm(vector))
        places = np.arange(len(vector))
        events = [without_losses(event) for event in run.events]
        return {
            "parameters": [norm, float(vector @ np.cos(places)), float(vector @ np.sin(7 * places))],
            "numbers": digest(json.dumps(list(numbers(events))).encode()),
            "events": digest(json.dumps(events).encode()),
            "bits": digest(b"".join(map(np.ndarray.tobytes, arrays)), json.dumps(run.events).encode()),
        }


def differences(kept: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What of a run is other than it was kept."""
    bound = TOLERANCE * max(kept["parameters"][0], now["parameters"][0])
    near = all(abs(a - b) <= bound for a, b in zip(kept["parameters"], now["parameters"], strict=True))
    others = [what for what in ("numbers", "events", "bits") if kept[what] != now[what]]
    return others if near else ["parameters", *others]


def digest(*parts: bytes) -> str:
    """The first digits of a SHA-256."""
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


EVEN = gs.sim.SimulationConfig(
    costs={"gradient": gs.sim.Cost(base_s=0.01), "apply": gs.sim.Cost(base_s=1e-3)}
)
UNEVEN = gs.sim.SimulationConfig(
    costs={"gradient": gs.sim.Cost(base_s=0.01, jitter=Exponential()), "apply": gs.sim.Cost(base_s=1e-3)},
    network=gs.sim.Network(link=gs.sim.Link(latency_s=1e-3, jitter_s=1e-3), bandwidth_bytes_s=1e7),
)
SPLIT = gs.sim.SimulationConfig(
    costs={"forward": gs.sim.Cost(per_sample_s=1e-3), "backward": gs.sim.Cost(per_sample_s=2e-3)},
    network=gs.sim.Network(link=gs.sim.Link(latency_s=1e-4), bandwidth_bytes_s=1e7),
)
OPTIONS: dict[str, dict[str, Any]] = {
    "softsync": {"splits": 2},
    "asysg": {"gradients": 2},
    "ssp": {"bound": 2},
    "elastic-averaging": {"every": 3},
    "eamsgd": {"every": 3},
    "parameter-averaging": {"every": 4},
    "diloco": {"every": 4},
    "async-diloco": {"every": 4},
    "streaming-diloco": {"every": 4, "fragments": 2},
    "local-sgd": {"every": 4},
    "noloco": {"every": 4},
}
"""Of strategies that are tried with other options than their defaults."""
VARIANTS: dict[str, gs.Strategy] = {
    "synchronous, backup": gs.Synchronous(backup=1),
    "synchronous, median": gs.Synchronous(aggregate="median", overlap=False),
    "downpour, 5 and 3": gs.Downpour(push_every=5, fetch_every=3, overlap=False),
    "local-sgd, delayed": gs.LocalSGD(every=4, delay=1),
    "allreduce, ring": gs.AllReduce(algorithm="ring"),
    "allreduce, tree": gs.AllReduce(algorithm="complete-tree"),
    "allreduce, butterfly": gs.AllReduce(algorithm="butterfly"),
}
BATCH_METHODS = ("conjugate-gradient", "gradient-descent", "lbfgs")


def histories() -> Iterator[History]:
    """All runs."""
    yield from of_strategies()
    yield from of_batch_methods()
    yield from of_codecs()
    yield from of_optimizers()
    yield from of_phases()
    yield from of_split_models()


def of_strategies() -> Iterator[History]:
    """Each strategy on even and uneven machines, with checkpoints, deaths, and returns."""
    names = [name for name in FAMILIES["strategy"] if name not in BATCH_METHODS]
    made = {name: find_strategy(name, OPTIONS.get(name, {})) for name in names}
    for name, strategy in {**made, **VARIANTS}.items():
        serves = isinstance(strategy, gs.strategies.ServerStrategy)
        common: dict[str, Any] = {"strategy": strategy, **({"servers": 2} if serves else {})}
        yield History(f"{name}: even", job(**common), {"config": EVEN})
        yield History(f"{name}: uneven", job(**common, evaluate_every=6), {"config": UNEVEN})
        if serves or name in ("allreduce", "gossip", "local-sgd"):
            kept = {**common, "checkpoint_every": 9, "clip_norm": 50.0}
            told = {"config": UNEVEN, "storage": MemoryStorage()}
            yield History(f"{name}: checkpoints", job(**kept), told)
        if strategy.survives_worker_loss:
            yield History(f"{name}: a death", job(**common), {"config": UNEVEN, "script": killed})
            yield History(f"{name}: a return", job(**common), {"config": UNEVEN, "script": returned})
    shards: dict[str, Any] = {"strategy": gs.Downpour(), "servers": 2, "checkpoint_every": 5, "epochs": 4}
    told = {"config": UNEVEN, "storage": MemoryStorage(), "script": resharded}
    yield History("downpour: other shards", job(**shards), told)


def of_batch_methods() -> Iterator[History]:
    """Each method with shards, and in a group of workers."""
    for name in BATCH_METHODS:
        for servers in (2, 0):
            asked = network(strategy=name, servers=servers, workers=3, epochs=4)
            del asked["optimizer"]
            yield History(f"{name}: {servers} shards", asked, {"config": UNEVEN})


def of_codecs() -> Iterator[History]:
    """Each codec in pushes to shards, and in sums of a group."""
    for codec in FAMILIES["codec"]:
        for strategy in ("downpour", "allreduce"):
            if (codec, strategy) == ("powersgd", "downpour"):
                continue  # chunks are no matrices
            asked = job(
                np.float32, strategy=strategy, codec=codec, servers=2 if strategy == "downpour" else 0
            )
            yield History(f"codec {codec}: {strategy}", asked, {"config": UNEVEN})


def of_optimizers() -> Iterator[History]:
    """Each update rule, on shards and on workers."""
    for rule in FAMILIES["optimizer"]:
        for strategy in ("synchronous", "allreduce"):
            if (rule, strategy) == ("muon", "synchronous"):
                continue  # chunks are no matrices
            made = find_optimizer(rule, {"lr": 0.01})
            asked = network(strategy=strategy, optimizer=made, servers=2 if strategy == "synchronous" else 0)
            yield History(f"optimizer {rule}: {strategy}", asked, {"config": UNEVEN})


def of_phases() -> Iterator[History]:
    """Phases with other strategies, batches and workers, alone and with a death."""
    post_local = [gs.Phase(epochs=1), gs.Phase(epochs=1, strategy=gs.LocalSGD(every=4))]
    growing = [gs.Phase(epochs=1), gs.Phase(epochs=1, batch_size=8)]
    for name, phases in {"post-local": post_local, "a growing batch": growing}.items():
        asked = job(strategy="allreduce", phases=phases)
        del asked["epochs"]
        yield History(f"phases, {name}", asked, {"config": UNEVEN})
        yield History(f"phases, {name}: a death", asked, {"config": UNEVEN, "script": killed})


def of_split_models() -> Iterator[History]:
    """Each order of passes, hybrids, and parts that train apart."""
    pipelines: dict[str, Any] = {
        "gpipe": "gpipe",
        "1f1b": "1f1b",
        "zero-bubble": "zero-bubble",
        "pipedream": "pipedream",
        "2bw": "2bw",
        "hybrid": gs.pipeline.Hybrid("slices", ("2", "6")),
        "synthetic gradients": gs.pipeline.SyntheticGradients(hidden=8),
    }
    for name, pipeline in pipelines.items():
        options = {"strategy": "allreduce", "split": 2, "pipeline": pipeline}
        if isinstance(pipeline, str) and pipeline != "pipedream":
            options["micro_batches"] = 2
        yield History(f"split, {name}", network(**options), {"config": SPLIT})
    asked = network(strategy="downpour", servers=2, split=2)
    yield History("split, downpour", asked, {"config": SPLIT})


async def killed(cluster: Any) -> None:
    """Worker 1 dies in the middle of the first epoch."""
    await cluster.virtual.runtime("director").sleep(0.1)
    cluster.kill("worker-1")


async def returned(cluster: Any) -> None:
    """Worker 1 dies, and a new process takes its place."""
    await killed(cluster)
    await cluster.virtual.runtime("director").sleep(0.02)
    if not cluster.over:
        await cluster.restart("worker-1")


async def resharded(cluster: Any) -> None:
    """One shard takes the place of two."""
    await cluster.virtual.runtime("director").sleep(0.1)
    cluster.reshard(1)


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


def without_losses(value: Any) -> Any:
    """A record without the numbers that processors round differently: all floats but times."""
    if isinstance(value, Mapping):
        kept = [key for key, entry in value.items() if key.endswith("_s") or type(entry) is not float]
        return {key: without_losses(value[key]) for key in kept}
    return [without_losses(entry) for entry in value] if isinstance(value, list | tuple) else value


def main() -> int:
    """Keeps or compares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--into", type=Path, help="keep the hashes in this file")
    parser.add_argument("--only", default="", help="runs whose names contain this")
    parser.add_argument("--slowest", type=int, default=0, help="print so many of the runs that took longest")
    parser.add_argument("--bits", action="store_true", help="an error too where only bits differ")
    options = parser.parse_args()
    found, seconds = dict[str, dict[str, Any]](), dict[str, float]()
    for history in histories():
        if options.only in history.name:
            begun = time.perf_counter()
            found[history.name] = history.kept()
            seconds[history.name] = time.perf_counter() - begun
    for name in sorted(seconds, key=lambda name: -seconds[name])[: options.slowest]:
        print(f"{seconds[name]:6.2f} s {name}")
    if options.into:
        options.into.write_text(json.dumps(found, indent=1) + "\n")
        print(f"{len(found)} runs kept in {options.into}")
        return 0
    kept = json.loads(KEPT.read_text())
    errors = {"parameters", "numbers", *(["bits"] if options.bits else [])}
    wrong = 0
    for name, now in found.items():
        differ = differences(kept[name], now) if name in kept else ["run than before: it was not kept"]
        told = [what for what in differ if what != "bits" or options.bits]
        wrong += name not in kept or not errors.isdisjoint(differ)
        if told:
            print(f"{name}: other {', '.join(told)}")
    gone = [name for name in kept if name not in found and options.only in name]
    if gone:
        print("not made any more:", ", ".join(gone))
    print(f"{len(found)} runs, {wrong} that differ")
    return int(wrong > 0 or bool(gone))


if __name__ == "__main__":
    sys.exit(main())
