from __future__ import annotations

import dataclasses
import os
import re
import runpy
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradstream as gs
from gradstream.errors import DataError
from gradstream.job.files import load_job
from gradstream.job.job import Job, make_job
from gradstream.job.registry import find_optimizer, find_strategy

LINEAR = """
import os
import numpy as np
import gradstream as gs

def init(seed):
    return {"w": np.zeros(3, np.float32), "b": np.zeros((), np.float32)}

def outputs(parameters, inputs):
    return inputs @ parameters["w"] + parameters["b"]

def gradients(parameters, inputs, targets):
    error = outputs(parameters, inputs) - targets
    return float((error**2).mean()), {
        "w": (2 * inputs.T @ error / len(error)).astype(np.float32),
        "b": np.float32(2 * error.mean()),
    }

def data():
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(400, 3)).astype(np.float32)
    targets = inputs @ np.array([1, 2, 3], np.float32) + np.float32(0.5)
    return gs.from_arrays(inputs, targets, inputs, targets)

def model():
    return gs.from_functions(init, outputs, gradients)

OPTIONS = dict(workers=2, batch_size=20, optimizer=gs.optim.SGD(lr=0.1), chunk_elems=64)
DEADLINES = gs.Deadlines(join_s=60, silence_s=10, lease_s=3, retry_s=5)

def job():
    return gs.Job(model(), data(), epochs=10, deadlines=DEADLINES, **OPTIONS)
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Writes LINEAR, followed by what the test adds, as a job file."""
    monkeypatch.chdir(tmp_path)

    def write(addition: str = "", name: str = "linear.py") -> str:
        path = tmp_path / name
        path.write_text(LINEAR + textwrap.dedent(addition))
        return str(path)

    return write


def parameters_are_right(run: gs.Run, tolerance: float = 0.05) -> None:
    np.testing.assert_allclose(run.parameters["w"], [1, 2, 3], atol=tolerance)
    np.testing.assert_allclose(run.parameters["b"], 0.5, atol=tolerance)


# ---- job files: nothing is started ------------------------------------------------------


def test_a_file_that_defines_job(write: Callable[..., str]) -> None:
    path = write()
    job = load_job(path)
    assert (job.epochs, job.spec) == (10, path)
    assert load_job(f"{path}:job").spec == f"{path}:job"


def test_a_pair_of_arrays_is_data(write: Callable[..., str]) -> None:
    module = runpy.run_path(write())
    model, data = module["model"](), module["data"]()
    options: dict[str, Any] = {"workers": 2, "steps": 3, "batch_size": 4}
    expected = gs.simulate(model, data, **options).parameters["w"]
    pair = (data.inputs, data.targets)
    for run in (
        gs.simulate(model, pair, **options),
        gs.simulate(gs.Job(model, pair, **options)),  # type: ignore[arg-type]  # as it stands in a job file
        gs.simulate(gs.Job(model, gs.from_arrays(np.zeros((9, 3))), **options), pair),
        gs.train(model, pair, processes=False, **options),
    ):
        assert np.array_equal(run.parameters["w"], expected)
    with pytest.raises(gs.errors.ConfigError, match="a pair of arrays"):
        gs.simulate(model, list(pair), **options)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="targets"):
        gs.simulate(model, (data.inputs, data.targets[:-1]), **options)


def test_what_ends_the_run_is_what_was_given_last(write: Callable[..., str]) -> None:
    job = dataclasses.replace(load_job(write()), workers=1, batch_size=100)
    assert (job.epochs, job.steps) == (10, None)
    in_steps = make_job(job, steps=3)
    assert (in_steps.epochs, in_steps.steps) == (None, 3)
    assert len(gs.simulate(job, steps=3).history) == 3
    assert len(gs.simulate(in_steps, epochs=1).history) == 4
    assert len(gs.train(in_steps, epochs=2).history) == 8
    assert make_job(job, steps=None).epochs == 10
    with pytest.raises(
        gs.errors.ConfigError, match="exactly one of epochs and steps, got epochs=1 and steps=3"
    ):
        gs.simulate(job, epochs=1, steps=3)


