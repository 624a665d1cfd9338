"""The faults of a `FaultPlan` on the processes of a run: signals to nodes, and a proxy between them."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from gradstream._train import launch
from gradstream.coordinator.nodes import COORDINATOR
from gradstream.errors import ConfigError
from gradstream.job.job import Job
from gradstream.job.plan import RunPlan
from gradstream.run.followed_events import OnEvent
from gradstream.run.local import LocalCluster
from gradstream.run.local.environment import node_environment
from gradstream.run.planning import plan_run
from gradstream.run.remote.listening import Listening
from gradstream.run.result import Run
from gradstream.strategies.base import GroupStrategy, SharedMemoryStrategy
from kit.faults import Cut, Departure, Duplicate, Fault, FaultPlan, Flaw, Reorder, Stop
from kit.link_proxy import LinkProxy, ProxiedCluster

# ---- process faults ----------------------------------------------------------------------


def on_processes(
    plan: FaultPlan,
    job: Job,
    run_dir: Path,
    *,
    listening: Listening | None = None,
    on_event: OnEvent | None = None,
) -> Run:
    """Runs a job in processes of this machine, and injects the faults from the run's `started` event on.

    Args:
        plan: the faults.
        job: from a file. Faults of links need the carrier `tcp` or `grpc`, and nothing that bypasses links.
        run_dir: a new or empty directory.
        listening: see `train`; its certificates make links encrypted. All nodes are on this machine.
        on_event: see `train`.

    Returns:
        The finished run.

    Raises:
        ConfigError: a fault is not possible here; nothing was started.
        AssertionError: a fault has had no effect by the end.
        GradstreamError: the run failed.
    """
    strikes = ProcessFaults(plan.faults, job, run_dir)
    try:
        run = strikes.run(listening, on_event)
    finally:
        plan.struck |= strikes.struck
    missed = [fault for fault in plan.faults if fault not in plan.struck]
    assert not missed, f"{len(missed)} of {len(plan.faults)} faults had no effect: {missed}"
    return run


class ProcessFaults:
    """One run of a job in processes, and its faults.

    Args:
        faults: in any order.
        job: from a file.
        run_dir: a new or empty directory.

    Attributes:
        struck: the faults that have had an effect so far.
    """

    def __init__(self, faults: Sequence[Fault], job: Job, run_dir: Path) -> None:
        self.struck: set[Fault] = set()
        self._faults = faults
        self._plan = plan_run(job, "faults")
        self._run_dir = run_dir
        self._proxy: LinkProxy | None = None
        self._begun, self._over = threading.Event(), threading.Event()
        self._standing: dict[Fault, int] = {}  # process ids of nodes that stand still

    def run(self, listening: Listening | None, on_event: OnEvent | None) -> Run:
        """Runs it; see `on_processes`."""
        _check(self._faults, self._plan)
        self._run_dir.mkdir(parents=True, exist_ok=True)
        logs, shards = self._run_dir / "logs", self._plan.servers > 0
        environment = node_environment(self._plan.workers, shards=shards)

        def follow(event: Mapping[str, Any]) -> None:
            if event["event"] == "started":
                self._begun.set()
            if on_event is not None:
                on_event(event)

        with ExitStack() as stack:
            if any(isinstance(fault, Cut | Flaw) for fault in self._faults):
                self._proxy = stack.enter_context(LinkProxy())
                stack.callback(lambda proxy: self.struck.update(proxy.hits), self._proxy)
            cluster = stack.enter_context(ProxiedCluster(self._proxy, logs, environment, shards=shards))
            thread = threading.Thread(target=self._strike, name="faults", daemon=True)
            thread.start()
            stack.callback(self._end, thread)
            return launch(self._plan, self._run_dir, on_event=follow, listening=listening, cluster=cluster)

    def _end(self, thread: threading.Thread) -> None:
        self._over.set()
        self._begun.set()
        thread.join()

    def _strike(self) -> None:
        self._begun.wait()
        begun_s = time.monotonic()
        actions = [action for fault in self._faults for action in self._actions(fault)]
        for at_s, action in sorted(actions, key=lambda entry: entry[0]):
            if self._over.wait(max(0.0, begun_s + at_s - time.monotonic())):
                break
            action()
        for fault in list(self._standing):
            self._wake(fault)

    def _actions(self, fault: Fault) -> Iterator[tuple[float, Callable[[], None]]]:
        """The actions of a fault, each with its time in seconds."""
        proxy = self._proxy
        if isinstance(fault, Departure | Stop):
            yield fault.at_s, partial(self._signal, fault)
        if isinstance(fault, Stop):
            yield fault.at_s + fault.for_s, partial(self._wake, fault)
        if isinstance(fault, Cut) and proxy is not None:
            yield fault.at_s, partial(proxy.begin, fault)
            yield fault.at_s + fault.for_s, partial(proxy.end, fault)
        if isinstance(fault, Flaw) and proxy is not None:
            yield 0.0, partial(proxy.begin, fault)

    def _signal(self, fault: Departure | Stop) -> None:
        path = self._run_dir / "logs" / f"{fault.node}.log"
        pids = (
            re.findall(rf"^{fault.node}: pid (\d+)", path.read_text(), re.MULTILINE) if path.is_file() else ()
        )
        if pids and _signal(int(pids[-1]), fault.number):
            self.struck.add(fault)
            if isinstance(fault, Stop):
                self._standing[fault] = int(pids[-1])

    def _wake(self, fault: Fault) -> None:
        if fault in self._standing:
            _signal(self._standing.pop(fault), signal.SIGCONT)


def _signal(pid: int, number: int) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def _check(faults: Sequence[Fault], plan: RunPlan) -> None:
    """Raises ConfigError if a fault cannot happen to this run."""
    carrier, strategy = plan.job.carrier, plan.strategy
    for fault in faults:
        ends = (fault.source, fault.target) if isinstance(fault, Cut | Flaw) else (fault.node,)
        for name in ends:
            if name not in plan.node_names and not (name == "*" and isinstance(fault, Cut)):
                raise ConfigError(
                    f"{fault}: the run has no node {name!r}; expected one of {', '.join(plan.node_names)}"
                )
        if isinstance(fault, Departure | Stop):
            continue
        if not isinstance(fault, Cut | Flaw):
            raise ConfigError(
                f"{fault} is possible on virtual time alone: use `gs.simulate(..., script=plan)`"
            )
        if carrier not in ("tcp", "grpc"):
            raise ConfigError(
                f"cannot inject {fault} with carrier={carrier!r}: nodes of one machine then exchange through shared "
                "memory, and there is no connection to disturb; use carrier='tcp' or 'grpc'"
            )
        group = strategy.algorithm if isinstance(strategy, GroupStrategy) else ""
        if group in ("auto", "shared", "hierarchical") or isinstance(strategy, SharedMemoryStrategy):
            raise ConfigError(
                f"{fault} with {strategy}: it exchanges through shared memory on one machine, and not over links; "
                "name an algorithm that sends messages, AllReduce(algorithm='ring'), or use another strategy"
            )
        if isinstance(fault, Duplicate | Reorder) and (
            carrier != "tcp" or COORDINATOR in ends or plan.job.connections > 1
        ):
            raise ConfigError(
                f"{fault} needs the frames of carrier='tcp' with connections=1, and links without the coordinator, "
                f"which has gRPC; got carrier={carrier!r}, connections={plan.job.connections}"
            )


# ---- stopping ----------------------------------------------------------------------------
# Suspends a node of a run on this machine by SIGSTOP: its process stops, while the system keeps its connections.

LOOK_S = 0.01


class Stopper:
    """Suspends a node once or several times. Give it to the run as `on_event`.

    Args:
        cluster: the nodes.
        node: name of the node to suspend.
        seconds: duration of each stop.
        times: number of stops.
        gap_s: time before each stop, in which the node runs, in seconds.
        kind: the first event of this kind begins the stops.

    Attributes:
        stopped_s: duration of each stop, from the time at which the system reports the process as stopped.
    """

    def __init__(
        self,
        cluster: LocalCluster,
        node: str,
        seconds: float,
        *,
        times: int = 1,
        gap_s: float = 0.0,
        kind: str = "step",
    ) -> None:
        self.stopped_s: list[float] = []
        self._cluster = cluster
        self._node = node
        self._seconds = seconds
        self._times = times
        self._gap_s = gap_s
        self._kind = kind
        self._error = ""
        self._thread: threading.Thread | None = None

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Watches for the event that begins the stops."""
        if event["event"] == self._kind and self._thread is None:
            pid = self._cluster.running[self._node]
            self._thread = threading.Thread(target=self._stop_all, args=(pid,), daemon=True)
            self._thread.start()

    def check(self) -> None:
        """Waits for the last stop.

        Raises:
            AssertionError: no stop began, or a signal did not stop the node.
        """
        assert self._thread is not None, f"no stop: no event {self._kind!r} came"
        self._thread.join()
        assert not self._error, self._error
        assert len(self.stopped_s) == self._times, f"{len(self.stopped_s)} stops of {self._times}"

    def _stop_all(self, pid: int) -> None:
        try:
            for _ in range(self._times):
                time.sleep(self._gap_s)
                self.stopped_s.append(self._stop(pid))
        except (OSError, RuntimeError) as error:
            self._error = f"{self._node}: {error}"

    def _stop(self, pid: int) -> float:
        os.kill(pid, signal.SIGSTOP)
        try:
            for _ in range(100):
                if _state(pid) == "T":
                    break
                time.sleep(LOOK_S)
            begun = time.monotonic()
            time.sleep(self._seconds)
            if _state(pid) != "T":
                raise RuntimeError(f"it was stopped, but is in state {_state(pid)}")
            return time.monotonic() - begun
        finally:
            os.kill(pid, signal.SIGCONT)


def _state(pid: int) -> str:
    """The state of a process as Linux names it; "T" is stopped."""
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]


# ---- process tree ------------------------------------------------------------------------
# The processes that a process has started, according to /proc.


def process_tree(pid: int) -> list[int]:
    """A process and all running processes that it has started."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        children = [
            int(child_pid) for thread in threads for child_pid in (thread / "children").read_text().split()
        ]
    except OSError:
        return []
    return [pid, *(descendant for child in children for descendant in process_tree(child))]
