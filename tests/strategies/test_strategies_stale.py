"""Gradients that others have overtaken: the largest stable rate, their staleness, their weight."""

from __future__ import annotations

import functools
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

import gradstream as gs
from gradstream._simulate import simulate
from gradstream.memory import Memory
from gradstream.run.result import Run
from gradstream.runtime.simulation import Cost, Exponential, Link, Network, SimulationConfig
from gradstream.server.aggregation import AggregationRule, PushHeader
from gradstream.server.shard.state import Apply, Parked, ShardState
from gradstream.server.shard.store import ShardStore
from gradstream.strategies import Strategy, softsync
from gradstream.strategies.softsync import WeightedMean
from gradstream.testing import check_strategy
from gradstream.testing.properties import complete, documented, plain, travels
from gradstream.testing.runs import Sized, least_squares, numbered
from gradstream.wire.chunks import ChunkMap

INSTANT = Network(bandwidth_bytes_s=math.inf, link=Link(latency_s=0.0), header_bytes=0)


@dataclass(frozen=True)
class Staggered:
    """Workers begin at different instants, and all gradients take the same time: they come by turns."""

    def draw(self, rng: random.Random, count: int) -> float:
        return 1.0 + rng.random() if count == 0 else 1.0


@dataclass(frozen=True)
class Jitter(Staggered):
    """The same, but they take up to 5 % more or less."""

    def draw(self, rng: random.Random, count: int) -> float:
        return super().draw(rng, count) * rng.uniform(0.95, 1.05)


BY_TURNS = SimulationConfig(costs={"gradient": Cost(base_s=1.0, jitter=Staggered())}, network=INSTANT)


# ---- the limit of stability -------------------------------------------------------------------------


def limit(staleness: int) -> float:
    """f = a·w²/2, each gradient τ updates old: stable if and only if η·a is below this."""
    return 2 * math.sin(math.pi / (2 * (2 * staleness + 1)))