@pytest.mark.parametrize("guard", ["True", "__name__ == '__main__'"])
def test_a_script_that_calls_train_is_read_up_to_there(write: Callable[..., str], guard: str) -> None:
    path = write(f"""
        del job
        if {guard}:
            run = gs.train(model(), data(), steps=7, **OPTIONS)
            raise SystemError("never reached")
    """)
    before = sys.modules["__main__"]
    job = load_job(path)
    assert (job.steps, job.spec) == (7, path)
    assert sys.modules["__main__"] is before


def test_a_module_and_a_function(write: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(name="a_module_of_mine.py")
    monkeypatch.syspath_prepend(str(Path(path).parent))
    assert load_job("a_module_of_mine:job").spec == "a_module_of_mine:job"


@pytest.mark.parametrize(
    ("spec", "part"),
    [
        ("nowhere.py", "no such file"),
        ("nowhere_at_all:job", "nowhere_at_all"),
        ("linear", "module:function"),
        ("linear.py:jib", "'jib' (did you mean 'job'?)"),
        ("linear.py:dictionary", "returned dict; expected a gradstream.Job"),
        ("empty.py", "found none of them"),
    ],
)
def test_a_spec_that_names_no_job(write: Callable[..., str], spec: str, part: str) -> None:
    write("def dictionary(): return {}")
    write("del job", name="empty.py")
    with pytest.raises(gs.errors.ConfigError, match=re.escape(part)):
        load_job(spec)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"workers": 0}, "workers=0: expected at least 1"),
        ({"servers": 0}, "servers=0"),
        ({"workers": 401}, "401"),
        ({"workers": 2.5}, "whole number"),
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": [1, 2, 3]}, "3 entries for 2 workers"),
        ({"epochs": 0}, "epochs=0"),
        ({"epochs": 3, "steps": 3}, "exactly one of epochs and steps"),
        ({"epochs": None}, "got neither"),
        ({"chunk_elems": 100}, "multiple of 64"),
        ({"seed": -1}, "seed=-1"),
        ({"strategy": "downpoor"}, "did you mean 'downpour'"),
        ({"strategy": "downpour", "strategy_options": {"push_evry": 2}}, "did you mean 'push_every'"),
        ({"strategy": "downpour", "strategy_options": {"push_every": 0}}, "push_every"),
        ({"strategy": "missing.py:Mine"}, "no such file"),
        ({"optimizer": "addam"}, "did you mean 'adam'"),
        ({"optimizer": "adam", "deadlines": gs.Deadlines(join_s=0)}, "deadlines.join_s"),
        ({"worker": 3}, "did you mean 'workers'"),
        ({"run_dir": "/proc/nowhere"}, "/proc/nowhere cannot be made"),
    ],
)
def test_what_is_wrong_with_a_job_is_said_before_anything_starts(
    write: Callable[..., str], options: dict[str, Any], part: str
) -> None:
    job = load_job(write())
    with pytest.raises(gs.errors.ConfigError, match=re.escape(part)):
        gs.train(job, **options)
    assert not Path("runs").exists()


def test_a_session_without_a_script_is_told_to_make_one(write: Callable[..., str]) -> None:
    job = load_job(write())
    with pytest.raises(gs.errors.ConfigError, match="put the job into a file"):
        gs.train(
            job.model, job.data, epochs=1, processes=True
        )  # of a test runner: `python -m pytest`, or no .py at all


def test_strategies_and_optimizers_are_found_by_name_place_and_object(write: Callable[..., str]) -> None:
    path = write("""
        class Mine(gs.Synchronous):
            pass
    """)
    assert find_strategy("Downpour", {"push_every": 3}) == gs.Downpour(push_every=3)
    assert find_strategy(gs.Downpour(), {"fetch_every": 2}).fetch_every == 2  # type: ignore[attr-defined]
    mine = find_strategy(f"{path}:Mine")
    assert type(mine).__name__ == "Mine"
    assert find_optimizer("sgd", {"lr": 0.5}) == gs.optim.SGD(lr=0.5)
    with pytest.raises(gs.errors.ConfigError, match="did you mean 'Mine'"):
        find_strategy(f"{path}:Mime")
    with pytest.raises(gs.errors.ConfigError, match="lr"):
        find_optimizer("sgd")


# ---- whole runs -------------------------------------------------------------------------


