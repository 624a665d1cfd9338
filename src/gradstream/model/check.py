"""Checks of a model's arguments, of its loss, and of vectors."""

from __future__ import annotations

import math

import torch

from gradstream.errors import ConfigError, GradientError

__all__ = ["check_option", "finite", "finite_loss"]


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


def finite_loss(value: float) -> float:
    """Raises GradientError unless the loss is a finite number. Returns it."""
    if not math.isfinite(value):
        raise GradientError(
            f"loss is {value}, expected a finite number: lower the learning rate, or check this batch's inputs"
        )
    return value
