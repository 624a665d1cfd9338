"""Processes that torchrun has started, or anything else that sets up torch.distributed: how they meet.

Ranks and store are those that are there: what a user's own `init_process_group` has made, or else what
torchrun says in the environment. Only a few bytes go through the store; groups that exchange are made beside
the user's, and share nothing with it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch

from gradstream.config import Job
from gradstream.errors import ConfigError, DeadlineError
from gradstream.session.place import Assignment, handed_out
from gradstream.transport.addresses import is_loopback
from gradstream.transport.unix import host_id

__all__ = ["of_process_group", "of_torchrun", "tell", "told"]

KEY = "gradstream/assignment"
TELL_S = 60.0


def of_process_group() -> tuple[int, int] | None:
    """(rank, world size) of the process group that the user has made; None where there is none, or of one."""
    dist = torch.distributed
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return dist.get_rank(), dist.get_world_size()


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
    if local != size or (
        "LOCAL_WORLD_SIZE" not in environment and not is_loopback(environment["MASTER_ADDR"])
    ):
        raise ConfigError(
            f"torchrun has started {size} processes, {local} of them on this machine, MASTER_ADDR is "
            f"{environment['MASTER_ADDR']}: a session under torchrun stays on one machine, since torchrun "
            "gives its processes no key to trust one another by; for several machines there is "
            "gradstream train --listen"
        )
    return rank, size


def tell(assignment: Assignment) -> None:
    """Rank 0 tells the others, through torch's store."""
    said = {"spec": assignment.spec, "coordinator": assignment.coordinator, "host": host_id()}
    _store(assignment.rank, assignment.world_size, TELL_S).set(KEY, json.dumps(said))


def told(rank: int, size: int, job: Job) -> Assignment:
    """What rank 0 has told.

    Raises:
        DeadlineError: it has not, in time.
        ConfigError: it is on another machine.
    """
    limit_s = job.deadlines.join_s + 60.0  # a process loads torch before
    try:
        text = _store(rank, size, limit_s).get(KEY)
    except Exception as error:  # torch raises several kinds
        message = f"did not say within {limit_s:g} s where the coordinator is, through torch's store: {error}"
        raise DeadlineError("worker-0", message) from error
    said: dict[str, Any] = json.loads(text)
    if said["host"] != host_id():
        raise ConfigError(
            f"rank {rank} of {size} is on another machine than rank 0: a session whose processes others have "
            "started stays on one machine; for several there is gradstream train --listen"
        )
    spec = str(said["spec"])
    return Assignment(rank, size, spec, str(said["coordinator"]), handed_out(spec))


def _store(rank: int, size: int, limit_s: float) -> Any:
    """The key-value store of the user's process group; or that at MASTER_ADDR:MASTER_PORT, torchrun's own.

    One that rank 0 makes at that place lives as long as the process: others may still be reading.
    """
    if not _stores:
        from torch.distributed.rendezvous import rendezvous

        dist: Any = torch.distributed
        if of_process_group() is not None:
            found = dist.distributed_c10d._get_default_store()
        else:
            found, _, _ = next(iter(rendezvous("env://", rank, size, timeout=timedelta(seconds=limit_s))))
        _stores.append(dist.PrefixStore("gradstream", found))
    return _stores[0]


_stores: list[Any] = []
