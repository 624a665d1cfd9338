"""Convolutions divided over parts by channels."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  its usual name

from gradstream.model import Batch, TorchModel, from_torch
from gradstream.split.cut import plan_split
from gradstream.split.divide import divisible
from gradstream.split.graph import record
from split_stages import Stages, batch_of, whole_gradient, whole_parameters

ROWS = 26


def images() -> nn.Module:
    features = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 5, 5, stride=2, padding=2),
        nn.Tanh(),
        nn.MaxPool2d(3, 2, 1),
        nn.Conv2d(5, 4, 3, dilation=2, padding=2, groups=1, bias=False),
    )
    return nn.Sequential(features, nn.Flatten(), nn.Linear(4 * 7 * 3, 3))


def job(dtype: torch.dtype = torch.float64) -> tuple[TorchModel, Batch]:
    rng = np.random.default_rng(0)
    batch = batch_of(rng.standard_normal((4, 3, ROWS, 12)), rng.integers(0, 3, 4))
    return from_torch(lambda: images().to(dtype), F.cross_entropy), batch


@pytest.mark.parametrize("parts", [1, 2, 3, 4])
@pytest.mark.parametrize("by", ["input channels", "output channels"])
def test_divided_convolutions_have_the_whole_models_gradient(by: str, parts: int) -> None:
    model, batch = job()
    name = {"input channels": "0.2", "output channels": "0.0"}[by]
    stages = Stages.of(model, batch, parts, map={"": 0, name: range(parts)})
    assert {stage.part for stage in stages.plan.stages} == set(range(parts))
    vectors, whole = stages.init(), whole_parameters(model)
    assert torch.equal(stages.joined(vectors), whole)
    value, gradient = stages.gradient(vectors, batch)
    expected_value, expected = whole_gradient(model, batch, whole)
    assert value == pytest.approx(expected_value, abs=1e-12)
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-12)
    outputs = stages.evaluate(vectors, batch)["outputs"]
    torch.testing.assert_close(outputs, model.outputs(whole, batch.inputs), rtol=0, atol=1e-12)


def test_a_convolution_with_most_weights_is_divided_by_itself() -> None:
    def build() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.Conv2d(4, 60, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(60, 3)
        )

    batch = batch_of(np.zeros((2, 3, 8, 8)), np.zeros(2, np.int64))
    plan = plan_split(from_torch(build, F.cross_entropy), batch, 2)
    held = [sum(stop - start for start, stop in plan.ranges_of(part)) for part in range(2)]
    assert max(held) < 1.02 * plan.elems / 2


@pytest.mark.parametrize("layer", [lambda: nn.BatchNorm2d(4), lambda: nn.Conv2d(4, 4, 3, groups=2)])
def test_what_cannot_be_divided_stays_whole(layer: Callable[[], nn.Module]) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 4, 3), layer(), nn.Flatten())

    model = from_torch(build, lambda outputs, _: outputs.sum())
    graph = record(model, batch_of(np.zeros((2, 3, 9, 9)), np.zeros(2)))
    (node,) = (node for node in graph.nodes if node.target == "1")
    assert not divisible(graph, node)
