"""Optimizers that run on the workers, and those that the shards stand for."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import gradstream as gs
from gradstream.errors import ConfigError
from gradstream.session.optimizer import DistributedOptimizer
from gradstream.session.rules import rule_for, rule_of
from gradstream.testing.sessions import loop_in_threads
from small_loops import (
    DEADLINES,
    INPUTS,
    PLAIN,
    TARGETS,
    Change,
    Made,
    Make,
    clamp,
    freeze,
    momentum,
    net,
    one_worker,
    steps,
    train,
    weight,
)


class OldStyle(torch.optim.Optimizer):
    """One of a user's own, that gives parameters new data, and whose step returns what it likes."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.data = parameter.data - 0.1 * parameter.grad.sign()
        return ["nothing"]


OPTIMIZERS: list[Make] = [
    lambda m: torch.optim.RMSprop(m.parameters(), lr=0.01, centered=True),
    lambda m: torch.optim.NAdam(m.parameters(), lr=0.01, weight_decay=0.1),
    lambda m: torch.optim.Adam(m.parameters(), lr=0.01, amsgrad=True),
    lambda m: torch.optim.Adagrad(m.parameters(), lr=0.1, lr_decay=0.1),
    lambda m: torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.5, maximize=True),
    lambda m: torch.optim.Adafactor(m.parameters(), lr=0.01),
    lambda m: torch.optim.Rprop(m.parameters(), lr=0.01),
    lambda m: torch.optim.SGD(
        [{"params": m[0].parameters(), "momentum": 0.9}, {"params": m[2].parameters(), "momentum": 0.0}],
        lr=0.1,
    ),
    lambda m: OldStyle(m.parameters()),
]


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_any_optimizer_makes_its_own_steps(make: Make) -> None:
    found = one_worker(make)
    for name, value in train(gs.Session(), make).items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12)


ONE_IS_ALONE = [
    gs.Downpour(push_every=3, fetch_every=2, overlap=False),
    gs.SSP(bound=2),
    gs.strategies.AsySG(gradients=2),
    gs.strategies.DCASGD(strength=0),
    gs.Softsync(power=0),
    gs.ParameterAveraging(every=3),
    gs.DiLoCo(every=3, outer_lr=1.0, outer_momentum=0.0),
    gs.ElasticAveraging(every=1 << 30, moving_rate=1.0),
]


@pytest.mark.parametrize("strategy", ONE_IS_ALONE)
def test_under_any_strategy_whose_pushes_may_be_steps(strategy: gs.Strategy) -> None:
    make = OPTIMIZERS[0]
    if isinstance(strategy, gs.strategies.AsySG | gs.Downpour):  # gradients of parameters of before
        loop_in_threads(
            lambda session: train(session, make), workers=2, strategy=strategy, deadlines=DEADLINES
        )
        return
    found = one_worker(make, strategy=strategy)
    for name, value in train(gs.Session(), make).items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12)


def test_workers_average_where_their_own_optimizers_have_got_to() -> None:
    def loop(session: gs.Session) -> dict[str, torch.Tensor]:
        model = net()
        _, optimizer = session.wrap(model, torch.optim.RMSprop(model.parameters()))
        list(steps(model, optimizer, range(session.rank, 4 + session.rank)))
        session.close()
        return {name: value.detach().clone() for name, value in model.named_parameters()}

    both = loop_in_threads(loop, strategy=gs.ParameterAveraging(every=2), deadlines=DEADLINES)
    models = [net(), net()]
    made = [torch.optim.RMSprop(model.parameters()) for model in models]
    for begin in (0, 2):
        for rank in range(2):
            list(steps(models[rank], made[rank], range(begin + rank, begin + rank + 2)))
        with torch.no_grad():
            for mine, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
                mine.copy_((mine + other) / 2)
                other.copy_(mine)
    for name, value in models[0].named_parameters():
        torch.testing.assert_close(both[1][name], value.detach(), rtol=1e-9, atol=1e-12)
        assert torch.equal(both[0][name], both[1][name])


