"""Local SGD in a group: rounds of local steps, beside NumPy's arithmetic, and what becomes of them at deaths."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest
import torch

import gradstream as gs
from gradstream._simulate import simulate
from gradstream.data.arrays import ArrayDataset
from gradstream.data.base import BatchRef
from gradstream.data.plan import RoundPlan
from gradstream.errors import ConfigError
from gradstream.runtime.simulation import Cost, Network, SimulationConfig
from gradstream.runtime.storage import MemoryStorage
from gradstream.testing import check_strategy
from gradstream.testing.runs import (
    NUM_SAMPLES,
    QUICK,
    UNSTEADY,
    Tokens,
    check_exactly_once,
    kill_at,
    least_squares,
    numbered,
    token_counts,
)
from gradstream.worker.local_steps import LocalSteps
from whole_runs import same

Array = np.ndarray[Any, Any]
LR, MOMENTUM = 2.0**-5, 0.5


@pytest.mark.usefixtures("few_seeds")
def test_it_obeys_the_laws() -> None:
    assert not check_strategy(gs.LocalSGD(every=3)).broken
    assert not check_strategy(gs.LocalSGD(every=3, delay=2)).broken


# ---- beside NumPy -----------------------------------------------------------------------------------


def reference(
    data: ArrayDataset,
    workers: int,
    every: int,
    rounds: int,
    *,
    nu: float = 1.0,
    mu: float = 0.0,
    nesterov: bool = True,
    delay: int = 0,
) -> Array:
    """Rounds of `every` steps of SGD with momentum on each worker, with an outer step after each."""
    plan = RoundPlan(data.num_samples, 4, workers, seed=3)
    features = np.asarray(data.batch(np.arange(1)).inputs).shape[1]
    w, v, velocities = np.zeros(features), np.zeros(features), np.zeros((workers, features))
    unsent = np.zeros((workers, features))
    for first in range(0, rounds * every, every):
        ways = []
        later = delay if first < (rounds - 1) * every else 0
        for rank in range(workers):
            own = sent = w - unsent[rank]
            for at in range(first, first + every):
                if at == first + every - later:
                    sent = own
                batch = data.batch(plan.ids(BatchRef(0, rank, at)))
                x, y = np.asarray(batch.inputs), np.asarray(batch.targets)
                velocities[rank] = MOMENTUM * velocities[rank] + (x @ own - y) @ x / len(x)
                own = own - LR * velocities[rank]
            if not later:
                sent = own
            ways.append(w - sent)
            unsent[rank] = sent - own
        way = np.mean(ways, axis=0)
        v = mu * v + way
        w = w - nu * (way + mu * v if nesterov else v)
    return w


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("outer", [{}, {"nu": 0.7, "mu": 0.9}, {"nu": 0.8, "mu": 0.5, "nesterov": False}])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_it_is_the_papers(
    workers: int, every: int, outer: dict[str, Any], reduction: Literal["mean", "sum"]
) -> None:
    model, data = least_squares(192, 20, whole=False, reduction=reduction)
    rounds = 192 // (4 * workers * every)
    strategy = gs.LocalSGD(
        every=every, outer_lr=outer.get("nu", 1.0), outer_momentum=outer.get("mu", 0.0),
        nesterov=outer.get("nesterov", True),
    )  # fmt: skip
    run = gs.simulate(
        model, data, strategy=strategy, workers=workers, batch_size=4, epochs=1, seed=3, chunk_elems=64,
        optimizer=gs.optim.SGD(LR, momentum=MOMENTUM),
    )  # fmt: skip
    assert np.allclose(
        run.parameters["w"], reference(data, workers, every, rounds, **outer), rtol=1e-12, atol=1e-12
    )
    assert run.summary["servers"] == 0


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("delay", [1, 2, 4])
@pytest.mark.parametrize("outer", [{}, {"nu": 0.7, "mu": 0.9}])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_with_a_delay_the_last_steps_of_a_round_are_in_the_next_sum(
    workers: int, delay: int, outer: dict[str, Any], reduction: Literal["mean", "sum"]
) -> None:
    model, data = least_squares(192, 20, whole=False, reduction=reduction)
    rounds = 192 // (4 * workers * 4)
    strategy = gs.LocalSGD(
        every=4, delay=delay, outer_lr=outer.get("nu", 1.0), outer_momentum=outer.get("mu", 0.0)
    )
    run = gs.simulate(
        model, data, strategy=strategy, workers=workers, batch_size=4, epochs=1, seed=3, chunk_elems=64,
        optimizer=gs.optim.SGD(LR, momentum=MOMENTUM),
    )  # fmt: skip
    expected = reference(data, workers, 4, rounds, delay=delay, **outer)
    assert np.allclose(run.parameters["w"], expected, rtol=1e-12, atol=1e-12)
    assert workers == 1 or not np.allclose(expected, reference(data, workers, 4, rounds, **outer), rtol=1e-6)


def test_with_a_delay_exchanges_take_no_time_while_workers_compute() -> None:
    """A round of 4 minibatches takes as long as computing them, where an exchange takes as long as 3 of them."""
    model, data = least_squares(640, 4096, whole=False, reduction="mean")
    config = SimulationConfig(
        costs={"gradient": Cost(per_sample_s=0.01)}, network=Network(bandwidth_bytes_s=4096 * 8 / 0.12)
    )

    def seconds(delay: int) -> float:
        run = gs.simulate(
            model, data, strategy=gs.LocalSGD(every=4, delay=delay), workers=2, batch_size=4, epochs=1,
            config=config, optimizer=gs.optim.SGD(1e-4),
        )  # fmt: skip
        return float(run.summary["train_s"])

    waiting, hidden = seconds(0), seconds(3)
    computing = 640 / 2 * 0.01
    assert waiting > 1.2 * computing
    assert hidden < 0.3 * (waiting - computing) + computing


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": gs.LocalSGD(every=4)},
        {"strategy": gs.LocalSGD(every=4, delay=3)},
        {"strategy": "allreduce", "accumulate": 4},
        {"strategy": "allreduce"},
    ],
    ids=str,
)
def test_a_simulated_minibatch_takes_the_same_time_however_many_there_are_of_a_step(
    options: dict[str, Any],
) -> None:
    """16 minibatches of each of 2 workers, a second each; an exchange takes no time."""
    model, data = least_squares(128, 4, whole=False, reduction="mean")
    config = SimulationConfig(costs={"gradient": Cost(base_s=1.0)})
    run = gs.simulate(model, data, workers=2, batch_size=4, epochs=1, config=config, **options)
    assert run.summary["train_s"] == pytest.approx(16, rel=0.01)


def test_one_minibatch_a_round_is_an_allreduce_to_the_bit() -> None:
    """On whole numbers, of which two steps are exact."""
    model, data = least_squares(48, 70, grid=2**-8)
    options: dict[str, Any] = {"workers": 2, "batch_size": 4, "steps": 2}
    rule = gs.optim.SGD(lr=2.0**-7)
    assert same(
        gs.simulate(model, data, strategy=gs.LocalSGD(every=1), optimizer=rule, **options),
        gs.simulate(model, data, strategy="allreduce", optimizer=rule, **options),
    )


class Quadratics:
    """Worker r has ½(w - b_r)ᵀA_r(w - b_r): inputs name the worker, and each minibatch is the whole of its data."""

    reduction = "mean"

    def __init__(self, hessians: list[Array], centres: list[Array]) -> None:
        self.hessians, self.centres = hessians, centres

    def gradients(self, p: dict[str, Array], x: Array, y: Array) -> dict[str, Array]:
        rank = int(x[0, 0])
        assert (x == rank).all()
        return {"w": self.hessians[rank] @ (p["w"] - self.centres[rank])}

    def after(self, every: int, lr: float, rounds: int) -> Array:
        """w after rounds of local gradient descent by two workers."""
        model = gs.from_functions(
            init=lambda seed: {"w": np.zeros(3)},
            outputs=lambda p, x: x @ p["w"][:1],
            gradients=self.gradients,
            dtype="float64",
        )
        data = gs.from_arrays(np.repeat([[0.0], [1.0]], 4 * every, axis=0), np.zeros(8 * every))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                RoundPlan, "ids", lambda plan, ref: np.arange(4, dtype=np.int64) + 4 * every * ref.partition
            )
            run = gs.simulate(
                model, data, strategy=gs.LocalSGD(every=every), workers=2, batch_size=4, epochs=rounds,
                optimizer=gs.optim.SGD(lr),
            )  # fmt: skip
        return np.asarray(run.parameters["w"])

    @property
    def best(self) -> Array:
        """The minimum of the mean."""
        terms = [a @ b for a, b in zip(self.hessians, self.centres, strict=True)]
        return np.asarray(np.linalg.solve(sum(self.hessians), sum(terms)))


def hessian(seed: int) -> Array:
    basis = np.linalg.qr(np.random.default_rng(seed).standard_normal((3, 3)))[0]
    return np.asarray(basis @ np.diag([1.0, 1.5, 2.0]) @ basis.T)


CENTRES = [np.array([1.0, 2.0, 3.0]), np.array([-2.0, 0.5, 1.0])]


@pytest.mark.parametrize("every", [2, 7])
def test_with_equal_hessians_local_steps_are_steps_of_the_mean(every: int) -> None:
    alike = Quadratics([hessian(0)] * 2, CENTRES)
    w, mean = np.zeros(3), np.mean(CENTRES, axis=0)
    for _ in range(3 * every):
        w = w - 0.1 * hessian(0) @ (w - mean)
    assert np.allclose(alike.after(every, 0.1, 3), w, atol=1e-14)


def test_with_other_hessians_the_bias_is_proportional_to_the_rate_and_to_the_steps_between() -> None:
    apart = Quadratics([hessian(0), hessian(5)], CENTRES)

    def bias(every: int, lr: float, seconds: float = 10) -> float:
        return float(np.linalg.norm(apart.after(every, lr, round(seconds / lr / every)) - apart.best))

    assert bias(1, 0.04, 16) < 1e-6
    third = bias(3, 0.01)
    assert bias(3, 0.02) / third == pytest.approx(2, rel=0.1)
    assert bias(5, 0.01) / third == pytest.approx(2, rel=0.1)  # (5 - 1) / (3 - 1)


def test_bytes_are_those_of_one_allreduce_a_round() -> None:
    model, data = least_squares(64, 70, whole=False, reduction="mean", dtype="float32")
    options: dict[str, Any] = {"workers": 2, "batch_size": 4, "epochs": 2, "optimizer": gs.optim.SGD(0.01)}
    each = gs.simulate(model, data, strategy="allreduce", **options)
    fourth = gs.simulate(model, data, strategy=gs.LocalSGD(every=4), **options)
    assert each.summary["pushed_bytes"] == 4 * fourth.summary["pushed_bytes"] == 2 * 16 * 4 * 70


def test_a_codec_makes_them_fewer_and_it_learns() -> None:
    model, data = least_squares(128, 2400, whole=False, reduction="mean", dtype="float32")
    options: dict[str, Any] = {
        "strategy": gs.LocalSGD(every=4, outer_lr=0.7, outer_momentum=0.5), "workers": 4, "batch_size": 4,
        "epochs": 12, "optimizer": gs.optim.SGD(0.001),
    }  # fmt: skip
    plain, coded = gs.simulate(model, data, **options), gs.simulate(model, data, **options, codec="float4")
    assert (
        coded.summary["pushed_bytes"] < plain.summary["pushed_bytes"] / 4
    )  # parts are whole blocks of 64 words
    losses = [np.mean([row["loss"] for row in run.history[-16:]]) for run in (plain, coded)]
    assert losses[0] < 0.5 * plain.history[0]["loss"] and losses[1] < 1.5 * losses[0]


# ---- deaths -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_every_sample_counts_once_whoever_dies(seed: int) -> None:
    """The way of a worker is the count of its samples: its steps are of rate 1, on sums."""
    model = Tokens(num_chunks=3)
    model.reduction = "sum"
    run = gs.simulate(
        model, numbered(NUM_SAMPLES), strategy=gs.LocalSGD(every=2, outer_lr=12.0), optimizer=gs.optim.SGD(lr=1 / 2),
        workers=3, batch_size=2, epochs=4, chunk_elems=64, deadlines=QUICK, config=UNSTEADY, seed=seed,
        script=kill_at(f"worker-{seed % 3}", 0.05 + 0.06 * seed),
    )  # fmt: skip
    check_exactly_once(run, NUM_SAMPLES, 4)


@pytest.mark.parametrize("seed", range(8))
def test_with_a_delay_a_death_takes_no_more_than_what_its_worker_had_not_sent(seed: int) -> None:
    """d minibatches: all others count once, those that are computed again too."""
    model = Tokens(num_chunks=3)
    model.reduction = "sum"
    run = gs.simulate(
        model, numbered(NUM_SAMPLES), strategy=gs.LocalSGD(every=2, delay=1, outer_lr=12.0),
        optimizer=gs.optim.SGD(lr=1 / 2), workers=3, batch_size=2, epochs=4, chunk_elems=64, deadlines=QUICK,
        config=UNSTEADY, seed=seed, script=kill_at(f"worker-{seed % 3}", 0.05 + 0.06 * seed),
    )  # fmt: skip
    counts = token_counts(run, NUM_SAMPLES)
    assert (counts == counts[0]).all() and (counts <= 4).all()
    assert (4 - counts[0]).sum() <= 1 * 2
    assert run.summary["workers_lost"]
    assert run.summary["samples_accounted"] == 4 * NUM_SAMPLES


@pytest.mark.parametrize("seed", range(4))
def test_encoded_sums_in_two_steps_go_on_without_a_dead_worker(seed: int) -> None:
    """All workers of the next group compare what they have, and raise where it differs."""
    model, data = least_squares(128, 600, whole=False, reduction="mean", dtype="float32")
    run = gs.simulate(
        model, data, strategy=gs.LocalSGD(every=2, delay=1), codec="one-bit", optimizer=gs.optim.SGD(0.001), workers=4,
        batch_size=4, epochs=24, deadlines=QUICK, config=UNSTEADY, seed=seed,
        script=kill_at(f"worker-{seed}", 0.05 + 0.06 * seed),
    )  # fmt: skip
    assert run.summary["workers_lost"] and run.summary["samples_accounted"] == 24 * 128
    assert np.isfinite(run.parameters["w"]).all()
    assert np.mean([row["loss"] for row in run.history[-16:]]) < 0.5 * np.mean(
        [row["loss"] for row in run.history[:8]]
    )


@pytest.mark.parametrize("delay", [0, 2])
def test_a_round_that_is_computed_again_has_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, delay: int
) -> None:
    """Though Adam's moments went on meanwhile."""
    model, data = least_squares(48, 20, whole=False, reduction="mean")
    options: dict[str, Any] = {
        "strategy": gs.LocalSGD(every=3, delay=delay), "workers": 2, "batch_size": 4, "epochs": 2,
        "optimizer": gs.optim.Adam(0.01),
    }  # fmt: skip
    once, real = gs.simulate(model, data, **options), LocalSteps.compute

    def twice(self: LocalSteps, *arguments: Any) -> Any:
        parameters, gradient, _ = arguments
        result = real(self, parameters, gradient, lambda elems: None)
        if gradient.later:
            self.go_on(gradient, result)
        return real(self, *arguments)

    monkeypatch.setattr(LocalSteps, "compute", twice)
    assert same(once, gs.simulate(model, data, **options))
    monkeypatch.setattr(LocalSteps, "_begin", lambda self, step: None)
    assert not same(once, gs.simulate(model, data, **options))  # the check can fail


