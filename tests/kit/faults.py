"""`FaultPlan`: what goes wrong in a simulated run, and when, as data.

A plan is the `script` of a simulation, and `kit.process_faults` has it strike the processes of a run:

    plan = FaultPlan.drawn(7, Scene(workers=3, shards=2, until_s=2.0, lease_s=10.0))
    run = gs.simulate(job, config=plan.config(config, names), script=plan)
    assert plan.fired                                                      # it did happen
"""

from __future__ import annotations

import errno
import os
import random
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, TypeAlias

from typing_extensions import override

from gradstream.coordinator.durable import StateStore
from gradstream.coordinator.nodes import COORDINATOR
from gradstream.errors import PeerLostError
from gradstream.job.plan import shard_name, worker_name
from gradstream.run.simulated import SimulatedCluster
from gradstream.runtime.base import Buffer
from gradstream.runtime.simulation import Partition, SimulationConfig
from gradstream.runtime.storage import MemoryStorage
from gradstream.transport.simulated import VirtualNetwork

# ---- fault kinds -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Departure:
    """A node's process is killed.

    Args:
        node: name of the node, such as "worker-1".
        at_s: when, in seconds since the run began.
        back_s: in a simulation, seconds until a new process takes its place; None if it is not replaced. No effect
            on real processes, which the launcher restarts.
    """

    node: str
    at_s: float
    back_s: float | None = None

    number: ClassVar[int]


class Kill(Departure):
    """A node is killed, as by SIGKILL."""

    number = signal.SIGKILL


class Drain(Departure):
    """A worker is asked to leave, as by SIGTERM."""

    number = signal.SIGTERM


@dataclass(frozen=True, slots=True)
class Spell:
    """Something is wrong with a node for a while.

    Args:
        node, at_s: see `Departure`.
        for_s: how long, in seconds.
    """

    node: str
    at_s: float
    for_s: float


class Stop(Spell):
    """A process stands still (SIGSTOP, SIGCONT)."""

    number: ClassVar[int] = signal.SIGSTOP


class Freeze(Spell):
    """The machine of a node stands still, and its clock with it, as when a laptop sleeps. Simulations only."""


class DiskFull(Spell):
    """The disk is full. For the coordinator: its state and the run's files. Simulations only."""


@dataclass(frozen=True, slots=True)
class Slow(Spell):
    """A node computes more slowly. Simulations only.

    Args:
        factor: how many times as long each computation takes that begins meanwhile.
    """

    factor: float


@dataclass(frozen=True, slots=True)
class Cut:
    """Nothing passes from one node to another for a while; nobody is told.

    Args:
        source, target: names of the nodes; "*" for all others.
        at_s: when it begins, in seconds since the run began.
        for_s: how long, in seconds.
        both: whether to cut the other direction, too.
    """

    source: str
    target: str
    at_s: float
    for_s: float
    both: bool = True


@dataclass(frozen=True, slots=True)
class Flaw:
    """A permanently bad link from one node to another; between processes, from the `started` event on.

    Args:
        source, target: names of the nodes.
        amount: value of the attribute `on_link` of `Link`.
    """

    source: str
    target: str
    amount: float

    on_link: ClassVar[str]


class Duplicate(Flaw):
    """Streams are delivered a second time, later, with this probability."""

    on_link = "duplicate"


class Lose(Flaw):
    """Frames are lost with this probability: requests, or answers on the way back."""

    on_link = "loss"


class Corrupt(Flaw):
    """Frames arrive damaged with this probability: the receiver hangs up."""

    on_link = "corrupt"


class Reorder(Flaw):
    """Frames take up to this many seconds longer, so that streams overtake one another."""

    on_link = "jitter_s"


class SlowLink(Flaw):
    """Each frame takes `amount` seconds longer; in a simulation, it takes `amount` seconds in all."""

    on_link = "latency_s"


Fault: TypeAlias = Departure | Spell | Cut | Flaw


# ---- drawn faults ------------------------------------------------------------------------
# Draws mixtures of faults that a run has to survive as long as a worker is left.

OF_NODES = ("kill", "kill", "coordinator", "drain", "stop", "freeze", "slow", "disk")
OF_LINKS = ("cut", "cut", "duplicate", "reorder", "lose", "corrupt")


