"""Question: do more shards of the parameter server make training faster when each machine has one?

Makes machines as network namespaces of this one, with cards of 1 Gbit/s (`tc tbf`), and trains a model of
8,388,608 parameters whose gradients are 0 and cost next to nothing: only the exchange takes time. Each
machine has one worker; shard i is on machine i. Each worker pushes and fetches once for each minibatch.
Takes root, `ip` and `tc`.

    python bench/shards_apart.py                         # two strategies, 1, 2 and 4 shards: some minutes
    python bench/shards_apart.py --steps 6 --repeats 1   # to see that it works

Beside what was measured, samples/s by:

* bound: the busiest card. With W workers, S shards and N float32 parameters, a machine sends in each step
  the part of 4N bytes that its worker pushes to shards of other machines, and (W - 1) 4N/S for each of its
  shards, which answer to workers of other machines. It receives as many. Headers of TCP and Ethernet, 5 %
  of what a card carries, are not counted.
* simulated: `gs.simulate` with cards of this speed. There each node has a card of its own, also where a
  worker and a shard are on one machine, so its bound is another one: max(4N, W 4N/S) bytes a step.

All machines share this machine's cores. If `cores_used` is near their number, these are the limit and not
the cards. Prints figures, and keeps them with machine, commit and date in bench/results/shards-apart.json.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import gradstream as gs
from four_machines import run_on
from gradstream.cluster.machine import describe_machine, git_commit
from gradstream.run import Run
from gradstream.runtime.world import Link, Network, World
from gradstream.simulate import simulate
from gradstream.testing.machines import Machines, unavailable
from gradstream.testing.runs import Sized, numbered

ROOT = Path(__file__).resolve().parents[1]
MACHINES = 4
LAYERS = [1 << 20] * 8
BYTES = 4 * sum(LAYERS)
BATCH = 64
WARM = 2
"""Steps of each worker before its samples count: connections open, and first parameters travel."""


def job(strategy: gs.Strategy, steps: int) -> gs.Job:
    data = numbered(MACHINES * BATCH * steps)
    return gs.Job(
        Sized(LAYERS),
        data,
        strategy=strategy,
        optimizer=gs.SGD(lr=1e-3),
        workers=MACHINES,
        batch_size=BATCH,
        steps=steps,
        checkpoint_every=None,
    )


def synchronous() -> gs.Job:
    return job(gs.Synchronous(), _steps())


def downpour() -> gs.Job:
    return job(gs.Downpour(push_every=1, fetch_every=1), _steps())


KINDS = {"synchronous": synchronous, "downpour": downpour}


def _steps() -> int:
    """Every node reads the job again, and is told by its environment."""
    return int(os.environ.get("SHARDS_APART_STEPS", "30"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=30, help="of each worker")
    parser.add_argument("--mbit", type=int, default=1000, help="speed of each card, Mbit/s")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each kind; the median counts")
    parser.add_argument("--strategy", choices=[*KINDS], action="append", help="both where left out")
    parser.add_argument("--shards", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--carrier", default="auto", help="auto, grpc, or tcp (which needs --insecure)")
    parser.add_argument("--insecure", action="store_true", help="plain text, to see what TLS costs")
    given = parser.parse_args()
    if reason := unavailable():
        raise SystemExit(reason)
    os.environ["SHARDS_APART_STEPS"] = str(given.steps)
    rows = [row(given, kind, shards) for kind in given.strategy or KINDS for shards in given.shards]
    record = {
        "asked": vars(given),
        "rows": rows,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": git_commit(ROOT),
        "machine": describe_machine({})["machine"],
    }
    (ROOT / "bench" / "results" / "shards-apart.json").write_text(json.dumps(record, indent=2) + "\n")


def row(given: argparse.Namespace, kind: str, shards: int) -> dict[str, Any]:
    """One strategy with so many shards: measured, simulated, and the bound."""
    runs = sorted((measured(given, kind, shards) for _ in range(given.repeats)), key=lambda one: one[0])
    per_s, cores = runs[len(runs) // 2]
    card_bytes_s = given.mbit * 1e6 / 8
    bound = MACHINES * BATCH * card_bytes_s / busiest_card_bytes(shards)
    network = Network(bandwidth_bytes_s=card_bytes_s, link=Link(latency_s=50e-6))
    simulated = samples_per_s(
        simulate(KINDS[kind](), servers=shards, world=World(network=network, phantom=True))
    )
    figures = {
        "strategy": kind,
        "shards": shards,
        "samples_per_s": per_s,
        "bound_samples_per_s": bound,
        "of_bound": per_s / bound,
        "simulated_samples_per_s": simulated,
        "cores_used": cores,
        "all_samples_per_s": [one[0] for one in runs],
    }
    print(
        f"{kind}, {shards} shards: {per_s:,.0f} samples/s, {per_s / bound:.0%} of the bound {bound:,.0f}; "
        f"simulated {simulated:,.0f}; {cores:.1f} cores used",
        flush=True,
    )
    return figures


def measured(given: argparse.Namespace, kind: str, shards: int) -> tuple[float, float]:
    """Samples/s of a run on all machines, and how many cores its nodes have used meanwhile."""
    options = ["--servers", str(shards), "--set", f"carrier={given.carrier}"]
    options += ["--insecure"] if given.insecure else []
    with (
        tempfile.TemporaryDirectory() as folder,
        Machines(MACHINES, rate=f"{given.mbit}mbit") as machines,
    ):
        run = run_on(machines, Path(folder), f"{__file__}:{kind}", *options)
    return samples_per_s(run), cores_used(run)


def samples_per_s(run: Run) -> float:
    """Of all workers, from when each had done `WARM` steps to the last step."""
    steps = [event for event in run.events if event["event"] == "step"]
    steps.sort(key=lambda event: float(event["time_s"]))
    counted = steps[WARM * MACHINES :]
    return sum(event["samples"] for event in counted) / (
        counted[-1]["time_s"] - steps[WARM * MACHINES - 1]["time_s"]
    )


def cores_used(run: Run) -> float:
    """CPU seconds of all nodes a second, between the first and the last that each has told of."""
    told: dict[str, list[dict[str, Any]]] = {}
    for event in run.events:
        if event["event"] == "cpu":
            told.setdefault(event["node"], []).append(event)
    spans = [(events[0], events[-1]) for events in told.values() if len(events) > 1]
    return sum(
        sum(last[part] - first[part] for part in ("user_s", "system_s")) / (last["time_s"] - first["time_s"])
        for first, last in spans
    )


def busiest_card_bytes(shards: int) -> float:
    """Bytes each way in a step of the machine with the most. Shard i is on machine i mod the machines."""
    each = BYTES / shards
    per_machine = [len(range(machine, shards, MACHINES)) for machine in range(MACHINES)]
    return max((shards - own) * each + own * (MACHINES - 1) * each for own in per_machine)


if __name__ == "__main__":
    main()
