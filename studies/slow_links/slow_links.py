"""Question: how soon do four machines behind slow links have a network at a fixed accuracy or loss on held-back data?

Makes the machines as network namespaces of this one (`tc tbf`), which share its cores. Each row trains one of the
networks of `slow_links/tasks.py` on all of them with one thread each: gradstream's strategies with codecs, torch's
DDP over gloo with what torch has against slow links, hivemind with local updates, torchft's DiLoCo. A row's rate is
that of its family in `slow_links/rates.py`. What counts is the time until an evaluation has the goal; evaluations are
in it, the start of processes is not. A row is cut at `--times` the best time of gradstream so far, and not repeated
with other seeds if it was cut with the first one. Takes root, `ip`, `tc` and GRADSTREAM_DATA.

    python studies/slow_links/slow_links.py  # 100 Mbit/s: about two hours
    python studies/slow_links/slow_links.py --rate 10mbit --latency-ms 50
    python studies/slow_links/slow_links.py --rate 10gbit --ours  # gradstream without a limit, to compare with
    python studies/slow_links/slow_links.py --task small --only local-sgd --seeds 1 --no-record
    python studies/slow_links/slow_links.py --ours --only auto --part auto
    python studies/slow_links/slow_links.py --ours --task small --only "local-sgd, one-bit" --part auto

hivemind and torchft want packages that gradstream does not: `--peers PYTHON` names an interpreter that has both, and
what gradstream requires. Rows that are in the record are kept, unless `--anew`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peer import PORT, WORLD
from rates import RECORD
from tasks import TASKS, Task

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))
from common import ROOT, command_line, keep_part, kept, origin, run_on
from kit.machines import Machine, Machines, unavailable

JOB, PEER = (Path(__file__).with_name(name).resolve() for name in ("tasks.py", "peer.py"))
PERIOD = 20
START_S = 180.0
"""For processes to begin to train."""


@dataclass(frozen=True)
class Ours:
    """A way to train with gradstream.

    Args:
        family: whose rate it takes.
        strategy, codec: as on the command line.
        fetch_codec: of parameters that shards send.
        look: steps of the strategy between two evaluations, some 20 minibatches of each machine.
        options: of the strategy.
    """

    family: str
    strategy: str
    codec: str = ""
    look: int = 1
    options: Mapping[str, Any] | None = None
    fetch_codec: str = ""

    def words(self) -> list[str]:
        """On the command line."""
        words = ["--strategy", self.strategy, "--set", f"evaluate_every={self.look}"]
        words += ["--codec", self.codec] if self.codec else []
        words += ["--set", f"fetch_codec={self.fetch_codec}"] if self.fetch_codec else []
        for name, value in (self.options or {}).items():
            words += ["--set", f"strategy.{name}={value}"]
        return words


@dataclass(frozen=True)
class Peer:
    """A way to train with something else: see `links.peer.Asked`."""

    family: str
    method: str
    period: int = 0
    delay: int = 0


TICKS_S = (5, 10, 20, 50, 100, 200, 300)

EVERY = {"every": PERIOD}
OURS = {
    "local-sgd, one-bit": Ours("local", "local-sgd", "one-bit", 1, EVERY),
    "local-sgd, float4": Ours("local", "local-sgd", "float4", 1, EVERY),
    "local-sgd, float4, H = 40": Ours("local", "local-sgd", "float4", 1, {"every": 2 * PERIOD}),
    "local-sgd, one-bit, H = 80": Ours("local", "local-sgd", "one-bit", 1, {"every": 4 * PERIOD}),
    "local-sgd, one-bit, delay 5": Ours("local", "local-sgd", "one-bit", 1, {**EVERY, "delay": 5}),
    "local-sgd, chunk-top-k": Ours("local", "local-sgd", "chunk-top-k", 1, EVERY),
    "local-sgd, chunk-top-k, outer momentum 0.5": Ours(
        "local", "local-sgd", "chunk-top-k", 1, {**EVERY, "outer_momentum": 0.5}
    ),
    "local-sgd, chunk-top-k, outer momentum 0.5, delay 8": Ours(
        "local", "local-sgd", "chunk-top-k", 1, {**EVERY, "outer_momentum": 0.5, "delay": 8}
    ),
    "local-sgd, one-bit, outer momentum 0.5": Ours(
        "local", "local-sgd", "one-bit", 1, {**EVERY, "outer_momentum": 0.5}
    ),
    "local-sgd, float4, outer momentum 0.3": Ours(
        "local", "local-sgd", "float4", 1, {**EVERY, "outer_momentum": 0.3}
    ),
    "diloco, float4": Ours("outer", "diloco", "float4", PERIOD, EVERY, "int8"),
    "async-diloco, int8": Ours(
        "outer", "async-diloco", "int8", PERIOD, {**EVERY, "delay": PERIOD // 4}, "int8"
    ),
    "streaming-diloco, float4": Ours(
        "outer", "streaming-diloco", "float4", PERIOD, {**EVERY, "delay": 4}, "int8"
    ),
    "streaming-diloco, one-bit, H = 80": Ours(
        "outer",
        "streaming-diloco",
        "one-bit",
        4 * PERIOD,
        {"every": 4 * PERIOD, "delay": PERIOD},
        "int8",
    ),
    "allreduce, float4": Ours("compressed", "allreduce", "float4", PERIOD),
    "allreduce, powersgd": Ours("compressed", "allreduce", "powersgd", PERIOD),
    "allreduce": Ours("joined", "allreduce", "", PERIOD),
    "auto": Ours("local", "auto", "", PERIOD),
}
PEERS = {
    "torch DDP": Peer("joined", "ddp"),
    "torch DDP, PowerSGD 1": Peer("compressed", "powersgd-1"),
    "torch DDP, PowerSGD 4": Peer("compressed", "powersgd-4"),
    "torch post-local SGD, 20": Peer("local", "post-local", 20),
    "torch post-local SGD, 50": Peer("local", "post-local", 50),
    "torch post-local SGD, 200": Peer("local", "post-local", 200),
    "hivemind, local updates": Peer("local", "hivemind", 20),
    "torchft DiLoCo": Peer("outer", "torchft", 20),
    "torchft DiLoCo, delay 10": Peer("outer", "torchft", 20, 10),
}

VARIANTS = {
    "async-diloco, int8",
    "auto",
    "torch DDP, PowerSGD 4",
    "torch post-local SGD, 50",
    "torch post-local SGD, 200",
    "torchft DiLoCo",
}
"""They come after all others, for whom time is short."""


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--task", choices=[*TASKS, ""], default="", help="one of them; all")
    parser.add_argument("--rate", default="100mbit", help="of each network card")
    parser.add_argument("--latency-ms", type=float, default=0.0, help="from one machine to another, one way")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=300.0, help="of a row of gradstream, at most")
    parser.add_argument(
        "--times", type=float, default=6.0, help="the best time of gradstream: then a row is cut"
    )
    parser.add_argument("--only", default="", help="the row of that name, or rows whose names begin so")
    parser.add_argument("--ours", action="store_true", help="without peers")
    parser.add_argument("--peers", default=sys.executable, metavar="PYTHON", help="interpreter of the peers")
    parser.add_argument("--anew", action="store_true")
    parser.add_argument("--part", choices=["links", "auto"], default="links", help="of the record")
    parser.add_argument("--no-record", action="store_true")
    given = parser.parse_args()
    if reason := unavailable():
        raise SystemExit(reason)
    record: dict[str, Any] = {"rows": {}}
    if not given.no_record and not given.anew:
        record |= kept(RECORD).get(given.part, {})
    record["question"] = (__doc__ or "").splitlines()[0]
    link = f"{given.rate}, {given.latency_ms:g} ms"
    every = [*OURS, *(() if given.ours else PEERS)]
    names = [given.only] if given.only in every else [name for name in every if name.startswith(given.only)]
    tasks = [given.task] if given.task else list(TASKS)
    order = [
        (seed, task, name)
        for variants in (False, True)
        for seed in range(given.seeds)
        for task in tasks
        for name in names
        if (name in VARIANTS) is variants
    ]
    for seed, task, name in order:
        key = ", ".join((task, link, name, str(seed)))
        earlier = record["rows"].get(", ".join((task, link, name, "0")))
        if key in record["rows"] or (seed and earlier and earlier["reached_s"] is None):
            continue
        limit_s = min(given.seconds, given.times * best(record["rows"], task, link))
        row = measured(given, task, name, seed, limit_s)
        record["rows"][key] = row | {"limit_s": limit_s, **origin()}
        print(f"{key:60s} {shown(row)}", flush=True)
        if not given.no_record:
            keep_part(RECORD, given.part, record)
    for task in TASKS:
        table(record["rows"], task, link)
    if not given.no_record and given.part == "links":
        plot(record["rows"], link, RECORD.with_name(f"{given.rate}.png"))


def measured(given: argparse.Namespace, task: str, name: str, seed: int, limit_s: float) -> dict[str, Any]:
    """One run: (seconds, minibatches of each machine, accuracy or loss) at its evaluations, and what cards sent."""
    link = {"rate": given.rate, "latency_s": given.latency_ms / 1e3}
    with tempfile.TemporaryDirectory() as folder, Machines(WORLD, **link) as machines:
        if name in OURS:
            curve = ours(OURS[name], task, seed, machines, Path(folder), limit_s)
        else:
            curve = peer(PEERS[name], task, seed, machines, Path(folder), limit_s, given.peers)
        sent_bytes = sum(sent(machine, Path(folder)) for machine in machines.machines)
    reached = next((seconds for seconds, _, found in curve if TASKS[task].reached(found)), None)
    sign = 1 if TASKS[task].goal[0] == "accuracy" else -1
    last_s, steps, _ = curve[-1] if curve else (math.nan, 0, 0.0)
    return {
        "reached_s": reached,
        "steps": steps,
        "steps_per_s": steps / last_s,
        "best": max((found for *_, found in curve), default=math.nan, key=lambda one: sign * one),
        "sent_bytes": sent_bytes,
        "curve": curve,
    }


Curve = list[tuple[float, float, float]]


def ours(row: Ours, task: str, seed: int, machines: Machines, folder: Path, limit_s: float) -> Curve:
    """A run of gradstream."""
    measure, goal = TASKS[task].goal
    until = ("--set", f"until.seconds={limit_s:g}", "--set", f"until.{measure}={goal}")
    words = [*row.words(), *until, "--lr", str(rate(task, row.family)), "--seed", str(seed), "--json"]
    run = run_on(machines, folder, f"{JOB}:{task}", *words)
    per_s = run.summary["samples_per_s"] / (WORLD * TASKS[task].batch)
    found = [event for event in run.events if event["event"] == "evaluated"]
    return [
        (event["time_s"], per_s * event["time_s"], event[measure.removeprefix("test_")]) for event in found
    ]


def peer(
    row: Peer, task: str, seed: int, machines: Machines, folder: Path, limit_s: float, python: str
) -> Curve:
    """Rank 0 says how it goes, and all ranks are killed when it has the goal."""
    asked = {
        "task": task,
        "method": row.method,
        "seed": seed,
        "addresses": [machine.address for machine in machines.machines],
        "folder": str(folder),
        "lr": rate(task, row.family),
        "period": row.period,
        "delay": row.delay,
    }
    if row.method.startswith("torchft"):
        start_lighthouse(machines[0], folder, python, WORLD)
    for rank, machine in enumerate(machines.machines):
        start_peer(machine, folder, python, asked | {"rank": rank})
    return followed(machines, folder, TASKS[task], limit_s)


def start_peer(machine: Machine, folder: Path, python: str, asked: Mapping[str, Any]) -> None:
    """Starts a rank of `peer.py`, whose output is in the file "log"."""
    environment = {
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "bench")]),
        "GLOO_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": "1",
    }
    with (folder / "log").open("a") as log:
        machine.start(
            [python, str(PEER), json.dumps(asked)], cwd=folder, env=environment, stdout=log, stderr=log
        )


def start_lighthouse(machine: Machine, folder: Path, python: str, least: int) -> None:
    """Starts torchft's."""
    words = ["--min_replicas", str(least), "--bind", f"0.0.0.0:{PORT + 10}", "--join_timeout_ms", "2000"]
    with (folder / "log").open("a") as log:
        program = str(Path(python).with_name("torchft_lighthouse"))
        machine.start([program, *words], cwd=folder, stdout=log, stderr=log)


