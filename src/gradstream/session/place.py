"""Where a process that calls `join()` stands: alone, started by us, or started by torchrun."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from gradstream.checkpoint import Resume
from gradstream.config import Job
from gradstream.errors import ConfigError, DeadlineError
from gradstream.node import NodeSpec
from gradstream.roles import worker_name

__all__ = ["Assignment", "assign", "assigned", "of_torchrun", "tell", "told"]

KEY = "gradstream/assignment"


@dataclass(frozen=True, slots=True)
class Assignment:
    """What a worker needs to know.

    Args:
        rank: of this worker.
        world_size: how many there are.
        spec: file with what all nodes of the run are told.
        coordinator: its address.
    """

    rank: int
    world_size: int
    spec: str
    coordinator: str

    def told(self) -> NodeSpec:
        """What all nodes of the run are told."""
        return NodeSpec(**json.loads(Path(self.spec).read_text()))

    def job(self) -> Job:
        """The job as the launcher has it, but for model and data."""
        return self.told().load()

    def steps_before(self) -> int | None:
        """How many steps this worker has made before the run was resumed; None where it begins."""
        resume = self.told().resume
        return None if resume is None else Resume.of_json(resume).step_of(worker_name(self.rank))


_assigned: Assignment | None = None


def assign(assignment: Assignment) -> None:
    """This process is a worker that `gradstream train` has started."""
    global _assigned
    _assigned = assignment


def assigned() -> Assignment | None:
    """As which worker `gradstream train` has started this process, if it has."""
    return _assigned


def of_torchrun(environment: Mapping[str, str]) -> tuple[int, int] | None:
    """(rank, world size) as torchrun has set them; None where it has not, or for one process.

    Raises:
        ConfigError: the variables make no sense, or name processes on another machine.
    """
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return None
    try:
        rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        local = int(environment.get("LOCAL_WORLD_SIZE", size))
    except ValueError as error:
        raise ConfigError(f"RANK, WORLD_SIZE, LOCAL_WORLD_SIZE: expected whole numbers: {error}") from None
    if not 0 <= rank < size:
        raise ConfigError(f"RANK={rank}, WORLD_SIZE={size}: expected a rank from 0 to WORLD_SIZE - 1")
    if size == 1:
        return None
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not environment.get(name):
            raise ConfigError(f"RANK and WORLD_SIZE are set, but {name} is not: start with torchrun")
    if local != size or ("LOCAL_WORLD_SIZE" not in environment and not _loopback(environment["MASTER_ADDR"])):
        raise ConfigError(
            f"torchrun has started {size} processes, {local} of them on this machine, MASTER_ADDR is "
            f"{environment['MASTER_ADDR']}: a session under torchrun stays on one machine, since torchrun "
            "gives its processes no key to trust one another by; for several machines there is "
            "gradstream train --listen"
        )
    return rank, size


def _loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def tell(assignment: Assignment) -> None:
    """Rank 0 tells the others through torchrun's store."""
    said = {"spec": assignment.spec, "coordinator": assignment.coordinator}
    _store(assignment.rank, assignment.world_size, 60.0).set(KEY, json.dumps(said))


def told(rank: int, size: int, job: Job) -> Assignment:
    """What rank 0 has told.

    Raises:
        DeadlineError: it has not, in time.
    """
    limit_s = job.deadlines.join_s + 60.0  # a process loads torch before
    try:
        text = _store(rank, size, limit_s).get(KEY)
    except Exception as error:  # torch raises several kinds
        message = (
            f"did not say within {limit_s:g} s where the coordinator is, through torchrun's store: {error}"
        )
        raise DeadlineError("worker-0", message) from error
    said: dict[str, Any] = json.loads(text)
    return Assignment(rank, size, str(said["spec"]), str(said["coordinator"]))


def _store(rank: int, size: int, limit_s: float) -> Any:
    """The key-value store at MASTER_ADDR:MASTER_PORT: torchrun's own, or one of rank 0."""
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # torch's own __all__ is shorter
    from torch.distributed.rendezvous import rendezvous

    key = (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"])
    if key not in _stores:
        found = next(iter(rendezvous("env://", rank, size, timeout=timedelta(seconds=limit_s))))
        _stores[key] = PrefixStore("gradstream", found[0])
    return _stores[key]


_stores: dict[tuple[str, str], Any] = {}
"""A store of rank 0's own lives as long as the process: others may still be reading."""
