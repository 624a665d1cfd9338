"""The outer optimizer of strategies whose workers train alone: SGD, with Nesterov's momentum or the plain one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from gradstream.errors import ConfigError
from gradstream.optim import SGD

T = TypeVar("T")


def outer_sgd(strategy: str, lr: float, momentum: float, *, nesterov: bool) -> SGD:
    """V ← μ·v + Δ;  w ← w - ν·(Δ + μ·v), or w ← w - ν·v without Nesterov.

    Args:
        strategy: name of its class, for messages.
        lr: ν, > 0.
        momentum: μ, in [0, 1).
        nesterov: without effect at μ = 0.

    Raises:
        ConfigError: a value is out of its range, or ν is a schedule.
    """
    return check_outer(
        strategy, lr, momentum, lambda: SGD(lr, momentum=momentum, nesterov=nesterov and momentum != 0)
    )


def check_outer(strategy: str, lr: float, momentum: float, make: Callable[[], T]) -> T:
    """Makes an outer rule of these two options; a ConfigError names them. Raises as `outer_sgd`."""
    if callable(lr):
        raise ConfigError(
            f"{strategy}(outer_lr={lr}): expected a number; only the workers' optimizer can have a schedule"
        )
    try:
        return make()
    except ConfigError as error:
        raise ConfigError(f"{strategy}(outer_lr={lr!r}, outer_momentum={momentum!r}): {error}") from error
