"""Draws mixtures of faults that a run has to survive while a worker is left."""

from __future__ import annotations

import random
from dataclasses import dataclass

from gradstream.coordinator.nodes import COORDINATOR
from gradstream.run.plan import shard_name, worker_name
from gradstream.testing.fault_kinds import (
    Corrupt,
    Cut,
    DiskFull,
    Drain,
    Duplicate,
    Fault,
    Freeze,
    Kill,
    Lose,
    Reorder,
    Slow,
    Stop,
)

OF_NODES = ("kill", "kill", "coordinator", "drain", "stop", "freeze", "slow", "disk")
OF_LINKS = ("cut", "cut", "duplicate", "reorder", "lose", "corrupt")


@dataclass(frozen=True, slots=True)
class Scene:
    """The run in which faults happen.

    Args:
        workers: number of workers.
        shards: number of shards; 0 for a strategy without servers.
        until_s: all faults begin before, in seconds.
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
    """Draws one to five faults of any kinds, and the death of a shard where that has a backup."""
    faults = [_drawn(rng, scene) for _ in range(rng.randint(1, 5))]
    if any(isinstance(one, DiskFull) for one in faults):  # nobody promises that it comes back then
        faults = [one for one in faults if not (isinstance(one, Kill) and one.node == COORDINATOR)]
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
    others = [one for one in map(worker_name, range(scene.workers)) if one != worker]
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
    if not scene.shards:  # a group does not dial again: it waits for the coordinator's verdict
        if "*" in (source, target):
            source, target, part = worker, "*", 3.0
        elif source == COORDINATOR:
            part = min(part, 0.9)
    return Cut(source, target, at_s, part * scene.lease_s, both=rng.random() < 0.5)
