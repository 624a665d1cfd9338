"""`Phase`: one of several phases of a run, and the job of each.

    job, phases=[p₀, p₁, …]  ──▶  job₀ ─checkpoint─▶ job₁ ─checkpoint─▶ …

Each phase is a job by itself: the run's own, with the fields that the phase changes. Between two phases all workers
stop at one point, and the same nodes go on from that checkpoint. So a run of phases has the bits of a run of the first
phase that is stopped at its end, and resumed with the settings of the next.

References: a warm start in Dean et al., "Large Scale Distributed Deep Networks", NIPS 2012; small batches first in
Keskar et al., "On Large-Batch Training for Deep Learning", ICLR 2017; post-local SGD in Lin et al., "Don't Use Large
Mini-Batches, Use Local SGD", ICLR 2020; batches that grow in Smith et al., "Don't Decay the Learning Rate, Increase the
Batch Size", ICLR 2018.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from gradstream.codec.base import Codec
from gradstream.codec.low_rank import PowerSGD
from gradstream.coordinator.stopping import Until
from gradstream.errors import ConfigError, UnknownNameError
from gradstream.job.descriptions import described, plain, revived
from gradstream.optim.base import Optimizer
from gradstream.optim.schedules import Rate
from gradstream.strategies.base import Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One phase of a run. Fields that are None are those of the job.

    Args:
        epochs: the phase ends with the n-th end of a data epoch in it. Exactly one of `epochs` and `steps` is given.
        steps: steps of each worker.
        until: ends the phase earlier. `seconds` and `samples` count from the beginning of the run.
        name: name of the phase in reports; None takes the strategy's.
        strategy, strategy_options, optimizer, codec, workers, servers, batch_size, accumulate, shares, assignment: see
            `Job`.
        variance_test: θ in (0, 1): a step gets more minibatches when its gradients vary too much: see
            `coordinator.growing_batches`. It needs `accumulate` of 2 or more. Each minibatch keeps its size, so a
            worker needs no more memory.
        noise_multiple: c > 0 in the place of it: a step gets c times as many samples as the gradient noise scale, once
            that is larger. It is the same test, with θ = 1/√c.
        largest: with one of the two, the most minibatches of a step.
        lr: learning rate of the update rule: a number, or a schedule, whose positions count from the phase's beginning.

    Example:
        >>> phases = [gs.Phase(epochs=1, batch_size=8), gs.Phase(epochs=1, strategy="downpour", lr=0.01)]
        >>> run = gs.simulate(model, data, workers=2, phases=phases)
        >>> [row["strategy"] for row in run.summary["phases"]]
        ['synchronous', 'downpour']
    """

    epochs: int | None = None
    steps: int | None = None
    until: Until | None = None
    name: str | None = None
    strategy: str | Strategy | None = None
    strategy_options: Mapping[str, Any] = field(default_factory=dict)
    optimizer: str | Optimizer | None = None
    codec: str | Codec | PowerSGD | None = None
    lr: Rate | None = None
    workers: int | None = None
    servers: int | None = None
    batch_size: int | Sequence[int] | None = None
    accumulate: int | None = None
    variance_test: float | None = None
    noise_multiple: float | None = None
    largest: int = 64
    shares: Sequence[float] | Literal["measured"] | None = None
    assignment: Literal["queue", "partitions"] | None = None

    @property
    def theta(self) -> float | None:
        """θ of the test by which batches grow; None where they do not."""
        return self.variance_test if self.noise_multiple is None else 1 / math.sqrt(self.noise_multiple)

    def growing(self, times: int, factor: int = 2) -> list[Phase]:
        """This phase `times` times, each with `factor` times as many minibatches for a step as the one before.

        That takes the place of a rate that falls: the noise of SGD goes with η/B, so B·k does what η/k does, with
        fewer updates (Smith et al., ICLR 2018). Minibatches keep their size, so a worker needs no more memory.

        Args:
            times: number of phases, at least 1.
            factor: k, at least 2: what the rate would be divided by.

        Raises:
            ConfigError: a number is too small.

        Example:
            >>> [phase.accumulate for phase in gs.Phase(epochs=30, lr=0.1).growing(times=3, factor=5)]
            [1, 5, 25]
        """
        if times < 1 or factor < 2:
            raise ConfigError(
                f"growing(times={times}, factor={factor}): expected times of 1, factor of 2, or more"
            )
        first = self.accumulate or 1
        return [dataclasses.replace(self, accumulate=first * factor**number) for number in range(times)]


def phase_of(given: Phase | Mapping[str, Any]) -> Phase:
    """A phase, also where it was given as a mapping of its fields. Raises UnknownNameError, ConfigError."""
    if isinstance(given, Phase):
        return given
    if not isinstance(given, Mapping):
        raise ConfigError(f"phases: got a {type(given).__name__}, expected gs.Phase(epochs=2, ...)")
    known = [entry.name for entry in dataclasses.fields(Phase)]
    for name in given:
        if name not in known:
            raise UnknownNameError("field of a phase", str(name), known)
    values = {name: revived(value) for name, value in given.items()}
    if isinstance(values.get("until"), Mapping):
        values["until"] = Until(**values["until"])
    return Phase(**values)


def described_phase(phase: Phase) -> dict[str, Any]:
    """A phase as JSON holds it, for `phase_of`; an object without a place becomes a description without a class."""
    values = {entry.name: getattr(phase, entry.name) for entry in dataclasses.fields(phase)}
    given = {name: value for name, value in values.items() if value is not None and value != {}}
    return {name: _as_json(name, value) for name, value in given.items()}


def _as_json(name: str, value: Any) -> Any:
    if name not in ("strategy", "optimizer", "codec", "lr"):
        return plain(value)
    try:
        return described(value)
    except ConfigError:
        return {"class": "", "fields": {}}
