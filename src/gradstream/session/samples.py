"""Counts the samples in a worker's gradient: its weight in the mean over workers."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from gradstream.session.loaders_part import length_of


@dataclass(slots=True, eq=False)
class _Minibatch:
    """A minibatch that the loop has taken from a loader.

    Args:
        samples: number of counted samples; None if unknown.
        loader: the loader that yielded it.
        evaluated: an evaluation followed it, with no minibatch of another loader in between.
        over: the loader is exhausted.
        left: the loop has broken off the iteration with it, after it had used others.
    """

    samples: int | None
    loader: object
    evaluated: bool = False
    over: bool = False
    left: bool = False


@dataclass(slots=True)
class LoaderUse:
    """What the loop has used of one loader, with gradients on.

    Args:
        total: number of minibatches that the loader has for this worker in an epoch; 0 if unknown.
        epoch: iterations that are over.
        taken, used: minibatches of the present iteration that were taken, and used.
        all_used: minibatches of all iterations, with known numbers of samples, that were used.
        samples: samples of these.
        broken: by epoch, the minibatches that were used in iterations that the loop has broken off.
    """

    total: int = 0
    epoch: int = 0
    taken: int = 0
    used: int = 0
    all_used: int = 0
    samples: int = 0
    broken: dict[int, int] = field(default_factory=dict)

    def use(self, samples: int | None) -> None:
        """Notes that a minibatch is used."""
        self.used += 1
        if samples:
            self.all_used, self.samples = self.all_used + 1, self.samples + samples

    def over(self, epoch: int | None, *, ended: bool) -> None:
        """Notes that an iteration is over; with `ended` to its end, else the loop has broken it off."""
        if not ended and 0 < self.used < self.total:
            self.broken[self.epoch if epoch is None else epoch] = self.used
        self.epoch += bool(ended or self.used)  # else the loop has only had a look
        self.taken = self.used = 0

    def told(self) -> str:
        """What the loop has left of the epochs that it has broken off; "" if it has not."""
        if not self.broken:
            return ""
        epochs, left = sorted(self.broken), sum(self.total - used for used in self.broken.values())
        some = ", ".join(map(str, epochs[:4])) + (f" and {len(epochs) - 4} more" if epochs[4:] else "")
        total, samples = self.total * len(epochs), left * self.samples / max(1, self.all_used)
        return (
            f"the loop has broken off epoch{'s' if epochs[1:] else ''} {some} of a loader, as the script says: "
            f"{left:,} of its {total:,} minibatches there, about {samples:,.0f} samples, were not used"
        )


@dataclass(frozen=True, slots=True)
class PassSamples:
    """The samples of a backward pass.

    Args:
        counted: number of samples by the session's count.
        said: number of samples by `Session.samples`; None if the script has not called it.
        repeated: the pass used only repeated minibatches.
    """

    counted: float
    said: float | None
    repeated: bool


def joined(passes: Sequence[PassSamples]) -> float:
    """The number of samples in the sum of several passes: the last one that the script has set, or all of them."""
    said = [pass_.said for pass_ in passes if pass_.said is not None]
    if all(pass_.repeated for pass_ in passes):
        return 0
    return said[-1] if said else sum(pass_.counted for pass_ in passes)


def whole(samples: float) -> tuple[int, float]:
    """Splits a weight into (whole number of samples for the round, factor by which to scale the gradient)."""
    count = math.ceil(samples)
    return count, samples / count if count else 1.0


class SampleCount:
    """Counts the samples between two exchanges.

    It takes the first number that is known: what the script has set (`Session.samples`); the samples of minibatches
    taken from loaders of `shard`; the length of the model's inputs in training mode. A repeated minibatch, which only
    fills a round, counts 0. A minibatch that only an evaluation has used does not count. If the model was called only
    in evaluation mode, the script trains it in that mode, and those inputs count.

    Attributes:
        unseen: some pass was made with samples of no loader of `shard`.
        passes: number of backward passes.
        ahead: the loop has taken a minibatch before it has used the one before, so nobody knows which is in a round.
        uses: what the loop has used of each loader.
    """

    def __init__(self) -> None:
        self.unseen = self.ahead = False
        self.passes = 0
        self.uses: defaultdict[object, LoaderUse] = defaultdict(LoaderUse)
        self._has_loader = False
        self._taken: list[_Minibatch] = []  # not used by a training pass yet
        self._noted: list[_Minibatch] = []  # used for the next exchange
        self._passed: list[_Minibatch] = []  # of these, by passes that are over
        self._current: _Minibatch | None = None  # the only minibatch of the last exchange, if it had one
        self._last: float = 1
        self._set: float | None = None
        self._seen: int | None = None
        self._seen_in_evaluation: int | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> SampleCount:
        """Returns a new count: inputs of a copied model contribute to no gradient of the run."""
        return SampleCount()

    def note(self, samples: int | None, loader: object = None) -> None:
        """Notes that the loop takes a minibatch from a loader.

        A minibatch that is taken with gradients off, for a validation, does not count. Nor does the one with which the
        loop has broken off the iteration before.

        Args:
            samples: number of counted samples; None if unknown.
            loader: the loader that yields it.
        """
        if torch.is_grad_enabled():
            self._taken = [one for one in self._taken if not (one.left and one.loader is loader)]
            self.uses[loader].taken += 1
            self.ahead |= any(minibatch.loader is loader for minibatch in self._not_evaluated())
            self._taken = [*self._not_evaluated(), _Minibatch(samples, loader)]

    def over(self, loader: object = None, *, ended: bool = True, epoch: int | None = None) -> None:
        """Notes that an iteration of a loader is over: its last minibatch does not count again after this.

        Args:
            loader: the loader.
            ended: it is exhausted; else the loop has broken the iteration off.
            epoch: number of the epoch, where the loop says it.
        """
        if torch.is_grad_enabled():
            use = self.uses[loader]
            for last in self._taken if not ended and use.used and use.taken > 1 else ():
                last.left |= last.loader is loader
            use.over(epoch, ended=ended)
            self._taken = [
                minibatch
                for minibatch in self._taken
                if not (minibatch.evaluated and minibatch.loader is loader)
            ]
            for minibatch in (*self._taken, *self._noted, self._current):
                if minibatch is not None and minibatch.loader is loader:
                    minibatch.over = True

    def forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Notes that the model is called."""
        count = length_of((*args, *kwargs.values())) if torch.is_grad_enabled() else None
        if not model.training:
            for minibatch in self._taken:
                minibatch.evaluated |= minibatch.loader is self._taken[-1].loader
            self._seen_in_evaluation = _plus(self._seen_in_evaluation, count)
        elif torch.is_grad_enabled():
            self.see(count)
            self.use()

    def set(self, samples: float) -> None:
        """Sets the number of samples of the next exchange."""
        self._set = samples

    @property
    def said(self) -> float | None:
        """What `set` has set for the next exchange."""
        return self._set

    def see(self, samples: int | None) -> None:
        """Notes that the model was called with this many samples in training mode."""
        self._seen = _plus(self._seen, samples)

    def told_left(self) -> str:
        """What a loop that has come to its end has left of epochs that it has broken off; "" if nothing."""
        for use in self.uses.values():
            use.over(None, ended=False)
        return "; ".join(told for use in self.uses.values() if (told := use.told()))

    def begin(self) -> None:
        """Notes that the loop can make steps from now on. No step has what it has taken before."""
        self.clear()
        self.ahead = False
        for use in self.uses.values():
            use.epoch = use.taken = use.used = 0

    def clear(self) -> None:
        """Forgets all samples since the last exchange."""
        self._taken, self._noted, self._passed, self._set = [], [], [], None
        self._seen = self._seen_in_evaluation = None

    def use(self) -> None:
        """Notes that a training pass has used the minibatches taken so far, so they count."""
        for minibatch in self._taken:
            self.uses[minibatch.loader].use(minibatch.samples)
        self._noted += self._taken
        self._taken = []

    def pass_is_over(self) -> None:
        """Notes that a backward pass is over whose gradients are not exchanged yet."""
        self._passed = [*self._noted]

    def is_repeat(self) -> bool:
        """Whether the pass that is made now is only of repeated minibatches: what `take_pass` would find."""
        new = self._not_evaluated()
        own = [*self._noted, *(new if self._noted or new or self._seen is not None else self._taken)]
        before = {id(minibatch) for minibatch in self._passed}
        own = [minibatch for minibatch in own if id(minibatch) not in before] or own[-1:]
        if own:
            return all(minibatch.samples == 0 for minibatch in own)
        return self._current is not None and not self._current.over and self._current.samples == 0

    def take(self, before: Sequence[PassSamples] = ()) -> float:
        """The number of samples of the exchange that is made now.

        Args:
            before: earlier passes whose gradients are in the exchanged sum.
        """
        return joined([*before, self.take_pass()] if self._has_new() or not before else before)

    def take_pass(self) -> PassSamples:
        """The samples of the backward pass that is made now.

        If no minibatch was taken since the last pass (two losses of one minibatch), the last minibatch counts again. If
        the sizes of the new ones are unknown, the last number is repeated.
        """
        self.passes += 1
        if self._noted or self._not_evaluated() or self._seen is not None:
            self._taken = self._not_evaluated()
        self.use()
        noted = [minibatch.samples for minibatch in self._noted]
        if noted:
            self._current = self._noted[0] if len(noted) == 1 else None
            self._has_loader = True
        elif self._current is None or self._current.over:
            noted = [None]
            self.unseen |= self._current is not None or not self._has_loader
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
        """Whether any samples were noted since the last pass."""
        seen = (self._seen, self._seen_in_evaluation, self._set)
        return bool(self._noted or self._not_evaluated()) or any(one is not None for one in seen)

    def _not_evaluated(self) -> list[_Minibatch]:
        return [minibatch for minibatch in self._taken if not minibatch.evaluated]


def _plus(before: int | None, count: int | None) -> int | None:
    return before if count is None else (before or 0) + count


class BeforeForward:
    """A forward pre-hook of a wrapped module, with keyword arguments. A copy of it does nothing.

    Modules are copied and saved with their hooks (for a running average, or by `torch.save(model)`), but the copy
    belongs to no run. Modules are also compiled with their hooks: torch would treat a hook's counter as a constant, and
    recompile for every new value. So `torch.compile` skips this hook.

    Args:
        called: functions that take the module, its arguments and its keyword arguments.
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
    """Replaces a copied hook."""


def _copied() -> Callable[..., None]:
    return _nothing
