"""Watches a worker's gradients and updates: a replay does, to tell which samples are in an update."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradstream.data.base import BatchRef

if TYPE_CHECKING:  # runs without servers import nothing of them
    from gradstream.server.update import Update


class Observer:
    """Hears of every gradient and update of a worker, and does nothing."""

    def computed(self, rank: int, ref: BatchRef, step: int, loss: float) -> None:
        """The gradient of a minibatch is computed."""

    def handed_over(self, rank: int, update: Update) -> None:
        """Gradients have been put into this update, which will be pushed."""
