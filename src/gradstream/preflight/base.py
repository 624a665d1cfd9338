"""What the dry runs of all jobs have in common: real processes, up to a checkpoint."""

from __future__ import annotations

import dataclasses
import secrets
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path

from gradstream._train import launch
from gradstream.errors import Interrupted, PreflightError
from gradstream.job.job import Job
from gradstream.preflight.estimates import by_role, count, quiet, samples_per_s
from gradstream.preflight.results import Check
from gradstream.report.summary import EventDict
from gradstream.report.units import size_text
from gradstream.run.local import LocalCluster, node_environment
from gradstream.run.nodes import RunPlan
from gradstream.run.plan import plan_run
from gradstream.run.reopen import kept_parameters
from gradstream.run.result import Run
from gradstream.runtime.resources import free_disk_bytes

__all__ = ["DryRun"]

STEPS = 1
"""Minibatches of each worker before the run is asked to stop. This one warms up, and is not measured; by the
time that the run stops, each has at least begun the next."""


class DryRun(ABC):
    """The checks of one job, and what they share.

    Args:
        job: to look at.
        run_dir: to be made, and thrown away.
        stack: closes the processes.
    """

    def __init__(self, job: Job, run_dir: Path, stack: ExitStack) -> None:
        self.job = job
        self._run_dir = run_dir
        self._stack = stack
        self._cluster: LocalCluster | None = None

    @property
    @abstractmethod
    def checks(self) -> Mapping[str, Check]:
        """By name, in the order in which they are made."""

    @cached_property
    def plan(self) -> RunPlan:
        """The job, as its nodes will play it. Raises ConfigError for what is wrong with it."""
        return plan_run(self.job, "dry-run")

    @cached_property
    def run(self) -> Run:
        """Some minibatches on real processes, up to a checkpoint."""
        steps: Counter[int] = Counter()
        seen: Counter[str] = Counter()

        def on_event(event: EventDict) -> None:
            if event["event"] == "step":
                steps[event["rank"]] += 1
            elif event["event"] == "exchange":  # told every second or so
                seen.update(pushes=event["pushes"], fetches=event["fetches"])

        def enough() -> bool:
            everyone = len(steps) == self.job.workers and min(steps.values()) >= STEPS
            return everyone and seen["pushes"] > 0 and seen["fetches"] > 0

        job = dataclasses.replace(self.tried(), run_dir=self._run_dir, name="dry-run")
        self._run_dir.mkdir(exist_ok=True)
        try:
            return launch(
                job,
                plan_run(job, secrets.token_hex(8)),
                self._run_dir,
                on_event=on_event,
                as_threads=job.spec is None,
                cluster=self._cluster,
                stop=enough,
            )
        except Interrupted:
            pass
        if not enough():
            raise KeyboardInterrupt  # it was not the trial that stopped it
        return Run.load(self._run_dir)

    def tried(self) -> Job:
        """The job that is run a little."""
        return quiet(self.job)

    @cached_property
    def kept(self) -> Path:
        """The parameters that it has left, verified."""
        return kept_parameters(self._run_dir)

    def configuration(self) -> str:
        """What it is about to run."""
        plan = self.plan
        if self.job.spec is not None:  # it loads torch while the next checks are made
            environment = node_environment(self.job.workers, shards=plan.servers > 0)
            self._cluster = self._stack.enter_context(LocalCluster(self._run_dir / "logs", environment))
        names = f"{type(plan.strategy).__name__.lower()}, {self.rule()}"
        return f"{names}, {count(plan.workers, 'worker')}, {count(plan.servers, 'server')}"

    def rule(self) -> str:
        """The update rule, as far as it is known."""
        return type(self.plan.optimizer).__name__

    def disk(self, final_bytes: int, checkpoint_bytes: int) -> str:
        """Whether final parameters, and as many checkpoints as are kept, have room."""
        folder = Path(self.job.run_dir or "runs").resolve()
        kept = self.job.keep_last + 1  # the next one is there before the oldest goes
        free, need = free_disk_bytes(folder), final_bytes + kept * checkpoint_bytes
        text = (
            f"{size_text(free)} free; {size_text(need)} = {size_text(final_bytes)} for the final "
            f"parameters + {kept} checkpoints of {size_text(checkpoint_bytes)}"
        )
        if need > free:
            raise PreflightError(f"{folder}: too little: {text}")
        return text

    def processes(self) -> str:
        """Whether every kind of exchange took place."""
        figures = self.run.summary
        counts = f"{figures['steps']} minibatches, {figures['pushes']} pushes, {figures['fetches']} fetches"
        if not (figures["steps"] and figures["pushes"] and figures["fetches"]):
            raise PreflightError(f"{counts}: expected some of each")
        loss = "" if figures["loss"] is None else f", loss {figures['loss']:.4g}"
        peaks = [f"{role} {size_text(size)}" for role, size in by_role(figures["peak_own_bytes"]).items()]
        return f"{counts}{loss}; peak of own memory: {', '.join(peaks)}"

    def checkpoint(self) -> str:
        """Whether one could be made, and is whole."""
        failed = [event for event in self.run.events if event["event"] == "checkpoint_failed"]
        if failed:
            raise PreflightError(f"none could be made: {failed[-1]['who']}: {failed[-1]['message']}")
        file = self.kept
        size = sum(one.stat().st_size for one in file.parent.iterdir())
        if file.parent.name == "final":
            return f"the run was over before it could be stopped; {size_text(size)} of final parameters"
        return f"{count(len(list(file.parent.iterdir())), 'file')}, {size_text(size)}, verified"

    def pace(self) -> tuple[float, str] | None:
        """Samples a second, and what they were measured over; None where too little was run."""
        steps = [event for event in self.run.events if event["event"] == "step"]
        rate = samples_per_s(steps)
        if rate is None:
            return None
        after = sum(event["step"] > 0 for event in steps)
        minibatches = count(after, "minibatch", "es")
        return rate, f"{rate:,.0f} samples/s over the {minibatches} after each worker's first"
