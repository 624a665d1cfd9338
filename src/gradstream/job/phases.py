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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from gradstream.checkpoint.manifest import JobPhase
from gradstream.coordinator.stopping import Until
from gradstream.errors import ConfigError, UnknownNameError
from gradstream.job.registry import described, find_strategy, plain, revived
from gradstream.optim.base import Optimizer
from gradstream.optim.schedules import Rate
from gradstream.optim.within import Within
from gradstream.strategies.base import ServerStrategy, Strategy

if TYPE_CHECKING:
    from gradstream.job.job import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One phase of a run. Fields that are None are those of the job.

    Args:
        epochs: the phase ends with the n-th end of a data epoch in it. Exactly one of `epochs` and `steps` is given.
        steps: steps of each worker.
        until: ends the phase earlier. `seconds` and `samples` count from the beginning of the run.
        name: name of the phase in reports; None takes the strategy's.
        strategy, strategy_options, optimizer, workers, servers, batch_size, accumulate, shares, assignment: see `Job`.
        variance_test: θ in (0, 1): a step gets more minibatches when its gradients vary too much: see
            `coordinator.variance_test`. It needs `accumulate` of 2 or more. Each minibatch keeps its size, so a worker
            needs no more memory.
        largest: with `variance_test`, the most minibatches of a step.
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
    lr: Rate | None = None
    workers: int | None = None
    servers: int | None = None
    batch_size: int | Sequence[int] | None = None
    accumulate: int | None = None
    variance_test: float | None = None
    largest: int = 64
    shares: Sequence[float] | Literal["measured"] | None = None
    assignment: Literal["queue", "partitions"] | None = None

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


_OWN = (
    "epochs",
    "steps",
    "until",
    "name",
    "strategy",
    "strategy_options",
    "variance_test",
    "largest",
    "lr",
)
"""Fields that are not just put in the place of the job's."""


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
    if name not in ("strategy", "optimizer", "lr"):
        return plain(value)
    try:
        return described(value)
    except ConfigError:
        return {"class": "", "fields": {}}


def job_of_phase(job: Job, begin: JobPhase) -> Job:
    """The job of one phase, without phases.

    Args:
        job: the run's, with phases.
        begin: which phase it is, and where it has begun.

    Raises:
        ConfigError: a field is wrong; the message names the phase.
    """
    phase, where = job.phases[begin.number], f"phases[{begin.number}]"
    if (phase.epochs is None) == (phase.steps is None):
        got = "neither" if phase.epochs is None else f"epochs={phase.epochs} and steps={phase.steps}"
        raise ConfigError(
            f"{where}: expected exactly one of epochs and steps, got {got}; gs.Phase(epochs=2), for one"
        )
    for name in ("epochs", "steps"):
        length = getattr(phase, name)
        if length is not None and length < 1:
            raise ConfigError(f"{where}: {name}={length!r}; expected a whole number of at least 1")
    if phase.strategy_options and phase.strategy is None:
        raise ConfigError(
            f"{where}: strategy_options without a strategy; name the strategy of this phase too"
        )
    _check_variance_test(phase, where, phase.accumulate or job.accumulate)
    changed: dict[str, Any] = {
        entry.name: getattr(phase, entry.name)
        for entry in dataclasses.fields(phase)
        if entry.name not in _OWN and getattr(phase, entry.name) is not None
    }
    if begin.accumulate:
        changed["accumulate"] = begin.accumulate
    if phase.strategy is not None:
        changed["strategy"], changed["strategy_options"] = phase.strategy, phase.strategy_options
    changed["epochs"] = None if phase.epochs is None else begin.epochs + phase.epochs
    changed["steps"] = None if phase.steps is None else begin.rounds + phase.steps
    made = dataclasses.replace(job, **changed, phases=())
    strategy = find_strategy(made.strategy, made.strategy_options)
    if phase.servers is None and not isinstance(strategy, ServerStrategy):
        made = dataclasses.replace(made, servers=None)
    return made


def _check_variance_test(phase: Phase, where: str, accumulate: int) -> None:
    if phase.variance_test is None:
        return
    if not 0 < phase.variance_test < 1:
        raise ConfigError(
            f"{where}: variance_test={phase.variance_test!r}; expected a number in (0, 1), such as 0.5"
        )
    if accumulate < 2:
        raise ConfigError(
            f"{where}: variance_test={phase.variance_test} with accumulate={accumulate}: a variance needs "
            "2 minibatches of a step or more; halve batch_size, and take accumulate=2"
        )
    if phase.largest < accumulate:
        raise ConfigError(f"{where}: largest={phase.largest!r}; expected at least accumulate={accumulate}")


def rate_of_phase(job: Job, begin: JobPhase, optimizer: Optimizer) -> Optimizer:
    """The update rule of a phase, with its learning rate.

    A schedule of the phase counts from its beginning, and one of the job from the beginning of the run.

    Args:
        job: the run's, with phases.
        begin: which phase it is, and where it has begun.
        optimizer: the rule.

    Raises:
        ConfigError: the job has a schedule, and phases that are measured in epochs and others in steps.
    """
    phase, lr = job.phases[begin.number], optimizer.lr
    if phase.lr is not None:
        lr = phase.lr
        if callable(lr):
            lr = Within(lr, begin.origin, steps=phase.steps)
    elif callable(lr):
        epochs = [one.epochs for one in job.phases if one.epochs is not None]
        steps = [one.steps for one in job.phases if one.steps is not None]
        if epochs and steps:
            raise ConfigError(
                "the optimizer's lr is a schedule of the whole run, whose length nobody knows: some of its phases are "
                "given in epochs and others in steps; give all in one unit, or each phase its own lr"
            )
        before = begin.rounds if steps else begin.origin
        lr = Within(lr, begin.origin, before, sum(steps) or None, sum(epochs) or None)
    return optimizer if lr is optimizer.lr else dataclasses.replace(optimizer, lr=lr)  # type: ignore[type-var]
