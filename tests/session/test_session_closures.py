"""Optimizers that evaluate the loss of a closure several times a step: L-BFGS, with the mean over all workers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gradstream as gs
from gradstream.errors import ConfigError
from gradstream.testing.sessions import loop_in_threads
from small_loops import DEADLINES, INPUTS, TARGETS, net

Values = list[torch.Tensor]
Way = dict[str, Any]

WAYS: list[Way] = [
    {"lr": 0.2, "max_iter": 5},
    {"max_iter": 8, "line_search_fn": "strong_wolfe"},
    {"max_iter": 6, "history_size": 2, "tolerance_change": 1e-3},  # it looks at the loss too
]


def search(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    inputs: Any,
    targets: Any,
    before: Callable[[], object],
) -> float:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    before()
    return float(torch.as_tensor(optimizer.step(closure)).detach())  # type: ignore[arg-type]


def values(model: nn.Module) -> Values:
    return [value.detach().clone() for value in model.parameters()]


def whole_data(session: gs.Session, way: Way) -> tuple[Values, list[float]]:
    """Steps over all samples; says the number of samples in every second one."""
    inputs, targets = session.shard((INPUTS[:31], TARGETS[:31]))
    model = net()
    _, optimizer = session.wrap(model, torch.optim.LBFGS(model.parameters(), **way))
    said = (lambda: session.samples(len(inputs)), lambda: None)
    losses = [search(model, optimizer, inputs, targets, said[number % 2]) for number in range(4)]
    session.close()
    return values(model), losses


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("workers", [2, 3])
def test_lbfgs_is_that_of_one_process_with_all_samples(way: Way, workers: int) -> None:
    alone, expected = whole_data(gs.Session(), way)
    found = loop_in_threads(partial(whole_data, way=way), workers, deadlines=DEADLINES)
    for parameters, losses in found:
        assert losses == pytest.approx(expected, rel=1e-7)
        for one, first, other in zip(parameters, found[0][0], alone, strict=True):
            assert torch.equal(one, first)
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def minibatches(session: gs.Session, optimizer: Callable[[nn.Module], torch.optim.Optimizer]) -> Values:
    loader = session.shard(DataLoader(TensorDataset(INPUTS[:20], TARGETS[:20]), batch_size=4))
    model = net()
    _, made = session.wrap(model, optimizer(model))
    for inputs, targets in loader:
        search(model, made, inputs, targets, lambda: None)
    session.close()
    return values(model)


def test_a_repeated_minibatch_counts_in_no_evaluation_of_a_step() -> None:
    """Five minibatches for two workers: the third one of worker 1 is a repeat."""

    def lbfgs(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(model.parameters(), lr=0.3, max_iter=3)

    model = net()
    alone = lbfgs(model)
    for rows in ([0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15], [16, 17, 18, 19]):
        search(model, alone, INPUTS[rows], TARGETS[rows], lambda: None)
    for found in loop_in_threads(partial(minibatches, optimizer=lbfgs), 2, deadlines=DEADLINES):
        for one, other in zip(found, values(model), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    "strategy", [gs.LocalSGD(every=2), gs.DiLoCo(every=2, outer_lr=1.0, outer_momentum=0.0)]
)
def test_where_workers_train_alone_each_searches_on_its_own_samples(strategy: gs.Strategy) -> None:
    def loop(session: gs.Session, rank: int | None = None) -> Values:
        rank, sizes = session.rank if rank is None else rank, (4, 4)
        model = net()
        _, optimizer = session.wrap(model, torch.optim.LBFGS(model.parameters(), lr=0.2, max_iter=3))
        for number in range(2):
            at = slice(8 * number + 4 * rank, 8 * number + 4 * rank + sizes[rank])
            search(model, optimizer, INPUTS[at], TARGETS[at], lambda: None)
        session.close()
        return values(model)

    mean = [(a + b) / 2 for a, b in zip(loop(gs.Session(), 0), loop(gs.Session(), 1), strict=True)]
    for found in loop_in_threads(loop, 2, strategy=strategy, deadlines=DEADLINES):
        for one, other in zip(found, mean, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_samples_count_once_however_often_a_step_evaluates_them() -> None:
    """A worker with two samples, and one with six: no loader counts them."""

    def loop(session: gs.Session, rank: int | None = None) -> Values:
        rank = session.rank if rank is None else rank
        model = net()
        _, optimizer = session.wrap(model, torch.optim.LBFGS(model.parameters(), lr=0.2))
        optimizer.param_groups[0].update(max_iter=2 + 3 * rank, max_eval=99)
        at = slice(8 * rank, 8 * rank + 2 + 4 * rank)
        search(model, optimizer, INPUTS[at], TARGETS[at], lambda: None)
        session.close()
        return values(model)

    pairs = zip(loop(gs.Session(), 0), loop(gs.Session(), 1), strict=True)
    mean = [(2 * a + 6 * b) / 8 for a, b in pairs]
    for found in loop_in_threads(loop, 2, strategy=gs.LocalSGD(every=1), deadlines=DEADLINES):
        for one, other in zip(found, mean, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_what_cannot_be_is_refused() -> None:
    def loop(session: gs.Session) -> None:
        model = net()
        _, optimizer = session.wrap(model, torch.optim.LBFGS(model.parameters()))

        def closure() -> str:
            model(INPUTS).sum().backward()
            return "much"

        optimizer.step(closure)  # type: ignore[no-untyped-call]

    with pytest.raises(ConfigError, match="the closure returned a str, expected the loss"):
        loop_in_threads(loop, 2, deadlines=DEADLINES)
    with pytest.raises(ConfigError, match="LBFGS: it evaluates the loss several times"):
        loop_in_threads(loop, 2, strategy="downpour", deadlines=DEADLINES)
