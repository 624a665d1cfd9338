"""Question: what does one slow worker cost, over epochs that end?

Four workers are held to half a core each by cgroups, one of them to a fifth of that. Every strategy goes
through the same epochs, in turn with the others. Beside each time stands what the speeds allow:

    ideal = samples / Σᵢ (samplesᵢ / busyᵢ)     busyᵢ: seconds of worker i's steps, but for waiting for others

Where minibatches go to the worker that asks, at most 15 % more is allowed. Where all wait for the slowest,
they wait four fifths of the time; sizes that follow the speeds (`shares="measured"`) win that back.

    python bench/slow_worker.py            # some ten minutes on two cores

Prints figures, and keeps them with machine, commit and date in bench/results/slow-worker.json.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import gradstream as gs
from common import RESULTS, command_line, keep, origin
from gradstream._train import launch
from gradstream.job.files import load_job
from gradstream.run.local import LocalCluster
from gradstream.run.local.environment import node_environment
from gradstream.run.planning import plan_run
from gradstream.run.result import Run
from gradstream.telemetry.events import EventDict
from gradstream.testing.runs import busy
from kit.machines import CpuQuota, no_quota

WORKERS, SLOW = 4, "worker-3"
CORES = {f"worker-{rank}": 0.5 for rank in range(WORKERS)} | {SLOW: 0.1}
BATCH, SAMPLES, EPOCHS = 256, 32_768, 4
ALLOWED = 1.15


def job(strategy: gs.Strategy, **options: Any) -> gs.Job:
    model, data = busy(SAMPLES)
    return gs.Job(
        model,
        data,
        strategy=strategy,
        workers=WORKERS,
        batch_size=BATCH,
        epochs=EPOCHS,
        optimizer=gs.optim.SGD(lr=1e-7),
        **options,
    )


def downpour() -> gs.Job:
    return job(gs.Downpour())


def downpour_partitions() -> gs.Job:
    return job(gs.Downpour(), assignment="partitions")


def softsync() -> gs.Job:
    return job(gs.Softsync())


def staleness_aware() -> gs.Job:
    return job(gs.strategies.StalenessAware())


def elastic_averaging() -> gs.Job:
    return job(gs.ElasticAveraging())


def ssp() -> gs.Job:
    return job(gs.SSP())


def ssp_measured() -> gs.Job:
    return job(gs.SSP(), shares="measured")


def synchronous() -> gs.Job:
    return job(gs.Synchronous())


def synchronous_measured() -> gs.Job:
    return job(gs.Synchronous(), shares="measured")


HELD = [downpour, downpour_partitions, softsync, staleness_aware, elastic_averaging]
"""Those that are held to `ALLOWED`."""

KINDS = [*HELD, ssp, ssp_measured, synchronous, synchronous_measured]


def one_run(kind: str) -> Run:
    """A training run in which each worker has its part of a core from the first gradient on."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        cluster = stack.enter_context(LocalCluster(folder, node_environment(WORKERS)))
        quotas = {name: stack.enter_context(CpuQuota(amount)) for name, amount in CORES.items()}
        path = folder / "run"
        path.mkdir()

        def slow_down(event: EventDict) -> None:
            if event["event"] == "started":
                for name, quota in quotas.items():
                    quota.put(cluster.running[name])

        spec = load_job(f"{__file__}:{kind}")
        return launch(plan_run(spec, kind), path, cluster=cluster, on_event=slow_down)


def figures_of(run: Run) -> dict[str, Any]:
    """Seconds of a run, and what its workers' own speeds would have allowed."""
    samples, busy_s = dict.fromkeys(CORES, 0), dict.fromkeys(CORES, 0.0)
    for event in run.events:
        if event["event"] == "step":
            others_s = sum(
                seconds
                for who, seconds in event["waited_for"].items()
                if who in CORES and who != event["node"]
            )
            samples[event["node"]] += event["samples"]
            busy_s[event["node"]] += event["compute_s"] + event["wait_s"] - others_s
    per_s = {name: samples[name] / busy_s[name] for name in CORES}
    ideal_s = sum(samples.values()) / math.fsum(per_s.values())
    return {
        "seconds": run.summary["train_s"],
        "ideal_s": ideal_s,
        "ratio": run.summary["train_s"] / ideal_s,
        "samples": samples,
        "per_s": per_s,
    }


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    reason = no_quota()
    if reason:
        print(f"not measured: {reason}")
        return
    rows: dict[str, list[dict[str, Any]]] = {kind.__name__: [] for kind in KINDS}
    for repeat in range(given.repeats):
        for kind, found in rows.items():
            found.append(figures_of(one_run(kind)))
            row = found[-1]
            print(
                f"{repeat + 1}/{given.repeats} {kind}: {row['seconds']:.1f} s, {row['ratio']:.2f} of what "
                f"the speeds allow; {SLOW} did {row['samples'][SLOW]:,} of {SAMPLES * EPOCHS:,} samples",
                flush=True,
            )
    ratios = {kind: statistics.median(row["ratio"] for row in found) for kind, found in rows.items()}
    seconds = {kind: statistics.median(row["seconds"] for row in found) for kind, found in rows.items()}
    holds = all(ratios[kind.__name__] <= ALLOWED for kind in HELD)
    print(
        f"one of {WORKERS} workers has a fifth of the others' {CORES['worker-0']:g} cores. Of what the "
        "speeds allow: " + ", ".join(f"{kind} {ratio:.2f}" for kind, ratio in ratios.items())
    )
    print(f"at most {ALLOWED} where nobody waits {'holds' if holds else 'DOES NOT HOLD'}")
    figures = {
        "median_ratio": ratios,
        "median_s": seconds,
        "allowed": ALLOWED,
        "holds": holds,
        "runs": rows,
        "asked": {**vars(given), "cores": CORES, "samples": SAMPLES, "epochs": EPOCHS, "batch": BATCH},
        **origin(),
    }
    keep(RESULTS / "slow-worker.json", figures)


if __name__ == "__main__":
    main()