def trajectory(strategy: Strategy, curvatures: Sequence[float], staleness: int) -> np.ndarray[Any, Any]:
    """|w| wherever a gradient was computed, (updates, curvatures), of Σ a·w²/2 by SGD with rate 1.

    τ + 1 workers that come by turns: whoever pushes has been overtaken by each of the others once.
    """
    seen: list[np.ndarray[Any, Any]] = []
    a, workers = np.array(curvatures), staleness + 1

    def gradients(parameters: Any, inputs: Any, targets: Any) -> tuple[float, Any]:
        seen.append(np.abs(parameters["w"]))
        return 0.0, {"w": a * parameters["w"]}

    model = gs.from_functions(
        init=lambda seed: {"w": np.ones(len(a))},
        outputs=lambda parameters, inputs: inputs,
        gradients=gradients,
        dtype="float64",
    )
    run = simulate(
        model,
        gs.from_arrays(np.zeros((workers, 1)), np.zeros(workers)),
        strategy=strategy,
        optimizer=gs.optim.SGD(lr=1.0),
        workers=workers,
        batch_size=1,
        steps=max(15, 120 // workers),
        config=BY_TURNS,
        seed=1,
    )
    counts = dict(run.summary["staleness"])
    expected = dict.fromkeys(range(staleness), 1) | {staleness: len(seen) - staleness}
    assert counts == expected, "τ is not the same from the first round on"
    return np.array(seen)


def growth(seen: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """By how much the last third is larger than the one before."""
    third = len(seen) // 3
    grown: np.ndarray[Any, Any] = seen[-third:].max(axis=0) / seen[-2 * third : -third].max(axis=0)
    return grown


def root(staleness: int, share: float) -> float:
    """|r|, the factor from one update to the next: r^{τ+1} - r^τ + η·a = 0."""
    polynomial = np.zeros(staleness + 2)
    polynomial[0] = 1.0
    polynomial[1] -= 1.0
    polynomial[-1] += share * limit(staleness)
    return float(np.abs(np.roots(polynomial)).max())


@pytest.mark.parametrize("staleness", [0, 1, 8])
def test_a_fixed_rate_is_stable_below_the_limit_and_not_above(staleness: int) -> None:
    fixed = gs.strategies.StalenessAware(power=0.0)
    seen = trajectory(fixed, [0.95 * limit(staleness), 1.05 * limit(staleness)], staleness)
    below, above = growth(seen)
    assert below < 1 < above
    updates = len(seen) // 3
    assert above == pytest.approx(root(staleness, 1.05) ** updates, rel=0.25)
    if staleness:  # else there is nothing to see of it any more
        assert below == pytest.approx(root(staleness, 0.95) ** updates, rel=0.25)


@pytest.mark.parametrize("staleness", [2, 8])
def test_the_rate_over_tau_is_stable_above_the_limit(staleness: int) -> None:
    (grown,) = growth(trajectory(gs.strategies.StalenessAware(), [1.05 * limit(staleness)], staleness))
    assert grown < 0.5


def test_without_the_penalty_it_would_not_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: the penalty is off."""
    monkeypatch.setattr("gradstream.strategies.softsync.factor", lambda weight, power, staleness: 1.0)
    (grown,) = growth(trajectory(gs.strategies.StalenessAware(), [1.05 * limit(8)], 8))
    assert grown > 1


# ---- how stale gradients are --------------------------------------------------------------------------


def steady_staleness(splits: int, *, workers: int = 30, rounds: int = 14) -> Counter[int]:
    """Of n-softsync with workers of equal speed, without the first rounds and the last."""
    config = SimulationConfig(
        costs={"gradient": Cost(base_s=1.0, jitter=Jitter())}, network=INSTANT, shape_only=True
    )
    run = simulate(
        Sized([64]),
        numbered(workers),
        strategy=gs.Softsync(splits=splits),
        optimizer=gs.optim.SGD(lr=1.0),
        workers=workers,
        batch_size=1,
        steps=rounds,
        config=config,
    )
    return staleness_between(run, 3.0, rounds - 2.0)


def staleness_between(run: Run, start_s: float, stop_s: float) -> Counter[int]:
    counts: Counter[int] = Counter()
    for event in run.events:
        if event["event"] == "exchange" and start_s < event["time_s"] < stop_s:
            counts.update({int(tau): count for tau, count in event["staleness"].items()})
    return counts


@pytest.mark.parametrize("splits", [1, 15])
def test_mean_staleness_of_softsync(splits: int) -> None:
    """λ = 30: n·(1 - 1/λ), and never above 2n."""
    counts = steady_staleness(splits)
    mean = sum(tau * count for tau, count in counts.items()) / counts.total()
    assert counts.total() > 200
    assert mean == pytest.approx(splits * (1 - 1 / 30), rel=1e-3)
    assert max(counts) <= 2 * splits
    if splits == 1:
        assert set(counts) == {0, 1, 2}


# ---- weights ------------------------------------------------------------------------------------------


def contribution(base_version: int, sequence: int = 1) -> PushHeader:
    return PushHeader("worker-0", 0, 1, sequence, samples=1, lr=0.5, base_version=base_version)


@pytest.mark.parametrize(("base_version", "weight"), [(100, 1.0), (99, 1.0), (98, 0.5), (90, 0.1), (0, 0.01)])
def test_a_gradient_of_version_j_at_version_100(base_version: int, weight: float) -> None:
    rule: AggregationRule = WeightedMean(1, "power", 1.0)
    state = ShardState([0], rule)
    state.chunks[0].version = 100
    (due,) = state.push(0, Parked(contribution(base_version), "push"))
    assert isinstance(due, Apply)
    weights = rule.weights(due.step - 1, [held.header for held in due.update])
    store = ShardStore(Memory(), ChunkMap(64, 64, 1), 0, torch.float64, gs.optim.SGD(lr=1.0))
    store.update(0, [torch.ones(64, dtype=torch.float64)], weights, lr=due.lr, step=due.step)
    assert store.parameters.tensor.tolist() == pytest.approx([-0.5 * weight] * 64, rel=1e-15)


def test_momentum_is_not_scaled_but_the_gradient_is() -> None:
    """v ← μ·v + g/τ, w ← w - α·v: earlier gradients in the velocity are not scaled again."""
    store = ShardStore(Memory(), ChunkMap(64, 64, 1), 0, torch.float64, gs.optim.SGD(lr=1.0, momentum=0.5))
    rule = WeightedMean(1, "power", 1.0)
    one = torch.ones(64, dtype=torch.float64)
    for step, base_version in ((1, 0), (2, 1), (11, 0)):
        store.update(0, [one], rule.weights(step - 1, [contribution(base_version)]), lr=1.0, step=step)
    velocities = [1.0, 0.5 * 1.0 + 1.0, 0.5 * 1.5 + 0.1]
    assert store.parameters.tensor.tolist() == pytest.approx([-sum(velocities)] * 64)


def test_softsync_takes_the_mean_of_c() -> None:
    rule: Any = gs.Softsync(splits=4, power=1.0).rule(30, "mean")
    assert rule == WeightedMean(7, "power", 1.0)  # ⌊30/4⌋
    assert rule.weights(10, [contribution(5)]) == [pytest.approx(1 / 7 / 5)]
    assert gs.Softsync(splits=30, power=0.0).rule(30, "mean").weights(10, [contribution(5)]) == [1.0]
    assert gs.Softsync(splits=31).rule(30, "mean") == WeightedMean(1, "power", 1.0)


def test_asysg_takes_the_sum_of_m() -> None:
    rule: Any = gs.strategies.AsySG(gradients=3).rule(8, "mean")
    assert rule.weights(10, [contribution(0)]) == (1.0,)
    assert [rule.completes(0, summed, [contribution(0)]) for summed in range(3)] == [False, False, True]


def halves(staleness: int) -> float:
    return 0.5**staleness


def nothing(staleness: int) -> float:
    return math.nan


def test_any_function_of_tau_weighs() -> None:
    assert WeightedMean(1, halves, 1.0).weights(13, [contribution(10)]) == [0.125]
    assert WeightedMean(1, "exponential", 2.0).weights(3, [contribution(0)]) == [math.exp(-6.0)]
    with pytest.raises(gs.errors.UserCodeError, match="the weight of staleness 3 is nan"):
        WeightedMean(1, nothing, 1.0).weights(3, [contribution(0)])
    with pytest.raises(gs.errors.UserCodeError, match="the weight of staleness 3 raised ZeroDivisionError"):
        softsync.factor(lambda tau: 1 / (tau - 3), 1.0, 3)


def test_a_function_travels_as_its_place() -> None:
    from gradstream.job.descriptions import describe
    from gradstream.job.registry import find_strategy

    described = describe(gs.strategies.StalenessAware(weight=halves))
    assert described["fields"]["weight"] == {"function": f"{__name__}:halves"}
    assert find_strategy("staleness-aware", described["fields"]) == gs.strategies.StalenessAware(
        weight=halves
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: gs.strategies.StalenessAware(max_delay=0), r"max_delay=0.*or None"),
        (lambda: gs.strategies.StalenessAware(power=-1.0), r"power=-1.0.*at least 0"),
        (lambda: gs.Softsync(power=math.nan), r"power=nan.*at least 0"),
        (lambda: gs.Softsync(splits=0), r"splits=0.*at least 1"),
        (lambda: gs.strategies.AsySG(gradients=0), r"gradients=0.*at least 1"),
        (lambda: gs.strategies.StalenessAware(weight="powre"), "did you mean 'power'"),  # type: ignore[arg-type]
    ],
)
def test_options_are_checked(make: Any, message: str) -> None:
    with pytest.raises(gs.errors.ConfigError, match=message):
        make()


# ---- learning ------------------------------------------------------------------------------------------


def loss_after(strategy: Strategy, lr: float, *, workers: int = 15) -> float:
    """Of noisy least squares with curvatures from 0.1 to 1, which begins at about 5."""
    rng = np.random.default_rng(0)
    a, noise = np.linspace(0.1, 1.0, 10), rng.standard_normal((450, 10)) / 4
    noise -= noise.mean(axis=0)
    model = gs.from_functions(
        init=lambda seed: {"w": np.full(10, 1.0)},
        outputs=lambda parameters, inputs: inputs,
        gradients=lambda parameters, inputs, targets: {"w": a * parameters["w"] + inputs.mean(axis=0)},
        dtype="float64",
    )
    config = SimulationConfig(costs={"gradient": Cost(base_s=1.0, jitter=Jitter())}, network=INSTANT)
    run = simulate(
        model, gs.from_arrays(noise, np.zeros(450)), strategy=strategy, optimizer=gs.optim.SGD(lr=lr),
        workers=workers, batch_size=2, epochs=1, config=config,
    )  # fmt: skip
    return float((a * run.parameters["w"] ** 2).sum() / 2)


def test_alpha_over_tau_converges_where_the_constant_rate_does_not() -> None:
    """The rate that synchronous SGD converges with, above the limit of τ ≈ 14."""
    lr = 3 * limit(14)
    assert loss_after(gs.Softsync(splits=1, power=0.0), lr) < 0.5
    assert loss_after(gs.Softsync(splits=15, power=0.0), lr) > 50
    for strategy in (gs.strategies.StalenessAware(), gs.Softsync(splits=5)):
        assert loss_after(strategy, lr) < 0.5


def paper_rate(updates: int) -> float:
    """γ = √((f(x_1) - f*) / (M·K·L·σ²)) with f(x_1) - f* = 20/2, M = L = 1 and σ² = 20."""
    return math.sqrt(10 / 20 / updates)


@functools.cache  # of K = 200, two tests look at one
def mean_square_gradient(updates: int, lr: float) -> float:
    """AsySG with τ = 3, on f(x) = E|x - ξ|²/2: |∇f|² = |x|², averaged over all reads."""
    rng = np.random.default_rng(7)
    noise = rng.standard_normal((updates, 20))
    noise -= noise.mean(axis=0)
    seen: list[float] = []

    def gradients(parameters: Any, inputs: Any, targets: Any) -> Any:
        seen.append(float(parameters["x"] @ parameters["x"]))
        return {"x": parameters["x"] - inputs[0]}

    model = gs.from_functions(
        init=lambda seed: {"x": np.ones(20)},
        outputs=lambda parameters, inputs: inputs,
        gradients=gradients,
        dtype="float64",
    )
    run = simulate(
        model, gs.from_arrays(noise, np.zeros(updates)), strategy="asysg",
        optimizer=gs.optim.SGD(lr=lr), workers=4, batch_size=1, epochs=1, config=BY_TURNS,
    )  # fmt: skip
    assert max(run.summary["staleness"]) == 3
    assert len(seen) == updates
    return float(np.mean(seen))


def slope_over(budgets: Sequence[int], rate: Callable[[int], float]) -> float:
    """Of the mean of |∇f|² over K, in log-log."""
    found = [mean_square_gradient(updates, rate(updates)) for updates in budgets]
    slope, _ = np.polyfit(np.log(budgets), np.log(found), 1)
    return float(slope)


def test_asysg_falls_with_the_root_of_k() -> None:
    assert slope_over([40, 200, 480], paper_rate) == pytest.approx(-0.5, abs=0.1)


def test_at_a_rate_that_does_not_fall_it_would_not() -> None:
    """The planted fault: the rate of K = 200 for every K."""
    assert slope_over([40, 200, 480], lambda updates: paper_rate(200)) != pytest.approx(-0.5, abs=0.1)


@pytest.mark.usefixtures("few_seeds")
def test_they_obey_the_laws() -> None:
    """All properties of one strategy; of the two that are derived from it, the quick ones."""
    check_strategy(gs.Softsync(splits=2))
    for strategy in (gs.strategies.StalenessAware(), gs.strategies.AsySG(gradients=4)):
        for law in (documented, travels, plain, complete):
            law(strategy)


@pytest.mark.parametrize("max_delay", [1, 3, 8])
def test_gradients_that_are_too_late_change_nothing(max_delay: int) -> None:
    """Ringmaster, with a worker at a tenth of the speed of the others."""
    model, data = least_squares(160, 20, whole=False, reduction="mean")
    config = SimulationConfig(
        costs={"gradient": Cost(base_s=0.01, jitter=Exponential())}, speeds={"worker-3": 0.1}
    )
    options: dict[str, Any] = {"optimizer": gs.optim.SGD(lr=2**-5), "workers": 4, "batch_size": 4, "seed": 3}
    strategy = gs.strategies.StalenessAware(power=0.0, max_delay=max_delay)
    run = simulate(model, data, strategy=strategy, epochs=2, config=config, **options)
    assert run.summary["staleness_max"] == max_delay - 1
    assert run.summary["dropped"] > 0
    assert run.summary["updates"] + run.summary["dropped"] == run.summary["pushes"] == 81
    assert run.summary["samples_accounted"] == 320
    plain = simulate(
        model, data, strategy=gs.strategies.StalenessAware(power=0.0), epochs=2, config=config, **options
    )
    assert plain.summary["staleness_max"] > 8
    assert plain.summary["dropped"] == 0
