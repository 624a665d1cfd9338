"""The contract between a stream and its carrier."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from gradstream.transport.base import Lent
from gradstream.wire import v1


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
            None if the payload may change at once as well; else a handle that tells when it may.
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


class NullCarrier:
    """A `Carrier` that leads nowhere: it drops all frames."""

    def transmit(self, frame: v1.Frame, payload: torch.Tensor | None) -> None:
        """Does nothing."""

    async def drained(self) -> None:
        """Returns at once."""

    def drop(self) -> None:
        """Does nothing."""

    def over(self) -> None:
        """Does nothing."""


def bytes_of(payload: torch.Tensor | None) -> memoryview | None:
    """The memory of a tensor as bytes; None for an empty tensor, and for none."""
    if payload is None or not payload.numel():
        return None
    return memoryview(payload.detach().numpy()).cast("B")  # type: ignore[arg-type]


def copy_elements(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copies on this thread alone: torch would wake its other threads for one megabyte. Skips shape-only tensors."""
    if not target.is_meta:
        target.numpy()[...] = source.numpy()
