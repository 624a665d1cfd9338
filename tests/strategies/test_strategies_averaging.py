"""Parameter averaging: the mean of where workers have got to, on their own or time and again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gradstream as gs
from gradstream._simulate import simulate
from gradstream.data.base import BatchRef
from gradstream.data.plan import PartitionPlan
from gradstream.errors import ConfigError, UserCodeError
from gradstream.job.descriptions import describe
from gradstream.job.files import load_job
from gradstream.job.registry import find_strategy
from gradstream.run.result import Run
from gradstream.run.simulated import SimulatedCluster
from gradstream.runtime.simulation import Cost, Exponential, Link, Network, SimulationConfig
from gradstream.runtime.storage import MemoryStorage
from gradstream.server.aggregation import PushHeader
from gradstream.strategies.averaging import Averaged
from gradstream.testing import check_strategy
from gradstream.testing.runs import Sized, kill_at, least_squares, numbered
from gradstream.worker.server.exchange import ServerExchange

LR = 2.0**-7
FEATURES = 200  # 4 chunks of 64 elements
UNEVEN = SimulationConfig(
    costs={"gradient": Cost(base_s=0.01, jitter=Exponential())},
    network=Network(link=Link(latency_s=1e-3, jitter_s=1e-3)),
)
JOB = Path(__file__).resolve().parents[2] / "examples" / "linear_regression.py"


@pytest.mark.usefixtures("few_seeds")
def test_it_obeys_the_laws() -> None:
    assert not check_strategy(gs.ParameterAveraging(every=2)).broken


# ---- one worker ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("momentum", "state"), [(0.0, "own"), (0.9, "own"), (0.9, "averaged")])
@pytest.mark.parametrize("every", [1, 3, None])
def test_one_worker_is_plain_sgd_whatever_the_period(every: int | None, momentum: float, state: Any) -> None:
    model, data = least_squares(64, FEATURES, whole=False, reduction="mean")
    rule = gs.optim.SGD(lr=LR, momentum=momentum)
    plan = PartitionPlan(64, 4, 1, seed=3)
    w, gradient = (torch.zeros(FEATURES, dtype=torch.float64) for _ in range(2))
    velocity = {"momentum_buffer": torch.zeros_like(w)}
    for step in range(11):
        ids = plan.ids(BatchRef(0, 0, step))
        model.gradient(w, data.batch(ids), gradient, seed=0, report=lambda _: None)
        rule.apply(w, gradient, velocity, lr=LR, step=step + 1)
    run = simulate(
        model, data, strategy=gs.ParameterAveraging(every=every, state=state), optimizer=rule, workers=1,
        servers=2, batch_size=4, steps=11, seed=3, chunk_elems=64, config=UNEVEN,
    )  # fmt: skip
    assert np.array_equal(run.parameters["w"], w.numpy())


# ---- several ------------------------------------------------------------------------------------


def quadratic(curvatures: Sequence[float]) -> Run:
    """Four workers, 12 rounds of full gradients, an average every 3: each sample s pulls to another place.

    Its gradient is A·w - b_s, with A of `curvatures`, by worker: all alike, or one for each.
    """
    places = np.random.default_rng(0).standard_normal((32, 5))

    def gradients(parameters: Any, inputs: Any, targets: Any) -> Any:
        curvature = curvatures[int(inputs[0]) * len(curvatures) // 32]
        return {"w": curvature * np.arange(1, 6) * parameters["w"] - places[inputs].mean(0)}

    model = gs.from_functions(
        init=lambda seed: {"w": np.ones(5)}, outputs=lambda p, x: x, gradients=gradients, dtype="float64"
    )
    return simulate(
        model, numbered(32), strategy=gs.ParameterAveraging(every=3), optimizer=gs.optim.SGD(lr=0.1), workers=4,
        batch_size=8, epochs=12, config=UNEVEN,
    )  # fmt: skip


def descended() -> np.ndarray[Any, Any]:
    """12 steps by one node, of the gradient over all samples."""
    mean = np.random.default_rng(0).standard_normal((32, 5)).mean(0)
    w = np.ones(5)
    for _ in range(12):
        w -= 0.1 * (np.arange(1, 6) * w - mean)
    return w


def test_of_equal_hessians_it_is_gradient_descent_on_all_samples() -> None:
    assert np.abs(quadratic([1.0]).parameters["w"] - descended()).max() < 1e-14


def test_of_other_hessians_or_weights_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault is a mean that forgets one worker."""
    assert np.abs(quadratic([0.5, 1.5]).parameters["w"] - descended()).max() > 1e-3
    monkeypatch.setattr(Averaged, "_raw", lambda self, update: [1.0, 1.0, 1.0, 0.0])
    assert np.abs(quadratic([1.0]).parameters["w"] - descended()).max() > 1e-3


