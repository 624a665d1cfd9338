"""Question: what does half an hour of faults cost a run, and is a push lost or taken twice?

    python studies/storm/storm.py  # Downpour: 30 minutes, and 2 without faults
    python studies/storm/storm.py --strategy synchronous --minutes 10
    python studies/storm/storm.py --strategy allreduce --minutes 10
    python studies/storm/storm.py --links  # harms the links between nodes too

Real processes on this machine: 4 workers, 2 shards with backups (`acknowledge="replicated"`), the coordinator. A step
is idle for `STEP_S`, as if a device computed, so that the cores are not the limit. Every `GAP_S` a fault is drawn: a
node is killed (SIGKILL) or stands still for half or one and a half times `lease_s` (SIGSTOP), a worker gets a tenth of
a core for a while, or the disk of the run directory is full for a while (a tmpfs; the last two take root). A fault
counts once its signal was sent, its quota set, or the disk full; nobody looks what came of it.

With `--links` all connections go through a proxy (`tests/kit/link_proxy.py`), which also cuts a worker off for half or
one and a half times `lease_s` (from a node or from all, one way or both), and for `lease_s` makes a link slow, loses
frames on it together with their connections, damages bytes, delivers streams twice, or lets them overtake one another.
Such a fault counts where something was hit. Not with `allreduce`: a group needs its connections.

audit          each sample of each epoch adds 1 to its own element of every chunk: what is lost, doubled, torn. Under
               `synchronous`, whose sums keep their order: whether a model of floats ends with the bits of a run
               without faults
participation  worker-seconds from a worker's first step to its death, and from the first step of its next process on,
               without those in which it stood still; of 4 workers for the length of the run
throughput     steps for each of these worker-seconds, divided by the same in a run without faults
faults_h       faults an hour

Keeps them in record.json.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import gradstream as gs
from gradstream._train import launch
from gradstream.coordinator.nodes import COORDINATOR
from gradstream.job.files import load_job
from gradstream.machine.description import describe_machine, git_commit
from gradstream.run.local import LocalCluster
from gradstream.run.local.environment import node_environment
from gradstream.run.planning import plan_run
from gradstream.run.result import Run
from gradstream.testing.runs import TokenAudit, Tokens, numbered

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))
from common import ROOT, command_line, keep, kept, now
from kit.faults import Corrupt, Cut, Duplicate, Flaw, Lose, Reorder, SlowLink
from kit.link_proxy import LinkFault, LinkProxy, ProxiedCluster
from kit.machines import CpuQuota, no_quota

RESULT = Path(__file__).with_name("record.json")
WORKERS, SHARDS, SAMPLES, BATCH, CHUNKS = 4, 2, 512, 2, 4
STEP_S, LEASE_S = 0.02, 2.0
GAP_S = (12.0, 20.0)
CALM_S = 120.0
"""Length of the run without faults, in seconds."""
STEPS_S = 115.0
"""About so many minibatches a second four workers make: what a number of minutes is in epochs."""
Fault = Callable[[], None]


class SlowTokens(Tokens):
    """`Tokens` with a step in which the processor is idle."""

    def gradient(self, *given: Any, **named: Any) -> float:
        """See `Tokens.gradient`."""
        time.sleep(STEP_S)
        return super().gradient(*given, **named)


def build() -> nn.Module:
    """The model of `synchronous`: its sums are not exact, so the order of additions shows in their bits."""
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """With a pause, which changes no bit."""
    time.sleep(float(os.environ.get("GRADSTREAM_STORM_STEP_S", STEP_S)))
    return nn.functional.cross_entropy(outputs, targets)


def job() -> gs.Job:
    """Downpour, whose final parameters are a count."""
    return gs.Job(
        SlowTokens(CHUNKS, SAMPLES), numbered(SAMPLES), strategy="downpour", optimizer=gs.optim.SGD(lr=1.0),
        workers=WORKERS, servers=SHARDS, batch_size=BATCH, epochs=1, chunk_elems=SAMPLES, acknowledge="replicated",
        carrier="tcp", max_restarts=1_000_000, deadlines=gs.Deadlines(lease_s=LEASE_S),
    )  # fmt: skip


def job_of_groups() -> gs.Job:
    """`allreduce`, whose final parameters are a count: a round is the mean over its samples."""
    model = SlowTokens(CHUNKS, SAMPLES)
    model.reduction = "sum"
    return replace(
        job(), model=model, strategy="allreduce", servers=None, acknowledge="applied",
        optimizer=gs.optim.SGD(lr=float(WORKERS * BATCH)),
    )  # fmt: skip


def job_of_rounds() -> gs.Job:
    """`synchronous`."""
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(SAMPLES, 64)).astype(np.float32)
    data = gs.from_arrays(inputs, rng.integers(0, 10, size=SAMPLES))
    return replace(
        job(), model=gs.from_torch(build, loss), data=data, strategy="synchronous", chunk_elems=1 << 12,
        optimizer=gs.optim.SGD(lr=0.01, momentum=0.9),
    )  # fmt: skip


class Storm:
    """Strikes the processes of a run from its first step on, on a thread of its own. A context manager.

    Args:
        cluster: the processes.
        disk: a file system that can be filled; None where there is none.
        seed: of nodes, kinds and instants.
        proxy: carries the connections; None for no faults of links.

    Attributes:
        happened: number of faults that were seen to happen, by kind.
        stood: for each stop, the node, and the seconds of `time.monotonic` from and until which it stood still.
    """

    def __init__(
        self, cluster: LocalCluster, disk: Path | None, seed: int, proxy: LinkProxy | None = None
    ) -> None:
        self._proxy = proxy
        self.happened = Counter[str]()
        self.stood: list[tuple[str, float, float]] = []
        self._cluster, self._disk, self._rng = cluster, disk, random.Random(seed)
        self._begun, self._over = threading.Event(), threading.Event()
        self._whole = threading.Event()  # both shards have a backup
        self._whole.set()
        self._thread = threading.Thread(target=self._rage, daemon=True)
        self._slows = not no_quota()

    def __enter__(self) -> Storm:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._begun.set()
        self._whole.set()
        self._thread.join()

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Follows the run: give it as `on_event`."""
        if event["event"] == "step":
            self._begun.set()
        elif event["event"] == "backed_up":
            self._whole.set()

    def _rage(self) -> None:
        self._begun.wait()
        kinds: list[tuple[str, Fault]] = [
            ("kill a worker", lambda: self._kill("worker")),
            ("kill a worker", lambda: self._kill("worker")),
            ("kill the coordinator", lambda: self._kill(COORDINATOR)),
            ("stop a worker", lambda: self._stop("worker", self._rng.choice([0.5, 1.5]))),
            ("stop the coordinator", lambda: self._stop(COORDINATOR, 0.5)),
        ]
        if any(name.startswith("shard") for name in list(self._cluster.running)):
            kinds += [
                ("kill a shard", lambda: self._kill("shard")),
                ("stop a shard", lambda: self._stop("shard", self._rng.choice([0.5, 1.5]))),
            ]
        kinds += [("slow a worker", self._slow)] if self._slows else []
        kinds += [("fill the disk", self._fill)] if self._disk else []
        kinds += self._of_links()
        bag: list[tuple[str, Fault]] = []
        while not self._over.wait(self._rng.uniform(*GAP_S)):
            bag = bag or self._rng.sample(kinds, len(kinds))  # each kind comes round
            name, fault = bag.pop()
            try:
                fault()
                self.happened[name] += 1
            except (LookupError, OSError, _MissedError):
                print(f"{name}: did not happen", flush=True)  # the node has just died, say

    def _pid(self, kind: str) -> tuple[str, int]:
        names = sorted(name for name in list(self._cluster.running) if name.startswith(kind))
        name = self._rng.choice(names)
        return name, self._cluster.running[name]

    def _kill(self, kind: str) -> None:
        if kind == "shard":
            self._wait_for_backups()
        _, pid = self._pid(kind)
        os.kill(pid, signal.SIGKILL)

    def _stop(self, kind: str, leases: float) -> None:
        if kind == "shard":
            self._wait_for_backups(loses=leases > 1)
        name, pid = self._pid(kind)
        os.kill(pid, signal.SIGSTOP)
        begun_s = time.monotonic()
        self._over.wait(leases * LEASE_S)
        held = leases > 1 or _state(pid) == "T"
        if _state(pid) in ("T", "t"):
            os.kill(pid, signal.SIGCONT)
        self.stood.append((name, begun_s, time.monotonic()))
        if not held:
            raise _MissedError

    def _wait_for_backups(self, *, loses: bool = True) -> None:
        """One shard at a time: that is what is promised."""
        self._whole.wait()
        if loses:
            self._whole.clear()

    def _of_links(self) -> list[tuple[str, Fault]]:
        """The faults of links."""
        proxy, rng = self._proxy, self._rng
        if proxy is None:
            return []

        def nodes() -> tuple[str, str, list[str]]:
            """A worker; a shard; and all that the worker talks to."""
            worker, shards = self._pid("worker")[0], [f"shard-{rank}" for rank in range(SHARDS)]
            return worker, rng.choice(shards), [*shards, COORDINATOR, "*"]

        def cut() -> LinkFault:
            worker, _, others = nodes()
            ends = rng.sample([worker, rng.choice(others)], 2)
            return Cut(*ends, 0.0, rng.choice([0.5, 1.5]) * LEASE_S, both=rng.random() < 0.5)

        def lose() -> LinkFault:
            worker, peer, _ = nodes()
            return Lose(*rng.sample([worker, peer], 2), 0.02)

        def between(kind: type[Flaw], amount: float) -> Callable[[], LinkFault]:
            return lambda: kind(*nodes()[:2], amount)

        made = {
            "cut a link": cut,
            "lose frames": lose,
            "slow a link": between(SlowLink, 0.05),
            "damage bytes": between(Corrupt, 0.02),
            "deliver twice": between(Duplicate, 0.3),
            "reorder": between(Reorder, 0.05),
        }
        return [(name, lambda make=make: self._harm(proxy, make())) for name, make in made.items()]  # type: ignore[misc]

    def _harm(self, proxy: LinkProxy, fault: LinkFault) -> None:
        """Harms a link for a while."""
        before = proxy.hits[fault]
        proxy.begin(fault)
        self._over.wait(fault.for_s if isinstance(fault, Cut) else LEASE_S)
        proxy.end(fault)
        if proxy.hits[fault] == before:
            raise _MissedError

    def _slow(self) -> None:
        _, pid = self._pid("worker")
        with CpuQuota(0.1) as quota:
            quota.put(pid)
            self._over.wait(2 * LEASE_S)

    def _fill(self) -> None:
        assert self._disk is not None
        filler = self._disk / "filler"
        try:
            with open(filler, "wb") as file:
                while True:
                    file.write(b"\0" * (1 << 16))
                    file.flush()
        except OSError:
            self._over.wait(2 * LEASE_S)
        finally:
            filler.unlink()


