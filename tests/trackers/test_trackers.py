"""Trackers get a run's curves; without their package nothing starts, and none of them can break a run."""

from __future__ import annotations

import importlib.util
import math
import sqlite3
import sys
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import gradstream as gs
from gradstream.cli.options import load_job_with
from gradstream.errors import ConfigError, UnknownNameError
from gradstream.job.callbacks import QUEUE_EVENTS, Callbacks
from gradstream.job.overrides import overrides, with_overrides
from gradstream.run.result import Run
from gradstream.testing.runs import least_squares
from gradstream.trackers.services import trackers_of

NAMES = ("wandb", "mlflow", "trackio")
STARTED = {"event": "started", "node": "coordinator", "time_s": 0.0, "strategy": "downpour", "workers": 2}
FINISHED = {"event": "finished", "node": "coordinator", "time_s": 9.0, "samples": 4, "train_s": 1.0}


def step(number: int, time_s: float, loss: float | None = 0.5) -> dict[str, Any]:
    record = {"event": "step", "node": "worker-0", "time_s": time_s, "rank": 0, "step": number, "epoch": 0}
    return {**record, "samples": 4, "loss": loss, "compute_s": 0.1, "wait_s": 0.0}


def logged(time_s: float, **values: float | None) -> dict[str, Any]:
    record = {"event": "log", "node": "worker-0", "time_s": time_s, "rank": 0, "step": 1}
    return {**record, "values": values, "dropped": 0}


def evaluated(time_s: float, samples: int, accuracy: float) -> dict[str, Any]:
    record = {"event": "evaluated", "node": "worker-0", "time_s": time_s, "samples": samples, "step": 1}
    told = {"epoch": 0, "held_out": 4, "final": False, "metrics": {}}
    return {**record, "accuracy": accuracy, "loss": None, **told}


class Recorded(ModuleType):
    """Stands in for each of the three packages: notes all calls."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.calls: list[tuple[str, Any]] = []
        self.__spec__ = importlib.util.spec_from_loader(name, None)
        run = SimpleNamespace(
            log=self._noted("log"),
            define_metric=self._noted("define_metric"),
            finish=self._noted("finish"),
            summary=SimpleNamespace(update=self._noted("summary")),
        )

        def init(**given: Any) -> Any:
            self.calls.append(("init", given))
            return run

        self.init = init
        for call in ("set_experiment", "start_run", "log_params", "log_metrics", "end_run"):
            setattr(self, call, self._noted(call))

    def _noted(self, call: str) -> Callable[..., None]:
        def note(*args: Any, **options: Any) -> None:
            self.calls.append((call, (*args, options) if options else args))

        return note

    def values(self) -> list[tuple[Mapping[str, float], int]]:
        """What was sent on the way, with its samples."""
        found: list[tuple[Mapping[str, float], int]] = []
        for call, given in self.calls:
            if call in ("log", "log_metrics"):
                values = dict(given[0])
                steps = given[1]["step"] if len(given) > 1 else values.pop("samples", None)
                found.append((values, steps))
        return found


@pytest.fixture
def package(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Recorded:
    made = Recorded(request.param)
    monkeypatch.setitem(sys.modules, request.param, made)
    return made


def told(names: list[str], *events: Mapping[str, Any]) -> list[str]:
    """Tells trackers of a run, and returns what was complained of."""
    said: list[str] = []
    callbacks = Callbacks(trackers_of(names), {"name": "mine", "run_dir": "."}, complain=said.append)
    for event in events:
        callbacks.tell(event)
    callbacks.end(lambda: Run(events=events))
    return said


@pytest.mark.parametrize("package", NAMES, indirect=True)
def test_a_tracker_gets_the_curves_of_a_run(package: Recorded) -> None:
    events = [STARTED, step(0, 1.0, 0.5), step(1, 1.1, 1.5), logged(1.1, lr=0.25, worst=None)]
    events += [step(2, 1.3, 1.0), evaluated(1.4, 8, 0.75), step(3, 1.5, 3.0), FINISHED]
    assert told([package.__name__], *events) == []
    first = package.calls[0 if package.__name__ != "mlflow" else 1][1]
    assert (first if isinstance(first, dict) else first[-1]).get("name", "mine") == "mine"
    assert "'strategy': 'downpour'" in str(package.calls[:3])
    values = package.values()
    by_tag = {tag: (value, samples) for sent, samples in values for tag, value in sent.items()}
    assert by_tag["accuracy/val"] == (0.75, 8)
    assert by_tag["log/lr"] == (0.25, 12)
    assert math.isnan(by_tag["log/worst"][0])
    assert by_tag["loss/train"] == (3.0, 16)  # the rest, once the run is over
    assert package.calls[-1][0] in ("finish", "end_run")


@pytest.mark.parametrize("package", NAMES, indirect=True)
def test_it_hears_that_a_run_has_failed(package: Recorded) -> None:
    failed = {"event": "failed", "node": "coordinator", "time_s": 2.0, "culprit": "worker-0"}
    assert told([package.__name__], STARTED, {**failed, "error": "E", "message": "m", "traceback": ""}) == []
    said: dict[str, Any] = {"wandb": ("finish", ({"exit_code": 1},)), "mlflow": ("end_run", ("FAILED",))}
    assert package.calls[-1] == (said | {"trackio": ("finish", ())})[package.__name__]
    assert package.__name__ != "trackio" or package.calls[-2][1][0]["failed"] == 1


@pytest.mark.parametrize("package", NAMES, indirect=True)
def test_one_that_raises_is_said_and_left_out(package: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**_: Any) -> None:
        raise OSError("no network")

    for call in ("init", "start_run"):
        monkeypatch.setattr(package, call, broken)
    (said,) = told([package.__name__], STARTED, step(0, 1.0), step(1, 2.0), FINISHED)
    assert "is not called any more; the run goes on" in said
    assert "OSError: no network" in said


@pytest.mark.parametrize("package", ["wandb"], indirect=True)
def test_points_queue_not_steps_so_a_slow_tracker_keeps_up(package: Recorded) -> None:
    steps = [step(number, 1.0 + number / 4096) for number in range(4 * QUEUE_EVENTS)]
    assert told(["wandb"], STARTED, *steps, FINISHED) == []  # with a queue of them it would depend on luck
    assert package.values()[-1][1] == 4 * len(steps)
    assert len(package.values()) < 30


def test_without_its_package_nothing_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in NAMES else find(name))
    run_dir = tmp_path / "run"
    with pytest.raises(ConfigError, match=r"wandb is not installed .*: pip install 'gradstream\[wandb\]'"):
        gs.train(*problem(), trackers=["wandb"], run_dir=run_dir, processes=False, steps=1)
    assert not run_dir.exists()


def problem() -> tuple[Any, Any]:
    model, data = least_squares(40, 3, whole=False)
    return model, gs.from_arrays(data.inputs, data.targets)


@pytest.mark.parametrize("names", ["wandb", 3])
def test_names_come_as_a_list(names: Any) -> None:
    with pytest.raises(ConfigError, match="expected a list of names"):
        trackers_of(names)


def test_an_unknown_name_gets_the_nearest_one() -> None:
    with pytest.raises(UnknownNameError, match="wandb"):
        trackers_of(["wandv"])


JOB = """
import gradstream as gs
from gradstream.testing.runs import least_squares

