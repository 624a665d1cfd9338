"""What weighs in a mean over workers: the samples whose gradients are still there, or what the script says."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gradstream as gs
from gradstream.errors import ConfigError
from gradstream.session.samples import SampleCount
from gradstream.testing.sessions import loop_in_threads

DEADLINES = gs.Deadlines(join_s=60, silence_s=10, lease_s=8, retry_s=5)
GENERATOR = torch.Generator().manual_seed(0)
INPUTS = torch.randn(20, 3, generator=GENERATOR, dtype=torch.float64)
TARGETS = torch.randn(20, 1, generator=GENERATOR, dtype=torch.float64)

Optimizers = list[torch.optim.Optimizer]
ThrowAway = Callable[[nn.Sequential, Optimizers], object]


def net() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5, generator=generator)
    return model


def parameters_of(model: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def alike(loop: Callable[[gs.Session], torch.Tensor]) -> None:
    """Holds the workers' results to those of a process that is alone."""
    alone = loop(gs.Session())
    for result in loop_in_threads(loop, deadlines=DEADLINES):
        torch.testing.assert_close(result, alone, rtol=1e-9, atol=1e-12)


# ---- windows of no_sync that are thrown away --------------------------------------------


def by_hand(model: nn.Sequential, optimizers: Optimizers) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def in_place(model: nn.Sequential, optimizers: Optimizers) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()


THROWN: dict[str, ThrowAway] = {
    "none": lambda model, optimizers: [one.zero_grad() for one in optimizers],
    "zeros": lambda model, optimizers: [one.zero_grad(set_to_none=False) for one in optimizers],
    "of the module": lambda model, optimizers: model.zero_grad(),
    "by hand": by_hand,
    "in place": in_place,
}


@pytest.mark.parametrize("how", THROWN)
def test_a_window_that_is_thrown_away_counts_no_samples(how: str) -> None:
    """5 minibatches of 4 make 3 rounds of 2 workers, of which the last is a half window, of worker 0 alone."""

    def loop(session: gs.Session) -> torch.Tensor:
        model = net()
        optimizers: Optimizers = [torch.optim.SGD(model[i].parameters(), lr=0.1) for i in (0, 2)]
        batch = 4 if session.world_size > 1 else 8
        loader = session.shard(DataLoader(TensorDataset(INPUTS, TARGETS), batch_size=batch))
        session.wrap(model, optimizers)
        for _ in range(2):
            THROWN[how](model, optimizers)
            for number, (x, y) in enumerate(loader):
                is_last = number % 2 == 1
                with contextlib.nullcontext() if is_last else session.no_sync():
                    (nn.functional.mse_loss(model(x), y) / 2).backward()  # type: ignore[no-untyped-call]
                if is_last:
                    for one in optimizers:
                        one.step()
                    THROWN[how](model, optimizers)
        return parameters_of(model)

    alike(loop)


def sized(session: gs.Session, *sizes: int) -> torch.Tensor:
    """So many samples of this worker; those of both where the process is alone."""
    first, second = INPUTS[: sizes[0]], INPUTS[10 : 10 + sizes[1]]
    return torch.cat([first, second]) if session.world_size == 1 else (first, second)[session.rank]


def test_a_window_counts_though_its_gradients_were_changed() -> None:
    def loop(session: gs.Session) -> torch.Tensor:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session.wrap(model, optimizer)
        for _ in range(2):
            optimizer.zero_grad()
            with session.no_sync():
                model(sized(session, 6, 2)).square().mean().backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(2)
                parameter.grad = parameter.grad.clone()
            model(sized(session, 6, 2)).square().mean().backward()
            optimizer.step()
        return parameters_of(model)

    alike(loop)


