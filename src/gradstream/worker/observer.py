"""Who looks on while a worker computes: a replay does, to say which samples are behind an update."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradstream.data.base import BatchRef

if TYPE_CHECKING:  # runs without servers import nothing of them
    from gradstream.server.update import Update

__all__ = ["Observer"]


class Observer:
    """Told of what a worker does, step by step. This one looks away."""

    def computed(self, rank: int, ref: BatchRef, step: int, loss: float) -> None:
        """The gradient of a minibatch is there."""

    def handed_over(self, rank: int, update: Update) -> None:
        """It is in this update, which will be pushed."""
