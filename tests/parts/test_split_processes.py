"""Replicas of several real processes: over each carrier, with a death, and resumed under another split."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradstream as gs
from gradstream.job.files import load_job
from gradstream.testing import TokenAudit

JOB = """
import numpy as np
from torch import nn
import gradstream as gs

def net():
    layers = [nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 32), nn.Tanh()]
    layers[4].bias.requires_grad_(False)
    return nn.Sequential(*layers, nn.Linear(32, 4)).double()

def job():
    rng = np.random.default_rng(5)
    x, y = rng.standard_normal((320, 20)), rng.integers(0, 4, 320)
    data = gs.from_arrays(x[:256], y[:256], test_inputs=x[256:], test_targets=y[256:])
    model = gs.from_torch(net, nn.functional.cross_entropy)
    given = {"workers": 2, "batch_size": 16, "epochs": 2, "evaluate_every": 4}
    return gs.Job(model, data, strategy="synchronous", groups=[{"match": "2.*", "lr_scale": 0.5}], **given)
"""


@pytest.fixture
def place(tmp_path: Path) -> str:
    """The place of a job."""
    (tmp_path / "job.py").write_text(JOB)
    return f"{tmp_path / 'job.py'}:job"


def in_one_thread(run: Any) -> bool:
    """Whether the passes of a part followed each other in its thread, as sockets to all parts allow."""
    kinds = {
        kind
        for event in run.events
        if event["event"] == "cpu" and event["role"] == "worker"
        for kind in event["compute_s"]
    }
    assert ("gradient" in kinds) != ("forward" in kinds)
    return "gradient" in kinds


@pytest.mark.parametrize(
    "options",
    [
        {"split": 3, "carrier": "grpc", "micro_batches": 4, "pipeline": "1f1b"},
        {"split": 2, "carrier": "tcp", "strategy": "allreduce", "micro_batches": 2},
        {"split": 3, "carrier": "tcp", "pipeline": gs.pipeline.Hybrid("slices", ("2", "6"))},
    ],
    ids=["grpc", "tcp", "hybrid"],
)
def test_split_replicas_train_as_whole_ones(place: str, tmp_path: Path, options: dict[str, Any]) -> None:
    whole = gs.simulate(load_job(place))
    run = gs.train(load_job(place), run_dir=tmp_path / "run", **options)
    for name, array in whole.parameters.items():
        assert np.abs(run.parameters[name] - array).max() < 1e-12
    assert [one["accuracy"] for one in run.evaluations] == [one["accuracy"] for one in whole.evaluations]
    if "pipeline" not in options or options["pipeline"] == "1f1b":
        assert in_one_thread(run) == (options["carrier"] != "grpc")


def test_parts_that_train_apart_do_the_same_in_processes_as_on_virtual_time(
    place: str, tmp_path: Path
) -> None:
    given: dict[str, Any] = {
        "split": 3,
        "pipeline": gs.pipeline.SyntheticGradients(hidden=16, lr=0.01, inputs=True),
    }
    simulated = gs.simulate(load_job(place), **given)
    run = gs.train(load_job(place), run_dir=tmp_path / "run", **given)
    for name, array in simulated.parameters.items():
        assert np.abs(run.parameters[name] - array).max() < 1e-12
    assert run.summary["samples"] == 512
    assert {event["node"] for event in run.events if event["event"] == "part"} >= {"worker-0", "part2-1"}


def test_a_pipeline_of_several_minibatches_trains_as_on_virtual_time(place: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"split": 3, "strategy": "allreduce", "pipeline": "pipedream"}
    simulated = gs.simulate(load_job(place), **options)
    run = gs.train(load_job(place), run_dir=tmp_path / "run", **options, carrier="shm")
    for name, array in simulated.parameters.items():
        assert np.abs(run.parameters[name] - array).max() < 1e-12


SPOILT = """
import numpy as np
from torch import nn
import gradstream as gs

def net():
    layers = [nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(20, 20)).double()

def unbounded(outputs, targets):
    loss = nn.functional.cross_entropy(outputs, targets % 20)
    return loss * float("nan") if (targets == 20).any() else loss

