"""Counts the samples behind a worker's gradient: its weight in the mean over workers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gradstream.session.loaders_part import length_of


@dataclass(slots=True, eq=False)
class _Minibatch:
    """A minibatch that the loop has taken from a loader.

    Args:
        samples: number of samples that it counts; None if that cannot be seen.
        loader: the loader that gave it.
        evaluated: an evaluation has followed it, and no minibatch of another loader in between.
        over: the loader gives no more minibatches.
    """

    samples: int | None
    loader: object
    evaluated: bool = False
    over: bool = False


@dataclass(frozen=True, slots=True)
class PassSamples:
    """The samples behind one backward pass.

    Args:
        counted: as the session has counted them.
        said: as the script has set them; None if it has not.
        repeated: only minibatches that repeat others are behind it.
    """

    counted: float
    said: float | None
    repeated: bool


def joined(passes: Sequence[PassSamples]) -> float:
    """The number of samples behind the sum of several passes: the last that the script has set, or else all."""
    said = [one.said for one in passes if one.said is not None]
    if all(one.repeated for one in passes):
        return 0
    return said[-1] if said else sum(one.counted for one in passes)


def whole(samples: float) -> tuple[int, float]:
    """(whole number of samples that a round counts, factor by which it weighs them more than they do)."""
    count = math.ceil(samples)
    return count, samples / count if count else 1.0


class SampleCount:
    """Counts the samples between two exchanges.

    It takes the first number that is known: the one that the script has set (`Session.samples`); the samples of the
    minibatches that it has taken from loaders of `shard`; the length of the model's inputs in training mode.
    A repeated minibatch, with which a worker fills a round, always counts 0. A minibatch that only an
    evaluation has used does not count. If the model was called in evaluation mode alone, the script trains it
    in that mode, and those inputs count.
    """

    def __init__(self) -> None:
        self._taken: list[_Minibatch] = []  # no training pass has followed these yet
        self._noted: list[_Minibatch] = []  # these are behind the next exchange
        self._current: _Minibatch | None = None  # the only one behind the last exchange
        self._last: float = 1
        self._set: float | None = None
        self._seen: int | None = None
        self._seen_in_evaluation: int | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> SampleCount:
        """A new count: inputs of a copied model are behind no gradient of the run."""
        return SampleCount()

    def note(self, samples: int | None, loader: object = None) -> None:
        """Notes that the loop takes a minibatch from a loader.

        A minibatch that is taken with gradients off, for a validation, does not count.

        Args:
            samples: number of samples that it counts; None if that cannot be seen.
            loader: the loader that gives it.
        """
        if torch.is_grad_enabled():
            self._taken = [*self._not_evaluated(), _Minibatch(samples, loader)]

    def over(self, loader: object = None) -> None:
        """Notes that a loader gives no more minibatches: its last one does not count again after this."""
        if torch.is_grad_enabled():
            self._taken = [one for one in self._taken if not (one.evaluated and one.loader is loader)]
            for one in (*self._taken, *self._noted, self._current):
                if one is not None and one.loader is loader:
                    one.over = True

    def forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Notes that the model is called."""
        count = length_of((*args, *kwargs.values())) if torch.is_grad_enabled() else None
        if not model.training:
            for one in self._taken:
                one.evaluated |= one.loader is self._taken[-1].loader
            self._seen_in_evaluation = _plus(self._seen_in_evaluation, count)
        elif torch.is_grad_enabled():
            self.see(count)
            self.use()

    def set(self, samples: float) -> None:
        """Sets the number of samples behind the next exchange."""
        self._set = samples

    def see(self, samples: int | None) -> None:
        """Notes that the model was called with so many samples, in training mode."""
        self._seen = _plus(self._seen, samples)

    @property
    def is_repeat(self) -> bool:
        """Whether the minibatch that was taken last repeats another, and counts no samples."""
        return [one.samples for one in (*self._noted, *self._taken)][-1:] == [0]

    def clear(self) -> None:
        """Forgets all samples since the last exchange."""
        self._taken, self._noted, self._set = [], [], None
        self._seen = self._seen_in_evaluation = None

    def use(self) -> None:
        """Notes that a training pass has used the minibatches that were taken: they count."""
        self._noted += self._taken
        self._taken = []

    def take(self, before: Sequence[PassSamples] = ()) -> float:
        """The number of samples behind the exchange that is made now.

        Args:
            before: earlier passes, whose gradients are in the sum that is exchanged.
        """
        return joined([*before, self.take_pass()] if self._has_new() or not before else before)

    def take_pass(self) -> PassSamples:
        """The samples behind the backward pass that is made now.

        If no minibatch was taken since the last pass (two losses of one minibatch), the last one counts
        again. If nothing is known of the new ones, the last number is repeated.
        """
        if self._noted or self._not_evaluated() or self._seen is not None:
            self._taken = self._not_evaluated()
        self.use()
        noted = [one.samples for one in self._noted]
        if noted:
            self._current = self._noted[0] if len(noted) == 1 else None
        elif self._current is None or self._current.over:
            noted = [None]
        else:
            noted = [self._current.samples]
        said = self._set
        seen = self._seen_in_evaluation if self._seen is None else self._seen
        self.clear()
        known = [samples for samples in noted if samples is not None]
        is_known = len(known) == len(noted)
        counted = sum(known) if is_known else (sum(known) or self._last) if seen is None else seen
        self._last = counted if said is None else said
        return PassSamples(counted, said, is_known and not any(known))

    def _has_new(self) -> bool:
        """Whether anything is known of samples since the last pass."""
        seen = (self._seen, self._seen_in_evaluation, self._set)
        return bool(self._noted or self._not_evaluated()) or any(one is not None for one in seen)

    def _not_evaluated(self) -> list[_Minibatch]:
        return [one for one in self._taken if not one.evaluated]


def _plus(before: int | None, count: int | None) -> int | None:
    return before if count is None else (before or 0) + count


class BeforeForward:
    """A forward pre-hook of a wrapped module, with keyword arguments. A copy of it does nothing.

    Modules are copied and saved with their hooks (for a running average, or by `torch.save(model)`); the copy
    belongs to no run. Modules are compiled with their hooks too: torch would take a number that a hook counts
    for a constant, and compile again for every other number. So `torch.compile` leaves this hook out.

    Args:
        called: functions of the module, its arguments and its keyword arguments.
    """

    def __init__(self, *called: Callable[[nn.Module, tuple[Any, ...], Mapping[str, Any]], None]) -> None:
        self._called = [torch.compiler.disable(each) for each in called]  # type: ignore[no-untyped-call]

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Calls all functions."""
        for called in self._called:
            called(module, args, kwargs)

    def __deepcopy__(self, memo: object) -> Callable[..., None]:
        return _nothing

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _copied, ()


def _nothing(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Stands in the place of a hook that was copied."""


def _copied() -> Callable[..., None]:
    return _nothing
