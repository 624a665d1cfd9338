"""`FaultPlan`: what goes wrong in a run, and when, as data. One plan serves simulations and real processes.

    plan = FaultPlan.drawn(7, Scene(workers=3, shards=2, until_s=2.0, lease_s=10.0))
    run = gs.simulate(job, config=plan.config(config, names), script=plan)                 # on virtual time
    with plan.on_processes(run_dir) as on_event:                                    # with signals, on this machine
        run = gs.train(job, run_dir=run_dir, on_event=on_event)
    assert plan.fired                                                               # it did happen

Links fail in simulations only; between network namespaces `testing.machines` cuts real ones.
"""

from __future__ import annotations

import errno
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
from typing import Any

from gradstream.coordinator.durable.store import StateStore
from gradstream.errors import PeerLostError
from gradstream.run.plan import COORDINATOR
from gradstream.run.simulated import SimulatedCluster
from gradstream.runtime.simulation import Partition, SimulationConfig
from gradstream.testing.drawn_faults import Scene, drawn_faults
from gradstream.testing.fault_kinds import (
    Corrupt,
    Cut,
    Departure,
    DiskFull,
    Drain,
    Duplicate,
    Fault,
    Flaw,
    Freeze,
    Kill,
    Lose,
    Reorder,
    Slow,
    Spell,
    Stop,
)
from gradstream.testing.storage import FailingStorage
from gradstream.transport.simulated.network import VirtualNetwork

__all__ = [
    "Corrupt",
    "Cut",
    "DiskFull",
    "Drain",
    "Duplicate",
    "Fault",
    "FaultPlan",
    "Freeze",
    "Kill",
    "Lose",
    "Reorder",
    "Scene",
    "Slow",
    "Stop",
]

LOOK_S = 0.01
AGAIN_S, AGAIN_LOOKS = 0.1, 40
"""Seconds before another process is started in the place of one that has found no coordinator, and looks at it."""


@dataclass(slots=True)
class FaultPlan:
    """The faults of one run.

    Args:
        faults: in any order.
    """

    faults: Sequence[Fault] = ()
    _struck: set[Fault] = field(default_factory=set)  # a process was there to be hit
    _parts: dict[Fault, set[Partition | tuple[str, str, str]]] = field(default_factory=dict)  # of a network
    _network: VirtualNetwork | None = None
    _disk: _Disk | None = None

    @classmethod
    def drawn(cls, seed: int, scene: Scene) -> FaultPlan:
        """Draws one to five faults. A run survives any mixture of them while a worker is left.

        Args:
            seed: the same seed draws the same plan.
            scene: the run.
        """
        return cls(drawn_faults(random.Random(f"faults/{seed}"), scene))

    @property
    def fired(self) -> list[Fault]:
        """The faults that did happen: a process was hit or held up, a link has lost, damaged or doubled something."""
        network = set() if self._network is None else self._network.struck
        return [one for one in self.faults if one in self._struck or self._parts.get(one, set()) & network]

    @property
    def kinds(self) -> Counter[str]:
        """Number of faults that did happen, by kind; a kill of the coordinator counts as "succession"."""
        return Counter(map(_kind, self.fired))

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
                sides = _ends(one.source, one.target, names)
                ways = [sides, sides[::-1]] if one.both else [sides]
                cuts = [Partition(one.at_s, one.at_s + one.for_s, *way) for way in ways]
                partitions += cuts
                self._parts[one] = {*cuts}
            elif isinstance(one, Flaw):
                ends = one.source, one.target
                link = links.get(ends, config.network.link_between(*ends))
                links[ends] = replace(link, **{one.on_link: one.amount})
                self._parts[one] = {(one.on_link, *ends)}
        return replace(config, network=replace(config.network, partitions=partitions, links=links))

    @property
    def store(self) -> Callable[[str], StateStore] | None:
        """Makes the coordinator's store, where a fault needs one; see `SimulatedCluster.run`."""
        ends = [
            (one.source, one.target) if isinstance(one, Cut | Flaw) else (one.node,) for one in self.faults
        ]
        return self._store if any(COORDINATOR in names for names in ends) else None

    def _store(self, job: str) -> StateStore:
        self._disk = _Disk(":memory:", job)
        return self._disk

    async def __call__(self, cluster: SimulatedCluster) -> None:
        """The faults of nodes: a plan is the `script` of `simulate`, also where it has faults of links alone."""
        self._network = cluster.network
        director = cluster.virtual.runtime("director")
        begun_ns = director.now()
        timed = [one for one in self.faults if isinstance(one, Departure | Spell)]
        for number, one in enumerate(sorted(timed, key=lambda one: one.at_s)):
            await director.sleep(max(0.0, one.at_s - (director.now() - begun_ns) / 1e9))
            if not cluster.is_running(one.node):
                continue
            if isinstance(one, Spell):
                director.spawn(self._endure(cluster, one), name=f"spell-{number}")
                continue
            self._struck.add(one)
            (cluster.kill if isinstance(one, Kill) else cluster.drain)(one.node)
            if one.back_s is not None:
                cluster.successor_due |= one.node == COORDINATOR
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
            cluster.successor_due &= fault.node != COORDINATOR
            if not await self._in_vain(cluster, fault.node):
                return
            wait_s = AGAIN_S
        cluster.successor_due &= fault.node != COORDINATOR

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

    async def _endure(self, cluster: SimulatedCluster, spell: Spell) -> None:
        """Begins a spell, waits, and ends it. It has happened if something came later, longer or not at all."""
        director, node = cluster.virtual.runtime("director"), cluster.virtual.runtime(spell.node)
        storage = cluster.virtual.storage

        def effects() -> float:
            if isinstance(spell, Slow):
                return sum(node.compute_s.values())
            if isinstance(spell, DiskFull):
                failed = storage.num_failed if isinstance(storage, FailingStorage) else 0
                return failed + (self._disk.num_failed if self._disk is not None else 0)
            return node.suspension.num_held

        def turn(*, bad: bool) -> None:
            if isinstance(spell, Slow):
                node.slowness = spell.factor if bad else 1.0
            elif isinstance(spell, DiskFull):
                if isinstance(storage, FailingStorage):
                    storage.error = errno.ENOSPC if bad else 0
                if self._disk is not None:
                    self._disk.full = bad
            elif bad:
                node.suspension.begin()
            else:
                node.suspension.end(with_clock=isinstance(spell, Freeze))

        if node.suspension.active:
            return
        before = effects()
        turn(bad=True)
        await director.sleep(spell.for_s)
        turn(bad=False)
        if effects() > before:
            self._struck.add(spell)

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


class _Disk(StateStore):
    """A store whose disk can be full."""

    full = False
    num_failed = 0

    def write(self, rows: Mapping[str, str], lines: bytes) -> None:
        """See `StateStore.write`."""
        if self.full:
            self.num_failed += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "coordinator.db")
        super().write(rows, lines)


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


def _kind(fault: Fault) -> str:
    if isinstance(fault, Kill) and fault.node == COORDINATOR:
        return "succession"
    return type(fault).__name__.lower()


def _ends(source: str, target: str, names: Sequence[str]) -> tuple[frozenset[str], frozenset[str]]:
    """The nodes on each side of a cut."""
    sides = [
        frozenset(names) - {source, target} if one == "*" else frozenset({one}) for one in (source, target)
    ]
    return sides[0], sides[1]
