"""What a loop does besides steps, where parameters are exchanged."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gradstream as gs
from gradstream.errors import ConfigError
from gradstream.session import watch
from gradstream.session.binding import ModuleBinding
from gradstream.testing.sessions import loop_in_threads
from small_loops import (
    DEADLINES,
    PLAIN,
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

# ---- what the exchange would undo -------------------------------------------------------


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
        (replaced, r"has lost the parameter '2.\w+' since session.wrap"),
        (assigned, "Build and load the model before session.wrap"),
    ],
)
@pytest.mark.parametrize("fused", [True, False])
def test_the_step_after_a_change_of_parameters_is_refused(change: Change, part: str, fused: bool) -> None:
    with pytest.raises(ConfigError, match=part) as caught:
        one_worker(momentum, change, fused=fused)
    assert fused or "synchronous" in str(caught.value) or "before session.wrap" in str(caught.value)


@pytest.mark.parametrize("strategy", [gs.ParameterAveraging(state="averaged"), gs.SSP(bound=1)])
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
            session.exchange(w, np.ones(3), gs.optim.SGD(lr=0.1), samples=1)
            w *= 0.5

    with pytest.raises(ConfigError, match=r"changed array '.*' since the last session.exchange"):
        loop_in_threads(loop, workers=1, strategy=PLAIN, deadlines=DEADLINES)


# ---- parameters without a gradient, frozen, new -----------------------------------------


def add(model: nn.Sequential, optimizer: Made) -> None:
    model.register_parameter("new", nn.Parameter(torch.zeros(1, dtype=torch.float64)))
    optimizer.param_groups[0]["params"].append(model.get_parameter("new"))
    model.register_forward_hook(lambda _, args, out: out + model.get_parameter("new"))


def drop(model: nn.Sequential, optimizer: Made) -> None:
    optimizer.param_groups[0]["params"].pop()


@pytest.mark.parametrize(
    ("make", "change", "part"),
    [
        (momentum, freeze, r"'0.weight' has no gradient, since it was frozen after session.wrap"),
        (lambda m: torch.optim.AdamW(m.parameters()), freeze, "AdamW on the servers would, by momentum"),
        (
            lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
            add,
            "group 0, of shape .1,., has a gradient, but was",
        ),
        (
            lambda m: torch.optim.RMSprop(m.parameters()),
            add,
            "group 0, of shape .1,., has a gradient, but was",
        ),
        (momentum, drop, "parameter groups of your SGD have other parameters"),
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
        with pytest.raises(ConfigError, match=r"supports neither here nor in torch"):
            loop_in_threads(loop, workers=1, strategy=PLAIN, deadlines=DEADLINES)
        return
    (found,) = loop_in_threads(loop, workers=1, strategy=PLAIN, deadlines=DEADLINES)
    torch.testing.assert_close(found, loop(gs.Session()), rtol=1e-9, atol=1e-12)


def test_parameters_of_half_precision_are_refused_with_what_to_do() -> None:
    model = net().to(torch.bfloat16)
    with pytest.raises(ConfigError, match=r"has torch.bfloat16; .* torch.autocast"):
        ModuleBinding(model, list(model.parameters()))
