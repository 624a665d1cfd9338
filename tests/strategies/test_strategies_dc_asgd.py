"""DC-ASGD: each gradient is moved from the parameters that it was computed on, and no others."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

import gradstream as gs
from gradstream._simulate import simulate
from gradstream.model.base import Reduction
from gradstream.runtime.simulation import Cost, Exponential, Link, Network, SimulationConfig
from gradstream.server.aggregation import AggregationRule, Correction, EveryPush, PushHeader, SenderStates
from gradstream.strategies import ServerWorker
from gradstream.strategies.dc_asgd import DCASGD, Compensation
from gradstream.testing import check_strategy
from gradstream.testing.runs import QUICK, Sized, least_squares, numbered
from gradstream.testing.trials import bad_world
from gradstream.worker.server.replica import ServerReplica

COSTS = {"gradient": Cost(base_s=0.01, jitter=Exponential()), "apply": Cost(base_s=1e-3)}
WORLD = SimulationConfig(costs=COSTS, network=Network(link=Link(latency_s=1e-3, jitter_s=1e-2)))
EXACT = SimulationConfig(
    costs={"gradient": Cost(base_s=0.01)}, speeds={"worker-1": 0.7317, "worker-2": 0.4159}
)
LR = 2.0**-5


# ---- the formula ------------------------------------------------------------------------------


def error_at(gap: float, correction: Correction | None) -> float:
    """|corrected gradient - gradient at x| of -log x, whose g² is f''; x has gone on by `gap` from 1.3."""
    basis, now = torch.tensor([1.3], dtype=torch.float64), torch.tensor([1.3 + gap], dtype=torch.float64)
    used = -1 / basis
    if correction is not None:
        used = correction.correct(used, now, basis.clone(), {})
    return float((used + 1 / now).abs())


def test_half_the_gap_is_a_quarter_of_the_error_and_half_of_it_without() -> None:
    with_it = [error_at(gap, Compensation(1.0)) for gap in (0.1, 0.05, 0.025)]
    without = [error_at(gap, None) for gap in (0.1, 0.05, 0.025)]
    assert with_it[:2] == pytest.approx([0.0042, 0.0011], abs=5e-5)
    assert without[:2] == pytest.approx([0.0549, 0.0285], abs=5e-5)
    for before, after in itertools.pairwise(with_it):
        assert before / after == pytest.approx(4, rel=0.06)
    for before, after in itertools.pairwise(without):
        assert before / after == pytest.approx(2, rel=0.06)
    off = [error_at(gap, Compensation(0.0)) for gap in (0.1, 0.05)]
    assert off[0] / off[1] < 3, "with the compensation off the error only halves"


def test_the_adaptive_one_divides_by_the_root_of_the_mean_square(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradstream.strategies.dc_asgd.BLOCK_ELEMS", 128)
    generator = torch.Generator().manual_seed(0)
    elems = 2 * 128 + 5  # the last block is ragged
    now, mean_square = torch.randn(elems, generator=generator), torch.zeros(elems)
    expected_square = torch.zeros(elems)
    correction = Compensation(strength=2.0, decay=0.95, eps=1e-7)
    for _ in range(3):
        g, basis = torch.randn(elems, generator=generator), torch.randn(elems, generator=generator)
        expected_square = 0.95 * expected_square + (1 - 0.95) * g * g
        expected = g + 2.0 / (expected_square + 1e-7).sqrt() * g * g * (now - basis)
        got = correction.correct(g, now, basis, {"mean square": mean_square})
        assert torch.allclose(got, expected, rtol=1e-5, atol=1e-6)
        assert torch.allclose(mean_square, expected_square)
        assert got.data_ptr() == basis.data_ptr(), "no memory but the copy's"


def test_where_nothing_has_gone_on_a_gradient_keeps_its_bits() -> None:
    g, w = torch.randn(300), torch.randn(300)
    assert torch.equal(Compensation(0.7).correct(g, w, w.clone(), {}), g)
    kept = {"mean square": torch.zeros(300)}
    assert torch.equal(Compensation(2.0, 0.95, 1e-7).correct(g, w, w.clone(), kept), g)


# ---- runs -------------------------------------------------------------------------------------


APPLIED: list[PushHeader] = []  # in order, in the run that is followed: one shard, one chunk
COMPUTED: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}  # by rank: parameters, their gradient


class Listening(EveryPush):
    """Records every gradient that is applied."""

    def weights(self, version: int, update: Sequence[PushHeader]) -> Sequence[float]:
        """1."""
        APPLIED.extend(update)
        return (1.0,)


@dataclass(frozen=True)
class Followed(DCASGD):
    """DC-ASGD that records the version of each gradient, and the order in which gradients are applied."""

    def rule(self, num_workers: int, reduction: Reduction) -> AggregationRule:
        return Listening()

    async def train(self, worker: ServerWorker) -> None:
        compute, noted = worker.gradient, COMPUTED.setdefault(worker.rank, [])
        assert isinstance(worker, ServerReplica)

        async def gradient(batch: Any) -> Any:
            got = await compute(batch)
            noted.append((worker.parameters.tensor.clone(), got.vector.tensor.clone()))
            return got

        worker.gradient = gradient  # type: ignore[method-assign]
        await super().train(worker)


def end(strategy: gs.Strategy, seed: int = 0, **options: Any) -> np.ndarray[Any, Any]:
    model, data = least_squares(96, 50, whole=False, reduction="mean", seed=seed)
    options = {"workers": 3, "servers": 1, "batch_size": 4, "steps": 8, "config": WORLD, **options}
    options = {
        "optimizer": gs.optim.SGD(lr=LR),
        "chunk_elems": 64,
        "seed": seed,
        "deadlines": QUICK,
        **options,
    }
    w: np.ndarray[Any, Any] = simulate(model, data, strategy=strategy, **options).parameters["w"]
    return w


def followed(
    strategy: Followed, seed: int, config: SimulationConfig
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The final parameters of a run, and those that follow from the recorded versions."""
    APPLIED.clear()
    COMPUTED.clear()
    got = end(strategy, seed, config=config)
    correction, optimizer = strategy.correction(), gs.optim.SGD(lr=LR)
    assert correction is not None
    w = torch.zeros(50, dtype=torch.float64)
    kept = {rank: {name: torch.zeros_like(w) for name in correction.state_names} for rank in COMPUTED}
    left = {rank: iter(noted) for rank, noted in COMPUTED.items()}
    for one in APPLIED:
        basis, g = next(left[one.rank])
        g = correction.correct(g, w, basis.clone(), kept[one.rank])
        optimizer.apply(w, g, {}, lr=LR, step=1)
    return got, w.numpy()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("adaptive", [False, True])
