"""NoLoCo: local steps, and outer steps of pairs, beside NumPy's arithmetic; special cases, codecs, a stopped run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import gradstream as gs
from gradstream.collectives.pairwise import PairwiseExchange
from gradstream.data.arrays import ArrayDataset
from gradstream.data.plan import RoundPlan
from gradstream.errors import ConfigError
from gradstream.runtime.storage import MemoryStorage
from gradstream.strategies import noloco
from gradstream.strategies.matching import matching
from gradstream.testing import check_strategy
from gradstream.testing.runs import least_squares
from peer_runs import LR, Array, bytes_of, inner_steps, losses, noted
from whole_runs import same

Gossip, NoLoCo = gs.strategies.Gossip, gs.strategies.NoLoCo
ALPHA, BETA, GAMMA = 0.5, 0.7, 0.6


@pytest.mark.usefixtures("few_seeds")
def test_it_obeys_the_laws() -> None:
    assert not check_strategy(NoLoCo(every=3)).broken


# ---- beside NumPy -----------------------------------------------------------------------------------


def reference(data: ArrayDataset, workers: int, every: int, rounds: int) -> Array:
    """Slow weights of each worker by the formula of the paper, (workers, features)."""
    plan = RoundPlan(data.num_samples, 4, workers, seed=3)
    features = np.asarray(data.batch(np.arange(1)).inputs).shape[1]
    phi, delta = np.zeros((workers, features)), np.zeros((workers, features))
    for number in range(rounds):
        steps = range(number * every, (number + 1) * every)
        outer = [phi[rank] - inner_steps(data, plan, rank, steps, phi[rank]) for rank in range(workers)]
        pairs = matching(3, number, workers, range(workers))
        group = {rank: pair for pair in pairs for rank in pair}
        new = []
        for rank in range(workers):
            pair = group.get(rank, (rank,))
            pulled = phi[rank] - sum(phi[one] for one in pair) / len(pair)
            delta[rank] = (
                ALPHA * delta[rank] - BETA / len(pair) * sum(outer[one] for one in pair) - GAMMA * pulled
            )
            new.append(phi[rank] + delta[rank])
        phi = np.stack(new)
    return phi


def run_of(workers: int, every: int, rounds: int, **options: Any) -> tuple[gs.Run, ArrayDataset]:
    model, data = least_squares(4 * workers * every * rounds, 20, whole=False, reduction="mean")
    strategy = NoLoCo(every=every, outer_lr=BETA, outer_momentum=ALPHA, pull=GAMMA)
    given: dict[str, Any] = {"optimizer": gs.optim.SGD(LR), "epochs": 1, "seed": 3, "chunk_elems": 64}
    return gs.simulate(
        model, data, strategy=strategy, workers=workers, batch_size=4, **{**given, **options}
    ), data


def distance_from_the_paper(workers: int, every: int, patch: pytest.MonkeyPatch) -> float:
    notes = noted(patch)
    run, data = run_of(workers, every, 6)
    expected = reference(data, workers, every, 6)
    own = np.stack([notes.own[5][rank] for rank in range(workers)])
    return float(max(np.abs(own - expected).max(), np.abs(run.parameters["w"] - expected.mean(0)).max()))


@pytest.mark.parametrize("workers", [1, 2, 4, 5])
@pytest.mark.parametrize("every", [1, 3])
def test_it_is_the_papers(workers: int, every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert distance_from_the_paper(workers, every, monkeypatch) < 1e-13


def test_the_comparison_sees_a_wrong_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noloco, "to_delta", lambda slow, own: own.sub_(slow))
    assert distance_from_the_paper(4, 3, monkeypatch) > 1e-3


def test_the_comparison_sees_the_vectors_of_the_round_before(monkeypatch: pytest.MonkeyPatch) -> None:
    meet, kept = PairwiseExchange.swap, dict[str, list[torch.Tensor]]()

    async def late(self: PairwiseExchange, number: int, partner: str, given: Any, into: Any) -> str:
        why = await meet(self, number, partner, given, into)
        fresh = [one.tensor.clone() for one in into]
        for span, old in zip(into, kept.get(self._me, fresh), strict=True):
            span.tensor.copy_(old)
        kept[self._me] = fresh
        return why

    monkeypatch.setattr(PairwiseExchange, "swap", late)
    assert distance_from_the_paper(4, 3, monkeypatch) > 1e-3


@pytest.mark.parametrize("every", [1, 4])
def test_one_worker_is_diloco_with_a_plain_outer_momentum(every: int) -> None:
    model, data = least_squares(96, 20, whole=False, reduction="mean")
    options: dict[str, Any] = {"workers": 1, "batch_size": 4, "epochs": 2, "optimizer": gs.optim.Adam(0.01)}
    mine = gs.simulate(model, data, strategy=NoLoCo(every=every, outer_lr=0.7, outer_momentum=0.5), **options)
    outer: dict[str, Any] = {"outer_lr": 0.7, "outer_momentum": 0.5, "nesterov": False}
    for strategy in (gs.DiLoCo(every=every, **outer), gs.LocalSGD(every=every, **outer)):
        theirs = gs.simulate(model, data, strategy=strategy, **options)
        assert np.abs(mine.parameters["w"] - theirs.parameters["w"]).max() < 1e-13


def test_without_momentum_a_whole_pull_is_gossip() -> None:
    """β = γ = 1, α = 0: φ ← φ - mean(Δ) - (φ - mean(φ)) = mean(θ)."""
    model, data = least_squares(160, 20, whole=False, reduction="mean")
    options: dict[str, Any] = {"workers": 5, "batch_size": 4, "epochs": 2, "optimizer": gs.optim.SGD(0.02)}
    plain = NoLoCo(every=2, outer_lr=1.0, outer_momentum=0.0, pull=1.0)
    one, other = (gs.simulate(model, data, strategy=each, **options) for each in (plain, Gossip(every=2)))
    assert np.abs(one.parameters["w"] - other.parameters["w"]).max() < 1e-14


@pytest.mark.parametrize(("pull", "comes_together"), [(0.7, True), (2.9, True), (3.0, False), (3.2, False)])
def test_two_workers_come_together_below_the_bound(pull: float, comes_together: bool) -> None:
    """Slow weights that differ, and no outer gradients: the difference obeys d ← d + δ, δ ← α·δ - γ·d."""
    strategy = NoLoCo(outer_momentum=0.5, pull=min(pull, 2.9))
    object.__setattr__(strategy, "pull", pull)
    slow, velocity = torch.tensor([[1.0], [-1.0]]).double(), torch.zeros(2, 1).double()
    for _ in range(400):
        before = slow.clone()
        for one, other in ((0, 1), (1, 0)):
            theirs = (torch.zeros(1).double(), before[other])
            strategy.outer_step(slow[one], torch.zeros(1).double(), velocity[one], theirs)
    assert (float(slow.abs().max()) < 1e-6) is comes_together


# ---- bytes, codecs, accuracy ------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [2, 4, 8])
def test_bytes_of_a_worker_are_those_of_two_vectors_a_round(workers: int) -> None:
    run, _ = run_of(workers, 1, 5)
    assert bytes_of(run) == dict.fromkeys(range(workers), (5 * 2 * 8 * 20, 5 * 2 * 8 * 20))


@pytest.mark.parametrize(("codec", "most"), [("int8", 0.64), ("one-bit", 0.54), ("float4", 0.58)])
def test_a_codec_makes_the_outer_gradient_smaller_and_it_learns(codec: str, most: float) -> None:
    model, data = least_squares(192, 600, whole=False, reduction="mean", dtype="float32")
    options: dict[str, Any] = {
        "strategy": NoLoCo(every=4), "workers": 4, "batch_size": 4, "epochs": 12, "optimizer": gs.optim.SGD(0.003),
    }  # fmt: skip
    plain, coded = gs.simulate(model, data, **options), gs.simulate(model, data, **options, codec=codec)
    assert coded.summary["pushed_bytes"] < most * plain.summary["pushed_bytes"]
    before = float(np.mean(np.asarray(data.batch(np.arange(192)).targets) ** 2))
    assert losses(plain, data) < 0.5 * before and losses(coded, data) < 1.5 * losses(plain, data)


def test_a_codec_that_loses_nothing_changes_no_bit() -> None:
    model, data = least_squares(96, 20, reduction="mean", dtype="float32")
    options: dict[str, Any] = {
        "strategy": NoLoCo(every=2), "workers": 3, "batch_size": 4, "epochs": 3, "optimizer": gs.optim.SGD(0.01),
    }  # fmt: skip
    whole = gs.codecs.TopK(density=1.0)
    assert same(gs.simulate(model, data, **options), gs.simulate(model, data, **options, codec=whole))


def test_it_learns_as_well_as_its_siblings_from_as_many_samples() -> None:
    """Mean squared error after 6 epochs of 4 workers, with the same inner optimizer and period."""
    model, data = least_squares(256, 32, whole=False, reduction="mean")
    options: dict[str, Any] = {"workers": 4, "batch_size": 8, "epochs": 6, "optimizer": gs.optim.SGD(0.02)}

    def loss(strategy: gs.Strategy) -> float:
        runs = (gs.simulate(model, data, strategy=strategy, seed=seed, **options) for seed in range(2))
        return float(np.mean([losses(run, data) for run in runs]))

    pairs, mean = loss(Gossip(every=4)), loss(gs.LocalSGD(every=4))
    outer = loss(NoLoCo(every=4))
    diloco = loss(gs.DiLoCo(every=4, outer_lr=0.7, outer_momentum=0.5))
    assert pairs < 1.1 * mean, (pairs, mean)
    assert outer < 1.1 * diloco, (outer, diloco)


# ---- a stopped run ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "codec"),
    [
        (Gossip(every=2), None),
        (gs.strategies.PushSum(every=2), None),
        (NoLoCo(every=2), None),
        (NoLoCo(every=2), "one-bit"),
    ],
    ids=str,
)
def test_a_stopped_run_goes_on_with_the_same_bits(
    strategy: gs.Strategy, codec: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With Adam inside, whose moments each worker has of its own."""
    model, data = least_squares(96, 20, whole=False, reduction="mean", dtype="float32")
    options: dict[str, Any] = {
        "strategy": strategy, "workers": 3, "batch_size": 4, "epochs": 3, "optimizer": gs.optim.Adam(0.01),
        "codec": codec,
    }  # fmt: skip
    whole, stops = gs.simulate(model, data, **options), 0
    for when_s in (0.004, 0.012, 0.02):
        storage = MemoryStorage()

        async def script(cluster: Any, when_s: float = when_s) -> None:
            await cluster.virtual.runtime("director").sleep(when_s)
            cluster.stop()

        try:
            run = gs.simulate(model, data, **options, storage=storage, script=script)
        except gs.errors.Interrupted:
            stops += bool(storage.names("checkpoints"))
            run = gs.simulate(model, data, **options, storage=storage, resume=True)
            assert [event for event in run.events if event["event"] == "resumed"]
        assert same(whole, run)
    assert stops
    monkeypatch.setattr("gradstream.worker.pairs.exchange.read_own", lambda *where: None)  # the mean of all
    assert not same(whole, gs.simulate(model, data, **options, storage=storage, resume=True))


