"""Question: what does one slow worker cost, where nobody waits for it, and where all do?

Four workers, held to half a core each by cgroups; then one of them to a fifth of that. Samples a second of
all workers over the same stretch of time, by Downpour and by Synchronous in turn:

    lost = 1 - (one is slow) / (all alike)        the slow worker's own part of that: (1 - 1/5) / 4 = 20 %

Where nobody waits, at most 5 % more may be lost than that part. Where all wait, four fifths are.

    python bench/slow_worker.py

Prints figures, and keeps them with machine, commit and date in bench/results/slow-worker.json.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import tempfile
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import gradstream as gs
from gradstream.casting import cast_of
from gradstream.cluster import LocalCluster, node_environment
from gradstream.cluster.machine import describe_machine, git_commit
from gradstream.jobfile import load_job
from gradstream.run import Run
from gradstream.summary import EventDict
from gradstream.testing.quota import CpuQuota, no_quota
from gradstream.testing.runs import busy
from gradstream.train import launch

ROOT = Path(__file__).resolve().parents[1]
WORKERS, SLOW = 4, "worker-3"
CORES, FIFTH = 0.5, 0.1
BATCH = 64
SETTLE_S = 3.0
"""From the begin of training, which is not measured: everybody is as fast as they will be then."""
ALLOWED = 0.05


def job(strategy: gs.Strategy) -> gs.Job:
    model, data = busy(8192)
    return gs.Job(
        model,
        data,
        strategy=strategy,
        workers=WORKERS,
        batch_size=BATCH,
        epochs=1_000_000,  # it ends by the clock
        optimizer=gs.SGD(lr=1e-7),
    )


def downpour() -> gs.Job:
    return job(gs.Downpour())


def synchronous() -> gs.Job:
    return job(gs.Synchronous())


def one_run(kind: str, cores: dict[str, float], seconds: float) -> Run:
    """One training run, in which each worker has so much of a core."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        cluster = stack.enter_context(LocalCluster(folder, node_environment(WORKERS)))
        quotas = {name: stack.enter_context(CpuQuota(amount)) for name, amount in cores.items()}
        path = folder / "run"
        path.mkdir()

        def slow_down(event: EventDict) -> None:
            if event["event"] == "started":
                for name, quota in quotas.items():
                    quota.put(cluster.running[name])

        spec = load_job(f"{__file__}:{kind}")
        ends = gs.until(seconds=SETTLE_S + seconds)
        timed = gs.Job(**{**vars(spec), "until": ends})
        return launch(timed, cast_of(timed, kind), path, cluster=cluster, on_event=slow_down)


def per_s(run: Run, seconds: float) -> dict[str, float]:
    """Samples a second of each worker over the stretch that is measured.

    A step that lies across an end of it counts as far as it lies inside: with few slow steps that matters.
    """
    samples: Counter[str] = Counter()
    for event in run.events:
        if event["event"] == "step":
            length_s = event["compute_s"] + event["wait_s"]
            begin_s = event["time_s"] - length_s
            inside_s = min(event["time_s"], SETTLE_S + seconds) - max(begin_s, SETTLE_S)
            samples[event["node"]] += event["samples"] * max(0.0, inside_s) / length_s
    return {name: count / seconds for name, count in sorted(samples.items())}


def lost(kind: str, seconds: float) -> dict[str, Any]:
    """What one slow worker costs all, and what of that is its own."""
    alike = dict.fromkeys((f"worker-{rank}" for rank in range(WORKERS)), CORES)
    before = per_s(one_run(kind, alike, seconds), seconds)
    after = per_s(one_run(kind, {**alike, SLOW: FIFTH}, seconds), seconds)
    total = sum(before.values())
    return {
        "alike_per_s": before,
        "one_slow_per_s": after,
        "lost": 1 - sum(after.values()) / total,
        "lost_by_itself": (before[SLOW] - after[SLOW]) / total,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=15.0, help="of each run that are measured")
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    reason = no_quota()
    if reason:
        print(f"not measured: {reason}")
        return
    rows: dict[str, list[dict[str, Any]]] = {"downpour": [], "synchronous": []}
    for repeat in range(given.repeats):
        for kind, found in rows.items():
            found.append(lost(kind, given.seconds))
            row = found[-1]
            alike, slow = (sum(row[key].values()) for key in ("alike_per_s", "one_slow_per_s"))
            print(
                f"{repeat + 1}/{given.repeats} {kind}: {alike:,.0f} samples/s, with a slow one {slow:,.0f}; "
                f"lost {row['lost']:.1%}",
                flush=True,
            )
    own = (1 - FIFTH / CORES) / WORKERS
    medians = {kind: statistics.median(row["lost"] for row in found) for kind, found in rows.items()}
    holds = medians["downpour"] <= own + ALLOWED
    print(
        f"one of {WORKERS} workers has a fifth of its {CORES:g} cores. Downpour loses "
        f"{medians['downpour']:.1%}, of which {own:.0%} are the slow worker's own; at most "
        f"{own + ALLOWED:.0%} are allowed, which {'holds' if holds else 'DOES NOT HOLD'}. Synchronous loses "
        f"{medians['synchronous']:.1%}"
    )
    figures = {
        "median_lost": medians,
        "own_share": own,
        "allowed": own + ALLOWED,
        "holds": holds,
        "runs": rows,
        "asked": vars(given),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": git_commit(ROOT),
        "machine": describe_machine({})["machine"],
    }
    (ROOT / "bench" / "results" / "slow-worker.json").write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
