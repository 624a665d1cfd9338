"""Wide linear layers are divided over parts by columns or rows, and compute the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  its usual name

from gradstream.model import Batch, TorchModel, from_torch
from gradstream.split import divide as divide_file
from gradstream.split.cut import TorchPlan, contiguous_groups, filled, plan_split
from split_stages import Stages, batch_of, whole_gradient, whole_parameters

CAN_BE_WIDE = [(96, 15, 6, 5), (6, 40, 5), (20, 3), (4, 40, 41, 4), (5, 5, 5, 5, 40, 30), (3, 64, 3)]


def layers(widths: Sequence[int]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        pairs = pairwise(widths)
        return nn.Sequential(
            nn.Flatten(), *(m for i, o in pairs for m in (nn.Linear(i, o), nn.ReLU()))
        ).double()

    return build


def squares(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).square().sum()


def integers(widths: Sequence[int]) -> tuple[TorchModel, Batch, torch.Tensor]:
    """A model, a minibatch and parameters of small integers, so that every sum is exact."""
    rng = np.random.default_rng(1)
    model = from_torch(layers(widths), squares, reduction="sum")
    batch = batch_of(
        rng.integers(-2, 3, (4, widths[0])).astype(np.float64),
        rng.integers(-2, 3, (4, widths[-1])).astype(np.float64),
    )
    return model, batch, torch.from_numpy(rng.integers(-2, 3, model.layout.elems).astype(np.float64))


def is_divided(plan: TorchPlan) -> bool:
    return any(piece.axis is not None for pieces in plan.pieces for piece in pieces)


@pytest.mark.parametrize("parts", [1, 2, 3, 4])
@pytest.mark.parametrize("widths", CAN_BE_WIDE)
def test_divided_layers_have_the_whole_models_gradient(widths: tuple[int, ...], parts: int) -> None:
    rng = np.random.default_rng(0)
    batch = batch_of(rng.standard_normal((8, widths[0])), rng.integers(0, 3, 8))
    model = from_torch(layers(widths), F.cross_entropy)
    stages = Stages.of(model, batch, parts)
    vectors, whole = stages.init(), whole_parameters(model)
    assert torch.equal(stages.joined(vectors), whole)
    value, gradient = stages.gradient(vectors, batch)
    expected_value, expected = whole_gradient(model, batch, whole)
    assert value == pytest.approx(expected_value, abs=1e-12)
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-12)
    assert is_divided(stages.plan) == (parts > 1)


@pytest.mark.parametrize("parts", [2, 3, 4])
@pytest.mark.parametrize("widths", CAN_BE_WIDE)
def test_on_integers_the_gradient_has_the_same_bits(widths: tuple[int, ...], parts: int) -> None:
    model, batch, whole = integers(widths)
    stages = Stages.of(model, batch, parts)
    value, gradient = stages.gradient(stages.divide(whole), batch)
    expected_value, expected = whole_gradient(model, batch, whole)
    assert value == expected_value and torch.equal(gradient, expected)


def test_a_bias_on_every_part_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def added(results: Sequence[torch.Tensor], bias: torch.Tensor, rank: int) -> torch.Tensor:
        return sum(result + bias for result in results)  # type: ignore[return-value]

    monkeypatch.setattr(divide_file, "_added", added)
    model, batch, whole = integers((20, 3))
    stages = Stages.of(model, batch, 2)
    value, gradient = stages.gradient(stages.divide(whole), batch)
    expected_value, expected = whole_gradient(model, batch, whole)
    assert value != expected_value and not torch.equal(gradient, expected)


@pytest.mark.parametrize("parts", [2, 4])
def test_one_layer_with_nearly_all_weights_is_balanced(parts: int) -> None:
    """The Caltech-101 job: the first layer has 98.6 % of 74,770,901 parameters. Nothing is built."""

    def build() -> nn.Module:
        return nn.Sequential(
            nn.Flatten(),
            nn.Linear(49152, 1500),
            nn.ReLU(),
            nn.Linear(1500, 650),
            nn.ReLU(),
            nn.Linear(650, 101),
        )

    plan = plan_split(
        from_torch(build, F.cross_entropy), batch_of(np.zeros((1, 3, 128, 128)), np.zeros(1)), parts
    )
    held = [sum(stop - start for start, stop in plan.ranges_of(part)) for part in range(parts)]
    assert plan.elems == sum(held) == 74_770_901
    assert max(held) < 1.001 * plan.elems / parts
    sent = sum(value.bytes_of(1) for value, _ in plan.crossings() if value.name != "targets")
    assert sent < 4 * 49152 + 4 * 1500 * parts  # by rows each part gets its own pixels, not all
    assert not any(value.has_gradient for value in plan.values if value.name.startswith("narrow"))


def test_columns_travel_where_outputs_are_many() -> None:
    model, batch, _ = integers((3, 64, 3))
    plan = plan_split(model, batch, 2)
    assert {piece.axis for pieces in plan.pieces for piece in pieces if piece.name == "1.weight"} == {0}
    assert "inputs" not in {name for stage in plan.stages if stage.part == 0 for name in stage.outputs}


@pytest.mark.parametrize("seed", range(20))
def test_the_heaviest_group_is_as_light_as_any_cut_makes_it(seed: int) -> None:
    rng = np.random.default_rng(seed)
    weights: list[int] = rng.integers(0, 10, rng.integers(3, 8)).tolist()
    groups = contiguous_groups(weights, [0.0] * len(weights), 3)

    def heaviest(found: Sequence[int]) -> int:
        return max(
            sum(w for w, own in zip(weights, found, strict=True) if own == group) for group in range(3)
        )

    n = len(weights)
    every = [[0] * a + [1] * (b - a) + [2] * (n - b) for a in range(1, n - 1) for b in range(a + 1, n)]
    assert groups in every
    assert heaviest(groups) == min(map(heaviest, every))


def test_a_further_weight_fills_up_like_water() -> None:
    assert filled([4.0, 1.0, 0.0], 4.0) == [0.0, 0.375, 0.625]
    assert sum(filled([9.0, 1.0], 2.0)) == 1.0
