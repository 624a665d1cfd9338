"""How many samples are behind a worker's gradient: its weight in the mean over workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from gradstream.session.loaders_part import length_of

__all__ = ["SampleCount"]


class SampleCount:
    """Counts samples between two exchanges.

    What the user says comes first; then the minibatches from the loaders that `shard` has given; then what
    the model was called with, in training mode. A repeat, with which a worker fills a round, counts none
    whatever is said; nor does a minibatch that only an evaluation has looked at.
    """

    def __init__(self) -> None:
        self._taken: list[int | None] = []  # minibatches that no training pass has come after yet
        self._looked_at = 0  # how many of these an evaluation has seen
        self._noted: list[int | None] = []  # minibatches behind the next exchange
        self._current: int | None = None  # of the minibatch of the last exchange, where it was one
        self._said = self._seen = 0

    def note(self, samples: int | None) -> None:
        """A minibatch is taken from a loader, and counts so many; None where that cannot be seen.

        Those that are taken without gradients, for a validation, do not count.
        """
        if torch.is_grad_enabled():
            self._taken = [*self._taken[self._looked_at :], samples]
            self._looked_at = 0

    def forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """The model is called."""
        if not model.training:
            self._looked_at = len(self._taken)
        elif torch.is_grad_enabled():
            self.see(length_of((*args, *kwargs.values())) or 0)
            self._use()

    def say(self, samples: int) -> None:
        """The user says how many are behind the next exchange."""
        self._said = samples

    def see(self, samples: int) -> None:
        """The model was called with so many."""
        self._seen += samples

    def clear(self) -> None:
        """Forgets what came since the last exchange: it was made before."""
        self._taken, self._noted, self._looked_at, self._said, self._seen = [], [], 0, 0, 0

    def take(self) -> int:
        """How many are behind the exchange that is made now.

        Where no minibatch was taken since the last one, as with two losses of one minibatch, it counts
        again as many as it did.
        """
        self._taken = self._taken[self._looked_at :]
        self._use()
        noted = self._noted or [self._current]
        self._current = noted[0] if len(noted) == 1 else None
        said, seen = self._said, self._seen
        self.clear()
        known = [samples for samples in noted if samples is not None]
        if len(known) == len(noted):
            return said if said and any(known) else sum(known)
        return said or seen or sum(known) or 1

    def _use(self) -> None:
        self._noted += self._taken
        self._taken, self._looked_at = [], 0
