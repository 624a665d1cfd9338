"""The methods that are compared, each as a function of one number: its learning rate.

All go through the same grid. What a method has besides a rate (a period, a bound, an exponent) is what its
paper uses, or what the page says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import gradstream as gs
from gradstream.optim.base import Optimizer
from gradstream.registry import find_strategy
from gradstream.strategies.base import Strategy

__all__ = ["BATCH", "EXPONENTS", "METHODS", "WORKERS", "Method"]

WORKERS, BATCH = 30, 4
"""λ = 30 learners with 4 samples each: 120 in all, near the 128 of Zhang and others."""
EXPONENTS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0)


@dataclass(frozen=True)
class Method:
    """A way to train.

    Args:
        name: in records.
        title: in tables.
        strategy: by which name gradstream knows it.
        options: of the strategy.
        exponent: p, of those that are compared by it.
        adagrad: the server's rule is Adagrad; else plain SGD.
        workers, batch: how many machines, and samples of a gradient.
    """

    name: str
    title: str
    strategy: str
    options: Mapping[str, Any] = field(default_factory=dict)
    exponent: float | None = None
    adagrad: bool = False
    workers: int = WORKERS
    batch: int = BATCH

    def optimizer(self, lr: float, long: float) -> Optimizer:
        """The server's rule at this rate; at a tenth of it after `long` epochs."""
        rate = gs.StepDecay(lr, every=long)
        return gs.Adagrad(lr=rate, initial_accumulator=0.01) if self.adagrad else gs.SGD(lr=rate)

    def made(self) -> Strategy:
        """The strategy. Raises UnknownNameError where gradstream has none of this name, or no such option."""
        return find_strategy(self.strategy, self.options)


_LITERAL = {"overlap": False}

METHODS: tuple[Method, ...] = (
    Method("single", "one machine, batch 120", "downpour", _LITERAL, workers=1, batch=WORKERS * BATCH),
    Method("synchronous", "synchronous", "synchronous"),
    Method("downpour", "Downpour, fixed rate", "downpour", _LITERAL),
    Method("downpour-adagrad", "Downpour + Adagrad", "downpour", _LITERAL, adagrad=True),
    *(
        Method(
            f"softsync-{splits}{'-aware' if power else ''}",
            f"{splits}-softsync, {'α/τ' if power else 'fixed rate'}",
            "softsync",
            {"splits": splits, "power": power},
            exponent=power if splits == WORKERS else None,
        )
        for splits in (1, 15, WORKERS)
        for power in (0.0, 1.0)
    ),
    *(
        Method(
            f"power-{power:g}",
            f"30-softsync, α/τ^{power:g}",
            "softsync",
            {"splits": WORKERS, "power": power},
            exponent=power,
        )
        for power in EXPONENTS
        if power not in (0.0, 1.0)
    ),
    Method("ssp", "SSP, s = 3", "ssp", {"bound": 3}),
    Method("elastic", "elastic averaging, τ = 10", "elastic-averaging", {"every": 10}),
    Method("dc-asgd", "DC-ASGD, constant", "dc-asgd", {"adaptive": False}),
    Method("dc-asgd-a", "DC-ASGD, adaptive", "dc-asgd", {"adaptive": True}),
    Method("averaging", "parameter averaging, H = 10", "parameter-averaging", {"every": 10}),
    Method(
        "diloco",
        "DiLoCo, H = 10, ν 0.7, μ 0.9",
        "diloco",
        {"every": 10, "outer_lr": 0.7, "outer_momentum": 0.9},
    ),
    Method("one-shot", "parameter averaging, once", "parameter-averaging", {"every": None}),
    Method("single-4", "one machine, batch 4", "downpour", _LITERAL, workers=1),
)