def followed(
    machines: Machines,
    folder: Path,
    task: Task,
    limit_s: float,
    acts: Sequence[tuple[float, Callable[[], object]]] = (),
) -> Curve:
    """The evaluations of rank 0 until one has the goal or the time is over; then all processes are killed.

    Args:
        machines: of the ranks.
        folder: where rank 0 has its file "curve".
        task: has the goal.
        limit_s: seconds of training at most.
        acts: what to do after so many seconds of training.
    """
    path, curve, left, begun_s = folder / "curve", [], list(acts), math.inf
    end_s = time.monotonic() + START_S
    while time.monotonic() < min(end_s, begun_s + limit_s) and not (curve and task.reached(curve[-1][2])):
        time.sleep(0.05)
        curve = [tuple(json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []
        if curve and begun_s == math.inf:
            begun_s, end_s = time.monotonic(), math.inf
        while left and time.monotonic() > begun_s + left[0][0]:
            left.pop(0)[1]()
    for machine in machines.machines:
        machine.kill()  # with the processes that hivemind has started
    if len(curve) < 2 and (log := folder / "log").exists():
        print("".join(log.read_text().splitlines(keepends=True)[-40:]), file=sys.stderr)
    return curve[1:]


def sent(machine: Machine, folder: Path) -> int:
    """Bytes that its card has sent."""
    process = machine.start(
        ["cat", "/sys/class/net/eth0/statistics/tx_bytes"], cwd=folder, stdout=subprocess.PIPE
    )
    return int(process.communicate()[0] or 0)


def rate(task: str, family: str) -> float:
    """The one with which the family needed the fewest minibatches.

    Where gradients are compressed, with feedback, the smallest of those with which plain ones reach the goal: at the
    quickest of plain gradients the cnn learns nothing with `float4`, and slowly with PowerSGD.
    """
    rows = kept(RECORD)["rates"]["rows"]
    if family == "compressed":
        return min(float(one) for one, steps in rows[f"{task}, joined"].items() if steps)
    rows = rows[f"{task}, {family}"]
    return float(min(rows, key=lambda one: rows[one] or math.inf))


def best(rows: Mapping[str, Any], task: str, link: str) -> float:
    """Seconds of the quickest row of gradstream so far."""
    known = (rows.get(", ".join((task, link, name, "0"))) for name in OURS)
    return min((row["reached_s"] for row in known if row and row["reached_s"]), default=math.inf)


def shown(row: Mapping[str, Any]) -> str:
    """A row in a line."""
    reached = (
        f"{row['reached_s']:.1f} s"
        if row["reached_s"]
        else f"not in {row['curve'][-1][0]:.0f} s"
        if row["curve"]
        else "no evaluation"
    )
    sent_mb = row["sent_bytes"] / 1e6
    return f"{reached}; {row['steps_per_s']:.2f} minibatches/s, {sent_mb:.0f} MB, best {row['best']:.3f}"


def table(rows: Mapping[str, Any], task: str, link: str) -> None:
    """Medians over the seeds."""
    for name in [*OURS, *PEERS]:
        found = [row for key, row in rows.items() if key.rpartition(", ")[0] == f"{task}, {link}, {name}"]
        if not found:
            continue
        times = [row["reached_s"] or math.inf for row in found]
        speed = statistics.median(row["steps_per_s"] for row in found)
        sent_mb = statistics.median(row["sent_bytes"] for row in found) / 1e6
        spread = f"{min(times):.1f} to {max(times):.1f}"
        print(
            f"{task:6s} {name:28s} {statistics.median(times):8.1f} s ({spread})  {speed:.2f}/s  {sent_mb:.0f} MB"
        )


def plot(rows: Mapping[str, Any], link: str, to: Path) -> None:
    """Accuracy or loss on held-back data over seconds, of the first seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(TASKS), figsize=(15, 5))
    for axis, (task, about) in zip(axes, TASKS.items(), strict=True):
        for name in [*OURS, *PEERS]:
            if row := rows.get(", ".join((task, link, name, "0"))):
                points = [(seconds, right) for seconds, _, right in row["curve"]]
                style = "-" if name in OURS else ":"
                axis.plot(*zip(*points, strict=True), style, label=name) if points else None
                axis.legend(fontsize=7)
        axis.axhline(about.goal[1], color="grey", linewidth=0.5)
        axis.set(title=f"{task}, {link}", xlabel="seconds", ylabel=about.goal[0], xscale="log")
        axis.set_xticks(TICKS_S, map(str, TICKS_S))
        axis.minorticks_off()
    figure.tight_layout()
    figure.savefig(to, dpi=80)


if __name__ == "__main__":
    main()
