"""Learning rates that change: pure functions of a minibatch's position in the run.

A schedule is a function from a `Position` to a learning rate: an instance of one of these classes, or a function
of your own at the top level of a file. The position belongs to the minibatch, not to the worker or to a
server's version. So the rate does not depend on the number of shards, on the worker that computes the minibatch
(a minibatch of a dead worker keeps its rate), or on how often the run was stopped.

    synchronous     step r is round r, with the same rate for all workers
    asynchronous    step t has W consecutive minibatches of the epoch, whichever workers take them; in
                    partitions, the t-th minibatch of each worker

Each push carries a rate. Gradients that are pushed or applied together are a sum Σ η_i/η·g_i at one rate η, that
of the first gradient whose rate is above 0: under SGD each gradient moves the parameters at its own rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, cast

from gradstream.errors import ConfigError
from gradstream.optim._check import not_negative, positive, require

__all__ = [
    "BackOff",
    "Chain",
    "Constant",
    "Cosine",
    "InverseRoot",
    "Linear",
    "OneCycle",
    "Position",
    "Rate",
    "Schedule",
    "StepDecay",
    "Warmup",
    "check_rate",
    "linear_scaling",
    "nominal_rate",
    "rate_at",
]

Unit = Literal["steps", "epochs"]


@dataclass(frozen=True, slots=True)
class Position:
    """The position of a minibatch in its run.

    Args:
        step: number of rounds before it; without rounds, number of minibatches before it, divided by W workers.
        num_steps: number of steps of the whole run.
        steps_per_epoch: number of steps of a data epoch.

    Example:
        >>> position = gs.schedules.Position(step=50, num_steps=100, steps_per_epoch=10)
        >>> position.epoch, position.fraction
        (5.0, 0.5)
    """

    step: int
    num_steps: int
    steps_per_epoch: int

    @property
    def epoch(self) -> float:
        """Number of data epochs before it: 2.5 is the middle of the third epoch."""
        return self.step / self.steps_per_epoch

    @property
    def fraction(self) -> float:
        """Share of the run that lies before it, in [0, 1)."""
        return self.step / self.num_steps

    def steps(self, count: float, unit: Unit) -> float:
        """The number of steps in `count` steps or data epochs."""
        return count if unit == "steps" else count * self.steps_per_epoch

    def after(self) -> Position:
        """The position of the next minibatch."""
        return Position(self.step + 1, self.num_steps, self.steps_per_epoch)

    def since(self, start: int) -> Position:
        """The same place in a run that begins at step `start`."""
        return Position(self.step - start, max(1, self.num_steps - start), self.steps_per_epoch)


Schedule = Callable[[Position], float]
"""The learning rate of a minibatch: a pure function of its position."""

Rate = float | Schedule
"""A learning rate: one number, or a schedule."""


def linear_scaling(lr: float, samples: int, per: int = 256) -> float:
    """The learning rate of a large minibatch: lr · samples / per.

    A step of k minibatches then moves the parameters as far as k steps would, if gradients hardly differ meanwhile.
    The loss must be a mean over all samples of the step. In PyTorch's form of momentum, which `SGD` and `LARS` have,
    the velocity holds no rate, and needs no correction where the rate changes.

    Args:
        lr: learning rate of a minibatch of `per` samples, > 0.
        samples: samples of a step, of all workers and all accumulated minibatches, > 0.
        per: samples for which `lr` was tuned, > 0.

    Raises:
        ConfigError: a value is out of its range.

    Reference:
        Goyal and others, Accurate, large minibatch SGD: training ImageNet in 1 hour, 2017.

    Example:
        >>> gs.schedules.linear_scaling(0.1, samples=256 * 32)
        3.2
    """
    positive("linear_scaling", "lr", lr)
    positive("linear_scaling", "samples", samples)
    positive("linear_scaling", "per", per)
    return lr * samples / per


def check_rate(rule: str, got: object, name: str = "lr") -> None:
    """Raises ConfigError unless `got` is a finite number above 0, or a schedule."""
    if not callable(got):
        positive(rule, name, cast(float, got))


def rate_at(lr: Rate, position: Position) -> float:
    """The learning rate at a position; a number is the same everywhere.

    Raises:
        ConfigError: the schedule has not returned a finite number of at least 0.
    """
    if not callable(lr):
        return lr
    rate: object = lr(position)
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate < math.inf:
        raise ConfigError(
            f"the learning-rate schedule returned {rate!r} at step {position.step} of {position.num_steps}; "
            "expected a finite number >= 0"
        )
    return float(rate)


def nominal_rate(lr: Rate) -> float:
    """The `lr` of a schedule, to which rates of local steps are relative.

    Raises:
        ConfigError: the schedule is a function, which has no `lr`.
    """
    nominal = getattr(lr, "lr", None) if callable(lr) else lr
    if isinstance(nominal, int | float):
        return nominal
    raise ConfigError(
        f"the strategy's local_lr or significance is relative to the field lr of the schedule, but {lr!r} is a "
        "function without this field; leave local_lr and significance out, or use a schedule with a field lr, "
        "gradstream.schedules.Cosine for example"
    )


@dataclass(frozen=True, slots=True)
class Constant:
    """The same rate at every step, like a plain number.

    Args:
        lr: learning rate, > 0.

    Example:
        >>> position = gs.schedules.Position(step=50, num_steps=100, steps_per_epoch=10)
        >>> gs.schedules.Constant(lr=0.1)(position)
        0.1
    """

    lr: float

    def __post_init__(self) -> None:
        positive("Constant", "lr", self.lr)

    def __call__(self, position: Position) -> float:
        """The rate."""
        return self.lr


@dataclass(frozen=True, slots=True)
class StepDecay:
    """Multiplies the rate at regular intervals: lr · factor^⌊t / every⌋.

    Args:
        lr: rate at the start, > 0.
        every: length of an interval, > 0.
        factor: factor of the rate after each interval, > 0.
        unit: unit of `every`, "epochs" or "steps".

    Example:
        >>> position = gs.schedules.Position(step=50, num_steps=100, steps_per_epoch=10)
        >>> gs.schedules.StepDecay(lr=0.5, every=2, factor=0.5)(position)
        0.125
    """

    lr: float
    every: float
    factor: float = 0.1
    unit: Unit = "epochs"

    def __post_init__(self) -> None:
        positive("StepDecay", "lr", self.lr)
        positive("StepDecay", "every", self.every)
        positive("StepDecay", "factor", self.factor)
        _unit("StepDecay", self.unit)

    def __call__(self, position: Position) -> float:
        """The rate at a position."""
        return self.lr * self.factor ** int(position.step // position.steps(self.every, self.unit))


@dataclass(frozen=True, slots=True)
class BackOff:
    """Constant in phases that get longer as the rate falls: phase k has rate lr · factorᵏ and length first/factorᵏ.

    So the rate falls as 1/t: at the end of the phase that ends at t, it is lr / (1 + t·(1/factor - 1)/first).

    Args:
        lr: rate of phase 0, > 0.
        first: length of phase 0, > 0.
        factor: factor of the rate from one phase to the next, in (0, 1).
        unit: unit of `first`, "epochs" or "steps".

    Reference:
        Niu, Recht, Ré, Wright, HOGWILD!, 2011: the back-off scheme of §5, which needs neither the strong
        convexity constant nor a rate for every step.

    Example:
        >>> position = gs.schedules.Position(step=50, num_steps=100, steps_per_epoch=10)
        >>> gs.schedules.BackOff(lr=1.0, first=1, factor=0.5)(position)
        0.25
    """

    lr: float
    first: float = 1.0
    factor: float = 0.9
    unit: Unit = "epochs"

    def __post_init__(self) -> None:
        positive("BackOff", "lr", self.lr)
        positive("BackOff", "first", self.first)
        require(0 < self.factor < 1, "BackOff", "factor", self.factor, "a number in (0, 1)")
        _unit("BackOff", self.unit)

    def __call__(self, position: Position) -> float:
        """The rate at a position."""
        rate, end = self.lr, position.steps(self.first, self.unit)
        length = end
        while position.step >= end:
            length /= self.factor
            rate, end = rate * self.factor, end + length
        return rate


@dataclass(frozen=True, slots=True)
class Linear:
    """A straight line over the run: lr + (end - lr) · t/T.

    Args:
        lr: rate at the start, > 0.
        end: rate that the last step has nearly reached, >= 0.

    Example:
        >>> position = gs.schedules.Position(step=50, num_steps=100, steps_per_epoch=10)
        >>> gs.schedules.Linear(lr=0.5)(position)
        0.25
    """

    lr: float
    end: float = 0.0

    def __post_init__(self) -> None:
        positive("Linear", "lr", self.lr)
        not_negative("Linear", "end", self.end)

    def __call__(self, position: Position) -> float:
        """The rate at a position."""
        return self.lr + (self.end - self.lr) * min(1.0, position.fraction)


@dataclass(frozen=True, slots=True)
class Cosine:
    """Half a cosine over the run: end + (lr - end) · (1 + cos(π t/T)) / 2.

    Args:
        lr: rate at the start, > 0.
        end: rate that the last step has nearly reached, >= 0.

    Reference:
        Loshchilov, Hutter, SGDR: stochastic gradient descent with warm restarts, 2017; no restarts.

    Example:
        >>> position = gs.schedules.Position(step=50, num_steps=100, steps_per_epoch=10)
        >>> round(gs.schedules.Cosine(lr=0.5)(position), 6)
        0.25
    """

    lr: float
    end: float = 0.0

    def __post_init__(self) -> None:
        positive("Cosine", "lr", self.lr)
        not_negative("Cosine", "end", self.end)

    def __call__(self, position: Position) -> float:
        """The rate at a position."""
        return _cosine(self.lr, self.end, min(1.0, position.fraction))


@dataclass(frozen=True, slots=True)
class InverseRoot:
    """Falls as the inverse root of time, as in regret bounds of online learning: lr / √(1 + t / over).

    Args:
        lr: rate at the start, > 0.
        over: steps after which the rate is lr/√2, > 0; 1 is lr/√(t + 1).

    Reference:
        Zinkevich, Online convex programming and generalized infinitesimal gradient ascent, 2003.

    Example:
        >>> position = gs.schedules.Position(step=50, num_steps=100, steps_per_epoch=10)
        >>> round(gs.schedules.InverseRoot(lr=0.5, over=50)(position), 6)
        0.353553
    """

    lr: float
    over: float = 1.0

    def __post_init__(self) -> None:
        positive("InverseRoot", "lr", self.lr)
        positive("InverseRoot", "over", self.over)

    def __call__(self, position: Position) -> float:
        """The rate at a position."""
        return self.lr / math.sqrt(1 + position.step / self.over)


@dataclass(frozen=True, slots=True)
class OneCycle:
    """Rises to `lr` and falls again, both as half cosines.

    Args:
        lr: the highest rate, > 0.
        rise: share of the run in which the rate rises, in (0, 1).
        start: rate at the start; lr / 25 if None.
        end: rate at the end; start / 10,000 if None.

    Reference:
        Smith, Topin, Super-convergence, 2018. Defaults as in PyTorch's `OneCycleLR`, whose momentum is
        not cycled here. Of n steps the highest rate is that of step rise · n (the first is step 0), and `end` would be
        that of step n; PyTorch's peaks a step earlier, at rise · n - 1, and its last step has the rate `end`.

    Example:
        >>> position = gs.schedules.Position(step=50, num_steps=100, steps_per_epoch=10)
        >>> gs.schedules.OneCycle(lr=0.5, rise=0.5)(position)
        0.5
    """

    lr: float
    rise: float = 0.3
    start: float | None = None
    end: float | None = None

    def __post_init__(self) -> None:
        positive("OneCycle", "lr", self.lr)
        require(0 < self.rise < 1, "OneCycle", "rise", self.rise, "a share of the run, in (0, 1)")
        for name in ("start", "end"):
            if getattr(self, name) is not None:
                not_negative("OneCycle", name, getattr(self, name))

    def __call__(self, position: Position) -> float:
        """The rate at a position."""
        start = self.lr / 25 if self.start is None else self.start
        end = start / 1e4 if self.end is None else self.end
        done = min(1.0, position.fraction)
        if done < self.rise:
            return _cosine(start, self.lr, done / self.rise)
        return _cosine(self.lr, end, (done - self.rise) / (1 - self.rise))


@dataclass(frozen=True, slots=True)
class Warmup:
    """Any schedule, reached by a ramp of n steps that grows by as much with each step.

    ::

        then · min(1, (t + 1) / n)                        from 0
        start + (then - start) · min(1, t / n)            from `start`: the gradual warm-up of Goyal and others

    The paper's recipe for W workers with n samples each: Warmup(linear_scaling(0.1, W * n), 5, "epochs", start=0.1).

    Args:
        then: a rate, or a schedule of the whole run, these steps included.
        length: n, > 0.
        unit: unit of `length`, "steps" or "epochs".
        start: rate of the first step, > 0; None for a ramp from 0.

    Reference:
        Goyal and others, Accurate, large minibatch SGD: training ImageNet in 1 hour, 2017.

    Example:
        >>> position = gs.schedules.Position(step=50, num_steps=100, steps_per_epoch=10)
        >>> gs.schedules.Warmup(0.5, length=102)(position)
        0.25
    """

    then: Rate
    length: float
    unit: Unit = "steps"
    start: float | None = None

    def __post_init__(self) -> None:
        check_rate("Warmup", self.then, "then")
        positive("Warmup", "length", self.length)
        _unit("Warmup", self.unit)
        if self.start is not None:
            positive("Warmup", "start", self.start)

    @property
    def lr(self) -> float:
        """The `lr` of the schedule `then`."""
        return nominal_rate(self.then)

    def __call__(self, position: Position) -> float:
        """The rate at a position."""
        rate, length = rate_at(self.then, position), position.steps(self.length, self.unit)
        if self.start is None:
            return rate * min(1.0, (position.step + 1) / length)
        return self.start + (rate - self.start) * min(1.0, position.step / length)


@dataclass(frozen=True, slots=True)
class Chain:
    """One schedule up to a step, and another one after it, whose run begins at that step.

    Args:
        first: schedule of the steps before `at`. Its positions are those in the whole run.
        at: start of the second schedule, > 0.
        then: schedule of the steps from `at` on. A `Cosine` covers the rest of the run.
        unit: unit of `at`, "steps" or "epochs".

    Example:
        >>> position = gs.schedules.Position(step=50, num_steps=100, steps_per_epoch=10)
        >>> gs.schedules.Chain(0.5, at=5, then=gs.schedules.Linear(0.25))(position)
        0.25
    """

    first: Rate
    at: float
    then: Rate
    unit: Unit = "epochs"

    def __post_init__(self) -> None:
        check_rate("Chain", self.first, "first")
        check_rate("Chain", self.then, "then")
        positive("Chain", "at", self.at)
        _unit("Chain", self.unit)

    @property
    def lr(self) -> float:
        """The `lr` of the first schedule."""
        return nominal_rate(self.first)

    def __call__(self, position: Position) -> float:
        """The rate at a position."""
        at = math.ceil(position.steps(self.at, self.unit))
        if position.step < at:
            return rate_at(self.first, position)
        return rate_at(self.then, position.since(at))


def _cosine(begin: float, end: float, done: float) -> float:
    return end + (begin - end) * (1 + math.cos(math.pi * done)) / 2


def _unit(rule: str, unit: object) -> None:
    require(unit in ("steps", "epochs"), rule, "unit", unit, "'steps' or 'epochs'")
