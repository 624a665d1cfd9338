"""Checks of a model's arguments, of its loss, and of vectors."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from gradstream.errors import ConfigError, NonFiniteError


def check_option(function: str, option: str, got: object, *names: str) -> None:
    """Raises ConfigError unless an argument of a `from_...` function is one of these names."""
    if got not in names:
        expected = " or ".join(map(repr, names))
        raise ConfigError(f"{function}: {option} is {got!r}; expected {expected}")


def finite(tensor: torch.Tensor) -> bool:
    """Whether no element is NaN or infinite, in one pass over the memory and without a temporary.

    A sum is finite only if all its terms are, so the sum decides in nearly all cases. A sum that is not finite
    may merely have overflowed; then each element is checked.
    """
    if math.isfinite(tensor.sum().item()):
        return True
    return bool(torch.isfinite(tensor).all().item())


def length(tensor: torch.Tensor) -> float:
    """Euclidean length; NaN or infinite if an element is, or where the sum of squares overflows the dtype.

    One pass over the memory, without a temporary.
    """
    flat = tensor.flatten()
    return math.sqrt(torch.dot(flat, flat).item())


def usable(gradient: torch.Tensor) -> bool:
    """Whether no element is NaN or infinite, and the sum of their squares is finite in the gradient's own dtype.

    Norms and update rules with squares (Adam, Adagrad) need that. The norm of a usable float32 gradient is below
    1.9e19, so sums of usable gradients do not overflow either.
    """
    return math.isfinite(length(gradient))


def check_updated(vectors: Iterable[torch.Tensor], where: str, lr: float, step: int) -> None:
    """Raises NonFiniteError unless parameters and state are finite after an update: a rate is too large.

    Args:
        vectors: parameters and state that the update has changed.
        where: which part of them, in words.
        lr: learning rate of the update.
        step: number of the update.
    """
    if not all(map(finite, vectors)):
        raise NonFiniteError(
            f"update {step}, {where}: at learning rate {lr:g} a parameter, or the optimizer's state, has become NaN "
            "or infinite, although no gradient was; lower the learning rate, or clip the gradient. The newest "
            "checkpoint has the parameters before"
        )


def finite_loss(value: float) -> float:
    """Raises NonFiniteError unless the loss is a finite number. Returns it."""
    if not math.isfinite(value):
        raise NonFiniteError(
            f"loss is {value}, expected a finite number: lower the learning rate, or check this batch's inputs"
        )
    return value