def test_the_average_of_a_convex_problem_beats_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """One-shot: no worker has seen enough to know more than the noise; the mean of all has."""
    alone: dict[int, np.ndarray[Any, Any]] = {}
    flush = ServerExchange.flush

    async def noted(self: ServerExchange) -> None:
        await flush(self)
        alone[self.replica.rank] = self.replica.parameters.tensor.numpy().copy()

    monkeypatch.setattr(ServerExchange, "flush", noted)
    rng = np.random.default_rng(1)
    x, truth = rng.standard_normal((480, 5)), rng.standard_normal(5)
    data = gs.from_arrays(x, x @ truth + rng.standard_normal(480))
    model, _ = least_squares(1, 5, reduction="mean")
    run = simulate(
        model, data, strategy=gs.ParameterAveraging(every=None), optimizer=gs.optim.SGD(lr=0.2), workers=6,
        batch_size=4, epochs=1, config=UNEVEN,
    )  # fmt: skip
    errors = [float(np.square(w - truth).sum()) for w in alone.values()]
    averaged = float(np.square(run.parameters["w"] - truth).sum())
    assert len(errors) == 6
    assert averaged < min(errors)
    assert averaged < np.mean(errors) / 3
    assert np.allclose(run.parameters["w"], np.mean(list(alone.values()), 0))
    assert run.summary["pushes"] == 6 + 1  # one of each worker, and the initial parameters


def test_the_same_seed_has_the_same_bits_on_any_network() -> None:
    """Workers wait for each other, and the sum is in the order of ranks."""
    model, data = least_squares(96, FEATURES, whole=False, reduction="mean")
    ends = {
        simulate(
            model, data, strategy=gs.ParameterAveraging(every=3), workers=3, servers=servers, batch_size=4,
            epochs=3, chunk_elems=64, config=config,
        ).parameters["w"].tobytes()
        for servers, config in ((1, SimulationConfig()), (2, UNEVEN), (3, UNEVEN))
    }  # fmt: skip
    assert len(ends) == 1


def test_averaged_state_is_the_mean_of_all() -> None:
    """Adam's moments, with one minibatch a period: all workers have the same state, the mean of two."""
    model, data = least_squares(64, FEATURES, whole=False, reduction="mean")
    plan, rule = PartitionPlan(64, 4, 2, seed=3), gs.optim.Adam(lr=0.01)
    w, gradient = (torch.zeros(FEATURES, dtype=torch.float64) for _ in range(2))
    state = {name: torch.zeros_like(w) for name in rule.state_names}
    for step in range(8):
        ends: list[list[torch.Tensor]] = []
        for rank in range(2):
            own, moments = w.clone(), {name: vector.clone() for name, vector in state.items()}
            model.gradient(
                own, data.batch(plan.ids(BatchRef(0, rank, step))), gradient, seed=0, report=lambda _: None
            )
            rule.apply(own, gradient, moments, lr=0.01, step=step + 1)
            ends.append([own, *moments.values()])
        w, *means = (0.5 * one + 0.5 * other for one, other in zip(*ends, strict=True))
        state = dict(zip(state, means, strict=True))
    options: dict[str, Any] = {
        "strategy": gs.ParameterAveraging(every=1, state="averaged"), "optimizer": rule, "workers": 2,
        "servers": 2, "batch_size": 4, "epochs": 1, "seed": 3, "chunk_elems": 64, "config": UNEVEN,
    }  # fmt: skip
    assert np.allclose(simulate(model, data, **options).parameters["w"], w.numpy(), rtol=0, atol=1e-12)
    options["strategy"] = gs.ParameterAveraging(every=1)  # the planted fault: of each worker its own
    assert not np.allclose(simulate(model, data, **options).parameters["w"], w.numpy(), rtol=0, atol=1e-6)