def test_a_run_leaves_a_directory_that_says_what_it_was(write: Callable[..., str]) -> None:
    events: list[Mapping[str, Any]] = []
    run = gs.train(load_job(write()), on_event=events.append, servers=2, run_dir=Path("kept"))
    parameters_are_right(run)
    assert run.path == Path("kept").resolve()
    assert run.evaluate().loss == pytest.approx(0, abs=0.01)
    assert [event["event"] for event in run.events] == [event["event"] for event in events]
    assert run.summary["samples_accounted"] == 4000
    config = (run.path / "config.toml").read_text()
    assert "servers = 2  # argument" in config
    assert "epochs = 10  # linear.py" in config
    assert "seed = 0  # default" in config
    assert run.info["node_environment"]["OMP_NUM_THREADS"]
    assert run.info["node_environment"]["OMP_WAIT_POLICY"]  # there are shards beside the workers
    assert run.info.keys() >= {"argv", "git_commit", "machine", "versions"}
    assert set(os.listdir("kept")) == {
        ".launcher", ".lock", "checkpoints", "code.zip", "config.toml", "events.jsonl", "logs", "nodes.json", "run.json"
    }  # fmt: skip
    with pytest.raises(gs.errors.ConfigError, match="not an empty directory"):
        gs.train(load_job("linear.py"), run_dir=Path("kept"))


def test_a_run_says_nothing_of_its_machine_if_asked_not_to(write: Callable[..., str]) -> None:
    run = gs.train(load_job(write()), record_machine=False, epochs=1, run_dir=Path("kept"))
    assert run.info.keys() == {"name", "id", "began_unix_s", "nodes", "carriers"}


