"""Question: do more shards of the parameter server make training faster when each machine has one?

Makes machines as network namespaces of this one, with cards of 1 Gbit/s (`tc tbf`), and trains a model of
33,554,432 parameters whose gradients are 0 and cost next to nothing: only the exchange takes time. Each
machine has one worker; shard i is on machine i. Each worker pushes and fetches once for each minibatch.
Takes root, `ip` and `tc`.

    python bench/shards_apart.py                         # two strategies, 1, 2 and 4 shards: some minutes
    python bench/shards_apart.py --steps 6 --repeats 1   # to see that it works

Beside samples/s as measured, by:

* bound: the busiest card. With S shards and N float32 parameters, a machine with s shards sends s · 4N/S
  bytes for each step of a worker elsewhere, whose fetches its shards answer, and (S - s) · 4N/S for each of
  its own worker's, which pushes to the other shards. It receives as many. Who took how many steps is counted,
  since Downpour's workers take minibatches as they can, and one beside the only shard needs no card at all.
  Headers are not counted: of 1,514 bytes of a packet, 1,448 are payload, so nothing gets beyond 0.96 of this.
* bare: what plain sockets take for the same bytes through the same cards, as a part of the bound; every
  connection at once, nobody waits for anything (`bare_exchange.py`).
* simulated: `gs.simulate` on such machines with such cards, gradients taking as long as here.

Samples count from when each worker has done two steps until the first of them has done its last; of a step that
is under way at either time, its part. All machines
share this one's cores, so each node computes with one thread: teams of threads of more nodes than there are
cores wait for one another by spinning, which took more than half of the speed. If `cores_used` is near the
number of cores, these are the limit and not the cards: `--mbit 250` then tells more.

Prints figures, and keeps them in bench/results/shards-apart.json: a row takes the place of the one with the
same strategy, shards, speed and carrier.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import gradstream as gs
from common import RESULTS, ROOT, command_line, keep, kept, origin, run_on
from gradstream._simulate import simulate
from gradstream.run.result import Run
from gradstream.runtime.simulation import Cost, Link, Network, SimulationConfig
from gradstream.testing.runs import Sized, numbered
from kit.machines import Machines, unavailable

RECORD = RESULTS / "shards-apart.json"
MACHINES = 4
LAYERS = [1 << 20] * 32
BYTES = 4 * sum(LAYERS)
BATCH = 64
WARM = 2
"""Steps of each worker before samples count: connections open, and first parameters travel."""
BARE_S = 8.0
"""How long plain sockets send, by the bound."""
SIMULATED = 3
"""Times as many steps: a simulated worker beside the only shard takes nearly all of them."""


def job(strategy: gs.Strategy, steps: int) -> gs.Job:
    data = numbered(MACHINES * BATCH * steps)
    return gs.Job(
        Sized(LAYERS),
        data,
        strategy=strategy,
        optimizer=gs.optim.SGD(lr=1e-3),
        workers=MACHINES,
        batch_size=BATCH,
        steps=steps,
        checkpoint_every=None,
        acknowledge="applied",  # no backups: the bound is that of pushes and fetches
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
    parser = command_line(__doc__)
    parser.add_argument("--steps", type=int, default=20, help="of each worker")
    parser.add_argument("--mbit", type=int, default=1000, help="speed of each card, Mbit/s")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each kind; the median counts")
    parser.add_argument("--strategy", choices=[*KINDS], action="append", help="both where left out")
    parser.add_argument("--shards", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--carrier", default="auto", help="auto, grpc, or tcp")
    parser.add_argument("--insecure", action="store_true", help="plain text, to see what TLS costs")
    given = parser.parse_args()
    if reason := unavailable():
        raise SystemExit(reason)
    os.environ["OMP_NUM_THREADS"] = "1"
    for kind in given.strategy or KINDS:
        for shards in given.shards:
            put_row(row(given, kind, shards))


def put_row(row: Mapping[str, Any]) -> None:
    """Puts a row into the record."""
    same = ("strategy", "shards", "mbit", "carrier", "insecure")
    rows = kept(RECORD).get("rows", [])
    rows = [kept for kept in rows if any(kept[name] != row[name] for name in same)] + [row]
    rows.sort(key=lambda one: [one[name] for name in ("carrier", "insecure", "mbit", "strategy", "shards")])
    keep(RECORD, {"rows": rows})


def row(given: argparse.Namespace, kind: str, shards: int) -> dict[str, Any]:
    """One strategy with so many shards: measured, simulated, and by plain sockets."""
    os.environ["SHARDS_APART_STEPS"] = str(given.steps)
    runs = [measured(given, kind, shards) for _ in range(given.repeats)]
    runs.sort(key=lambda run: speed(run, shards, given.mbit)[1])
    run = runs[len(runs) // 2]
    per_s, of_bound = speed(run, shards, given.mbit)
    os.environ["SHARDS_APART_STEPS"] = str(SIMULATED * given.steps)
    config = simulated_world(given.mbit, statistics.median(step["compute_s"] for step in steps_of(run)))
    simulated = simulate(KINDS[kind](), servers=shards, config=config)
    simulated_per_s, simulated_of_bound = speed(simulated, shards, given.mbit)
    figures = {
        "strategy": kind,
        "shards": shards,
        "mbit": given.mbit,
        "carrier": given.carrier,
        "insecure": given.insecure,
        "samples_per_s": per_s,
        "of_bound": of_bound,
        "bare_of_bound": bare(given.mbit, shards),
        "simulated_samples_per_s": simulated_per_s,
        "simulated_of_bound": simulated_of_bound,
        "cores_used": cores_used(run),
        "steps": dict(Counter(step["node"] for step in steps_of(run))),
        "all_of_bound": [speed(run, shards, given.mbit)[1] for run in runs],
        **origin(),
    }
    print(
        f"{kind}, {shards} shards: {per_s:,.0f} samples/s, {of_bound:.0%} of the bound, plain sockets "
        f"{figures['bare_of_bound']:.0%}; simulated {simulated_per_s:,.0f}, {simulated_of_bound:.0%}; "
        f"{figures['cores_used']:.1f} cores used",
        flush=True,
    )
    return figures


def measured(given: argparse.Namespace, kind: str, shards: int) -> Run:
    """A run on all machines."""
    options = ["--servers", str(shards), "--set", f"carrier={given.carrier}"]
    options += ["--insecure"] if given.insecure else []
    with (
        tempfile.TemporaryDirectory() as folder,
        Machines(MACHINES, rate=f"{given.mbit}mbit") as machines,
    ):
        return run_on(machines, Path(folder), f"{__file__}:{kind}", *options)


def simulated_world(mbit: int, gradient_s: float) -> SimulationConfig:
    """The same machines, as far as their cards are concerned."""
    machines = {
        f"{role}-{index}": f"machine-{index}" for role in ("worker", "shard") for index in range(MACHINES)
    }
    network = Network(bandwidth_bytes_s=mbit * 1e6 / 8, link=Link(latency_s=50e-6), machines=machines)
    return SimulationConfig(costs={"gradient": Cost(base_s=gradient_s)}, network=network, shape_only=True)


def bare(mbit: int, shards: int) -> float:
    """How fast plain sockets move what each worker exchanges, over the bound."""
    card_bytes_s = mbit * 1e6 / 8
    each_bytes = int(
        BARE_S * card_bytes_s / busiest_card_bytes(dict.fromkeys(range(MACHINES), 1), shards) * BYTES / shards
    )
    with Machines(MACHINES, rate=f"{mbit}mbit") as machines:
        plan = {
            "addresses": [machine.address for machine in machines.machines],
            "shards": [shard % MACHINES for shard in range(shards)],
            "bytes": each_bytes,
        }
        program = [sys.executable, str(ROOT / "bench" / "bare_exchange.py")]
        started = [
            machine.start([*program, json.dumps(plan | {"me": me})], cwd=ROOT, stdout=subprocess.PIPE)
            for me, machine in enumerate(machines.machines)
        ]
        told = [json.loads(process.communicate()[0]) for process in started]
    took_s = max(one["ended_s"] for one in told) - min(one["begun_s"] for one in told)
    return BARE_S / took_s


def steps_of(run: Run) -> list[dict[str, Any]]:
    """Events of all workers' steps, in the order of time."""
    steps = [event for event in run.events if event["event"] == "step"]
    return sorted(steps, key=lambda event: float(event["time_s"]))


