"""Runs whose pipeline holds several minibatches, on virtual time, beside a serial replay with the same weights."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gradstream as gs
from gradstream.errors import ConfigError, NonFiniteError
from gradstream.model import Batch
from gradstream.optim import SGD
from gradstream.pipeline.schedule import (
    StagePass,
    make_schedule,
    version_read,
    versions_held,
)
from gradstream.run.result import Run
from gradstream.runtime.storage import MemoryStorage
from gradstream.split.graph import Piece
from gradstream.split.part_model import PartModel
from gradstream.worker.parts.gradients import Values
from gradstream.worker.parts.pipelined import Passes
from kit.pipeline_versions import weight_versions
from split_jobs import difference, net, run

PARTS, LR = 4, 0.3
Weights = list[tuple[str, Piece, torch.Tensor]]
STREAM = "gradstream.worker.parts.stream"
STREAMS = ["pipedream", "pipedream-vertical", "2bw", "delayed"]


def even() -> nn.Module:
    """Four equal layers: a chain of as many parts."""
    layers = [nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(6, 6)).double()


PLAIN: Mapping[str, Any] = {
    "strategy": "allreduce",
    "workers": 1,
    "split": PARTS,
    "optimizer": SGD(lr=LR),
    "build": even,
}


def micro_batches(name: str) -> int:
    return 3 if name == "2bw" else 1


def streamed(name: str, **options: Any) -> Run:
    return run(**{**PLAIN, **options}, pipeline=name, micro_batches=micro_batches(name))


class Trace:
    """What a run has read: its minibatches, and the passes of each part with the version of their weights."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.batches: list[Batch] = []
        self.versions: dict[StagePass, int] = {}
        self.held: dict[int, int] = {}  # by part, the most versions at once
        self.models: dict[int, PartModel] = {}
        flying: dict[tuple[int, int], int] = {}
        forward, backward = Passes.forward, Passes.backward

        def reading(model: PartModel, batch: Batch, cuts: Any) -> Any:
            self.batches.append(batch)
            return Values(model, batch, cuts)

        async def forwards(this: Any, stage: int, micro_batch: int, values: Any) -> Any:
            self.models[this._source.model.part] = this._source.model
            minibatch = micro_batch // this._micro_batches
            version = version_read(this._name, this._source.model.plan, minibatch, this.done)
            self.versions[StagePass("forward", stage, micro_batch)] = flying[stage, micro_batch] = version
            self.count(flying, stage, this.done)
            return await forward(this, stage, micro_batch, values)

        async def backwards(this: Any, stage: int, micro_batch: int, gradients: Any) -> Any:
            version = this.done if this._name == "delayed" else flying[stage, micro_batch]
            self.versions[StagePass("backward", stage, micro_batch)] = version
            result = await backward(this, stage, micro_batch, gradients)
            del flying[stage, micro_batch]
            return result

        monkeypatch.setattr(f"{STREAM}.Values", reading)
        monkeypatch.setattr(Passes, "forward", forwards)
        monkeypatch.setattr(Passes, "backward", backwards)

    def count(self, flying: Mapping[tuple[int, int], int], stage: int, newest: int) -> None:
        oldest = min(version for (number, _), version in flying.items() if number == stage)
        self.held[stage] = max(self.held.get(stage, 0), newest - oldest + 1)