def test_a_window_of_one_of_two_models_is_thrown_away_alone() -> None:
    """Of the other model it counts: there all sizes are in proportion."""

    def loop(session: gs.Session) -> torch.Tensor:
        models = [net(), net()]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        session.wrap(models, optimizers)
        for sizes in ((6, 2), (3, 5)):
            for optimizer in optimizers:
                optimizer.zero_grad()
            with session.no_sync():
                models[0](sized(session, 1, 7)).square().mean().backward()
            optimizers[0].zero_grad()
            with session.no_sync():
                models[1](sized(session, *sizes)).square().mean().backward()
            models[1](sized(session, *sizes)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
        return torch.cat([parameters_of(model) for model in models])

    alike(loop)


def test_a_window_whose_step_was_left_out_counts_no_more() -> None:
    """As a GradScaler leaves one out: without calling `step`."""

    def loop(session: gs.Session) -> torch.Tensor:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        session.wrap(model, optimizer)
        for number, sizes in enumerate([(6, 2), (1, 7), (3, 5)]):
            optimizer.zero_grad()
            with session.no_sync():
                model(sized(session, *sizes)).square().mean().backward()
            if number != 1:
                optimizer.step()  # joins what no backward has
        return parameters_of(model)

    alike(loop)


def test_what_the_script_says_of_a_window_is_thrown_away_with_it() -> None:
    def loop(session: gs.Session) -> torch.Tensor:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session.wrap(model, optimizer)
        for _ in range(2):
            with session.no_sync():
                session.samples(1 + 8 * session.rank)
                model(sized(session, 1, 7)).square().mean().backward()
            optimizer.zero_grad()
            model(sized(session, 6, 2)).square().mean().backward()
            optimizer.step()
        return parameters_of(model)

    alike(loop)


def test_a_barrier_within_a_window_weighs_it_by_its_samples() -> None:
    def loop(session: gs.Session) -> torch.Tensor:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session.wrap(model, optimizer)
        for _ in range(2):
            optimizer.zero_grad()
            with session.no_sync():
                model(sized(session, 6, 2)).square().mean().backward()
            session.barrier()
            model(sized(session, 3, 5)).square().mean().backward()
            optimizer.step()
        return parameters_of(model)

    alike(loop)


def test_a_worker_without_samples_has_none_in_the_second_loss_either() -> None:
    def loop(session: gs.Session) -> torch.Tensor:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session.wrap(model, optimizer)
        for sizes in ((6, 2), (6, 0)):
            optimizer.zero_grad()
            loss = model(sized(session, *sizes)).square().mean()
            loss.backward(retain_graph=True)
            (loss * 0.5).backward()
            optimizer.step()
        return parameters_of(model)

    alike(loop)


# ---- weights that the script says -------------------------------------------------------


def weighted(x: torch.Tensor, y: torch.Tensor, weights: torch.Tensor, model: nn.Module) -> torch.Tensor:
    return (nn.functional.mse_loss(model(x), y, reduction="none").flatten() * weights).sum() / weights.sum()


@pytest.mark.parametrize(
    "kind", ["fractions", "tiny", "none of one", "none of one, whole numbers", "none of all"]
)
def test_means_over_weights_are_joined(kind: str) -> None:
    weights = torch.linspace(0.3, 2, 16, dtype=torch.float64)
    if kind == "tiny":
        weights = weights * 1e-6
    if "whole" in kind:
        weights = torch.arange(16, dtype=torch.float64)
    if "none" in kind:
        weights[4:8] = 0
        if "all" in kind:
            weights[:8] = 0

    def loop(session: gs.Session) -> torch.Tensor:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        data = TensorDataset(INPUTS[:16], TARGETS[:16], weights)
        loader = session.shard(DataLoader(data, batch_size=4 if session.world_size > 1 else 8))
        session.wrap(model, optimizer)
        for _ in range(2):
            for x, y, w in loader:
                optimizer.zero_grad()
                session.samples(w.sum())
                loss = weighted(x, y, w, model)  # NaN where all are 0
                used: Any = loss if session.world_size > 1 or w.sum() else 0 * model(x).sum()
                used.backward()
                optimizer.step()
        return parameters_of(model)

    alike(loop)


def test_layers_that_are_unfrozen_later_are_weighed_likewise() -> None:
    def loop(session: gs.Session) -> torch.Tensor:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model[0].requires_grad_(False)
        session.wrap(model, optimizer)
        model[0].requires_grad_(True)
        x, w = sized(session, 3, 5), sized(session, 3, 5)[:, 0].abs()
        for _ in range(2):
            optimizer.zero_grad()
            session.samples(float(w.sum()))
            loss: Any = weighted(x, x[:, :1], w, model)
            loss.backward()
            optimizer.step()
        return parameters_of(model)

    alike(loop)


def test_arrays_are_weighed_likewise() -> None:
    def loop(session: gs.Session) -> np.ndarray[Any, Any]:
        w = np.zeros(3)
        for sizes in ((3, 5), (6, 0), (2, 2)):
            x = sized(session, *sizes).numpy()
            weights = np.abs(x[:, :1])
            total = weights.sum()
            gradient = (weights * x * (x @ w - 1)[:, None]).sum(0) / (total or np.nan)
            session.exchange(w, gradient, gs.optim.SGD(lr=0.1), samples=float(total))
        return w

    alone = loop(gs.Session())
    for result in loop_in_threads(loop, strategy="allreduce", deadlines=DEADLINES):
        np.testing.assert_allclose(result, alone, rtol=1e-9)


def test_strategies_with_whole_weights_say_so() -> None:
    def loop(session: gs.Session) -> None:
        model = net()
        _, optimizer = session.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for count in (-1, float("nan"), float("inf")):
            with pytest.raises(ConfigError, match="expected a number of samples, 0 or more"):
                session.samples(count)
        with pytest.raises(ConfigError, match="multiply the weights of all workers"):
            session.samples(0.5)
        before = parameters_of(model)
        session.samples(0)
        model(INPUTS).square().mean().backward()
        optimizer.step()
        assert torch.equal(parameters_of(model), before)
        session.samples(2.0)
        model(INPUTS).square().mean().backward()
        optimizer.step()
        assert not torch.equal(parameters_of(model), before)

    loop_in_threads(loop, workers=1, strategy=gs.Downpour(overlap=False), deadlines=DEADLINES)


@given(st.lists(st.tuples(st.sampled_from("ntenvop"), st.integers(0, 1), st.booleans()), max_size=30))
def test_a_pass_is_of_repeats_where_it_counts_none(script: list[tuple[str, int, bool]]) -> None:
    """Real gradients are never set to zero: what decides that is what decides the weight."""
    counted, training, evaluating = SampleCount(), nn.Linear(1, 1), nn.Linear(1, 1).eval()
    for what, loader, repeated in script:
        if what in "nt":
            counted.note(0 if repeated else 4, f"loader {loader}")
        if what == "o":
            counted.over(f"loader {loader}")
        if what in "tv":
            counted.forward(training, (torch.ones(4, 1),), {})
        if what == "e":
            counted.forward(evaluating, (torch.ones(4, 1),), {})
        if what == "p":
            expected = counted.is_repeat()
            assert counted.take_pass().repeated == expected


# ---- epochs that are broken off ---------------------------------------------------------


def broken_off(session: gs.Session, *, processes: int = 0, skips: bool = False) -> None:
    """Makes 3 steps in each of 3 epochs, and leaves them with a 4th minibatch in hand."""
    model = net()
    data = TensorDataset(INPUTS, TARGETS)
    loader = session.shard(DataLoader(data, batch_size=2, num_workers=processes))
    next(iter(loader))  # a look, before the run has begun
    model, optimizer = session.wrap(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for _ in range(3):
        for number, (x, y) in enumerate(loader):
            if number == 3 or (skips and session.skip()):
                break
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()


@pytest.mark.parametrize("strategy", ["allreduce", "local-sgd", "downpour", "diloco", "gossip"])
def test_an_epoch_that_is_broken_off_is_told_and_counts_what_was_used(
    strategy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    used = list[float]()

    def loop(session: gs.Session) -> None:
        broken_off(session)
        used.append(session._connection.bridge.samples)  # type: ignore[attr-defined]

    loop_in_threads(loop, strategy=strategy, deadlines=DEADLINES)
    assert used == [18, 18] or strategy == "local-sgd"  # whose last round has not been exchanged yet
    told = [line for line in capsys.readouterr().err.splitlines() if "broken off" in line]
    assert told == [
        "worker-0: the loop has broken off epochs 0, 1, 2 of a loader, as the script says: 6 of its 15 minibatches "
        "there, about 12 samples, were not used"
    ]


def test_a_loop_that_goes_to_the_end_of_its_loader_has_broken_off_nothing() -> None:
    count, model, loader = SampleCount(), net(), object()
    count.uses[loader].total = 3

    def train() -> None:
        count.forward(model, (INPUTS[:2],), {})
        count.take()

    for _ in range(2):  # a prefetch: a minibatch is taken before the one before is used
        for number in range(4):
            count.note(2, loader) if number < 3 else count.over(loader)
            if number:
                train()
    for _ in range(3):  # as `zip(range(3), loader)`, which does not ask for the end
        count.note(2, loader)
        train()
    count.over(loader, ended=False)
    count.note(2, loader)  # `next(iter(loader))`, used after its iteration
    count.over(loader, ended=False)
    assert count.take() == 2
    for _ in range(2):  # twice in a step
        count.note(2, loader)
        count.over(loader, ended=False)
    assert count.take() == 4
    assert "epochs 3, 4 of a loader, as the script says: 3 of its 6 minibatches" in count.told_left()


def test_skip_where_a_resumed_run_refuses_it_is_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    loop_in_threads(partial(broken_off, skips=True), strategy="downpour", deadlines=DEADLINES)
    assert capsys.readouterr().err.count("Leave it out: loaders of session.shard") == 1
    loop_in_threads(partial(broken_off, skips=True), strategy="allreduce", deadlines=DEADLINES)
    assert "session.skip" not in capsys.readouterr().err


# ---- data that nothing divides ----------------------------------------------------------


@pytest.mark.parametrize("strategy", ["allreduce", "diloco", "gossip"])
@pytest.mark.parametrize("divides", ["nothing", "shard", "rank", "seed", "constant loss"])
def test_workers_that_train_on_the_same_minibatches_are_told_so(
    divides: str, strategy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def loop(session: gs.Session) -> None:
        model, rank = net(), session.rank
        own = slice(rank, None, session.world_size) if divides == "rank" else slice(None)
        generator = torch.Generator().manual_seed(rank if divides == "seed" else 0)
        data = TensorDataset(INPUTS[own], TARGETS[own])
        loader: Any = DataLoader(data, batch_size=2, shuffle=True, generator=generator)
        if divides == "shard":
            loader = session.shard(DataLoader(data, batch_size=2, shuffle=True))
        model, optimizer = session.wrap(model, torch.optim.SGD(model.parameters(), lr=0.01))
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss = loss - loss.detach() if divides == "constant loss" else loss
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    options: dict[str, Any] = {} if strategy == "allreduce" else {"strategy_options": {"every": 1}}
    loop_in_threads(loop, strategy=strategy, deadlines=DEADLINES, **options)
    told = capsys.readouterr().err
    assert ("all 2 workers had the same loss" in told) == (divides == "nothing"), told
