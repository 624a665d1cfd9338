"""`gradstream train --dry-run`: a few minibatches for real, before hours are spent.

Everything that a run needs is tried once, cheapest first: the configuration, the model, memory
and disk by estimate, then real processes that push, fetch and are stopped with a checkpoint in a
temporary run directory, which is verified and evaluated. The first check that fails is the last one.
"""

from __future__ import annotations

import dataclasses
import secrets
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from gradstream.cluster import LocalCluster, node_environment
from gradstream.config import Job, build_model, cast_of, is_script, metrics_of
from gradstream.data.base import Dataset, Ids
from gradstream.errors import ConfigError, Interrupted, PreflightError, UserCodeError
from gradstream.model.base import Model
from gradstream.model.batch import Batch
from gradstream.reopen import kept_parameters
from gradstream.roles import Cast
from gradstream.run import Run
from gradstream.runtime.resources import free_disk_bytes, free_memory_bytes
from gradstream.runtime.world import World
from gradstream.simulate import simulate
from gradstream.summary import EventDict
from gradstream.train import launch

__all__ = ["Finding", "dry_run", "estimate", "samples_per_s"]

STEPS = 1
"""Minibatches of each worker before the run is asked to stop. This one warms up, and is not measured; by the
time that the run stops, each has at least begun the next."""

TEST_SAMPLES = 64
"""How many held-out samples are looked at."""

PROCESS_BYTES = 200_000_000
"""Python, torch and gRPC in each process, beside its vectors."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check has found.

    Args:
        name: of the check.
        ok: whether it is fine.
        detail: figures, or what is wrong.
        seconds: how long it took.
        trace: the user's own traceback, where their code failed.
    """

    name: str
    ok: bool
    detail: str
    seconds: float = 0.0
    trace: str = ""


def dry_run(job: Job) -> list[Finding]:
    """Checks a job by running a little of it. Leaves nothing behind, whatever comes of it.

    Returns:
        What was found, in order; only the last can be a failure.

    Raises:
        ConfigError: the job is a script with a training loop of its own.
    """
    if is_script(job):
        raise ConfigError(
            "a script with a training loop of its own cannot be run a little: let its loop make fewer steps"
        )
    findings = []
    with tempfile.TemporaryDirectory(prefix="gradstream-") as folder, ExitStack() as stack:
        trial = _Trial(job, Path(folder) / "run", stack)
        for name, check in trial.checks.items():
            begun_s = time.perf_counter()
            try:
                detail = check()
                findings.append(Finding(name, True, detail, time.perf_counter() - begun_s))
            except Exception as error:
                seconds = time.perf_counter() - begun_s
                known = isinstance(error, UserCodeError) or not hasattr(error, "exit_status")
                trace = getattr(error, "traceback_text", "") or (traceback.format_exc() if known else "")
                text = str(error) if hasattr(error, "exit_status") else f"{type(error).__name__}: {error}"
                findings.append(Finding(name, False, text, seconds, trace))
                break
    return findings


