"""`Run`: the result of `train()` and `simulate()`, also read back from a run directory."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypedDict

import numpy as np
import torch
from safetensors import SafetensorError

from gradstream.checkpoint import newest, verify
from gradstream.checkpoint.folder import FOLDER
from gradstream.checkpoint.format import load_file, save
from gradstream.data.base import Dataset
from gradstream.errors import ConfigError, DataError
from gradstream.job.code import changed, kept_code, users_code
from gradstream.job.job import Job, build_model
from gradstream.job.metrics import Metric
from gradstream.model.base import Model
from gradstream.model.buffers import with_buffers
from gradstream.report.lanes import trace_json
from gradstream.report.page import PageSource, page, run_html
from gradstream.report.staleness import By, Staleness, staleness_by
from gradstream.report.story import Status, status_of
from gradstream.report.straggler import straggler_text
from gradstream.report.summary import evaluations_of, history_of, summary_of
from gradstream.run.files import HOSTS, read_config, read_record
from gradstream.run.launcher_lock import holder_of
from gradstream.run.launches import checked
from gradstream.run.node_spec import NodeSpec
from gradstream.run.planning import metrics_of
from gradstream.runtime.storage import DiskStorage
from gradstream.telemetry.event_lines import read_events
from gradstream.telemetry.events import EventDict
from gradstream.untrusted import TEXT_BYTES, MismatchError, check_record, escaped
from gradstream.untrusted.text import check_name
from gradstream.worker.evaluation import Evaluation, evaluate
from gradstream.worker.final_model import BEST_MODEL

# ---- result ------------------------------------------------------------------------------

MAX_UNIX_S = 1e11

FINAL_MODEL = Path("checkpoints/final/model.safetensors")
"""Where a run directory holds the trained parameters, under the user's own names."""

Arrays = Mapping[str, np.ndarray[Any, Any]]


