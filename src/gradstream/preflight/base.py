"""What all dry runs share: checks and their results, and a few minibatches on real processes."""

from __future__ import annotations

import dataclasses
import secrets
import time
import traceback
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from typing_extensions import override

from gradstream._simulate import simulate
from gradstream._train import launch
from gradstream.checkpoint.format import load_file
from gradstream.checkpoint.manifest import JobPhase
from gradstream.data.base import Dataset, Ids
from gradstream.errors import Interrupted, PreflightError, UserCodeError
from gradstream.job.job import Job, build_model
from gradstream.job.phase_jobs import job_of_phase
from gradstream.job.plan import RunPlan
from gradstream.job.registry import name_of
from gradstream.machine.resources import free_disk_bytes, free_memory_bytes
from gradstream.model.base import Batch, Model
from gradstream.report.charts import size_text, time_text
from gradstream.run.local import LocalCluster
from gradstream.run.local.environment import node_environment
from gradstream.run.planning import metrics_of, plan_run
from gradstream.run.result import Run, kept_parameters
from gradstream.runtime.simulation import SimulationConfig
from gradstream.telemetry.events import EventDict

# ---- base --------------------------------------------------------------------------------

STEPS = 1
"""Minibatches of each worker before the run is asked to stop. The first one warms up, and is not measured; when
the run stops, each worker has at least begun the next."""


Check = Callable[[], str]
"""A check: returns its figures as a text, or raises an error."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of one check.

    Args:
        name: name of the check.
        ok: whether the check passed.
        detail: its figures, or what is wrong.
        seconds: its duration.
        trace: traceback of the user's code, if that failed.
    """

    name: str
    ok: bool
    detail: str
    seconds: float = 0.0
    trace: str = ""


def carry_out(checks: Mapping[str, Check]) -> list[CheckResult]:
    """Runs the checks in their order, up to the first that fails."""
    results = []
    for name, check in checks.items():
        begun_s = time.perf_counter()
        try:
            detail = check()
            results.append(CheckResult(name, True, detail, time.perf_counter() - begun_s))
        except Exception as error:
            results.append(_failure(name, error, time.perf_counter() - begun_s))
            break
    return results


def _failure(name: str, error: Exception, seconds: float) -> CheckResult:
    is_ours = hasattr(error, "exit_status")
    own_code = isinstance(error, UserCodeError) or not is_ours
    trace = getattr(error, "traceback_text", "") or (traceback.format_exc() if own_code else "")
    return CheckResult(
        name, False, str(error) if is_ours else f"{type(error).__name__}: {error}", seconds, trace
    )


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
        """The plan of the run. Raises ConfigError if the job is wrong."""
        return plan_run(self.job, "dry-run")

    @cached_property
    def run(self) -> Run:
        """The trial run: a few minibatches on real processes, up to a checkpoint."""
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
        names = f"{name_of(plan.strategy)}, {self.rule()}"
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
        size = sum(entry.stat().st_size for entry in file.parent.iterdir())
        if file.parent.name == "final":
            return f"the run was over before it could be stopped; {size_text(size)} of final parameters"
        return f"{count(len(list(file.parent.iterdir())), 'file')}, {size_text(size)}, verified"

    def pace(self) -> tuple[float, str] | None:
        """Samples per second, and a text on how they were measured; None if too little was run."""
        steps = [event for event in self.run.events if event["event"] == "step"]
        rate = samples_per_s(steps)
        if rate is None:
            return None
        after = sum(event["step"] > 0 for event in steps)
        minibatches = count(after, "minibatch", "es")
        return rate, f"{rate:,.0f} samples/s over the {minibatches} after each worker's first"


# ---- figures ----------------------------------------------------------------------------


def estimate(job: Job, model: Model) -> dict[str, dict[str, int]]:
    """Bytes of the vectors of each node, by name.

    The nodes request them in a shape-only simulation, whose vectors have a size and no elements.
    """
    little = dataclasses.replace(quiet(job), model=model, epochs=None, steps=1)
    run = simulate(little, config=SimulationConfig(shape_only=True))
    return {
        event["node"]: dict(event["vectors_bytes"])
        for event in run.events
        if event["event"] == "memory" and event["vectors_bytes"]
    }


