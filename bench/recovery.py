"""Question: how long after the death of a process do the others notice, train on, and take a new one in?

    python bench/recovery.py                                  # every piece: about 12 minutes
    python bench/recovery.py --pieces "worker, allreduce"     # one of them; the others keep their figures
    python bench/recovery.py --pieces "hog; hog, default lease"     # 20 minutes beside processes that take every core

In a run of real processes one is killed (SIGKILL), or stopped (SIGSTOP), again and again, each time at a random
instant after all take part again. A step takes `STEP_S` in which the processor is idle, as if a device computed. The
times are those of events: of the kill on the run's clock, and of what the nodes have reported in events.jsonl.

noticed    the coordinator counts it as lost
committed  every other worker has the update of a round (or push) that it began after the kill
back       the new process has made its first step; of the coordinator and of a shard, it serves

The launcher waits longer with each restart of a worker that dies soon after the one before; the bench switches that
off, so that each death counts as the first one. Keeps what it finds in bench/results/recovery.json.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import nn

import gradstream as gs
from common import RESULTS, ROOT, command_line, keep, kept, now
from gradstream._train import launch
from gradstream.job.files import load_job
from gradstream.machine.description import describe_machine, git_commit
from gradstream.run.local import LocalCluster
from gradstream.run.local.environment import node_environment
from gradstream.run.planning import plan_run
from gradstream.run.result import Run

RESULT = RESULTS / "recovery.json"
STEP_S, LEASE_S = 0.02, 2.0
GAP_S = (0.2, 0.6)
PATIENCE_S = 60.0
Events = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Piece:
    """A run, and who is struck in it.

    Args:
        strategy: name of the strategy.
        victims: begin of the names of the nodes that are struck.
        workers: number of workers.
        at_once: how many are struck at a time.
        number: the signal.
        acknowledge: see `Job`: what a shard that is killed comes back from.
    """

    strategy: str
    victims: str
    workers: int = 3
    at_once: int = 1
    number: int = signal.SIGKILL
    acknowledge: Any = "applied"


PIECES = {
    "worker, downpour": Piece("downpour", "worker"),
    "worker, synchronous": Piece("synchronous", "worker"),
    "worker, allreduce": Piece("allreduce", "worker"),
    "coordinator, downpour": Piece("downpour", "coordinator"),
    "coordinator, synchronous": Piece("synchronous", "coordinator"),
    "shard, downpour": Piece("downpour", "shard", acknowledge="replicated"),
    "shard, synchronous": Piece("synchronous", "shard", acknowledge="replicated"),
    "shard, downpour, logged": Piece("downpour", "shard", acknowledge="logged"),
    "silent worker, downpour": Piece("downpour", "worker", 5, 4, signal.SIGSTOP),
}
HOGS = {"hog": LEASE_S, "hog, default lease": gs.Deadlines().lease_s}


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    time.sleep(STEP_S)
    return nn.functional.cross_entropy(outputs, targets)


def job() -> gs.Job:
    """The run, whatever its strategy: 85,002 parameters, 2 shards."""
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(4096, 64)).astype(np.float32)
    data = gs.from_arrays(inputs, rng.integers(0, 10, size=4096))
    return gs.Job(
        gs.from_torch(build, loss), data, strategy="downpour", optimizer=gs.optim.SGD(lr=0.01), workers=3,
        servers=2, batch_size=8, epochs=100_000, chunk_elems=1 << 14, checkpoint_every=None, max_restarts=1_000_000,
        deadlines=gs.Deadlines(lease_s=LEASE_S),
    )  # fmt: skip


class TimedCluster(LocalCluster):
    """Processes of a run, and the instant at which the run's clock showed 0."""

    zero_ns: int | None = None

    def message(self, timeout_s: float) -> dict[str, Any] | None:
        """See `LocalCluster.message`."""
        message = super().message(timeout_s)
        self.zero_ns = (message or {}).get("zero_ns", self.zero_ns)
        return message


