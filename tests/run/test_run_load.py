"""`Run`: read back from a directory, written, evaluated."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import load_file as torch_file
from torch import nn

import gradstream as gs
from gradstream.checkpoint.format import load, load_file
from gradstream.data.base import Ids
from gradstream.errors import ConfigError
from gradstream.model.base import Batch, Layout, Reduction
from gradstream.run.result import FINAL_MODEL, Run
from gradstream.runtime.base import Report

STEP = {"event": "step", "node": "worker-0", "time_s": 1.0, "rank": 0, "step": 0, "epoch": 0, "samples": 2}
STEP |= {"loss": 0.5, "compute_s": 0.1, "wait_s": 0.0}


class Linear:
    """outputs = inputs @ w: enough of a model to be evaluated."""

    layout = Layout.of([("w", (2, 2))], torch.float32)
    reduction: Reduction = "mean"

    def init(self, seed: int, parameters: torch.Tensor) -> None:
        raise NotImplementedError

    def gradient(
        self,
        parameters: torch.Tensor,
        batch: Batch,
        gradient: torch.Tensor,
        *,
        seed: int,
        report: Report,
    ) -> float:
        raise NotImplementedError

    def outputs(self, parameters: torch.Tensor, inputs: Any) -> torch.Tensor:
        return torch.as_tensor(inputs) @ parameters.view(2, 2)

    def tree(self, parameters: torch.Tensor) -> Mapping[str, np.ndarray[Any, Any]]:
        raise NotImplementedError


@dataclass
class Held:
    """A data set that has held-out samples only."""

    inputs: np.ndarray[Any, Any]
    targets: np.ndarray[Any, Any]
    name: str = "held"
    num_samples: int = 0

    @property
    def num_test_samples(self) -> int:
        return len(self.inputs)

    @num_test_samples.setter
    def num_test_samples(self, value: int) -> None:
        raise AttributeError(value)

    def batch(self, ids: Ids) -> Batch:
        raise NotImplementedError

    def test_batch(self, ids: Ids) -> Batch:
        return Batch(self.inputs[ids], self.targets[ids], len(ids), ids)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "run.json").write_text('{"versions": {"python": "3.11"}}')
    (tmp_path / "events.jsonl").write_text(json.dumps(STEP) + "\n")
    (tmp_path / FINAL_MODEL).parent.mkdir(parents=True)
    Run(parameters={"w": np.eye(2, dtype=np.float32)}).save_parameters(tmp_path / FINAL_MODEL)
    return tmp_path


def test_a_directory_is_read_back(directory: Path) -> None:
    run = Run.load(directory)
    assert run.path == directory
    assert np.array_equal(run.parameters["w"], np.eye(2))
    assert run.history[0]["loss"] == 0.5
    assert run.info["versions"] == {"python": "3.11"}
    assert "steps      1" in repr(run)


def test_a_torn_last_line_is_left_out_and_a_torn_middle_is_passed_over_and_counted(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (directory / "events.jsonl").open("a") as file:
        file.write('{"event": "st')
    assert len(Run.load(directory).events) == 1
    with (directory / "events.jsonl").open("a") as file:
        file.write("\n")
    assert len(Run.load(directory).events) == 1
    assert "passed over 1 line that is no event" in capsys.readouterr().err


def test_a_run_without_a_final_checkpoint_has_no_parameters(directory: Path) -> None:
    (directory / FINAL_MODEL).unlink()
    assert Run.load(directory).parameters == {}


def test_what_is_no_run_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a run directory"):
        Run.load(tmp_path)


def test_a_broken_checkpoint_is_refused(directory: Path) -> None:
    (directory / FINAL_MODEL).write_bytes(b"not a checkpoint")
    with pytest.raises(ConfigError, match="cannot be read"):
        Run.load(directory)


def test_integer_targets_are_classes() -> None:
    inputs = np.array([[1, 0], [0, 1], [3, 2], [0, 1]], dtype=np.float32)
    data = Held(inputs, np.array([0, 1, 1, 1]))
    run = Run(parameters={"w": np.eye(2, dtype=np.float32)}, model=Linear(), data=data)
    found = run.evaluate(batch_size=3)
    assert (found.accuracy, found.loss, found.num_samples) == (0.75, None, 4)


def test_other_targets_are_regressed() -> None:
    inputs = np.array([[1, 0], [0, 1]], dtype=np.float32)
    data = Held(inputs, np.array([[1.0, 0.0], [0.0, 3.0]]))
    found = Run(parameters={"w": np.eye(2, dtype=np.float32)}, model=Linear()).evaluate(data)
    assert (found.accuracy, found.loss) == (None, 1.0)  # (3 - 1)² over four elements


def test_evaluate_says_what_is_missing() -> None:
    data = Held(np.zeros((1, 2), dtype=np.float32), np.zeros(1, dtype=np.int64))
    with pytest.raises(ConfigError, match="without its model"):
        Run().evaluate()
    with pytest.raises(ConfigError, match=r"has no held-out samples.*--data"):
        Run(model=Linear(), data=Held(np.zeros((0, 2)), np.zeros(0))).evaluate()
    with pytest.raises(ConfigError, match=r"has no final parameters.*gradstream evaluate RUN"):
        Run(model=Linear(), data=data).evaluate()
    with pytest.raises(ConfigError, match=r"parameters\['w'\]: got nothing, expected shape \(2, 2\)"):
        Run(model=Linear(), data=data, parameters={"v": np.zeros(1)}).evaluate()


def build() -> nn.Module:
    return nn.Sequential(
        OrderedDict(zulu=nn.Linear(3, 4), mike=nn.BatchNorm1d(4), alpha=nn.Linear(4, 2, bias=False))
    )


def test_parameters_have_the_order_of_the_model_in_every_run(directory: Path) -> None:
    x, y = np.zeros((8, 3), dtype="float32"), np.zeros((8, 2), dtype="float32")
    model, data = gs.from_torch(build, nn.functional.mse_loss), gs.from_arrays(x, y)
    run = gs.simulate(model, data, workers=2, batch_size=2, steps=2)
    parameters, buffers = dict(build().named_parameters()), dict(build().named_buffers())
    assert list(run.parameters) == [*parameters, *buffers]
    run.save_parameters(directory / FINAL_MODEL)
    loaded = Run.load(directory).parameters
    assert list(loaded) == list(run.parameters)
    build().load_state_dict(torch_file(directory / FINAL_MODEL))  # for others it is a file like any other


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}, {"order": "no JSON"}, {"order": "[[], 3]"}])
def test_a_file_that_does_not_tell_an_order_is_read_as_it_lies(
    tmp_path: Path, metadata: dict[str, str] | None
) -> None:
    arrays = {f"{place * 7 % 10}": np.zeros(2) for place in range(10)}
    save_file(arrays, tmp_path / "model", metadata=metadata)
    assert list(load_file(tmp_path / "model")) == sorted(arrays)
    assert list(load((tmp_path / "model").read_bytes())) == sorted(arrays)