def replayed(trace: Trace, versions: Mapping[StagePass, int], count: int) -> Weights:
    """The final weights, from one minibatch after the other, with these versions of the weights."""
    models = trace.models
    plan = models[0].plan
    history = {part: [torch.zeros(model.layout.elems, dtype=torch.float64)] for part, model in models.items()}
    for part, model in models.items():
        model.init(0, history[part][0])
    for minibatch, batch in enumerate(trace.batches):
        gradients = {part: torch.zeros_like(rows[0]) for part, rows in history.items()}
        size = batch.num_samples // count
        for number in range(count):
            micro_batch, saved, read = minibatch * count + number, {}, {}
            values = {
                name: tensor[number * size : (number + 1) * size]
                for name, tensor in models[0].values(batch).items()
            }
            for stage in plan.stages:
                version = versions[StagePass("forward", stage.number, micro_batch)]
                read[stage.number] = history[stage.part][version].clone()
                own = models[stage.part].of_stage(stage.number, read[stage.number])
                inputs = {name: values[name] for name in stage.inputs}
                outputs, saved[stage.number] = (
                    models[stage.part].stages[stage.number].forward(own, inputs, seed=0, samples=size)
                )
                values.update(outputs)
            back: dict[str, torch.Tensor] = {}
            for stage in reversed(plan.stages):
                version = versions[StagePass("backward", stage.number, micro_batch)]
                read[stage.number].copy_(history[stage.part][version])
                into = models[stage.part].of_stage(stage.number, gradients[stage.part])
                returned = (
                    models[stage.part]
                    .stages[stage.number]
                    .backward(saved[stage.number], back, into, weight=1 / count, add=True)
                )
                for name, tensor in returned.items():
                    back[name] = back[name] + tensor if name in back else tensor
        for part, rows in history.items():
            rows.append(rows[-1] - LR * gradients[part])
    return [
        (name, piece, view)
        for stage in plan.stages
        for piece, (name, view) in zip(
            plan.pieces[stage.number],
            models[stage.part]
            .stages[stage.number]
            .layout.views(models[stage.part].of_stage(stage.number, history[stage.part][-1])),
            strict=True,
        )
    ]


def distance(one: Run, weights: Weights) -> float:
    found = {name: torch.from_numpy(array) for name, array in one.parameters.items()}
    assert found.keys() == {name for name, _, _ in weights}
    return max(
        float((view - (found[name] if piece.axis is None else piece.of(found[name]))).abs().max())
        for name, piece, view in weights
    )