def quiet(job: Job) -> Job:
    """The job without callbacks, trackers, evaluations and regular checkpoints; of several phases the first."""
    job = job_of_phase(job, JobPhase()) if job.phases else job
    return dataclasses.replace(job, evaluate_every=None, checkpoint_every=None, callbacks=(), trackers=())


def samples_per_s(events: Sequence[EventDict]) -> float | None:
    """Samples per second of all workers, each from the end of its first minibatch to the end of its last."""
    times: dict[int, list[tuple[float, int]]] = {}
    for event in events:
        if event["event"] == "step" and event["samples"]:
            times.setdefault(event["rank"], []).append((event["time_s"], event["samples"]))
    rates = [
        sum(samples for _, samples in steps[1:]) / (steps[-1][0] - steps[0][0])
        for steps in map(sorted, times.values())
        if steps[-1][0] > steps[0][0]
    ]
    return sum(rates) if rates else None


def by_role(by_node: Mapping[str, Any]) -> dict[str, Any]:
    """The value of the first node of each role: the first shard is the largest one."""
    roles: dict[str, Any] = {}
    for node in sorted(by_node):
        roles.setdefault(node.partition("-")[0], by_node[node])
    return roles


def count(number: int, what: str, many: str = "s") -> str:
    """A number with its noun: "1 worker", "2 workers"."""
    return f"{number:,} {what}" + ("" if number == 1 else many)


# ---- script ------------------------------------------------------------------------------
# A dry run of a script with a training loop of its own.
#
# Only the script knows its model, and only while it runs: so its first steps come first. The dry run stops it in the
# middle of its loop, with a checkpoint, as Ctrl-C would. The script may print and write files until then. Its
# evaluation is not checked.


class ScriptDryRun(DryRun):
    """See `DryRun`."""

    @property
    @override
    def checks(self) -> Mapping[str, Check]:
        return {
            "configuration": self.configuration,
            "processes": self.processes,
            "model": self._look_at_model,
            "memory": self._memory,
            "disk": self._disk,
            "checkpoint": self.checkpoint,
            "pace": self._pace,
        }

    @override
    def rule(self) -> str:
        return "the script's optimizer"

    @override
    def processes(self) -> str:
        self._free_bytes = free_memory_bytes()
        return super().processes()

    def _look_at_model(self) -> str:
        exchanged = size_text(self._vector_bytes)
        return f"{self._started['num_parameters']:,} parameters, exchanged in vectors of {exchanged}"

    def _memory(self) -> str:
        """Check: shows the peak of memory and what was free before. It never fails: the run has fitted in."""
        peaks: Mapping[str, int] = self.run.summary["peak_own_bytes"]
        text = f"{size_text(sum(peaks.values()))} at the peak of the first steps, in all processes together"
        return text if self._free_bytes is None else f"{size_text(self._free_bytes)} were free; {text}"

    def _pace(self) -> str:
        pace = self.pace()
        return "too few steps to say" if pace is None else pace[1]

    @property
    def _started(self) -> EventDict:
        started = [event for event in self.run.events if event["event"] == "started"]
        if not started:
            raise PreflightError("the run has not begun")
        return started[-1]

    def _vectors(self, role: str) -> Mapping[str, int]:
        """Bytes of vectors by name, on the first node of a role."""
        by_node = {
            event["node"]: event["vectors_bytes"] for event in self.run.events if event["event"] == "memory"
        }
        bytes_by_kind: Mapping[str, int] = by_role(by_node).get(role, {})
        return bytes_by_kind

    @property
    def _vector_bytes(self) -> int:
        return self._vectors("worker").get("parameters", 0)

    def _disk(self) -> str:
        """Check: the disk has room for checkpoints of this size, with the state of the loop's own optimizer."""
        return self.disk(
            self.kept.stat().st_size, sum(file.stat().st_size for file in self.kept.parent.iterdir())
        )


# ---- job ---------------------------------------------------------------------------------
# The dry run of a job: starts no process where estimates of memory and disk exceed what is free.

TEST_SAMPLES = 64
"""Number of held-out samples that are evaluated."""