def test_the_copy_is_of_what_the_gradient_was_computed_on(adaptive: bool, overlap: bool) -> None:
    """To the bit, also where fetches are lost and asked for again, come twice, and run ahead."""
    strategy = Followed(adaptive=adaptive, strength=0.5, overlap=overlap)
    for seed, config in ((0, WORLD), (1, bad_world(3, 1))):
        got, expected = followed(strategy, seed, config)
        assert np.array_equal(got, expected), f"seed {seed}"


def test_it_is_noticed_where_the_copy_is_of_what_was_read_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the shard takes the newest copy, whatever the gradient was computed on."""
    place_of = SenderStates.spans

    def newest(self: SenderStates, one: PushHeader, chunk: int) -> Any:
        return place_of(self, replace(one, base_version=max(self._places[one.sender, chunk])), chunk)

    monkeypatch.setattr(SenderStates, "spans", newest)
    got, expected = followed(Followed(adaptive=False, strength=0.5, overlap=True), 0, WORLD)
    assert not np.array_equal(got, expected)


@dataclass(frozen=True)
class Forced(DCASGD):
    """λ = 0, with the arithmetic all the same."""

    def correction(self) -> Correction | None:
        return Compensation(0.0)


@pytest.mark.parametrize("seed", range(3))
def test_without_strength_it_is_asynchronous_sgd_bit_for_bit(seed: int) -> None:
    expected = end(gs.strategies.AsySG(), seed)
    assert np.array_equal(end(DCASGD(strength=0.0), seed), expected)
    assert not np.array_equal(end(DCASGD(adaptive=False, strength=0.5), seed), expected)
    expected = end(
        gs.strategies.AsySG(), seed, config=EXACT
    )  # where the copies that are kept change no order of events
    assert np.array_equal(end(Forced(), seed, config=EXACT), expected)
    assert not np.array_equal(end(DCASGD(adaptive=False, strength=0.5), seed, config=EXACT), expected)


@pytest.mark.parametrize("adaptive", [False, True])
def test_one_worker_is_sgd_bit_for_bit(adaptive: bool) -> None:
    expected = end(gs.strategies.AsySG(), workers=1)
    assert np.array_equal(end(DCASGD(adaptive, strength=0.5), workers=1), expected)
    assert not np.array_equal(end(DCASGD(adaptive, strength=0.5, overlap=True), workers=1), expected)


@pytest.mark.usefixtures("few_seeds")
def test_it_obeys_the_laws() -> None:
    assert not check_strategy(DCASGD()).broken


def test_a_shape_only_run_computes_nothing_and_keeps_nothing() -> None:
    config = SimulationConfig(costs=COSTS, shape_only=True)
    run = simulate(
        Sized([1000, 2000]), numbered(64), strategy=DCASGD(overlap=True), workers=4, servers=2,
        batch_size=2, epochs=3, config=config, chunk_elems=512,
    )  # fmt: skip
    assert run.summary["samples_accounted"] == 3 * 64


@pytest.mark.parametrize(
    "options", [{"strength": -1.0}, {"decay": 1.0}, {"eps": 0.0}, {"strength": float("nan")}]
)
def test_settings_that_mean_nothing_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(gs.errors.ConfigError, match=next(iter(options))):
        DCASGD(**options)
