"""The operations of a model in their order, and where the order can be cut into contiguous groups."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import fx

from gradstream.errors import ConfigError
from gradstream.split.balance import contiguous_groups
from gradstream.split.graph import form_of
from gradstream.split.refusals import storage, where


class OperationChain:
    """A sequence of operations of which groups can be made; between two layers a cut is where least would travel.

    Args:
        nodes: the operations in order, without pieces of divided layers.
        weights: what to balance, of each operation.

    Attributes:
        barred: positions before which no cut is possible, each with the reason.
    """

    def __init__(self, nodes: Sequence[fx.Node], weights: Mapping[fx.Node, float]) -> None:
        self._nodes = nodes
        self.barred = _barred(nodes)
        costs = _cut_costs(nodes)
        self._starts, self._costs = (
            [0],
            [0.0],
        )  # of runs that stay together, with at most one weighted layer each
        last: int | None = None
        for index, node in enumerate(nodes):
            if not weights[node]:
                continue
            free = [
                cut for cut in range(index if last is None else last + 1, index + 1) if cut not in self.barred
            ]
            if last is not None and free:
                self._starts.append(min(reversed(free), key=costs.__getitem__))
                self._costs.append(costs[self._starts[-1]])
            last = index
        self._ends = [*self._starts[1:], len(nodes)]
        self._weights = [
            sum(weights[node] for node in nodes[start:end])
            for start, end in zip(self._starts, self._ends, strict=True)
        ]

    @property
    def most_groups(self) -> int:
        """How many groups there can be."""
        return len(self._starts)

    def place(self, groups: int) -> dict[fx.Node, int]:
        """The group of each operation. Raises ConfigError if there are too few layers."""
        if groups > self.most_groups:
            raise ConfigError(
                f"plan_split: the model has {self.most_groups} layers between which it can be cut, expected at least "
                f"one for each of {groups} parts: take fewer parts"
            )
        found = contiguous_groups(self._weights, self._costs, groups)
        return {
            node: group
            for start, end, group in zip(self._starts, self._ends, found, strict=True)
            for node in self._nodes[start:end]
        }

    def group_weights(self, groups: int) -> list[float]:
        """The weight of each group."""
        found = contiguous_groups(self._weights, self._costs, groups)
        return [
            sum(weight for weight, own in zip(self._weights, found, strict=True) if own == group)
            for group in range(groups)
        ]


def _barred(nodes: Sequence[fx.Node]) -> dict[int, str]:
    barred: dict[int, str] = {}
    created: dict[int, int] = {}
    order = {node: index for index, node in enumerate(nodes)}
    for node, index in order.items():
        first = node.meta["values"][0]
        if isinstance(first, torch.Tensor):
            created.setdefault(storage(first), index)
        for written in node.meta["writes"]:
            for cut in range(created.setdefault(written, index) + 1, index + 1):
                barred.setdefault(cut, f"{where(node)} writes in place what was made before the cut")
        if form_of(node) is None:
            for cut in range(index + 1, max(order.get(user, index) for user in [node, *node.users]) + 1):
                barred.setdefault(cut, f"the result of {where(node)} has no one axis that is the samples")
    return barred


def _cut_costs(nodes: Sequence[fx.Node]) -> list[float]:
    """Bytes for each sample that a cut before each position would carry."""
    order = {node: index for index, node in enumerate(nodes)}
    costs = [0.0] * (len(nodes) + 1)
    for node, index in order.items():
        form = form_of(node)
        users = [len(nodes) if user.op == "output" else order.get(user, index) for user in node.users]
        for cut in range(index + 1, max(users, default=index) + 1):
            costs[cut] += 0 if form is None else math.prod(form.shape) * form.dtype.itemsize
    return costs
