"""Gossip: pairs and their means, beside NumPy's arithmetic; what is conserved, and how fast workers come together."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

import gradstream as gs
from gradstream.data.arrays import ArrayDataset
from gradstream.data.plan import RoundPlan
from gradstream.errors import ConfigError
from gradstream.strategies import gossip
from gradstream.strategies.matching import matching, partner_of
from gradstream.testing import check_strategy
from gradstream.testing.runs import least_squares
from gradstream.worker.pairs.exchange import PeerExchange
from peer_runs import LR, Array, bytes_of, inner_steps, noted
from whole_runs import same

Gossip = gs.strategies.Gossip


@pytest.mark.usefixtures("few_seeds")
def test_it_obeys_the_laws() -> None:
    assert not check_strategy(Gossip(every=2)).broken


# ---- who meets whom ---------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", range(1, 10))
def test_a_matching_has_each_live_rank_once_at_most(workers: int) -> None:
    rng = np.random.default_rng(workers)
    for number in range(20):
        live = {rank for rank in range(workers) if rng.random() < 0.7}
        pairs = matching(3, number, workers, live)
        ranks = [rank for pair in pairs for rank in pair]
        assert len(set(ranks)) == len(ranks) and set(ranks) <= live and len(pairs) == len(live) // 2
        for one, other in pairs:
            assert partner_of(one, 3, number, workers, live) == other
            assert partner_of(other, 3, number, workers, live) == one


@pytest.mark.parametrize("workers", [4, 7])
def test_all_pairs_are_equally_frequent(workers: int) -> None:
    counts = Counter(pair for number in range(2000) for pair in matching(0, number, workers, range(workers)))
    expected = 2000 / (workers - 1 + workers % 2)
    assert len(counts) == workers * (workers - 1) // 2
    assert all(abs(count - expected) < 5 * expected**0.5 for count in counts.values())
    assert matching(1, 0, 8, range(8)) != matching(2, 0, 8, range(8))


@pytest.mark.parametrize("workers", [6, 7])
def test_a_death_changes_the_pairs_of_those_without_a_partner_alone(workers: int) -> None:
    for number in range(50):
        before = set(matching(0, number, workers, range(workers)))
        for dead in range(workers):
            after = set(matching(0, number, workers, set(range(workers)) - {dead}))
            assert {pair for pair in before if dead not in pair} <= after


# ---- beside NumPy -----------------------------------------------------------------------------------


def reference(data: ArrayDataset, workers: int, every: int, rounds: int) -> Array:
    """Each worker's parameters after so many rounds, (workers, features)."""
    plan = RoundPlan(data.num_samples, 4, workers, seed=3)
    x = np.zeros((workers, np.asarray(data.batch(np.arange(1)).inputs).shape[1]))
    for number in range(rounds):
        steps = range(number * every, (number + 1) * every)
        x = np.stack([inner_steps(data, plan, rank, steps, x[rank]) for rank in range(workers)])
        for one, other in matching(3, number, workers, range(workers)):
            x[one] = x[other] = (x[one] + x[other]) / 2
    return x


def run_of(workers: int, every: int, rounds: int, **options: Any) -> tuple[gs.Run, ArrayDataset]:
    model, data = least_squares(4 * workers * every * rounds, 20, whole=False, reduction="mean")
    given: dict[str, Any] = {"optimizer": gs.optim.SGD(LR), "epochs": 1, "seed": 3, "chunk_elems": 64}
    strategy = Gossip(every=every)
    return gs.simulate(
        model, data, strategy=strategy, workers=workers, batch_size=4, **{**given, **options}
    ), data


