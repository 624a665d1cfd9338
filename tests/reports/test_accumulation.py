"""Reports of gradients that were weighed, clipped or accumulated otherwise than in one process."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch
from torch import nn

import gradstream as gs
from acted_loops import (
    DEADLINES,
    Batch,
    alone,
    backward,
    close,
    flat,
    joined,
    line,
    part,
    samples,
    sgd,
    step,
)
from gradstream.errors import ReplicasDifferError
from gradstream.testing.sessions import loop_in_threads

TOKENS = [[[3, 1], [6, 2]], [[1, 1], [0, 4]], [[5, 2], [2, 9]]]
"""Number of tokens with a label, by window, worker and minibatch."""


def windows(tokens: list[list[list[int]]]) -> list[list[list[Batch]]]:
    """Minibatches with so many tokens; the loss is a mean over tokens, which are the rows here."""
    data, start, made = samples(64), 0, []
    for window in tokens:
        rows = []
        for worker in window:
            ends = [start + sum(worker[:index]) for index in range(len(worker) + 1)]
            rows.append([part(data, first, last) for first, last in pairwise(ends)])
            start = ends[-1]
        made.append(rows)
    return made


def summed(model: nn.Module, batch: Batch) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1], reduction="sum")


def test_a_mean_over_tokens_is_over_those_of_all_workers() -> None:
    """verl-project/verl#5625: each process divided by its own tokens, so those of short minibatches weighed more."""
    made = windows([[[9], [2]], [[1], [7]], [[4], [4]]])

    def loop(session: gs.Session) -> torch.Tensor:
        model, optimizer = session.wrap(own := line(session.rank), sgd(own))
        for window in made:
            (batch,) = window[session.rank]
            session.samples(len(batch[0]))
            optimizer.zero_grad()
            backward(summed(model, batch) / len(batch[0]))
            optimizer.step()
        session.close()
        return flat(own)

    found = loop_in_threads(loop, deadlines=DEADLINES)
    close(found, alone(joined(*window[0], *window[1]) for window in made))


@pytest.mark.parametrize("report", ["Lightning-AI/pytorch-lightning#20404", "huggingface/transformers#24725"])
def test_a_window_is_a_mean_over_all_of_its_tokens(report: str) -> None:
    """See above: the mean of a window was the mean of its minibatches' means. With and without `no_sync`."""
    made = windows(TOKENS)

    def loop(session: gs.Session) -> torch.Tensor:
        model, optimizer = session.wrap(own := line(session.rank), sgd(own))
        for window in made:
            mine = window[session.rank]
            tokens = sum(len(x) for x, _ in mine)
            optimizer.zero_grad()
            for number, batch in enumerate(mine):
                last = number == len(mine) - 1
                with nullcontext() if last or "lightning" in report else session.no_sync():
                    session.samples(tokens)
                    backward(summed(model, batch) / tokens)
            optimizer.step()
        session.close()
        return flat(own)

    found = loop_in_threads(loop, strategy="allreduce", deadlines=DEADLINES)
    close(found, alone(joined(*window[0], *window[1]) for window in made))


def test_a_minibatch_without_labels_adds_nothing_to_a_mean() -> None:
    """allenai/OLMo-core#657: a mean over no labels is NaN, and the sum of gradients brought it to all processes."""
    made = windows([[[4], [3]], [[5], [0]], [[2], [6]]])

    def loop(session: gs.Session) -> torch.Tensor:
        model, optimizer = session.wrap(own := line(session.rank), sgd(own))
        for window in made:
            (batch,) = window[session.rank]
            session.samples(len(batch[0]))
            step(model, optimizer, batch)  # torch's mean: 0 / 0
        session.close()
        return flat(own)

    found = loop_in_threads(loop, strategy="synchronous", deadlines=DEADLINES)
    close(found, alone(joined(*window[0], *window[1]) for window in made))


