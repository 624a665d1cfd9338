"""Stages of a split model, composed, are the whole model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  its usual name

from gradstream.errors import ConfigError
from gradstream.model import Batch, from_torch
from gradstream.split.cut import plan_split
from split_stages import Stages, batch_of, whole_gradient, whole_parameters

PARTS = [1, 2, 3, 4]


class Residual(nn.Module):
    """Convolutions with BatchNorm, operations in place, a frozen and an unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.relu = nn.ReLU(inplace=True)
        self.second = nn.Conv2d(6, 6, 3, padding=1, bias=False)
        self.third = nn.Conv2d(6, 6, 3, padding=1)
        self.unused = nn.Parameter(torch.randn(3))
        self.shift = nn.Parameter(torch.randn(1), requires_grad=False)
        self.head = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.relu(self.norm(self.first(x)))
        y = self.second(x)
        y += x
        y = self.relu(self.third(self.relu(y)))
        return self.head(y.mean((2, 3))) + self.shift


class Block(nn.Module):
    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.register_buffer("mask", torch.ones(16, 16).tril() == 0)

    def forward(self, x: torch.Tensor) -> Any:
        b, t, c = x.shape
        assert t <= 16
        q, k, v = (z.view(b, t, 2, c // 2).transpose(1, 2) for z in self.qkv(self.norm(x)).split(c, dim=2))
        attention = (q @ k.transpose(-2, -1)).masked_fill(self.mask[:t, :t], -torch.inf).softmax(-1)
        attention = F.dropout(attention, 0.0, self.training)
        return x + self.out((attention @ v).transpose(1, 2).reshape(b, t, c))


class Transformer(nn.Module):
    """Causal attention, and an output layer that is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(11, 8), nn.Embedding(16, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor) -> Any:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(x).flatten(0, 1)


class Recurrent(nn.Module):
    """Time before samples, and a module of torch.nn that consists of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(5, 6, 2)
        layer = nn.TransformerEncoderLayer(6, 2, 12, 0.0)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> Any:
        steps, (_, last) = self.cells(x.transpose(0, 1))
        return self.head(self.layers(steps).mean(0) + last[-1])


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 5), nn.Tanh(), nn.Linear(5, 4), nn.Linear(4, 3)
    )


def case(name: str) -> tuple[Callable[[], nn.Module], Any, Batch]:
    rng = np.random.default_rng(0)
    classes = rng.integers(0, 3, 8)
    match name:
        case "mlp":
            return mlp, F.cross_entropy, batch_of(rng.standard_normal((8, 6)), classes)
        case "residual":
            return Residual, F.cross_entropy, batch_of(rng.standard_normal((8, 3, 5, 5)), classes)
        case "recurrent":
            return Recurrent, F.cross_entropy, batch_of(rng.standard_normal((8, 4, 5)), classes)
    ids = rng.integers(0, 11, (8, 6))
    return Transformer, lambda out, to: F.cross_entropy(out, to.flatten()), batch_of(ids, ids)


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("name", ["mlp", "residual", "recurrent", "transformer"])
def test_loss_and_gradient_of_the_stages_are_the_whole_models(name: str, parts: int) -> None:
    build, loss, batch = case(name)
    model = from_torch(lambda: build().double(), loss)
    stages = Stages.of(model, batch, parts)
    assert {stage.part for stage in stages.plan.stages} == set(range(parts))
    vectors = stages.init()
    whole = whole_parameters(model)
    assert torch.equal(stages.joined(vectors), whole)
    value, gradient = stages.gradient(vectors, batch)
    expected_value, expected = whole_gradient(model, batch, whole)
    assert value == pytest.approx(expected_value, abs=1e-12)
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-12)
    outputs = stages.evaluate(vectors, batch)["outputs"]
    torch.testing.assert_close(outputs, model.outputs(whole, batch.inputs), rtol=0, atol=1e-12)
    alone = stages.evaluate(vectors, batch, targets=False)
    assert torch.equal(alone["outputs"], outputs) and "loss" not in alone


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize(
    "name", ["mlp", "residual", pytest.param("recurrent", marks=pytest.mark.kept), "transformer"]
)
def test_the_halves_of_a_backward_pass_are_the_whole_of_it(name: str, parts: int) -> None:
    build, loss, batch = case(name)
    stages = Stages.of(from_torch(lambda: build().double(), loss), batch, parts)
    whole_loss, whole = stages.gradient(stages.init(), batch)
    halves_loss, halves = stages.gradient(stages.init(), batch, halves=True)
    assert whole_loss == halves_loss
    assert torch.allclose(halves, whole, rtol=1e-12, atol=1e-14)


def test_only_what_crosses_a_cut_travels_and_once_to_each_part() -> None:
    build, loss, batch = case("residual")
    stages = Stages.of(from_torch(build, loss), batch, 3)
    stages.gradient(stages.init(), batch)
    expected = {
        (value.name, part): value.bytes_of(batch.num_samples) for value, part in stages.plan.crossings()
    }
    assert stages.travelled == expected


def test_plans_of_two_processes_are_equal() -> None:
    build, loss, batch = case("transformer")
    assert plan_split(from_torch(build, loss), batch, 4) == plan_split(from_torch(build, loss), batch, 4)


def test_a_map_says_which_module_is_where() -> None:
    build, loss, batch = case("transformer")
    model = from_torch(lambda: build().double(), loss)
    places = {"words": 0, "blocks": 1, "blocks.1": 0, "head": 1}
    stages = Stages.of(model, batch, 2, map=places)
    assert [stage.part for stage in stages.plan.stages] == [0, 1, 0, 1]
    _, gradient = stages.gradient(stages.init(), batch)
    torch.testing.assert_close(
        gradient, whole_gradient(model, batch, whole_parameters(model))[1], rtol=0, atol=1e-12
    )


class Deciding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x if x.sum() > 0 else -x)


def test_control_flow_is_refused_with_its_line() -> None:
    batch = case("mlp")[2]
    line = Deciding.forward.__code__.co_firstlineno + 1
    with pytest.raises(ConfigError, match=f"test_split_gradient.py:{line}: the module cannot be cut"):
        plan_split(from_torch(Deciding, F.cross_entropy), batch, 1)
