"""Update rules: state in, state out, element by element.

A rule is applied to any range of the flat vector on its own, with the same bits as applied to
the whole (ranges begin at multiples of 64 elements), so a sharded server needs to know nothing
about it. The learning rate comes with each request: schedules live where steps are counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from gradstream.optim.schedules import Rate

__all__ = ["Optimizer", "skips_zeros"]


class Optimizer(Protocol):
    """An element-wise update rule. Implementations are frozen dataclasses of hyper-parameters.

    Example:
        >>> optimizer: gs.optim.Optimizer = gs.optim.SGD(lr=0.1, momentum=0.9)
        >>> optimizer.state_names
        ('momentum_buffer',)
    """

    @property
    def lr(self) -> Rate:
        """The learning rate asked for, or a schedule of it."""
        ...

    @property
    def state_names(self) -> tuple[str, ...]:
        """The state vectors it needs, each as long as the parameters: ("exp_avg", "exp_avg_sq")."""
        ...

    @property
    def state_init(self) -> float:
        """What each state vector is filled with before the first update."""
        ...

    def apply(
        self,
        parameters: torch.Tensor,
        gradient: torch.Tensor,
        state: Mapping[str, torch.Tensor],
        *,
        lr: float,
        step: int,
    ) -> None:
        """One update, in place.

        Args:
            parameters: (n,) read and written.
            gradient: (n,) read only: it may lie in memory that cannot be written.
            state: vectors (n,) by name, read and written.
            lr: learning rate of this update.
            step: which update of these elements this is, from 1.
        """
        ...


def skips_zeros(rule: object) -> bool:
    """Whether a gradient of 0 leaves parameter and state as they are, so that it need not be applied.

    Rules of the house say so in a property of this name; of one that does not, nothing is assumed. With
    momentum, running means or weight decay every element moves at every update.
    """
    return bool(getattr(rule, "skips_zeros", False))
