"""Jobs that no other process could find: all nodes as threads of this process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import gradstream as gs

CELL = """
import numpy as np
import gradstream as gs

def init(seed):
    return {"w": np.zeros(3)}

def outputs(parameters, inputs):
    return inputs @ parameters["w"]

def gradients(parameters, inputs, targets):
    return {"w": 2 / len(inputs) * inputs.T @ (outputs(parameters, inputs) - targets)}

inputs = np.random.default_rng(0).standard_normal((200, 3)).astype("float32")
data = gs.from_arrays(inputs, inputs @ np.float32([2, -1, 0.5]))
model = gs.from_functions(init, outputs, gradients)
OPTIONS = dict(optimizer=gs.optim.SGD(lr=0.2), workers=2, batch_size=25, epochs=5)
"""


@pytest.fixture
def cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The names of a notebook that has run `CELL`: its `__main__` has no file."""
    monkeypatch.chdir(tmp_path)
    main = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    exec(CELL, vars(main))
    before = threading.active_count()
    yield vars(main)
    # gRPC keeps one thread for the rest of the process.
    assert threading.active_count() <= max(before, 2) + 1


def test_a_cell_trains_as_threads_and_is_told_so(cell: dict[str, Any]) -> None:
    interval_s = sys.getswitchinterval()
    with pytest.warns(UserWarning, match=r"run as threads of this process.*job file scales better"):
        exec("run = gs.train(model, data, **OPTIONS)\nother = gs.simulate(model, data, **OPTIONS)", cell)
    run: gs.Run = cell["run"]
    # Threads, processes and simulation are the same nodes: in rounds, the same bits.
    assert run.parameters["w"].tobytes() == cell["other"].parameters["w"].tobytes()
    assert run.info["nodes"] == "threads"
    assert run.path is not None
    assert run.path.name.endswith("-session")
    assert run.summary["samples_accounted"] == 1000
    assert sys.getswitchinterval() == interval_s


def test_threads_on_purpose_say_nothing(cell: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = gs.train(cell["model"], cell["data"], processes=False, strategy="downpour", **cell["OPTIONS"])
    assert run.summary["samples_accounted"] == 1000
    assert run.summary["strategy"] == "downpour"
    with pytest.raises(gs.errors.ConfigError, match="put the job into a file"):
        gs.train(cell["model"], cell["data"], processes=True, **cell["OPTIONS"])


def test_seeds_mean_what_they_mean_in_processes(cell: dict[str, Any]) -> None:
    """torch's generator belongs to the process: two workers must not disturb each other's draws."""
    model = gs.from_torch(
        lambda: nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1), nn.Flatten(0)),
        nn.functional.mse_loss,
    )
    before = torch.random.get_rng_state()
    runs = [
        gs.train(model, cell["data"], processes=False, **cell["OPTIONS"]),
        gs.simulate(model, cell["data"], **cell["OPTIONS"]),
    ]
    assert torch.equal(before, torch.random.get_rng_state())
    for name, array in runs[0].parameters.items():
        assert array.tobytes() == runs[1].parameters[name].tobytes(), name


def test_a_users_exception_keeps_its_traceback(cell: dict[str, Any]) -> None:
    code = (
        "def gradients(parameters, inputs, targets):\n"
        "    raise LookupError('a fault of mine')\n"
        "model = gs.from_functions(init, outputs, gradients)\n"
        "gs.train(model, data, processes=False, **OPTIONS)"
    )
    with pytest.raises(gs.errors.UserCodeError, match="a fault of mine") as caught:
        exec(compile(code, "<cell 2>", "exec"), cell)
    assert 'File "<cell 2>", line 2, in gradients' in caught.value.traceback_text


def test_a_strategy_of_the_cells_own(cell: dict[str, Any]) -> None:
    exec("class Mine(gs.Downpour):\n    pass", cell)
    exec("run = gs.train(model, data, strategy=Mine(), processes=False, **OPTIONS)", cell)
    assert cell["run"].summary["strategy"] == "mine"
    assert "# class: defined in the job file" in (cell["run"].path / "config.toml").read_text()


def test_a_job_function_of_a_module_is_found_by_processes(
    cell: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("my_library.py").write_text(f"{CELL}\ndef job():\n    return gs.Job(model, data, **OPTIONS)\n")
    monkeypatch.syspath_prepend(str(Path.cwd()))
    exec("import my_library\nrun = gs.train(my_library.job)", cell)
    assert cell["run"].info["nodes"] == "processes"
    exec("def job():\n    return gs.Job(model, data, **OPTIONS)\nrun = gs.simulate(job, epochs=1)", cell)
    assert cell["run"].summary["samples_accounted"] == 200
    with pytest.raises(gs.errors.ConfigError, match=r"<lambda>\(\) returned int; expected a gradstream.Job"):
        gs.train(lambda: 3)  # type: ignore[arg-type]


@contextmanager
def piped(code: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """`python -`, with CELL and this code coming in through stdin. Nothing is left of it."""
    source = str(Path(gs.__file__).parents[1])
    process = subprocess.Popen(
        [sys.executable, "-u", "-"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": source},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    process.stdin.write(CELL + code)
    process.stdin.close()
    process.stdin = None
    try:
        yield process
    finally:
        process.kill()


def test_ctrl_c_ends_a_script_that_is_piped_in(tmp_path: Path) -> None:
    code = (
        "first = gs.train(model, data, **OPTIONS)\n"
        "print(first.parameters['w'].round(1), flush=True)\n"
        "def on_event(event):\n"
        "    if event['event'] == 'step' and event['step'] == 5: print('going', flush=True)\n"
        "gs.train(model, data, on_event=on_event, **(OPTIONS | {'epochs': 100_000}))\n"
    )
    with piped(code, tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "[ 2.  -1.   0.5]\n"
        assert process.stdout.readline() == "going\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=100)
    assert process.returncode == 75, errors
    assert "the run was stopped; it resumes from checkpoints/step-" in errors
    assert "UserWarning: train() was not called from a script" in errors
