"""The job of each phase of a run: the run's own, with the fields that the phase changes. See `job.phases`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from gradstream.checkpoint.manifest import JobPhase
from gradstream.coordinator.link_choice import Chosen
from gradstream.errors import ConfigError
from gradstream.job.job import Job, is_open_ended, strategy_of
from gradstream.job.phases import Phase
from gradstream.job.registry import find_strategy
from gradstream.job.traits import traits_of_job, traits_of_strategy
from gradstream.optim.base import Optimizer
from gradstream.optim.within import Within
from gradstream.strategies.allreduce import AllReduce
from gradstream.strategies.base import GroupStrategy, ServerStrategy
from gradstream.strategies.local_sgd import LocalSGD
from gradstream.traits import refuse

AUTO = "auto"
"""Name of the strategy that `link_choice` chooses, for a job or a phase."""
MEASURED_STEPS = 20
"""Minibatches of each worker in the phase that measures."""
MEASURES = Phase(steps=MEASURED_STEPS, name="measures", strategy="allreduce")
"""The phase before that of strategy "auto", where the job has no phases. Slow links end it after a few steps."""

_OF_THE_LOOP = (
    *("until", "optimizer", "lr", "workers", "servers", "batch_size", "accumulate"),
    *("variance_test", "noise_multiple", "shares", "assignment"),
)
"""Fields that a user's own loop decides itself, or that stay as they are."""

_OWN = (
    "epochs",
    "steps",
    "until",
    "name",
    "strategy",
    "strategy_options",
    "variance_test",
    "noise_multiple",
    "largest",
    "lr",
)
"""Fields that are not just put in the place of the job's."""


def job_of_phase(job: Job, begin: JobPhase) -> Job:
    """The job of one phase, without phases.

    Args:
        job: the run's, with phases.
        begin: which phase it is, and where it has begun.

    Raises:
        ConfigError: a field is wrong; the message names the phase.
    """
    phase, where = job.phases[begin.number], f"phases[{begin.number}]"
    if is_open_ended(job):
        _check_length_in_loop(job, begin.number, where)
    elif (phase.epochs is None) == (phase.steps is None):
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
    shown = {"strategy_options": phase.strategy_options, "epochs": phase.epochs, "steps": phase.steps}
    asked = dataclasses.replace(job, **{**changed, **shown, "servers": None}, phases=())
    traits = {**traits_of_phase(job.phases, begin.number), **traits_of_job(asked)}
    if phase.strategy == AUTO:
        refuse(traits, f"{where}: ")
        changed |= _chosen(job, where, begin)
    elif phase.strategy is not None:
        changed["strategy"], changed["strategy_options"] = phase.strategy, phase.strategy_options
    changed["epochs"] = None if phase.epochs is None else begin.epochs + phase.epochs
    # A loop counts its steps itself: see `RunPlan.loop_steps`.
    counts = phase.steps is not None and not is_open_ended(job)
    changed["steps"] = begin.rounds + (phase.steps or 0) if counts else None
    made = dataclasses.replace(job, **changed, phases=())
    strategy = strategy_of(made)
    if phase.servers is None and not isinstance(strategy, ServerStrategy):
        made = dataclasses.replace(made, servers=None)
    refuse({**traits, **traits_of_strategy(strategy, made.workers)}, f"{where}: ")
    if strategy.in_passes and phase.optimizer is None:
        made = dataclasses.replace(
            made, optimizer=None
        )  # the method is one, and the job's is for other phases
    return made


def measured_first(job: Job) -> Job:
    """A job of strategy "auto" in phases: one that measures, and one that exchanges as `link_choice` says.

    Raises:
        ConfigError: the job is too short for that, or says what "auto" chooses.
    """
    if job.strategy != AUTO:
        return job
    refuse({**traits_of_job(job), "auto": f"strategy={AUTO!r}"})
    chosen = Phase(epochs=job.epochs, strategy=AUTO, strategy_options=job.strategy_options)
    made = dataclasses.replace(
        job, strategy="allreduce", strategy_options={}, epochs=None, phases=(MEASURES, chosen)
    )
    if is_open_ended(job):
        return made
    several = job.batch_size if isinstance(job.batch_size, list | tuple) else [job.batch_size] * job.workers
    sizes = [size for size in several if isinstance(size, int)]  # others are refused with the phases
    measured, samples = MEASURED_STEPS * sum(sizes), job.data.num_samples
    if samples is not None and samples <= measured:
        raise ConfigError(
            f"strategy={AUTO!r} measures for {MEASURED_STEPS} steps, which is {measured:,} samples, and a data epoch "
            f"has {samples:,}; take phases=[gs.Phase(steps=..., strategy='allreduce'), gs.Phase(epochs=..., "
            f"strategy={AUTO!r})] with fewer steps, or name a strategy"
        )
    return made


