"""The kinds of faults of a `FaultPlan`, as data. `testing.proxy` describes faults of links between processes."""

from __future__ import annotations

import random
import signal
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from gradstream.coordinator.nodes import COORDINATOR
from gradstream.job.plan import shard_name, worker_name

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
