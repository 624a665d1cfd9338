"""Checks hyper-parameters, with one wording for all rules."""

from __future__ import annotations

import math

from gradstream.errors import ConfigError


def require(holds: bool, rule: str, name: str, got: object, expected: str) -> None:
    """Raises a `ConfigError` that names the rule's argument unless `holds`."""
    if not holds:
        raise ConfigError(f"{rule}: {name} is {got!r}; expected {expected}")


def positive(rule: str, name: str, got: float) -> None:
    """Raises ConfigError unless `got` is a finite number above 0."""
    require(_is_number(got) and got > 0, rule, name, got, "a finite number > 0")


def not_negative(rule: str, name: str, got: float) -> None:
    """Raises ConfigError unless `got` is a finite number of at least 0."""
    require(_is_number(got) and got >= 0, rule, name, got, "a finite number >= 0")


def fraction(rule: str, name: str, got: float) -> None:
    """Raises ConfigError unless `got` is a number in [0, 1)."""
    require(_is_number(got) and 0 <= got < 1, rule, name, got, "a number in [0, 1)")


def _is_number(got: object) -> bool:
    return isinstance(got, int | float) and not isinstance(got, bool) and math.isfinite(got)
