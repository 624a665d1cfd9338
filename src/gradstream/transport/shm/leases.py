"""Leases: the memory that one side of a payload channel has lent to the other, and that it has borrowed.

`GivenLeases` and `BorrowedLeases` exchange messages (`v1.Lending`) with the other side; neither knows of
sockets. All methods are for the event loop's thread, except where a docstring says otherwise.
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
from gradstream.transport.base import Stream
from gradstream.wire import v1
from gradstream.wire.frames import MAX_PAYLOAD_BYTES, FrameError, SequenceWindow

LEAST_BYTES = 32 << 10
"""Smaller payloads travel with their frame: that costs less than a loan."""

ARENA_BYTES = 32 << 20
MAX_SEGMENTS = 256  # of one peer, mapped at the same time
_IDS_PER_MESSAGE = 1000

End = Callable[[], None]


class ReferenceLostError(Exception):
    """Memory that a peer has lent can no longer be read."""


class Post(Protocol):
    """Sends a message to the other side, with the descriptor of a segment if there is one."""

    def __call__(self, message: v1.Lending, segment: Segment | None = None, /) -> None:
        """Does nothing if the channel is over."""
        ...


class Loaned:
    """A loan that this side has given; implements `transport.base.Lent`.

    Args:
        end: called when the loan is over.
        close_channel: closes the channel, and with it all of its loans; takes the reason.
    """

    __slots__ = ("_close_channel", "_end", "_over", "_runtime")

    def __init__(self, runtime: Runtime, end: End, close_channel: Callable[[str], None]) -> None:
        self._runtime = runtime
        self._end = end
        self._close_channel = close_channel
        self._over = asyncio.Event()

    @property
    def returned(self) -> bool:
        """See `Lent.returned`."""
        return self._over.is_set()

    def close(self) -> None:
        """Ends the loan: the borrower has returned it, or is gone."""
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
            self._close_channel(
                f"it did not return memory within {patience_s:g} s, which this node must write"
            )


class Arena:
    """Places in the memory [start_bytes, stop_bytes), each taken, and later given back.

    Sizes are rounded up to powers of two, and are multiples of `ALIGNMENT_BYTES`. The place that was given
    back last is taken first: it is still in the processor's cache. Places are never split or joined, so
    places of one size cannot use up the memory of another size.

    Args:
        start_bytes, stop_bytes: bounds of the memory, as offsets.
    """

    ALIGNMENT_BYTES = 4096

    def __init__(self, start_bytes: int, stop_bytes: int) -> None:
        self._next_bytes = start_bytes
        self._stop_bytes = stop_bytes
        self._free: dict[int, list[int]] = {}

    def take(self, size_bytes: int) -> int | None:
        """Offset of a place of at least `size_bytes`; None if there is none left."""
        room_bytes = self._room(size_bytes)
        free = self._free.get(room_bytes)
        if free:
            return free.pop()
        offset = self._next_bytes
        if offset + room_bytes > self._stop_bytes:
            return None
        self._next_bytes = offset + room_bytes
        return offset

    def give_back(self, offset_bytes: int, size_bytes: int) -> None:
        """Frees a place that was taken for `size_bytes`."""
        self._free.setdefault(self._room(size_bytes), []).append(offset_bytes)

    def _room(self, size_bytes: int) -> int:
        return max(self.ALIGNMENT_BYTES, 1 << (size_bytes - 1).bit_length())


class GivenLeases:
    """Lends memory of this node to the other side of a channel, which reads it in place, and counts the loans.

    Args:
        post: sends a message to the other side.
        close_channel: see `Loaned`.
    """

    def __init__(
        self, runtime: Runtime, channel: int, post: Post, close_channel: Callable[[str], None]
    ) -> None:
        self._runtime = runtime
        self._channel = channel
        self._post = post
        self._close_channel = close_channel
        self._loop = asyncio.get_running_loop()
        self._arena_segment: Segment | None = None
        self._arena = Arena(0, ARENA_BYTES)
        self._segments: dict[int, bool] = {}  # announced to the peer; whether it has mapped them
        self._loans: dict[int, Loaned] = {}
        self._of_stream: dict[Stream, list[int]] = {}
        self._numbers = itertools.count(1)

    def lend(self, stream: Stream, span: Span, end: End) -> tuple[v1.Reference, Loaned] | None:
        """A reference to a span in place; None if that is not in a segment, or the peer does not know the segment yet.

        Args:
            stream: carries the reference; when it is over, loans that never arrived end.
            end: called when the loan is over.
        """
        vector, itemsize = span.vector, span.vector.tensor.element_size()
        size_bytes = len(span) * itemsize
        if not isinstance(vector.home, Segment) or not _lendable(size_bytes) or not self._known(vector.home):
            return None
        offset_bytes = vector.offset_bytes + span.start * itemsize
        return self._give(stream, vector.home, offset_bytes, size_bytes, end)

    def stow(self, stream: Stream, payload: torch.Tensor) -> v1.Reference | None:
        """A reference to a copy of the payload in the arena; None if the arena has no room."""
        size_bytes = payload.nbytes
        if not _lendable(size_bytes):
            return None
        segment = self._arena_segment
        if segment is None:
            segment = self._arena_segment = Segment.create(ARENA_BYTES, "gradstream arena")
        offset = self._arena.take(size_bytes) if self._known(segment) else None
        if offset is None:
            return None
        place = segment.tensor(offset, payload.numel(), payload.dtype)
        place.numpy()[...] = payload.detach().numpy()  # on this thread alone
        end = partial(self._arena.give_back, offset, size_bytes)
        return self._give(stream, segment, offset, size_bytes, end)[0]

    def _give(
        self, stream: Stream, segment: Segment, offset_bytes: int, size_bytes: int, end: End
    ) -> tuple[v1.Reference, Loaned]:
        number = next(self._numbers)
        loaned = self._loans[number] = Loaned(self._runtime, end, self._close_channel)
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
        """Whether the peer has mapped a segment; the first call asks the peer to map it."""
        if segment.number not in self._segments:
            self._segments[segment.number] = False
            weakref.finalize(segment, self._drop, segment.number).atexit = False
            self._post(v1.Lending(segment=segment.number), segment)
        return self._segments[segment.number]

    def _drop(self, number: int) -> None:
        """Tells the peer that a segment was freed with its vector; runs on any thread."""
        with suppress(RuntimeError):  # the loop is over
            self._loop.call_soon_threadsafe(self._post, v1.Lending(dropped=number))

    def _stream_over(self, stream: Stream) -> None:
        """Asks the peer to return loans of a stream that is over: frames dropped on their way never arrive."""
        left = [number for number in self._of_stream.pop(stream) if number in self._loans]
        for ids in _batches(left):
            self._post(v1.Lending(forgotten=ids))

    def attached(self, segment: int) -> None:
        """Notes that the peer has mapped a segment: payloads may lie in it from now on."""
        if segment in self._segments:
            self._segments[segment] = True

    def returned(self, loans: Iterable[int]) -> None:
        """Ends loans that the peer has returned."""
        for number in loans:
            loaned = self._loans.pop(number, None)
            if loaned is not None:
                loaned.close()

    def close(self) -> None:
        """Ends all loans. The arena is not used again; its memory is freed with its last reader."""
        self.returned(list(self._loans))
        self._arena_segment = None


class BorrowedLeases:
    """The loans that this side has received.

    Args:
        post: sends a message to the other side.
    """

    def __init__(self, channel: int, post: Post) -> None:
        self._channel = channel
        self._post = post
        self._loop = asyncio.get_running_loop()
        self._segments: dict[int, Segment] = {}
        self._held: dict[int, weakref.ref[object]] = {}
        self._arrived = SequenceWindow()  # loans that arrived, or never will
        self._released: deque[int] = deque()
        self._returning = False

    def find(self, reference: v1.Reference) -> memoryview:
        """The bytes that a reference names, read-only. The loan is returned when nothing refers to them.

        Raises:
            ReferenceLostError: the loan was taken or forgotten before, or belongs to another channel.
            FrameError: the bytes lie in no segment that the peer has handed out.
        """
        if reference.channel != self._channel or not self._arrived.add(reference.loan):
            raise ReferenceLostError
        segment, size_bytes = self._segments.get(reference.segment), reference.size_bytes
        start_bytes, stop_bytes = reference.offset_bytes, reference.offset_bytes + size_bytes
        room_bytes = 0 if segment is None else segment.size_bytes
        if segment is None or not _lendable(size_bytes) or stop_bytes > room_bytes or start_bytes % 4:
            raise FrameError(
                f"the peer refers to bytes [{start_bytes}, {stop_bytes}) of shared-memory segment "
                f"{reference.segment}, of which this node has mapped {room_bytes} bytes; expected a range inside "
                f"the segment that begins at a multiple of 4 and has {LEAST_BYTES} to {MAX_PAYLOAD_BYTES} bytes"
            )
        view = np.frombuffer(segment.bytes[start_bytes:stop_bytes], dtype=np.uint8)
        self._held[reference.loan] = weakref.ref(view, partial(self._release, reference.loan))
        return memoryview(view)  # type: ignore[arg-type]

    def _release(self, loan: int, _: object) -> None:
        """Schedules the return of a loan to which nothing refers any more; runs on any thread."""
        self._released.append(loan)
        if not self._returning:
            self._returning = True
            with suppress(RuntimeError):  # the loop is over
                self._loop.call_soon_threadsafe(self._return)

    def _return(self) -> None:
        self._returning = False  # first: a loan that is released during the loop schedules another return
        loans = []
        while self._released:
            loans.append(self._released.popleft())
        for loan in loans:
            self._held.pop(loan, None)
        for ids in _batches(loans):
            self._post(v1.Lending(returned=ids))

    def forget(self, loans: Iterable[int]) -> None:
        """Returns those of these loans that have not arrived; they are no longer accepted if they do."""
        for ids in _batches([loan for loan in loans if self._arrived.add(loan)]):
            self._post(v1.Lending(returned=ids))

    def map(self, number: int, descriptors: list[int]) -> None:
        """Maps a segment that the peer hands out. Ignores any beyond `MAX_SEGMENTS`: the peer can do without.

        Args:
            descriptors: the descriptor that came with the message; it is removed from the list.

        Raises:
            ConfigError: the segment may not be mapped; see `Segment.attach`.
        """
        if len(descriptors) != 1 or number in self._segments or len(self._segments) >= MAX_SEGMENTS:
            return
        self._segments[number] = segment = Segment.attach(descriptors.pop(), writable=False)
        segment.close()  # the mapping stays
        self._post(v1.Lending(attached=number))

    def dropped(self, number: int) -> None:
        """Forgets a segment that the peer no longer uses. Memory that is still read stays mapped."""
        self._segments.pop(number, None)

    def close(self) -> None:
        """Forgets all segments."""
        self._segments.clear()


def _lendable(size_bytes: int) -> bool:
    return LEAST_BYTES <= size_bytes <= MAX_PAYLOAD_BYTES


def _batches(ids: list[int]) -> list[v1.Lending.Loans]:
    """The numbers, in lists that each fit into one packet."""
    starts = range(0, len(ids), _IDS_PER_MESSAGE)
    return [v1.Lending.Loans(ids=ids[start : start + _IDS_PER_MESSAGE]) for start in starts]