# ---- absent workers -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("every", "state", "seconds"),
    [(3, "own", 0.005), (3, "own", 0.15), (3, "averaged", 0.15), (None, "own", 0.005), (None, "own", 0.3)],
)
def test_the_average_is_over_those_who_are_left(every: int | None, state: Any, seconds: float) -> None:
    model, data = least_squares(240, 8, whole=False, reduction="mean")
    run = simulate(
        model, data, strategy=gs.ParameterAveraging(every=every, state=state), workers=3, servers=2,
        optimizer=gs.optim.SGD(lr=0.025, momentum=0.5), batch_size=8, epochs=6, chunk_elems=64, config=UNEVEN,
        script=kill_at("worker-1", seconds),
    )  # fmt: skip
    best = np.linalg.lstsq(data.inputs, data.targets, rcond=None)[0]
    assert run.summary["workers_lost"] == ["worker-1"]
    assert run.summary["samples_accounted"] == 6 * 240
    assert np.abs(run.parameters["w"] - best).max() < 0.15


def test_a_worker_that_has_nothing_left_keeps_nobody_waiting() -> None:
    """Shares of 3:1:1: the first goes on alone after the others have come to their end."""
    model, data = least_squares(250, 8, whole=False, reduction="mean")
    run = simulate(
        model, data, strategy=gs.ParameterAveraging(every=2), optimizer=gs.optim.SGD(lr=0.05), workers=3,
        batch_size=5, shares=[3, 1, 1], epochs=2, config=UNEVEN,
    )  # fmt: skip
    assert run.summary["samples_accounted"] == 500


@pytest.mark.parametrize(("every", "state"), [(3, "own"), (3, "averaged"), (None, "own")])
def test_a_checkpoint_is_an_average_and_a_run_goes_on_from_it(every: int | None, state: Any) -> None:
    async def stop(cluster: SimulatedCluster) -> None:
        await cluster.virtual.runtime("director").sleep(0.1)
        cluster.stop()

    model, data = least_squares(240, 8, whole=False, reduction="mean")
    storage = MemoryStorage()
    options: dict[str, Any] = {
        "strategy": gs.ParameterAveraging(every=every, state=state), "workers": 3, "batch_size": 8,
        "optimizer": gs.optim.SGD(lr=0.025, momentum=0.5), "epochs": 6, "config": UNEVEN, "storage": storage,
    }  # fmt: skip
    with pytest.raises(gs.errors.Interrupted) as stopped:
        simulate(model, data, script=stop, **options)
    files = storage.names(str(stopped.value.checkpoint))
    assert ("optimizer-momentum_buffer.safetensors" in files) == (state == "averaged")
    run = simulate(model, data, resume=True, **options)
    assert run.summary["samples_accounted"] == 6 * 240
    best = np.linalg.lstsq(data.inputs, data.targets, rcond=None)[0]
    assert np.abs(run.parameters["w"] - best).max() < 0.15


def test_what_was_found_before_a_stop_is_not_lost_by_it() -> None:
    """One worker has finished when the run is stopped: the results of both are in the checkpoint."""

    async def stop(cluster: SimulatedCluster) -> None:
        await cluster.virtual.runtime("director").sleep(10.5)
        cluster.stop()

    model = gs.from_functions(
        init=lambda seed: {"w": np.zeros(40)},
        outputs=lambda p, x: x,
        gradients=lambda p, x, y: {"w": -np.eye(40)[x].sum(0)},
        dtype="float64",
    )
    options: dict[str, Any] = {
        "strategy": gs.ParameterAveraging(every=None), "optimizer": gs.optim.SGD(lr=1.0), "workers": 2,
        "shares": [1, 4], "batch_size": 2, "epochs": 1, "storage": MemoryStorage(),
        "config": SimulationConfig(costs={"gradient": Cost(base_s=1.0)}),
    }  # fmt: skip
    with pytest.raises(gs.errors.Interrupted):
        simulate(model, numbered(40), script=stop, **options)
    run = simulate(model, numbered(40), resume=True, **options)
    assert run.summary["samples_accounted"] == 40
    assert (run.parameters["w"] > 0).all()  # every sample has left its mark


