"""The commands, with `train` and `simulate` replaced."""

from __future__ import annotations

import dataclasses
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner, Result
from rich.console import Console

import gradstream as gs
from gradstream.cli import main
from gradstream.cli.report import evaluation_rows, figures, show
from gradstream.errors import (
    EXIT_CODES,
    ConfigError,
    DeadlineError,
    GradientError,
    PeerLostError,
    PreflightError,
    RefusedError,
    UserCodeError,
)
from gradstream.optim import SGD, Adagrad, Adam
from gradstream.report.progress_line import Display
from gradstream.report.summary import summary_of
from gradstream.run.failures import evaluate
from gradstream.run.result import Run, list_runs
from gradstream.runtime.simulation import LogNormal, SimulationConfig
from gradstream.untrusted import say
from gradstream.worker.evaluation import Evaluation

MODEL = gs.from_functions(lambda seed: np.zeros(1), lambda p, x: x * p, lambda p, x, y: p)
DATA = gs.from_arrays(np.zeros((8, 1)), np.zeros((8, 1)))


def a_job(**changes: Any) -> gs.Job:
    """What the job file gives."""
    options: dict[str, Any] = {"epochs": 3, "strategy_options": {"overlap": True}, **changes}
    return gs.Job(MODEL, DATA, **options)


def without_origins(job: gs.Job) -> gs.Job:
    return dataclasses.replace(job, origins={})


FINISHED = {"event": "finished", "node": "coordinator", "time_s": 2.0, "samples": 10, "train_s": 2.0}


class Recorder:
    """Stands for `train` and `simulate`: keeps what it was given, returns or raises what is set."""

    def __init__(self) -> None:
        self.job: Any = None
        self.config: SimulationConfig | None = None
        self.spec = ""
        self.listen: Any = None
        self.outcome: Run | BaseException = Run(events=[FINISHED])

    def load_job(self, spec: str, **_: Any) -> gs.Job:
        self.spec = spec
        return a_job()

    def __call__(
        self,
        job: Any,
        *,
        on_event: Callable[[Any], None] | None = None,
        config: SimulationConfig | None = None,
        listen: Any = None,
        detach: bool = False,
    ) -> Run:
        self.job, self.config, self.listen = job, config, listen
        assert detach == (on_event is None)
        if on_event is not None:
            on_event(FINISHED)
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr("gradstream.job.files.load_job", recorder.load_job)
    monkeypatch.setattr("gradstream._train.train", recorder)
    monkeypatch.setattr("gradstream._simulate.simulate", recorder)
    return recorder


