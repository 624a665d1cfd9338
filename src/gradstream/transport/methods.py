"""Every method of the protocol: which role serves it, and who may call it. The one table.

An endpoint looks at it for each stream: under TLS by the role that the caller's certificate names, and once
the run has members also by the name that it has given. Tests go through the whole of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gradstream.transport.limits import LIMITS
from gradstream.wire.frames import MAX_HEADER_BYTES

__all__ = ["COORDINATOR", "METHODS", "ROLES", "UNLISTED", "Method", "role_of"]

COORDINATOR = "coordinator"
ROLES = ("coordinator", "shard", "worker", "launcher", "machine")
"""A launcher serves machines that come to join. A machine is whoever knows the token and is no node yet."""


def role_of(name: str) -> str:
    """The part before the dash: "worker" of "worker-3"."""
    return name.partition("-")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One method.

    Args:
        served_by: roles that serve it.
        callers: roles that may call it.
        members: callers must be members of the run; otherwise it is how they become members, or what
            members ask of one that is none itself.
        chunks: callers may send Chunks.
        request_bytes: the longest request that opens a stream of it.
    """

    served_by: frozenset[str] = frozenset()
    callers: frozenset[str] = frozenset()
    members: bool = True
    chunks: bool = False
    request_bytes: int = LIMITS.request_bytes


_COORDINATOR, _SHARD, _WORKER = frozenset({COORDINATOR}), frozenset({"shard"}), frozenset({"worker"})
_LAUNCHER, _MACHINE = frozenset({"launcher"}), frozenset({"machine"})

METHODS: Mapping[str, Method] = {
    # Membership. A request to join holds the model, tensor by tensor.
    "join": Method(
        served_by=_COORDINATOR, callers=_SHARD | _WORKER, members=False, request_bytes=MAX_HEADER_BYTES
    ),
    "alive": Method(served_by=_COORDINATOR, callers=_SHARD | _WORKER),
    "resume": Method(served_by=_COORDINATOR, callers=_SHARD | _WORKER),
    "assign": Method(served_by=_COORDINATOR, callers=_WORKER),
    "ending": Method(served_by=_COORDINATOR, callers=_WORKER),
    "take_over": Method(served_by=_COORDINATOR, callers=_WORKER),
    "shares": Method(served_by=_COORDINATOR, callers=_WORKER),
    # Checkpoints, for nodes whose machine does not see the run directory.
    "keep": Method(served_by=_COORDINATOR, callers=_SHARD | _WORKER),
    "kept": Method(served_by=_COORDINATOR, callers=_SHARD | _WORKER),
    # The parameter server. A fetch may name each chunk, with the version that is known of it.
    "push": Method(served_by=_SHARD, callers=_WORKER, chunks=True),
    "fetch": Method(served_by=_SHARD, callers=_WORKER, request_bytes=MAX_HEADER_BYTES),
    "command": Method(served_by=_SHARD, callers=_WORKER),
    "quorum": Method(served_by=_SHARD, callers=_SHARD),
    # Groups of workers.
    "tensor": Method(served_by=_WORKER, callers=_WORKER, chunks=True),
    "exchange": Method(served_by=_WORKER, callers=_WORKER, chunks=True),
    "broken": Method(served_by=_WORKER, callers=_WORKER),
    "state": Method(served_by=_WORKER, callers=_WORKER | _COORDINATOR),
    # Machines that come to join.
    "hello": Method(served_by=_LAUNCHER, callers=_MACHINE, members=False),
    "measure": Method(served_by=_LAUNCHER, callers=_MACHINE, members=False, chunks=True),
    "enrol": Method(served_by=_LAUNCHER, callers=_MACHINE, members=False, request_bytes=MAX_HEADER_BYTES),
}

UNLISTED = Method(chunks=True)
"""A method that is not in the table: nobody may call it in a run. Forgetting one fails closed."""
