"""What a stream needs of what carries it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch

from gradstream.memory import Span
from gradstream.transport.base import Lent
from gradstream.wire import v1

if TYPE_CHECKING:
    from gradstream.transport.stream import StreamCore

__all__ = ["Carrier", "OutgoingCarrier", "PayloadChannel", "ReferenceLostError", "SendHandle"]


class SendHandle(Lent, Protocol):
    """A payload that leaves from where it lies. It is back soon, however slow the peer is."""

    def then(self, callback: Callable[[], None]) -> None:
        """Calls back when it is back; at once if it is."""
        ...


class Carrier(Protocol):
    """Moves one stream's frames."""

    def transmit(self, frame: v1.Frame, payload: torch.Tensor | None) -> SendHandle | None:
        """Takes a frame over, in order, without waiting. The header may change afterwards.

        Returns:
            None where the payload may change as well; else what tells when that is so.
        """
        ...

    async def drained(self) -> None:
        """Returns once there is room to transmit more without piling up; also once the stream is over."""
        ...

    def drop(self) -> None:
        """Forgets frames that were transmitted but have not left yet."""
        ...

    def over(self) -> None:
        """Nothing more will be transmitted, and what arrives is of no interest."""
        ...


class OutgoingCarrier(Carrier, Protocol):
    """The caller's end, before its stream exists."""

    def connect(self, stream: StreamCore, opened: v1.Open) -> None:
        """Transmits the Open, and feeds `stream` from now on."""
        ...


class ReferenceLostError(Exception):
    """A payload was lent by a peer, and cannot be read any more."""


class PayloadChannel(Protocol):
    """Memory that both ends of a stream share (`channel.Channel`)."""

    def lend(
        self, stream: StreamCore, span: Span, end: Callable[[], None]
    ) -> tuple[v1.Reference, Lent] | None:
        """A reference to a span where it lies, until `end` is called; None where that cannot be done."""
        ...

    def stow(self, stream: StreamCore, payload: torch.Tensor) -> v1.Reference | None:
        """A reference to a copy of a payload; None where that cannot be done."""
        ...

    def find(self, reference: v1.Reference) -> memoryview:
        """The bytes meant; the loan is over when nothing refers to them. Raises what `BorrowedLeases.find` says."""
        ...

    def intact(self) -> bool:
        """Whether what has been read by reference so far was what was lent: it was not taken back."""
        ...
