"""The table of all methods of the protocol: the roles that serve and call each.

An endpoint consults it for each stream. It takes the caller's role from its certificate under TLS, and from
its name once the run has members. Tests go through all rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gradstream.transport.limits import LIMITS
from gradstream.wire.frames import MAX_HEADER_BYTES

COORDINATOR = "coordinator"
ROLES = ("coordinator", "shard", "worker", "part", "launcher", "machine")
"""A launcher serves machines that join. A machine knows the token, and is no node yet. A part is a process of a
worker's replica besides the worker itself: "part1-3" is part 1 of the replica of worker-3."""


def role_of(name: str) -> str:
    """The part before the dash, without a number: "worker" of "worker-3", "part" of "part1-3"."""
    return name.partition("-")[0].rstrip("0123456789")


def worker_rank(name: str) -> int | None:
    """The rank of a worker, or of another process of its replica; None for a name that is neither."""
    rank = name.partition("-")[2]
    return int(rank) if role_of(name) in ("worker", "part") and rank.isdecimal() and len(rank) < 8 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One method.

    Args:
        served_by: roles that serve it.
        callers: roles that may call it.
        members: callers must be members of the run. False for methods by which nodes become members, and
            for methods of a node that is no member itself.
        chunks: callers may send Chunks.
        request_bytes: length of the longest request that opens a stream of the method.
    """

    served_by: frozenset[str] = frozenset()
    callers: frozenset[str] = frozenset()
    members: bool = True
    chunks: bool = False
    request_bytes: int = LIMITS.request_bytes


_COORDINATOR, _SHARD, _WORKER = frozenset({COORDINATOR}), frozenset({"shard"}), frozenset({"worker"})
_COMPUTES = frozenset({"worker", "part"})
_MEMBER = _SHARD | _COMPUTES
_LAUNCHER, _MACHINE = frozenset({"launcher"}), frozenset({"machine"})

METHODS: Mapping[str, Method] = {
    # Membership. A request to join describes the model, tensor by tensor.
    "join": Method(served_by=_COORDINATOR, callers=_MEMBER, members=False, request_bytes=MAX_HEADER_BYTES),
    "stretch": Method(served_by=_COORDINATOR, callers=_MEMBER, members=False),
    "alive": Method(served_by=_COORDINATOR | _COMPUTES, callers=_MEMBER),  # parts of a replica ask each other
    "resume": Method(served_by=_COORDINATOR, callers=_MEMBER),
    "assign": Method(served_by=_COORDINATOR, callers=_WORKER),
    "ending": Method(served_by=_COORDINATOR, callers=_WORKER),
    "take_over": Method(served_by=_COORDINATOR, callers=_WORKER),
    "shares": Method(served_by=_COORDINATOR, callers=_WORKER),
    # Checkpoints, for nodes on machines without the run directory.
    "keep": Method(served_by=_COORDINATOR, callers=_MEMBER),
    "kept": Method(served_by=_COORDINATOR, callers=_MEMBER),
    # The parameter server. A fetch may name each chunk, with the version that the worker has.
    "push": Method(served_by=_SHARD, callers=_COMPUTES, chunks=True),
    "fetch": Method(served_by=_SHARD, callers=_COMPUTES, request_bytes=MAX_HEADER_BYTES),
    "command": Method(served_by=_SHARD, callers=_COMPUTES),
    "quorum": Method(served_by=_SHARD, callers=_SHARD),
    "tensor-sums": Method(served_by=_SHARD, callers=_SHARD),
    # Backups of shards. The description of a chunk names the recent pushes of each worker.
    "backup": Method(served_by=_SHARD, callers=_SHARD, chunks=True, request_bytes=MAX_HEADER_BYTES),
    "backups": Method(served_by=_SHARD, callers=_SHARD),
    # A new shard names each of its chunks.
    "handover": Method(served_by=_SHARD, callers=_SHARD, request_bytes=MAX_HEADER_BYTES),
    # Groups of workers.
    "tensor": Method(served_by=_COMPUTES, callers=_COMPUTES, chunks=True),
    "exchange": Method(served_by=_COMPUTES, callers=_COMPUTES, chunks=True),
    "broken": Method(served_by=_COMPUTES, callers=_COMPUTES),
    # Workers with parameters of their own, which exchange in pairs.
    "meet": Method(served_by=_WORKER, callers=_WORKER, chunks=True),
    "replica": Method(served_by=_WORKER, callers=_WORKER | _COORDINATOR),
    "state": Method(served_by=_COMPUTES, callers=_COMPUTES | _COORDINATOR),
    "predictors": Method(served_by=_COMPUTES, callers=_COORDINATOR),
    "remainders": Method(served_by=_COMPUTES, callers=_COORDINATOR),
    # Tunnels between nodes that cannot dial each other. The coordinator calls nodes through its own.
    "post": Method(served_by=_COORDINATOR, callers=_MEMBER),
    "tunnel": Method(served_by=_COORDINATOR, callers=_MEMBER | _COORDINATOR, chunks=True),
    "answer": Method(served_by=_COORDINATOR, callers=_MEMBER, chunks=True),
    # Machines that join.
    "hello": Method(served_by=_LAUNCHER, callers=_MACHINE, members=False),
    "measure": Method(served_by=_LAUNCHER, callers=_MACHINE, members=False, chunks=True),
    "enrol": Method(served_by=_LAUNCHER, callers=_MACHINE, members=False, request_bytes=MAX_HEADER_BYTES),
}

UNLISTED = Method(chunks=True)
"""The row of a method that is not in the table: no node of a run may call it."""
