"""Parts that train apart by predicted gradients, on virtual time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gradstream as gs
from gradstream.errors import ConfigError, NonFiniteError
from gradstream.pipeline.synthetic import LAG, Predictor, label_features
from gradstream.run.result import Run
from gradstream.split.stage_model import StageModel
from gradstream.testing.runs import QUICK
from gradstream.worker.parts.decoupled import DecoupledGradients
from split_jobs import CLASSES, EQUAL, FEATURES, difference, net, run

LOWER = ("0.weight", "0.bias", "2.weight", "2.bias")
"""Parameters of parts 0 and 1 of three."""


def apart(split: int = 3, *, workers: int = 1, **options: Any) -> Run:
    given: dict[str, Any] = {
        "strategy": "allreduce",
        "pipeline": gs.pipeline.SyntheticGradients(hidden=16),
        **options,
    }
    return run(split=split, workers=workers, **given)


def true_gradients(monkeypatch: pytest.MonkeyPatch) -> tuple[Run, Mapping[str, list[torch.Tensor]]]:
    """A run of the same parts by backpropagation, and the gradients of each value that crossed a cut."""
    found: dict[str, list[torch.Tensor]] = defaultdict(list)
    backward = StageModel.backward

    def watched(self: StageModel, saved: object, gradients: Any, *given: Any, **more: Any) -> Any:
        for name, tensor in gradients.items():
            found[name].append(tensor.clone())
        return backward(self, saved, gradients, *given, **more)

    with monkeypatch.context() as patch:
        patch.setattr(StageModel, "backward", watched)
        return run(strategy="allreduce", workers=1, split=3), found


def test_oracle_predictors_train_as_backpropagation_does(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, true = true_gradients(monkeypatch)
    assert {len(tensors) for tensors in true.values()} == {12} and len(true) == 2
    late = 0
    came: dict[str, list[torch.Tensor]] = defaultdict(list)

    async def oracle(self: DecoupledGradients, value: Any, *seen: Any) -> torch.Tensor:
        return true[value.name][max(0, self._number - 1 - late)]

    def listen(self: Predictor, seen: torch.Tensor, labels: object, target: torch.Tensor) -> float:
        came["".join(map(str, target.shape[1:]))].append(target / len(target))
        return 0.0

    monkeypatch.setattr(DecoupledGradients, "_guess", oracle)
    monkeypatch.setattr(Predictor, "learn", listen)
    assert difference(whole, apart()) < 1e-12
    for tensors in true.values():  # what came back as a target is the gradient of that very minibatch
        targets = came[str(tensors[0].shape[1])]
        assert len(targets) == 12 - LAG
        assert all(torch.allclose(a, b, 0, 1e-12) for a, b in zip(targets, tensors, strict=False))
    late = 1
    assert difference(whole, apart()) > 1e-4, "a gradient of the minibatch before is another one"


def test_nothing_moves_below_a_predictor_that_gives_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    first = run(strategy="allreduce", workers=1, steps=1, epochs=None, optimizer=gs.optim.SGD(lr=1e-30))
    learnt = apart()
    monkeypatch.setattr(Predictor, "learn", lambda *_: 0.0)
    zero = apart()
    for name, begun in first.parameters.items():
        assert np.array_equal(zero.parameters[name], begun) == (name in LOWER)
        assert not np.array_equal(learnt.parameters[name], begun)


@pytest.mark.parametrize(("hidden", "shape"), [(0, (2, 5, 5)), (16, (6,))], ids=["images", "dense"])
def test_a_predictor_learns_a_gradient_that_is_linear(hidden: int, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(1)
    how = gs.pipeline.SyntheticGradients(hidden=hidden, lr=1e-2)
    predictor = Predictor(shape, 3, shape, how, seed=0, dtype=torch.float64)
    mix, shift = (
        torch.randn(shape[0], shape[0], generator=generator),
        torch.randn(3, shape[0], generator=generator),
    )

    def drawn() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        h = torch.randn(64, *shape, generator=generator).double()
        labels = label_features(torch.randint(0, 3, (64,), generator=generator), 3, torch.float64)
        offset = (labels @ shift.double()).view(64, shape[0], *[1] * (len(shape) - 1))
        return h, labels, torch.einsum("bc...,cd->bd...", h, mix.double()) + offset

    h, labels, target = drawn()
    assert not predictor.predict(h, labels).any()
    before = target.square().mean().item()
    for _ in range(600):
        predictor.learn(*drawn())
    error = (predictor.predict(h, labels) - target).square().mean().item()
    assert error < before * (1e-3 if hidden == 0 else 0.1)


def test_labels_tell_a_predictor_what_outputs_alone_do_not() -> None:
    errors = {}
    for labels in (0, 3):
        predictor = Predictor(
            (4,), labels, (4,), gs.pipeline.SyntheticGradients(hidden=0, lr=0.1), seed=0, dtype=torch.float64
        )
        features = torch.eye(3, dtype=torch.float64).repeat(8, 1)
        target = features @ torch.ones(3, 4, dtype=torch.float64).cumsum(0)
        h = torch.zeros(24, 4, dtype=torch.float64)
        for _ in range(300):
            errors[labels] = predictor.learn(h, features if labels else None, target)
    assert errors[3] < 1e-3 < errors[0]


# ---- time -----------------------------------------------------------------------------------------------------


def waits(done: Run) -> dict[str, float]:
    """Seconds of waiting by node."""
    found: dict[str, float] = defaultdict(float)
    for event in done.events:
        if event["event"] == "part":
            found[event["node"]] += event["wait_s"]
    return found


def test_equal_parts_wait_for_their_first_input_alone() -> None:
    found, forward_s = waits(apart(config=EQUAL)), 6e-3
    for part, node in enumerate(["worker-0", "part1-0", "part2-0"]):
        assert found[node] == pytest.approx(part * forward_s, abs=1e-4)


def test_a_part_counts_the_wait_for_the_target_of_its_predictor() -> None:
    slow = gs.sim.SimulationConfig(costs=EQUAL.costs, network=EQUAL.network, speeds={"part1-0": 0.25})
    done = apart(2, config=slow)
    forward_s, own_s, above_s = 6e-3, 18e-3, 72e-3
    last_target_s = forward_s + (12 - LAG) * above_s  # is learned within the last of 12 minibatches
    assert waits(done)["worker-0"] == pytest.approx(last_target_s - 11 * own_s - forward_s, rel=0.01)


def test_synthetic_inputs_remove_the_wait_for_the_part_below() -> None:
    found = waits(apart(config=EQUAL, pipeline=gs.pipeline.SyntheticGradients(hidden=16, inputs=True)))
    assert max(found.values()) < 1e-4


# ---- runs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["synchronous", "downpour"])
def test_several_replicas_of_parts_that_train_apart(strategy: str) -> None:
    done = apart(2, workers=2, strategy=strategy, evaluate_every=2)
    assert done.summary["samples"] == 72 and len(done.evaluations) > 1
    losses = [event["loss"] for event in done.events if event["event"] == "step"]
    assert losses[0] is None or losses[-1] is not None


def test_a_part_whose_gradient_is_not_finite_ends_the_run() -> None:
    x, y = np.random.default_rng(0).standard_normal((12, FEATURES)), np.arange(12) % CLASSES
    x[3] = np.inf
    model = gs.from_torch(net, nn.functional.cross_entropy)
    with pytest.raises(NonFiniteError, match="part1-0: loss is nan"):
        gs.simulate(
            model,
            gs.from_arrays(x, y),
            workers=1,
            split=2,
            batch_size=3,
            epochs=1,
            deadlines=QUICK,
            pipeline=gs.pipeline.SyntheticGradients(hidden=0),
        )


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES)).double()


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.second(torch.tanh(self.first(x)))) @ self.first.weight


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"split": 1}, "expected split=2 or more"),
        ({"micro_batches": 2}, "leave micro_batches=2 out"),
        ({"clip_norm": 1.0}, "take clip_value"),
        ({"build": normed}, "GroupNorm"),
        ({"build": _Tied}, "first.weight"),
        ({"split": 9}, "take fewer parts"),
    ],
)
def test_what_parts_cannot_train_apart_is_refused_with_the_remedy(options: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        apart(**{"split": 2, **options})


@pytest.mark.parametrize(
    ("targets", "how", "what"),
    [
        (np.zeros((12, 2), np.int64), {}, "take labels=False"),
        (np.zeros(12, np.int64), {"labels": False, "inputs": True}, "take inputs=False"),
    ],
)
def test_what_predictors_cannot_see_is_refused(targets: Any, how: dict[str, Any], what: str) -> None:
    def build() -> nn.Module:
        return nn.Sequential(
            nn.Embedding(5, 8), nn.Flatten(), nn.Linear(8 * 3, 2 * CLASSES), nn.Unflatten(1, (CLASSES, 2))
        )

    model = gs.from_torch(build, lambda scores, y: scores.sum() * y.sum())
    data = gs.from_arrays(np.zeros((12, 3), np.int64), targets)
    with pytest.raises(ConfigError, match=what):
        gs.simulate(
            model,
            data,
            workers=1,
            split=2,
            batch_size=3,
            epochs=1,
            deadlines=QUICK,
            pipeline=gs.pipeline.SyntheticGradients(**how),
        )
