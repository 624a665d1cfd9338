"""Modules and losses out of the ordinary: gradients of plain torch, final as they are reported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  its usual name
from torch.utils.checkpoint import checkpoint

import gradstream as gs
from gradstream._simulate import simulate
from gradstream.model import Batch, TorchModel, built_module
from gradstream.strategies import AllReduce

Pair = tuple[torch.Tensor, torch.Tensor]
FEATURES, CLASSES, SAMPLES = 6, 3, 24
BUCKET = 1 / 4096  # MiB: 64 elements


class Odd(nn.Module):
    """Layers that are used twice, frozen, not used, tied and computed again; with scalars in between."""

    def __init__(self, again: bool = True) -> None:
        super().__init__()
        self.again = again
        self.first = nn.Linear(FEATURES, 8)
        self.frozen = nn.Linear(8, 8)
        nn.init.eye_(self.frozen.weight)  # frozen ones come from a seed of their own
        nn.init.zeros_(self.frozen.bias)
        self.frozen.requires_grad_(False)
        self.twice = nn.Linear(8, 8)
        self.unused = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.tied = nn.Linear(8, 8, bias=False)
        self.tied.weight = self.twice.weight
        self.half_frozen = nn.Linear(8, 8)
        nn.init.ones_(self.half_frozen.bias)
        self.half_frozen.bias.requires_grad_(False)
        self.last = nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.frozen(torch.tanh(self.first(x))))
        for _ in range(2):
            x = torch.tanh(self.twice(x)) * self.scale
        x = checkpoint(self.middle, x, use_reentrant=False) if self.again else self.middle(x)
        outputs: torch.Tensor = self.last(torch.tanh(self.half_frozen(x)))
        return outputs

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.tied(x) + self.twice(x))


def once() -> nn.Module:
    return Odd(again=False)


def ordinary(module: nn.Module, batch: Pair) -> torch.Tensor:
    return F.cross_entropy(module(batch[0]), batch[1])


def adversarial(module: nn.Module, batch: Pair) -> torch.Tensor:
    """Takes a gradient by its inputs on the way (Goodfellow and others, 2015)."""
    x = batch[0].clone().requires_grad_()
    loss = ordinary(module, (x, batch[1]))
    (by_inputs,) = torch.autograd.grad(loss, x, retain_graph=True)
    return loss + ordinary(module, (x.detach() + 0.1 * by_inputs.sign(), batch[1]))


def penalty_of_inputs(module: nn.Module, batch: Pair) -> torch.Tensor:
    """Goes through the derivative once more (Gulrajani and others, 2017)."""
    x = batch[0].clone().requires_grad_()
    loss = ordinary(module, (x, batch[1]))
    (by_inputs,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + by_inputs.square().sum()


def penalty_of_weights(module: nn.Module, batch: Pair) -> torch.Tensor:
    loss = ordinary(module, batch)
    weights = [p for p in module.parameters() if p.requires_grad]
    found = torch.autograd.grad(loss, weights, create_graph=True, allow_unused=True, materialize_grads=True)
    return loss + torch.stack([one.square().sum() for one in found]).sum()


def sample_by_sample(module: nn.Module, batch: Pair) -> torch.Tensor:
    x: torch.Tensor = batch[0]
    outputs = torch.func.vmap(lambda one: module(one[None])[0])(x)
    return F.cross_entropy(outputs, batch[1])


def straight() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, CLASSES))


CASES: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "odd": (Odd, ordinary),
    "odd, adversarial": (once, adversarial),
    "odd, penalty of weights": (once, penalty_of_weights),
    "adversarial": (straight, adversarial),
    "penalty of inputs": (straight, penalty_of_inputs),
    "penalty of weights": (straight, penalty_of_weights),
    "sample by sample": (straight, sample_by_sample),
}


def samples() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    rng = np.random.default_rng(0)
    return rng.standard_normal((SAMPLES, FEATURES), np.float32), rng.integers(0, CLASSES, SAMPLES)


def model_of(case: str) -> TorchModel:
    build, loss = CASES[case]
    return gs.from_torch(build, loss, loss_of="batch")


@pytest.fixture(params=[1, 1 << 20], ids=["wide", "narrow"], autouse=True)
def _wide_from(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wide layers write their gradient themselves."""
    monkeypatch.setattr(built_module, "WIDE_ELEMS", request.param)


@pytest.mark.parametrize("case", CASES)
def test_the_gradient_is_that_of_torch_and_final_as_it_is_reported(case: str) -> None:
    build, loss = CASES[case]
    torch.manual_seed(3)
    module, (x, y) = build(), samples()
    loss(module, (torch.from_numpy(x), torch.from_numpy(y))).backward()
    expected = {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in module.named_parameters()
        if p.requires_grad
    }
    model = model_of(case)
    parameters = torch.empty(model.layout.elems)
    model.init(3, parameters)
    for _ in range(2):  # nothing of one is left in the next
        gradient = torch.full_like(parameters, torch.nan)
        seen: list[torch.Tensor] = []
        model.gradient(
            parameters, Batch(x, y, SAMPLES, np.arange(SAMPLES)), gradient, seed=0,
            report=lambda elems, gradient=gradient, seen=seen: seen.append(gradient[:elems].clone()),  # type: ignore[misc]
        )  # fmt: skip
        assert all(torch.equal(part, gradient[: len(part)]) for part in seen)
        assert len(seen[-1]) == len(gradient)
        for name, view in model.layout.views(gradient):
            torch.testing.assert_close(view, expected[name], msg=name)


@pytest.mark.parametrize("case", CASES)
def test_overlap_on_or_off_changes_no_bit(case: str) -> None:
    """Joined minibatches (`accumulate`) for every other case."""
    accumulate = 1 + list(CASES).index(case) % 2
    x, y = samples()
    options: Any = {
        "workers": 2, "batch_size": [4, 2], "steps": 2, "accumulate": accumulate,
        "optimizer": gs.optim.Momentum(0.1, 0.9),
    }  # fmt: skip
    runs = [
        simulate(model_of(case), gs.from_arrays(x, y), strategy=strategy, **options)
        for strategy in (
            AllReduce(bucket_mib=BUCKET),
            AllReduce(bucket_mib=BUCKET, overlap=False),
            AllReduce(bucket_mib=BUCKET, sharded=True),
            AllReduce(sharded=True, overlap=False),
        )
    ]
    for run in runs[1:]:
        for name, value in runs[0].parameters.items():
            assert np.array_equal(run.parameters[name], value), name