@pytest.mark.parametrize("name", STREAMS)
def test_a_serial_replay_with_the_versions_of_the_schedule_has_the_same_weights(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace, count = Trace(monkeypatch), micro_batches(name)
    done = streamed(name)
    plan, minibatches = trace.models[0].plan, len(trace.batches)
    assert minibatches == 12
    schedules = make_schedule(name, plan, minibatches * count)
    versions = weight_versions(name, plan, schedules, micro_batches=count)
    assert trace.versions == versions
    assert distance(done, replayed(trace, versions, count)) < 1e-12
    held = {"pipedream": (4, 3, 2, 1), "pipedream-vertical": (4,) * 4, "2bw": (2,) * 4, "delayed": (1,) * 4}
    assert tuple(versions_held(name, plan, part) for part in range(PARTS)) == held[name]
    if name != "delayed":  # whose backwards do not read what the forwards have read
        assert tuple(trace.held[stage] for stage in range(PARTS)) == held[name]


@pytest.mark.parametrize("name", ["pipedream", "pipedream-vertical", "2bw"])
def test_the_replay_finds_a_stash_that_is_dropped(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trace, count = Trace(monkeypatch), micro_batches(name)
    monkeypatch.setattr(f"{STREAM}.versions_held", lambda *given: 1)
    done = streamed(name)
    assert distance(done, replayed(trace, trace.versions, count)) > 1e-6


@pytest.mark.parametrize("name", ["pipedream", "delayed"])
def test_a_stream_of_a_model_with_a_divided_layer_equals_its_replay(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace, count = Trace(monkeypatch), 6 if name == "2bw" else 1
    done = run(**{**PLAIN, "build": net}, pipeline=name, micro_batches=count)
    plan = trace.models[0].plan
    assert len(plan.stages) > PARTS
    versions = weight_versions(name, plan, make_schedule(name, plan, 12 * count), micro_batches=count)
    assert trace.versions == versions
    assert distance(done, replayed(trace, versions, count)) < 1e-12


@cache
def flushed(count: int) -> Run:
    """A run whose pipeline is empty after each minibatch, as its schedule says; of one part where `count` is 0."""
    given = {"pipeline": "1f1b", "micro_batches": count} if count else {"split": 1}
    return run(**{**PLAIN, **given}, evaluate_every=1)


@pytest.mark.parametrize("name", STREAMS)
def test_a_pipeline_that_is_empty_after_each_minibatch_is_sgd(name: str) -> None:
    """It is empty where the parameters are looked at: after each minibatch here."""
    whole, done = flushed(0), streamed(name, evaluate_every=1)
    assert difference(whole, done) < 1e-12
    assert difference(flushed(micro_batches(name)), done) == 0
    assert [one["accuracy"] for one in done.evaluations] == [one["accuracy"] for one in whole.evaluations]
    assert difference(streamed(name), done) > 1e-6, "else this would show nothing"


@pytest.mark.parametrize("name", ["pipedream", "2bw"])
def test_replicas_train_alike_in_a_group_and_through_servers(name: str) -> None:
    """Each part makes every round with the same part of the other replica, at the versions of its schedule."""
    group, served = (
        streamed(name, strategy=strategy, workers=2) for strategy in ("allreduce", "synchronous")
    )
    assert difference(group, served) < 1e-12
    assert group.summary["samples"] == served.summary["samples"] == 72


@pytest.mark.parametrize("name", ["pipedream-vertical", "delayed"])
def test_downpour_replicas_go_through_each_sample_once(name: str) -> None:
    done = streamed(name, strategy=gs.Downpour(push_every=2, fetch_every=2), workers=2, servers=2, epochs=3)
    assert done.summary["samples"] == 3 * 36
    assert all(np.isfinite(array).all() for array in done.parameters.values())


def test_a_run_resumes_from_a_checkpoint_of_a_pipeline() -> None:
    name = "pipedream"
    storage, given = MemoryStorage(), {"optimizer": "adam", "evaluate_every": 1}
    whole = streamed(name, **given, epochs=3)
    streamed(name, **given, epochs=2, storage=storage, checkpoint_every=5)
    there = [name for name in storage.names("checkpoints") if name.startswith("step-")]
    assert there, "a checkpoint was made"
    resumed = streamed(name, **given, epochs=3, storage=storage, resume=True, checkpoint_every=None)
    assert difference(whole, resumed) < 1e-12


def test_a_snapshot_empties_the_pipeline() -> None:
    """Of each minibatch all parts have made the update, or none has."""
    storage = MemoryStorage()
    done = streamed("pipedream", epochs=4, storage=storage, checkpoint_every=9)
    there = [name for name in storage.names("checkpoints") if name.startswith("step-")]
    assert there, "a checkpoint was made"
    assert done.summary["samples"] == 4 * 36
    assert difference(streamed("pipedream", epochs=4), done) > 1e-9, "it was empty in between"


@pytest.mark.parametrize("name", ["zero-bubble", "2bw"])
def test_micro_batches_are_averaged_and_not_added(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a planted sum, a pipeline that is empty after each minibatch is not SGD."""
    given: dict[str, Any] = {"pipeline": name, "micro_batches": 3, "evaluate_every": 1}
    whole = flushed(0)
    assert difference(whole, run(**PLAIN, **given)) < 1e-12
    monkeypatch.setattr(Passes, "weight", lambda this, micro_batch: 1.0)
    monkeypatch.setattr(f"{STREAM}._Stream.weight", lambda this, micro_batch: 1.0)
    assert difference(whole, run(**PLAIN, **given)) > 1e-3


def normed() -> nn.Module:
    """With running statistics in several parts."""
    layers = [m for _ in range(3) for m in (nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(6, 6)).double()


def test_running_statistics_are_those_of_all_parts_when_the_stream_has_ended() -> None:
    name = "pipedream"
    given: dict[str, Any] = {"build": normed, "evaluate_every": 1}
    empty, done = run(**{**PLAIN, **given}, pipeline="1f1b"), streamed(name, **given)
    assert difference(empty, done) == 0
    assert [one["accuracy"] for one in done.evaluations] == [one["accuracy"] for one in empty.evaluations]
    rare = streamed(name, build=normed, evaluate_every=5)
    assert len(rare.evaluations) == 3


def test_a_gradient_that_is_not_finite_ends_the_run() -> None:
    with pytest.raises(NonFiniteError, match=r"under pipeline='pipedream' other parts may have .*'1f1b'"):
        streamed("pipedream", optimizer=SGD(lr=1e200))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipeline": "pipedream", "clip_norm": 1.0}, "take clip_value; or take pipeline='1f1b'"),
        ({"pipeline": "2bw", "strategy": gs.SSP(bound=1)}, "SSP: the age of the weights"),
        ({"pipeline": "delayed", "micro_batches": 2}, "micro_batches=2 with pipeline='delayed': expected 1"),
        ({"pipeline": "2bw", "micro_batches": 2}, "micro_batches=2 with pipeline='2bw': expected at least 3"),
    ],
)
def test_what_a_stream_cannot_do_is_refused_with_the_remedy(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(**{**PLAIN, **options})
