"""Loops of one's own that train alone between two exchanges: local SGD, gossip, push-sum, NoLoCo, DiLoCo and kin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gradstream as gs
from gradstream.errors import ClosedError, ConfigError
from gradstream.testing.sessions import loop_in_threads
from small_loops import DEADLINES, INPUTS, TARGETS, Make, clamp, momentum, net, one_worker, steps, train

Values = dict[str, torch.Tensor]

OPTIMIZERS: list[Make] = [
    momentum,
    lambda m: torch.optim.RMSprop(m.parameters(), lr=0.01),
    lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, amsgrad=True),
]


MEANS: list[Callable[[int], gs.Strategy]] = [
    lambda every: gs.LocalSGD(every=every),
    lambda every: gs.ParameterAveraging(every=every),
    lambda every: gs.DiLoCo(every=every, outer_lr=1.0, outer_momentum=0.0),
    lambda every: gs.StreamingDiLoCo(
        every=every, fragments=1, delay=0, mixing=0.0, outer_lr=1.0, outer_momentum=0.0
    ),
]
"""Strategies under which workers get the mean of all after `every` steps."""


def values(model: nn.Module) -> Values:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def by_hand(make: Make, every: int, num_steps: int, workers: int = 2) -> Values:
    """Local SGD of torch alone: the mean of the models after each `every` steps, and after the last."""
    models = [net() for _ in range(workers)]
    made = [make(model) for model in models]
    for begin in range(0, num_steps, every):
        for rank in range(workers):
            list(steps(models[rank], made[rank], range(begin + rank, min(begin + every, num_steps) + rank)))
        to_mean(models)
    return values(models[0])


def to_mean(models: list[nn.Sequential]) -> None:
    with torch.no_grad():
        for same in zip(*(model.parameters() for model in models), strict=True):
            mean = torch.stack([one.detach() for one in same]).mean(0)
            for one in same:
                one.copy_(mean)


def in_two(strategy: gs.Strategy, loop: Callable[[gs.Session], Any], **options: Any) -> list[Any]:
    return loop_in_threads(loop, strategy=strategy, deadlines=DEADLINES, **options)


def plain(make: Make, num_steps: int) -> Callable[[gs.Session], Values]:
    def loop(session: gs.Session) -> Values:
        model = net()
        _, optimizer = session.wrap(model, make(model))
        list(steps(model, optimizer, range(session.rank, num_steps + session.rank)))
        assert session.step == num_steps
        session.close()
        return values(model)

    return loop


def check(found: list[Values], expected: Values) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(found[0][name], value, rtol=1e-9, atol=1e-12)
        assert all(torch.equal(one[name], found[0][name]) for one in found[1:])


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("strategy", MEANS)
def test_local_sgd_is_the_mean_of_what_each_optimizer_made(
    make: Make, every: int, strategy: Callable[[int], gs.Strategy]
) -> None:
    check(in_two(strategy(every), plain(make, 8)), by_hand(make, every, 8))


@pytest.mark.parametrize("strategy", [gs.strategies.Gossip(every=3), gs.strategies.PushSum(every=3)])
def test_two_workers_in_pairs_are_local_sgd(strategy: gs.Strategy) -> None:
    check(in_two(strategy, plain(momentum, 6)), by_hand(momentum, 3, 6))


@pytest.mark.parametrize(
    "strategy",
    [gs.LocalSGD(every=3), gs.strategies.Gossip(every=3), gs.strategies.PushSum(every=2)],
)
def test_one_worker_is_the_optimizer_alone(strategy: gs.Strategy) -> None:
    found = one_worker(momentum, strategy=strategy)
    for name, value in train(gs.Session(), momentum).items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "strategy", [gs.LocalSGD(every=2, outer_lr=0.7, outer_momentum=0.9), gs.DiLoCo(every=2)]
)
def test_the_outer_optimizer_is_diloco_with_servers_or_without(strategy: gs.Strategy) -> None:
    models, begun = [net(), net()], net()
    made = [momentum(model) for model in models]
    outer = torch.optim.SGD(begun.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    for begin in (0, 2, 4):
        for rank in range(2):
            list(steps(models[rank], made[rank], range(begin + rank, begin + rank + 2)))
        with torch.no_grad():
            for w, *each in zip(begun.parameters(), *(one.parameters() for one in models), strict=True):
                w.grad = torch.stack([w - one for one in each]).mean(0)
        outer.step()
        for model in models:
            model.load_state_dict(begun.state_dict())
    check(in_two(strategy, plain(momentum, 6)), values(begun))


def test_workers_weigh_by_their_samples_and_end_when_they_like() -> None:
    def loop(session: gs.Session) -> Values:
        model = net()
        _, optimizer = session.wrap(model, momentum(model))
        for _ in steps(model, optimizer, range(2 + 5 * session.rank)):
            session.samples(1 + 2 * session.rank)
        session.close()
        return values(model)

    first, second = in_two(gs.LocalSGD(every=2), loop)
    models = [net(), net()]
    made = [momentum(model) for model in models]
    for begin in (0, 2, 4, 6):
        for rank, until in enumerate((2, 7)):
            list(steps(models[rank], made[rank], range(begin, min(begin + 2, until))))
        share = [4 + 1, 4 + 3] if begin == 0 else [0, 1]  # the first step of each counts its inputs
        weights = [one / sum(share) for one in share]
        with torch.no_grad():
            for mine, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
                mine.copy_(weights[0] * mine + weights[1] * other)
                other.copy_(mine)
    for name, value in values(models[0]).items():
        torch.testing.assert_close(first[name], value, rtol=1e-9, atol=1e-12)
        assert torch.equal(first[name], second[name])


@pytest.mark.parametrize("strategy", MEANS)
def test_what_the_script_changes_between_two_steps_is_in_the_exchange(
    strategy: Callable[[int], gs.Strategy],
) -> None:
    def change(model: nn.Sequential, number: int, begun: int) -> None:
        if number == begun:  # the first step of two
            clamp(model, momentum(model))
            bias = model[0].get_parameter("bias")
            bias.data = bias.data * 0.5

    def loop(session: gs.Session) -> Values:
        model = net()
        _, optimizer = session.wrap(model, momentum(model))
        for number in steps(model, optimizer, range(session.rank, session.rank + 2)):
            change(model, number, session.rank)
        session.close()
        return values(model)

    models = [net(), net()]
    for rank, model in enumerate(models):
        for number in steps(model, momentum(model), range(rank, rank + 2)):
            change(model, number, rank)
    to_mean(models)
    check(in_two(strategy(2), loop), values(models[0]))


def test_an_evaluation_sees_the_mean_of_the_last_round() -> None:
    def loop(session: gs.Session) -> tuple[Values, Values, Values]:
        model = net()
        _, optimizer = session.wrap(model, momentum(model))
        list(steps(model, optimizer, range(session.rank, session.rank + 3)))
        before = values(model)
        with session.evaluation():
            seen = values(model)
        assert all(torch.equal(value, before[name]) for name, value in values(model).items())
        session.close()
        return before, seen, values(model)

    (first, seen, _), (second, seen_too, _) = in_two(gs.LocalSGD(every=2), loop)
    mean = by_hand(momentum, 2, 2)
    check([seen, seen_too], mean)
    assert any(not torch.equal(first[name], second[name]) for name in mean)


@pytest.mark.parametrize("strategy", MEANS)
def test_several_models_and_optimizers_have_one_round(strategy: Callable[[int], gs.Strategy]) -> None:
    def models() -> tuple[nn.Sequential, nn.Sequential]:
        return net(), net()

    def play(first: nn.Module, second: nn.Module, a: Any, b: Any, numbers: range) -> None:
        for number in numbers:
            list(steps(first, a, range(number, number + 1)))
            list(steps(second, b, range(number + 1, number + 2)))

    def loop(session: gs.Session) -> Values:
        first, second = models()
        made = [momentum(first), torch.optim.RMSprop(second.parameters())]
        session.wrap([first, second], made)
        play(first, second, made[0], made[1], range(session.rank, session.rank + 4))
        assert session.step == 4
        session.close()
        return {**values(first), **{f"second.{name}": value for name, value in values(second).items()}}

    found = in_two(strategy(2), loop)
    for name in found[0]:
        assert torch.equal(found[0][name], found[1][name])


@pytest.mark.parametrize("strategy", MEANS)
def test_two_optimizers_of_one_backward_step_before_the_exchange(
    strategy: Callable[[int], gs.Strategy],
) -> None:
    def make(model: nn.Sequential) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.SGD(model[0].parameters(), lr=0.05),
            torch.optim.SGD(model[2].parameters(), lr=0.05),
        ]

    def go(model: nn.Sequential, made: list[torch.optim.Optimizer], numbers: range) -> None:
        for number in numbers:
            at = slice(number * 4 % 32, number * 4 % 32 + 4)
            model.zero_grad()
            nn.functional.mse_loss(model(INPUTS[at]), TARGETS[at]).backward()  # type: ignore[no-untyped-call]
            for one in made:
                one.step()

    def loop(session: gs.Session) -> Values:
        model = net()
        _, made = session.wrap(model, make(model))
        go(model, list(made), range(session.rank, session.rank + 4))
        assert session.step == 4
        session.close()
        return values(model)

    models = [net(), net()]
    for begin in (0, 2):
        for rank in range(2):
            go(models[rank], make(models[rank]), range(begin + rank, begin + rank + 2))
        to_mean(models)
    check(in_two(strategy(2), loop), values(models[0]))


def test_an_optimizer_that_makes_fewer_steps_is_not_waited_for() -> None:
    def loop(session: gs.Session) -> Values:
        first, second = net(), net()
        a, b = momentum(first), momentum(second)
        session.wrap([first, second], [a, b])
        for number in range(session.rank, session.rank + 6):
            list(steps(first, a, range(number, number + 1)))
            if number % 3 == session.rank:
                list(steps(second, b, range(number, number + 1)))
        assert session.step == 6
        session.close()
        return {**values(first), **{f"second.{name}": value for name, value in values(second).items()}}

    found = in_two(gs.LocalSGD(every=2), loop)
    check(found, found[0])


@pytest.mark.parametrize("strategy", [gs.LocalSGD(every=5), gs.strategies.Gossip(every=5)])
def test_an_evaluation_leaves_arrays_and_moved_parameters_as_they_are(strategy: gs.Strategy) -> None:
    def of_arrays(session: gs.Session) -> None:
        w = np.zeros(3)
        for _ in range(3):
            session.exchange(w, w - 1, gs.optim.SGD(0.1), samples=1)
        before = w.copy()
        with session.evaluation():
            assert (
                w.tolist() == (before if isinstance(strategy, gs.strategies.Gossip) else np.zeros(3)).tolist()
            )
        assert w.tolist() == before.tolist()
        session.close()

    def of_module(session: gs.Session) -> None:
        model = net()
        _, optimizer = session.wrap(model, momentum(model))
        nn.utils.vector_to_parameters(torch.ones(21).double(), model.parameters())
        list(steps(model, optimizer, range(2)))
        before = values(model)
        with session.evaluation():
            pass
        assert all(torch.equal(value, before[name]) for name, value in values(model).items())
        session.close()

    in_two(strategy, of_arrays)
    in_two(strategy, of_module)


@pytest.mark.parametrize("strategy", [gs.LocalSGD(every=2), gs.strategies.Gossip(every=2)])
def test_all_begin_with_what_the_first_worker_has_made(strategy: gs.Strategy) -> None:
    def loop(session: gs.Session) -> Values:
        model = net()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(session.rank)
        model[0].requires_grad_(False)  # a backbone
        trained = [one for one in model.parameters() if one.requires_grad]
        session.wrap(model, torch.optim.SGD(trained, lr=0.1))
        begun = values(model)
        session.close()
        return begun

    check(in_two(strategy, loop), values(net()))
    arrays = in_two(strategy, lambda session: begin(session))
    assert arrays[0].tolist() == arrays[1].tolist() == [0.0, 0.0]


def begin(session: gs.Session) -> np.ndarray[Any, Any]:
    w = np.full(2, float(session.rank))
    session.exchange(w, np.zeros(2), gs.optim.SGD(0.1), samples=1)
    session.close()
    return w


def test_a_step_after_the_end_raises_at_once() -> None:
    def loop(session: gs.Session) -> None:
        model = net()
        _, optimizer = session.wrap(model, momentum(model))
        session.close()
        with pytest.raises(ClosedError, match=r"make all steps before session\.close"):
            optimizer.step()

    in_two(gs.LocalSGD(every=5), loop)


@pytest.mark.parametrize("num_steps", [2, 3])
def test_what_the_script_changes_after_the_last_round_is_exchanged_too(num_steps: int) -> None:
    def loop(session: gs.Session) -> Values:
        model = net()
        _, optimizer = session.wrap(model, momentum(model))
        list(steps(model, optimizer, range(num_steps)))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(1.0 + session.rank)
        session.close()
        return values(model)

    for one in in_two(gs.LocalSGD(every=2), loop):
        for value in one.values():
            torch.testing.assert_close(value, torch.full_like(value, 1.5), rtol=1e-9, atol=1e-12)


def test_arrays_keep_their_rule() -> None:
    def loop(session: gs.Session) -> None:
        w = np.zeros(2)
        session.exchange(w, w, gs.optim.SGD(0.1), samples=1)
        session.exchange(w, w, gs.optim.SGD(0.2), samples=1)
        session.exchange(w, w, gs.optim.Adam(0.2), samples=1)

    with pytest.raises(ConfigError, match="only its lr may change"):
        in_two(gs.LocalSGD(every=5), loop)


def test_arrays_train_locally_too() -> None:
    def loop(session: gs.Session) -> np.ndarray[Any, Any]:
        w = np.zeros(3)
        for number in range(6):
            gradient = w - (1 + session.rank) * np.arange(3.0) * (number + 1)
            w = session.exchange(w, gradient, gs.optim.SGD(0.1, momentum=0.5), samples=1)
        session.close()
        return w

    found = in_two(gs.LocalSGD(every=2), loop)
    alone: list[Any] = [np.zeros(3), np.zeros(3)]
    velocity = [np.zeros(3), np.zeros(3)]
    for number in range(6):
        for rank in range(2):
            gradient = alone[rank] - (1 + rank) * np.arange(3.0) * (number + 1)
            velocity[rank] = 0.5 * velocity[rank] + gradient
            alone[rank] = alone[rank] - 0.1 * velocity[rank]
        if number % 2:
            alone = [sum(alone) / 2, sum(alone) / 2]
    for one in found:
        np.testing.assert_allclose(one, alone[0], rtol=1e-12)


@pytest.mark.parametrize(
    "strategy", [gs.LocalSGD(every=2), gs.DiLoCo(every=2), gs.strategies.NoLoCo(every=2)]
)
@pytest.mark.parametrize("codec", ["int8", "one-bit"])
def test_what_is_exchanged_may_be_encoded(strategy: gs.Strategy, codec: str) -> None:
    def loop(session: gs.Session) -> Values:
        model = net().float()
        _, optimizer = session.wrap(model, torch.optim.SGD(model.parameters(), lr=0.01))
        for number in range(session.rank, session.rank + 8):
            optimizer.zero_grad()
            inputs, targets = INPUTS[number : number + 4].float(), TARGETS[number : number + 4].float()
            nn.functional.mse_loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        session.close()
        return values(model)

    exact, encoded = in_two(strategy, loop), in_two(strategy, loop, codec=codec)
    assert any(not torch.equal(value, exact[0][name]) for name, value in encoded[0].items())
    for name, value in encoded[0].items():
        assert (value - exact[0][name]).abs().max() < (0.1 if codec == "int8" else 1.0)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="delay=1 with a training loop of your own: it waits"):
        in_two(gs.LocalSGD(delay=1), plain(momentum, 2))


@pytest.mark.parametrize("nested", [True, False])
def test_a_repeated_minibatch_changes_no_arrays_of_any_tree(nested: bool) -> None:
    """Three minibatches for two workers: the second one of worker 1 repeats its first."""

    def loop(session: gs.Session) -> list[float]:
        inner: Any = np.zeros(3)
        tree: Any = [{"a": inner}] if nested else {"a": inner}
        for (ids,) in session.shard(DataLoader(TensorDataset(torch.arange(3)), batch_size=1)):
            gradient = np.eye(3)[int(ids)]
            gradients: Any = [{"a": gradient}] if nested else {"a": gradient}
            session.exchange(tree, gradients, gs.optim.SGD(lr=1.0))
        session.close()
        return [float(one) for one in inner]

    first, second = loop_in_threads(loop, strategy="local-sgd", strategy_options={"every": 1})
    assert first == second == [-0.5, -0.5, -1.0]  # two samples a round, and then one
