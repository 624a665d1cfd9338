"""Update rules: state in, state out, element by element.

A rule gives the same bits when it is applied to a range of the flat vector as when it is applied to the whole
(ranges begin at multiples of 64 elements), so a shard can apply any rule to its range. The learning rate comes
with each request: workers, which count steps, compute schedules.

A rule that is `PerTensor` scales the step of each tensor by norms over the whole of it. Whoever holds a range of a
tensor gives sums over its elements; the sums of all holders are added up; then each updates its range with the total.
A rule that is `PerMatrix` needs all elements of a matrix at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import torch

from gradstream.optim.schedules import Rate

Sums = tuple[float, float]
"""Two sums of squares over elements of one tensor, in float64: of the parameters, and of what the rule says."""

BLOCK_ELEMS = 1 << 14
"""Elements that are summed at once. So few stay in the cache, and no library divides them among threads: the same
elements give the same bits on every node."""


State = Mapping[str, torch.Tensor]
"""State vectors of a rule, by name."""


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
        self, parameters: torch.Tensor, gradient: torch.Tensor, state: State, *, lr: float, step: int
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


@runtime_checkable
class ByShape(Optimizer, Protocol):
    """An update rule that is not the same for tensors of different shapes: it needs the layout of the model."""

    def of(self, dimensions: int) -> Optimizer:
        """The rule for a tensor of this many dimensions: itself, or an element-wise one with the same state."""
        ...


@runtime_checkable
class PerMatrix(ByShape, Protocol):
    """An update rule for whole matrices. Where a matrix is divided, it cannot be applied."""

    def apply_matrix(
        self, parameters: torch.Tensor, gradient: torch.Tensor, state: State, *, lr: float, step: int
    ) -> None:
        """Makes one update of a matrix, in place. Arguments as in `apply`, of its shape (R, C)."""
        ...


@runtime_checkable
class PerTensor(ByShape, Protocol):
    """An update rule that needs sums over each whole tensor before it updates any of its elements.

    Its `apply` takes its arguments for one whole tensor. Whoever has a range that is less, or more, calls
    `partial_sums` for each tensor in it, and `apply_with` once the sums of all ranges are added up.
    """

    def apply(
        self, parameters: torch.Tensor, gradient: torch.Tensor, state: State, *, lr: float, step: int
    ) -> None:
        """One update of a whole tensor in place; see `Optimizer.apply`."""
        sums = self.partial_sums(parameters, gradient, state, step=step)
        self.apply_with(sums, parameters, gradient, state, lr=lr, step=step)

    def partial_sums(
        self, parameters: torch.Tensor, gradient: torch.Tensor, state: State, *, step: int
    ) -> Sums:
        """Sums over these elements of a tensor. Changes nothing. Arguments as in `apply`, before the update."""
        ...

    def apply_with(
        self,
        sums: Sums,
        parameters: torch.Tensor,
        gradient: torch.Tensor,
        state: State,
        *,
        lr: float,
        step: int,
    ) -> None:
        """Makes one update of these elements of a tensor, as `apply`, with the sums over the whole tensor."""
        ...


def square_sum(*terms: torch.Tensor) -> float:
    """Σ x² over the elements of these vectors, in float64."""
    doubles = (term.double() for term in terms)
    return math.fsum(
        float((double * double).sum()) for double in doubles
    )  # torch.dot divides them among threads


def skips_zeros(rule: object) -> bool:
    """Whether elements with a gradient of 0 may be skipped, since an update changes neither them nor their state.

    True only for a rule with a property `skips_zeros` that is True, such as plain SGD. With momentum, running
    means or weight decay, every update moves every element.
    """
    return bool(getattr(rule, "skips_zeros", False))
