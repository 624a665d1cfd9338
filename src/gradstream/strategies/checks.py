"""Checks of a strategy's options, with one wording for all."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gradstream.errors import ConfigError, UnknownNameError

__all__ = ["check_choice", "check_count", "check_flag", "check_not_negative"]


def check_choice(strategy: str, option: str, got: object, names: Sequence[str]) -> None:
    """Demands one of these names, or a function.

    Raises:
        UnknownNameError: it is another name.
        ConfigError: it is the place of a function, which settings look up, and Python does not.
    """
    if callable(got) or got in names:
        return
    if isinstance(got, str) and ":" in got:
        raise ConfigError(
            f"{strategy}({option}={got!r}): expected the function itself; its place is for the command line "
            "and config.toml, which look it up"
        )
    raise UnknownNameError(f"{option} of {strategy}", str(got), names)


def check_count(
    strategy: str, option: str, got: object, what: str, *, least: int = 1, other: str = ""
) -> None:
    """Demands a whole number; a period of 1.5 steps would never come, and so be none at all.

    Args:
        what: it is a number of, for the message.
        other: what may be given besides.

    Raises:
        ConfigError: it is another kind of number, or too small.
    """
    if not isinstance(got, int) or isinstance(got, bool) or got < least:
        raise ConfigError(
            f"{strategy}({option}={got!r}): expected a whole number of {what} of at least {least}{other}"
        )


def check_flag(strategy: str, option: str, got: object, *, may_be_none: bool = False) -> None:
    """Demands True or False; of another value, as "no", Python would say that it is true.

    Args:
        may_be_none: None is an answer too.

    Raises:
        ConfigError: it is something else.
    """
    if not isinstance(got, bool) and not (may_be_none and got is None):
        expected = "True, False or None" if may_be_none else "True or False"
        raise ConfigError(f"{strategy}({option}={got!r}): expected {expected}")


def check_not_negative(strategy: str, option: str, got: object, what: str = "number") -> None:
    """Demands a finite number of 0 or above.

    Args:
        what: kind of number it is, for the message.

    Raises:
        ConfigError: it is none.
    """
    if isinstance(got, bool) or not isinstance(got, int | float) or not 0 <= got < math.inf:
        raise ConfigError(f"{strategy}({option}={got!r}): expected a finite {what} of at least 0")
