"""What a loop does besides steps where parameters are exchanged, and optimizers that run on the workers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gradstream as gs
from gradstream.errors import ConfigError
from gradstream.session import watch
from gradstream.session.held import HeldModule
from gradstream.session.optimizer import DistributedOptimizer
from gradstream.session.rules import rule_for, rule_of
from gradstream.testing.sessions import loop_in_threads

DEADLINES = gs.Deadlines(join_s=60, silence_s=10, lease_s=3, retry_s=5)
PLAIN = gs.Downpour(overlap=False)  # one worker is the optimizer alone
GENERATOR = torch.Generator().manual_seed(0)
INPUTS = torch.randn(32, 3, generator=GENERATOR).double()
TARGETS = torch.randn(32, 1, generator=GENERATOR).double()

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


# ---- what the exchange would undo -------------------------------------------------------


def clamp(model: nn.Sequential, _: Made) -> None:
    with torch.no_grad():
        weight(model, 2).clamp_(-0.01, 0.01)


def averaged(model: nn.Sequential, _: Made) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.lerp_(torch.zeros_like(parameter), 0.1)


def data(model: nn.Sequential, _: Made) -> None:
    weight(model, 2).data.clamp_(-0.01, 0.01)


def by_numpy(model: nn.Sequential, _: Made) -> None:
    weight(model, 2).detach().numpy()[0, 3] = 7.0


def other_data(model: nn.Sequential, _: Made) -> None:
    weight(model, 2).data = weight(model, 2).data.clone()


def replaced(model: nn.Sequential, _: Made) -> None:
    model[2] = nn.Linear(4, 1).double()


def assigned(model: nn.Sequential, _: Made) -> None:
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (clamp, r"worker-0, step 3: parameter '2.weight' was written to in place"),
        (averaged, "written to in place"),
        (lambda model, _: model.load_state_dict(model.state_dict()), "written to in place"),
        (data, r"'2.weight' was written to, through `.data`, numpy"),
        (by_numpy, r"'2.weight' was written to, through `.data`, numpy"),
        (other_data, r"'2.weight' was given other data"),
        (replaced, r"does not have the parameter '2.\w+' of session.wrap any more"),
        (assigned, "build and load the model before session.wrap"),
    ],
)
@pytest.mark.parametrize("fused", [True, False])
def test_the_step_after_a_change_of_parameters_is_refused(change: Change, part: str, fused: bool) -> None:
    with pytest.raises(ConfigError, match=part) as caught:
        one_worker(momentum, change, fused=fused)
    assert fused or "synchronous" in str(caught.value) or "before session.wrap" in str(caught.value)


@pytest.mark.parametrize("strategy", [gs.ParameterAveraging(every=4), gs.SSP(bound=1), gs.DiLoCo(every=4)])
def test_under_other_strategies_likewise(strategy: gs.Strategy) -> None:
    with pytest.raises(ConfigError, match="written to in place"):
        loop_in_threads(lambda session: train(session, change=clamp), strategy=strategy, deadlines=DEADLINES)


def test_every_element_is_looked_at_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "SAMPLE_ELEMS", 4)

    def loop(session: gs.Session) -> None:
        model = net()
        _, optimizer = session.wrap(model, momentum(model))
        for number in steps(model, optimizer, range(40)):
            if number > 4:  # the exchange sets it right again at each step, and the loop spoils it again
                weight(model, 0).data[0, 0] += 1e-6

    with pytest.raises(ConfigError, match=r"'0.weight' was written to"):
        loop_in_threads(loop, workers=1, strategy=PLAIN, deadlines=DEADLINES)


def test_at_the_first_steps_all_elements_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "SAMPLE_ELEMS", 4)
    with pytest.raises(ConfigError, match=r"step 1: parameter '0.weight' was written to"):
        one_worker(momentum, lambda model, _: weight(model, 0).data.add_(1e-6), changed_at=0)


def test_the_optimizer_that_was_wrapped_is_not_stepped_beside() -> None:
    def loop(session: gs.Session) -> None:
        model = net()
        inner = momentum(model)
        _, optimizer = session.wrap(model, inner)
        for _ in steps(model, optimizer, range(3)):
            inner.step()

    with pytest.raises(ConfigError, match="written to in place"):
        loop_in_threads(loop, workers=1, strategy=PLAIN, deadlines=DEADLINES)


def test_what_is_changed_before_an_evaluation_or_the_end_is_refused_too() -> None:
    def loop(session: gs.Session, *, at_end: bool) -> None:
        model = net()
        _, optimizer = session.wrap(model, momentum(model))
        list(steps(model, optimizer, range(2)))
        clamp(model, optimizer)
        if at_end:
            session.close()
        with session.evaluation():
            pass

    for at_end in (True, False):
        with pytest.raises(ConfigError, match=r"'2.weight' was written to in place"):
            loop_in_threads(
                lambda session, at_end=at_end: loop(session, at_end=at_end),  # type: ignore[misc]
                workers=1,
                strategy=PLAIN,
                deadlines=DEADLINES,
            )


def test_what_an_evaluation_changes_is_put_back_and_buffers_are_the_scripts() -> None:
    def build() -> nn.Sequential:
        model = net()
        model.register_buffer("mine", torch.zeros(1))
        model.register_parameter("frozen", nn.Parameter(torch.zeros(1), requires_grad=False))
        return model

    def loop(session: gs.Session) -> dict[str, torch.Tensor]:
        model = build()
        alone = momentum(model)
        _, optimizer = session.wrap(model, alone)
        for _ in steps(model, optimizer, range(8)):
            with torch.no_grad():
                model.get_buffer("mine").add_(1)
                model.get_parameter("frozen").add_(1)
            if optimizer is not alone:
                with session.evaluation():
                    clamp(model, optimizer)
        session.close()
        return {name: value.detach().clone() for name, value in model.named_parameters()}

    (found,) = loop_in_threads(loop, workers=1, strategy=PLAIN, deadlines=DEADLINES)
    for name, value in loop(gs.Session()).items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12)


def test_a_changed_array_is_refused() -> None:
    def loop(session: gs.Session) -> None:
        w = np.ones(3)
        for _ in range(3):
            session.exchange(w, np.ones(3), gs.SGD(lr=0.1), samples=1)
            w *= 0.5

    with pytest.raises(ConfigError, match=r"array '.*' was changed since the exchange before"):
        loop_in_threads(loop, workers=1, strategy=PLAIN, deadlines=DEADLINES)


# ---- parameters without a gradient, frozen, new -----------------------------------------


def freeze(model: nn.Sequential, _: Made) -> None:
    model[0].requires_grad_(False)


def add(model: nn.Sequential, optimizer: Made) -> None:
    model.register_parameter("new", nn.Parameter(torch.zeros(1, dtype=torch.float64)))
    optimizer.param_groups[0]["params"].append(model.get_parameter("new"))
    model.register_forward_hook(lambda _, args, out: out + model.get_parameter("new"))


def drop(model: nn.Sequential, optimizer: Made) -> None:
    optimizer.param_groups[0]["params"].pop()


@pytest.mark.parametrize(
    ("make", "change", "part"),
    [
        (momentum, freeze, r"'0.weight' has no gradient, and requires none any more \(it was frozen\)"),
        (lambda m: torch.optim.AdamW(m.parameters()), freeze, "AdamW on the servers would move it"),
        (
            lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
            add,
            "group 0, of shape .1,., has a gradient and is",
        ),
        (
            lambda m: torch.optim.RMSprop(m.parameters()),
            add,
            "group 0, of shape .1,., has a gradient and is",
        ),
        (momentum, drop, "groups of the optimizer have other parameters"),
    ],
)
def test_a_step_that_the_servers_would_make_otherwise_is_refused(
    make: Make, change: Change, part: str
) -> None:
    with pytest.raises(ConfigError, match=part):
        one_worker(make, change)


@pytest.mark.parametrize(
    "make",
    [
        lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
        lambda m: torch.optim.Adagrad(m.parameters(), lr=0.1, initial_accumulator_value=0.1),
    ],
)
def test_a_rule_that_leaves_such_a_parameter_alone_goes_on_as_torch_does(
    make: Make,
) -> None:
    found = one_worker(make, freeze)
    for name, value in train(gs.Session(), make, freeze).items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12)


def test_a_layer_that_is_unfrozen_is_refused_unless_it_was_frozen_after_wrap() -> None:
    def frozen() -> nn.Sequential:
        model = net()
        model[0].requires_grad_(False)
        return model

    def thaw(model: nn.Sequential, _: Made) -> None:
        model[0].requires_grad_(True)

    with pytest.raises(ConfigError, match="added or unfrozen after session"):
        one_worker(momentum, thaw, build=frozen)

    def loop(session: gs.Session) -> dict[str, torch.Tensor]:
        model = net()
        _, optimizer = session.wrap(model, torch.optim.RMSprop(model.parameters(), momentum=0.5))
        freeze(model, optimizer)
        for number in steps(model, optimizer, range(6)):
            if number == 2:
                thaw(model, optimizer)
        session.close()
        return {name: value.detach().clone() for name, value in model.named_parameters()}

    (found,) = loop_in_threads(loop, workers=1, strategy=PLAIN, deadlines=DEADLINES)
    for name, value in loop(gs.Session()).items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "kind", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam, torch.optim.Adam]
)
def test_a_sparse_gradient_goes_where_torch_takes_it(kind: Any) -> None:
    def loop(session: gs.Session) -> torch.Tensor:
        model = nn.Embedding(5, 2, sparse=True).double()
        nn.init.ones_(model.weight)
        _, optimizer = session.wrap(model, kind(model.parameters(), lr=0.1))
        for number in range(4):
            optimizer.zero_grad()
            model(torch.tensor([number, 1])).square().sum().backward()
            optimizer.step()
        session.close()
        return model.weight.detach().clone()

    if kind is torch.optim.Adam:
        with pytest.raises(ConfigError, match=r"does not take in torch either"):
            loop_in_threads(loop, workers=1, strategy=PLAIN, deadlines=DEADLINES)
        return
    (found,) = loop_in_threads(loop, workers=1, strategy=PLAIN, deadlines=DEADLINES)
    torch.testing.assert_close(found, loop(gs.Session()), rtol=1e-9, atol=1e-12)


def test_parameters_of_half_precision_are_refused_with_what_to_do() -> None:
    model = net().to(torch.bfloat16)
    with pytest.raises(ConfigError, match=r"has torch.bfloat16; .* torch.autocast"):
        HeldModule(model, list(model.parameters()))


# ---- optimizers that run on the workers -------------------------------------------------


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
    gs.SSP(bound=0),
    gs.SSP(bound=2),
    gs.AsySG(gradients=2),
    gs.DCASGD(strength=0),
    gs.Softsync(power=0),
    gs.StalenessAware(power=0),
    gs.ParameterAveraging(every=3),
    gs.DiLoCo(every=3, outer_lr=1.0, outer_momentum=0.0),
    gs.ElasticAveraging(every=1 << 30, moving_rate=1.0),
]


@pytest.mark.parametrize("strategy", ONE_IS_ALONE)
def test_under_any_strategy_whose_pushes_may_be_steps(strategy: gs.Strategy) -> None:
    make = OPTIMIZERS[0]
    if isinstance(strategy, gs.AsySG | gs.Downpour):  # gradients of parameters of before
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
        (lambda _, o: o.param_groups[0].update(momentum=0.5), "only lr may be.*fused=False"),
        (lambda _, o: o.inner.register_step_post_hook(lambda *_: None), "a hook was registered.*fused=False"),
    ],
)
def test_what_the_servers_cannot_follow_names_the_way_out(change: Change, part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        one_worker(momentum, change)


@pytest.mark.parametrize(
    ("strategy", "part"),
    [
        (gs.StalenessAware(), "weighs gradients"),
        (gs.Softsync(), "weighs gradients"),
        (gs.Softsync(power=0), "weighs gradients"),  # a mean of two
        (gs.DCASGD(), "corrects each push"),
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
