"""Question: what do the protections cost while nothing goes wrong?

    python studies/tax/tax.py  # every carrier, and allreduce: about 6 minutes
    python studies/tax/tax.py --carriers tcp --rounds 12

One job of 2 workers (2,113,546 parameters, batches of 256; Downpour with 2 shards, or allreduce) trains without any
fault, in three ways by turns:

as it is   nothing changed
without    each node has the functions of `PROTECTIONS` replaced, where the run can go without them
timed      each node times these functions: CPU seconds of the calling thread, and the number of calls

"share" is the CPU time inside a protection over that of all nodes, from the timed runs; the timing itself, about 1 µs
a call, is in it. "ratio" is a run as it is over the run without beside it: the geometric mean over the rounds, and the
interval that holds 95 % of resampled means. Keeps both in record.json. Neither checksums nor replicas nor
TLS are in it: no carrier makes a checksum of its own, and a run on one machine speaks no TLS.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from math import exp, log
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

import gradstream as gs
from gradstream._train import launch
from gradstream.job.files import load_job
from gradstream.machine.description import describe_machine, git_commit
from gradstream.run.local import LocalCluster
from gradstream.run.local.environment import node_environment
from gradstream.run.planning import plan_run
from gradstream.run.result import Run

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))
from common import ROOT, command_line, keep, kept, now

RESULT = Path(__file__).with_name("record.json")
WIDTH, HIDDEN, CLASSES, BATCH, WORKERS = 1024, 2042, 10, 256, 2
HOW, FOLDER = "GRADSTREAM_TAX", "GRADSTREAM_TAX_FOLDER"
"""Variables that tell the nodes what to do with `PROTECTIONS`, and where to write times."""

NEEDED = object()
"""Of a function that no run can go without."""

PROTECTIONS: dict[str, dict[str, Any]] = {  # by kind: functions, and what they return where they are replaced
    "finite": {
        "gradstream.worker.gradient:usable": True,
        "gradstream.server.shard.inspection:length": 1.0,
        "gradstream.server.shard.store:Headroom.updated": None,
        "gradstream.worker.updater:check_updated": None,
        "gradstream.worker.group.peers:finite": True,
    },
    "ledger": {
        "gradstream.data.ledger:Ledger.receipt": NEEDED,
        "gradstream.data.leases:Leases.hand_out": NEEDED,
        "gradstream.server.shard.pushes:KeptPushes.note": None,
    },
    "fencing": {
        "gradstream.server.shard.inspection:Inspection.check_member": None,
        "gradstream.server.shard.state:ShardState._window_of": NEEDED,
        "gradstream.transport.endpoint:AccessControl.is_member": NEEDED,
    },
    "coordinator's state": {
        "gradstream.coordinator.durable:KeptState.rows": {},
        "gradstream.coordinator.durable:StateStore.write": None,
    },
}


# ---- in every node ------------------------------------------------------------------------------


def job() -> gs.Job:
    """The run; a node that reads it changes its own functions first."""
    change_functions(os.environ.get(HOW, ""))
    rng = np.random.default_rng(0)
    data = gs.from_arrays(
        rng.standard_normal((8192, WIDTH), dtype=np.float32), rng.integers(0, CLASSES, 8192)
    )
    model = gs.from_torch(build, nn.functional.cross_entropy)
    return gs.Job(
        model, data, strategy=gs.Downpour(), optimizer=gs.optim.SGD(lr=1e-3, momentum=0.9), workers=WORKERS, servers=2,
        batch_size=BATCH, steps=40, checkpoint_every=None,
    )  # fmt: skip


def build() -> nn.Module:
    """Two layers."""
    return nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))


def change_functions(how: str) -> None:
    """Replaces or times the functions of `PROTECTIONS` in this process, as `how` says ("without", "timed", "")."""
    if not how:
        return
    functions = [(path, stand_in) for kind in PROTECTIONS.values() for path, stand_in in kind.items()]
    if how == "timed":
        path = Path(os.environ[FOLDER]) / f"{os.getpid()}.npy"
        times = np.lib.format.open_memmap(path, "w+", np.float64, (len(functions), 2))
    for index, (path, stand_in) in enumerate(functions):
        module, _, name = path.partition(":")
        owner: Any = importlib.import_module(module)
        *classes, name = name.split(".")
        for each in classes:
            owner = getattr(owner, each)
        if how == "timed":
            setattr(owner, name, timed(getattr(owner, name), times[index]))
        elif stand_in is not NEEDED:
            setattr(owner, name, lambda *_, stand_in=stand_in, **__: stand_in)


def timed(function: Callable[..., Any], times: np.ndarray[Any, Any]) -> Callable[..., Any]:
    """The function, which adds the CPU seconds of each call, and 1, to `times`."""

    def call(*arguments: Any, **named: Any) -> Any:
        begun_ns = time.thread_time_ns()
        try:
            return function(*arguments, **named)
        finally:
            times[0] += (time.thread_time_ns() - begun_ns) * 1e-9
            times[1] += 1

    return call


# ---- in the bench -------------------------------------------------------------------------------


class Way:
    """Runs of one case in which the nodes do the same with `PROTECTIONS`; their processes come from one warm one.

    Args:
        case: a carrier, or "allreduce".
        how: see `change_functions`.
        stack: closes it.
    """

    def __init__(self, case: str, how: str, stack: ExitStack) -> None:
        given = load_job(f"{Path(__file__).resolve()}:job")
        grouped = case == "allreduce"
        self._job = (
            replace(given, strategy=gs.AllReduce(), servers=None) if grouped else replace(given, carrier=case)
        )
        self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        environment = node_environment(WORKERS, shards=not grouped) | {HOW: how, FOLDER: str(self._folder)}
        cluster = LocalCluster(self._folder / "logs", environment, shards=not grouped)
        self._cluster = stack.enter_context(cluster)
        self.runs: list[dict[str, Any]] = []

    def measure(self) -> None:
        """One run: CPU seconds of all nodes in training, seconds a step, and what was timed."""
        run_dir = self._folder / f"run-{len(self.runs)}"
        run_dir.mkdir()
        run = launch(plan_run(self._job, "tax"), run_dir, cluster=self._cluster)
        times = sorted(self._folder.glob("*.npy"))
        spent = sum((np.load(path) for path in times), np.zeros((1, 1)))
        for path in times:
            path.unlink()
        assert self._job.steps is not None
        step_s = run.summary["train_s"] / self._job.steps
        self.runs.append({"cpu_s": cpu_s(run), "step_s": step_s, "functions": spent.tolist()})


def cpu_s(run: Run) -> float:
    """CPU seconds of all nodes of a run, from the begin of their processes."""
    spent: dict[str, float] = {}
    for event in run.events:
        if event["event"] == "cpu":
            spent[event["node"]] = event["user_s"] + event["system_s"]
    return sum(spent.values())


def ratio(pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """The geometric mean of some ratios, and the interval that holds 95 % of resampled means."""
    logs, rng = [log(one / other) for one, other in pairs], random.Random(0)
    means = sorted(statistics.fmean(rng.choices(logs, k=len(logs))) for _ in range(2000))
    return {"ratio": exp(statistics.fmean(logs)), "interval": [exp(means[50]), exp(means[-51])]}


def shares(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """By kind of protection, its part of all CPU time; and each of its functions, with the calls in a run."""
    total_s, answer = sum(run["cpu_s"] for run in runs), {}
    spent = sum(np.array(run["functions"]) for run in runs)
    index = 0
    for kind, functions in PROTECTIONS.items():
        rows = dict(zip(functions, spent[index : index + len(functions)].tolist(), strict=True))
        index += len(functions)
        answer[kind] = {
            "share": sum(seconds for seconds, _ in rows.values()) / total_s,
            "functions": {
                path.removeprefix("gradstream."): {"share": seconds / total_s, "calls": calls / len(runs)}
                for path, (seconds, calls) in rows.items()
            },
        }
    return answer


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--carriers", default="shm,tcp,grpc,allreduce")
    parser.add_argument("--rounds", type=int, default=6)
    given = parser.parse_args()
    commit, load = git_commit(ROOT), os.getloadavg()[0]
    record = {"carriers": {}} | kept(RESULT)
    for case in given.carriers.split(","):
        with ExitStack() as stack:
            plain, without, timed_way = (Way(case, how, stack) for how in ("", "without", "timed"))
            for number in range(given.rounds + 1):
                for way in [plain, without, timed_way][:: 1 if number % 2 else -1]:
                    way.measure()
            for way in (plain, without, timed_way):
                way.runs.pop(0)  # the first one warms up
        row: dict[str, Any] = {"protections": shares(timed_way.runs), "rounds": given.rounds}
        for figure in ("cpu_s", "step_s"):
            pairs = [
                (one[figure], other[figure]) for one, other in zip(plain.runs, without.runs, strict=True)
            ]
            row[figure] = {**ratio(pairs), "median": statistics.median(one for one, _ in pairs)}
        print(case, json.dumps(row), flush=True)
        record["carriers"][case] = row
        record |= {
            "date": now(),
            "commit": commit,
        }
        record |= {"machine": describe_machine({})["machine"], "load": [load, os.getloadavg()[0]]}
        keep(RESULT, record)


if __name__ == "__main__":
    main()