PROCESS_BYTES = 200_000_000
"""Memory of Python, torch and gRPC in each process, without its vectors."""


class JobDryRun(DryRun):
    """See `DryRun`."""

    @property
    @override
    def checks(self) -> Mapping[str, Check]:
        return {
            "configuration": self.configuration,
            "model": self._look_at_model,
            "data": self._data,
            "memory": self._memory,
            "disk": lambda: self.disk(
                self._vector_bytes, (1 + len(self.plan.shards_optimizer.state_names)) * self._vector_bytes
            ),
            "processes": self.processes,
            "checkpoint": self.checkpoint,
            "evaluation": self._evaluation,
            "time per epoch": self._time,
        }

    @cached_property
    def _model(self) -> Model:
        return build_model(self.job)

    @property
    def _chunk_elems(self) -> int:
        return self.plan.chunk_elems_of(self._model.layout)

    @override
    def tried(self) -> Job:
        return dataclasses.replace(super().tried(), model=self._model)

    def _look_at_model(self) -> str:
        layout = self._model.layout
        tensors = count(len(layout.slots), "tensor")
        chunks = f", exchanged in chunks of {self._chunk_elems:,}" if self.plan.servers else ""
        return f"{layout.elems:,} parameters in {tensors}, {size_text(self._vector_bytes)}{chunks}"

    def _data(self) -> str:
        data = self.job.data
        samples = "an unknown number of" if data.num_samples is None else f"{data.num_samples:,}"
        return f"{data.name}: {samples} samples, {data.num_test_samples:,} held out"

    def _memory(self) -> str:
        job = dataclasses.replace(self.job, chunk_elems=self._chunk_elems)
        need, num_processes = estimate(job, self._model), len(self.plan.node_names)
        total = sum(sum(vectors.values()) for vectors in need.values()) + num_processes * PROCESS_BYTES
        parts = [f"{role}: {_formula(vectors)}" for role, vectors in by_role(need).items()]
        text = (
            f"{size_text(total)} = {num_processes} processes of {size_text(PROCESS_BYTES)} and their vectors "
            f"({'; '.join(parts)}), without what a gradient needs on its way"
        )
        free = free_memory_bytes()
        if free is None:
            return f"{text}; this system does not say what is free"
        if total > free:
            raise PreflightError(
                f"{size_text(free)} free, too little: {text}. Fewer workers, or a smaller model"
            )
        return f"{size_text(free)} free; {text}"

    def _evaluation(self) -> str:
        data = self.job.data
        if not data.num_test_samples:
            return "no samples are held out"
        parameters = load_file(self.kept)
        run = Run(parameters=parameters, model=self._model, data=data, metrics=metrics_of(self.job))
        evaluation = run.evaluate(_Few(data, TEST_SAMPLES))
        what = ", ".join(
            f"{name} {value:{form}}"
            for name, value, form in (
                ("accuracy", evaluation.accuracy, ".1%"),
                ("loss", evaluation.loss, ".4g"),
            )
            if value is not None
        )
        return f"{what or 'outputs'} of {evaluation.num_samples:,} held-out samples"

    def _time(self) -> str:
        pace = self.pace()
        if pace is None:
            return "too little data to say"
        rate, text = pace
        samples = self.job.data.num_samples
        return text if samples is None else f"{time_text(samples / rate)}: {text}"

    @property
    def _vector_bytes(self) -> int:
        return self._model.layout.elems * self._model.layout.dtype.itemsize


class _Few:
    """Held-out samples of a data set at equal distances, since they may be sorted."""

    def __init__(self, data: Dataset, num_samples: int) -> None:
        self._data = data
        self.name = data.name
        self.num_samples = data.num_samples
        self.num_test_samples = min(num_samples, data.num_test_samples)

    def batch(self, ids: Ids) -> Batch:
        return self._data.batch(ids)

    def test_batch(self, ids: Ids) -> Batch:
        return self._data.test_batch(ids * (self._data.num_test_samples // self.num_test_samples))


def _formula(vectors: Mapping[str, int]) -> str:
    parts = " + ".join(f"{name} {size_text(size)}" for name, size in vectors.items())
    return f"{size_text(sum(vectors.values()))} = {parts}"
