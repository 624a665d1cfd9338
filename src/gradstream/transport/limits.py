"""What peers may call, and how much of a node they may use: limits, the table of methods, and queues of arrivals.

An endpoint consults the table for each stream. It takes the caller's role from its certificate under TLS, and from
its name once the run has members. Tests go through all rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gradstream.runtime.tasks import Broadcast
from gradstream.transport.base import Caller, Identity, Received
from gradstream.wire import v1
from gradstream.wire.frames import MAX_HEADER_BYTES, FrameError

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
    "draw": Method(served_by=_COORDINATOR, callers=_WORKER),
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


# ---- intake ------------------------------------------------------------------------------
# `Intake`: what one peer uses of this node: open streams, unread bytes, refusals.
#
# Each sender that is a member has its own; all others share one, so that a sender with many names gains nothing.

_CHUNK_BYTES = 1 << 20  # where no model is registered; also the length of pieces of tagged tensors
_STREAMS = 4  # concurrent pushes or fetches of one peer, each with a window of chunks
_OTHERS = Caller("", 0)


class Intake:
    """Counts the streams, unread bytes and refusals of one peer, to hold them within this node's limits.

    Args:
        allowed_bytes: returns the most bytes of received chunks and bodies that may wait to be read.
        more_streams: number of streams that the peer may open beyond `Limits.streams`.
    """

    def __init__(self, allowed_bytes: Callable[[], int], more_streams: int = 0) -> None:
        self.num_streams = 0
        self.more_streams = more_streams
        self.unread_bytes = 0
        self._allowed_bytes = allowed_bytes
        self._refusals_ns: deque[int] = deque(maxlen=LIMITS.refusals)
        self._closed_until_ns = 0

    @property
    def is_blank(self) -> bool:
        """Whether all counts are zero, so that this object may be dropped."""
        return not (self.num_streams or self.unread_bytes or self._refusals_ns or self._closed_until_ns)

    def has_room(self, num_bytes: int) -> bool:
        """Whether this many more bytes may wait to be read."""
        return self.unread_bytes + num_bytes <= self._allowed_bytes()

    def refused(self, now_ns: int) -> bool:
        """Counts a refusal. Returns True after too many: then close the peer's connections."""
        self._refusals_ns.append(now_ns)
        period_ns = round(LIMITS.refusals_s * 1e9)
        if len(self._refusals_ns) < LIMITS.refusals or now_ns - self._refusals_ns[0] > period_ns:
            return False
        self._refusals_ns.clear()
        self._closed_until_ns = now_ns + period_ns
        return True

    def is_closed(self, now_ns: int) -> bool:
        """Whether the peer was refused too often lately to connect."""
        return now_ns < self._closed_until_ns


class Intakes:
    """The intakes of all peers of one endpoint.

    Args:
        window: chunks that the endpoint holds for each stream.
    """

    def __init__(self, identity: Identity, window: int) -> None:
        self._identity = identity
        self._window = window
        self._of: dict[Caller, Intake] = {}
        self.takes_tensors = False

    def of(self, caller: Caller) -> Intake:
        """The intake of a caller."""
        members = self._identity.members
        if members is not None and members.get(caller.name) != caller.incarnation:
            caller = _OTHERS  # not a member (any more), or another node with a member's name
        elif caller not in self._of and len(self._of) > LIMITS.sessions:
            self._of = {name: intake for name, intake in self._of.items() if not intake.is_blank}
            if members is None and len(self._of) > LIMITS.sessions:
                caller = _OTHERS  # many names gain nothing before the members are known
        if caller not in self._of:
            if caller == _OTHERS:  # all joining nodes wait at the same time until the last one has joined
                self._of[caller] = Intake(self._others_bytes, self._identity.nodes)
            else:
                self._of[caller] = Intake(self._members_bytes)
        return self._of[caller]

    def _members_bytes(self) -> int:
        pieces_bytes = _CHUNK_BYTES if self.takes_tensors else 0
        chunk_bytes = self._identity.chunk_bytes or _CHUNK_BYTES
        return LIMITS.unread_bytes + self._window * (_STREAMS * chunk_bytes + pieces_bytes)

    def _others_bytes(self) -> int:
        return LIMITS.others_unread_bytes