@dataclass(frozen=True, slots=True)
class Scene:
    """The run in which faults happen.

    Args:
        workers: number of workers.
        shards: number of shards; 0 for a strategy without servers.
        until_s: all faults begin before this time, in seconds.
        lease_s: the run's `Deadlines.lease_s`: spells of workers and cuts are shorter than it, or half as long
            again; those of shards and of the coordinator are shorter.
        backups: whether shards have backups, so that one may be killed.
    """

    workers: int
    shards: int
    until_s: float
    lease_s: float
    backups: bool = False

    @property
    def servers(self) -> list[str]:
        """Names of the coordinator and of the shards."""
        return [COORDINATOR, *map(shard_name, range(self.shards))]


def drawn_faults(rng: random.Random, scene: Scene) -> list[Fault]:
    """Draws one to five faults of any kinds, and the death of a shard if it has a backup."""
    faults = [_drawn(rng, scene) for _ in range(rng.randint(1, 5))]
    if any(isinstance(fault, DiskFull) for fault in faults):  # a restart is then not guaranteed
        faults = [fault for fault in faults if not (isinstance(fault, Kill) and fault.node == COORDINATOR)]
    if scene.backups:
        shard = shard_name(rng.randrange(scene.shards))
        faults.append(Kill(shard, rng.uniform(0.02, scene.until_s), rng.uniform(0.0, 0.3)))
    return faults


def _drawn(rng: random.Random, scene: Scene) -> Fault:
    kind, worker = rng.choice(OF_NODES + OF_LINKS), worker_name(rng.randrange(scene.workers))
    return (_of_node if kind in OF_NODES else _of_link)(kind, worker, rng, scene)


def _of_node(kind: str, worker: str, rng: random.Random, scene: Scene) -> Fault:
    at_s, back_s = rng.uniform(0.02, scene.until_s), rng.choice([None, 0.0, 0.01, 0.1])
    node = rng.choice([worker, worker, *scene.servers])
    for_s = scene.lease_s * rng.choice([0.1, 0.5, 0.9, 1.5 if node == worker else 0.9])
    match kind:
        case "kill":
            return Kill(worker, at_s, back_s)
        case "coordinator":
            return Kill(COORDINATOR, at_s, rng.uniform(0.0, 0.5))
        case "drain":
            return Drain(worker, at_s, back_s)
        case "slow":
            return Slow(node, at_s, for_s, rng.choice([3.0, 10.0]))
        case "disk":
            return DiskFull(COORDINATOR, at_s, for_s)
        case _:
            return (Stop if kind == "stop" else Freeze)(node, at_s, for_s)


def _of_link(kind: str, worker: str, rng: random.Random, scene: Scene) -> Fault:
    others = [name for name in map(worker_name, range(scene.workers)) if name != worker]
    peer = rng.choice(scene.servers[1:] or others)
    match kind:
        case "cut":
            return _cut(worker, rng, scene)
        case "duplicate":
            return Duplicate(worker, peer, 0.5)
        case "reorder":
            source, target = rng.sample([worker, peer], 2)
            return Reorder(source, target, rng.choice([0.01, 0.1]))
        case _:  # not within a group: it needs its connections
            source, target = rng.sample([worker, rng.choice(scene.servers)], 2)
            return (Lose if kind == "lose" else Corrupt)(source, target, rng.choice([0.01, 0.05]))


def _cut(worker: str, rng: random.Random, scene: Scene) -> Cut:
    source, target = rng.sample([worker, rng.choice([*scene.servers, "*"])], 2)
    at_s, part = rng.uniform(0.02, scene.until_s), rng.choice([0.1, 0.5, 0.9, 1.5])
    if not scene.shards:  # a group does not dial again: it waits for the coordinator's decision
        if "*" in (source, target):
            source, target, part = worker, "*", 3.0
        elif source == COORDINATOR:
            part = min(part, 0.9)
    return Cut(source, target, at_s, part * scene.lease_s, both=rng.random() < 0.5)


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
    struck: set[Fault] = field(default_factory=set)  # those that hit a process
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
            fault for fault in self.faults if fault in self.struck or self._parts.get(fault, set()) & network
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
            self.struck.add(fault)
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
            self.struck.add(spell)


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
