"""The common part of all dry runs: a few minibatches on real processes, up to a checkpoint."""

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
from gradstream.run.plan import RunPlan, plan_run
from gradstream.run.reopen import kept_parameters
from gradstream.run.result import Run
from gradstream.runtime.resources import free_disk_bytes

__all__ = ["DryRun"]

STEPS = 1
"""Minibatches of each worker before the run is asked to stop. The first one warms up, and is not measured; by
the time that the run stops, each worker has at least begun the next."""


class DryRun(ABC):
    """The checks of one job, and their shared state.

    Args:
        job: the job to check.
        run_dir: run directory to make; the caller removes it.
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
        """The checks by name, in their order."""

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
            elif event["event"] == "exchange":  # about once a second
                seen.update(pushes=event["pushes"], fetches=event["fetches"])

        def enough() -> bool:
            everyone = len(steps) == self.job.workers and min(steps.values()) >= STEPS
            return everyone and seen["pushes"] > 0 and seen["fetches"] > 0

        job = dataclasses.replace(self.tried(), run_dir=self._run_dir, name="dry-run")
        self._run_dir.mkdir(exist_ok=True)
        try:
            return launch(
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
            raise KeyboardInterrupt  # the user has stopped it
        return Run.load(self._run_dir)

    def tried(self) -> Job:
        """The job of the trial run."""
        return quiet(self.job)

    @cached_property
    def kept(self) -> Path:
        """The verified parameters that the trial run has left."""
        return kept_parameters(self._run_dir)

    def configuration(self) -> str:
        """Check: the plan of the run can be made."""
        plan = self.plan
        if self.job.spec is not None:  # starts to load torch during the next checks
            shards = plan.servers > 0
            environment = node_environment(self.job.workers, shards=shards)
            cluster = LocalCluster(self._run_dir / "logs", environment, shards=shards)
            self._cluster = self._stack.enter_context(cluster)
        names = f"{type(plan.strategy).__name__.lower()}, {self.rule()}"
        return f"{names}, {count(plan.workers, 'worker')}, {count(plan.servers, 'server')}"

    def rule(self) -> str:
        """Name of the update rule, as far as it is known."""
        return type(self.plan.optimizer).__name__

    def disk(self, final_bytes: int, checkpoint_bytes: int) -> str:
        """Check: the disk has room for the final parameters and the checkpoints that are kept."""
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
        """Check: minibatches, pushes and fetches took place."""
        figures = self.run.summary
        counts = f"{figures['steps']} minibatches, {figures['pushes']} pushes, {figures['fetches']} fetches"
        if not (figures["steps"] and figures["pushes"] and figures["fetches"]):
            raise PreflightError(f"{counts}: expected some of each")
        loss = "" if figures["loss"] is None else f", loss {figures['loss']:.4g}"
        peaks = [f"{role} {size_text(size)}" for role, size in by_role(figures["peak_own_bytes"]).items()]
        return f"{counts}{loss}; peak of own memory: {', '.join(peaks)}"

    def checkpoint(self) -> str:
        """Check: a checkpoint was made, and is valid."""
        failed = [event for event in self.run.events if event["event"] == "checkpoint_failed"]
        if failed:
            raise PreflightError(f"none could be made: {failed[-1]['who']}: {failed[-1]['message']}")
        file = self.kept
        size = sum(one.stat().st_size for one in file.parent.iterdir())
        if file.parent.name == "final":
            return f"the run was over before it could be stopped; {size_text(size)} of final parameters"
        return f"{count(len(list(file.parent.iterdir())), 'file')}, {size_text(size)}, verified"

    def pace(self) -> tuple[float, str] | None:
        """Samples per second, and a text on how they were measured; None where too little was run."""
        steps = [event for event in self.run.events if event["event"] == "step"]
        rate = samples_per_s(steps)
        if rate is None:
            return None
        after = sum(event["step"] > 0 for event in steps)
        minibatches = count(after, "minibatch", "es")
        return rate, f"{rate:,.0f} samples/s over the {minibatches} after each worker's first"
