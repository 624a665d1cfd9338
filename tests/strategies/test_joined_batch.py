"""Synchronous training by four workers compared with one machine that takes their joined batch.

Each test is a row of the table in docs/strategies/synchronous.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gradstream as gs

WORKERS, BATCH, SAMPLES = 4, 16, 64
PAD = -1.0
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Net(nn.Module):
    """Two layers, and one between them."""

    def __init__(self, between: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), between, nn.Tanh(), nn.Linear(8, 3)).to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out


def mse(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).square().mean()


def over_tokens(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean over all entries that are no padding: of each worker its own number."""
    return (outputs - targets).square()[targets != PAD].mean()


def sum_over_tokens(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).square()[targets != PAD].sum()


def gap(
    between: Callable[[], nn.Module] = nn.Identity,
    loss: Loss = mse,
    *,
    reduction: Any = "mean",
    dtype: torch.dtype = torch.float64,
    shares: Any = None,
    **options: Any,
) -> float:
    """Largest difference of a parameter after 8 rounds: four workers, and one with their joined batch."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((SAMPLES, 6)), rng.standard_normal((SAMPLES, 3))
    y[: SAMPLES // 2, 1:] = np.where(loss is mse, y[: SAMPLES // 2, 1:], PAD)  # half of the samples are short
    model = gs.from_torch(lambda: Net(between(), dtype), loss, reduction=reduction)
    job: dict[str, Any] = {
        "strategy": "synchronous",
        "steps": 8,
        "optimizer": gs.optim.SGD(0.05, momentum=0.9),
    }
    job |= {"seed": 3, **options}
    one = gs.simulate(model, gs.from_arrays(x, y), workers=1, batch_size=BATCH, **job)
    sizes = {"batch_size": BATCH // WORKERS} if shares is None else {"batch_size": shares}
    four = gs.simulate(model, gs.from_arrays(x, y), workers=WORKERS, **sizes, **job)
    trained = [name for name in one.parameters if "running" not in name and "num_batches" not in name]
    return max(float(np.abs(one.parameters[name] - four.parameters[name]).max()) for name in trained)


EQUAL: dict[str, dict[str, Any]] = {
    "a mean over samples": {},
    "a sum over samples": {"loss": lambda outputs, targets: mse(outputs, targets) * len(targets),
                           "reduction": "sum"},
    "shares that differ": {"shares": [7, 1, 0, 8]},
    "an adaptive rule, decay": {"optimizer": gs.optim.AdamW(0.01, weight_decay=0.1)},
    "a schedule, groups": {"optimizer": gs.optim.SGD(gs.schedules.Cosine(0.1), weight_decay=0.1),
                           "groups": [{"match": "*.bias", "weight_decay": 0.0, "lr_scale": 2.0}]},
    "LayerNorm": {"between": lambda: nn.LayerNorm(8)},
    "a bound that nothing reaches": {"clip_norm": 1e6, "clip_value": 1e6},
    "tokens as a sum": {"loss": sum_over_tokens, "reduction": "sum", "optimizer": gs.optim.SGD(0.01)},
}  # fmt: skip

DIFFERENT: dict[str, dict[str, Any]] = {
    "clip_norm": {"clip_norm": 0.5},
    "clip_value": {"clip_value": 0.05},
    "BatchNorm": {"between": lambda: nn.BatchNorm1d(8)},
    "Dropout": {"between": lambda: nn.Dropout(0.5)},
    "a mean over tokens": {"loss": over_tokens},
}


@pytest.mark.parametrize("row", EQUAL)
def test_equal_to_the_rounding_of_sums(row: str) -> None:
    assert gap(**EQUAL[row]) < 1e-12


def test_in_float32_the_rounding_is_that_of_float32() -> None:
    assert 0 < gap(dtype=torch.float32) < 1e-5


@pytest.mark.parametrize("row", DIFFERENT)
def test_not_equal(row: str) -> None:
    """By far more than rounding: the page must say so."""
    assert gap(**DIFFERENT[row]) > 1e-4
