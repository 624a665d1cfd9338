"""Push-sum: halves that go round a directed graph, beside NumPy's arithmetic; what is conserved, also at losses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import gradstream as gs
from gradstream.data.arrays import ArrayDataset
from gradstream.data.plan import RoundPlan
from gradstream.errors import ConfigError
from gradstream.strategies import push_sum
from gradstream.strategies.push_sum import halve, join, neighbours
from gradstream.testing import check_strategy
from gradstream.testing.runs import QUICK, kill_at, least_squares
from peer_runs import LR, Array, bytes_of, inner_steps, noted
from whole_runs import same

PushSum = gs.strategies.PushSum


@pytest.mark.usefixtures("few_seeds")
def test_it_obeys_the_laws() -> None:
    assert not check_strategy(PushSum(every=2)).broken


@pytest.mark.parametrize("size", range(2, 12))
def test_each_gives_to_one_and_takes_from_one(size: int) -> None:
    live = [3 * rank + rank % 2 for rank in range(size)]
    hops = set()
    for number in range(10):
        for rank in live:
            to, giver = neighbours(rank, number, live)
            assert to in live and giver in live and rank not in (to, giver)
            assert neighbours(to, number, live)[1] == rank
        hops.add((live.index(neighbours(live[0], number, live)[0] or 0)) % size)
    assert hops == {2**power for power in range(10) if 2**power < size}


def test_one_that_is_alone_has_nobody() -> None:
    assert neighbours(2, 5, [2]) == neighbours(1, 5, [0, 2]) == (None, None)


# ---- beside NumPy -----------------------------------------------------------------------------------


def reference(data: ArrayDataset, workers: int, every: int, rounds: int) -> Array:
    """z of each worker by Algorithm 1, (workers, features)."""
    plan = RoundPlan(data.num_samples, 4, workers, seed=3)
    x = np.zeros((workers, np.asarray(data.batch(np.arange(1)).inputs).shape[1]))
    w = np.ones(workers)
    for number in range(rounds):
        z = x / w[:, None]
        steps = range(number * every, (number + 1) * every)
        x = x + np.stack([inner_steps(data, plan, rank, steps, z[rank]) - z[rank] for rank in range(workers)])
        sends = np.zeros((workers, workers))  # by column, where the halves of a worker go
        for rank in range(workers):
            to, _ = neighbours(rank, number, range(workers))
            sends[rank, rank] += 0.5
            sends[rank if to is None else to, rank] += 0.5
        x, w = sends @ x, sends @ w
    return np.asarray(x / w[:, None])


def run_of(workers: int, every: int, rounds: int, **options: Any) -> tuple[gs.Run, ArrayDataset]:
    model, data = least_squares(4 * workers * every * rounds, 20, whole=False, reduction="mean")
    given: dict[str, Any] = {"optimizer": gs.optim.SGD(LR), "epochs": 1, "seed": 3, "chunk_elems": 64}
    strategy = PushSum(every=every)
    return gs.simulate(
        model, data, strategy=strategy, workers=workers, batch_size=4, **{**given, **options}
    ), data


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("every", [1, 3])
def test_it_is_the_papers(workers: int, every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    notes = noted(monkeypatch)
    run, data = run_of(workers, every, 6)
    expected = reference(data, workers, every, 6)
    assert np.allclose([notes.own[5][rank] for rank in range(workers)], expected, rtol=1e-12, atol=1e-12)
    assert np.allclose(run.parameters["w"], expected.mean(0), rtol=1e-12, atol=1e-12)


def test_two_workers_are_gossip_and_one_is_its_optimizer_alone() -> None:
    model, data = least_squares(96, 20, whole=False, reduction="mean")
    options: dict[str, Any] = {"batch_size": 4, "epochs": 2, "optimizer": gs.optim.Adam(0.01)}
    alone = gs.simulate(model, data, strategy="allreduce", workers=1, **options)
    assert same(gs.simulate(model, data, strategy=PushSum(), workers=1, **options), alone)
    one, other = (
        gs.simulate(model, data, strategy=each, workers=2, **options)
        for each in (PushSum(every=2), gs.strategies.Gossip(every=2))
    )
    assert np.abs(one.parameters["w"] - other.parameters["w"]).max() < 1e-14


# ---- what is conserved ------------------------------------------------------------------------------


def rounds_of(size: int, rounds: int, lost: float, seed: int = 0) -> tuple[Array, Array, Array]:
    """Rounds without gradients, in which halves get lost on their way: first x, last x, and last w."""
    rng = np.random.default_rng(seed)
    first = rng.standard_normal((size, 3))
    z = [torch.tensor(row) for row in first]
    w = [torch.ones(1).double() for _ in range(size)]
    for number in range(rounds):
        for rank in range(size):
            halve(z[rank], z[rank].clone(), w[rank])
        sent = [(x.clone(), weight.clone()) for x, weight in zip(z, w, strict=True)]
        arrives = rng.random(size) >= lost  # the half of each rank at its successor
        for rank in range(size):
            _, giver = neighbours(rank, number, range(size))
            assert giver is not None
            join(z[rank], w[rank], sent[giver] if arrives[giver] else None, keeps=not arrives[rank])
    weights = np.array([float(weight) for weight in w])
    return first, np.stack([one.numpy() for one in z]) * weights[:, None], weights


@pytest.mark.parametrize("lost", [0.0, 0.3])
def test_sums_stay_as_they_are_whatever_gets_lost(lost: float, monkeypatch: pytest.MonkeyPatch) -> None:
    first, last, weights = rounds_of(6, 40, lost)
    assert weights.sum() == pytest.approx(6, abs=1e-12) and np.allclose(last.sum(0), first.sum(0), atol=1e-12)
    assert lost == 0.0 or weights.max() - weights.min() > 0.1
    assert np.allclose(last / weights[:, None], first.mean(0), atol=1e-3)  # all have the mean
    real = halve

    def forgetful(own: torch.Tensor, before: torch.Tensor, weight: torch.Tensor) -> None:
        real(own, before, weight.clone())  # the weight is not halved

    monkeypatch.setitem(globals(), "halve", forgetful)
    first, last, weights = rounds_of(6, 40, lost)
    assert abs(weights.sum() - 6) > 1


@pytest.mark.parametrize("power", [1, 2, 3])
def test_as_many_rounds_as_hops_are_the_exact_mean(power: int) -> None:
    first, last, weights = rounds_of(2**power, power, 0.0)
    assert (weights == 1).all() and np.abs(last - first.mean(0)).max() < 1e-15


@pytest.mark.parametrize("rank", [1, 2])
def test_after_a_death_weights_differ_and_the_mean_is_that_of_all_the_others(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No gradients from the fourth round on: all come to Σx/Σw, whatever halves the dead one has taken along."""
    model, data = least_squares(4 * 4 * 30, 20, whole=False, reduction="mean")
    notes = noted(monkeypatch)
    weights: dict[int, float] = {}
    real = push_sum.join

    def joined(half: torch.Tensor, weight: torch.Tensor, *rest: Any, **options: Any) -> None:
        real(half, weight, *rest, **options)
        weights[weight.data_ptr()] = float(weight)

    monkeypatch.setattr(push_sum, "join", joined)
    run = gs.simulate(
        model, data, strategy=PushSum(), workers=4, batch_size=4, epochs=1, deadlines=QUICK,
        optimizer=gs.optim.SGD(lambda at: LR if at.step < 4 else 1e-30), script=kill_at(f"worker-{rank}", 0.06),
    )  # fmt: skip
    assert run.summary["workers_lost"] == [f"worker-{rank}"]
    last = np.stack([own for one, own in sorted(notes.own[29].items()) if one != rank])
    assert np.abs(last - last.mean(0)).max() < 1e-5 < np.abs(last).max()
    assert len(weights) == 4 and sum(weights.values()) <= 4 + 1e-9


def test_bytes_of_a_worker_are_those_of_one_vector_and_a_number_a_round() -> None:
    for workers in (2, 4, 8):
        run, _ = run_of(workers, 1, 5)
        assert bytes_of(run) == dict.fromkeys(range(workers), (5 * 8 * 21, 5 * 8 * 21))


def test_a_codec_is_refused() -> None:
    model, data = least_squares(48, 20, reduction="mean", dtype="float32")
    with pytest.raises(ConfigError, match="exchange whole parameters"):
        gs.simulate(model, data, strategy="push-sum", workers=2, batch_size=4, epochs=1, codec="int8")
