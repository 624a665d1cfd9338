"""Rules by which shards merge pushes where the workers themselves apply the run's update rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from typing_extensions import override

from gradstream.errors import ConfigError
from gradstream.optim.base import ByShape, Optimizer, State
from gradstream.optim.schedules import Rate

# ---- merge -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Add:
    """w ← w + d, for pushes of differences d. An `Optimizer` without state, which ignores the rate."""

    lr: Rate = 1.0

    @property
    def state_names(self) -> tuple[str, ...]:
        """No state."""
        return ()

    @property
    def state_init(self) -> float:
        """0; there is no state."""
        return 0.0

    def apply(
        self, parameters: torch.Tensor, gradient: torch.Tensor, state: State, *, lr: float, step: int
    ) -> None:
        """Adds the difference, which is passed as `gradient`; ignores `lr`."""
        parameters.add_(gradient)

    def bounds_after(
        self, bounds: Mapping[str, float], gradient: float, *, lr: float, step: int
    ) -> dict[str, float]:
        """See `base.Bounded`."""
        return {"": bounds[""] + gradient}


@dataclass(frozen=True, slots=True)
class Replace(Add):
    """w ← x, for pushes of parameters x: one worker's, or a weighted sum of several workers'.

    Args:
        states: names of the state vectors of the workers' rule, where workers push these too.
        begin: initial value of their elements.
    """

    states: tuple[str, ...] = ()
    begin: float = 0.0

    @property
    def state_names(self) -> tuple[str, ...]:
        """State vectors of the workers' rule."""
        return self.states

    @property
    def state_init(self) -> float:
        """Initial value in the workers' rule."""
        return self.begin

    def apply(
        self, parameters: torch.Tensor, gradient: torch.Tensor, state: State, *, lr: float, step: int
    ) -> None:
        """Sets the parameters to the new ones, which are passed as `gradient`."""
        parameters.copy_(gradient)

    @override
    def bounds_after(
        self, bounds: Mapping[str, float], gradient: float, *, lr: float, step: int
    ) -> dict[str, float]:
        return {**bounds, "": gradient}


@dataclass(frozen=True, slots=True)
class Outer:
    """An outer update rule with its own learning rate. It ignores the rate of a push, which is for local steps.

    Args:
        rule: update rule of the shards; its `lr` is a number.

    Raises:
        ConfigError: its `lr` is a schedule. Schedules count minibatches, and shards count updates. Or it needs whole
            tensors, of which a shard updates one chunk at a time.
    """

    rule: Optimizer

    def __post_init__(self) -> None:
        if isinstance(self.rule, ByShape):
            raise ConfigError(
                f"the strategy's outer optimizer is {self.rule}, which needs whole tensors, and shards merge "
                "pushes chunk by chunk; expected a rule for single elements, such as SGD. Give this one to the run's "
                "optimizer, which the workers apply"
            )
        if callable(self.rule.lr):
            raise ConfigError(
                f"the strategy's outer optimizer is {self.rule}, whose lr is a schedule; expected a number, since "
                "the shards do not know the position in the run. Give the schedule to the run's optimizer, which "
                "the workers apply"
            )

    @property
    def lr(self) -> Rate:
        """The learning rate of the rule."""
        return self.rule.lr

    @property
    def state_names(self) -> tuple[str, ...]:
        """State vectors of the rule."""
        return self.rule.state_names

    @property
    def state_init(self) -> float:
        """Initial value in the rule."""
        return self.rule.state_init

    def apply(
        self, parameters: torch.Tensor, gradient: torch.Tensor, state: State, *, lr: float, step: int
    ) -> None:
        """Makes one update in place, at the rule's own rate; ignores `lr`."""
        self.rule.apply(parameters, gradient, state, lr=cast(float, self.rule.lr), step=step)

    def bounds_after(
        self, bounds: Mapping[str, float], gradient: float, *, lr: float, step: int
    ) -> dict[str, float]:
        """See `base.Bounded`; only for a rule that has bounds."""
        rule = cast(Any, self.rule)
        return cast(dict[str, float], rule.bounds_after(bounds, gradient, lr=self.rule.lr, step=step))


# ---- pass sum ----------------------------------------------------------------------------
# The shards' half of a pass over the data: portions of a gradient are added up, and no parameter changes.


@dataclass(frozen=True, slots=True)
class PassSum:
    """s ← s + g for each portion g, with what rounding loses of it in a second vector. An `Optimizer`.

    ::

        t ← s + g;  b ← t - s;  l ← l + ((s - (t - b)) + (g - b));  s ← t        (Knuth's TwoSum)

    s + l is the sum in about twice the precision of an element. So the rounded sum hardly depends on the order of
    the portions: it differs, in its last bit, only where the sum lies within about 2^-50 of the middle between two
    neighbouring float64 numbers (2^-22 in float32), relative to their distance.

    Args:
        vectors: names of the other vectors of the method, which only commands change.
        lr: without effect.

    Reference: Knuth, The Art of Computer Programming, volume 2, section 4.2.2; Ogita, Rump, Oishi, "Accurate sum and
    dot product", 2005, algorithm 4.4 (Sum2).
    """

    state_init: ClassVar[float] = 0.0

    title: ClassVar[str] = "the method's own"
    """What reports call it."""

    vectors: tuple[str, ...] = ()
    lr: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "vectors", tuple(self.vectors))  # JSON has lists

    @property
    def state_names(self) -> tuple[str, ...]:
        """s, l, and the vectors of the method: all of them are in checkpoints, backups and handovers."""
        return ("sum", "low", *self.vectors)

    def apply(
        self, parameters: torch.Tensor, gradient: torch.Tensor, state: State, *, lr: float, step: int
    ) -> None:
        """Adds a portion, in place; leaves the parameters as they are."""
        total, low = state["sum"], state["low"]
        new = total + gradient
        back = new - total
        low.add_((total - (new - back)).add_(gradient - back))
        total.copy_(new)
