"""Loans: what one side of a channel has given to the other, and what it has been given.

Both books are kept by messages (`v1.Lending`), which they are told of and which they post; neither knows
a socket. All but what says otherwise is for the event loop's thread.
"""

from __future__ import annotations

import asyncio
import itertools
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Protocol

import numpy as np
import torch

from gradstream.memory import Span
from gradstream.memory.segments import Segment
from gradstream.runtime.base import Runtime
from gradstream.transport.carrier import ReferenceLostError
from gradstream.transport.mailbox import Seen
from gradstream.transport.shm.arena import Arena
from gradstream.transport.stream import StreamCore
from gradstream.wire import v1
from gradstream.wire.frames import MAX_PAYLOAD_BYTES, FrameError

__all__ = ["LEAST_BYTES", "SHELF_BYTES", "BorrowedLeases", "GivenLeases", "Loaned", "Post"]

LEAST_BYTES = 32 << 10
"""Smaller payloads go with their frame: that costs less than the loan."""

SHELF_BYTES = 32 << 20
MAX_SEGMENTS = 256  # of one peer, mapped at once
_IDS_PER_MESSAGE = 1000

End = Callable[[], None]


class Post(Protocol):
    """Sends a message to the other side, with the descriptor of a segment if there is one."""

    def __call__(self, message: v1.Lending, segment: Segment | None = None, /) -> None:
        """Does nothing where the channel is over."""
        ...


class Loaned:
    """A loan that was given; implements `transport.base.Lent`.

    Args:
        runtime: of this node.
        end: called when it is over.
        hang_up: ends the channel, and with it all of its loans; told why.
    """

    __slots__ = ("_end", "_hang_up", "_over", "_runtime")

    def __init__(self, runtime: Runtime, end: End, hang_up: Callable[[str], None]) -> None:
        self._runtime = runtime
        self._end = end
        self._hang_up = hang_up
        self._over = asyncio.Event()

    @property
    def returned(self) -> bool:
        """See `Lent.returned`."""
        return self._over.is_set()

    def close(self) -> None:
        """The borrower has let go of it, or is gone."""
        if not self.returned:
            self._over.set()
            self._end()

    async def back(self, patience_s: float) -> None:
        """See `Lent.back`."""
        if self.returned:
            return
        try:
            await self._runtime.within(patience_s, self._over.wait())
        except TimeoutError:
            self._hang_up(f"it kept memory for {patience_s:g} s that is needed here")


class GivenLeases:
    """What this side has lent.

    Args:
        runtime: of this node.
        channel: number of the channel.
        post: sends a message.
        hang_up: see `Loaned`.
    """

    def __init__(self, runtime: Runtime, channel: int, post: Post, hang_up: Callable[[str], None]) -> None:
        self._runtime = runtime
        self._channel = channel
        self._post = post
        self._hang_up = hang_up
        self._loop = asyncio.get_running_loop()
        self._shelf_segment: Segment | None = None
        self._shelf = Arena(0, SHELF_BYTES)
        self._segments: dict[int, bool] = {}  # announced; whether the peer has mapped it
        self._loans: dict[int, Loaned] = {}
        self._of_stream: dict[StreamCore, list[int]] = {}
        self._numbers = itertools.count(1)

    def lend(self, stream: StreamCore, span: Span, end: End) -> tuple[v1.Reference, Loaned] | None:
        """A reference to a span where it lies; None where that is not in a segment, or not known there yet.

        Args:
            stream: by which the reference goes; when that is over, loans that never got there end.
            end: called when the loan is over.
        """
        vector, itemsize = span.vector, span.vector.tensor.element_size()
        size_bytes = len(span) * itemsize
        if not isinstance(vector.home, Segment) or not _lendable(size_bytes) or not self._known(vector.home):
            return None
        offset_bytes = vector.offset_bytes + span.start * itemsize
        return self._give(stream, vector.home, offset_bytes, size_bytes, end)

    def stow(self, stream: StreamCore, payload: torch.Tensor) -> v1.Reference | None:
        """A reference to a copy of the payload on the shelf; None where that has no room."""
        size_bytes = payload.nbytes
        if not _lendable(size_bytes):
            return None
        segment = self._shelf_segment
        if segment is None:
            segment = self._shelf_segment = Segment.create(SHELF_BYTES, "gradstream shelf")
        offset = self._shelf.take(size_bytes) if self._known(segment) else None
        if offset is None:
            return None
        place = segment.tensor(offset, payload.numel(), payload.dtype)
        place.numpy()[...] = payload.detach().numpy()  # on this thread alone
        end = partial(self._shelf.give_back, offset, size_bytes)
        return self._give(stream, segment, offset, size_bytes, end)[0]

    def _give(
        self, stream: StreamCore, segment: Segment, offset_bytes: int, size_bytes: int, end: End
    ) -> tuple[v1.Reference, Loaned]:
        number = next(self._numbers)
        loaned = self._loans[number] = Loaned(self._runtime, end, self._hang_up)
        if stream not in self._of_stream:
            self._of_stream[stream] = []
            stream.on_release(partial(self._stream_over, stream))
        self._of_stream[stream].append(number)
        reference = v1.Reference(
            channel=self._channel,
            segment=segment.number,
            offset_bytes=offset_bytes,
            size_bytes=size_bytes,
            loan=number,
        )
        return reference, loaned

    def _known(self, segment: Segment) -> bool:
        """Whether the peer has mapped it; at the first question it is told to."""
        if segment.number not in self._segments:
            self._segments[segment.number] = False
            weakref.finalize(segment, self._drop, segment.number).atexit = False
            self._post(v1.Lending(segment=segment.number), segment)
        return self._segments[segment.number]

    def _drop(self, number: int) -> None:
        """A segment goes with its vector, on whichever thread that happens."""
        with suppress(RuntimeError):  # the loop is over
            self._loop.call_soon_threadsafe(self._post, v1.Lending(dropped=number))

    def _stream_over(self, stream: StreamCore) -> None:
        """Frames that were dropped on their way never get there; the peer finds out which."""
        left = [number for number in self._of_stream.pop(stream) if number in self._loans]
        for ids in _batches(left):
            self._post(v1.Lending(forgotten=ids))

    def attached(self, segment: int) -> None:
        """The peer has mapped a segment: from here on payloads may lie in it."""
        if segment in self._segments:
            self._segments[segment] = True

    def returned(self, loans: Iterable[int]) -> None:
        """The peer has let go of these."""
        for number in loans:
            loaned = self._loans.pop(number, None)
            if loaned is not None:
                loaned.close()

    def close(self) -> None:
        """All loans are over. The shelf goes with the last who reads from it: it is not used again."""
        self.returned(list(self._loans))
        self._shelf_segment = None