class Striker:
    """Strikes nodes of a run, one after the other; give it to the run as `on_event`.

    Args:
        cluster: the processes.
        piece: whom, and how.
        strikes: after so many it asks the run to stop.
        rng: draws nodes and instants.

    Attributes:
        struck: name and time of each, in seconds of the run.
    """

    def __init__(self, cluster: TimedCluster, piece: Piece, strikes: int, rng: random.Random) -> None:
        self.struck: list[tuple[str, float]] = []
        self._cluster, self._piece, self._strikes, self._rng = cluster, piece, strikes, rng
        self._workers = {f"worker-{rank}" for rank in range(piece.workers)}
        self._steps: dict[str, int] = defaultdict(int)  # by worker, steps begun since the latest strike
        self._stopped: dict[str, int] = {}  # processes that stand still
        self._waits = False  # for a new coordinator, or for the backup that a shard keeps
        self._last_s, self._next_s = 0.0, 0.0

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Follows who takes part, and strikes when all do."""
        if event["event"] == "left" and event["who"] in self._stopped:
            os.kill(self._stopped.pop(event["who"]), signal.SIGCONT)
        if event["event"] == "coordinator":
            self._waits, self._last_s = False, event["time_s"]
            self._steps.clear()  # steps go on without it: those count that a worker makes later, and tells it
        if event["event"] == ("backed_up" if self._piece.acknowledge == "replicated" else "restored"):
            self._waits = False
        if event["event"] == "step" and begun_s(event) >= self._last_s:
            self._steps[event["node"]] += 1
        if self._cluster.zero_ns is None or len(self.struck) > self._strikes:
            return
        now_s = self._now_s()
        if now_s > self._last_s + PATIENCE_S:
            missing = sorted(name for name in self._workers if self._steps[name] < 2)
            raise AssertionError(f"{missing} made no 2 steps within {PATIENCE_S:g} s of {self.struck[-1:]}")
        if self._waits or any(self._steps[name] < 2 for name in self._workers):
            self._next_s = now_s + self._rng.uniform(*GAP_S)
        elif now_s > self._next_s:
            self._strike()

    def _strike(self) -> None:
        if len(self.struck) >= self._strikes:
            self.struck.append(("", self._now_s()))  # the end of the last strike's time
            self._cluster.signal("coordinator", signal.SIGTERM)
            return
        names = sorted(name for name in self._cluster.running if name.startswith(self._piece.victims))
        chosen = self._rng.sample(names, self._piece.at_once)
        self._steps.clear()
        self._waits = self._piece.victims in ("coordinator", "shard")
        for name in chosen:
            self._last_s = self._now_s()
            self.struck.append((name, self._last_s))
            os.kill(self._cluster.running[name], self._piece.number)
            if self._piece.number == signal.SIGSTOP:
                self._stopped[name] = self._cluster.running[name]

    def _now_s(self) -> float:
        assert self._cluster.zero_ns is not None
        return (time.monotonic_ns() - self._cluster.zero_ns) / 1e9


def begun_s(step: Mapping[str, Any]) -> float:
    """When the gradient of a step was begun."""
    return float(step["time_s"] - step["compute_s"])


def recovery(events: Events, who: str, at_s: float, together: Sequence[str] = ()) -> dict[str, float | None]:
    """What followed the death of one node.

    Args:
        events: of the run, from the death to the next one.
        who: its name.
        at_s: when it died.
        together: names of all nodes that died at that time.
    """
    begun: dict[str, list[float]] = defaultdict(list)
    first: dict[str, float] = {}
    for event in sorted(events, key=lambda event: event["time_s"]):
        if event["event"] == "step" and begun_s(event) >= at_s:
            begun[event["node"]].append(begun_s(event))
            first.setdefault(event["node"], event["time_s"])
        elif (
            event["event"] == "coordinator"
            or (event["event"] in ("left", "joined") and event["who"] == who)
            or (event["event"] == "restored" and event["node"] == who)
        ) and event["time_s"] >= at_s:
            first.setdefault(event["event"], event["time_s"])
    others = [times[1] for name, times in begun.items() if name not in (who, *together) and len(times) > 1]
    committed = max(others, default=None)
    served = {"coordinator": first.get("coordinator"), "shard": first.get("restored")}
    back = served.get(who.partition("-")[0], first.get(who))
    found = {
        "noticed_s": first.get("left"),
        "committed_s": committed,
        "joined_s": first.get("joined"),
        "back_s": back,
    }
    answer = {name: None if time_s is None else round(time_s - at_s, 4) for name, time_s in found.items()}
    if who == "coordinator" and back is not None:
        meanwhile = (event["time_s"] for event in events if event["event"] == "step")
        answer["steps_meanwhile"] = float(sum(at_s < time_s < back for time_s in meanwhile))
    return answer


def measured(piece: Piece, strikes: int, seed: int) -> dict[str, Any]:
    """One run with so many strikes, and what followed each; where the run ends of itself, why."""
    given = load_job(f"{Path(__file__).resolve()}:job")
    changed = replace(
        given, strategy=piece.strategy, workers=piece.workers, seed=seed, acknowledge=piece.acknowledge
    )
    if piece.strategy == "allreduce":
        changed = replace(changed, servers=None)
    ended = ""
    with tempfile.TemporaryDirectory() as name, patch("gradstream.run.restarts.CALM_S", 0.0):
        folder = Path(name)
        environment = node_environment(piece.workers, shards=piece.strategy != "allreduce")
        with TimedCluster(folder / "logs", environment, shards=piece.strategy != "allreduce") as cluster:
            striker = Striker(cluster, piece, strikes, random.Random(seed))
            try:
                launch(plan_run(changed, "recovery"), folder, cluster=cluster, on_event=striker)
            except gs.errors.Interrupted:
                pass
            except gs.errors.GradstreamError as error:
                ended = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        events = Run.load(folder).events
    assert striker.struck, f"nobody was struck: {ended}"
    struck = [one for one in striker.struck if one[0]]
    died = [time_s for _, time_s in striker.struck]
    each = []
    for index in range(0, len(struck), piece.at_once):
        some = struck[index : index + piece.at_once]
        until = died[index + piece.at_once] if index + piece.at_once < len(died) else float("inf")
        window = [event for event in events if some[0][1] <= event["time_s"] < until]
        each += [{"who": who, **recovery(window, who, at_s, [one for one, _ in some])} for who, at_s in some]
    lost = sum(event["event"] == "left" and event["lost"] for event in events)
    return {"ended": ended, "strikes": len(struck), "lost": lost, "each": each}


def figures(each: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Of each figure p50, p90, p99 (nearest rank), the largest, and how many there are."""
    answer = {}
    for name in dict.fromkeys(key for one in each for key in one if key != "who"):
        values = sorted(one[name] for one in each if one.get(name) is not None)
        if values:
            ranks = {f"p{part}": values[-(-part * len(values) // 100) - 1] for part in (50, 90, 99)}
            answer[name] = {**ranks, "largest": values[-1], "n": len(values)}
    return answer


def beside_hogs(seconds: float, lease_s: float) -> dict[str, Any]:
    """A run without a fault beside one busy process for each core: which nodes are taken for lost?"""
    given = load_job(f"{Path(__file__).resolve()}:job")
    given = replace(given, deadlines=gs.Deadlines(lease_s=lease_s))
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        for _ in range(len(os.sched_getaffinity(0))):
            hog = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(hog.kill)
        run = launch(plan_run(replace(given, until=gs.until(seconds=seconds)), "hog"), Path(name))
    lost = [event["who"] for event in run.events if event["event"] == "left" and event["lost"]]
    return {
        "seconds": seconds,
        "lease_s": lease_s,
        "hogs": len(os.sched_getaffinity(0)),
        "false_evictions": lost,
    }


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--pieces", default="; ".join(PIECES), help="separated by semicolons")
    parser.add_argument("--strikes", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hog-s", type=float, default=600.0)
    given = parser.parse_args()
    names = [name.strip() for name in given.pieces.split(";")]
    commit = git_commit(ROOT)
    for name in names:
        begun_s, load = time.monotonic(), os.getloadavg()[0]
        if name in HOGS:
            found = beside_hogs(given.hog_s, HOGS[name])
        else:
            found = measured(PIECES[name], given.strikes, given.seed)
        found["figures"] = figures(found.get("each", ()))
        found |= {"took_s": round(time.monotonic() - begun_s, 1), "load_before": round(load, 1)}
        found |= {"load_after": round(os.getloadavg()[0], 1), "commit": commit}
        found["date"] = now()
        print(name, json.dumps({key: value for key, value in found.items() if key != "each"}), flush=True)
        record: dict[str, Any] = {"pieces": {}} | kept(RESULT)
        record["pieces"][name] = found
        record |= {key: found[key] for key in ("date", "commit")}
        record |= {"step_s": STEP_S, "lease_s": LEASE_S, "machine": describe_machine({})["machine"]}
        keep(RESULT, record)


if __name__ == "__main__":
    main()