def _check_length_in_loop(job: Job, number: int, where: str) -> None:
    """Raises ConfigError unless each phase of a user's own loop but the last one says how many steps it has."""
    phase, is_last = job.phases[number], number + 1 == len(job.phases)
    if (phase.steps is None) != is_last and phase.epochs is None:  # epochs are refused by a rule
        raise ConfigError(
            f"{where}: got steps={phase.steps}; in a training loop of your own each phase but "
            "the last one has steps, those of the optimizer on each worker, and the last one lasts as long as the "
            "loop: phases=[gs.Phase(steps=500), gs.Phase(strategy='local-sgd')], for one"
        )


def _chosen(job: Job, where: str, begin: JobPhase) -> dict[str, Any]:
    """The fields of a job that a phase of strategy "auto" sets."""
    before = job.phases[begin.number - 1]
    spec = job if before.strategy is None else before
    in_group = before.strategy == AUTO or isinstance(
        find_strategy(spec.strategy or "", spec.strategy_options), GroupStrategy
    )
    if begin.number == 0 or not in_group:
        raise ConfigError(
            f"{where}: strategy={AUTO!r} goes by what the phase before has measured; put gs.Phase(steps=20, "
            'strategy="allreduce") before it'
        )
    chosen = Chosen.of_json(begin.chosen)
    local = LocalSGD(every=chosen.every, delay=chosen.delay, outer_momentum=chosen.outer_momentum)
    strategy = AllReduce() if chosen.every == 1 else local
    periods = {
        name: _in_rounds(getattr(job, name), chosen.every) for name in ("evaluate_every", "checkpoint_every")
    }
    return {"strategy": strategy, "strategy_options": {}, "codec": chosen.codec, **periods}


def _in_rounds(period: int | str | None, minibatches: int) -> int | str | None:
    """A number of minibatches as the nearest number of rounds; "epoch", a time, and None as they are."""
    return max(1, round(period / minibatches)) if isinstance(period, int) else period


def traits_of_phase(phases: Sequence[Phase], number: int) -> dict[str, str]:
    """The traits that one of several phases has besides those of its job."""
    phase = phases[number]
    found = {"auto": f"strategy={AUTO!r}"} if phase.strategy == AUTO else {}
    found["one of several phases"] = f"phases[{number}]"
    if phase.epochs is not None:
        found["phase in epochs"] = f"epochs={phase.epochs}"
    for name in _OF_THE_LOOP:
        if (value := getattr(phase, name)) is not None:
            found["phase of a loop's own"] = f"{name}={value!r}"
    for name in ("noise_multiple", "variance_test"):
        if (value := getattr(phase, name)) is not None:
            found[name] = found["growth"] = f"{name}={value}"
    for before, one in enumerate(phases[:number]):
        if one.strategy is not None and _is_local(one):
            found["after local steps"] = f"phases[{before}]"
        if one.epochs is None or one.until is not None:
            found["begins inside of an epoch"] = f"phases[{before}], which may end inside of a data epoch"
    return found


def _is_local(phase: Phase) -> bool:
    """Whether workers train alone in it, or may do so."""
    assert phase.strategy is not None
    return phase.strategy == AUTO or find_strategy(phase.strategy, phase.strategy_options).local_rounds


def _check_variance_test(phase: Phase, where: str, accumulate: int) -> None:
    multiple, theta = phase.noise_multiple, phase.variance_test
    if theta is not None and not 0 < theta < 1:
        raise ConfigError(f"{where}: variance_test={theta!r}; expected a number in (0, 1), such as 0.5")
    if multiple is not None and not 0 < multiple < math.inf:
        raise ConfigError(f"{where}: noise_multiple={multiple!r}; expected a number above 0, such as 1")
    if phase.theta is not None and phase.largest < accumulate:
        raise ConfigError(f"{where}: largest={phase.largest!r}; expected at least accumulate={accumulate}")


def jobs_of(job: Job) -> list[Job]:
    """The job of each phase, as if each began the run; the job alone, where it has no phases. Raises ConfigError."""
    job = measured_first(job)
    return [job_of_phase(job, JobPhase(number)) for number in range(len(job.phases))] or [job]


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
