"""The `ReceiveQueue`: frames of one stream that wait for its user, and the credit that bounds them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from gradstream.runtime.tasks import Broadcast
from gradstream.transport.base import Caller, Identity, Received
from gradstream.transport.methods import LIMITS
from gradstream.wire import v1
from gradstream.wire.frames import FrameError

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
