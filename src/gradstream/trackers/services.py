"""Callbacks for wandb, MLflow and trackio, with the same curves as TensorBoard's.

Each is a callback (`gradstream.job.callbacks`). The launching process calls it on its own thread with a bounded queue,
so that no tracker can stop or slow down a run. Environment variables and files of the package set the server, the
project and the key. The steps of its curves are samples of all workers.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from gradstream.errors import ConfigError, UnknownNameError
from gradstream.telemetry.events import EventDict
from gradstream.trackers.tensorboard import Scalars, TensorBoard

if TYPE_CHECKING:
    from gradstream.run.result import Run

PROJECT = "gradstream"
HEAD = ("event", "node", "time_s")
SUMMARY = ("steps", "samples", "train_s", "samples_per_s", "loss", "accuracy", "held_out_loss")


class Points(NamedTuple):
    """Values by tag, after `samples` of all workers."""

    values: Mapping[str, float]
    samples: int


class _Tracker(ABC):
    """Turns the events of a run into calls of a tracker's package; each subclass is for one package."""

    package = ""

    def __init__(self) -> None:
        self._scalars = Scalars()

    def condense(self, method: str, event: EventDict) -> list[tuple[str, Any]]:
        """Turns an event into points before they are queued, few enough for a tracker behind a slow network."""
        if method == "on_start":
            return [(method, {key: value for key, value in event.items() if key not in HEAD})]
        return [("on_points", points) for points in self._points(event)]

    def on_start(self, info: Mapping[str, Any]) -> None:
        """Begins a run in the tracker."""
        self._open(importlib.import_module(self.package), dict(info))

    @abstractmethod
    def on_points(self, points: Points) -> None:
        """Sends values."""

    def on_end(self, run: Run) -> None:
        """Sends the rest, and the figures of the whole run."""
        for event in run.events:
            if event["event"] in ("finished", "failed"):
                for points in self._points(event):
                    self.on_points(points)
        figures = {key: run.summary[key] for key in SUMMARY if run.summary[key] is not None}
        self._close(figures, failed=run.summary["failed"] is not None)

    def _points(self, event: EventDict) -> list[Points]:
        points = sorted(self._scalars.update(event), key=lambda point: point.samples)
        by_samples = itertools.groupby(points, lambda point: point.samples)
        return [Points({point.tag: point.value for point in group}, samples) for samples, group in by_samples]

    @abstractmethod
    def _open(self, module: Any, info: dict[str, Any]) -> None: ...

    @abstractmethod
    def _close(self, figures: Mapping[str, float], *, failed: bool) -> None: ...


class Wandb(_Tracker):
    """Weights & Biases. Its files are in the run directory; WANDB_PROJECT names the project."""

    package = "wandb"

    def _open(self, module: Any, info: dict[str, Any]) -> None:
        project = os.environ.get("WANDB_PROJECT", PROJECT)
        settings = {"console": "off"}  # otherwise it records the output of this process as that of training
        self._run = module.init(
            project=project, name=info["name"], dir=info["run_dir"], config=info, settings=settings
        )
        self._run.define_metric("samples")
        self._run.define_metric("*", step_metric="samples")

    def on_points(self, points: Points) -> None:
        """Sends values."""
        # `step=` may only grow, but an evaluation may come after later samples.
        self._run.log({**points.values, "samples": points.samples})

    def _close(self, figures: Mapping[str, float], *, failed: bool) -> None:
        self._run.summary.update(dict(figures))
        self._run.finish(exit_code=int(failed))


class MLflow(_Tracker):
    """MLflow at MLFLOW_TRACKING_URI; MLFLOW_EXPERIMENT_NAME names the experiment."""

    package = "mlflow"

    def _open(self, module: Any, info: dict[str, Any]) -> None:
        self._module = module
        module.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT))
        module.start_run(run_name=info["name"])
        module.log_params(info)

    def on_points(self, points: Points) -> None:
        """Sends values."""
        self._module.log_metrics(dict(points.values), step=points.samples)

    def _close(self, figures: Mapping[str, float], *, failed: bool) -> None:
        self._module.log_metrics({f"summary/{key}": float(value) for key, value in figures.items()})
        self._module.end_run("FAILED" if failed else "FINISHED")


class Trackio(_Tracker):
    """trackio, in its own folder, or at TRACKIO_SPACE_ID; TRACKIO_PROJECT names the project."""

    package = "trackio"

    def _open(self, module: Any, info: dict[str, Any]) -> None:
        project = os.environ.get("TRACKIO_PROJECT", PROJECT)
        self._run = module.init(project=project, name=info["name"], config=info)

    def on_points(self, points: Points) -> None:
        """Sends values."""
        self._run.log(dict(points.values), step=points.samples)

    def _close(self, figures: Mapping[str, float], *, failed: bool) -> None:
        self._run.log({f"summary/{key}": value for key, value in figures.items()} | {"failed": int(failed)})
        self._run.finish()


_TRACKERS: Mapping[str, Callable[[], Any]] = {
    "tensorboard": TensorBoard,
    **{tracker.package: tracker for tracker in (Wandb, MLflow, Trackio)},
}


def check_trackers(names: Sequence[str]) -> None:
    """Raises ConfigError for an unknown name, or a package that is not installed."""
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise ConfigError(f"trackers={names!r}: expected a list of names: {', '.join(_TRACKERS)}")
    for name in names:
        if name not in _TRACKERS:
            raise UnknownNameError("tracker", name, list(_TRACKERS))
        if _TRACKERS[name] is not TensorBoard and importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"trackers: {name} is not installed on the machine that starts the run: "
                f"pip install 'gradstream[{name}]'"
            )


def trackers_of(names: Sequence[str]) -> list[Any]:
    """A callback for each name. Raises as `check_trackers`."""
    check_trackers(names)
    return [_TRACKERS[name]() for name in dict.fromkeys(names)]
