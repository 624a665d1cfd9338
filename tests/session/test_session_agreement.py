"""Replicas on machines that round differently stay together; replicas of other scripts are found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import gradstream as gs
from gradstream.errors import ReplicasDifferError
from gradstream.runtime.deadlines import Deadlines
from gradstream.session import agreement
from gradstream.testing.sessions import loop_in_threads

DEADLINES = Deadlines(silence_s=10.0)
Made = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Made] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


def loop_of(
    made: Made, steps: int, after: Callable[[gs.Session, nn.Sequential], None]
) -> Callable[[gs.Session], Any]:
    """A loop that does something to its parameters after each step."""

    def loop(session: gs.Session) -> Any:
        draw = torch.Generator().manual_seed(session.rank)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        with torch.no_grad():  # threads share torch's own generator
            for one in model.parameters():
                one.copy_(0.3 * torch.randn(one.shape, generator=torch.Generator().manual_seed(one.numel())))
        model[0].bias.requires_grad_(False)  # frozen: it has no place in a round
        optimizer = made(model.parameters())
        session.wrap(model, optimizer)
        for _ in range(steps):
            optimizer.zero_grad()
            x = torch.randn(4, 8, generator=draw)
            loss: Any = (model(x) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            after(session, model)
        session.close()
        state = [
            value for one in optimizer.state.values() for value in one.values() if torch.is_tensor(value)
        ]
        return [one.detach().clone() for one in (*model.parameters(), *state)]

    return loop


def rounds_differently(session: gs.Session, model: nn.Sequential) -> None:
    """What another processor does: the last bit of a part of the parameters is another one."""
    if session.rank == 1:
        with torch.no_grad():
            for one in model.parameters():
                if one.requires_grad:
                    odd = torch.arange(one.numel()).view_as(one) % 2 == 1
                    one.copy_(torch.where(odd, torch.nextafter(one, one + 1), one))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_machines_that_round_differently_train_on(optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "EVERY", 15)
    made = OPTIMIZERS[optimizer]
    first, second = loop_in_threads(loop_of(made, 50, rounds_differently), deadlines=DEADLINES)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    alike, _ = loop_in_threads(loop_of(made, 50, lambda session, model: None), deadlines=DEADLINES)
    assert max(float((one - other).abs().max()) for one, other in zip(first, alike, strict=True)) < 1e-4


def test_replicas_that_round_alike_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("the workers have exchanged their parameters")

    monkeypatch.setattr(agreement.ReplicaAgreement, "_agree", never)
    loop_in_threads(loop_of(OPTIMIZERS["adamw"], 5, lambda session, model: None), deadlines=DEADLINES)


@pytest.mark.parametrize("late", [0, 30])
def test_another_rate_on_one_worker_is_found(late: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once; and where machines round differently anyhow, at the next agreement."""
    monkeypatch.setattr(agreement, "EVERY", 10)
    steps = 0

    def faster(session: gs.Session, model: nn.Sequential) -> None:
        nonlocal steps
        if late:
            rounds_differently(session, model)
        if session.rank == 1:
            steps += 1
            if steps > late:
                with torch.no_grad():
                    model.get_parameter("2.weight").mul_(1.001)

    with pytest.raises(ReplicasDifferError, match=r"rounding cannot explain it: '2.weight'") as found:
        loop_in_threads(loop_of(OPTIMIZERS["sgd"], 60, faster), deadlines=DEADLINES)
    assert int(str(found.value).partition("step ")[2].partition(":")[0]) <= late + 12


def test_a_frozen_parameter_that_differs_is_found() -> None:
    def thaws(session: gs.Session, model: nn.Sequential) -> None:
        if session.rank == 1:
            with torch.no_grad():
                model.get_parameter("0.bias").add_(1.0)

    with pytest.raises(ReplicasDifferError, match=r"frozen at session\.wrap"):
        loop_in_threads(loop_of(OPTIMIZERS["sgd"], 6, thaws), deadlines=DEADLINES)


def test_a_worker_without_samples_decides_as_the_others_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first difference shows in a round to which the worker that rounds differently brings nothing."""
    monkeypatch.setattr(agreement, "EVERY", 4)

    def loop(session: gs.Session) -> Any:
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session.wrap(model, optimizer)
        for number in range(12):
            optimizer.zero_grad()
            session._progress.samples.note(0 if session.rank and number in (3, 4) else 4)  # type: ignore[attr-defined]
            loss: Any = model(torch.ones(4, 4)).sum()
            loss.backward()
            optimizer.step()
            if number >= 2 and session.rank == 1:
                with torch.no_grad():
                    model.weight.copy_(torch.nextafter(model.weight, model.weight + 1))
        session.close()
        return model.weight.detach().clone()

    first, second = loop_in_threads(loop, deadlines=DEADLINES)
    assert torch.equal(first, second)


def test_a_parameter_near_zero_is_measured_by_the_others() -> None:
    """Its rounding is that of the step."""

    def swings(session: gs.Session, model: nn.Sequential) -> None:
        if session.rank == 1:
            with torch.no_grad():
                model.get_parameter("2.bias").add_(3e-8)

    loop_in_threads(loop_of(OPTIMIZERS["sgd"], 12, swings), deadlines=DEADLINES)


@pytest.mark.parametrize("early", [0, 1])
def test_a_loop_that_ends_early_stops_nobody_where_machines_round_differently(
    early: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agreement, "EVERY", 5)
    steps = Counter[int]()

    def loop(session: gs.Session) -> Any:
        def counted(session: gs.Session, model: nn.Sequential) -> None:
            steps[session.rank] += 1
            rounds_differently(session, model)

        return loop_of(OPTIMIZERS["sgd"], 12 if session.rank == early else 20, counted)(session)

    first, second = loop_in_threads(loop, deadlines=DEADLINES)
    assert steps == {early: 12, 1 - early: 20}
    names = 4  # weights and biases, before the optimizers' state; after `close` those of the last step are everywhere
    assert all(torch.equal(one, other) for one, other in zip(first[:names], second[:names], strict=True))