@pytest.mark.parametrize("options", [{}, {"delay": 1}, {"delay": 2}])
def test_a_stopped_run_goes_on_with_the_same_bits(options: dict[str, Any]) -> None:
    model, data = least_squares(96, 20, whole=False, reduction="mean")
    options = {
        "strategy": gs.LocalSGD(every=2, outer_lr=0.7, outer_momentum=0.9, **options), "workers": 2, "batch_size": 4,
        "epochs": 3, "optimizer": gs.optim.SGD(0.01),
    }  # fmt: skip
    whole, stops = gs.simulate(model, data, **options), 0
    for when_s in (0.02, 0.05):
        storage = MemoryStorage()

        async def script(cluster: Any, when_s: float = when_s) -> None:
            await cluster.virtual.runtime("director").sleep(when_s)
            cluster.stop()

        try:
            run = gs.simulate(model, data, **options, storage=storage, script=script)
        except gs.errors.Interrupted:
            stops += 1
            run = gs.simulate(model, data, **options, storage=storage, resume=True)
        assert same(whole, run)
    assert stops


def test_post_local_sgd_is_two_phases() -> None:
    model, data = least_squares(96, 8, reduction="mean")
    phases = [gs.Phase(epochs=6, strategy="allreduce"), gs.Phase(epochs=6, strategy=gs.LocalSGD(every=4))]
    run = gs.simulate(model, data, workers=2, batch_size=4, optimizer=gs.optim.SGD(lr=0.05), phases=phases)
    batch = data.batch(np.arange(96))
    best = np.linalg.lstsq(np.asarray(batch.inputs), np.asarray(batch.targets), rcond=None)[0]
    assert abs(run.parameters["w"] - best).max() < 0.15


