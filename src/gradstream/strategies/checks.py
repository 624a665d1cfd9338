"""Checks of strategies' options, with one wording for all."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gradstream.errors import ConfigError, UnknownNameError


def check_choice(strategy: str, option: str, got: object, names: Sequence[str]) -> None:
    """Demands one of these names, or a function.

    Raises:
        UnknownNameError: the value is another name.
        ConfigError: the value is the place of a function, "file.py:function", which only settings look up.
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
    """Demands a whole number: a period of 1.5 steps would never be over.

    Args:
        what: the things that are counted, for the message.
        least: smallest number that is allowed.
        other: alternatives to a number, for the message.

    Raises:
        ConfigError: the value is no whole number, or too small.
    """
    if not isinstance(got, int) or isinstance(got, bool) or got < least:
        raise ConfigError(
            f"{strategy}({option}={got!r}): expected a whole number of {what} of at least {least}{other}"
        )


def check_flag(strategy: str, option: str, got: object, *, may_be_none: bool = False) -> None:
    """Demands True or False: Python takes other values, such as "no", for true.

    Args:
        may_be_none: None is allowed too.

    Raises:
        ConfigError: the value is something else.
    """
    if not isinstance(got, bool) and not (may_be_none and got is None):
        expected = "True, False or None" if may_be_none else "True or False"
        raise ConfigError(f"{strategy}({option}={got!r}): expected {expected}")


def check_not_negative(strategy: str, option: str, got: object, what: str = "number") -> None:
    """Demands a finite number of 0 or above.

    Args:
        what: kind of number, for the message.

    Raises:
        ConfigError: the value is no such number.
    """
    if isinstance(got, bool) or not isinstance(got, int | float) or not 0 <= got < math.inf:
        raise ConfigError(f"{strategy}({option}={got!r}): expected a finite {what} of at least 0")
