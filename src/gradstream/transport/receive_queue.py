"""The `ReceiveQueue`: frames of one stream that wait for its user, and the credit that bounds them."""

from __future__ import annotations

from collections import deque

from gradstream.transport.base import Received
from gradstream.transport.intake import Intake
from gradstream.transport.limits import LIMITS
from gradstream.transport.silence import Broadcast
from gradstream.wire import v1
from gradstream.wire.frames import FrameError

MAX_FREE_BYTES = 4 << 20
"""The most bytes of waiting Bodies that cost no credit."""


class ReceiveQueue:
    """Holds what has arrived on a stream until its user takes it, and checks that the peer had credit.

    Args:
        window: chunks that the peer may send ahead of what was taken.
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
        """Counts what waits now, and all that comes, as another peer's."""
        if intake is self._intake:
            return
        waiting = sum(_size_bytes(one) for one in self._frames)
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
        """Grants the peer as many chunks as were taken since the last time, and returns their number."""
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
    """Bytes that the receiver holds for a frame, not counting memory that its user has named."""
    if received.payload is None or received.landed:
        return len(received.frame.body.data)
    return received.payload.numel() * received.payload.element_size()


def _name_of(frame: v1.Frame) -> str:
    if frame.HasField("chunk"):
        return f"chunk {frame.chunk.index}"
    return f"a body of {len(frame.body.data)} bytes"