@pytest.mark.parametrize("place", range(0, 48, 7))
def test_with_a_delay_a_gradient_that_is_not_finite_leaves_a_round_out(place: int) -> None:
    """Its own, or the next one if it is among the last minibatches of a round."""
    model, data = least_squares(96, 20, whole=False, reduction="mean")
    batch = data.batch(np.arange(96))
    spoilt = np.array(batch.inputs)
    spoilt[place] = np.inf
    run = gs.simulate(
        model, (spoilt, np.asarray(batch.targets)), strategy=gs.LocalSGD(every=3, delay=2), workers=2, batch_size=4,
        epochs=3, optimizer=gs.optim.SGD(0.01),
    )  # fmt: skip
    assert np.isfinite(run.parameters["w"]).all()
    assert run.summary["samples_dropped"] == 3 * 2 * 12


def test_a_gradient_that_is_not_finite_leaves_the_round_out() -> None:
    model, data = least_squares(48, 20, whole=False, reduction="mean")
    batch = data.batch(np.arange(48))
    spoilt = np.array(batch.inputs)
    spoilt[5] = np.inf
    run = gs.simulate(
        model, (spoilt, np.asarray(batch.targets)), strategy=gs.LocalSGD(every=3), workers=2, batch_size=4, epochs=2,
        optimizer=gs.optim.SGD(0.01),
    )  # fmt: skip
    assert run.summary["samples_dropped"] == 2 * 2 * 12 and np.isfinite(run.parameters["w"]).all()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"accumulate": 2}, "accumulate=2 with strategy=LocalSGD: workers train alone"),
        ({"split": 2}, "split=2: parts of a model"),
        ({"servers": 1}, "exchange in a group, without servers"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], says: str) -> None:
    model, data = least_squares(48, 20, reduction="mean")
    with pytest.raises(ConfigError, match=says):
        gs.simulate(model, data, strategy=gs.LocalSGD(every=3), workers=2, batch_size=4, epochs=1, **options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"every": 0}, "at least 1"),
        ({"outer_lr": gs.schedules.Cosine(1.0)}, "expected a number"),
        ({"outer_momentum": 1.5}, "outer_momentum=1.5"),
        ({"delay": -1}, "at least 0"),
        ({"every": 3, "delay": 4}, "a delay of at most 3 minibatches"),
    ],
)
def test_options_out_of_their_range_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        gs.LocalSGD(**options)


def test_with_muon_inside_it_is_muloco() -> None:
    """One worker is Muon alone, which needs whole matrices; two are the mean of their ways, by the outer rule."""
    rng = np.random.default_rng(0)
    inputs, targets = rng.standard_normal((64, 6)), rng.standard_normal((64, 3))

    def trained(strategy: gs.Strategy, workers: int) -> np.ndarray[Any, Any]:
        model = gs.from_torch(
            lambda: torch.nn.Linear(6, 3, bias=False).double(), torch.nn.functional.mse_loss
        )
        run = simulate(
            model, gs.from_arrays(inputs, targets), strategy=strategy, optimizer=gs.optim.Muon(lr=0.02),
            workers=workers, batch_size=8, epochs=1, seed=3,
        )  # fmt: skip
        found: np.ndarray[Any, Any] = run.parameters["weight"]
        return found

    alone = trained(gs.AllReduce(), 1)
    assert np.abs(trained(gs.LocalSGD(every=4), 1) - alone).max() < 1e-14
    outer = trained(gs.LocalSGD(every=4, outer_lr=0.7, outer_momentum=0.6), 2)
    assert np.abs(outer - trained(gs.LocalSGD(every=4), 2)).max() > 1e-3