# ---- receive queue -----------------------------------------------------------------------

MAX_FREE_BYTES = 4 << 20
"""The most bytes of waiting Bodies that cost no credit."""


class ReceiveQueue:
    """Holds arrivals of a stream until its user takes them, and checks that the peer had credit.

    Args:
        window: chunks that the peer may send ahead of those taken.
        intake: counts the waiting bytes against the peer's limit; None at the calling side, where credit
            is the only limit.
        takes_chunks: whether the peer may send chunks at all.
    """

    def __init__(self, window: int, intake: Intake | None = None, *, takes_chunks: bool = True) -> None:
        self.window = window
        self.readable = Broadcast()
        self._credit = window  # chunks that the peer may send now
        self._num_taken = 0  # chunks taken since credit was last returned
        self._batch = max(1, window // 2)  # credit is returned in batches of this size
        self._frames: deque[Received] = deque()
        self._free_bytes = 0
        self._intake = intake
        self._takes_chunks = takes_chunks

    def __len__(self) -> int:
        return len(self._frames)

    def belongs_to(self, intake: Intake) -> None:
        """Counts what waits now, and everything that comes, as another peer's."""
        if intake is self._intake:
            return
        waiting = sum(_size_bytes(frame) for frame in self._frames)
        if self._intake is not None:
            self._intake.unread_bytes -= waiting
        intake.unread_bytes += waiting
        self._intake = intake

    def may_bring(self, num_chunks: int) -> bool:
        """Whether the peer has credit for this many more chunks."""
        return num_chunks <= self._credit and self._takes_chunks

    def has_room(self, num_bytes: int) -> bool:
        """Whether this many more bytes may wait here."""
        return self._intake is None or self._intake.has_room(num_bytes)

    def put(self, received: Received) -> bool:
        """Adds a frame. Returns False if the peer's limit of waiting bytes leaves no room for it.

        Raises:
            FrameError: the peer had no credit for the frame.
        """
        frame = received.frame
        costs = costs_credit(frame)
        if (costs and not self._credit) or (frame.HasField("chunk") and not self._takes_chunks):
            raise FrameError(f"{_name_of(frame)} without credit")
        num_bytes = _size_bytes(received)
        if not costs and self._free_bytes + num_bytes > MAX_FREE_BYTES:
            unread = self._free_bytes + num_bytes
            raise FrameError(
                f"the peer has sent {unread} unread bytes of bodies; expected at most {MAX_FREE_BYTES} before "
                "this node reads them"
            )
        if not self.has_room(num_bytes):
            return False
        self._credit -= costs
        self._count(num_bytes, free=not costs)
        self._frames.append(received)
        self.readable.ring()
        return True

    def take(self) -> Received:
        """Removes and returns the oldest frame."""
        received = self._frames.popleft()
        self._count(-_size_bytes(received), free=not costs_credit(received.frame))
        return received

    def clear(self) -> None:
        """Drops all waiting frames."""
        while self._frames:
            self.take()

    def owes_credit(self) -> bool:
        """Counts a chunk that the user has taken; True if a batch of credit is due to the peer."""
        self._num_taken += 1
        return self._num_taken >= self._batch

    def return_credit(self) -> int:
        """Grants the peer as many chunks as were taken since the last grant, and returns their number."""
        num_taken, self._num_taken = self._num_taken, 0
        self._credit += num_taken
        return num_taken

    def _count(self, num_bytes: int, *, free: bool) -> None:
        if free:
            self._free_bytes += num_bytes
        if self._intake is not None:
            self._intake.unread_bytes += num_bytes


def costs_credit(frame: v1.Frame) -> bool:
    """Whether the receiver has to grant room for a frame: for chunks and for long bodies."""
    return frame.HasField("chunk") or len(frame.body.data) > LIMITS.free_body_bytes


def _size_bytes(received: Received) -> int:
    """Bytes that the receiver holds for a frame, excluding memory that its user has named."""
    if received.payload is None or received.landed:
        return len(received.frame.body.data)
    return received.payload.numel() * received.payload.element_size()


def _name_of(frame: v1.Frame) -> str:
    if frame.HasField("chunk"):
        return f"chunk {frame.chunk.index}"
    return f"a body of {len(frame.body.data)} bytes"