def job():
    rng = np.random.default_rng(5)
    x, y = rng.standard_normal((64, 20)), rng.integers(0, 20, 64)
    y[7] = 20
    given = {"workers": 1, "split": 2, "batch_size": 16, "epochs": 1, "strategy": "synchronous", "micro_batches": 4}
    return gs.Job(gs.from_torch(net, unbounded), gs.from_arrays(x, y), **given)
"""


@pytest.mark.parametrize("pipeline", ["1f1b", "zero-bubble"])
def test_a_loss_that_is_no_number_leaves_nothing_in_any_part(tmp_path: Path, pipeline: Any) -> None:
    (tmp_path / "job.py").write_text(SPOILT)
    job = f"{tmp_path / 'job.py'}:job"
    simulated = gs.simulate(load_job(job), pipeline=pipeline)
    run = gs.train(load_job(job), run_dir=tmp_path / "run", pipeline=pipeline)
    assert in_one_thread(run)
    for one in (simulated, run):
        assert [event["samples"] for event in one.events if event["event"] == "gradient_refused"] == [16]
    for name, array in simulated.parameters.items():
        assert np.abs(run.parameters[name] - array).max() < 1e-12


def test_activations_are_computed_again_and_travel_in_two_bytes(place: str, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB.replace(".double()", ""))
    given: dict[str, Any] = {"split": 3, "pipeline": "1f1b", "micro_batches": 4, "recompute": True}
    given["pipeline_dtype"] = "bfloat16"
    simulated = gs.simulate(load_job(place), **given)
    run = gs.train(load_job(place), run_dir=tmp_path / "run", **given, carrier="shm")
    for name, array in simulated.parameters.items():
        assert np.abs(run.parameters[name] - array).max() < 1e-5


@pytest.mark.parametrize(
    "pipeline", ["gpipe", gs.pipeline.Hybrid("slices", ("2", "6"))], ids=["gpipe", "hybrid"]
)
def test_a_replica_comes_back_after_one_of_its_parts_was_killed(
    place: str, tmp_path: Path, pipeline: Any
) -> None:
    log, told = tmp_path / "run" / "logs" / "part1-1.log", list[str]()

    def on_event(event: Mapping[str, Any]) -> None:
        if event["event"] == "step" and event["node"] == "worker-1":
            if not told:
                told.append("struck")
                os.kill(int(re.findall(r"part1-1: pid (\d+)", log.read_text())[-1]), signal.SIGKILL)
            elif "back worker-1" in told and "back part1-1" in told:
                raise KeyboardInterrupt
        if event["event"] == "left" and event["lost"]:
            told.append(f"lost {event['who']}")
        if event["event"] == "joined" and event["epoch"] > 1:
            told.append(f"back {event['who']}")

    with pytest.raises((KeyboardInterrupt, gs.errors.Interrupted)):
        gs.train(
            load_job(place),
            run_dir=tmp_path / "run",
            on_event=on_event,
            strategy="downpour",
            split=2,
            pipeline=pipeline,
            epochs=5000,
        )
    assert told[:3] == ["struck", "lost part1-1", "lost worker-1"]
    assert sorted(told[3:5]) == ["back part1-1", "back worker-1"]


TOKENS = """
import gradstream as gs
from gradstream.testing import numbered
from gradstream.testing.runs import token_layers

def job():
    given = {"workers": 3, "split": 2, "batch_size": 2, "epochs": 10, "chunk_elems": 64, "max_restarts": 0}
    return gs.Job(token_layers(4, 2), numbered(64), strategy="downpour", optimizer=gs.optim.SGD(lr=1.0), **given)
"""


def test_a_part_is_killed_and_every_chunk_has_every_sample_once(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(TOKENS)
    log, steps = tmp_path / "run" / "logs" / "part1-1.log", list[int]()

    def on_event(event: Mapping[str, Any]) -> None:
        if event["event"] == "step":
            steps.append(event["samples"])
            if len(steps) == 40:
                os.kill(int(re.findall(r"part1-1: pid (\d+)", log.read_text())[-1]), signal.SIGKILL)

    given: dict[str, Any] = {"run_dir": tmp_path / "run", "pipeline": "pipedream", "on_event": on_event}
    run = gs.train(load_job(f"{tmp_path / 'job.py'}:job"), **given)
    assert run.summary["workers_lost"] == ["worker-1"]
    assert [event["who"] for event in run.events if event["event"] == "settled"] == ["worker-1"]
    assert TokenAudit.of(run, 64, 10).exact
