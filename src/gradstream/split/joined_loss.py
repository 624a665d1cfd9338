"""`JoinedLoss`: shows whether the loss of two pieces of a minibatch is what they make of it one by one.

A pipeline cuts a minibatch of n samples into pieces of n_m, and adds up their gradients with weights n_m / n where the
loss is a mean, and 1 where it is a sum. That is the gradient of

    Σ n_m/n · loss(piece m)        which is loss(whole) for a mean over samples,

but not for a mean over tokens that count, over weights of classes, or of anything that sees samples together. The last
stage has the outputs of all pieces, so it can see that. It looks at the first two, and keeps the memory of no more.
The user's function is called twice more for it, without gradients; one that draws random numbers cannot be compared.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from gradstream.errors import GradientError
from gradstream.model.base import Reduction

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Difference that rounding may make, in relation to the largest of the losses; 0.02 for shorter numbers."""


def is_due(step: int) -> bool:
    """Whether the minibatch of a step is looked at: 0, 1, 2, 4, 8, …; a few suffice, and cost little."""
    return step & (step - 1) == 0


class JoinedLoss:
    """Takes the outputs of the first two pieces of a minibatch.

    Args:
        loss: the user's function of (outputs, targets).
        reduction: whether it is a mean or a sum over samples.
    """

    def __init__(self, loss: Callable[..., Any], reduction: Reduction) -> None:
        self._loss = loss
        self._reduction = reduction
        self._seen: list[tuple[int, Any, float]] = []
        self._compared = False

    def add(self, outputs: Any, targets: Any, samples: int, loss: float) -> None:
        """Adds a piece. With the second one, compares.

        Raises:
            GradientError: the loss of both is another than that of one and the other.
        """
        if self._compared:
            return
        self._seen.append((samples, pytree.tree_map(_detached, (outputs, targets)), loss))
        if len(self._seen) == 2:
            self._compare()
            self._compared = True
            self._seen.clear()

    def _compare(self) -> None:
        joint = sum(size for size, _, _ in self._seen)
        weights = [1.0 if self._reduction == "sum" else size / joint for size, _, _ in self._seen]
        losses = [loss for _, _, loss in self._seen]
        pieces = math.fsum(map(operator.mul, weights, losses))
        joined = self._joined(weights)
        if joined is None:
            return
        dtype = next((one.dtype for one in pytree.tree_leaves(joined) if _is_number(one)), torch.float32)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            whole, again = (float(self._loss(*joined)) for _ in range(2))
        if whole != again or not math.isfinite(whole) or not math.isfinite(pieces):
            return  # it draws random numbers, or the gradient will be refused anyway
        # The mean of pieces may be near 0 where they are not.
        allowed = TOLERANCE.get(dtype, 0.02) * max(1e-6, *map(abs, (whole, *losses)))
        if abs(whole - pieces) > allowed:
            kind = "sum" if self._reduction == "sum" else "mean over samples"
            raise GradientError(
                f"the loss of two micro-batches together is {whole:.9g}, but the {kind} of one and the other is "
                f"{pieces:.9g}, so the gradient of the pieces is not the minibatch's. The loss is no {kind}: as with "
                "ignore_index (a mean over the tokens that count), with weights of classes, or where samples are seen "
                'together. Take micro_batches=1, or a loss that is one; reduction="sum" declares a sum'
            )

    def _joined(self, weights: list[float]) -> Any:
        """Outputs and targets of the whole; None where they are not of a form that can be joined."""
        leaves, specs = zip(*(pytree.tree_flatten(values) for _, values, _ in self._seen), strict=True)
        if any(spec != specs[0] for spec in specs[1:]):
            return None
        joined = []
        for pieces in zip(*leaves, strict=True):
            sized = zip(pieces, self._seen, strict=True)
            if all(torch.is_tensor(one) and one.dim() and len(one) == size for one, (size, _, _) in sized):
                joined.append(torch.cat(pieces))
            elif all(torch.is_tensor(one) and not one.dim() for one in pieces):  # a loss of the module's own
                joined.append(sum(weight * one for weight, one in zip(weights, pieces, strict=True)))
            elif all(one is pieces[0] or (not torch.is_tensor(one) and one == pieces[0]) for one in pieces):
                joined.append(pieces[0])
            else:
                return None
        return pytree.tree_unflatten(joined, specs[0])


def _detached(value: Any) -> Any:
    return value.detach() if torch.is_tensor(value) else value


def _is_number(value: Any) -> bool:
    return torch.is_tensor(value) and value.is_floating_point()
