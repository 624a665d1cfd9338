"""A model that is too large for one machine: each process in a memory cgroup in which a whole replica is killed.

    GRADSTREAM_DATA=... python studies/split_memory/split_memory.py  # as root: it makes cgroups

The 74,770,901-parameter network on Caltech-101, split over 1, 2 and 4 processes under allreduce with one replica: peak
memory of each process, seconds a step, and the largest difference between the losses and those of the unsplit run. Then
two Downpour replicas of two parts, one of which is killed on the way.

Peak memory is what the kernel charges to the cgroup of a process from the time that it has joined the run: all that
training takes, and not Python and torch themselves, some 250 MB in any process. The limit is on the same.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import os
import re
import secrets
import signal
import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gradstream as gs
from gradstream.errors import GradstreamError
from gradstream.job.files import load_job
from gradstream.machine.description import describe_machine, git_commit

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))
from common import ROOT as REPOSITORY
from common import keep

JOB = f"{REPOSITORY / 'examples' / 'caltech101.py'}:large"
ROOT = Path("/sys/fs/cgroup/memory")
RESULT = Path(__file__).with_name("record.json")
MIB = 1 << 20


class Limits:
    """One memory cgroup for each process of a replica. A context manager.

    Args:
        logs: folder with the logs of the nodes, which tell their process ids.
        limit_mib: the limit of each, in MiB; 0 for none.
    """

    def __init__(self, logs: Path, limit_mib: int) -> None:
        self._logs = logs
        self._limit_mib = limit_mib
        self._groups: dict[str, Path] = {}

    def put(self, name: str) -> None:
        """Moves the newest process of a node into a cgroup of its own. The pages that it has stay where they are."""
        pid = re.findall(rf"{name}: pid (\d+)", (self._logs / f"{name}.log").read_text())[-1]
        group = self._groups[name] = ROOT / f"gradstream-{secrets.token_hex(4)}"
        group.mkdir()
        if self._limit_mib:
            (group / "memory.limit_in_bytes").write_text(str(self._limit_mib * MIB))
        (group / "cgroup.procs").write_text(pid)

    def peaks_mib(self) -> dict[str, int]:
        """The peak of each process."""
        files = {name: group / "memory.max_usage_in_bytes" for name, group in self._groups.items()}
        return {name: int(file.read_text()) // MIB for name, file in sorted(files.items())}

    def __enter__(self) -> Limits:
        return self

    def __exit__(self, *exception: object) -> None:
        for group in self._groups.values():
            for pid in (group / "cgroup.procs").read_text().split():
                try:
                    (ROOT / "cgroup.procs").write_text(pid)
                except ProcessLookupError:
                    pass  # it has ended meanwhile
            group.rmdir()


def is_of_replica(name: str) -> bool:
    """Whether a node is a process of a replica."""
    return name.startswith(("worker", "part"))


def train(split: int, limit_mib: int, *, kill: str = "", **options: Any) -> dict[str, Any]:
    """Trains under a limit; kills a process after some steps of its replica, if one is named."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        told: list[str] = []
        with Limits(run_dir / "logs", limit_mib) as limits:

            def on_event(event: Mapping[str, Any]) -> None:
                who = event.get("who", "")
                if event["event"] == "joined" and is_of_replica(who):
                    limits.put(who)
                    if event["epoch"] > 1:
                        told.append(f"back {who}")
                if event["event"] == "left" and event["lost"]:
                    told.append(f"lost {who}")
                if kill and event["event"] == "step" and not told and event["rank"] == int(kill[-1]):
                    told.append(f"killed {kill}")
                    log = (run_dir / "logs" / f"{kill}.log").read_text()
                    os.kill(int(re.findall(rf"{kill}: pid (\d+)", log)[-1]), signal.SIGKILL)

            given: dict[str, Any] = {"workers": 1, "strategy": "allreduce", "epochs": None, **options}
            try:
                run = gs.train(
                    load_job(JOB), run_dir=run_dir, on_event=on_event, split=split, carrier="tcp", **given
                )
            except GradstreamError as error:
                return {"ended": str(error).splitlines()[0], "peaks_mib": limits.peaks_mib()}
            rows = run.history
            by_rank: dict[int, list[float]] = {}
            for row in rows:
                by_rank.setdefault(row["rank"], []).append(row["time_s"])
            steps = [b - a for times in by_rank.values() for a, b in itertools.pairwise(times)]
            return {
                "ended": "",
                "peaks_mib": limits.peaks_mib(),
                "step_s": statistics.median(steps),
                "losses": [row["loss"] for row in rows],
                "told": told,
            }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--limit-mib", type=int, default=1300)
    given = parser.parse_args()
    if not os.access(ROOT, os.W_OK):
        sys.exit(f"{ROOT} is not writable: this needs root, and cgroups of version 1")
    options = {"steps": given.steps, "batch_size": given.batch_size}
    found: dict[str, Any] = {
        "steps": given.steps,
        "batch_size": given.batch_size,
        "limit_mib": given.limit_mib,
    }
    whole = found["1, no limit"] = train(1, 0, **options)
    print("1 process, no limit:", {k: v for k, v in whole.items() if k != "losses"}, flush=True)
    for split in (1, 2, 4):
        one = found[f"{split}"] = train(split, given.limit_mib, **options)
        if losses := one.pop("losses", None):
            one["loss_difference"] = max(abs(a - b) for a, b in zip(losses, whole["losses"], strict=True))
        print(f"{split} processes, {given.limit_mib} MiB each:", one, flush=True)
    fleet = found["downpour"] = train(
        2,
        given.limit_mib,
        kill="part1-1",
        workers=2,
        strategy="downpour",
        optimizer=gs.optim.SGD(lr=0.005),
        **options,
    )
    fleet["losses"] = [fleet["losses"][0], fleet["losses"][-1]] if "losses" in fleet else []
    print("2 Downpour replicas of 2:", fleet, flush=True)
    found["1, no limit"]["losses"] = [round(loss, 6) for loss in whole["losses"]]
    found |= {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": git_commit(REPOSITORY),
        "machine": describe_machine({})["machine"],
        "load": os.getloadavg()[0],
    }
    keep(RESULT, found)


if __name__ == "__main__":
    main()
