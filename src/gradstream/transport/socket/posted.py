"""A payload that leaves from where it lies, and whose memory is wanted back."""

from __future__ import annotations

from collections.abc import Callable

from gradstream.runtime.base import Runtime
from gradstream.transport.silence import Broadcast
from gradstream.transport.socket.framing import OutgoingFrame

__all__ = ["PATIENCE_S", "PostedPayload"]

PATIENCE_S = 0.02
"""A payload that the peer does not take in this time is copied: its owner may need the memory."""


class PostedPayload:
    """A payload that leaves from where it lies; implements `transport.stream.SendHandle`.

    Args:
        runtime: of this node.
        parcel: what it is part of.
    """

    def __init__(self, runtime: Runtime, parcel: OutgoingFrame) -> None:
        self.returned = False
        self._runtime = runtime
        self._parcel = parcel
        self._callbacks: list[Callable[[], None]] = []
        self._bell = Broadcast()

    def then(self, callback: Callable[[], None]) -> None:
        """See `SendHandle.then`."""
        if self.returned:
            callback()
        else:
            self._callbacks.append(callback)

    async def back(self, patience_s: float) -> None:
        """See `Lent.back`: what has not left then is copied. That is so too where this is cancelled."""
        if self.returned:
            return
        timer = self._runtime.call_later(min(patience_s, PATIENCE_S), self.own)
        try:
            while not self.returned:
                await self._bell.wait()
        finally:
            timer.cancel()
            self.own()

    def own(self) -> None:
        """Copies what has not left: the memory is its owner's again."""
        if not self.returned:
            self._parcel.own()
            self.come_back()

    def come_back(self) -> None:
        """Nothing is needed any more where it lay."""
        self.returned = True
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()
        self._bell.ring()
