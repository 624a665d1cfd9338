"""Runs whose replicas are several processes, on virtual time, beside the same runs whose replicas are one.

With several workers, rounds make the two equal to rounding. Strategies without rounds are compared with one worker.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

import gradstream as gs
from gradstream._simulate import simulate
from gradstream.errors import ConfigError
from gradstream.run.result import Run
from gradstream.runtime.storage import MemoryStorage
from gradstream.testing.runs import QUICK
from gradstream.worker.parts.channel import as_it_was, as_sent
from split_jobs import CLASSES, FEATURES, data, difference, net, run

ROUNDS: Mapping[str, dict[str, Any]] = {
    "synchronous": {"strategy": "synchronous", "servers": 2},
    "allreduce": {"strategy": "allreduce"},
    "adam": {"strategy": "allreduce", "optimizer": "adam"},
    "clipped": {"strategy": "synchronous", "clip_norm": 0.05, "clip_value": 0.04},
}


@functools.cache
def whole_run(name: str) -> Run:
    return run(**ROUNDS[name])


PIPELINES = [(2, 1, "gpipe"), (3, 3, "1f1b"), (2, 2, "interleaved"), (4, 2, "zero-bubble")]


@pytest.mark.parametrize(
    ("name", "split", "micro_batches", "pipeline"),
    [
        *(("synchronous", *pipeline) for pipeline in PIPELINES[:2]),
        *(("allreduce", *pipeline) for pipeline in PIPELINES[2:]),
        *((name, *PIPELINES[1]) for name in ("adam", "clipped")),
    ],
)
def test_rounds_of_split_replicas_equal_those_of_whole_ones(
    name: str, split: int, micro_batches: int, pipeline: str
) -> None:
    whole = whole_run(name)
    split_run = run(**ROUNDS[name], split=split, micro_batches=micro_batches, pipeline=pipeline)
    assert difference(whole, split_run) < 1e-12
    assert split_run.summary["samples"] == whole.summary["samples"]


@pytest.mark.parametrize(
    "strategy",
    [
        gs.Downpour(overlap=False, push_every=2, fetch_every=3),
        gs.SSP(bound=1),
        gs.strategies.AsySG(gradients=1),
        gs.strategies.ElasticAveraging(),
        gs.strategies.ParameterAveraging(every=2),
        gs.DiLoCo(every=2),
        gs.StreamingDiLoCo(every=2, fragments=1),
        gs.strategies.AsyncDiLoCo(every=2),
    ],
    ids=lambda strategy: type(strategy).__name__,
)
def test_one_split_replica_trains_as_one_whole_replica(strategy: Any) -> None:
    whole, split_run = (run(strategy=strategy, workers=1, split=split) for split in (1, 3))
    assert difference(whole, split_run) < 1e-12


def test_evaluations_of_split_replicas_equal_those_of_whole_ones() -> None:
    whole, split_run = (run(strategy="synchronous", split=split, evaluate_every=2) for split in (1, 3))
    for mine, theirs in zip(split_run.evaluations, whole.evaluations, strict=True):
        assert mine["accuracy"] == theirs["accuracy"]
        assert mine["step"] == theirs["step"]


def test_replicas_with_parameters_of_their_own_evaluate_the_newest_ones() -> None:
    whole, split_run = (
        run(strategy=gs.ElasticAveraging(), workers=1, split=split, evaluate_every=2) for split in (1, 2)
    )
    assert [one["accuracy"] for one in split_run.evaluations] == [
        one["accuracy"] for one in whole.evaluations
    ]


@pytest.mark.parametrize(
    ("strategy", "before", "after"), [("synchronous", 1, 3), ("allreduce", 3, 1), ("allreduce", 2, 4)]
)
def test_a_checkpoint_resumes_under_another_split(strategy: str, before: int, after: int) -> None:
    whole = run(strategy=strategy, optimizer="adam", epochs=3)
    storage = MemoryStorage()
    run(strategy=strategy, optimizer="adam", epochs=2, split=before, storage=storage, checkpoint_every=2)
    there = [name for name in storage.names("checkpoints") if name.startswith("step-")]
    assert there, "a checkpoint was made"
    resumed = run(
        strategy=strategy,
        optimizer="adam",
        epochs=3,
        split=after,
        storage=storage,
        resume=True,
        checkpoint_every=None,
    )
    assert difference(whole, resumed) < 1e-12


def test_the_gradient_that_is_not_finite_in_one_part_is_left_out_in_all() -> None:
    x, y = np.random.default_rng(0).standard_normal((12, FEATURES)), np.arange(12) % CLASSES
    x[3] = np.inf
    model = gs.from_torch(net, nn.functional.cross_entropy)
    given: dict[str, Any] = {
        "workers": 1,
        "batch_size": 3,
        "epochs": 1,
        "deadlines": QUICK,
        "strategy": "downpour",
    }
    whole, split_run = (simulate(model, gs.from_arrays(x, y), **given, split=split) for split in (1, 3))
    for one in (whole, split_run):
        refused = [event for event in one.events if event["event"] == "gradient_refused"]
        assert [event["samples"] for event in refused] == [3]
    assert difference(whole, split_run) < 1e-12


def normed() -> nn.Module:
    """A network with running statistics in two places, a residual connection, and tied weights."""
    return _Normed().double()


class _Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Tanh())
        self.middle = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.last = nn.Linear(8, CLASSES)
        self.again = nn.Linear(8, 8)
        self.again.weight = cast(nn.Linear, self.middle[0]).weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        hidden = hidden + self.middle(hidden)
        result: torch.Tensor = self.last(torch.tanh(self.again(hidden)))
        return result


@pytest.mark.parametrize(("strategy", "split"), [("synchronous", 3), ("allreduce", 2)])
def test_running_statistics_and_tied_weights_of_a_split_model(strategy: str, split: int) -> None:
    given: dict[str, Any] = {"strategy": strategy, "build": normed, "epochs": 3, "evaluate_every": 2}
    whole, storage = run(**given), MemoryStorage()
    run(**{**given, "epochs": 2}, split=split, storage=storage, checkpoint_every=2)
    split_run = run(**given, split=split)
    resumed = run(**given, split=split, storage=storage, resume=True, checkpoint_every=None)
    for one in (split_run, resumed):
        assert difference(whole, one) < 1e-12
    assert [one["accuracy"] for one in split_run.evaluations] == [
        one["accuracy"] for one in whole.evaluations
    ]


def test_an_evaluation_reads_one_batch_of_held_out_samples_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    numbers, classes = np.random.default_rng(1).standard_normal((600, FEATURES)), np.arange(600) % CLASSES
    samples = gs.from_arrays(numbers, classes, test_inputs=numbers, test_targets=classes)
    read, inner = list[int](), samples.test_batch

    def test_batch(ids: Any) -> Any:
        read.append(len(ids))
        return inner(ids)

    monkeypatch.setattr(samples, "test_batch", test_batch)
    model = gs.from_torch(net, nn.functional.cross_entropy)
    given: dict[str, Any] = {"workers": 1, "batch_size": 300, "epochs": 1, "deadlines": QUICK}
    whole, split_run = (simulate(model, samples, **given, evaluate_every=1, split=split) for split in (1, 2))
    assert max(read) == 256
    assert [one["accuracy"] for one in split_run.evaluations] == [
        one["accuracy"] for one in whole.evaluations
    ]


class _Undecided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(self.first(x) if x.sum() > 0 else x)
        return result


@pytest.mark.parametrize(
    ("build", "options", "message"),
    [
        (lambda: nn.Linear(FEATURES, CLASSES).double(), {"split": 50}, "expected at most split="),
        (lambda: _Undecided().double(), {"split": 2}, r"test_split_runs\.py:\d+: .*control flow"),
        (net, {"split": 2, "micro_batches": 7}, "a minibatch of 6 samples"),
        (net, {"micro_batches": 2}, "without split"),
        (net, {"split": 2, "pipeline": "pipes"}, "unknown pipeline"),
        (net, {"split": 4, "pipeline": "interleaved"}, "expected at least one for each of 8 parts"),
        (net, {"split": 2, "strategy": "hogwild"}, "share one vector"),
        (net, {"split": 2, "strategy": "streaming-diloco"}, "each part would cut its own"),
        (net, {"split": 2, "accumulate": 2}, "take micro_batches in its place"),
    ],
)
def test_what_cannot_be_split_is_refused_with_the_remedy(
    build: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run(build=build, **options)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([[True, False, True]]),
        torch.tensor([-128, 127], dtype=torch.int8),
        torch.tensor([255, 0], dtype=torch.uint8),
        torch.tensor([1.5, -2.25e-3, torch.inf], dtype=torch.float16),
        torch.tensor([1.5, 3e38, -0.1], dtype=torch.bfloat16),
        torch.tensor([1, -(2**31)], dtype=torch.int32),
        torch.tensor([2**62 + 1, -1], dtype=torch.int64),
        torch.tensor(0.1, dtype=torch.float64),
        torch.tensor([1 + 2j], dtype=torch.complex64),
    ],
    ids=lambda tensor: str(tensor.dtype),
)
def test_a_value_of_any_dtype_is_received_as_it_was(tensor: torch.Tensor) -> None:
    sent = as_sent(tensor)
    assert sent.dtype in (torch.float32, torch.float64)
    received = as_it_was(sent.clone(), tuple(tensor.shape), tensor.dtype)
    assert received.dtype == tensor.dtype
    assert torch.equal(received, tensor)
    with pytest.raises(ConfigError, match="complex128"):
        as_sent(tensor.to(torch.complex128))


@pytest.mark.parametrize(
    "options", [{"split": 99}, {"split": 2, "pipeline": gs.pipeline.Hybrid(layers=("nobody",))}]
)
def test_a_model_that_cannot_be_divided_so_is_refused_before_a_process_is_started(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = list[object]()
    monkeypatch.setattr("gradstream._train.launch", lambda *args, **_: started.append(args))
    model = gs.from_torch(net, nn.functional.cross_entropy)
    given: dict[str, Any] = {"strategy": "downpour", "workers": 2, "batch_size": 6, "epochs": 1, **options}
    with pytest.raises(ConfigError, match=r"expected at most split=|expected some of"):
        gs.train(model, data(), run_dir=tmp_path / "run", processes=False, **given)
    assert not started and not (tmp_path / "run").exists()
