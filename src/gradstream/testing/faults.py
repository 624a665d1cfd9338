"""`FaultPlan`: what goes wrong in a run, and when, as data. One plan serves simulations and real processes.

    plan = FaultPlan.drawn(seed=7, workers=3, shards=2, until_s=2.0)
    run = gs.simulate(job, config=plan.config(config), script=plan.script)          # on virtual time
    with plan.on_processes(run_dir) as on_event:                                    # with signals, on this machine
        run = gs.train(job, run_dir=run_dir, on_event=on_event)
    assert plan.fired                                                               # it did happen

Links fail in simulations only; between network namespaces `testing.machines` cuts real ones.
"""

from __future__ import annotations

import os
import random
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from gradstream.errors import PeerLostError
from gradstream.run.plan import COORDINATOR
from gradstream.run.simulated import SimulatedCluster
from gradstream.runtime.simulation import Link, Partition, SimulationConfig
from gradstream.transport.simulated.network import VirtualNetwork

__all__ = ["Cut", "Drain", "Duplicate", "Fault", "FaultPlan", "Kill", "Stop"]

LOOK_S = 0.01
AGAIN_S, AGAIN_LOOKS = 0.1, 40
"""Seconds before another process is started in the place of one that has found no coordinator, and looks at it."""


@dataclass(frozen=True, slots=True)
class Departure:
    """A node's process ends before the run does.

    Args:
        node: its name.
        at_s: when, in seconds since the run began.
        back_s: a new process takes its place so many seconds after it has gone, in a simulation; None for none. On
            real processes the launcher starts it again.
    """

    node: str
    at_s: float
    back_s: float | None = None

    number: ClassVar[int]


class Kill(Departure):
    """A node is killed, as by SIGKILL."""

    number = signal.SIGKILL


class Drain(Departure):
    """A worker is asked to go, as by SIGTERM."""

    number = signal.SIGTERM


@dataclass(frozen=True, slots=True)
class Stop:
    """A process stands still for a while (SIGSTOP, SIGCONT). Real processes only.

    Args:
        node, at_s: see `Departure`.
        for_s: how long, in seconds.
    """

    node: str
    at_s: float
    for_s: float

    number: ClassVar[int] = signal.SIGSTOP


@dataclass(frozen=True, slots=True)
class Cut:
    """Nothing passes from one node to another for a while; nobody is told. Simulations only.

    Args:
        source, target: names of the nodes; "*" for all others.
        at_s: when it begins, in seconds since the run began.
        for_s: how long, in seconds.
        both: also in the other direction.
    """

    source: str
    target: str
    at_s: float
    for_s: float
    both: bool = True


@dataclass(frozen=True, slots=True)
class Duplicate:
    """Streams from one node to another are delivered a second time, later, with this probability. Simulations only."""

    source: str
    target: str
    probability: float


Fault: TypeAlias = Kill | Drain | Stop | Cut | Duplicate


