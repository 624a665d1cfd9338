"""What shards do where the workers carry out the run's update rule: they put together what is pushed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from gradstream.optim.schedules import Rate

__all__ = ["Add", "Replace"]


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
