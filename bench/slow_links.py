"""Question: how soon do four machines behind 100 Mbit/s have a network of 10 million parameters at an accuracy?

Makes the machines as network namespaces of this one (`tc tbf`), which share its cores. Each row trains the same network
on the same images, 16 a machine and step, for `--seconds` at most: gradstream's strategies, with codecs, and torch's
DDP over gloo with what torch has against slow links. What counts is the time until `--accuracy` of the held-back images
are right, with evaluations and the start of training, without the start of processes. Takes root, `ip` and `tc`.

    python bench/slow_links.py                          # all rows: some 15 minutes
    python bench/slow_links.py --only local-sgd --out ""

Rows that are in the record are kept, unless `--anew`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from four_machines import run_on
from gradstream.testing.machines import Machines, unavailable
from records import RESULTS, ROOT, command_line, origin

JOB = ROOT / "bench" / "links" / "mlp.py"
LOCAL = ("--strategy", "local-sgd", "--set", "strategy.every=20")
# A data epoch has 79 minibatches of each machine, and rounds end with it.
FAR = ("--strategy", "local-sgd", "--set", "strategy.every=79")
ASYNC = ("--strategy", "async-diloco", "--set", "strategy.every=60", "--set", "strategy.delay=60")

OURS: dict[str, tuple[str, ...]] = {
    "allreduce": ("--strategy", "allreduce", "--set", "evaluate_every=4"),
    "allreduce, int4": ("--strategy", "allreduce", "--codec", "int4", "--set", "evaluate_every=10"),
    "allreduce, top-k 0.01": ("--strategy", "allreduce", "--codec", "top-k", "--set", "evaluate_every=20"),
    "allreduce, powersgd": ("--strategy", "allreduce", "--codec", "powersgd", "--set", "evaluate_every=20"),
    "local-sgd, H = 20": (*LOCAL, "--set", "evaluate_every=1"),
    "local-sgd, H = 20, float4": (*LOCAL, "--codec", "float4", "--set", "evaluate_every=1"),
    "local-sgd, H = 79, float4": (*FAR, "--codec", "float4", "--set", "evaluate_every=1"),
    "async-diloco, int8": (*ASYNC, "--codec", "int8", "--set", "evaluate_every=40"),
    "local-sgd, H = 20, one-bit": (*LOCAL, "--codec", "one-bit", "--set", "evaluate_every=1"),
}
PEERS = {"ddp": 0.02, "bf16": 0.02, "powersgd": 0.02, "post-local": 0.02}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--seconds", type=float, default=90.0, help="of each row, at most")
    parser.add_argument("--accuracy", type=float, default=0.84)
    parser.add_argument("--rate", default="100mbit", help="of each network card")
    parser.add_argument("--latency-ms", type=float, default=0.0, help="from one machine to another, one way")
    parser.add_argument("--only", default="", help="rows whose names begin so")
    parser.add_argument("--anew", action="store_true")
    parser.add_argument("--out", default=str(RESULTS / "slow-links.json"), help='the record; "" for nowhere')
    given = parser.parse_args()
    if reason := unavailable():
        raise SystemExit(reason)
    out = Path(given.out) if given.out else None
    record: dict[str, Any] = {"rows": {}}
    if out is not None and out.exists() and not given.anew:
        record = json.loads(out.read_text())
    record |= {"question": (__doc__ or "").splitlines()[0], **origin()}
    record |= {"seconds": given.seconds, "accuracy": given.accuracy, "rate": given.rate}
    record |= {"latency_ms": given.latency_ms}
    for name in [*OURS, *(f"torch: {one}" for one in PEERS)]:
        if not name.startswith(given.only) or name in record["rows"]:
            continue
        link = {"rate": given.rate, "latency_s": given.latency_ms / 1e3}
        with tempfile.TemporaryDirectory() as folder, Machines(4, **link) as machines:
            curve = measure(name, machines, Path(folder), given.seconds)
        record["rows"][name] = row = summed(curve, given.accuracy)
        print(
            f"{name:30s} {row['reached_s'] or '-':>8} s   {row['steps_per_s']:.2f} steps/s, best {row['best']:.3f}"
        )
        if out is not None:
            out.write_text(json.dumps(record, indent=1) + "\n")


def measure(name: str, machines: Machines, folder: Path, seconds: float) -> list[tuple[float, int, float]]:
    """(seconds, steps, accuracy) of a row."""
    if name in OURS:
        until = ("--set", f"until.seconds={seconds:g}", "--seed", "0", "--json")
        run = run_on(machines, folder, str(JOB), *OURS[name], *until)
        steps = re.search(r"H = (\d+)", name)
        every = int(steps[1]) if steps else 1
        evaluated = [event for event in run.events if event["event"] == "evaluated"]
        return [(one["time_s"], one["step"] * every, one["accuracy"]) for one in evaluated]
    return peer(name.removeprefix("torch: "), machines, folder, seconds)


def peer(method: str, machines: Machines, folder: Path, seconds: float) -> list[tuple[float, int, float]]:
    """The same of torch."""
    environment = {
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "bench")]),
        "GLOO_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": "1",
    }
    ranks = []
    for rank, machine in enumerate(machines.machines):
        words = [
            method,
            str(rank),
            str(len(machines.machines)),
            machines[0].address,
            str(seconds),
            str(PEERS[method]),
        ]
        ranks.append(
            machine.start(
                [sys.executable, str(ROOT / "bench" / "links" / "peer.py"), *words],
                cwd=folder,
                env=environment,
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            )
        )
    said, _ = ranks[0].communicate(timeout=20 * seconds)
    for process in ranks[1:]:
        process.wait(60)
    return [(seconds, step, right) for seconds, step, right in map(json.loads, said.splitlines())]


def summed(curve: list[tuple[float, int, float]], accuracy: float) -> dict[str, Any]:
    """What a row says."""
    reached = next((seconds for seconds, _, right in curve if right >= accuracy), None)
    last_s, last_step, _ = curve[-1] if curve else (1.0, 0, 0.0)
    return {
        "reached_s": None if reached is None else round(reached, 1),
        "best": max((right for _, _, right in curve), default=0.0),
        "steps_per_s": last_step / last_s,
        "curve": curve,
    }


if __name__ == "__main__":
    main()
