"""Drawn models, drawn cuts, micro-batches: the gradient is the whole model's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  its usual name

from gradstream.model import from_torch
from gradstream.split.graph import minibatch_values
from split_stages import Stages, batch_of, whole_gradient, whole_parameters

LAYERS: list[Callable[[int, int], nn.Module]] = [
    nn.Linear,
    lambda i, o: nn.Sequential(nn.LayerNorm(i), nn.Linear(i, o, bias=False), nn.GELU()),
    lambda i, o: nn.Sequential(nn.Linear(i, o), nn.BatchNorm1d(o), nn.ReLU(inplace=True)),
    lambda i, o: nn.Sequential(nn.Linear(i, 50), nn.Tanh(), nn.Linear(50, o)),
    lambda i, o: nn.utils.parametrizations.weight_norm(nn.Linear(i, o)),
]


class Drawn(nn.Module):
    """Layers, each of which takes the sum of some results before; some weights are tied, some are frozen."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        rng = np.random.default_rng(seed)
        width = int(rng.choice([4, 8]))
        self.first = nn.Linear(6, width)
        self.layers = nn.ModuleList(
            LAYERS[rng.integers(len(LAYERS))](width, width) for _ in range(rng.integers(3, 8))
        )
        self.sources = [
            rng.choice(at + 1, min(at + 1, 2), replace=False).tolist() for at in range(len(self.layers))
        ]
        self.last = nn.Linear(width, 3)
        plain = [layer for layer in self.layers if type(layer) is nn.Linear]
        if len(plain) > 1:
            plain[-1].weight = plain[0].weight
        if rng.random() < 0.3:
            self.layers[1].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> Any:
        results = [self.first(x)]
        for layer, sources in zip(self.layers, self.sources, strict=True):
            total = results[sources[0]]
            for source in sources[1:]:
                total = total + results[source]
            results.append(layer(total))
        return self.last(results[-1] + results[0])


@pytest.mark.parametrize("seed", range(24))
def test_a_drawn_model_has_the_whole_ones_gradient(seed: int) -> None:
    rng = np.random.default_rng(seed)
    batch = batch_of(rng.standard_normal((8, 6)), rng.integers(0, 3, 8))
    model = from_torch(lambda: Drawn(seed).double(), F.cross_entropy)
    parts = int(rng.integers(1, 5))
    places = None
    if rng.random() < 0.5:  # any part for any layer
        names = ["first", "last", *(f"layers.{at}" for at in range(len(Drawn(seed).layers)))]
        places = {name: int(rng.integers(parts)) for name in names}
    stages = Stages.of(model, batch, parts, map=places)
    vectors, whole = stages.init(), whole_parameters(model)
    assert torch.equal(stages.joined(vectors), whole)
    value, gradient = stages.gradient(vectors, batch)
    expected_value, expected = whole_gradient(model, batch, whole)
    assert value == pytest.approx(expected_value, abs=1e-12)
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("width", [16, 1100], ids=["narrow", "wide"])
def test_micro_batches_add_up_to_the_minibatch(width: int) -> None:
    """Several minibatches are between forward and backward, in another order, and the parameters change after."""

    def build() -> nn.Module:
        return nn.Sequential(
            nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 1000), nn.Tanh(), nn.Linear(1000, 3)
        ).double()

    rng = np.random.default_rng(0)
    inputs, targets = rng.standard_normal((8, 6)), rng.integers(0, 3, 8)
    model = from_torch(build, F.cross_entropy)
    stages = Stages.of(model, batch_of(inputs, targets), 2)
    vectors = stages.init()
    micro = [batch_of(inputs[at : at + 2], targets[at : at + 2]) for at in range(0, 8, 2)]
    values = [minibatch_values(stages.plan.graph, batch) for batch in micro]
    saved: dict[tuple[int, int], object] = {}
    for number, (stage, part) in enumerate(zip(stages.plan.stages, stages.models, strict=True)):
        for at, known in enumerate(values):
            given = {name: known[name] for name in stage.inputs}
            outputs, saved[number, at] = part.forward(vectors[number], given, seed=at, samples=2)
            known |= outputs
    gradients = [torch.full_like(vector, torch.nan) for vector in vectors]
    for count, at in enumerate((2, 0, 3, 1)):
        back: dict[str, torch.Tensor] = {}
        for number in reversed(range(len(stages.models))):
            wanted = {name: back[name] for name in stages.plan.stages[number].outputs if name in back}
            found = stages.models[number].backward(
                saved[number, at], wanted, gradients[number], weight=0.25, add=count > 0
            )
            for name, tensor in found.items():
                back[name] = back[name] + tensor if name in back else tensor
    _, expected = whole_gradient(model, batch_of(inputs, targets), whole_parameters(model))
    torch.testing.assert_close(stages.joined(gradients), expected, rtol=0, atol=1e-12)


def test_each_minibatch_has_the_parameters_of_its_forward() -> None:
    """Versions of the weights: a backward pass uses those of its own forward."""
    model = from_torch(
        lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double(), F.cross_entropy
    )
    rng = np.random.default_rng(0)
    batch = batch_of(rng.standard_normal((4, 6)), rng.integers(0, 3, 4))
    (stage,) = (stages := Stages.of(model, batch, 1)).models
    (first,) = stages.init()
    second = first * 2
    values = minibatch_values(stages.plan.graph, batch)
    passes = [stage.forward(vector, values, seed=0, samples=4)[1] for vector in (first, second)]
    for vector, saved in zip((first, second), passes, strict=True):
        gradient = torch.empty_like(vector)
        stage.backward(saved, {}, gradient)
        assert torch.equal(
            stages.joined([gradient]), whole_gradient(model, batch, stages.joined([vector]))[1]
        )
