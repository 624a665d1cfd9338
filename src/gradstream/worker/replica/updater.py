"""The update rule, carried out by a worker on parameters of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gradstream.memory import Memory, Span, Vector
from gradstream.optim.base import Optimizer
from gradstream.optim.decay import l2_of
from gradstream.optim.groups import GroupedRule, Range

__all__ = ["Factors", "UpdateRule", "Updater", "decays_of", "scales_of"]

UpdateRule = tuple[Optimizer, GroupedRule | None]
"""A rule, and the same where some parameters have settings of their own."""

Factors = Sequence[tuple[int, int, float]]
"""(start, stop, factor): numbers for ranges of the flat vector, which together are all of it."""


def decays_of(rule: UpdateRule, elems: int) -> Factors:
    """λ of the weight decay that belongs to each range's gradient; () where all are 0."""
    found = [(one.start, one.stop, l2_of(one.rule)) for one in _ranges_of(rule, elems)]
    return found if any(decay for _, _, decay in found) else ()


def scales_of(rule: UpdateRule, elems: int) -> Factors:
    """The factor of each range's learning rate."""
    return [(one.start, one.stop, one.lr_scale) for one in _ranges_of(rule, elems)]


def _ranges_of(rule: UpdateRule, elems: int) -> Sequence[Range]:
    optimizer, grouped = rule
    return [Range(0, elems, optimizer, 1.0)] if grouped is None else grouped.ranges


class Updater:
    """An update rule with the state of some ranges of the flat vector.

    Args:
        memory: where the state comes from.
        optimizer: the rule.
        grouped: the same, where some parameters have settings of their own.
        ranges: [start, stop) of what is updated here, in the order of the vector; starts are multiples of 64.
        dtype: of all vectors.
    """

    def __init__(
        self,
        memory: Memory,
        optimizer: Optimizer,
        grouped: GroupedRule | None,
        ranges: Sequence[tuple[int, int]],
        dtype: torch.dtype,
    ) -> None:
        self.ranges = ranges
        self._optimizer = optimizer
        self._grouped = grouped
        self._places: dict[int, int] = {}  # start in the flat vector -> start in the state's vectors
        elems = 0
        for start, stop in ranges:
            self._places[start] = elems
            elems += stop - start
        self.state = {name: memory.allocate(elems, dtype, name) for name in optimizer.state_names}
        for vector in self.state.values():
            if optimizer.state_init:
                vector.tensor.fill_(optimizer.state_init)

    def state_of(self, vector: Vector, start: int, stop: int) -> Span:
        """[start, stop) of the flat vector, in one of the state's; lies within one of the ranges."""
        first = max(begin for begin in self._places if begin <= start)
        local = self._places[first] + start - first
        return vector[local : local + stop - start]

    def update(
        self, parameters: torch.Tensor, sums: Sequence[tuple[int, torch.Tensor]], *, lr: float, step: int
    ) -> None:
        """One update of these ranges, in place.

        Args:
            parameters: (E,), the whole vector.
            sums: (start, the mean gradient from there on); what they cover lies within the ranges.
            lr: learning rate.
            step: which update this is, from 1.
        """
        for start, gradient in sums:
            stop = start + len(gradient)
            target = parameters[start:stop]
            state = {name: self.state_of(vector, start, stop).tensor for name, vector in self.state.items()}
            if self._grouped is None:
                self._optimizer.apply(target, gradient, state, lr=lr, step=step)
            else:
                self._grouped.apply(start, target, gradient, state, lr=lr, step=step)