def job():
    model, data = least_squares(40, 3, whole=False)
    return gs.Job(model, gs.from_arrays(data.inputs, data.targets), steps=2)
"""


def test_the_command_line_names_them(tmp_path: Path) -> None:
    path = tmp_path / "net.py"
    path.write_text(JOB)
    job = load_job_with(str(path), tracker=("tensorboard", "wandb"))
    assert job.trackers == ["tensorboard", "wandb"]
    assert with_overrides(load_job_with(str(path), tracker=()), overrides(job)).trackers == job.trackers
    assert load_job_with(str(path), settings=["trackers=mlflow"]).trackers == ["mlflow"]


@pytest.mark.parametrize("package", ["wandb"], indirect=True)
def test_a_real_run_is_tracked_by_all_of_them(package: Recorded, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    names = ["wandb", "tensorboard"]
    run = gs.train(*problem(), trackers=names, run_dir=run_dir, processes=False, workers=2, steps=3)
    assert package.calls[0][1]["dir"] == str(run_dir)
    assert package.values()[-1][1] == run.summary["samples"]
    assert list((run_dir / "tensorboard").glob("events.out.tfevents.*"))


# ---- the packages themselves, where they are installed; none of them needs a network here ----------

EVENTS = (STARTED, step(0, 1.0), logged(1.1, worst=None), step(1, 1.5), evaluated(1.6, 4, 0.5), FINISHED)


def test_wandb_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert told(["wandb"], *EVENTS) == []
    wandb.teardown()  # its own process writes the file
    (kept,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert b"accuracy/val" in kept.read_bytes()


def test_mlflow_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "kept").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    assert told(["mlflow"], *EVENTS) == []
    (kept,) = tmp_path.glob("kept/*/*/metrics/accuracy/val")
    assert kept.read_text().split()[1:] == ["0.5", "4"]


def test_trackio_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    pytest.importorskip("trackio", reason="trackio is not installed")
    assert told(["trackio"], *EVENTS) == []
    (kept,) = tmp_path.glob("*.db")
    with closing(sqlite3.connect(kept)) as database:
        rows = database.execute("select step, metrics from metrics").fetchall()
    assert any(number == 4 and "accuracy/val" in str(metrics) for number, metrics in rows)
