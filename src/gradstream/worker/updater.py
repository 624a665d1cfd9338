"""The run's update rule, as a worker applies it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from gradstream.memory import Span, Vector
from gradstream.model.base import check_updated
from gradstream.optim.base import Optimizer, Sums
from gradstream.optim.groups import GroupedRule, Piece, Range, add_up, l2_of
from gradstream.optim.schedules import Rate

UpdateRule = tuple[Optimizer, GroupedRule | None]
"""A rule, and the same rule by groups if some parameters have different settings; else None."""

Factors = Sequence[tuple[int, int, float]]
"""(start, stop, factor): one number for each range; the ranges make up the whole flat vector."""


@dataclass(frozen=True, slots=True)
class LocalRule:
    """The part of the run's update rule that a worker applies itself.

    Args:
        lr: learning rate, or a schedule of it.
        rule: rule for updates of the worker's own parameters; None if the shards apply it.
        scales: factor of each range's learning rate, for local steps.
        decays: λ of the weight decay that each range's gradient includes; () where gradients include none.
    """

    lr: Rate
    rule: UpdateRule | None
    scales: Factors
    decays: Factors = ()

    @classmethod
    def of(cls, lr: Rate, rule: UpdateRule, elems: int, *, own: bool, decays: bool) -> LocalRule:
        """Extracts a worker's part of a rule.

        Args:
            lr: learning rate, or a schedule of it.
            rule: the run's rule.
            elems: length of the flat vector.
            own: workers update their own parameters with it.
            decays: gradients include the weight decay.
        """
        optimizer, grouped = rule
        ranges = [Range(0, elems, optimizer, 1.0)] if grouped is None else grouped.ranges
        l2 = [(one.start, one.stop, l2_of(one.rule)) for one in ranges]
        scales = [(one.start, one.stop, one.lr_scale) for one in ranges]
        decays = decays and any(decay for _, _, decay in l2)
        return cls(lr, rule if own else None, scales, l2 if decays else ())


class Updater:
    """An update rule with its state for some ranges of the flat vector.

    Args:
        allocate: allocates a vector of the state: (elems, dtype, name).
        optimizer: the rule.
        grouped: the same rule by groups, if some parameters have different settings; else None.
        ranges: [start, stop) of the elements that are updated here, in the order of the vector; starts are
            multiples of 64.
        dtype: dtype of all vectors.
    """

    def __init__(
        self,
        allocate: Callable[[int, torch.dtype, str], Vector],
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
        self.state = {name: allocate(elems, dtype, name) for name in optimizer.state_names}
        for vector in self.state.values():
            if optimizer.state_init:
                vector.tensor.fill_(optimizer.state_init)

    def state_of(self, vector: Vector, start: int, stop: int) -> Span:
        """The elements of a state vector for [start, stop) of the flat vector, which lies within one range."""
        first = max(begin for begin in self._places if begin <= start)
        local = self._places[first] + start - first
        return vector[local : local + stop - start]

    @property
    def per_tensor(self) -> int:
        """Number of tensors of the model, where an update needs sums over whole tensors; else 0."""
        grouped = self._grouped
        return grouped.num_tensors if grouped is not None and grouped.per_tensor else 0

    def partial_sums(
        self, parameters: torch.Tensor, sums: Sequence[tuple[int, torch.Tensor]], *, step: int
    ) -> list[Piece]:
        """The sums over each tensor's elements in these ranges, which an update needs. Arguments as in `update`."""
        assert self._grouped is not None
        found: list[Piece] = []
        for start, gradient in sums:
            target, state = self._at(parameters, start, len(gradient))
            found += self._grouped.partial_sums(start, target, gradient, state, step=step)
        return found

    def update(
        self,
        parameters: torch.Tensor,
        sums: Sequence[tuple[int, torch.Tensor]],
        tensor_sums: Mapping[int, Sums] | None = None,
        *,
        lr: float,
        step: int,
    ) -> None:
        """Makes one update of these ranges, in place.

        Args:
            parameters: (E,), the whole vector.
            sums: (start, mean gradient of the elements from there on); each lies within one range.
            tensor_sums: `partial_sums`, summed over all holders of a tensor's parts; None if there are no others.
            lr: learning rate.
            step: number of the update, from 1.

        Raises:
            NonFiniteError: the update has made a parameter, or the state, NaN or infinite.
        """
        if self._grouped is not None and self._grouped.whole_matrices and len(sums) > 1:
            sums = [(0, torch.cat([gradient for _, gradient in sums]))]
        if self.per_tensor and tensor_sums is None:
            tensor_sums = add_up(self.partial_sums(parameters, sums, step=step))
        for start, gradient in sums:
            target, state = self._at(parameters, start, len(gradient))
            if self._grouped is None:
                self._optimizer.apply(target, gradient, state, lr=lr, step=step)
            else:
                self._grouped.apply(start, target, gradient, state, tensor_sums, lr=lr, step=step)
            where = f"elements {start} to {start + len(gradient)}"
            check_updated([target, *state.values()], where, lr, step)

    def _at(
        self, parameters: torch.Tensor, start: int, elems: int
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Parameters and state of some elements."""
        stop = start + elems
        state = {name: self.state_of(vector, start, stop).tensor for name, vector in self.state.items()}
        return parameters[start:stop], state