class _MissedError(Exception):
    """A fault did not happen."""


def _state(pid: int) -> str:
    """The state of a process as Linux names it; "" where it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


@contextmanager
def small_disk() -> Iterator[tuple[Path, Path | None]]:
    """A folder for the run directory, and the file system that it is on, where one can be made."""
    with tempfile.TemporaryDirectory(prefix="storm-") as name:
        folder = Path(name)
        size = ["-o", "size=1g", "tmpfs", name]
        mounted = os.geteuid() == 0 and not subprocess.run(["mount", "-t", "tmpfs", *size]).returncode
        try:
            yield folder, folder if mounted else None
        finally:
            if mounted:
                subprocess.run(["umount", "--lazy", name], check=True)


def one_run(given: gs.Job, seed: int | None, *, links: bool = False) -> tuple[Run, Storm | None, float]:
    """A run, with the faults of a seed or without any; and when its clock showed 0, in seconds of `time.monotonic`."""
    with small_disk() as (folder, disk), LinkProxy() if links else nullcontext() as proxy:
        run_dir, shards = folder / "run", given.servers is not None
        run_dir.mkdir()
        zero_s: list[float] = []

        class TimedCluster(ProxiedCluster):
            def message(self, timeout_s: float) -> dict[str, Any] | None:
                message = super().message(timeout_s)
                if "zero_ns" in (message or {}) and not zero_s:
                    assert message is not None
                    zero_s.append(message["zero_ns"] / 1e9)
                return message

        environment = node_environment(WORKERS, shards=shards)
        with TimedCluster(proxy, run_dir / "logs", environment, shards=shards) as cluster:
            if seed is None:
                return launch(plan_run(given, "storm"), run_dir, cluster=cluster), None, zero_s[0]
            with Storm(cluster, disk, seed, proxy) as storm:
                run = launch(plan_run(given, "storm"), run_dir, cluster=cluster, on_event=storm)
            return run, storm, zero_s[0]


def present_s(events: Sequence[Mapping[str, Any]], stood: Sequence[tuple[str, float, float]]) -> float:
    """Worker-seconds in which workers took part; see above.

    Args:
        events: of the run, in any order.
        stood: name, begin and end of each stop, in seconds of the run.
    """
    end_s = next(event["time_s"] for event in events if event["event"] == "finished")
    total_s = 0.0
    for rank in range(WORKERS):
        name = f"worker-{rank}"
        steps = sorted(e["time_s"] for e in events if e["event"] == "step" and e["node"] == name)
        gone = sorted(e["time_s"] for e in events if e["event"] == "left" and e["who"] == name and e["lost"])
        joined = sorted(e["time_s"] for e in events if e["event"] == "joined" and e["who"] == name)
        spans = []
        for begun_s in joined:
            left_s = next((at_s for at_s in gone if at_s > begun_s), end_s)
            made = [at_s for at_s in steps if begun_s <= at_s <= left_s]
            if made:
                spans.append((made[0], left_s))
        total_s += sum(left_s - first_s for first_s, left_s in spans)
        for who, from_s, until_s in stood:
            total_s -= sum(
                max(0.0, min(until_s, left_s) - max(from_s, first_s))
                for first_s, left_s in spans
                if who == name
            )
    return total_s


def measured(strategy: str, minutes: float, seed: int, links: bool) -> dict[str, Any]:
    """A run without faults, one with, and the audit. With faults of links, both go through the proxy."""
    rounds = strategy == "synchronous"
    which = {"synchronous": "job_of_rounds", "allreduce": "job_of_groups"}.get(strategy, "job")
    given = replace(load_job(f"{Path(__file__).resolve()}:{which}"), seed=seed)
    epochs = max(1, round(60 * minutes * STEPS_S * BATCH / SAMPLES))
    calm_epochs = max(1, round(CALM_S * STEPS_S * BATCH / SAMPLES))
    calm, _, _ = one_run(replace(given, epochs=calm_epochs), None, links=links)
    run, storm, zero_s = one_run(replace(given, epochs=epochs), seed, links=links)
    assert storm is not None
    stood = [(name, begun_s - zero_s, end_s - zero_s) for name, begun_s, end_s in storm.stood]
    speeds, lengths, present = [], [], []
    for one, stops in ((calm, []), (run, stood)):
        steps = sum(event["event"] == "step" for event in one.events)
        lengths.append(next(event["time_s"] for event in one.events if event["event"] == "finished"))
        present.append(present_s(one.events, stops))
        speeds.append(steps / present[-1])
    audit: dict[str, Any]
    if rounds:
        os.environ["GRADSTREAM_STORM_STEP_S"] = "0"
        quick, _, _ = one_run(replace(given, epochs=epochs), None)
        del os.environ["GRADSTREAM_STORM_STEP_S"]
        same = all(np.array_equal(run.parameters[name], quick.parameters[name]) for name in quick.parameters)
        audit = {"same_bits": same}
    else:
        found = TokenAudit.of(run, SAMPLES, epochs)
        audit = {"lost": found.lost, "doubled": found.doubled, "torn": found.torn}
    return {
        "minutes": round(lengths[1] / 60, 2),
        "faults": dict(sorted(storm.happened.items())),
        "faults_h": round(3600 * storm.happened.total() / lengths[1], 1),
        "samples": epochs * SAMPLES,
        "audit": audit,
        "participation": round(present[1] / (WORKERS * lengths[1]), 4),
        "throughput": round(speeds[1] / speeds[0], 4),
        "samples_s": [round(e * SAMPLES / s, 1) for e, s in zip((calm_epochs, epochs), lengths, strict=True)],
    }


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--strategy", default="downpour", choices=["downpour", "synchronous", "allreduce"])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--links", action="store_true")
    given = parser.parse_args()
    if given.links and given.strategy == "allreduce":
        parser.error("--links with allreduce: a broken connection between two workers that live ends the run")
    commit, load = git_commit(ROOT), os.getloadavg()[0]
    found = measured(given.strategy, given.minutes, given.seed, given.links)
    found |= {"load": [round(load, 1), round(os.getloadavg()[0], 1)], "commit": commit}
    found["date"] = now()
    print(given.strategy, json.dumps(found), flush=True)
    record = {"strategies": {}} | kept(RESULT)
    record["strategies"][given.strategy + (", links" if given.links else "")] = found
    record |= {"step_s": STEP_S, "lease_s": LEASE_S, "machine": describe_machine({})["machine"]}
    record |= {name: found[name] for name in ("date", "commit")}
    keep(RESULT, record)


if __name__ == "__main__":
    main()
