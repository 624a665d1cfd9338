"""The table of all methods of the protocol: the roles that serve and call each.

An endpoint consults it for each stream. It takes the caller's role from its certificate under TLS, and from
its name once the run has members. Tests go through all rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gradstream.wire.frames import MAX_HEADER_BYTES

# ---- limits ------------------------------------------------------------------------------
# Limits on what peers and strangers may use of a node, in one place.
#
# A *stranger* has not yet proved knowledge of the run's secret; an *identity* is the name of a sender that has. A
# node beyond a limit is refused, or its connections are closed; this slows no other node down.

_KIB, _MIB = 1 << 10, 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one endpoint.

    Args:
        connections: connections of an endpoint, including those of strangers.
        strangers: concurrent connections of strangers; one more closes the oldest.
        handshake_s: seconds in which a stranger must prove that it knows the secret.
        greeting_bytes: length of a stranger's greeting.
        sessions: connections of one identity, counting each priority and each start of its process.
        streams: open streams of one identity; also of all nodes together that have not joined yet, and one
            more for each node of the run.
        request_bytes: length of the request that opens a stream, unless its method may have more.
        free_body_bytes: a longer Body needs credit, as a Chunk does.
        unread_bytes: bytes of Chunks and Bodies of one identity that its handlers have not taken, beyond the
            credit for the registered model's chunks.
        others_unread_bytes: the same for all nodes together that know the secret but are not members.
        turned_away_s: seconds before a refused caller gets its answer, for up to `strangers` callers at a
            time. So repeated tries are slow, and cost next to nothing.
        refusals: refusals of one identity, or of all strangers, within `refusals_s`; after more, the
            node closes its connections, and refuses new ones until `refusals_s` have passed.
        refusals_s: see `refusals`; seconds.
        event_bytes: length of one event that a member reports.
        beat_events_bytes: length of all events in one beat; a member with more sends more beats.
        events_bytes_s: bytes per second of one member's events, after the first `events_burst_bytes`.
        events_burst_bytes: see `events_bytes_s`.
    """

    connections: int = 4096
    strangers: int = 256
    handshake_s: float = 10.0
    greeting_bytes: int = 4 * _KIB
    sessions: int = 16
    streams: int = 512
    request_bytes: int = 64 * _KIB
    free_body_bytes: int = 64 * _KIB
    unread_bytes: int = 4 * _MIB
    others_unread_bytes: int = _MIB
    turned_away_s: float = 0.25
    refusals: int = 32
    refusals_s: float = 10.0
    event_bytes: int = 64 * _KIB
    beat_events_bytes: int = _MIB
    events_bytes_s: int = _MIB
    events_burst_bytes: int = 16 * _MIB


LIMITS = Limits()
"""The limits of every node."""


# ---- methods -----------------------------------------------------------------------------

COORDINATOR = "coordinator"
ROLES = ("coordinator", "shard", "worker", "part", "launcher", "machine")
"""A launcher serves machines that join. A machine knows the token, but is not a node yet. A part is a process of a
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
        members: whether callers must be members of the run. False for methods by which nodes become members, and
            for methods of a node that is not a member itself.
        chunks: whether callers may send Chunks.
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
    "plan": Method(served_by=_COORDINATOR, callers=_MEMBER, members=False),
    "alive": Method(served_by=_COORDINATOR | _COMPUTES, callers=_MEMBER),  # parts of a replica ask each other
    "resume": Method(served_by=_COORDINATOR, callers=_MEMBER),
    "assign": Method(served_by=_COORDINATOR, callers=_WORKER),
    "ending": Method(served_by=_COORDINATOR, callers=_WORKER),
    "take_over": Method(served_by=_COORDINATOR, callers=_WORKER),
    "epoch_part": Method(served_by=_COORDINATOR, callers=_WORKER),
    "shares": Method(served_by=_COORDINATOR, callers=_WORKER),
    # Checkpoints, for nodes on machines without the run directory.
    "keep": Method(served_by=_COORDINATOR, callers=_MEMBER),
    "kept": Method(served_by=_COORDINATOR, callers=_MEMBER),
    "copy": Method(served_by=_WORKER, callers=_COORDINATOR),  # of a checkpoint, for a second machine
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
    # Workers with their own parameters, which exchange in pairs.
    "meet": Method(served_by=_WORKER, callers=_WORKER, chunks=True),
    "replica": Method(served_by=_WORKER, callers=_WORKER | _COORDINATOR),
    "state": Method(served_by=_COMPUTES, callers=_COMPUTES | _COORDINATOR),
    "predictors": Method(served_by=_COMPUTES, callers=_COORDINATOR),
    "remainders": Method(served_by=_COMPUTES, callers=_COORDINATOR),
    "loop": Method(served_by=_WORKER, callers=_COORDINATOR, request_bytes=MAX_HEADER_BYTES),
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
