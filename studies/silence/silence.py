"""Question: is anybody counted as lost who was merely not heard for a while, and how soon who is lost?

Stops nodes of small runs by SIGSTOP, and cuts one direction of the network between machines (network
namespaces, `tc clsact`), for parts and multiples of the lease. Every run has 1 shard and 2 workers under
Downpour in one long data epoch (at its end workers ask the coordinator), and goes on through all of its
stops or cuts.

    python studies/silence/silence.py  # everything, about half an hour
    python studies/silence/silence.py --only stop  # no root needed

Keeps what it finds with machine, commit and date in record.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import gradstream as gs
from gradstream._train import launch
from gradstream.job.files import load_job
from gradstream.machine.description import describe_machine, git_commit
from gradstream.run.local import LocalCluster
from gradstream.run.planning import plan_run
from gradstream.run.result import Run

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))
from common import ROOT, keep, kept
from kit.machines import Machines, unavailable
from kit.process_faults import Stopper

RESULT = Path(__file__).resolve().with_name("record.json")
LEASE_S = 10.0
STEP_S = 0.05
STOPS = {  # node: seconds and times
    "coordinator": [(5.0, 10), (12.0, 10), (20.0, 10), (60.0, 10)],
    "shard-0": [(9.0, 10), (15.0, 1)],
    "worker-1": [(9.0, 10), (15.0, 1)],
}
CUTS = {  # packets from the member's machine, or to it
    "from": [(0.5 * LEASE_S, 20), (0.9 * LEASE_S, 20), (1.5 * LEASE_S, 1)],
    "to": [(0.5 * LEASE_S, 20), (0.9 * LEASE_S, 20), (1.5 * LEASE_S, 1)],
}


def gradient(parameters: dict[str, Any], inputs: Any, targets: Any) -> dict[str, Any]:
    time.sleep(STEP_S)
    return {"w": 2 / len(inputs) * inputs.T @ (inputs @ parameters["w"] - targets)}


def job() -> gs.Job:
    model = gs.from_functions(
        init=lambda seed: {"w": np.zeros(3)}, outputs=lambda p, x: x @ p["w"], gradients=gradient
    )
    inputs = np.random.default_rng(0).normal(size=(200_000, 3)).astype(np.float32)
    data = gs.from_arrays(inputs, inputs @ np.array([1, 2, 3], np.float32))
    return gs.Job(
        model, data, strategy="downpour", optimizer=gs.optim.SGD(lr=0.01), workers=2, servers=1, batch_size=8,
        epochs=100_000, chunk_elems=64, checkpoint_every=None,
        deadlines=gs.Deadlines(join_s=300, lease_s=LEASE_S),
        until=gs.until(seconds=float(os.environ.get("SILENCE_S", 30))),
    )  # fmt: skip


def stop(node: str, seconds: float, times: int) -> dict[str, Any]:
    """One run in which a node is stopped so often."""
    gap_s = 3.0
    own = dataclasses.replace(
        load_job(f"{__file__}:job"),
        until=gs.until(seconds=times * (seconds + gap_s) + 2 * gap_s + 2 * LEASE_S * (seconds > LEASE_S)),
    )
    said = ""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder)
        with LocalCluster(run_dir / "logs", {"OMP_NUM_THREADS": "1"}) as cluster:
            stopper = Stopper(cluster, node, seconds, times=times, gap_s=gap_s)
            try:
                launch(plan_run(own, "silence"), run_dir, cluster=cluster, on_event=stopper)
            except gs.errors.GradstreamError as error:
                said = f"{type(error).__name__}: {error}"
            ended = {}
            stopper.check()
            while cluster.running and (message := cluster.message(2 * LEASE_S)) is not None:
                if "exited" in message:
                    ended[message["exited"]] = message["status"]
            tail = cluster.log_tail(node, 1)
        events = Run.load(run_dir).events
    left = [event for event in events if event["event"] == "left" and event["lost"]]
    return {
        "stopped_s": [round(each, 3) for each in stopper.stopped_s],
        "lost": [event["who"] for event in left],
        "error": said.partition("\n")[0],
        "last_words": tail if said or left else "",
        "statuses_after": ended,
        "longest_pause_of_a_worker_s": longest_pause_s(events),
    }


def longest_pause_s(events: list[dict[str, Any]]) -> dict[str, float]:
    """The longest time between two steps, by worker: does training go on?"""
    by_worker: dict[str, list[float]] = {}
    for event in events:
        if event["event"] == "step":
            by_worker.setdefault(event["node"], []).append(event["time_s"])
    return {who: round(max(map(float.__sub__, at[1:], at)), 3) for who, at in sorted(by_worker.items())}


def beside(runs: dict[str, list[tuple[float, int]]]) -> list[dict[str, Any]]:
    """All of them, beside one another."""
    asked = [(what, *one) for what, some in runs.items() for one in some]
    asked.sort(key=lambda one: -one[1] * one[2])
    processes = []
    for what, seconds, times in asked:
        command = [sys.executable, __file__, "--one", what, str(seconds), str(times)]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    found = []
    for process, (what, seconds, times) in zip(processes, asked, strict=True):
        said, _ = process.communicate()
        last = said.splitlines()[-1] if said else "{}"
        found.append({"what": what, "seconds": seconds, "times": times, **json.loads(last)})
        print(json.dumps(found[-1]), flush=True)
    return found


def cut(direction: str, seconds: float, times: int) -> dict[str, Any]:
    """One run of two machines, the second of which is cut off so often: what it sends, or what it is sent."""
    gap_s = 6.0
    with tempfile.TemporaryDirectory() as name, Machines(2) as machines:
        folder, python = Path(name), [sys.executable, "-m", "gradstream"]
        out = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "cwd": folder}
        first = machines[0]
        env = {
            "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'bench'}",
            "SILENCE_S": str(times * (seconds + gap_s) + 3 * gap_s),
        }
        shutil.copy(__file__, folder)  # both machines read the job
        words = [*python, "train", Path(__file__).name, "--listen", first.address, "--wait", "2"]
        words += ["--servers-on", "launcher"]
        launcher = first.start([*words, "--run-dir", "run"], env=env, **out)
        said = until_said(launcher, r"gradstream (join .*)")
        other = machines[1].start([*python, *shlex.split(said[1])], env=env, **out)
        events = folder / "run" / "events.jsonl"
        while not (events.is_file() and '"step"' in events.read_text()):
            for process in (launcher, other):
                assert process.poll() is None, process.communicate()[0]
            time.sleep(0.1)
        cuts, noticed_s = [], []
        for _ in range(times):
            time.sleep(gap_s)
            begun = time.monotonic()
            with machines.cut(1, direction) as one:
                while time.monotonic() - begun < seconds:
                    time.sleep(0.05)
                    if not noticed_s and '"event": "left"' in spaced(events.read_text()):
                        noticed_s.append(round(time.monotonic() - begun, 2))
            cuts.append(one.num_dropped)
        ends = [launcher.communicate()[0], other.communicate()[0]]
        told = [json.loads(line) for line in events.read_text().splitlines()]
        left = [event for event in told if event["event"] == "left" and event["lost"]]
        back = [event for event in told if event["event"] == "joined" and event["epoch"] > 1]
    return {
        "away_s": [round(one["time_s"] - gone["time_s"], 2) for gone, one in zip(left, back, strict=False)],
        "dropped_packets": cuts,
        "lost": [event["who"] for event in left],
        "noticed_after_s": noticed_s,
        "statuses": [launcher.returncode, other.returncode],
        "last_words": [end.splitlines()[-4:] for end in ends] if left or other.returncode else [],
    }


def spaced(text: str) -> str:
    """JSON lines with a space after each colon."""
    return text.replace('":"', '": "')


def until_said(process: subprocess.Popen[str], pattern: str) -> re.Match[str]:
    """The first line of a process in which the pattern is found."""
    said = []
    for line in process.stdout or ():
        said.append(line)
        if found := re.search(pattern, line):
            return found
    raise AssertionError("".join(said))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", choices=["stop", "cut"])
    parser.add_argument("--one", nargs=3, metavar=("NODE", "SECONDS", "TIMES"), help="one run alone")
    given = parser.parse_args()
    if given.one:
        what, seconds, times = given.one
        one = cut if what in ("from", "to") else stop
        print(json.dumps(one(what, float(seconds), int(times))))
        return
    found = kept(RESULT)
    if given.only != "cut":
        found["stops"] = beside(STOPS)
    if given.only != "stop":
        reason = unavailable()
        if reason:
            raise SystemExit(reason)
        found["cuts"] = beside(CUTS)
    found |= {
        "lease_s": LEASE_S,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": git_commit(ROOT),
        "machine": describe_machine({})["machine"],
    }
    keep(RESULT, found)


if __name__ == "__main__":
    main()