class _Trial:
    """The checks of one job. Each returns its figures, or raises what is wrong.

    Args:
        job: to look at.
        run_dir: to be made, and thrown away.
        stack: closes the processes.
    """

    def __init__(self, job: Job, run_dir: Path, stack: ExitStack) -> None:
        self._job = job
        self._run_dir = run_dir
        self._stack = stack
        self._cluster: LocalCluster | None = None
        self.checks = {
            "configuration": self._configuration,
            "model": self._look_at_model,
            "data": self._data,
            "memory": self._memory,
            "disk": self._disk,
            "processes": self._processes,
            "checkpoint": self._checkpoint,
            "evaluation": self._evaluation,
            "time per epoch": self._time,
        }

    @cached_property
    def _cast(self) -> Cast:
        return cast_of(self._job, "dry-run")

    @cached_property
    def _model(self) -> Model:
        return build_model(self._job)

    @cached_property
    def _run(self) -> Run:
        """Some minibatches on real processes, up to a checkpoint."""
        steps: Counter[int] = Counter()
        seen: Counter[str] = Counter()

        def on_event(event: EventDict) -> None:
            if event["event"] == "step":
                steps[event["rank"]] += 1
            elif event["event"] == "exchange":  # told every second or so
                seen.update(pushes=event["pushes"], fetches=event["fetches"])

        def enough() -> bool:
            everyone = len(steps) == self._job.workers and min(steps.values()) >= STEPS
            return everyone and seen["pushes"] > 0 and seen["fetches"] > 0

        job = dataclasses.replace(_quiet(self._job, self._model), run_dir=self._run_dir, name="dry-run")
        self._run_dir.mkdir(exist_ok=True)
        try:
            return launch(
                job,
                cast_of(job, secrets.token_hex(8)),
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

    @cached_property
    def _kept(self) -> Path:
        """The parameters that it has left, verified."""
        return kept_parameters(self._run_dir)

    def _configuration(self) -> str:
        cast = self._cast
        if self._job.spec is not None:  # it loads torch while the next checks are made
            environment = node_environment(self._job.workers)
            self._cluster = self._stack.enter_context(LocalCluster(self._run_dir / "logs", environment))
        names = f"{type(cast.strategy).__name__.lower()}, {type(cast.optimizer).__name__}"
        return f"{names}, {_count(cast.workers, 'worker')}, {_count(cast.servers, 'server')}"

    def _look_at_model(self) -> str:
        layout = self._model.layout
        tensors = _count(len(layout.slots), "tensor")
        return f"{layout.elems:,} parameters in {tensors}, {_size(self._vector_bytes)}"

    def _data(self) -> str:
        data = self._job.data
        count = "an unknown number of" if data.num_samples is None else f"{data.num_samples:,}"
        return f"{data.name}: {count} samples, {data.num_test_samples:,} held out"

    def _memory(self) -> str:
        need, num_processes = estimate(self._job, self._model), len(self._cast.node_names)
        total = sum(sum(vectors.values()) for vectors in need.values()) + num_processes * PROCESS_BYTES
        parts = [f"{role}: {_formula(vectors)}" for role, vectors in _by_role(need).items()]
        text = (
            f"{_size(total)} = {num_processes} processes of {_size(PROCESS_BYTES)} and their vectors "
            f"({'; '.join(parts)}), without what a gradient needs on its way"
        )
        free = free_memory_bytes()
        if free is None:
            return f"{text}; this system does not say what is free"
        if total > free:
            raise PreflightError(f"{_size(free)} free, too little: {text}. Fewer workers, or a smaller model")
        return f"{_size(free)} free; {text}"

    def _disk(self) -> str:
        folder = Path(self._job.run_dir or "runs").resolve()
        states = len(self._cast.optimizer.state_names)
        kept = self._job.keep_last + 1  # the next one is there before the oldest goes
        vector, free = self._vector_bytes, free_disk_bytes(folder)
        need = (1 + kept * (1 + states)) * vector
        text = (
            f"{_size(free)} free; {_size(need)} = {_size(vector)} for the final parameters + "
            f"{kept} checkpoints of {_size((1 + states) * vector)}"
        )
        if need > free:
            raise PreflightError(f"{folder}: too little: {text}")
        return text

    def _processes(self) -> str:
        figures = self._run.summary
        counts = f"{figures['steps']} minibatches, {figures['pushes']} pushes, {figures['fetches']} fetches"
        if not (figures["steps"] and figures["pushes"] and figures["fetches"]):
            raise PreflightError(f"{counts}: expected some of each")
        loss = "" if figures["loss"] is None else f", loss {figures['loss']:.4g}"
        peaks = [f"{role} {_size(size)}" for role, size in _by_role(figures["peak_own_bytes"]).items()]
        return f"{counts}{loss}; peak of own memory: {', '.join(peaks)}"

    def _checkpoint(self) -> str:
        failed = [event for event in self._run.events if event["event"] == "checkpoint_failed"]
        if failed:
            raise PreflightError(f"none could be made: {failed[-1]['who']}: {failed[-1]['message']}")
        file = self._kept
        size = sum(one.stat().st_size for one in file.parent.iterdir())
        if file.parent.name == "final":
            return f"the run was over before it could be stopped; {_size(size)} of final parameters"
        return f"{_count(len(list(file.parent.iterdir())), 'file')}, {_size(size)}, verified"

    def _evaluation(self) -> str:
        data = self._job.data
        if not data.num_test_samples:
            return "no samples are held out"
        parameters = load_file(self._kept)
        run = Run(parameters=parameters, model=self._model, data=data, metrics=metrics_of(self._job))
        found = run.evaluate(_Few(data, TEST_SAMPLES))
        what = f"accuracy {found.accuracy:.1%}" if found.accuracy is not None else f"error {found.loss:.4g}"
        return f"{what} of {found.num_samples:,} held-out samples"

    def _time(self) -> str:
        steps = [event for event in self._run.events if event["event"] == "step"]
        rate = samples_per_s(steps)
        if rate is None:
            return "too little data to say"
        count, after = self._job.data.num_samples, sum(event["step"] > 0 for event in steps)
        pace = f"{rate:,.0f} samples/s over the {_count(after, 'minibatch', 'es')} after each worker's first"
        return pace if count is None else f"{_duration(count / rate)}: {pace}"

    @property
    def _vector_bytes(self) -> int:
        return self._model.layout.elems * self._model.layout.dtype.itemsize


def _quiet(job: Job, model: Model) -> Job:
    """A job that nobody else is told of, and that does nothing on the way."""
    return dataclasses.replace(job, model=model, evaluate_every=None, checkpoint_every=None, callbacks=())


def estimate(job: Job, model: Model) -> dict[str, dict[str, int]]:
    """Bytes of the vectors of each node, by name: what the nodes themselves ask for, phantom.

    In a phantom world the real nodes run with memory that has sizes and no elements.
    """
    little = dataclasses.replace(_quiet(job, model), epochs=None, steps=STEPS)
    run = simulate(little, world=World(phantom=True))
    return {
        event["node"]: dict(event["vectors_bytes"])
        for event in run.events
        if event["event"] == "memory" and event["vectors_bytes"]
    }


def samples_per_s(events: Sequence[EventDict]) -> float | None:
    """The rate of all workers, each from the end of its first minibatch to the end of its last."""
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


class _Few:
    """Some held-out samples of a data set, evenly from first to last: they may be sorted."""

    def __init__(self, data: Dataset, num_samples: int) -> None:
        self._data = data
        self.name = data.name
        self.num_samples = data.num_samples
        self.num_test_samples = min(num_samples, data.num_test_samples)

    def batch(self, ids: Ids) -> Batch:
        return self._data.batch(ids)

    def test_batch(self, ids: Ids) -> Batch:
        return self._data.test_batch(ids * (self._data.num_test_samples // self.num_test_samples))


def _by_role(by_node: Mapping[str, Any]) -> dict[str, Any]:
    """What the first node of each role has; of shards that is the largest."""
    roles: dict[str, Any] = {}
    for node in sorted(by_node):
        roles.setdefault(node.partition("-")[0], by_node[node])
    return roles


def _formula(vectors: Mapping[str, int]) -> str:
    parts = " + ".join(f"{name} {_size(size)}" for name, size in vectors.items())
    return f"{_size(sum(vectors.values()))} = {parts}"


def _count(number: int, what: str, many: str = "s") -> str:
    return f"{number} {what}" + ("" if number == 1 else many)


def _size(size: float) -> str:
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.2g} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