@dataclass(frozen=True, repr=False)
class Run:
    """A run that has ended: its parameters, its history, its figures.

    Args:
        path: the run directory; None if nothing was written.
        parameters: trained parameters under the user's own names, in the model's order, followed by its buffers;
            empty after a shape-only simulation.
        events: every event of the run, as in `events.jsonl`.
        info: contents of `run.json`: versions, machine, environment.
        model: the model with which `evaluate` computes outputs.
        data: the data set whose held-out samples `evaluate` takes by default.
        metrics: further metrics of `evaluate`, by name.
        recording: files of a recorded simulation, by name, for `gradstream.ext.replay.replay`.
        job: the job of a recorded simulation.

    Example:
        >>> run = gs.simulate(model, data, strategy="synchronous", workers=2, batch_size=8, epochs=2)
        >>> sorted(run.parameters)
        ['bias', 'weight']
        >>> len(run.history)
        16
    """

    path: Path | None = None
    parameters: Arrays = field(default_factory=dict)
    events: Sequence[EventDict] = ()
    info: Mapping[str, Any] = field(default_factory=dict)
    model: Model | None = None
    data: Dataset | None = None
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    recording: Mapping[str, bytes] = field(default_factory=dict)
    job: Any = None

    @cached_property
    def history(self) -> list[dict[str, Any]]:
        """One row per minibatch: step, epoch, rank, samples, loss, lr, time_s, ... (see `history_of`)."""
        return history_of(self.events)

    @cached_property
    def evaluations(self) -> list[dict[str, Any]]:
        """One row per evaluation during training (`evaluate_every`): step, epoch, samples, accuracy, loss, ..."""
        return evaluations_of(self.events)

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The run in figures (see `summary_of` for the keys)."""
        return summary_of(self.events)

    def staleness(self, by: By = "link") -> Staleness:
        """How stale gradients were: a table, chunks counted by τ.

        Args:
            by: "link" has a row for each pair of worker and shard; "worker", "shard" and "run" sum over the rest.

        Returns:
            Rows of worker, shard, chunks, mean, p50, p99, largest, histogram; none if workers exchange in
            a group. If they share a vector in memory, τ and rows count minibatches.
        """
        return staleness_by(self.events, by)

    @classmethod
    def load(cls, path: str | Path, *, model: Model | None = None, data: Dataset | None = None) -> Run:
        """Reads a run directory, even of a run that failed or is still going on.

        Args:
            path: the run directory.
            model, data: the model and the data for `evaluate`; a run directory does not hold them.

        Raises:
            ConfigError: this is not a run directory, or a file in it cannot be read.
        """
        path = Path(path)
        if not (path / "run.json").is_file():
            raise ConfigError(f"{path} is not a run directory: it has no run.json")
        info, final = read_record(path / "run.json"), path / FINAL_MODEL
        try:
            check_info(info)
            parameters = load_file(final) if final.is_file() else {}
        except (OSError, ValueError, SafetensorError) as error:
            raise ConfigError(
                f"{final} cannot be read: {error}; put it back from a copy, or remove it and resume the run"
            ) from error
        events = read_events(path / "events.jsonl")
        return cls(path=path, parameters=parameters, events=events, info=info, model=model, data=data)

    def save_parameters(self, path: str | Path) -> None:
        """Writes the parameters as one safetensors file, readable without gradstream."""
        Path(path).write_bytes(save(self.parameters))

    def evaluate(self, data: Dataset | None = None, *, batch_size: int = 256) -> Evaluation:
        """Evaluates the model on every held-out sample of `data`, by default of the data on which it was trained.

        Integer targets mean classification, with one output per class along the last axis; other targets
        mean regression. The result also holds the run's metrics.

        Raises:
            ConfigError: the run has no model, no data or no parameters, or `data` has no held-out samples.
            UserCodeError: the model, the data set or a metric raised.
        """
        data = data or self.data
        if self.model is None or data is None:
            raise ConfigError(
                "evaluate: this run was loaded without its model or data; pass both: "
                "Run.load(path, model=…, data=…)"
            )
        if not data.num_test_samples:
            raise ConfigError(
                f"evaluate: the data set {data.name!r} has no held-out samples; pass one that has some: "
                "evaluate(data=…), or gradstream evaluate --data"
            )
        if not self.parameters:
            raise ConfigError(
                f"evaluate: {self.path or 'this run'} has no final parameters: it has failed, was stopped, or goes on. "
                "Its newest checkpoint: gradstream evaluate RUN; or end it first: gradstream resume RUN"
            )
        flat = flatten(self.model, self.parameters)
        with with_buffers(self.model, self.parameters):  # for this call only: the model may be trained again
            return evaluate(self.model, flat, data, self.metrics, batch_size=batch_size)

    def report(self, path: str | Path, *, price: float | None = None) -> Path:
        """Writes the run as one HTML file, which needs no network, and returns its path.

        Args:
            path: the file; an existing one is overwritten.
            price: price of a machine per hour, in any currency; the report then shows the cost of the run.
        """
        source = PageSource(
            events=self.events,
            title=self.path.resolve().name if self.path else "run",
            config=read_config(self.path / "config.toml") if self.path else "",
            info=self.info,
            price=price,
        )
        return _written(Path(path), page(source))

    def trace(self, path: str | Path) -> Path:
        """Writes the run as a Chrome trace (for ui.perfetto.dev), and returns its path."""
        return _written(Path(path), trace_json(self.events))

    def __repr__(self) -> str:
        """A short table of the most important figures."""
        lines = [f"  {name:<10} {escaped(str(value), TEXT_BYTES)}" for name, value in self._rows()]
        return "\n".join(["Run", *lines])

    def _repr_html_(self) -> str:
        """The same in a notebook, with the loss curve."""
        return run_html(self._rows(), self.events)

    def _rows(self) -> list[tuple[str, str]]:
        figures = self.summary
        stale = self.staleness("run")
        rows = [
            ("path", self.path),
            ("strategy", figures["strategy"]),
            ("parameters", figures["num_parameters"]),
            ("steps", figures["steps"]),
            ("samples/s", figures["samples_per_s"]),
            ("train_s", figures["train_s"]),
            ("loss", figures["loss"]),
            ("accuracy", figures["accuracy"]),
            ("held out", figures["held_out_loss"]),
            ("staleness", stale[0] if stale and stale[0].largest else None),
            ("slow worker", straggler_text(figures["straggler"]) or None),
            ("failed", figures["failed"] and figures["failed"]["message"]),
        ]
        return [(key, _short(value)) for key, value in rows if value is not None]


@dataclass(frozen=True)
class _Machine:
    cores: int | None = None


@dataclass(frozen=True)
class _Info:
    """The entries of `run.json` that gradstream reads."""

    name: str | None = None
    id: str | None = None
    began_unix_s: float | None = None
    nodes: str | None = None
    simulated: bool = False
    machine: _Machine | None = None


def check_info(info: Any) -> None:
    """Raises ValueError if an entry of `run.json` that gradstream reads has a wrong type."""
    if not isinstance(info, dict):
        raise MismatchError("run.json is no JSON object")
    seen = {name: value for name, value in info.items() if name in _Info.__annotations__}
    if isinstance(seen.get("machine"), dict):
        seen["machine"] = {"cores": seen["machine"].get("cores")}
    check_record(_Info, seen, "run.json: ")
    if not abs(seen.get("began_unix_s") or 0.0) < MAX_UNIX_S:
        raise MismatchError("run.json: began_unix_s is no date")


def flatten(model: Model, parameters: Arrays) -> torch.Tensor:
    """The flat vector (E,) that holds `parameters` in the places of the model's layout.

    Raises:
        ConfigError: a tensor of the model is missing, or has a wrong number of elements.
    """
    flat = torch.empty(model.layout.elems, dtype=model.layout.dtype)
    for name, view in model.layout.views(flat):
        array = parameters.get(name)
        if array is None or array.size != view.numel():
            got = "nothing" if array is None else f"shape {array.shape}"
            raise ConfigError(
                f"parameters[{name!r}]: got {got}, expected shape {tuple(view.shape)}; "
                "is this the model that the run trained?"
            )
        view.copy_(torch.from_numpy(np.array(array)).view(view.shape))
    return flat


def _short(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _written(path: Path, text: str) -> Path:
    """Writes a file as UTF-8, whatever the locale. Replaces a link at its place, not the file that it leads to."""
    if path.exists() and not path.is_file():  # /dev/stdout
        path.write_text(text, encoding="utf-8")
        return path
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    return path


# ---- reopen ------------------------------------------------------------------------------
# Opens a run directory again: the job that made it, and the parameters that it kept.


def reopen(path: Path, *, checkpoint: str | None = None, data: Dataset | None = None) -> tuple[Run, Path]:
    """The run with its model and data, ready for `evaluate`, and the file of its parameters.

    Args:
        path: a run directory; the run may have failed, if it kept a checkpoint.
        checkpoint: "final", "best", or the name of a checkpoint: "step-00000120". None takes the final
            parameters, or else the newest checkpoint.
        data: a data set that replaces the job's.

    Raises:
        ConfigError: this is not a run directory, its job cannot be read again, or there are no parameters.
    """
    run = Run.load(path)
    file = kept_parameters(path, checkpoint)
    try:
        parameters = load_file(file)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from error
    job = job_of_run(path)
    for edited in changed(kept_code(path), users_code(job.spec)):
        text = escaped(str(edited), TEXT_BYTES)
        warnings.warn(f"{text} was edited after {path} had begun, and is used as it is now", stacklevel=2)
    if job.device != "cpu":  # it may have been trained on another machine
        job = dataclasses.replace(job, device="auto")
    return dataclasses.replace(
        run, parameters=parameters, model=build_model(job), data=data or job.data, metrics=metrics_of(job)
    ), file


def job_of_run(path: Path) -> Job:
    """The job of a run directory, read again from its file. Raises ConfigError if that cannot be."""
    return spec_of_run(path).load_again()


def spec_of_run(path: Path) -> NodeSpec:
    """The description of a run's plan, to be executed. Raises ConfigError as `described` and `checked`."""
    return checked(path, described(path))


