"""Question: what does each way of aggregating cost on the original's machines, from 1 to 64 workers?

The system that gradstream follows gave one figure: seconds an epoch of Caltech-101, over the number of
instances, with one parameter server. This is the same on virtual time, for both of its models, with every
way of aggregating that gradstream has; nodes, strategies and messages are the real ones, arithmetic
is only paid for. A second table has one joined batch of 1,024 samples, divided in ever more parts.

Machines: 2.74 s for a minibatch of 256 of the smaller model, as the closed queue fitted to the original's
figure has it, 11.6 s of the larger one (56 minutes for 10 epochs of 29 minibatches on one machine). The
server took 1.44 s for a gradient of 86.4 MB (float64): 60 MB/s each way of a network card. Messages take
0.5 ms. We send float32.

    python studies/scaling/scaling.py  # both tables and plots
    python studies/scaling/scaling.py --most 16  # up to 16 workers

Where nothing overlaps and compute is deterministic, the closed form stands beside the simulated time.
Prints the tables, and keeps them with plots, commit and date in bench/results/.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradstream as gs
from gradstream._simulate import simulate
from gradstream.collectives.algorithms import ALGORITHMS
from gradstream.machine.description import git_commit
from gradstream.runtime.deadlines import Deadlines
from gradstream.runtime.simulation import Cost, Link, Network, SimulationConfig
from gradstream.strategies.allreduce import AllReduce
from gradstream.strategies.base import Strategy
from gradstream.testing.runs import Sized, numbered

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))
from common import ROOT, command_line, keep, kept

BANDWIDTH_BYTES_S = 86.4e6 / 1.44
LATENCY_S = 0.5e-3
BATCH, SAMPLES = 256, 29 * 256
# Cards serve frames in the order they come: 64 workers' chunks stand before the last one's first.
PATIENT = Deadlines(silence_s=3600.0, retry_s=7200.0, lease_s=3600.0)
WORKERS = [1, 2, 4, 8, 16, 32, 64]


@dataclass(frozen=True)
class Subject:
    """A model of the original.

    Args:
        widths: of its layers, inputs first.
        batch_s: seconds of a worker for a minibatch of 256.
    """

    widths: tuple[int, ...]
    batch_s: float

    @property
    def layers(self) -> list[int]:
        """Parameters of each layer, in backward order."""
        pairs = zip(self.widths, self.widths[1:], strict=False)
        return [(inputs + 1) * outputs for inputs, outputs in pairs][::-1]

    @property
    def size_bytes(self) -> int:
        """Of the parameters in float32."""
        return 4 * sum(self.layers)


SUBJECTS = {
    "10,805,651": Subject((12288, 800, 600, 400, 350, 250, 101), 2.74),
    "74,770,901": Subject((49152, 1500, 650, 101), 56 * 60 / 10 / 29),
}


@dataclass(frozen=True)
class Scheme:
    """A way of aggregating.

    Args:
        strategy: by which it is done.
        servers: shards, each on a machine of its own.
        closed_s: exchange of n bytes among p workers, where there is a closed form and nothing overlaps.
        steps: simulated (of few workers three times as many): what is asynchronous takes longer to settle.
    """

    strategy: Strategy
    servers: int = 0
    closed_s: Callable[[int, float], float] | None = None
    steps: int = 5


def collective(name: str, *, overlap: bool = False, bucket_mib: float = 4096.0) -> Scheme:
    """An allreduce of the whole vector at once, with its closed form (sums cost nothing here)."""

    def closed_s(workers: int, size_bytes: float) -> float:
        cost = ALGORITHMS[name].cost(workers)
        return cost.seconds(round(size_bytes), LATENCY_S, 1 / BANDWIDTH_BYTES_S)

    strategy = AllReduce(algorithm=name, overlap=overlap, bucket_mib=bucket_mib)
    return Scheme(strategy, closed_s=None if overlap else closed_s)


SCHEMES: Mapping[str, Scheme] = {
    "downpour, 1 server": Scheme(gs.Downpour(overlap=False), servers=1, steps=9),
    "downpour, period 10, 1 server": Scheme(gs.Downpour(push_every=10, fetch_every=10), servers=1, steps=40),
    "synchronous, 1 server": Scheme(gs.Synchronous(overlap=False), servers=1),
    "synchronous, 4 servers": Scheme(gs.Synchronous(overlap=False), servers=4),
    "synchronous, 16 servers": Scheme(gs.Synchronous(overlap=False), servers=16),
    "synchronous, 16 servers, overlap": Scheme(gs.Synchronous(), servers=16),
    **{f"allreduce, {name}": collective(name) for name in ALGORITHMS},
    "allreduce, ring, overlap": collective("ring", overlap=True, bucket_mib=4.0),
}


def config(batch_s: float, *, bandwidth_bytes_s: float = BANDWIDTH_BYTES_S) -> SimulationConfig:
    """The original's machines."""
    return SimulationConfig(
        costs={"gradient": Cost(per_sample_s=batch_s / BATCH)},
        network=Network(bandwidth_bytes_s=bandwidth_bytes_s, link=Link(latency_s=LATENCY_S)),
        shape_only=True,
    )


