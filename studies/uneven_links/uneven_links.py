"""Question: what do a slow machine, a cut link, a leaver and a joiner cost, over slow links?

Four virtual machines behind 10 Mbit/s train the 101,770 parameters of `async_study.py`: 100 ms for 4 samples.
What counts is the virtual time until the mean of five evaluations in a row is 80 % of the held-out images, beside what
the machines that were there, at their speeds, take for as many samples as four equal ones needed: 1 is perfect.
Gradients, strategies, membership and recovery are the real ones; seeds and virtual time make it repeatable.

    nice -n 19 python studies/uneven_links/uneven_links.py  # some 20 minutes of a core

* slow: worker 3 has a quarter of the speed. * cut: nothing passes to and from worker 3 for 30 s; it is lost after its
lease of 10 s, and comes back as a new process when the link is back. * leaves: worker 3 dies, and nobody comes.
* joins: worker 3 dies at the beginning, and comes at a third of the time.

Keeps record.json.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gradstream as gs
from gradstream._simulate import Script, simulate
from gradstream.job.registry import find_strategy
from gradstream.run.simulated import SimulatedCluster
from gradstream.runtime.simulation import Cost, Link, LogNormal, Network, Partition, SimulationConfig
from gradstream.testing.runs import kill_at, replace_at

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))
sys.path.append(str(Path(__file__).resolve().parents[1] / "async_study"))
from common import command_line, keep, origin
from study import subject
from study.ledger import seconds_to
from study.runs import point_of

WORKERS, BATCH, PERIOD, TARGET, SEEDS = 4, 4, 20, 0.8, 5
NODE, CUT_S, LEASE_S = "worker-3", 30.0, 10.0
BANDWIDTH_BYTES_S = 10e6 / 8
EPOCHS, IN_A_ROW = 6, 5
SAMPLE_S = 0.025

METHODS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "local SGD": ("local-sgd", "float4", {}, {"lr": 0.03, "look": 1}),
    "DiLoCo": ("diloco", "float4", {}, {"lr": 0.01, "look": 5}),
    "streaming DiLoCo": ("streaming-diloco", "float4", {"delay": 4}, {"lr": 0.01, "look": 5}),
    "asynchronous DiLoCo": (
        "async-diloco",
        "int8",
        {"delay": PERIOD, "outer_momentum": 0.0},
        {"lr": 0.01, "look": 20},
    ),
}
"""By title: strategy, codec, options, and rate and steps between evaluations."""


def config(speed: float = 1.0, cut: tuple[float, float] | None = None) -> SimulationConfig:
    """The machines; one is slower, or cut off for a time."""
    partitions = []
    if cut is not None:
        others = frozenset({"coordinator", "shard-0", *(f"worker-{rank}" for rank in range(WORKERS))}) - {
            NODE
        }
        for ends in ((frozenset({NODE}), others), (others, frozenset({NODE}))):
            partitions.append(Partition(*cut, *ends))
    return SimulationConfig(
        costs={
            "gradient": Cost(per_sample_s=SAMPLE_S, jitter=LogNormal(subject.JITTER)),
            **dict.fromkeys(("apply", "copy", "reduce"), Cost(per_elem_s=4e-10)),
        },
        speeds={NODE: speed},
        network=Network(
            bandwidth_bytes_s=BANDWIDTH_BYTES_S,
            link=Link(latency_s=1e-3),
            cards={"shard-0": WORKERS * BANDWIDTH_BYTES_S},  # a shard on each machine, simulated as one
            partitions=partitions,
        ),
    )


def seconds(name: str, seed: int, machines: SimulationConfig, script: Script | None = None) -> float:
    """Virtual seconds to the target; infinite where it is not reached."""
    strategy, codec, options, how = METHODS[name]
    run = simulate(
        subject.mlp(),
        subject.data("report"),
        config=machines,
        script=script,
        strategy=find_strategy(strategy, {"every": PERIOD, **options}),
        codec=codec,
        optimizer=gs.optim.SGD(lr=how["lr"]),
        workers=WORKERS,
        batch_size=BATCH,
        shares=None if name == "asynchronous DiLoCo" else "measured",
        epochs=EPOCHS,
        evaluate_every=how["look"],
        seed=seed,
        allow_lost=1,
    )
    points = [point_of(evaluation) for evaluation in run.evaluations]
    rows = zip(*(points[first:] for first in range(IN_A_ROW)), strict=False)
    curve = [[*row[-1][:2], statistics.fmean(point[2] for point in row)] for row in rows]
    return seconds_to({"curve": curve}, TARGET) or math.inf


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--only", default="", help="methods whose titles begin so")
    given = parser.parse_args()
    rows: dict[str, Any] = {}
    for name in METHODS:
        if not name.startswith(given.only):
            continue
        found: dict[str, list[float]] = {}
        for seed in range(1, given.seeds + 1):
            equal = seconds(name, seed, config())
            found.setdefault("equal, seconds", []).append(equal)
            for scenario, (ideal_s, machines, script) in scenarios(equal).items():
                took_s = seconds(name, seed, machines, script)
                found.setdefault(scenario, []).append(took_s / ideal_s)
            print(name, seed, {one: round(values[-1], 3) for one, values in found.items()}, flush=True)
        rows[name] = {one: summed(values) for one, values in found.items()}
    if not given.only:
        record = {"question": (__doc__ or "").splitlines()[0], **origin(), "rows": rows}
        keep(Path(__file__).with_name("record.json"), record)


def scenarios(equal_s: float) -> Mapping[str, tuple[float, SimulationConfig, Script | None]]:
    """By name: ideal seconds, the machines, and what happens."""
    work, third = WORKERS * equal_s, equal_s / 3
    # Until `third` all four; then three, for CUT_S or to the end.
    cut_s = third + CUT_S + (work - WORKERS * third - 3 * CUT_S) / WORKERS
    if cut_s < third + CUT_S:
        cut_s = third + (work - WORKERS * third) / 3
    return {
        "slow": (work / 3.25, config(0.25), None),
        "cut": (cut_s, config(cut=(third, third + CUT_S)), _back_at(third + LEASE_S + 2, third + CUT_S)),
        "leaves": (third + (work - WORKERS * third) / 3, config(), kill_at(NODE, third)),
        "joins": ((work + third) / WORKERS, config(), replace_at(NODE, 0.05, third)),
    }


def _back_at(lost_s: float, back_s: float) -> Script:
    """The process of a worker that was cut off ends, and a new one begins."""

    async def script(cluster: SimulatedCluster) -> None:
        await replace_at(NODE, lost_s, back_s - lost_s)(cluster)

    return script


def summed(values: list[float]) -> dict[str, Any]:
    """Mean and deviation."""
    return {
        "mean": statistics.fmean(values),
        "deviation": statistics.stdev(values) if len(values) > 1 else 0.0,
        "all": values,
    }


if __name__ == "__main__":
    main()
