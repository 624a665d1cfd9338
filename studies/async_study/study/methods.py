"""The methods that are compared, each as a function of one number: its learning rate.

All go through the same grid. What a method has besides a rate (a period, a bound, an exponent) is what its
paper uses, or what the page says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import gradstream as gs
from gradstream.job.registry import find_strategy
from gradstream.optim.base import Optimizer
from gradstream.strategies.base import Strategy

WORKERS, BATCH = 30, 4
"""λ = 30 learners with 4 samples each: 120 in all, near the 128 of Zhang and others."""
SAMPLES = 4500
EXPONENTS = (0.0, 0.5, 1.0, 2.0)


@dataclass(frozen=True)
class Method:
    """A way to train.

    Args:
        name: in records.
        title: in tables.
        strategy: by which name gradstream knows it.
        options: of the strategy.
        exponent: p, of those that are compared by it.
        adagrad: the rule is Adagrad; else SGD.
        momentum: of SGD.
        nesterov: the momentum is Nesterov's.
        shares: None, or "measured": sizes of minibatches follow the machines' speeds.
        workers, batch: how many machines, and samples of a gradient.
        codec: of what workers send; "" for none.
        period: minibatches of a worker that its strategy counts as one step.
        passes: over the data, of a method whose result no rate and no seed changes; None for all others.
    """

    name: str
    title: str
    strategy: str
    options: Mapping[str, Any] = field(default_factory=dict)
    exponent: float | None = None
    adagrad: bool = False
    momentum: float = 0.0
    nesterov: bool = False
    shares: Literal["measured"] | None = None
    workers: int = WORKERS
    batch: int = BATCH
    codec: str = ""
    period: int = 1
    passes: int | None = None

    def optimizer(self, lr: float, long: float) -> Optimizer | None:
        """The run's rule at this rate; at a tenth of it after `long` epochs."""
        if self.passes is not None:
            return None
        rate = gs.schedules.StepDecay(lr, every=long)
        if self.adagrad:
            return gs.optim.Adagrad(lr=rate, initial_accumulator=0.01)
        return gs.optim.SGD(lr=rate, momentum=self.momentum, nesterov=self.nesterov)

    def made(self) -> Strategy:
        """The strategy. Raises UnknownNameError where gradstream has none of this name, or no such option."""
        return find_strategy(self.strategy, self.options)


_LITERAL = {"overlap": False}
_EXACT = {"tolerance_grad": 0.0, "tolerance_change": 0.0}


def _softsync(splits: int, power: float, *, momentum: float = 0.0) -> Method:
    rule = {0.0: "fixed rate", 1.0: "α/τ"}.get(power, f"α/τ^{power:g}")
    suffix = {0.0: "", 1.0: "-aware"}.get(power, f"-power-{power:g}")
    return Method(
        f"softsync-{splits}{suffix}{'-momentum' if momentum else ''}",
        f"{splits}-softsync, {rule}{f', momentum {momentum:g}' if momentum else ''}",
        "softsync",
        {"splits": splits, "power": power},
        exponent=power if splits == WORKERS and not momentum else None,
        momentum=momentum,
    )


def downpour(workers: int, *, adagrad: bool) -> Method:
    """Downpour by number of replicas; of one it is SGD."""
    name = "SGD" if workers == 1 else f"Downpour {workers}"
    title = f"{name}{' + Adagrad' if adagrad else ''}"
    kind = "adagrad" if adagrad else "sgd"
    return Method(f"{kind}-{workers}", title, "downpour", _LITERAL, adagrad=adagrad, workers=workers)


def sandblaster(workers: int, passes: int) -> Method:
    """L-BFGS, with about five portions for each replica, and none smaller than two samples."""
    batch = max(2, min(45, round(SAMPLES / (5 * workers))))
    title = f"Sandblaster L-BFGS {workers}"
    return Method(f"lbfgs-{workers}", title, "lbfgs", _EXACT, workers=workers, batch=batch, passes=passes)


METHODS: tuple[Method, ...] = (
    Method("single", "one machine, batch 120", "downpour", _LITERAL, workers=1, batch=WORKERS * BATCH),
    Method("single-4", "one machine, batch 4", "downpour", _LITERAL, workers=1),
    Method("synchronous", "synchronous, by a server", "synchronous"),
    Method("downpour", "Downpour, fixed rate", "downpour", _LITERAL),
    Method("averaging", "parameter averaging, H = 10", "parameter-averaging", {"every": 10}),
    Method(
        "diloco",
        "DiLoCo, H = 10, ν 0.7, μ 0.9",
        "diloco",
        {"every": 10, "outer_lr": 0.7, "outer_momentum": 0.9},
    ),
    Method("elastic", "EASGD, τ = 10", "elastic-averaging", {"every": 10}),
    Method("eamsgd", "EAMSGD, τ = 10, δ = 0.99", "eamsgd", {"every": 10}, momentum=0.99, nesterov=True),
    Method("ssp", "SSP, s = 3", "ssp", {"bound": 3}),
    *(_softsync(splits, power) for splits in (WORKERS, 15, 1) for power in (0.0, 1.0)),
    Method("downpour-adagrad", "Downpour + Adagrad", "downpour", _LITERAL, adagrad=True),
    Method("dc-asgd-a", "DC-ASGD, adaptive", "dc-asgd", {"adaptive": True}),
    Method("synchronous-momentum", "synchronous, momentum 0.9", "synchronous", momentum=0.9),
    Method("downpour-momentum", "Downpour, momentum 0.9", "downpour", _LITERAL, momentum=0.9),
    Method("one-shot", "parameter averaging, once", "parameter-averaging", {"every": None}),
    Method("dc-asgd", "DC-ASGD, constant", "dc-asgd", {"adaptive": False}),
    Method("allreduce", "synchronous, by allreduce", "allreduce"),
)

PAPER: tuple[Method, ...] = (
    Method(
        "single-momentum",
        "one machine, batch 120",
        "downpour",
        _LITERAL,
        momentum=0.9,
        workers=1,
        batch=WORKERS * BATCH,
    ),
    Method("synchronous-momentum", "synchronous", "synchronous", momentum=0.9),
    *(_softsync(splits, power, momentum=0.9) for splits in (1, 15, WORKERS) for power in (0.0, 1.0)),
)
"""Zhang and others (2016): momentum 0.9, and the rate of one machine that has all 120 samples."""

POWERS = tuple(_softsync(WORKERS, power) for power in EXPONENTS if power not in (0.0, 1.0))
"""What is neither a fixed rate nor α/τ."""

MEASURED = (
    Method("allreduce-measured", "the same, measured shares", "allreduce", shares="measured"),
    Method("ssp-measured", "SSP, s = 3, measured shares", "ssp", {"bound": 3}, shares="measured"),
)
"""For uneven machines."""

BY_NAME = {method.name: method for method in METHODS}