def call(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def test_a_job_is_run_as_it_is(recorder: Recorder) -> None:
    result = call("train", "job.py")
    assert result.exit_code == 0, result.output
    assert recorder.spec == "job.py"
    assert without_origins(recorder.job) == a_job()
    assert "2.00 s" in result.stdout


def test_a_detached_run_is_named(recorder: Recorder) -> None:
    recorder.outcome = Run(path=Path("/a run"), info={"name": "mine"})
    result = call("train", "job.py", "--detach")
    assert result.exit_code == 0, result.output
    assert "mine" in result.stdout and "gradstream attach '/a run'" in result.stdout
    assert json.loads(call("train", "job.py", "--detach", "--json").stdout) == {"run_dir": "/a run"}


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
    result = call("train", "job.py", *options, "--steps", "7", "--run-dir", "here", "--noise-scale")
    assert result.exit_code == 0, result.output
    assert without_origins(recorder.job) == a_job(
        strategy="downpour",
        strategy_options={},
        workers=4,
        servers=3,
        batch_size=8,
        epochs=None,
        steps=7,
        seed=5,
        run_dir=Path.cwd() / "here",
        noise_scale=True,
    )


def test_epochs_and_steps_together_are_left_to_the_job_to_refuse(recorder: Recorder) -> None:
    call("train", "job.py", "--steps", "7", "--epochs", "2")
    assert (recorder.job.steps, recorder.job.epochs) == (7, 2)
    call("train", "job.py", "--steps", "7")
    assert (recorder.job.steps, recorder.job.epochs) == (7, None)


def test_learning_rate_of_the_strategys_own_optimizer(recorder: Recorder) -> None:
    call("train", "job.py", "--lr", "0.5", "--strategy", "downpour")
    assert recorder.job.optimizer == Adagrad(lr=0.5, initial_accumulator=0.01)


def test_learning_rate_of_a_given_optimizer(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    call("train", "job.py", "--optimizer", "adam", "--lr", "0.5")
    assert recorder.job.optimizer == Adam(lr=0.5)
    job = a_job(optimizer=SGD(lr=0.1, momentum=0.9))
    monkeypatch.setattr("gradstream.job.files.load_job", lambda spec, **_: job)
    call("train", "job.py", "--lr", "0.5")
    assert recorder.job.optimizer == SGD(lr=0.5, momentum=0.9)


def test_an_unknown_optimizer_says_the_nearest(recorder: Recorder) -> None:
    result = call("train", "job.py", "--optimizer", "adm", "--lr", "1")
    assert result.exit_code == 2
    assert "did you mean 'adam'?" in result.stderr


def test_fields_of_the_strategy_are_set(recorder: Recorder) -> None:
    options = ["--strategy", "downpour", "--set", "overlap=false", "--set", "strategy.push_every=10"]
    call("train", "job.py", *options)
    assert recorder.job.strategy_options == {"overlap": False, "push_every": 10}
    result = call("train", "job.py", "--set", "overlap")
    assert result.exit_code == 2
    assert "expected key=value" in result.stderr


def test_layers_of_settings(recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("gradstream.toml").write_text("workers = 3\nservers = 3\nseed = 3\n")
    monkeypatch.setenv("GRADSTREAM_SERVERS", "4")
    monkeypatch.setenv("GRADSTREAM_SEED", "4")
    call("train", "job.py", "--seed", "5")
    job = recorder.job
    assert (job.epochs, job.workers, job.servers, job.seed) == (3, 3, 4, 5)
    assert job.origins == {
        "workers": "gradstream.toml:1",
        "servers": "GRADSTREAM_SERVERS",
        "seed": "--seed",
    }
    Path("other.toml").write_text("workers = 2")
    call("train", "job.py", "--config", "other.toml")
    assert recorder.job.workers == 2
    result = call("train", "job.py", "--config", "missing.toml")
    assert result.exit_code == 2


def test_config_show_prints_what_config_takes(recorder: Recorder, tmp_path: Path) -> None:
    result = call("config", "show", "job.py", "--strategy", "downpour", "--lr", "0.5")
    assert result.exit_code == 0, result.output
    assert 'class = "gradstream.strategies.downpour:Downpour"  # --strategy' in result.stdout
    assert "lr = 0.5  # --lr" in result.stdout
    assert "initial_accumulator = 0.01  # default of Downpour" in result.stdout
    kept = tmp_path / "config.toml"
    kept.write_text(result.stdout)
    again = call("config", "show", "job.py", "--config", str(kept))
    values = [[line.partition("#")[0] for line in text.stdout.splitlines()] for text in (result, again)]
    assert values[0] == values[1]
    line = 1 + result.stdout.splitlines().index("lr = 0.5  # --lr")
    assert f"lr = 0.5  # config.toml:{line}" in again.stdout
    entries = json.loads(call("config", "show", "job.py", "--json", "--workers", "4").stdout)
    assert {"key": "workers", "value": 4, "origin": "--workers"} in entries


def test_json_is_alone_on_stdout(recorder: Recorder) -> None:
    result = call("train", "job.py", "--json")
    record = json.loads(result.stdout)
    assert record["summary"]["train_s"] == 2.0
    assert record["evaluation"] is None
    assert record["run_dir"] is None


def test_simulate_builds_a_world(recorder: Recorder) -> None:
    options = [
        "--shape-only",
        "--latency",
        "0.01",
        "--bandwidth",
        "1e8",
        "--gradient-s",
        "2",
        "--jitter",
        "0.3",
    ]
    result = call("simulate", "job.py", "--workers", "64", *options)
    assert result.exit_code == 0, result.output
    assert recorder.job.workers == 64
    config = recorder.config
    assert config is not None
    assert config.shape_only
    assert config.network.link.latency_s == 0.01
    assert config.network.bandwidth_bytes_s == 1e8
    assert config.costs["gradient"].base_s == 2.0
    assert config.costs["apply"].jitter == LogNormal(0.3)


def test_simulate_without_options_is_the_default_world(recorder: Recorder) -> None:
    call("simulate", "job.py")
    assert recorder.config == SimulationConfig()


def test_demo_runs_its_own_job(recorder: Recorder) -> None:
    result = call("demo")
    assert result.exit_code == 0, result.output
    assert recorder.spec == "gradstream.cli.demo:job"
    assert "2.00 s" in result.stdout


def test_a_users_own_traceback_comes_last(recorder: Recorder) -> None:
    trace = 'Traceback (most recent call last):\n  File "job.py", line 3, in loss\nKeyError: 1\n'
    recorder.outcome = GradientError("worker 1, step 7: your function raised KeyError: 1", trace)
    result = call("train", "job.py")
    assert result.exit_code == 1
    assert "worker 1, step 7" in result.stderr
    assert result.stderr.endswith(trace)
    assert result.stdout == ""


def test_a_traceback_of_ours_alone_is_not_shown(recorder: Recorder) -> None:
    message = "worker 1, step 7: gradient of 'w' has shape (4,), expected (3,)"
    trace = f'Traceback (most recent call last):\n  File "{gs.__file__}", line 3, in x\nGradientError: x\n'
    recorder.outcome = GradientError(message, trace)
    assert call("train", "job.py").stderr == f"error: {message}\n"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("workers: got 0"), 2),
        (PreflightError("memory: too little"), 3),
        (PeerLostError("shard-0", "gone"), 4),
        (DeadlineError("worker-1", "did not join in time"), 4),
        (RefusedError("shard-0", "BAD_FINGERPRINT", "another model"), 1),
        (UserCodeError("your function raised"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_exit_codes(recorder: Recorder, error: BaseException, code: int) -> None:
    recorder.outcome = error
    result = call("train", "job.py")
    assert result.exit_code == code
    assert str(error) in result.stderr
    assert code in EXIT_CODES


def test_help_shows_exit_codes_and_every_command_an_example() -> None:
    text = call("--help").stdout
    for code, meaning in EXIT_CODES.items():
        assert f"  {code:<4} {meaning}\n" in text
    context = click.Context(main)
    for name in main.list_commands(context):
        command = main.get_command(context, name)
        inner = command.commands if isinstance(command, click.Group) else {"": command}
        for word in inner:
            assert "Examples:\n" in call(name, *word.split(), "--help").stdout, f"gradstream {name} {word}"


def test_shell_completion() -> None:
    environment = {"_GRADSTREAM_COMPLETE": "bash_complete", "COMP_WORDS": "gradstream tr", "COMP_CWORD": "1"}
    result = CliRunner().invoke(main, [], env=environment, prog_name="gradstream")
    assert result.stdout == "plain,trace\nplain,train\n"


@pytest.mark.parametrize("terminal", [False, True])
def test_the_name_of_a_run_directory_does_nothing_to_a_terminal(terminal: bool) -> None:
    written = io.StringIO()
    console = Console(file=written, force_terminal=terminal, highlight=False, width=200, color_system=None)
    show(Run(path=Path("runs/\x1b]0;owned\x07\x1b[2J"), events=[FINISHED]), None, console)
    assert "\x1b" not in written.getvalue()
    assert "runs/\\x1b]0;owned\\x07\\x1b[2J" in written.getvalue()


def test_an_error_that_names_such_a_directory_does_nothing_either(
    recorder: Recorder, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder.outcome = KeyboardInterrupt("interrupted\nrun directory: runs/\x1b[2J")
    assert call("train", "job.py").stderr == "interrupted\nrun directory: runs/\\x1b[2J\n"
    say("runs/\x1b[2J has no checkpoint")
    assert capsys.readouterr().err == "runs/\\x1b[2J has no checkpoint\n"


def test_the_accuracy_that_training_ends_with_is_in_the_list_of_runs(tmp_path: Path) -> None:
    inputs, targets = np.random.default_rng(0).standard_normal((8, 3)), np.arange(8) % 3
    data = gs.from_arrays(inputs, targets, inputs, targets)
    model = gs.from_functions(lambda seed: np.eye(3), lambda p, x: x @ p, lambda p, x, y: 0 * p)
    made = gs.simulate(model, data, steps=2, batch_size=4)
    path = tmp_path / "mine"
    path.mkdir()
    (path / "run.json").write_text("{}")
    lines = [json.dumps(event) for event in made.events]
    (path / "events.jsonl").write_text("".join(f"{line}\n" for line in lines))
    (before,) = list_runs(tmp_path)
    assert before["accuracy"] is None
    found = evaluate(dataclasses.replace(made, path=path))
    assert found is not None
    (after,) = list_runs(tmp_path)
    assert after["accuracy"] == found.accuracy
    kept = Run.load(path)
    (row,) = kept.evaluations
    assert (row["final"], row["held_out"], row["step"]) == (True, 8, 2)
    assert kept.summary == {**made.summary, "accuracy": found.accuracy, "held_out_loss": found.loss}
    evaluate(dataclasses.replace(kept, parameters=made.parameters, model=model, data=data))  # once is enough
    assert len(Run.load(path).evaluations) == 1


def test_nothing_but_text_where_there_is_no_terminal(recorder: Recorder) -> None:
    for arguments in (["train", "job.py"], ["train", "job.py", "--json"], ["--help"]):
        result = call(*arguments)
        assert "\x1b" not in result.stdout + result.stderr
        assert result.stdout


def test_no_color_is_honoured_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    written = io.StringIO()
    show(Run(events=[FINISHED]), None, Console(file=written, force_terminal=True, highlight=False))
    with Display(Console(file=written, force_terminal=True)) as display:
        display.on_event(FINISHED)
    assert written.getvalue()
    assert not re.search(r"\x1b\[[\d;]*m", written.getvalue())


def test_an_unknown_option_is_a_usage_error(recorder: Recorder) -> None:
    result = call("train", "job.py", "--worker", "3")
    assert result.exit_code == 2
    assert "--workers" in result.stderr


def test_figures_leave_out_what_is_not_known() -> None:
    names = [name for name, _ in figures(summary_of([FINISHED]))]
    assert "in the model" in names
    assert "staleness" not in names
    assert "CPU" not in names


def test_one_is_none_of_many() -> None:
    summary = summary_of([FINISHED]) | {"strategy": "downpour", "workers": 2}
    assert dict(figures(summary | {"servers": 1}))["strategy"] == "downpour, 2 workers, 1 server"
    assert dict(figures(summary | {"servers": 0}))["strategy"] == "downpour, 2 workers, 0 servers"


def test_an_evaluation_that_could_compare_nothing_says_so() -> None:
    ((name, said),) = evaluation_rows(Evaluation(accuracy=None, loss=None, num_samples=7))
    assert (name, said.split(":")[0]) == ("test accuracy", "unknown")
    assert len(evaluation_rows(Evaluation(None, None, 7, {"mine": 1.0}))) == 1


def test_workers_without_servers_do_not_push() -> None:
    summary = summary_of([FINISHED]) | {"pushed_bytes": 6_000_000, "fetched_bytes": 6_000_000, "pushes": 60}
    assert {"pushed", "fetched"} <= set(dict(figures(summary)))
    shown = dict(figures(summary | {"servers": 0}))
    assert shown["exchanged"] == "6.0 MB of gradients in 60 sums"
    assert not {"pushed", "fetched"} & set(shown)
    assert "exchanged" not in dict(figures(summary | {"servers": 0, "pushes": 0}))  # one vector for all


def test_listening_is_told_with_the_workers_of_all_machines(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = call("train", "job.py", "--listen", "10.0.0.1:4000", "--wait", "4", "--workers", "8")
    assert result.exit_code == 0, result.output
    listening = recorder.listen
    assert (str(listening.address), listening.machines) == ("10.0.0.1:4000", 4)
    assert listening.workers_per_machine == 2
    monkeypatch.setenv("GRADSTREAM_WORKERS", "12")
    call("train", "job.py", "--listen", "10.0.0.1", "--wait", "4")
    assert recorder.listen.workers_per_machine == 3


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["train", "job.py", "--wait", "4"], "--wait needs --listen"),
        (["train", "job.py", "--insecure"], "--insecure needs --listen"),
        (["train", "job.py", "--listen", "10.0.0.1:x"], "expected host:port"),
        (["train", "job.py", "--listen", "10.0.0.1", "--wait", "3", "--workers", "4"], "do not divide"),
        (["join", "10.0.0.1:4000", "job.py"], "needs the token"),
        (["join", "10.0.0.1", "job.py", "--token", "x"], "the port is missing"),
    ],
)
def test_what_is_wrong_with_machines(recorder: Recorder, arguments: list[str], part: str) -> None:
    result = call(*arguments)
    assert result.exit_code == 2
    assert part in result.output


@pytest.mark.parametrize(
    ("text", "words", "last"),
    [
        ("", ["trian", "mine.py"], "Did you mean 'train'?"),
        ("x = 1\nopen('nowhere.npy')\n", ["train", "mine.py"], "FileNotFoundError: "),
        ("def job():\n    return undefined\n", ["train", "mine.py"], "NameError: name 'undefined'"),
        ("def job(): pass\n", ["train", "mine.py:jobb"], "did you mean 'job'?"),
        (
            "import gradstream as gs, torch\n"
            "def job(): return gs.Job(torch.nn.Linear(1, 1), gs.data.fashion_mnist(), epochs=1)\n",
            ["train", "mine.py"],
            "gradstream.from_torch(build, loss)",
        ),
    ],
)
def test_a_slip_of_the_users_is_named_in_the_last_line(
    text: str, words: list[str], last: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(text)
    result = CliRunner().invoke(main, words)
    assert result.exit_code in (1, 2)
    assert last in result.stderr.rstrip().splitlines()[-1]
    assert "registry.py" not in result.stderr  # their traceback begins in their file
    assert not Path("runs").exists()
