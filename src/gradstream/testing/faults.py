"""`FaultPlan`: what goes wrong in a run, and when, as data. One plan serves simulations and real processes.

    plan = FaultPlan.drawn(7, Scene(workers=3, shards=2, until_s=2.0, lease_s=10.0))
    run = gs.simulate(job, config=plan.config(config, names), script=plan)      # on virtual time
    run = plan.on_processes(job, run_dir)                                       # on processes of this machine
    assert plan.fired                                                           # it did happen

For processes, signals hit the nodes, and a proxy between them disturbs the links (`testing.proxy`).
"""

from __future__ import annotations

import errno
import os
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from typing_extensions import override

from gradstream.coordinator.durable.store import StateStore
from gradstream.coordinator.nodes import COORDINATOR
from gradstream.errors import PeerLostError
from gradstream.job.job import Job
from gradstream.run.followed_events import OnEvent
from gradstream.run.remote.listening import Listening
from gradstream.run.result import Run
from gradstream.run.simulated import SimulatedCluster
from gradstream.runtime.base import Buffer
from gradstream.runtime.simulation import Partition, SimulationConfig
from gradstream.runtime.storage import MemoryStorage
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
    Scene,
    Slow,
    SlowLink,
    Spell,
    Stop,
    drawn_faults,
)
from gradstream.testing.process_faults import ProcessFaults
from gradstream.transport.simulated.network import VirtualNetwork

# ---- storage -----------------------------------------------------------------------------
# A disk that fails for as long as a test wants it to.


