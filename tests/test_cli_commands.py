"""The commands, with `train` and `simulate` replaced."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner, Result

from gradstream.cli import main
from gradstream.cli.report import figures
from gradstream.errors import ConfigError, GradientError, PeerLostError
from gradstream.optim import SGD, Adagrad, Adam
from gradstream.run import Run
from gradstream.runtime.world import LogNormal, World
from gradstream.summary import summary_of


@dataclasses.dataclass(frozen=True)
class FakeJob:
    strategy: Any = "synchronous"
    strategy_options: Any = dataclasses.field(default_factory=lambda: {"overlap": True})
    optimizer: Any = None
    workers: int = 2
    servers: int = 1
    batch_size: int = 32
    epochs: int | None = 3
    steps: int | None = None
    seed: int = 0
    run_dir: Path | None = None


FINISHED = {"event": "finished", "node": "coordinator", "time_s": 2.0, "samples": 10, "train_s": 2.0}


class Recorder:
    """Stands for `train` and `simulate`: keeps what it was given, returns or raises what is set."""

    def __init__(self) -> None:
        self.job: Any = None
        self.world: World | None = None
        self.spec = ""
        self.outcome: Run | BaseException = Run(events=[FINISHED])

    def load_job(self, spec: str) -> FakeJob:
        self.spec = spec
        return FakeJob()

    def __call__(self, job: Any, *, on_event: Callable[[Any], None], world: World | None = None) -> Run:
        self.job, self.world = job, world
        on_event(FINISHED)
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    modules: dict[str, dict[str, Any]] = {
        "gradstream.jobfile": {"load_job": recorder.load_job},
        "gradstream.train": {"train": recorder},
        "gradstream.simulate": {"simulate": recorder},
    }
    for name, members in modules.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    return recorder


def call(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def test_a_job_is_run_as_it_is(recorder: Recorder) -> None:
    result = call("train", "job.py")
    assert result.exit_code == 0, result.output
    assert recorder.spec == "job.py"
    assert recorder.job == FakeJob()
    assert "2.00 s" in result.stdout


def test_options_override_fields(recorder: Recorder) -> None:
    options = [
        "--strategy",
        "downpour",
        "--workers",
        "4",
        "--servers",
        "3",
        "--batch-size",
        "8",
        "--seed",
        "5",
    ]
    result = call("train", "job.py", *options, "--steps", "7", "--run-dir", "here")
    assert result.exit_code == 0, result.output
    assert recorder.job == FakeJob(
        strategy="downpour",
        strategy_options={},
        workers=4,
        servers=3,
        batch_size=8,
        epochs=None,
        steps=7,
        seed=5,
        run_dir=Path("here"),
    )


def test_epochs_and_steps_together_are_left_to_the_job_to_refuse(recorder: Recorder) -> None:
    call("train", "job.py", "--steps", "7", "--epochs", "2")
    assert (recorder.job.steps, recorder.job.epochs) == (7, 2)


def test_learning_rate_of_the_strategys_own_optimizer(recorder: Recorder) -> None:
    call("train", "job.py", "--lr", "0.5", "--strategy", "downpour")
    assert recorder.job.optimizer == Adagrad(lr=0.5, initial_accumulator=0.01)


def test_learning_rate_of_a_given_optimizer(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    call("train", "job.py", "--optimizer", "adam", "--lr", "0.5")
    assert recorder.job.optimizer == Adam(lr=0.5)
    job = FakeJob(optimizer=SGD(lr=0.1, momentum=0.9))
    monkeypatch.setattr(sys.modules["gradstream.jobfile"], "load_job", lambda spec: job)
    call("train", "job.py", "--lr", "0.5")
    assert recorder.job.optimizer == SGD(lr=0.5, momentum=0.9)


def test_an_unknown_optimizer_says_the_nearest(recorder: Recorder) -> None:
    result = call("train", "job.py", "--optimizer", "adm", "--lr", "1")
    assert result.exit_code == 2
    assert "did you mean 'adam'?" in result.stderr


def test_fields_of_the_strategy_are_set(recorder: Recorder) -> None:
    call("train", "job.py", "--set", "overlap=false", "--set", "push_every=10", "--set", "mode=word")
    assert recorder.job.strategy_options == {"overlap": False, "push_every": 10, "mode": "word"}
    result = call("train", "job.py", "--set", "overlap")
    assert result.exit_code == 2
    assert "expected field=value" in result.stderr


def test_json_is_alone_on_stdout(recorder: Recorder) -> None:
    result = call("train", "job.py", "--json")
    record = json.loads(result.stdout)
    assert record["summary"]["train_s"] == 2.0
    assert record["evaluation"] is None
    assert record["run_dir"] is None


def test_simulate_builds_a_world(recorder: Recorder) -> None:
    options = ["--phantom", "--latency", "0.01", "--bandwidth", "1e8", "--gradient-s", "2", "--spread", "0.3"]
    result = call("simulate", "job.py", "--workers", "64", *options)
    assert result.exit_code == 0, result.output
    assert recorder.job.workers == 64
    world = recorder.world
    assert world is not None
    assert world.phantom
    assert world.network.link.latency_s == 0.01
    assert world.network.bandwidth_bytes_s == 1e8
    assert world.costs["gradient"].base_s == 2.0
    assert world.costs["apply"].spread == LogNormal(0.3)


def test_simulate_without_options_is_the_default_world(recorder: Recorder) -> None:
    call("simulate", "job.py")
    assert recorder.world == World()


def test_demo_runs_its_own_job(recorder: Recorder) -> None:
    result = call("demo")
    assert result.exit_code == 0, result.output
    assert recorder.spec == "gradstream.demo:job"
    assert "2.00 s" in result.stdout


def test_a_users_own_traceback_comes_last(recorder: Recorder) -> None:
    trace = 'Traceback (most recent call last):\n  File "job.py", line 3, in loss\nKeyError: 1\n'
    recorder.outcome = GradientError("worker 1, step 7: your function raised KeyError: 1", trace)
    result = call("train", "job.py")
    assert result.exit_code == 1
    assert "worker 1, step 7" in result.stderr
    assert result.stderr.endswith(trace)
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("error", "code"),
    [(ConfigError("workers: got 0"), 2), (PeerLostError("shard-0", "gone"), 1), (KeyboardInterrupt(), 130)],
)
def test_exit_codes(recorder: Recorder, error: BaseException, code: int) -> None:
    recorder.outcome = error
    result = call("train", "job.py")
    assert result.exit_code == code
    assert str(error) in result.stderr


def test_an_unknown_option_is_a_usage_error(recorder: Recorder) -> None:
    result = call("train", "job.py", "--worker", "3")
    assert result.exit_code == 2
    assert "--workers" in result.stderr


def test_figures_leave_out_what_is_not_known() -> None:
    names = [name for name, _ in figures(summary_of([FINISHED]))]
    assert "accounted for" in names
    assert "staleness" not in names
    assert "CPU" not in names