def test_options_state_hooks_and_closures_of_such_an_optimizer_are_torchs() -> None:
    def loop(session: gs.Session) -> dict[str, torch.Tensor]:
        model = net()
        mine = momentum(model)
        early = torch.optim.lr_scheduler.ExponentialLR(mine, 0.9)
        _, optimizer = session.wrap(model, mine, fused=False)
        assert optimizer is mine
        late = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=9)  # momentum, too
        optimizer.register_step_post_hook(lambda *_: clamp(model, optimizer))
        for number in range(8):

            def closure(number: int = number) -> torch.Tensor:
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(
                    model(INPUTS[number : number + 4]), TARGETS[number : number + 4]
                )
                loss.backward()  # type: ignore[no-untyped-call]
                return loss

            if number == 5:  # frozen for one step
                freeze(model, optimizer)
            optimizer.step(closure)  # type: ignore[arg-type]  # torch's own closures return tensors
            model[0].requires_grad_(True)
            early.step()
            late.step()
            if number == 3:
                optimizer.load_state_dict(optimizer.state_dict())
                optimizer.param_groups[0]["weight_decay"] = 0.2
        session.close()
        assert optimizer.state[weight(model, 0)]["momentum_buffer"].shape == (4, 3)
        return {name: value.detach().clone() for name, value in model.named_parameters()}

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (found,) = loop_in_threads(loop, workers=1, strategy=PLAIN, deadlines=DEADLINES)
    for name, value in loop(gs.Session()).items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12)


def test_an_optimizer_with_steps_behind_it_runs_on_the_workers() -> None:
    def loop(session: gs.Session) -> dict[str, torch.Tensor]:
        model = net()
        made = momentum(model)
        list(steps(model, made, range(2)))
        session.wrap(model, made, fused=False)
        list(steps(model, made, range(2, 5)))
        session.close()
        return {name: value.detach().clone() for name, value in model.named_parameters()}

    (found,) = loop_in_threads(loop, workers=1, strategy=PLAIN, deadlines=DEADLINES)
    for name, value in loop(gs.Session()).items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12)


def adagrad(model: nn.Module) -> Made:
    return torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.5)


def test_a_fresh_adagrad_is_wrapped() -> None:
    found = one_worker(adagrad)
    for name, value in train(gs.Session(), adagrad).items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("stepped", [True, False])
def test_an_adagrad_that_remembers_something_is_not(stepped: bool) -> None:
    model = net()
    made = adagrad(model)
    if stepped:
        list(steps(model, made, range(1)))
    else:
        made.state[weight(model, 0)]["sum"].fill_(2.0)
    with pytest.raises(ConfigError, match=r"wrap it before its first step.*fused=False"):
        DistributedOptimizer(made, rule_of(made), lambda lr, loss: None)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda _, o: o.param_groups[0].update(momentum=0.5), "only lr may change.*fused=False"),
        (lambda _, o: o.inner.register_step_post_hook(lambda *_: None), "has a step hook.*fused=False"),
    ],
)
def test_what_the_servers_cannot_follow_names_the_way_out(change: Change, part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        one_worker(momentum, change)


@pytest.mark.parametrize(
    ("strategy", "part"),
    [
        (gs.strategies.StalenessAware(), "weighs gradients"),
        (gs.Softsync(), "weighs gradients"),
        (gs.Softsync(power=0), "weighs gradients"),  # a mean of two
        (gs.strategies.DCASGD(), "corrects each push"),
        (gs.Downpour(local_momentum=0.5), "local_momentum"),
        (gs.Downpour(fetch_every=2, local_lr=0.1), "local_lr"),
        (gs.SSP(local_lr=0.1), "local_lr"),
        (gs.ParameterAveraging(state="averaged"), "averages the state"),
    ],
)
def test_a_strategy_that_cannot_do_with_steps_says_why(strategy: gs.Strategy, part: str) -> None:
    made = torch.optim.RMSprop(net().parameters())
    with pytest.raises(ConfigError, match=f"RMSprop: .*{part}.*synchronous"):
        rule_for(made, strategy, 2)
    assert rule_for(momentum(net()), strategy, 2) is not None
    with pytest.raises(ConfigError, match=f"fused=False.*{part}"):
        rule_for(momentum(net()), strategy, 2, fused=False)


def test_lbfgs_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match="LBFGS: it evaluates the loss several times"):
        rule_for(torch.optim.LBFGS(net().parameters()), PLAIN, 1)


def test_with_local_momentum_no_gradient_is_no_step_of_torchs() -> None:
    plain = lambda m: torch.optim.SGD(m.parameters(), lr=0.1)  # noqa: E731
    with pytest.raises(ConfigError, match="has no gradient"):
        one_worker(plain, freeze, strategy=gs.Downpour(local_momentum=0.5, overlap=False))
