"""Loops in which faults that people reported of other systems are acted out, beside torch alone on all samples."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

import gradstream as gs

DEADLINES = gs.Deadlines(join_s=60, silence_s=10, lease_s=8, retry_s=5)
Batch = tuple[torch.Tensor, torch.Tensor]


def samples(count: int, seed: int = 0) -> Batch:
    """(inputs (count, 3), targets (count, 1)), in float64."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 3, generator=generator, dtype=torch.float64)
    return x, torch.randn(count, 1, generator=generator, dtype=torch.float64)


def part(data: Batch, start: int, stop: int) -> Batch:
    return data[0][start:stop], data[1][start:stop]


def joined(*parts: Batch) -> Batch:
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])


def line(rank: int = 0) -> nn.Linear:
    """A layer whose first values differ between ranks, as where each process draws from its own seed."""
    model = nn.Linear(3, 1, dtype=torch.float64)
    generator = torch.Generator().manual_seed(100 + rank)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5, generator=generator)
    return model


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, **options})


def backward(loss: torch.Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    """One step of the mean squared error."""
    optimizer.zero_grad()
    backward(nn.functional.mse_loss(model(batch[0]), batch[1]))
    optimizer.step()


def alone(batches: Iterable[Batch], **options: Any) -> torch.Tensor:
    """All parameters after torch's own steps on these minibatches."""
    model = line()
    optimizer = sgd(model, **options)
    for batch in batches:
        step(model, optimizer, batch)
    return flat(model)


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def close(found: Iterable[torch.Tensor], expected: torch.Tensor) -> None:
    """Holds that every worker ended with these parameters, up to the rounding of sums."""
    for one in found:
        torch.testing.assert_close(one, expected, rtol=1e-9, atol=1e-12)