def described(path: Path) -> NodeSpec:
    """The description of a run's plan, only to be read. Raises ConfigError if there is none of this version."""
    try:
        spec = NodeSpec.read(path / "nodes.json")
    except FileNotFoundError:
        if (path / HOSTS).is_file():
            raise ConfigError(
                f"{path}: this run goes on on other machines: gradstream status, attach and stop take it"
            ) from None
        raise ConfigError(f"{path} is not the directory of a run: it has no nodes.json") from None
    check_name(spec.id, f"{path / 'nodes.json'}: the run's id")
    return spec


def kept_parameters(path: Path, checkpoint: str | None = None) -> Path:
    """The file of a run's final parameters, or of a checkpoint, which is verified first.

    If the newest checkpoint was torn or altered, the one before is taken, with a warning.

    Args:
        path, checkpoint: see `reopen`.

    Raises:
        ConfigError: there is no checkpoint, or none of this name.
        DataError: the checkpoint of this name was torn or altered, or all of them were.
    """
    storage = DiskStorage(path)
    if checkpoint is None and (path / FINAL_MODEL).is_file():
        return path / FINAL_MODEL
    if checkpoint is None:
        _check_unfinished(path)
        damaged: list[DataError] = []
        newest_good = newest(storage, damaged.append)
        if newest_good is None and damaged:
            named = "".join(f"\n  {error}" for error in damaged)
            raise DataError(f"{path} has no parameters: all of its checkpoints are damaged:{named}")
        for error in damaged:
            warnings.warn(f"{escaped(str(error), TEXT_BYTES)}; the one before is used", stacklevel=2)
        if newest_good is None and not (path / "run.json").is_file():
            raise ConfigError(f"{path} is not a run directory: it has no run.json")
        if newest_good is None:
            raise ConfigError(
                f"{path} has no parameters: the run did not finish, and it has no checkpoint; run the job again, with "
                "checkpoint_every= to keep checkpoints"
            )
        return path / newest_good[0] / FINAL_MODEL.name
    there = {kept.parent.name: kept for kept in sorted((path / FOLDER).glob("[!.]*/model.safetensors"))}
    name = checkpoint.rstrip("/").rpartition("/")[2]
    if name not in there:
        raise ConfigError(
            f"{path / FOLDER} has no checkpoint {checkpoint!r}; it has: {', '.join(there) or 'none'}"
        )
    if there[name] not in (path / FINAL_MODEL, path / BEST_MODEL):
        verify(storage, f"{FOLDER}/{name}")
    return there[name]


