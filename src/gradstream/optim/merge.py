"""What shards do where the workers carry out the run's update rule: they put together what is pushed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch

from gradstream.errors import ConfigError
from gradstream.optim.base import Optimizer
from gradstream.optim.schedules import Rate

__all__ = ["Add", "Outer", "Replace"]


@dataclass(frozen=True, slots=True)
class Add:
    """w ← w + d, of differences: no rate, no state. To who applies it, an `Optimizer` like others."""

    lr: Rate = 1.0

    @property
    def state_names(self) -> tuple[str, ...]:
        """None."""
        return ()

    @property
    def state_init(self) -> float:
        """Of nothing."""
        return 0.0

    def apply(
        self,
        parameters: torch.Tensor,
        gradient: torch.Tensor,
        state: Mapping[str, torch.Tensor],
        *,
        lr: float,
        step: int,
    ) -> None:
        """One update in place; `gradient` is the difference, and `lr` no part of it."""
        parameters.add_(gradient)


@dataclass(frozen=True, slots=True)
class Replace(Add):
    """w ← x, of parameters: those of one worker to the bit, or a weighted sum of several workers'.

    Args:
        states: names of the state vectors of the workers' rule that shards hold too, for pushes of these.
        begin: what they begin with.
    """

    states: tuple[str, ...] = ()
    begin: float = 0.0

    @property
    def state_names(self) -> tuple[str, ...]:
        """Those of the workers' rule."""
        return self.states

    @property
    def state_init(self) -> float:
        """As in the workers' rule."""
        return self.begin

    def apply(
        self,
        parameters: torch.Tensor,
        gradient: torch.Tensor,
        state: Mapping[str, torch.Tensor],
        *,
        lr: float,
        step: int,
    ) -> None:
        """One update in place; `gradient` holds the new parameters."""
        parameters.copy_(gradient)


@dataclass(frozen=True, slots=True)
class Outer:
    """An update rule at a rate of its own: the one that comes with a push is that of the workers' steps.

    Args:
        rule: of the shards; its `lr` is a number.

    Raises:
        ConfigError: its `lr` is a schedule. Those go by minibatches, and shards count updates.
    """

    rule: Optimizer

    def __post_init__(self) -> None:
        if callable(self.rule.lr):
            raise ConfigError(
                f"the strategy's outer optimizer is {self.rule}, whose lr is a schedule; expected a number: "
                "schedules go by a worker's minibatches, of which shards know nothing. Give one to the run's "
                "own optimizer, which is the workers'"
            )

    @property
    def lr(self) -> Rate:
        """The rule's own."""
        return self.rule.lr

    @property
    def state_names(self) -> tuple[str, ...]:
        """Those of the rule."""
        return self.rule.state_names

    @property
    def state_init(self) -> float:
        """As in the rule."""
        return self.rule.state_init

    def apply(
        self,
        parameters: torch.Tensor,
        gradient: torch.Tensor,
        state: Mapping[str, torch.Tensor],
        *,
        lr: float,
        step: int,
    ) -> None:
        """One update in place; `lr` is no part of it."""
        self.rule.apply(parameters, gradient, state, lr=cast(float, self.rule.lr), step=step)
