"""An ordinary loop of few steps, and what may be done to its model on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import gradstream as gs
from gradstream.testing.sessions import loop_in_threads

DEADLINES = gs.Deadlines(join_s=60, silence_s=10, lease_s=8, retry_s=5)
PLAIN = gs.Downpour(overlap=False)  # one worker is the optimizer alone
GENERATOR = torch.Generator().manual_seed(0)
INPUTS = torch.randn(32, 3, generator=GENERATOR).double()
TARGETS = torch.randn(32, 1, generator=GENERATOR).double()

SETUP = """
import torch
from torch import nn
import gradstream
session = gradstream.join(deadlines=gradstream.Deadlines(join_s=60, silence_s=10, lease_s=3, retry_s=5))
torch.manual_seed(session.rank)
model = nn.Linear(4, 1)
model, optimizer = session.wrap(model, torch.optim.SGD(model.parameters(), lr=0.01))
"""
"""The first lines of a script that has its own loop."""

Made = torch.optim.Optimizer
Make = Callable[[nn.Sequential], Made]
Change = Callable[[nn.Sequential, Made], object]


def net() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5, generator=generator)
    return model


def weight(model: nn.Sequential, number: int) -> nn.Parameter:
    return model[number].get_parameter("weight")


def momentum(model: nn.Module) -> Made:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


def steps(model: nn.Module, optimizer: Made, numbers: range) -> Iterator[int]:
    """Steps of an ordinary loop: of samples 4 by 4, in turn."""
    for number in numbers:
        at = slice(number * 4 % 32, number * 4 % 32 + 4)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(INPUTS[at]), TARGETS[at]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        yield number


def train(
    session: gs.Session,
    make: Make = momentum,
    change: Change = lambda model, optimizer: None,
    *,
    num_steps: int = 8,
    changed_at: int = 2,
    build: Callable[[], nn.Sequential] = net,
    **wrap: Any,
) -> dict[str, torch.Tensor]:
    model = build()
    _, optimizer = session.wrap(model, make(model), **wrap)
    for number in steps(model, optimizer, range(num_steps)):
        if number == changed_at:
            change(model, optimizer)
    session.close()
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def one_worker(*given: Any, strategy: gs.Strategy = PLAIN, **options: Any) -> dict[str, torch.Tensor]:
    loop = lambda session: train(session, *given, **options)  # noqa: E731
    (found,) = loop_in_threads(loop, workers=1, strategy=strategy, deadlines=DEADLINES)
    return found


def clamp(model: nn.Sequential, _: Made) -> None:
    with torch.no_grad():
        weight(model, 2).clamp_(-0.01, 0.01)


def freeze(model: nn.Sequential, _: Made) -> None:
    model[0].requires_grad_(False)
