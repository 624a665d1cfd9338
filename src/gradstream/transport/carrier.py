"""The contract between a stream and its carrier, and payloads that go by reference to shared memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch

from gradstream.memory import Span
from gradstream.transport.base import Landing, Lent
from gradstream.wire import v1
from gradstream.wire.frames import payload_tensor

if TYPE_CHECKING:
    from gradstream.transport.stream import StreamCore

__all__ = [
    "COPIED",
    "Carrier",
    "OutgoingCarrier",
    "PayloadChannel",
    "ReferenceLostError",
    "SendHandle",
    "find_payload",
    "refer_to",
]


class SendHandle(Lent, Protocol):
    """A payload that is sent from where it lies. It is returned soon, however slow the peer is."""

    def then(self, callback: Callable[[], None]) -> None:
        """Calls back when the payload is returned; at once if it is."""
        ...


class _Copied:
    """The `Lent` of a span whose payload was copied."""

    returned = True

    async def back(self, patience_s: float) -> None:
        """Returns at once."""


COPIED = _Copied()


class Carrier(Protocol):
    """Moves one stream's frames."""

    def transmit(self, frame: v1.Frame, payload: torch.Tensor | None) -> SendHandle | None:
        """Takes a frame over, in order, without waiting. The header may change afterwards.

        Returns:
            None where the payload may change at once as well; else a handle that tells when it may.
        """
        ...

    async def drained(self) -> None:
        """Returns once there is room to transmit more without a growing queue, or the stream is over."""
        ...

    def drop(self) -> None:
        """Drops frames that were transmitted but have not left yet."""
        ...

    def over(self) -> None:
        """Ends the stream's use of the carrier: nothing more is transmitted, and arrivals are ignored."""
        ...


class OutgoingCarrier(Carrier, Protocol):
    """The carrier of the calling side, before its stream exists."""

    def connect(self, stream: StreamCore, opened: v1.Open) -> None:
        """Transmits the Open, and hands what arrives to `stream` from now on."""
        ...


class ReferenceLostError(Exception):
    """The memory that a peer has lent can no longer be read."""


class PayloadChannel(Protocol):
    """Memory that both ends of a stream share (`shm.channel.Channel`)."""

    def lend(
        self, stream: StreamCore, span: Span, end: Callable[[], None]
    ) -> tuple[v1.Reference, Lent] | None:
        """A reference to a span where it lies, until `end` is called; None where that cannot be done."""
        ...

    def stow(self, stream: StreamCore, payload: torch.Tensor) -> v1.Reference | None:
        """A reference to a copy of a payload in shared memory; None where that cannot be done."""
        ...

    def find(self, reference: v1.Reference) -> memoryview:
        """The bytes that a reference names; the loan ends when nothing refers to them.

        Raises:
            ReferenceLostError, FrameError: see `BorrowedLeases.find`.
        """
        ...

    def intact(self) -> bool:
        """Whether the lender has reclaimed nothing so far: what was read by reference is what was lent."""
        ...


def refer_to(frame: v1.Frame, reference: v1.Reference) -> v1.Frame:
    """A copy of a chunk's frame that refers to its payload."""
    referring = v1.Frame()
    referring.CopyFrom(frame)
    referring.chunk.reference.CopyFrom(reference)
    return referring


def find_payload(
    channel: PayloadChannel | None, chunk: v1.Chunk, landing: Landing
) -> tuple[torch.Tensor | None, bool]:
    """The payload that a chunk refers to, and whether it was copied to where the receiver wants it.

    The reference is removed from the chunk, so that the chunk can be forwarded.

    Args:
        channel: memory shared with the sender; None where there is none.
        chunk: a chunk with a reference.
        landing: names the memory that the receiver wants the payload in.

    Raises:
        ReferenceLostError: the memory can no longer be read.
        FrameError: the reference or the chunk breaks the protocol.
    """
    if channel is None:
        raise ReferenceLostError
    view = channel.find(chunk.reference)
    chunk.ClearField("reference")
    payload = payload_tensor(chunk, view)
    place = None if payload is None else landing(chunk)
    if place is None or payload is None or (len(place), place.dtype) != (len(payload), payload.dtype):
        return payload, False
    place.numpy()[...] = payload.numpy()  # on this thread alone
    if not channel.intact():
        raise ReferenceLostError
    return place, True