def speed(run: Run, shards: int, mbit: int) -> tuple[float, float]:
    """Samples/s of all workers, and the seconds that the busiest card needs over those that it took."""
    times_s: dict[str, list[float]] = {}
    for step in steps_of(run):
        times_s.setdefault(step["node"], []).append(step["time_s"])
    begun_s = max(times[WARM - 1] for times in times_s.values())
    ended_s = min(times[-1] for times in times_s.values())
    took_s = ended_s - begun_s
    counts = {
        int(node.rpartition("-")[2]): steps_until(ended_s, times) - steps_until(begun_s, times)
        for node, times in times_s.items()
    }
    bound_s = busiest_card_bytes(counts, shards) / (mbit * 1e6 / 8)
    return BATCH * sum(counts.values()) / took_s, bound_s / took_s


def steps_until(time_s: float, times_s: Sequence[float]) -> float:
    """How many steps a worker has done at a time, the begun part of a step included."""
    return float(np.interp(time_s, times_s, range(1, len(times_s) + 1)))


def busiest_card_bytes(steps: Mapping[int, float], shards: int) -> float:
    """Bytes each way of the machine with the most, by how many steps the worker of each machine takes."""

    def card_bytes(machine: int) -> float:
        own = len(range(machine, shards, MACHINES))
        others = sum(steps.values()) - steps[machine]
        return (own * others + (shards - own) * steps[machine]) * BYTES / shards

    return max(map(card_bytes, range(MACHINES)))


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


if __name__ == "__main__":
    main()