def _check_unfinished(path: Path) -> None:
    """Raises ConfigError if the run has finished: its final parameters are missing, and any checkpoint is older."""
    if status_of(read_events(path / "events.jsonl")) == "finished":
        older = sorted(folder.name for folder in (path / FOLDER).glob("step-*"))
        raise ConfigError(
            f"{path / FINAL_MODEL} is missing, or no file, and the run has finished: put it back from a copy"
            + (f", or name a checkpoint, which is older: {', '.join(older)}" if older else "")
        )


# ---- listing -----------------------------------------------------------------------------
# Lists the runs of a folder with their most important figures.


class RunEntry(TypedDict):
    """A run in a list of runs. A figure is None if the events of the run do not contain it.

    An unfinished run is "running" while it has a launcher, or nodes that wait for one, on this machine;
    otherwise it is "unfinished". `damaged` is "", or a message that names a damaged file of the run and the remedy.
    """

    path: Path
    status: Status | Literal["damaged", "running"]
    strategy: str | None
    accuracy: float | None
    loss: float | None
    samples_per_s: float | None
    train_s: float | None
    damaged: str


def list_runs(folder: Path) -> list[RunEntry]:
    """Every run directory in `folder`, sorted by name; default names begin with the time.

    Raises:
        ConfigError: there is no such folder.
    """
    if not folder.is_dir():
        raise ConfigError(
            f"{folder}: no such folder; expected a folder of runs. By default, a run is kept in runs/ of the folder "
            "in which it was started"
        )
    folders = sorted(path.parent for path in folder.glob("*/run.json"))
    return [_entry(path) for path in folders]


def _entry(path: Path) -> RunEntry:
    events: Sequence[EventDict] = ()
    damaged = ""
    try:
        read_record(path / "run.json")
        events = read_events(path / "events.jsonl")
    except ConfigError as error:
        damaged = str(error)
    figures: dict[str, Any] = summary_of(events)
    accuracy = [event["accuracy"] for event in events if event["event"] == "evaluated"]
    return RunEntry(
        path=path,
        status="damaged" if damaged else _status(path, events),
        strategy=figures["strategy"],
        accuracy=accuracy[-1] if accuracy else None,
        loss=figures["loss"],
        samples_per_s=figures["samples_per_s"],
        train_s=figures["train_s"],
        damaged=damaged,
    )


def _status(path: Path, events: Sequence[EventDict]) -> Status | Literal["running"]:
    status = status_of(events)
    if status != "unfinished":
        return status
    try:
        lives = holder_of(path) is not None
    except (ConfigError, OSError):  # another user's run
        lives = False
    return "running" if lives else status
