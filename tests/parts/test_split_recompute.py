"""Split runs that drop activations and compute them again: the same bits, less memory."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

import gradstream as gs
from gradstream.errors import ConfigError
from gradstream.pipeline.schedule import FLUSHING, in_flight, make_schedule
from gradstream.run.result import Run
from gradstream.split.operations import Operations
from gradstream.split.saved import DroppedPass, SavedPass
from gradstream.split.stage_model import StageModel
from gradstream.worker.parts.pipelined import dropped
from pipeline_plans import chain
from split_jobs import EQUAL, FEATURES, difference, run

PARTS = 4


def block() -> list[nn.Module]:
    return [nn.Linear(FEATURES, FEATURES), nn.BatchNorm1d(FEATURES), nn.Tanh(), nn.Dropout(0.3)]


def net() -> nn.Module:
    """Eight equal layers, with running statistics and dropout in every part."""
    layers = [layer for _ in range(7) for layer in block()]
    return nn.Sequential(*layers, nn.Linear(FEATURES, FEATURES)).double()


PLAIN: Mapping[str, Any] = {
    "strategy": "allreduce",
    "workers": 1,
    "split": PARTS,
    "build": net,
    "batch_size": 12,
}


def trained(name: str, **options: Any) -> Run:
    count = 4 if name in (*FLUSHING, "2bw") else 1
    return run(**{**PLAIN, "pipeline": name, "micro_batches": count, **options})


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zero-bubble", "pipedream"])
def test_activations_that_are_computed_again_give_the_same_bits(name: str) -> None:
    """Parameters, running statistics, and accuracies, with dropout and BatchNorm in every part."""
    kept, again = (
        trained(name, epochs=1, evaluate_every=3, recompute=recompute) for recompute in (False, True)
    )
    assert difference(kept, again) == 0
    assert any("running_mean" in key for key in kept.parameters)
    assert [one["loss"] for one in kept.evaluations] == [one["loss"] for one in again.evaluations]


def test_other_random_numbers_the_second_time_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, inner = trained("1f1b"), StageModel._computed

    def computed(self: Any, parameters: Any, values: Any, seed: int, *rest: Any) -> Any:
        again = seed in seeds[id(self)]
        seeds[id(self)].add(seed)
        return inner(self, parameters, values, seed + again, *rest)

    seeds = _Seeds()
    monkeypatch.setattr(StageModel, "_computed", computed)
    assert difference(kept, trained("1f1b")) == 0
    seeds.clear()
    assert difference(kept, trained("1f1b", recompute=True)) > 1e-6


class _Seeds(dict[int, set[int]]):
    def __missing__(self, key: int) -> set[int]:
        return self.setdefault(key, set())


def test_running_statistics_that_are_updated_twice_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = trained("1f1b")
    monkeypatch.setattr(Operations, "set_state", lambda self, state: None)
    twice = trained("1f1b", recompute=True)
    counts = [key for key in kept.parameters if "num_batches_tracked" in key]
    assert any(twice.parameters[key] > kept.parameters[key] for key in counts)
    trained_ones = [key for key in kept.parameters if "weight" in key or "bias" in key]
    assert all((twice.parameters[key] == kept.parameters[key]).all() for key in trained_ones)


class _Held:
    """Counts the graphs, and the inputs of dropped passes, that each stage holds at once, and the graphs' bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.most = {kind: Counter[int]() for kind in (SavedPass, DroppedPass, bytes)}
        self._now = {kind: Counter[int]() for kind in (SavedPass, DroppedPass, bytes)}
        computed, forward = StageModel._computed, StageModel.forward

        def computing(model: StageModel, *args: Any) -> Any:
            number = model._stage.number

            def pack(tensor: torch.Tensor) -> _Packed:
                packed = _Packed(tensor.detach())  # else a result would hold its own graph
                self.hold(bytes, number, packed, tensor.nbytes)
                return packed

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed.tensor):
                saved = computed(model, *args)
            self.hold(SavedPass, number, saved)
            return saved

        def forwards(model: StageModel, *args: Any, **more: Any) -> Any:
            outputs, saved = forward(model, *args, **more)
            if isinstance(saved, DroppedPass):
                self.hold(DroppedPass, model._stage.number, saved)
            return outputs, saved

        monkeypatch.setattr(StageModel, "_computed", computing)
        monkeypatch.setattr(StageModel, "forward", forwards)

    def hold(self, kind: Any, stage: int, what: Any, amount: int = 1) -> None:
        now, most = self._now[kind], self.most[kind]
        now[stage] += amount
        most[stage] = max(most[stage], now[stage])
        weakref.finalize(what, now.subtract, {stage: amount})


class _Packed:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


@pytest.mark.parametrize("name", FLUSHING)
def test_a_part_holds_the_activations_of_one_pass_and_inputs_of_the_others(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the page on pipelines says, in passes and in bytes. zero-bubble keeps what gradients of weights need."""
    count, late = 12, name == "zero-bubble"
    expected = dict(enumerate(in_flight(name, chain(PARTS, 2 if name == "interleaved" else 1), count)))
    held = []
    for recompute in (False, True):
        with monkeypatch.context() as patched:
            held.append(_Held(patched))
            trained(name, epochs=1, batch_size=36, micro_batches=count, recompute=recompute)
    kept, again = (one.most for one in held)
    assert not kept[DroppedPass]
    for stage, flying in expected.items():
        flying = PARTS if late else flying
        assert kept[SavedPass][stage] == flying
        assert again[SavedPass][stage] == (stage + 1 if late else 1)
        assert again[DroppedPass][stage] in (flying, flying - 1, 0)
        one = kept[bytes][stage] / flying
        assert again[bytes][stage] == one * again[SavedPass][stage]


def test_a_forward_that_its_backward_follows_keeps_its_activations() -> None:
    """So the last part of 1F1B computes nothing again, and GPipe's parts not the last micro-batch."""
    left = {
        name: [len(dropped(schedule)) for schedule in make_schedule(name, chain(3), 4)]
        for name in ("gpipe", "1f1b")
    }
    assert left == {"gpipe": [3, 3, 3], "1f1b": [4, 4, 0]}


def test_computing_again_takes_the_time_of_the_forward_passes() -> None:
    """On virtual time, a forward takes 1 ms a sample and a backward 2: parts of GPipe repeat 3 of 4 micro-batches."""
    seconds = []
    for recompute in (False, True):
        done = trained("gpipe", recompute=recompute, config=EQUAL)
        seconds.append(sum(event["compute_s"] for event in done.events if event["event"] == "part"))
    assert seconds[1] / seconds[0] == pytest.approx((3 + 3 / 4) / 3, rel=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipeline": "delayed"}, "activations of older weights.*take pipeline='2bw'"),
        ({"pipeline": gs.pipeline.SyntheticGradients()}, "leave recompute out"),
        ({"pipeline": gs.pipeline.Hybrid()}, "leave recompute out"),
        ({"split": 1}, r"without split: .*torch\.utils\.checkpoint"),
    ],
    ids=["delayed", "synthetic", "hybrid", "whole"],
)
def test_where_nothing_is_computed_again_it_is_refused_with_the_remedy(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run(**{**PLAIN, **options}, recompute=True)
