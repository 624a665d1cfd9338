"""`FaultPlan`: what goes wrong in a run, and when, as data. One plan serves simulations and real processes.

    plan = FaultPlan.drawn(7, Scene(workers=3, shards=2, until_s=2.0, lease_s=10.0))
    run = gs.simulate(job, config=plan.config(config, names), script=plan)      # on virtual time
    run = plan.on_processes(job, run_dir)                                       # on processes of this machine
    assert plan.fired                                                           # it did happen

Of processes, signals strike the nodes, and a proxy in their path the links (`testing.proxy`).
"""

from __future__ import annotations

import errno
import os
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

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
# A disk that fails for as long as a test says so.


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
        """Writes a file; where it fails, the old content remains, as on a disk."""
        self._fail(path)
        super().write(path, data)

    def append(self, path: str, *records: bytes) -> int:
        """Appends records; where it fails, some of them may still fit."""
        if self.error and self.fits:
            fits, self.fits = min(self.fits, len(records)), 0
            return super().append(path, *records[:fits])
        self._fail(path)
        return super().append(path, *records)

    def patch(self, path: str, pieces: Iterable[tuple[int, Buffer]]) -> None:
        """Writes the pieces; where it fails, the first of them is written."""
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

    def on_processes(
        self,
        job: Job,
        run_dir: Path | str,
        *,
        listening: Listening | None = None,
        on_event: OnEvent | None = None,
    ) -> Run:
        """Runs a job in processes of this machine, and strikes them from the run's `started` event on.

        Args:
            job: from a file. Faults of links need the carrier `tcp` or `grpc`, and nothing that passes links by.
            run_dir: a new or empty directory.
            listening: see `train`; its certificates make links encrypted. All nodes are on this machine.
            on_event: see `train`.

        Returns:
            The finished run.

        Raises:
            ConfigError: a fault is not possible here; nothing was started.
            AssertionError: at the end, a fault has had no effect.
            GradstreamError: the run failed.
        """
        strikes = ProcessFaults(self.faults, job, Path(run_dir))
        try:
            run = strikes.run(listening, on_event)
        finally:
            self._struck |= strikes.struck
        missed = [one for one in self.faults if one not in self._struck]
        assert not missed, f"{len(missed)} of {len(self.faults)} faults had no effect: {missed}"
        return run


class _Disk(StateStore):
    """A store whose disk can be full."""

    full = False
    num_failed = 0

    def write(self, rows: Mapping[str, str], lines: bytes, gone: Sequence[str] = ()) -> None:
        """See `StateStore.write`."""
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
        frozenset(names) - {source, target} if one == "*" else frozenset({one}) for one in (source, target)
    ]
    return sides[0], sides[1]
