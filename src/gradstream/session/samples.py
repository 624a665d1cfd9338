"""How many samples are behind the next gradient: its weight in the mean of all workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from gradstream.session.shards import length_of

__all__ = ["Samples"]


class Samples:
    """Counts them. What the loop says itself counts before all else.

    A loader from `session.shard` knows how many samples a minibatch has. It counts once a training pass
    has come after it: minibatches that are only looked at, in an evaluation, do not count. Without such a
    loader it is the length of the first tensor that the model is called with, in training mode; of a model
    that is trained in evaluation mode, in that.

    Attributes:
        said: what the loop has said of the next gradient.
    """

    def __init__(self) -> None:
        self.said: int | None = None
        self._dealt: int | None = None  # the minibatch that was taken last, until a training pass
        self._used: int | None = None  # of minibatches that training passes were made of
        self._seen: int | None = None  # by the model itself
        self._seen_in_eval: int | None = None
        self._last = 1

    def __deepcopy__(self, memo: dict[int, Any]) -> Samples:
        """Another one: what a copied model is called with is behind no gradient of the run."""
        return Samples()

    def dealt(self, batch: Any) -> None:
        """A loader has given a minibatch: its number of samples, or itself."""
        self._dealt = batch if isinstance(batch, int) else length_of((batch,)) or 0

    def forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """The model is called."""
        if not torch.is_grad_enabled():
            return
        count = length_of((*args, *kwargs.values()))
        if not model.training:
            self._seen_in_eval = _plus(self._seen_in_eval, count)
            return
        self._seen = _plus(self._seen, count)
        self._use()

    def take(self) -> int:
        """Samples behind the gradient that leaves now; as before where there is nothing new."""
        self._use()
        told = (self.said, self._used, self._seen, self._seen_in_eval)
        found = next((count for count in told if count is not None), self._last)
        self.taken()
        self._last = found
        return found

    def taken(self) -> None:
        """Begins to count anew."""
        self.said = self._dealt = self._used = self._seen = self._seen_in_eval = None

    def _use(self) -> None:
        if self._dealt is not None:
            self._used = _plus(self._used, self._dealt)
            self._dealt = None


def _plus(before: int | None, count: int | None) -> int | None:
    return before if count is None else (before or 0) + count