@pytest.mark.cold  # the folder in which gradstream was imported decides where runs are
def test_a_script_that_trains_twice_with_a_strategy_of_its_own(write: Callable[..., str]) -> None:
    path = write("""
        import dataclasses

        @dataclasses.dataclass(frozen=True)
        class Mine(gs.Downpour):
            note: str = "default"

        def main():
            first = gs.train(model(), data(), epochs=1, strategy="downpour", name="first", **OPTIONS)
            mine = Mine(overlap=False, note=str(len(first.parameters)))
            second = gs.train(model(), data(), epochs=10, strategy=mine, name="second", **OPTIONS)
            print("second:", second.parameters["w"].round(1), second.path.name)

        del job
        if __name__ == "__main__":
            main()
    """)
    source = str(Path(gs.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, path],
        env={**os.environ, "PYTHONPATH": source},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("second: [1. 2. 3.]")
    assert len(os.listdir("runs")) == 2


def test_a_strategy_of_a_file_runs_in_processes(write: Callable[..., str]) -> None:
    Path("own").mkdir()
    Path("own/mine.py").write_text(
        "import dataclasses, gradstream\n"
        "@dataclasses.dataclass(frozen=True)\n"
        "class Mine(gradstream.Synchronous):\n"
        "    note: str = 'none'\n"
    )
    run = gs.train(load_job(write()), strategy="own/mine.py:Mine", strategy_options={"note": "seen"})
    parameters_are_right(run)
    assert run.path is not None
    assert 'note = "seen"  # argument' in (run.path / "config.toml").read_text()
    assert run.summary["strategy"] == "mine"


FAULTS = {
    "raises": (
        "raise LookupError('a fault of mine')",
        gs.errors.UserCodeError,
        ["worker-", "a fault of mine"],
        "raise LookupError('a fault of mine')",
    ),
    "shape": (
        "return {'w': np.zeros(4, np.float32), 'b': np.float32(0)}",
        gs.errors.GradientError,
        ["'w'", "(4,)"],
        "",
    ),
    "dtype": (
        "return {'w': np.zeros(3), 'b': np.float32(0)}",
        gs.errors.GradientError,
        ["'w'", "float64"],
        "",
    ),
    "nan": (
        "return {'w': np.full(3, np.nan, np.float32), 'b': np.float32(0)}",
        gs.errors.GradientError,
        ["worker-", "NaN"],
        "",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_users_functions_ends_the_run_with_its_own_traceback(
    write: Callable[..., str], fault: str
) -> None:
    code, kind, parts, trace = FAULTS[fault]
    path = write(f"""
        good, calls = gradients, []

        def gradients(parameters, inputs, targets):
            calls.append(1)
            if len(calls) > 3:
                {code}
            return good(parameters, inputs, targets)
    """)
    with pytest.raises(kind) as caught:
        gs.train(load_job(path))
    for part in parts:
        assert part in str(caught.value)
    assert trace in caught.value.traceback_text
    (failed,) = (e for e in gs.Run.load(next(Path("runs").iterdir())).events if e["event"] == "failed")
    assert failed["culprit"].startswith("worker-")


def test_workers_with_different_models_are_refused(write: Callable[..., str]) -> None:
    path = write("""
        def init(seed):  # one process gets there first
            try:
                os.close(os.open("first", os.O_CREAT | os.O_EXCL))
                return {"w": np.zeros(3, np.float32), "b": np.zeros((), np.float32)}
            except FileExistsError:
                return {"w": np.zeros(4, np.float32), "b": np.zeros((), np.float32)}

        def job():
            make = lambda: gs.from_functions(init, outputs, gradients)
            return gs.Job(make, data(), epochs=1, deadlines=DEADLINES, **(OPTIONS | {"servers": 1}))
    """)
    with pytest.raises(gs.errors.RefusedError, match="BAD_FINGERPRINT") as caught:
        gs.train(load_job(path))
    assert "worker-0" in str(caught.value)
    assert "worker-1" in str(caught.value)
    assert "nodes have built different models" in "".join(caught.value.__notes__)


def killer(victim: str, at_step: int = 3) -> Callable[[Mapping[str, Any]], None]:
    """Kills a node once worker 0 has made some steps."""

    def on_event(event: Mapping[str, Any]) -> None:
        if event["event"] == "step" and event["step"] == at_step and event["rank"] == 0:
            (run_dir,) = Path("runs").iterdir()
            log = (run_dir / "logs" / f"{victim}.log").read_text()
            found = re.search(r"pid (\d+)", log)
            assert found
            os.kill(int(found[1]), signal.SIGKILL)

    return on_event


@pytest.mark.parametrize(
    ("victim", "strategy"),
    [("worker-1", gs.AllReduce(sharded=True)), ("shard-0", "downpour")],
)
def test_a_node_that_cannot_be_spared_ends_the_run_naming_it(
    write: Callable[..., str], victim: str, strategy: Any
) -> None:
    job = load_job(write())
    with pytest.raises(gs.errors.PeerLostError) as caught:
        gs.train(job, strategy=strategy, epochs=None, steps=20_000, on_event=killer(victim))
    assert caught.value.peer == victim
    told = "\n".join([str(caught.value), *caught.value.__notes__])
    assert told.count("was killed by signal 9 (kill -9, or Linux where memory runs out") == 1
    (run_dir,) = Path("runs").iterdir()
    assert gs.Run.load(run_dir).summary["failed"]["culprit"] == victim


def test_a_coordinator_that_dies_as_it_writes_leaves_events_that_can_be_read(
    write: Callable[..., str],
) -> None:
    """Another one follows it, and the line that it had begun is passed over."""
    kill, torn = killer("coordinator"), b'{"event":"step","node":"wor'
    killed = False

    def on_event(event: Mapping[str, Any]) -> None:
        nonlocal killed
        if event["event"] == "step" and not killed:
            killed = True
            events = next(Path("runs").iterdir()) / "events.jsonl"
            kill({**event, "step": 3, "rank": 0})
            with open(events, "ab") as file:
                file.write(torn)

    run = gs.train(load_job(write()), strategy="downpour", epochs=60, on_event=on_event)
    assert killed
    assert run.summary["failed"] is None
    assert run.summary["samples_accounted"] == 60 * 400


def test_downpour_goes_on_without_a_worker_and_accounts_for_every_sample(write: Callable[..., str]) -> None:
    job = load_job(write())
    run = gs.train(job, strategy="downpour", epochs=60, on_event=killer("worker-1"))
    assert run.summary["workers_lost"] == ["worker-1"]
    assert run.summary["samples_accounted"] == 60 * 400
    assert run.summary["samples_reassigned"] > 0
    parameters_are_right(run)


def test_job_is_a_record() -> None:
    assert Job.__dataclass_params__.frozen  # type: ignore[attr-defined]
