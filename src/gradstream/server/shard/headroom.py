"""Whether an update can have made an element NaN or infinite, without a look at the elements.

Looking takes a pass over the parameters and one over each state vector, nearly as long as the update itself. Instead
each vector of a range has a bound, which no absolute value of its elements exceeds. A rule says how far one update
can push these bounds, from the length of the gradient, which was measured when the gradient was checked:

    |b| ≤ momentum · |b| + |g|      |w| ≤ |w| + lr · |b|          (`optim.SGD`)

While the bounds are far below what the dtype can hold, no element can have overflowed. Else, and after every
`LOOK_EVERY` updates, the elements are looked at, and the bounds are measured anew.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import cast

import torch

from gradstream.model.check import check_updated, length
from gradstream.optim.base import Bounded, Optimizer
from gradstream.optim.groups import GroupedRule
from gradstream.optim.merge import Outer

LOOK_EVERY = 64
"""Number of updates after which the elements are looked at in any case."""


class Headroom:
    """Bounds the absolute values of the elements in ranges of the vectors, update by update.

    Args:
        optimizer: the update rule.
        grouped: the same rule by groups, where some parameters have other settings; else None.
        dtype: dtype of all vectors.
    """

    def __init__(self, optimizer: Optimizer, grouped: GroupedRule | None, dtype: torch.dtype) -> None:
        pairs = (
            [(optimizer, 1.0)] if grouped is None else [(one.rule, one.lr_scale) for one in grouped.ranges]
        )
        self._rules = [pair for index, pair in enumerate(pairs) if pair not in pairs[:index]]
        self._bounded = all(map(_bounds_itself, (rule for rule, _ in self._rules)))
        # Squares of such numbers are representable, too, and sums of a thousand of these squares.
        self._most = math.sqrt(torch.finfo(dtype).max) / 32
        self._slack = 1 + 4 * torch.finfo(dtype).eps  # more than an update's rounding can add
        self._bounds: dict[int, dict[str, float]] = {}
        self._since: dict[int, int] = {}  # by range: number of updates since its elements were looked at

    def forget(self, place: int) -> None:
        """Takes note that the elements of a range were changed by something else than an update."""
        self._bounds.pop(place, None)

    def updated(
        self,
        place: int,
        vectors: Mapping[str, torch.Tensor],
        gradient: float,
        *,
        where: str,
        lr: float,
        step: int,
    ) -> None:
        """Takes note of an update of a range.

        Args:
            place: which range; any number that stands for it.
            vectors: its parameters under "", and its state vectors by name, after the update.
            gradient: bound of the absolute values of the gradient; infinite if unknown.
            where: the range in words.
            lr: learning rate of the update.
            step: number of the update, from 1.

        Raises:
            NonFiniteError: a parameter or the state is NaN or infinite.
        """
        known, since = self._bounds.get(place), self._since.get(place, 0) + 1
        if known is not None and since < LOOK_EVERY:
            bounds = self._after(known, gradient, lr, step)
            if all(bound <= self._most for bound in bounds.values()):  # False for NaN
                self._bounds[place], self._since[place] = bounds, since
                return
        if not self._bounded:
            check_updated(vectors.values(), where, lr, step)
            return
        measured = {name: length(vector) for name, vector in vectors.items()}
        if not all(map(math.isfinite, measured.values())):  # a square may have overflowed, and no element
            check_updated(vectors.values(), where, lr, step)
        self._bounds[place], self._since[place] = measured, 0

    def _after(self, known: Mapping[str, float], gradient: float, lr: float, step: int) -> dict[str, float]:
        found: dict[str, float] = {}
        for rule, scale in self._rules:
            bounds = cast(Bounded, rule).bounds_after(known, gradient, lr=lr * scale, step=step)
            for name, bound in bounds.items():
                found[name] = max(found.get(name, 0.0), bound * self._slack)
        return found


def _bounds_itself(rule: Optimizer) -> bool:
    """Whether a rule's bounds belong to its own update: a subclass with another `apply` must bring its own bounds."""
    if not isinstance(rule, Bounded):
        return False
    if isinstance(rule, Outer):
        return _bounds_itself(rule.rule)
    owners = [
        next(one for one in type(rule).__mro__ if name in vars(one)) for name in ("apply", "bounds_after")
    ]
    return owners[0] is owners[1]