def step_s(
    layers: Sequence[int], scheme: Scheme, workers: int, *, batch: int, where: SimulationConfig
) -> float:
    """Mean seconds between two minibatches of each worker, once all are under way, and without the last one.

    The last one takes longer: the run ends with it.
    """
    steps = scheme.steps if workers > 8 else 3 * scheme.steps
    run = simulate(
        Sized(layers),
        numbered(batch * workers * steps),
        config=where,
        strategy=scheme.strategy,
        workers=workers,
        servers=scheme.servers,
        batch_size=batch,
        steps=steps,
        chunk_elems=1 << 20,
        deadlines=PATIENT,
    )
    ends_s = sorted(event["time_s"] for event in run.events if event["event"] == "step")
    skipped = workers * (steps // 3)
    last = len(ends_s) - workers
    return (ends_s[last - 1] - ends_s[skipped - 1]) / ((last - skipped) / workers)


def scaling(most: int, only: str) -> dict[str, Any]:
    """Seconds an epoch, by model, scheme and number of workers; with closed forms where there are any."""
    found: dict[str, Any] = {}
    for name, subject in SUBJECTS.items():
        rows = found[name] = {}
        for title, scheme in ((one, scheme) for one, scheme in SCHEMES.items() if only in one):
            row = rows[title] = {"epoch_s": [], "closed_s": []}
            for workers in [count for count in WORKERS if count <= most]:
                where = config(subject.batch_s)
                seconds = step_s(subject.layers, scheme, workers, batch=BATCH, where=where)
                rounds = SAMPLES / BATCH / workers
                row["epoch_s"].append(seconds * rounds)
                if scheme.closed_s is not None:
                    closed = subject.batch_s + scheme.closed_s(workers, subject.size_bytes)
                    row["closed_s"].append(closed * rounds)
            print(name, title, " ".join(f"{s:.1f}" for s in row["epoch_s"]), flush=True)
            if row["closed_s"]:
                print(name, "   closed form", " ".join(f"{s:.1f}" for s in row["closed_s"]), flush=True)
    return found


def divided() -> list[dict[str, Any]]:
    """One joined batch of 1,024 samples in ever more parts: what is left of the exchange beside compute.

    A deep network of the smaller model's size and speed: 16 layers alike, so that most gradients are ready
    long before backprop ends.
    """
    shallow, rows = SUBJECTS["10,805,651"], []
    layers = [sum(shallow.layers) // 16] * 16
    for bandwidth in (12.5e6, 125e6, 1.25e9):
        where = config(shallow.batch_s, bandwidth_bytes_s=bandwidth)
        for workers in (1, 4, 16, 64):
            batch = 1024 // workers
            row: dict[str, Any] = {"workers": workers, "batch": batch, "bandwidth_bytes_s": bandwidth}
            row["compute_s"] = shallow.batch_s / BATCH * batch
            for overlap in (False, True):
                scheme = collective("halving-doubling", overlap=overlap, bucket_mib=4.0)
                seconds = step_s(layers, scheme, workers, batch=batch, where=where)
                row["overlap_s" if overlap else "apart_s"] = seconds
            exchange_s = row["apart_s"] - row["compute_s"]
            row["hidden"] = (row["apart_s"] - row["overlap_s"]) / exchange_s if workers > 1 else 1.0
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


def plot(found: Mapping[str, Any], path: Path) -> None:
    """One picture a model: seconds an epoch over workers."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(found), figsize=(13, 5.5))
    for axis, (name, rows) in zip(axes, found.items(), strict=True):
        for number, (title, row) in enumerate(rows.items()):
            style = {"d": ":", "s": "--"}.get(title[0], "-")
            seconds, color = row["epoch_s"], f"C{number % 10}"
            axis.plot(WORKERS[: len(seconds)], seconds, style, marker=".", label=title, color=color)
        axis.set(xscale="log", yscale="log", xlabel="workers", ylabel="seconds an epoch", title=name)
        axis.set_xticks(WORKERS, [str(count) for count in WORKERS])
        axis.grid(alpha=0.3)
    axes[-1].legend(fontsize=7, loc="lower left")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def merged(result: dict[str, Any]) -> dict[str, Any]:
    """Writes it down, beside what was found before of other schemes or more workers; returns all of it."""
    path = Path(__file__).with_name("record.json")
    before = kept(path)
    for name, rows in before.get("scaling", {}).items():
        result["scaling"][name] = {**rows, **_longer(result["scaling"][name], rows)}
    record = {
        **before,
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "commit": git_commit(ROOT),
    }
    record |= {name: part for name, part in result.items() if part}
    keep(path, record)
    return record


def _longer(found: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Each row of `found`, and behind it what `before` has of more workers."""
    return {
        title: {key: seconds + before.get(title, row)[key][len(seconds) :] for key, seconds in row.items()}
        for title, row in found.items()
    }


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--most", type=int, default=64, help="workers")
    parser.add_argument("--only", default="", help="schemes whose names have this in them")
    given = parser.parse_args()
    found = {"scaling": scaling(given.most, given.only), "divided": [] if given.only else divided()}
    plot(merged(found)["scaling"], Path(__file__).with_name("scaling.png"))


if __name__ == "__main__":
    main()