def test_a_checkpoint_has_the_mean_and_another_strategy_goes_on_from_it() -> None:
    model, data = least_squares(96, 20, whole=False, reduction="mean")
    options: dict[str, Any] = {"workers": 2, "batch_size": 4, "optimizer": gs.optim.SGD(0.01)}
    phases = [gs.Phase(epochs=1, strategy=NoLoCo(every=2)), gs.Phase(epochs=1, strategy="allreduce")]
    run = gs.simulate(model, data, phases=phases, **options)
    first = gs.simulate(model, data, strategy=NoLoCo(every=2), epochs=1, **options)
    assert run.summary["samples_accounted"] == 2 * 96 and losses(run, data) < losses(first, data)
    back = gs.simulate(model, data, phases=[phases[1], phases[0]], **options)
    assert back.summary["samples_accounted"] == 2 * 96 and losses(back, data) < losses(first, data)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"every": 0}, "at least 1"),
        ({"outer_lr": gs.schedules.Cosine(1.0)}, "expected a number"),
        ({"outer_lr": 0}, "above 0"),
        ({"outer_momentum": 1.5}, "outer_momentum=1.5"),
        ({"pull": 0}, "never come together"),
        ({"pull": 3.0}, "below 3: .* fly apart"),
    ],
)
def test_options_out_of_their_range_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        NoLoCo(**options)


@pytest.mark.parametrize(
    ("codec", "says"),
    [(gs.codecs.PowerSGD(rank=2), "this needs sums"), ("float4", "float64; expected torch.float32")],
)
def test_codecs_that_do_not_fit_are_refused(codec: Any, says: str) -> None:
    model, data = least_squares(48, 20, reduction="mean")
    with pytest.raises(ConfigError, match=says):
        gs.simulate(model, data, strategy="noloco", workers=2, batch_size=4, epochs=1, codec=codec)
