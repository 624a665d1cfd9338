"""Update rules: state in, state out, element by element.

A rule gives the same bits when it is applied to a range of the flat vector as when it is applied to the whole
(ranges begin at multiples of 64 elements), so a shard can apply any rule to its range. The learning rate comes
with each request: workers, which count steps, compute schedules.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import torch

from gradstream.optim.schedules import Rate


class Optimizer(Protocol):
    """An element-wise update rule. Implementations are frozen dataclasses of hyper-parameters.

    Example:
        >>> optimizer: gs.optim.Optimizer = gs.optim.SGD(lr=0.1, momentum=0.9)
        >>> optimizer.state_names
        ('momentum_buffer',)
    """

    @property
    def lr(self) -> Rate:
        """The learning rate, or a schedule of it."""
        ...

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of its state vectors, each as long as the parameters: ("exp_avg", "exp_avg_sq")."""
        ...

    @property
    def state_init(self) -> float:
        """Initial value of each element of the state vectors."""
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
        """Makes one update, in place.

        Args:
            parameters: (n,) read and written.
            gradient: (n,) read only; its memory may not be writable.
            state: vectors (n,) by name, read and written.
            lr: learning rate of this update.
            step: number of this update of these elements, from 1.
        """
        ...


@runtime_checkable
class Bounded(Protocol):
    """An update rule that can say how far one update can go. Others have their results looked at each time."""

    def bounds_after(
        self, bounds: Mapping[str, float], gradient: float, *, lr: float, step: int
    ) -> dict[str, float]:
        """Bounds of the absolute values after an update.

        Args:
            bounds: of the parameters under "", and of each state vector by its name, before the update.
            gradient: bound of the absolute values of the gradient.
            lr: learning rate of the update.
            step: number of the update, from 1.
        """
        ...


def skips_zeros(rule: object) -> bool:
    """Whether elements with a gradient of 0 may be skipped, since an update changes neither them nor their state.

    True only for a rule with a property `skips_zeros` that is True, such as plain SGD. With momentum, running
    means or weight decay, every update moves every element.
    """
    return bool(getattr(rule, "skips_zeros", False))
