"""Question: what do shares by measured speed and backup workers win on uneven machines?

For real: two processes, of which one has half a core (a cgroup's quota). Seconds of a round with equal
shares, with measured ones, and as long as a round takes that all speeds together share out.
On virtual time: seconds of a round of N + b workers with exponential gradients of mean 1, of which N are
waited for: the order statistic, rounds that all begin together (the first one, over many seeds; each one
where all are waited for), and rounds in a row, where a late worker first finishes what it computes.

    python bench/uneven.py            # some three minutes on two cores

Prints figures, and keeps them with machine, commit and date in bench/results/uneven.json.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import os
import statistics
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

import gradstream as gs
from common import RESULTS, command_line, keep, origin
from gradstream._simulate import simulate
from gradstream._train import launch
from gradstream.job.files import load_job
from gradstream.run.local import LocalCluster
from gradstream.run.local.environment import node_environment
from gradstream.run.planning import plan_run
from gradstream.run.result import Run
from gradstream.runtime.simulation import Cost, Exponential, Link, Network, SimulationConfig
from gradstream.telemetry.events import EventDict
from gradstream.testing.runs import Sized, busy, numbered
from kit.machines import CpuQuota, no_quota

ROUNDS = 48
BATCH = 128
PASSES = 600
"""Over a minibatch, for one gradient: shares make computing shorter, and no exchange."""


def equal() -> gs.Job:
    model, data = busy(4096, passes=PASSES)
    return gs.Job(model, data, workers=2, batch_size=BATCH, steps=ROUNDS, optimizer=gs.optim.SGD(lr=1e-5))


def measured() -> gs.Job:
    model, data = busy(4096, passes=PASSES)
    return gs.Job(
        model,
        data,
        workers=2,
        batch_size=BATCH,
        steps=ROUNDS,
        optimizer=gs.optim.SGD(lr=1e-5),
        shares="measured",
    )


# ---- for real -----------------------------------------------------------------------------


def one_run(kind: str, cores: float, cluster: LocalCluster) -> Run:
    """One training run; worker-1 has `cores` of a core."""
    with tempfile.TemporaryDirectory() as folder, CpuQuota(cores) as quota:
        path = Path(folder) / "run"
        path.mkdir()
        job = load_job(f"{__file__}:{kind}")

        def slow_down(event: EventDict) -> None:
            if event["event"] == "started":
                quota.put(cluster.running["worker-1"])

        return launch(plan_run(job, kind), path, cluster=cluster, on_event=slow_down)


def round_s(run: Run) -> float:
    """Median seconds of a round in the second half of a run."""
    steps = [e for e in run.events if e["event"] == "step" and e["rank"] == 0 and e["step"] >= ROUNDS // 2]
    return statistics.median(event["compute_s"] + event["wait_s"] for event in steps)


def per_s(run: Run, rank: int) -> float:
    """Samples a second inside the gradients of a worker."""
    steps = [e for e in run.events if e["event"] == "step" and e["rank"] == rank and e["step"] >= ROUNDS // 2]
    return float(sum(e["samples"] for e in steps) / sum(e["compute_s"] for e in steps))


def for_real(repeats: int) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as logs, LocalCluster(Path(logs), node_environment(2)) as cluster:
        for _ in range(repeats):
            alike, shared = one_run("equal", 0.5, cluster), one_run("measured", 0.5, cluster)
            ideal_s = 2 * BATCH / (per_s(shared, 0) + per_s(shared, 1))
            rows.append(
                {
                    "equal_s": round_s(alike),
                    "measured_s": round_s(shared),
                    "ideal_s": ideal_s,
                    "shares": shared.summary["shares"],
                }
            )
    middle = {
        key: statistics.median(row[key] for row in rows) for key in ("equal_s", "measured_s", "ideal_s")
    }
    print(
        f"half a core for one of two: a round takes {1e3 * middle['equal_s']:.1f} ms with equal shares, "
        f"{1e3 * middle['measured_s']:.1f} ms with measured ones ({rows[-1]['shares']}): "
        f"{middle['equal_s'] / middle['measured_s']:.2f} times faster; computing alone would take "
        f"{1e3 * middle['ideal_s']:.1f} ms ({middle['ideal_s'] / middle['measured_s']:.2f} of it)"
    )
    return {"median": middle, "runs": rows}


# ---- on virtual time ----------------------------------------------------------------------


def order_statistic(needed: int, backup: int) -> float:
    """The N-th of N + b exponential times with mean 1."""
    return sum(1 / i for i in range(backup + 1, needed + backup + 1))


def verdicts(needed: int, backup: int, steps: int, seed: int) -> list[float]:
    """Seconds of each round."""
    config = SimulationConfig(
        costs={"gradient": Cost(base_s=1.0, jitter=Exponential())},
        network=Network(bandwidth_bytes_s=math.inf, link=Link(latency_s=0.0)),
        shape_only=True,
    )
    run = simulate(
        Sized([64]),
        numbered(1024),
        config=config,
        strategy=gs.Synchronous(backup=backup),
        workers=needed + backup,
        batch_size=1,
        steps=steps,
        chunk_elems=64,
        seed=seed,
    )
    ends: dict[int, float] = {}
    for event in run.events:
        if event["event"] == "step" and not event["late"]:
            ends[event["step"]] = min(event["time_s"], ends.get(event["step"], math.inf))
    edges = [0.0, *(ends[step] for step in range(steps))]
    return [after - before for before, after in itertools.pairwise(edges)]


def standard_error(times: Sequence[float]) -> float:
    return statistics.stdev(times) / math.sqrt(len(times))


def on_virtual_time(seeds: int, steps: int) -> list[dict[str, Any]]:
    """A simulation of 100 workers takes seconds to begin: as many at a time as there are cores."""
    rows = []
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), spawn, torch.set_num_threads, (1,)) as pool:
        runs = {}
        for needed, backup in ((100, 0), (96, 4)):
            in_a_row = pool.submit(verdicts, needed, backup, steps if backup else steps // 2, 0)
            ones = [pool.submit(verdicts, needed, backup, 1, seed) for seed in range(seeds if backup else 0)]
            runs[needed, backup] = in_a_row, ones
        for (needed, backup), (row_of, ones) in runs.items():
            in_a_row = row_of.result()
            together = [one.result()[0] for one in ones] or in_a_row
            row = {
                "of": needed + backup,
                "needed": needed,
                "order_statistic_s": order_statistic(needed, backup),
                "begun_together_s": statistics.fmean(together),
                "standard_error_s": standard_error(together),
                "begun_together": len(together),
                "in_a_row_s": statistics.fmean(in_a_row),
                "in_a_row_standard_error_s": standard_error(in_a_row),
            }
            rows.append(row)
            print(
                f"{needed} of {needed + backup}: order statistic {row['order_statistic_s']:.2f}, "
                f"begun together {row['begun_together_s']:.2f} ± {row['standard_error_s']:.2f} "
                f"({len(together)} rounds), in a row {row['in_a_row_s']:.2f} ± "
                f"{row['in_a_row_standard_error_s']:.2f} ({len(in_a_row)} rounds)",
                flush=True,
            )
    return rows


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--seeds", type=int, default=30, help="first rounds")
    parser.add_argument("--steps", type=int, default=120, help="rounds in a row")
    parser.add_argument("--repeats", type=int, default=7, help="runs for real")
    given = parser.parse_args()
    figures: dict[str, Any] = {"backup": on_virtual_time(given.seeds, given.steps)}
    reason = no_quota()
    if reason:
        print(f"not measured for real: {reason}")
    else:
        figures["half_a_core"] = for_real(given.repeats)
    figures |= {
        "asked": vars(given),
        **origin(),
    }
    keep(RESULTS / "uneven.json", figures)


if __name__ == "__main__":
    main()
