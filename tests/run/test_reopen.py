"""A run directory opened again: `gradstream evaluate`."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from safetensors.numpy import save

import gradstream as gs
from gradstream.checkpoint.manifest import FileEntry, Manifest
from gradstream.cli import main
from gradstream.data.base import DataProgress
from gradstream.job.files import load_job
from gradstream.run.result import kept_parameters

JOB = """
import numpy as np
import gradstream as gs

inputs = np.random.default_rng(0).standard_normal((200, 3)).astype("float32")
targets = inputs @ np.float32([2, -1, 0.5])
data = gs.from_arrays(inputs, targets, inputs[:50], targets[:50])
model = gs.from_functions(
    lambda seed: {"w": np.zeros(3)},
    lambda p, x: x @ p["w"],
    lambda p, x, y: {"w": 2 / len(x) * x.T @ (x @ p["w"] - y)},
)

def worst(outputs, targets):
    return float(abs(np.asarray(outputs) - np.asarray(targets)).max())

def job():
    return gs.Job(model, data, optimizer=gs.optim.SGD(lr=0.2), epochs=1, metrics={"worst": worst})

def zeros():
    return gs.from_arrays(inputs, inputs[:, 0], inputs[:8], np.zeros(8, "float32"))
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that has finished, beside its job file."""
    folder = tmp_path_factory.mktemp("reopen")
    (folder / "mine.py").write_text(JOB)
    job = load_job(str(folder / "mine.py"))
    run = gs.train(job, processes=False, workers=1, run_dir=folder / "run")
    assert run.path is not None
    return run.path


@pytest.fixture
def run(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, for one test."""
    monkeypatch.chdir(finished.parent)
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


def evaluate(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["evaluate", *map(str, arguments)])


def loss_of(*arguments: str | Path) -> float:
    result = evaluate(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return float(json.loads(result.stdout)["evaluation"]["loss"])


def keep(run: Path, name: str, w: list[float]) -> None:
    """A checkpoint with these parameters."""
    folder = run / "checkpoints" / name
    folder.mkdir()
    data = save({"w": np.array(w, "float32")})
    (folder / "model.safetensors").write_bytes(data)
    manifest = Manifest(
        step=int(name.removeprefix("step-").removeprefix(".step-").partition(".")[0]),
        rounds=1,
        steps={},
        done=DataProgress(),
        versions=[1],
        model={},
        optimizer="sgd",
        strategy="synchronous",
        seed=0,
        workers=1,
        servers=1,
        num_samples=200,
        software="0",
        files={"model.safetensors": FileEntry(len(data), hashlib.sha256(data).hexdigest())},
    )
    (folder / "state.json").write_bytes(manifest.encode())


def test_a_finished_run(run: Path) -> None:
    result = evaluate(run)
    assert result.exit_code == 0, result.output
    assert "mean square, 50 samples" in result.stdout
    assert f"parameters  {run}/checkpoints/final/model.safetensors\n" in result.stdout
    assert "test worst" in result.stdout
    assert loss_of(run) < 0.1


def unfinished(run: Path) -> None:
    """Makes it a run that has not finished."""
    shutil.rmtree(run / "checkpoints/final")
    events = (run / "events.jsonl").read_text().splitlines(keepends=True)
    (run / "events.jsonl").write_text("".join(one for one in events if '"event":"finished"' not in one))


def test_a_checkpoint_by_name_and_other_data(run: Path) -> None:
    keep(run, "step-00000004", [2, -1, 0.5])
    assert loss_of(run, "--checkpoint", "step-00000004") < 1e-9
    assert loss_of(run, "--checkpoint", "final") > 1e-6
    assert (
        json.loads(evaluate(run, "--data", "mine.py:zeros", "--json").stdout)["evaluation"]["num_samples"]
        == 8
    )


def test_a_run_that_did_not_finish_has_its_newest_checkpoint(run: Path) -> None:
    unfinished(run)
    result = evaluate(run)
    assert result.exit_code == 2
    assert "did not finish, and it has no checkpoint" in result.stderr
    for name in ("step-00000009", "step-00000010", "step-00000010.1", ".step-00000011.x.tmp"):
        keep(run, name, [0, 0, 0])
    assert kept_parameters(run).parent.name == "step-00000010.1"
    result = evaluate(run, "--checkpoint", "step-00000011")
    assert result.exit_code == 2
    assert "has: step-00000009, step-00000010, step-00000010.1\n" in result.stderr


def test_an_altered_checkpoint_is_not_used(run: Path) -> None:
    unfinished(run)
    for name in ("step-00000001", "step-00000002"):
        keep(run, name, [0, 0, 0])
    file = run / "checkpoints/step-00000002/model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.warns(UserWarning, match=r"step-00000002/model.safetensors was altered.*one before is used"):
        assert kept_parameters(run).parent.name == "step-00000001"
    result = evaluate(run, "--checkpoint", "step-00000002")
    assert result.exit_code == 1
    assert "was altered" in result.stderr


def test_what_is_no_run_directory(tmp_path: Path, run: Path) -> None:
    assert "not a run directory" in evaluate(tmp_path).stderr
    record = json.loads((run / "nodes.json").read_text())
    (run / "nodes.json").write_text(json.dumps(record | {"job": ""}))
    assert "was not in a file" in evaluate(run).stderr
    (run / "nodes.json").write_text(json.dumps(record | {"from": "tomorrow"}))
    assert "another version of gradstream" in evaluate(run).stderr
    (run / "checkpoints/final/model.safetensors").write_bytes(b"torn")
    assert "cannot be read" in evaluate(run).stderr