@pytest.mark.parametrize("workers", [2, 4, 5])
@pytest.mark.parametrize("every", [1, 3])
def test_it_is_the_arithmetic_of_the_pairs(workers: int, every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    notes = noted(monkeypatch)
    run, data = run_of(workers, every, 6)
    expected = reference(data, workers, every, 6)
    assert np.allclose(list(dict(sorted(notes.own[5].items())).values()), expected, rtol=1e-12, atol=1e-12)
    assert np.allclose(run.parameters["w"], expected.mean(0), rtol=1e-12, atol=1e-12)
    assert run.summary["servers"] == 0


def test_one_worker_is_its_optimizer_alone_to_the_bit() -> None:
    model, data = least_squares(96, 20, whole=False, reduction="mean")
    options: dict[str, Any] = {"workers": 1, "batch_size": 4, "epochs": 2, "optimizer": gs.optim.Adam(0.01)}
    alone = gs.simulate(model, data, strategy="allreduce", **options)
    for every in (1, 5):
        assert same(gs.simulate(model, data, strategy=Gossip(every=every), **options), alone)


def test_two_workers_are_local_sgd_to_the_bit() -> None:
    """On whole numbers, of which two steps are exact: w - (w - w_i) is w_i then."""
    model, data = least_squares(48, 70, grid=2**-8, reduction="mean")
    options: dict[str, Any] = {"workers": 2, "batch_size": 4, "steps": 2, "optimizer": gs.optim.SGD(2.0**-7)}
    pairs = gs.simulate(model, data, strategy="gossip", **options)
    assert same(pairs, gs.simulate(model, data, strategy=gs.LocalSGD(every=1), **options))


# ---- what is conserved ------------------------------------------------------------------------------


def sums_differ(patch: pytest.MonkeyPatch) -> float:
    """How far an exchange moves the sum of all workers' parameters, at most."""
    notes = noted(patch)
    run_of(5, 2, 8)
    before = [sum(vectors[0] for vectors in given.values()) for given in notes.given.values()]
    after = [sum(own.values()) for own in notes.own.values()]
    return float(np.abs(np.array(before) - np.array(after)).max())


def test_means_of_pairs_leave_the_mean_of_all_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        assert sums_differ(patch) < 1e-15
    monkeypatch.setattr(gossip, "to_mean", lambda x, y: x.mul_(0.5).add_(y, alpha=0.4))
    assert sums_differ(monkeypatch) > 1e-3


def distance(x: Array) -> float:
    """Squared distance of all workers from their mean."""
    return float(((x - x.mean(0)) ** 2).sum())


@pytest.mark.parametrize(("workers", "left"), [(4, 1 / 3), (5, 1 / 2), (8, 3 / 7)])
def test_without_gradients_workers_come_together_at_the_rate_of_the_matching(
    workers: int, left: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first round worker r steps along e_r; all other minibatches have no gradient."""
    model = gs.from_functions(
        init=lambda seed: {"w": np.zeros(workers)},
        outputs=lambda p, x: x @ p["w"],
        gradients=lambda p, x, y: {"w": -x.mean(0)},
        dtype="float64",
    )
    rows = np.concatenate([np.eye(workers), np.zeros((11 * workers, workers))])
    data = gs.from_arrays(rows, np.zeros(len(rows)))
    monkeypatch.setattr(
        RoundPlan, "ids", lambda plan, ref: np.array([workers if ref.batch else ref.partition], np.int64)
    )
    ratios = []
    for seed in range(4):
        with monkeypatch.context() as patch:
            notes = noted(patch)
            gs.simulate(
                model, data, strategy=Gossip(), workers=workers, batch_size=1, epochs=1, seed=seed,
                optimizer=gs.optim.SGD(1.0),
            )  # fmt: skip
        x = np.eye(workers)
        for number, own in notes.own.items():
            for one, other in matching(seed, number, workers, range(workers)):
                x[one] = x[other] = (x[one] + x[other]) / 2
            assert np.allclose([own[rank] for rank in range(workers)], x, atol=1e-15)
        ratios.append((distance(x) / (workers - 1)) ** (1 / len(notes.own)))
    assert np.mean(ratios) < left + 0.1


@pytest.mark.parametrize(("workers", "left"), [(4, 1 / 3), (5, 1 / 2), (8, 3 / 7), (9, 1 / 2)])
def test_a_round_leaves_the_formulas_share_of_the_distance_on_average(workers: int, left: float) -> None:
    rng, ratios = np.random.default_rng(0), []
    for number in range(4000):
        x = rng.standard_normal((workers, 3))
        before = distance(x)
        for one, other in matching(0, number, workers, range(workers)):
            x[one] = x[other] = (x[one] + x[other]) / 2
        ratios.append(distance(x) / before)
    assert np.mean(ratios) == pytest.approx(left, abs=0.01)


# ---- bytes, and what is refused ---------------------------------------------------------------------


@pytest.mark.parametrize("workers", [2, 4, 8])
def test_bytes_of_a_worker_are_those_of_one_vector_a_round(workers: int) -> None:
    run, _ = run_of(workers, 1, 5)
    assert bytes_of(run) == dict.fromkeys(range(workers), (5 * 8 * 20, 5 * 8 * 20))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"codec": "int8"}, "exchange whole parameters.*take strategy='noloco'"),
        ({"accumulate": 2}, "accumulate=2 with strategy=Gossip: workers train alone"),
        ({"split": 2}, "split=2: parts of a model"),
        ({"servers": 1}, "exchange in pairs, without servers"),
        ({"shares": "measured"}, "shares='measured' with strategy=Gossip: the shares are those of rounds"),
        ({"record": True}, "has no server whose order could differ"),
        ({"noise_scale": True}, "computed on different parameters"),
        ({"strategy": Gossip(), "acknowledge": "logged"}, "has no servers that could acknowledge"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], says: str) -> None:
    model, data = least_squares(48, 20, reduction="mean", dtype="float32")
    with pytest.raises(ConfigError, match=says):
        gs.simulate(
            model, data, **{"strategy": "gossip", "workers": 2, "batch_size": 4, "epochs": 1, **options}
        )


def test_a_period_that_is_no_number_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        Gossip(every=0)


def test_a_gradient_that_is_not_finite_is_left_out_of_its_worker_alone() -> None:
    model, data = least_squares(48, 20, whole=False, reduction="mean")
    batch = data.batch(np.arange(48))
    spoilt = np.array(batch.inputs)
    spoilt[5] = np.inf
    run = gs.simulate(
        model, (spoilt, np.asarray(batch.targets)), strategy=Gossip(), workers=2, batch_size=4, epochs=2,
        optimizer=gs.optim.SGD(0.01),
    )  # fmt: skip
    assert run.summary["samples_dropped"] == 2 * 4 and np.isfinite(run.parameters["w"]).all()


def test_muon_has_whole_matrices() -> None:
    inputs, targets = np.random.default_rng(0).standard_normal((2, 64, 4))
    model = gs.from_torch(lambda: torch.nn.Linear(4, 4, bias=False).double(), torch.nn.functional.mse_loss)
    run = gs.simulate(
        model, gs.from_arrays(inputs, targets), strategy=Gossip(every=2), optimizer=gs.optim.Muon(lr=0.02), workers=2,
        batch_size=8, epochs=1,
    )  # fmt: skip
    assert np.isfinite(run.parameters["weight"]).all()


def test_a_worker_beyond_the_number_at_the_beginning_meets_all_others() -> None:
    met = {pair for number in range(60) for pair in matching(1, number, 3, {0, 1, 2, 4})}
    assert met == {(one, other) for one in (0, 1, 2) for other in (1, 2, 4) if one < other}
    assert matching(1, 5, 3, {0, 2}) == matching(1, 5, 3, [2, 0]) and matching(1, 5, 3, ()) == []


def test_two_newcomers_at_a_time_copy_from_who_was_there_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """If they asked one another, both would wait to the end of the run."""
    copy = PeerExchange._copy_another

    async def later(exchange: PeerExchange) -> None:
        await exchange._context.runtime.sleep(0.1)  # as a user's own loop, which it enters first
        await copy(exchange)

    monkeypatch.setattr(PeerExchange, "_copy_another", later)

    async def script(cluster: Any) -> None:
        director = cluster.virtual.runtime("director")
        await director.sleep(0.1)
        for who in ("worker-0", "worker-1"):
            cluster.kill(who)
        await director.sleep(0.02)
        await asyncio.gather(*map(cluster.restart, ("worker-0", "worker-1")))

    model, data = least_squares(240, 4, whole=True)
    config = gs.sim.SimulationConfig(costs={"gradient": gs.sim.Cost(base_s=0.01)})
    run = gs.simulate(
        model, data, strategy="gossip", workers=3, batch_size=2, epochs=3, config=config, script=script
    )
    steps = Counter(
        event["rank"] for event in run.events if event["event"] == "step" and event["time_s"] > 0.3
    )
    assert min(steps[rank] for rank in range(3)) > 20