# ---- how they are put together ---------------------------------------------------------------------


def contribution(rank: int, samples: int, loss: float) -> PushHeader:
    return PushHeader(f"worker-{rank}", rank, 1, 1, samples, loss=loss)


TWO = [contribution(0, 30, 1.0), contribution(1, 10, 1.0 + math.log(3))]


def first_only(update: Sequence[PushHeader]) -> list[float]:
    """Whatever the others say."""
    return [float(one.rank == 0) for one in update]


def nothing(update: Sequence[PushHeader]) -> list[float]:
    return [0.0] * len(update)


@pytest.mark.parametrize(
    ("combine", "expected"),
    [("mean", [0.5, 0.5]), ("samples", [0.75, 0.25]), ("loss", [0.75, 0.25]), (first_only, [1.0, 0.0])],
)
def test_how_two_are_combined(combine: Any, expected: list[float]) -> None:
    rule = Averaged(frozenset({0, 1}), combine)
    assert rule.weights(0, TWO) == pytest.approx(expected)
    assert rule.weights(0, TWO[:1]) == [1.0]  # to the bit


def test_samples_and_loss_travel_with_the_parameters() -> None:
    """Worker 1 has three times the samples, so the mean by samples is nearer to it."""
    model = gs.from_functions(
        init=lambda seed: {"w": np.zeros(1)},
        outputs=lambda p, x: x,
        gradients=lambda p, x, y: (float(len(x) == 6), {"w": np.array([-float(len(x))])}),
        dtype="float64",
    )
    options: dict[str, Any] = {
        "optimizer": gs.optim.SGD(lr=1.0),
        "workers": 2,
        "batch_size": [2, 6],
        "epochs": 1,
    }
    ends = {
        combine: float(
            simulate(model, numbered(16), strategy=gs.ParameterAveraging(combine=combine), **options)
            .parameters["w"][0]
        )
        for combine in ("mean", "samples", "loss")
    }  # fmt: skip
    likely = 1 / (1 + math.exp(-1))
    expected = {"mean": 8.0, "samples": 4 / 4 + 12 * 3 / 4, "loss": 4 * likely + 12 * (1 - likely)}
    assert ends == pytest.approx(expected)


def test_what_cannot_be_combined_is_said() -> None:
    with pytest.raises(UserCodeError, match="returned the weights"):
        Averaged(frozenset({0}), nothing).weights(0, TWO)
    with pytest.raises(UserCodeError, match="worker-0 reports no loss"):
        Averaged(frozenset({0}), "loss").weights(0, [contribution(0, 1, math.nan)])
    with pytest.raises(UserCodeError, match="combine raised ZeroDivisionError"):
        Averaged(frozenset({0}), lambda update: [1 / 0]).weights(0, TWO)


def test_options_travel() -> None:
    strategy = gs.ParameterAveraging(every=None, combine=first_only)
    described = describe(strategy)
    assert find_strategy("parameter-averaging", described["fields"]) == strategy
    with pytest.raises(ConfigError, match="every=0"):
        gs.ParameterAveraging(every=0)
    with pytest.raises(ConfigError, match="did you mean 'mean'"):
        gs.ParameterAveraging(combine="maen")  # type: ignore[arg-type]


def test_bytes_of_an_average_are_those_of_a_push_and_a_fetch() -> None:
    elems, config = 1 << 20, SimulationConfig(shape_only=True, costs={"gradient": Cost(base_s=0.1)})
    run = simulate(
        Sized([elems]), numbered(160), strategy=gs.ParameterAveraging(every=5), workers=2, batch_size=4,
        epochs=1, config=config,
    )  # fmt: skip
    averages = 2 * 20 // 5
    assert run.summary["pushed_bytes"] == 4 * elems * (averages + 1)  # and the initial parameters
    assert run.summary["fetched_bytes"] == 4 * elems * (averages + 2 + 1)  # to begin with; the result


def test_real_processes() -> None:
    job = load_job(str(JOB))
    run = gs.train(job, strategy="parameter-averaging", strategy_options={"every": 2}, epochs=8, workers=2)
    assert np.allclose(run.parameters["weights"], [2.0, -1.0, 0.5], atol=0.2)
