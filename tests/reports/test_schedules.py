"""Reports of rates and windows that went by another count of steps than the optimizer's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import gradstream as gs
from acted_loops import DEADLINES, close, flat, line, part, samples, sgd, step
from gradstream._simulate import simulate
from gradstream.testing.sessions import loop_in_threads

ROWS, TARGETS = (tensor.numpy() for tensor in samples(20))
SIZE, WINDOW = 2, 4  # of a minibatch; minibatches of a step, of which the last of an epoch has two
Gradient = np.ndarray[Any, Any]


def of(w: Gradient, start: int, stop: int) -> Gradient:
    """The gradient of the mean squared error of these samples."""
    x, y = ROWS[start:stop], TARGETS[start:stop, 0]
    result: Gradient = 2 * (x @ w - y) @ x / len(x)
    return result


def accumulated(**options: Any) -> gs.Run:
    """Two epochs of one worker, in the order of the samples."""
    model = gs.from_functions(
        init=lambda seed: {"w": np.zeros(3)},
        outputs=lambda p, x: x @ p["w"],
        gradients=lambda p, x, y: (0.0, {"w": 2 * (x @ p["w"] - y) @ x / len(x)}),
        dtype="float64",
    )
    data = gs.from_loader(
        DataLoader(TensorDataset(*map(torch.as_tensor, (ROWS, TARGETS[:, 0]))), batch_size=SIZE)
    )
    given: dict[str, Any] = {"strategy": "allreduce", "workers": 1, "accumulate": WINDOW, "epochs": 2}
    return simulate(model, data, **{**given, **options})


def by_hand(rates: list[float], clip: float = np.inf) -> Gradient:
    """What plain SGD makes of the same windows: one step for each, of a mean over all of its samples."""
    w, number = np.zeros(3), 0
    for _ in range(2):
        for start in range(0, 20, SIZE * WINDOW):
            gradient = of(w, start, min(20, start + SIZE * WINDOW))
            w = w - rates[number] * gradient * min(1.0, clip / float(np.linalg.norm(gradient)))
            number += 1
    return w


def test_the_last_window_of_an_epoch_is_a_mean_over_what_it_has() -> None:
    """Lightning-AI/pytorch-lightning#19987: where data ran out, a sum of two was divided by four."""
    run = accumulated(optimizer=gs.optim.SGD(lr=0.1))
    np.testing.assert_allclose(run.parameters["w"], by_hand([0.1] * 6), rtol=1e-9)


def test_a_rate_changes_with_steps_and_not_with_minibatches() -> None:
    """tracel-ai/burn#5695: the schedule went on with each minibatch, and the last window of an epoch made no step."""
    rate = gs.schedules.StepDecay(0.2, every=1, factor=0.5, unit="steps")
    run = accumulated(optimizer=gs.optim.SGD(lr=rate))
    np.testing.assert_allclose(
        run.parameters["w"], by_hand([0.2 * 0.5**number for number in range(6)]), rtol=1e-9
    )
    assert len({row["lr"] for row in run.history}) == 6


def test_a_window_is_clipped_once_and_as_a_whole() -> None:
    """huggingface/transformers#1563: the gradient was clipped after each minibatch, and more was added behind."""
    run = accumulated(optimizer=gs.optim.SGD(lr=0.1), clip_norm=0.5)
    expected = by_hand([0.1] * 6, clip=0.5)
    assert not np.allclose(expected, by_hand([0.1] * 6))
    np.testing.assert_allclose(run.parameters["w"], expected, rtol=1e-9)


def test_a_scheduler_of_a_loop_goes_on_once_a_step_whatever_the_number_of_workers() -> None:
    """huggingface/accelerate#1398: each call of the scheduler's step made as many as there were processes."""
    data = samples(40)
    rates: list[list[float]] = [[] for _ in range(2)]

    def loop(session: gs.Session) -> None:
        model, optimizer = session.wrap(made := line(session.rank), sgd(made))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        for number in range(5):
            start = 8 * number + 4 * session.rank
            step(model, optimizer, part(data, start, start + 4))
            rates[session.rank].append(float(scheduler.get_last_lr()[0]))
            scheduler.step()
        session.close()

    loop_in_threads(loop, strategy="synchronous", deadlines=DEADLINES)
    assert rates == [pytest.approx([0.1, 0.1, 0.05, 0.05, 0.025])] * 2


def test_the_length_of_a_shared_loader_is_the_number_of_steps() -> None:
    """huggingface/diffusers#8312: schedules were made for as many steps as the loader had before it was divided."""
    data = samples(36)  # nine minibatches: five steps of two workers
    last: list[float] = []

    def loop(session: gs.Session) -> torch.Tensor:
        loader = session.shard(DataLoader(TensorDataset(*data), batch_size=4))
        model, optimizer = session.wrap(made := line(session.rank), sgd(made, momentum=0.0))
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=2 * len(loader) - 1)
        for _ in range(2):
            for x, y in loader:
                last.append(float(optimizer.param_groups[0]["lr"]))
                step(model, optimizer, (x, y))
                scheduler.step()
        session.close()
        return flat(made)

    found = loop_in_threads(loop, strategy="allreduce", deadlines=DEADLINES)
    assert len(last) == 2 * 2 * 5
    assert min(last) == pytest.approx(0.01)
    assert sum(rate == pytest.approx(0.01) for rate in last) == 2  # the last step of each
    model = line()
    optimizer = sgd(model, momentum=0.0)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=9)
    for _ in range(2):
        for start in range(0, 36, 8):
            step(model, optimizer, part(data, start, min(36, start + 8)))
            scheduler.step()
    close(found, flat(model))
