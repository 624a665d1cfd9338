"""n-softsync: the server updates once it has ⌊λ/n⌋ gradients, whichever learners they are of.

    client:                              server, at version i, c = ⌊λ/n⌋, on a gradient of version j:
      w ← fetch()                          τ = i - j,  sum ← sum + 1/c · 1 / max(τ, 1)^p · g,    p = 1
      push(∇ℓ(w; batch))                   after c of them:  w ← w - α · sum,  sum ← 0,  i ← i + 1

λ is the number of learners (workers). n = 1 is near synchronous SGD: an update has as many gradients as there are
learners, but the server waits for none in particular. n = λ is asynchronous SGD, with one update for each
gradient. Learners never wait: a gradient is done with once it is in the sum, and a fetch gets the newest
parameters. With learners of equal speed the mean staleness is n·(1 - 1/λ), and a staleness above 2n is very rare.

With p = 0, a fixed rate, large n do not learn in the paper. The factor is applied to the gradient before the update
rule sees it: with momentum, the velocity is not scaled.

Bytes a step and worker: 4N up, 4N down (float32). A dead worker stops no other; an update still takes c gradients.
At the end of a run, and for a checkpoint, the server applies an incomplete sum as it is.

Reference: Zhang, Gupta, Lian, Liu, "Staleness-aware Async-SGD for Distributed Deep Learning", IJCAI 2016
(arXiv 1511.05950), eq. 5 and §3.2. Different here: p is an option, and τ is counted chunk by chunk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from gradstream.errors import ConfigError, UserCodeError
from gradstream.model.base import Reduction
from gradstream.optim import SGD
from gradstream.optim.base import Optimizer
from gradstream.server.aggregation import AggregationRule, EveryN, PushHeader
from gradstream.strategies.base import check_choice, check_count, check_not_negative
from gradstream.strategies.together import StaleGradients

# ---- penalty -----------------------------------------------------------------------------
# The weight of a gradient as a function of its staleness τ, the number of updates that have overtaken it.
#
#     power:        1 / max(τ, 1)^p         1, 1, 1/2, 1/3, ... for p = 1
#     exponential:  exp(-p·τ)               next to nothing after some tens of updates
#
# Any other function of τ may be given, if it is at the top level of a file. The two above are 1 at τ = 0, so with
# them one worker is plain SGD.
#
# Reference: Zhang, Gupta, Lian, Liu, "Staleness-aware Async-SGD for Distributed Deep Learning", IJCAI 2016, which
# proposes the power p = 1, and says that an exponential weight stops learning where τ is in the hundreds.

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


# ---- softsync ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WeightedMean(EveryN):
    """The server: `count` gradients make an update, each weighed by its staleness."""

    weight: Penalty
    power: float

    def weights(self, version: int, update: Sequence[PushHeader]) -> Sequence[float]:
        """1/c · 1 / max(τ, 1)^p, or 1/c times another function of τ."""
        return [factor(self.weight, self.power, version - one.base_version) / self.count for one in update]


@dataclass(frozen=True, slots=True)
class Softsync(StaleGradients):
    """n-softsync; see the module.

    Args:
        splits: n, at least 1; with n of at least the number of workers, each gradient is an update.
        power: p, at least 0; 0 weighs all gradients alike. Leave it out beside a function.
        weight: "power", "exponential", or a function of τ; see `Penalty`.

    Example:
        >>> strategy = gs.Softsync(splits=2)
        >>> run = gs.simulate(model, data, strategy=strategy, workers=2, batch_size=8, epochs=2)
        >>> run.summary["staleness_max"]
        1
    """

    splits: int = 1
    power: float = 1.0
    weight: Penalty = "power"

    plain: ClassVar[Mapping[str, object] | None] = {"weight": "power"}

    def __post_init__(self) -> None:
        check_count("Softsync", "splits", self.splits, "splits")
        check_penalty("Softsync", self.weight, self.power)

    def optimizer(self) -> Optimizer:
        """SGD with momentum, at the paper's rate."""
        return SGD(lr=0.001, momentum=0.9)

    def rule(self, num_workers: int, reduction: Reduction) -> AggregationRule:
        """See `WeightedMean`: c = ⌊λ/n⌋."""
        return WeightedMean(max(1, num_workers // self.splits), self.weight, self.power)