class BorrowedLeases:
    """What this side was lent.

    Args:
        channel: number of the channel.
        post: sends a message.
    """

    def __init__(self, channel: int, post: Post) -> None:
        self._channel = channel
        self._post = post
        self._loop = asyncio.get_running_loop()
        self._segments: dict[int, Segment] = {}
        self._held: dict[int, weakref.ref[object]] = {}
        self._seen = Seen()  # loans that came, or never will
        self._released: deque[int] = deque()
        self._returning = False

    def find(self, reference: v1.Reference) -> memoryview:
        """The bytes that a reference means, read-only. The loan is returned when nothing refers to them.

        Raises:
            ReferenceLostError: the loan, or the channel it belongs to, is over.
            FrameError: they lie in no segment that the peer has handed out.
        """
        if reference.channel != self._channel or not self._seen.add(reference.loan):
            raise ReferenceLostError
        segment, size_bytes = self._segments.get(reference.segment), reference.size_bytes
        start_bytes, stop_bytes = reference.offset_bytes, reference.offset_bytes + size_bytes
        room_bytes = 0 if segment is None else segment.size_bytes
        if segment is None or not _lendable(size_bytes) or stop_bytes > room_bytes or start_bytes % 4:
            raise FrameError(
                f"a reference to bytes {start_bytes} to {stop_bytes} of shared memory {reference.segment}, "
                f"of which {room_bytes} bytes are mapped here: expected {LEAST_BYTES} to {MAX_PAYLOAD_BYTES} "
                "bytes within it"
            )
        view = np.frombuffer(segment.bytes[start_bytes:stop_bytes], dtype=np.uint8)
        self._held[reference.loan] = weakref.ref(view, partial(self._let_go, reference.loan))
        return memoryview(view)  # type: ignore[arg-type]

    def _let_go(self, loan: int, _: object) -> None:
        """Nothing refers to a payload any more; on whichever thread that was noticed."""
        self._released.append(loan)
        if not self._returning:
            self._returning = True
            with suppress(RuntimeError):  # the loop is over
                self._loop.call_soon_threadsafe(self._return)

    def _return(self) -> None:
        self._returning = False  # before looking: who lets go from here on asks for another turn
        loans = []
        while self._released:
            loans.append(self._released.popleft())
        for loan in loans:
            self._held.pop(loan, None)
        for ids in _batches(loans):
            self._post(v1.Lending(returned=ids))

    def forget(self, loans: Iterable[int]) -> None:
        """The stream of these has been over for a while: those that have not come are not taken any more."""
        for ids in _batches([loan for loan in loans if self._seen.add(loan)]):
            self._post(v1.Lending(returned=ids))

    def map(self, number: int, descriptors: list[int]) -> None:
        """The peer hands out a segment. One too many is never attached, and its owner does without.

        Args:
            descriptors: the one that came with it; taken out of the list.

        Raises:
            ConfigError: it is none of those that may be mapped; see `Segment.attach`.
        """
        if len(descriptors) != 1 or number in self._segments or len(self._segments) >= MAX_SEGMENTS:
            return
        self._segments[number] = segment = Segment.attach(descriptors.pop(), writable=False)
        segment.close()  # the mapping stays
        self._post(v1.Lending(attached=number))

    def dropped(self, number: int) -> None:
        """The peer does not use a segment any more. What is still read of it stays mapped."""
        self._segments.pop(number, None)

    def close(self) -> None:
        """All segments are dropped."""
        self._segments.clear()


def _lendable(size_bytes: int) -> bool:
    return LEAST_BYTES <= size_bytes <= MAX_PAYLOAD_BYTES


def _batches(ids: list[int]) -> list[v1.Lending.Loans]:
    """A packet holds so many."""
    starts = range(0, len(ids), _IDS_PER_MESSAGE)
    return [v1.Lending.Loans(ids=ids[start : start + _IDS_PER_MESSAGE]) for start in starts]
