"""The weight of a gradient as a function of its staleness τ, the number of updates that have overtaken it.

    power:        1 / max(τ, 1)^p         1, 1, 1/2, 1/3, ... for p = 1
    exponential:  exp(-p·τ)               next to nothing after some tens of updates

Any other function of τ may be given, if it is at the top level of a file. The two above are 1 at τ = 0, so with them
one worker is plain SGD.

Reference: Zhang, Gupta, Lian, Liu, "Staleness-aware Async-SGD for Distributed Deep Learning", IJCAI 2016, which
proposes the power p = 1, and says that an exponential weight stops learning where τ is in the hundreds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, get_args

from gradstream.errors import ConfigError, UserCodeError
from gradstream.strategies.base import check_choice, check_not_negative

Name = Literal["power", "exponential"]
Penalty = Name | Callable[[int], float]
"""A name, or a function of τ; settings give one as "file.py:function"."""


def check_penalty(strategy: str, weight: Penalty, power: float) -> None:
    """Checks the options `weight` and `power` of a strategy.

    Raises:
        ConfigError: the exponent is below 0, or is given beside a function, which would not use it.
        UnknownNameError: there is no weight of this name; see `check_choice`.
    """
    check_not_negative(strategy, "power", power)
    if callable(weight) and power != 1.0:
        raise ConfigError(
            f"{strategy}(power={power}, weight={getattr(weight, '__name__', weight)}): power applies only to the "
            "built-in weights, not to a function of τ; leave power out, and apply it inside the function"
        )
    check_choice(strategy, "weight", weight, get_args(Name))


def factor(weight: Penalty, power: float, staleness: int) -> float:
    """The factor of a gradient of this staleness.

    Raises:
        UserCodeError: the user's function raises, or returns no finite number.
    """
    if weight == "power":
        return math.pow(max(staleness, 1), -power)
    if weight == "exponential":
        return math.exp(-power * staleness)
    assert callable(weight)
    try:
        found = float(weight(staleness))
    except Exception as error:
        raise UserCodeError(
            f"the weight of staleness {staleness} raised {type(error).__name__}: {error}"
        ) from error
    if not math.isfinite(found):
        raise UserCodeError(f"the weight of staleness {staleness} is {found}; expected a finite number")
    return found