@dataclass(slots=True)
class FaultPlan:
    """The faults of one run.

    Args:
        faults: in any order.
    """

    faults: Sequence[Fault] = ()
    _struck: set[Fault] = field(default_factory=set)  # a process was there to be hit
    _parts: dict[Fault, set[Partition | tuple[str, str]]] = field(default_factory=dict)  # of a network
    _network: VirtualNetwork | None = None

    @classmethod
    def drawn(cls, seed: int, *, workers: int, shards: int, until_s: float, lease_s: float) -> FaultPlan:
        """Draws one to five faults of workers and links.

        Args:
            seed: the same seed draws the same plan.
            workers: number of workers.
            shards: number of shards.
            until_s: all faults begin before, in seconds.
            lease_s: the run's `Deadlines.lease_s`: cuts are shorter than it, or half as long again.
        """
        rng = random.Random(f"faults/{seed}")
        servers = ["coordinator", *(f"shard-{rank}" for rank in range(shards))]
        faults: list[Fault] = []
        for _ in range(rng.randint(1, 5)):
            worker, at_s = f"worker-{rng.randrange(workers)}", rng.uniform(0.02, until_s)
            back_s = rng.choice([None, 0.0, 0.01, 0.1])
            match rng.choice(["kill", "kill", "drain", "cut", "duplicate"]):
                case "kill":
                    faults.append(Kill(worker, at_s, back_s))
                case "drain":
                    faults.append(Drain(worker, at_s, back_s))
                case "cut":
                    source, target = rng.sample([worker, rng.choice([*servers, "*"])], 2)
                    for_s = lease_s * rng.choice([0.1, 0.5, 0.9, 1.5])
                    faults.append(Cut(source, target, at_s, for_s, both=rng.random() < 0.5))
                case _:
                    faults.append(Duplicate(worker, rng.choice(servers[1:] or servers), 0.5))
        return cls(faults)

    @property
    def fired(self) -> list[Fault]:
        """The faults that did happen: a process was hit, a cut has lost something, a stream was delivered twice."""
        network = set() if self._network is None else self._network.struck
        return [one for one in self.faults if one in self._struck or self._parts.get(one, set()) & network]

    @property
    def kinds(self) -> Counter[str]:
        """Number of faults that did happen, by kind."""
        return Counter(type(one).__name__.lower() for one in self.fired)

    # ---- on virtual time ----------------------------------------------------------------

    def config(self, config: SimulationConfig, names: Sequence[str]) -> SimulationConfig:
        """The same simulation with the faults of links.

        Args:
            config: the simulation.
            names: names of all nodes, for "*".
        """
        partitions, links = list(config.network.partitions), dict(config.network.links)
        for one in self.faults:
            if isinstance(one, Cut):
                ends = _ends(one.source, one.target, names)
                ways = [ends, ends[::-1]] if one.both else [ends]
                cuts = [Partition(one.at_s, one.at_s + one.for_s, *way) for way in ways]
                partitions += cuts
                self._parts[one] = {*cuts}
            elif isinstance(one, Duplicate):
                link: Link = config.network.link_between(one.source, one.target)
                links[one.source, one.target] = replace(link, duplicate=one.probability)
                self._parts[one] = {(one.source, one.target)}
        return replace(config, network=replace(config.network, partitions=partitions, links=links))

    async def script(self, cluster: SimulatedCluster) -> None:
        """The faults of nodes; the argument `script` of `simulate`, also where a plan has faults of links alone."""
        self._network = cluster.network
        director = cluster.virtual.runtime("director")
        begun_ns = director.now()
        timed = [one for one in self.faults if isinstance(one, Departure)]
        for number, one in enumerate(sorted(timed, key=lambda one: one.at_s)):
            await director.sleep(max(0.0, one.at_s - (director.now() - begun_ns) / 1e9))
            if not cluster.is_running(one.node):
                continue
            self._struck.add(one)
            (cluster.kill if isinstance(one, Kill) else cluster.drain)(one.node)
            if one.back_s is not None:
                director.spawn(self._bring_back(cluster, one), name=f"back-{number}")

    async def _bring_back(self, cluster: SimulatedCluster, fault: Departure) -> None:
        director = cluster.virtual.runtime("director")
        while cluster.is_running(fault.node):
            await director.sleep(1e-3)
        wait_s = fault.back_s or 0.0
        while not cluster.over:
            await director.sleep(wait_s)
            if not cluster.is_running(fault.node) and not cluster.over:
                await cluster.restart(fault.node)
            if not await self._in_vain(cluster, fault.node):
                return
            wait_s = AGAIN_S

    async def _in_vain(self, cluster: SimulatedCluster, node: str) -> bool:
        """Whether a new process has ended at once because the coordinator had died: a launcher starts another one."""
        director = cluster.virtual.runtime("director")
        for _ in range(AGAIN_LOOKS):
            await director.sleep(LOOK_S)
            error = cluster.outcomes.get(node)
            if (
                not cluster.is_running(node)
                and isinstance(error, PeerLostError)
                and error.peer == COORDINATOR
            ):
                return not cluster.virtual.runtime(node).dead
        return False

    # ---- on real processes --------------------------------------------------------------

    @contextmanager
    def on_processes(self, run_dir: Path) -> Iterator[Callable[[Mapping[str, Any]], None]]:
        """Strikes the processes of a run on this machine, from its `started` event on; yields the run's `on_event`.

        Raises:
            AssertionError: at the end, no fault has happened.
        """
        begun, over = threading.Event(), threading.Event()

        def on_event(event: Mapping[str, Any]) -> None:
            if event["event"] == "started":
                begun.set()

        thread = threading.Thread(target=self._strike, args=(run_dir, begun, over), daemon=True)
        thread.start()
        try:
            yield on_event
        finally:
            over.set()
            begun.set()
            thread.join()
        assert self.fired, f"none of {len(self.faults)} faults has happened: the run ended before"

    def _strike(self, run_dir: Path, begun: threading.Event, over: threading.Event) -> None:
        begun.wait()
        begun_s = time.monotonic()
        timed = [one for one in self.faults if isinstance(one, Departure | Stop)]
        woken: list[tuple[float, int]] = []
        for one in sorted(timed, key=lambda one: one.at_s):
            while not over.is_set() and time.monotonic() - begun_s < one.at_s:
                over.wait(LOOK_S)
                woken = [wake for wake in woken if not _wake(*wake)]
            if over.is_set():
                break
            pid = _pid(run_dir, one.node)
            if pid is not None and _signal(pid, one.number):
                self._struck.add(one)
                if isinstance(one, Stop):
                    woken.append((time.monotonic() + one.for_s, pid))
        while woken:
            woken = [wake for wake in woken if not _wake(*wake)]
            time.sleep(LOOK_S)


def _wake(at_s: float, pid: int) -> bool:
    """Lets a stopped process go on if its time has come. Returns whether it has."""
    if time.monotonic() < at_s:
        return False
    _signal(pid, signal.SIGCONT)
    return True


def _pid(run_dir: Path, node: str) -> int | None:
    """The newest process of a node, from its log."""
    path = run_dir / "logs" / f"{node}.log"
    found = re.findall(rf"^{node}: pid (\d+)", path.read_text(), re.MULTILINE) if path.is_file() else ()
    return int(found[-1]) if found else None


def _signal(pid: int, number: int) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def _ends(source: str, target: str, names: Sequence[str]) -> tuple[frozenset[str], frozenset[str]]:
    """The nodes on each side of a cut."""
    sides = [
        frozenset(names) - {source, target} if one == "*" else frozenset({one}) for one in (source, target)
    ]
    return sides[0], sides[1]