def test_the_norm_that_is_clipped_is_that_of_the_joined_gradient() -> None:
    """modelscope/twinkle#290: squares of a gradient that was joined already were summed over processes once more."""
    data = samples(24)
    norms: list[float] = []

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, size: int) -> list[float]:
        seen = []
        for start in range(0, 24, 8):
            x, y = part(data, start + rank * size, start + rank * size + size)
            optimizer.zero_grad()
            backward(nn.functional.mse_loss(model(x), y))
            seen.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
        return seen

    def loop(session: gs.Session) -> torch.Tensor:
        model, optimizer = session.wrap(own := line(session.rank), sgd(own))
        norms.extend(steps(model, optimizer, session.rank, 4))
        session.close()
        return flat(own)

    found = loop_in_threads(loop, strategy="allreduce", deadlines=DEADLINES)
    model = line()
    expected = steps(model, sgd(model), 0, 8)
    close(found, flat(model))
    assert max(expected) > 0.5
    assert sorted(norms) == pytest.approx(sorted(expected * 2))


class Two(nn.Module):
    """Two heads, of which a minibatch goes through one."""

    def __init__(self, rank: int = 0) -> None:
        super().__init__()
        self.heads = nn.ModuleList([line(rank), line(rank + 10)])

    def forward(self, x: torch.Tensor, head: int) -> torch.Tensor:
        out: torch.Tensor = self.heads[head](x)
        return out


def test_what_no_worker_went_through_is_not_decayed() -> None:
    """pytorch/pytorch#28294: a zero in place of no gradient let weight decay and momentum move what was not used."""
    data = samples(24)
    taken = [(1, 0), (0, 0), (0, 1), (0, 0)]  # heads of both workers, step by step

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, ranks: list[int]) -> None:
        for number, heads in enumerate(taken):
            optimizer.zero_grad()
            losses = []
            for rank in ranks:
                x, y = part(data, 6 * number + 3 * rank, 6 * number + 3 * rank + 3)
                losses.append(nn.functional.mse_loss(model(x, heads[rank]), y))
            backward(sum(losses, torch.zeros(())) / len(ranks))
            optimizer.step()

    def loop(session: gs.Session) -> torch.Tensor:
        model, optimizer = session.wrap(own := Two(session.rank), sgd(own, weight_decay=0.1))
        steps(model, optimizer, [session.rank])
        session.close()
        return flat(own)

    found = loop_in_threads(loop, deadlines=DEADLINES)
    whole = Two()
    steps(whole, sgd(whole, weight_decay=0.1), [0, 1])
    close(found, flat(whole))


def test_scales_that_differ_between_workers_are_found_out() -> None:
    """pytorch/pytorch#136009: each process divided the joined gradient by a scale of its own, and replicas drifted."""
    data = samples(24)

    def loop(session: gs.Session) -> None:
        model, optimizer = session.wrap(own := line(), sgd(own))
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0 * (1 + session.rank))
        for number in range(3):
            x, y = part(data, 8 * number + 4 * session.rank, 8 * number + 4 * session.rank + 4)
            optimizer.zero_grad()
            backward(scaler.scale(nn.functional.mse_loss(model(x), y)))
            scaler.step(optimizer)
            scaler.update()
        session.close()

    with pytest.raises(ReplicasDifferError):
        loop_in_threads(loop, strategy="allreduce", deadlines=DEADLINES)


def test_a_worker_that_passes_over_a_minibatch_parts_no_replicas() -> None:
    """ecmwf/WeatherGenerator#2724: a loss out of range was looked for in the first process alone."""
    data = samples(24)
    data[1][12:16] *= 1e6  # the second minibatch of worker 1

    def batch(number: int, rank: int) -> Batch:
        return part(data, 8 * number + 4 * rank, 8 * number + 4 * rank + 4)

    def loop(session: gs.Session) -> torch.Tensor:
        model, optimizer = session.wrap(own := line(session.rank), sgd(own))
        for number in range(3):
            x, y = batch(number, session.rank)
            loss = nn.functional.mse_loss(model(x), y)
            if loss > 1e3:
                session.samples(len(x))  # of the minibatch that comes next, alone
                continue
            optimizer.zero_grad()
            backward(loss)
            optimizer.step()
        session.close()
        return flat(own)

    found = loop_in_threads(loop, strategy="synchronous", deadlines=DEADLINES)
    rounds = [joined(batch(0, 0), batch(0, 1)), joined(batch(1, 0), batch(2, 1)), batch(2, 0)]
    close(found, alone(rounds))
