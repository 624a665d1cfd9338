"""How many samples are behind a worker's gradient: its weight in the mean over workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gradstream.session.loaders_part import length_of

__all__ = ["SampleCount"]


@dataclass(slots=True, eq=False)
class _Minibatch:
    """One that was taken from a loader.

    Args:
        samples: that it counts; None where that cannot be seen.
        loader: that gave it.
        looked_at: an evaluation has come after it, and no minibatch of another loader in between.
        over: the loader gives no more.
    """

    samples: int | None
    loader: object
    looked_at: bool = False
    over: bool = False


class SampleCount:
    """Counts samples between two exchanges.

    What the user says comes first; then the minibatches from the loaders that `shard` has given; then what
    the model was called with, in training mode. A repeat, with which a worker fills a round, counts none
    whatever is said; nor does a minibatch that only an evaluation has looked at. Where the model was called
    in evaluation mode alone, that is how it is trained.
    """

    def __init__(self) -> None:
        self._taken: list[_Minibatch] = []  # that no training pass has come after yet
        self._noted: list[_Minibatch] = []  # behind the next exchange
        self._current: _Minibatch | None = None  # of the last exchange, where it was one
        self._last = 1
        self._said = 0
        self._seen: int | None = None
        self._seen_in_evaluation: int | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> SampleCount:
        """Another one: what a copied model is called with is behind no gradient of the run."""
        return SampleCount()

    def note(self, samples: int | None, loader: object = None) -> None:
        """A minibatch is taken from a loader, and counts so many; None where that cannot be seen.

        Those that are taken without gradients, for a validation, do not count.
        """
        if torch.is_grad_enabled():
            self._taken = [*self._not_looked_at(), _Minibatch(samples, loader)]

    def over(self, loader: object = None) -> None:
        """A loader gives no more minibatches: its last one counts again for no exchange that follows."""
        if torch.is_grad_enabled():
            self._taken = [one for one in self._taken if not (one.looked_at and one.loader is loader)]
            for one in (*self._taken, *self._noted, self._current):
                if one is not None and one.loader is loader:
                    one.over = True

    def forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """The model is called."""
        count = length_of((*args, *kwargs.values())) if torch.is_grad_enabled() else None
        if not model.training:
            for one in self._taken:
                one.looked_at |= one.loader is self._taken[-1].loader
            self._seen_in_evaluation = _plus(self._seen_in_evaluation, count)
        elif torch.is_grad_enabled():
            self.see(count)
            self.use()

    def say(self, samples: int) -> None:
        """The user says how many are behind the next exchange."""
        self._said = samples

    def see(self, samples: int | None) -> None:
        """The model was called with so many, in training mode."""
        self._seen = _plus(self._seen, samples)

    @property
    def is_repeat(self) -> bool:
        """Whether the minibatch that was taken last counts no samples."""
        return [one.samples for one in (*self._noted, *self._taken)][-1:] == [0]

    def clear(self) -> None:
        """Forgets what came since the last exchange: it was made before."""
        self._taken, self._noted, self._said = [], [], 0
        self._seen = self._seen_in_evaluation = None

    def use(self) -> None:
        """The minibatches that were taken are behind the next exchange, whatever has looked at them."""
        self._noted += self._taken
        self._taken = []

    def take(self) -> int:
        """How many are behind the exchange that is made now.

        Where no minibatch was taken since the last one, as with two losses of one minibatch, it counts
        again as many as it did; so it does where nothing is known of the new ones.
        """
        if self._noted or self._not_looked_at() or self._seen is not None:
            self._taken = self._not_looked_at()
        self.use()
        noted = [one.samples for one in self._noted]
        if noted:
            self._current = self._noted[0] if len(noted) == 1 else None
        elif self._current is None or self._current.over:
            noted = [None]
        else:
            noted = [self._current.samples]
        said = self._said
        seen = self._seen_in_evaluation if self._seen is None else self._seen
        self.clear()
        known = [samples for samples in noted if samples is not None]
        if len(known) == len(noted):
            self._last = said if said and any(known) else sum(known)
        elif said or seen is None:
            self._last = said or sum(known) or self._last
        else:
            self._last = seen
        return self._last

    def _not_looked_at(self) -> list[_Minibatch]:
        return [one for one in self._taken if not one.looked_at]


def _plus(before: int | None, count: int | None) -> int | None:
    return before if count is None else (before or 0) + count