class FailingStorage(MemoryStorage):
    """A disk that fails while `error` is set: ENOSPC, EDQUOT, EIO, EROFS.

    Attributes:
        error: errno of the OSError that operations raise; 0 for none. Only EIO and EROFS also stop `remove`.
        fits: number of records that the first failing append still writes.
        num_failed: number of operations that have failed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.error = 0
        self.fits = 0
        self.num_failed = 0

    def write(self, path: str, data: bytes) -> None:
        """Writes a file; if it fails, the old content remains, as on a disk."""
        self._fail(path)
        super().write(path, data)

    def append(self, path: str, *records: bytes) -> int:
        """Appends records; if it fails, some of them may still fit."""
        if self.error and self.fits:
            fits, self.fits = min(self.fits, len(records)), 0
            return super().append(path, *records[:fits])
        self._fail(path)
        return super().append(path, *records)

    def patch(self, path: str, pieces: Iterable[tuple[int, Buffer]]) -> None:
        """Writes the pieces; if it fails, the first of them is written."""
        if self.error and self.error != errno.EROFS:
            super().patch(path, list(pieces)[:1])
        self._fail(path)
        super().patch(path, pieces)

    def rename(self, old: str, new: str) -> None:
        """Renames, which needs room in the folder."""
        self._fail(new)
        super().rename(old, new)

    def remove(self, path: str) -> None:
        """Removes a file, which needs no room."""
        if self.error in (errno.EIO, errno.EROFS):
            self._fail(path)
        super().remove(path)

    def _fail(self, path: str) -> None:
        if self.error:
            self.num_failed += 1
            raise OSError(self.error, os.strerror(self.error), path)


# ---- faults ------------------------------------------------------------------------------

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
    "SlowLink",
    "Stop",
]

LOOK_S = 0.01
AGAIN_S, AGAIN_LOOKS = 0.1, 40
"""Seconds before another process replaces one that found no coordinator, and before it is checked."""


@dataclass(slots=True)
class FaultPlan:
    """The faults of one run.

    Args:
        faults: in any order.
    """

    faults: Sequence[Fault] = ()
    _struck: set[Fault] = field(default_factory=set)  # faults that hit a process
    _parts: dict[Fault, set[Partition | tuple[str, str, str]]] = field(default_factory=dict)  # of a network
    _network: VirtualNetwork | None = None
    _disk: _Disk | None = None

    @classmethod
    def drawn(cls, seed: int, scene: Scene) -> FaultPlan:
        """Draws one to five faults. A run survives any mixture of them as long as a worker is left.

        Args:
            seed: the same seed draws the same plan.
            scene: the run.
        """
        return cls(drawn_faults(random.Random(f"faults/{seed}"), scene))

    @property
    def fired(self) -> list[Fault]:
        """The faults that took effect: they hit or delayed a process, or a link lost or changed something."""
        network = set() if self._network is None else self._network.struck
        return [
            fault for fault in self.faults if fault in self._struck or self._parts.get(fault, set()) & network
        ]

    @property
    def kinds(self) -> Counter[str]:
        """Number of faults that took effect, by kind; a kill of the coordinator counts as "succession"."""
        return Counter(map(_kind, self.fired))

    # ---- on virtual time ----------------------------------------------------------------

    def config(self, config: SimulationConfig, names: Sequence[str]) -> SimulationConfig:
        """The same simulation with the faults of links.

        Args:
            config: the simulation.
            names: names of all nodes, for "*".
        """
        partitions, links = list(config.network.partitions), dict(config.network.links)
        for fault in self.faults:
            if isinstance(fault, Cut):
                sides = _ends(fault.source, fault.target, names)
                directions = [sides, sides[::-1]] if fault.both else [sides]
                cuts = [
                    Partition(fault.at_s, fault.at_s + fault.for_s, *direction) for direction in directions
                ]
                partitions += cuts
                self._parts[fault] = {*cuts}
            elif isinstance(fault, Flaw):
                ends = fault.source, fault.target
                link = links.get(ends, config.network.link_between(*ends))
                links[ends] = replace(link, **{fault.on_link: fault.amount})
                self._parts[fault] = {(fault.on_link, *ends)}
        return replace(config, network=replace(config.network, partitions=partitions, links=links))

    @property
    def store(self) -> Callable[[str], StateStore] | None:
        """Makes the coordinator's store, if a fault needs it; see `SimulatedCluster.run`."""
        ends = [
            (fault.source, fault.target) if isinstance(fault, Cut | Flaw) else (fault.node,)
            for fault in self.faults
        ]
        return self._store if any(COORDINATOR in names for names in ends) else None

    def _store(self, job: str) -> StateStore:
        self._disk = _Disk(":memory:", job)
        return self._disk

    async def __call__(self, cluster: SimulatedCluster) -> None:
        """The faults of nodes: a plan is the `script` of `simulate`, even if it has only faults of links."""
        self._network = cluster.network
        director = cluster.virtual.runtime("director")
        begun_ns = director.now()
        timed = [fault for fault in self.faults if isinstance(fault, Departure | Spell)]
        for number, fault in enumerate(sorted(timed, key=lambda fault: fault.at_s)):
            await director.sleep(max(0.0, fault.at_s - (director.now() - begun_ns) / 1e9))
            if not cluster.is_running(fault.node):
                continue
            if isinstance(fault, Spell):
                director.spawn(self._endure(cluster, fault), name=f"spell-{number}")
                continue
            self._struck.add(fault)
            (cluster.kill if isinstance(fault, Kill) else cluster.drain)(fault.node)
            if fault.back_s is not None:
                cluster.successor_due |= fault.node == COORDINATOR
                director.spawn(self._bring_back(cluster, fault), name=f"back-{number}")

    async def _bring_back(self, cluster: SimulatedCluster, fault: Departure) -> None:
        director = cluster.virtual.runtime("director")
        await cluster.ended(fault.node)
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
        """Whether a new process ended at once because the coordinator had died: a launcher would start another one."""
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
        """Begins a spell, waits, and ends it. It took effect if something came later, took longer or did not happen."""
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

    def on_processes(
        self,
        job: Job,
        run_dir: Path | str,
        *,
        listening: Listening | None = None,
        on_event: OnEvent | None = None,
    ) -> Run:
        """Runs a job in processes of this machine, and injects the faults from the run's `started` event on.

        Args:
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
        strikes = ProcessFaults(self.faults, job, Path(run_dir))
        try:
            run = strikes.run(listening, on_event)
        finally:
            self._struck |= strikes.struck
        missed = [fault for fault in self.faults if fault not in self._struck]
        assert not missed, f"{len(missed)} of {len(self.faults)} faults had no effect: {missed}"
        return run


class _Disk(StateStore):
    """A store whose disk can be full."""

    full = False
    num_failed = 0

    @override
    def write(self, rows: Mapping[str, str], lines: bytes, gone: Sequence[str] = ()) -> None:
        if self.full:
            self.num_failed += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "coordinator.db")
        super().write(rows, lines, gone)


def _kind(fault: Fault) -> str:
    if isinstance(fault, Kill) and fault.node == COORDINATOR:
        return "succession"
    return type(fault).__name__.lower()


def _ends(source: str, target: str, names: Sequence[str]) -> tuple[frozenset[str], frozenset[str]]:
    """The nodes on each side of a cut."""
    sides = [
        frozenset(names) - {source, target} if name == "*" else frozenset({name}) for name in (source, target)
    ]
    return sides[0], sides[1]
