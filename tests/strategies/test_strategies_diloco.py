"""DiLoCo: an inner optimizer on each worker, an outer one on the shards; beside numpy's arithmetic."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import gradstream as gs
from gradstream._simulate import simulate
from gradstream.data.arrays import ArrayDataset
from gradstream.data.base import BatchRef
from gradstream.data.plan import PartitionPlan
from gradstream.errors import ConfigError
from gradstream.job.descriptions import describe
from gradstream.job.files import load_job
from gradstream.job.registry import find_strategy
from gradstream.optim.base import Optimizer
from gradstream.optim.merge import Outer
from gradstream.run.simulated import SimulatedCluster
from gradstream.runtime.simulation import Cost, Exponential, Link, Network, SimulationConfig
from gradstream.runtime.storage import MemoryStorage
from gradstream.server.client.push import Update
from gradstream.strategies.base import Pushes, Strategy
from gradstream.testing import check_strategy
from gradstream.testing.runs import Sized, kill_at, least_squares, numbered
from gradstream.worker.server.replica import ServerReplica

Array = np.ndarray[Any, Any]

LR, MOMENTUM = 2.0**-5, 0.5
JOB = Path(__file__).resolve().parents[2] / "examples" / "linear_regression.py"
FEATURES = 200  # 4 chunks of 64 elements
JITTERY = Network(link=Link(latency_s=1e-3, jitter_s=1e-3))
EVEN = SimulationConfig(costs={"gradient": Cost(base_s=0.1)}, network=JITTERY)
UNEVEN = SimulationConfig(costs={"gradient": Cost(base_s=0.01, jitter=Exponential())}, network=JITTERY)


@pytest.mark.usefixtures("few_seeds")
def test_it_obeys_the_laws() -> None:
    assert not check_strategy(gs.DiLoCo(every=2)).broken


# ---- the outer step, in numpy ---------------------------------------------------------------------


def outer_step(w: Array, v: Array, delta: Array, lr: float, momentum: float) -> tuple[Array, Array]:
    """The paper's: v ← μ·v + Δ;  w ← w - ν·(Δ + μ·v)."""
    v = momentum * v + delta
    return w - lr * (delta + momentum * v), v


def slow_step(w: Array, u: Array, delta: Array, lr: float, momentum: float) -> tuple[Array, Array]:
    """SlowMo's: u ← β·u + Δ/γ;  w ← w - α·γ·u."""
    u = momentum * u + delta / LR
    return w - lr * LR * u, u


def reference(
    data: ArrayDataset, workers: int, every: int, steps: int, step: Any = outer_step, lr: float = 0.7
) -> Array:
    """Rounds of `every` inner steps of SGD with momentum, with an outer step after each, in numpy."""
    plan = PartitionPlan(data.num_samples, 4, workers, seed=3)
    w, v = np.zeros(FEATURES), np.zeros(FEATURES)
    velocities = np.zeros((workers, FEATURES))
    for first in range(0, steps, every):
        deltas = []
        for rank in range(workers):
            own = w.copy()
            for at in range(first, min(first + every, steps)):
                batch = data.batch(plan.ids(BatchRef(0, rank, at)))
                x, y = np.asarray(batch.inputs), np.asarray(batch.targets)
                velocities[rank] = MOMENTUM * velocities[rank] + (x @ own - y) @ x / 4
                own -= LR * velocities[rank]
            deltas.append(w - own)
        w, v = step(w, v, np.mean(deltas, 0), lr, 0.9)
    return w


def trained(strategy: Strategy, workers: int, **options: Any) -> Array:
    """The parameters after 8 minibatches of each worker."""
    model, data = least_squares(32 * workers, FEATURES, whole=False, reduction="mean")
    options = {"optimizer": gs.optim.SGD(lr=LR, momentum=MOMENTUM), "servers": 2, "config": EVEN, **options}
    run = simulate(
        model, data, strategy=strategy, workers=workers, batch_size=4, steps=8, seed=3, chunk_elems=64,
        assignment="partitions", **options,
    )  # fmt: skip
    assert run.summary["staleness_max"] == 0
    parameters: Array = run.parameters["w"]
    return parameters


def samples(workers: int) -> ArrayDataset:
    return least_squares(32 * workers, FEATURES, whole=False, reduction="mean")[1]


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("every", [1, 3, 8])
def test_it_is_the_papers_algorithm(workers: int, every: int) -> None:
    """Rounds of 3 leave one of 2 at the end; the inner velocity stays over all of them."""
    found = trained(gs.DiLoCo(every=every), workers)
    expected = reference(samples(workers), workers, every, 8)
    assert np.allclose(found, expected, rtol=0, atol=1e-12)
    if every < 8:  # planted: the plain momentum
        assert np.abs(trained(gs.DiLoCo(every=every, nesterov=False), workers) - expected).max() > 1e-3


def test_without_nesterov_it_is_slowmo_of_a_constant_rate() -> None:
    found = trained(gs.DiLoCo(every=2, outer_lr=1.0, nesterov=False), 4)
    expected = reference(samples(4), 4, 2, 8, slow_step, 1.0)
    assert np.allclose(found, expected, rtol=0, atol=1e-12)


def test_the_outer_step_is_torchs_bit_for_bit() -> None:
    """One shard's rule beside torch.optim.SGD, over ten steps; the rate of the pushes is no part of it."""
    rule = Outer(gs.DiLoCo().outer_optimizer(gs.optim.AdamW()))
    w, state = torch.zeros(FEATURES), {"momentum_buffer": torch.zeros(FEATURES)}
    theirs = torch.nn.Parameter(torch.zeros(FEATURES))
    optimizer = torch.optim.SGD([theirs], lr=0.7, momentum=0.9, nesterov=True, fused=True)
    generator = torch.Generator().manual_seed(0)
    for step in range(1, 11):
        delta = torch.randn(FEATURES, generator=generator)
        rule.apply(w, delta, state, lr=123.0, step=step)
        theirs.grad = delta
        optimizer.step()
        assert torch.equal(w, theirs.data)


# ---- special cases ---------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_without_an_outer_optimizer_it_is_parameter_averaging(workers: int) -> None:
    """To the rounding of w - (w - w_i), some 1e-16 of w a round."""
    one = trained(gs.DiLoCo(every=2, outer_lr=1.0, outer_momentum=0.0), workers)
    other = trained(gs.ParameterAveraging(every=2), workers)
    assert np.abs(one - other).max() < 1e-15
    assert np.abs(one).max() > 0.1


@pytest.mark.parametrize("every", [1, 3])
def test_one_worker_is_plain_sgd_bit_for_bit_where_sums_are_exact(every: int) -> None:
    grid, lr = 2.0**-10, 2.0**-7
    model, data = least_squares(32, FEATURES, grid=grid, reduction="mean")
    run = simulate(
        model, data, strategy=gs.DiLoCo(every=every, outer_lr=1.0, outer_momentum=0.0),
        optimizer=gs.optim.SGD(lr=lr), workers=1, servers=2, batch_size=4, steps=8, seed=3, chunk_elems=64,
        config=UNEVEN,
    )  # fmt: skip
    w, plan = np.zeros(FEATURES), PartitionPlan(32, 4, 1, seed=3)
    for step in range(8):
        ids = plan.ids(BatchRef(0, 0, step))
        x, y = data.inputs[ids], data.targets[ids]
        w -= lr * ((x @ (np.round(w / grid) * grid) - y) @ x) / 4
    assert np.array_equal(run.parameters["w"], w)


def test_the_same_seed_has_the_same_bits_on_any_network() -> None:
    cases: list[dict[str, Any]] = [
        {"servers": 1},
        {"servers": 3},
        {"config": SimulationConfig(costs=EVEN.costs)},
    ]
    assert len({trained(gs.DiLoCo(every=3), 3, **case).tobytes() for case in cases}) == 1


# ---- absent workers ---------------------------------------------------------------------------------


@dataclass
class Pushed:
    """The workers' pushes, by the version that they were computed on."""

    deltas: dict[int, dict[int, Array]]

    def ends_at(self, *, forgets_at: int | None = None) -> Array:
        """Where the outer optimizer is after all of it: in numpy, from the mean of each version's.

        Args:
            forgets_at: a planted fault: the velocity is lost at this version.
        """
        w = v = np.zeros(len(next(iter(self.deltas[0].values()))))
        for version in range(len(self.deltas)):
            v = 0.0 * v if version == forgets_at else v
            w, v = outer_step(w, v, np.mean(list(self.deltas[version].values()), 0), 0.7, 0.9)
        return w


@pytest.fixture
def pushed(monkeypatch: pytest.MonkeyPatch) -> Pushed:
    deltas: dict[int, dict[int, Array]] = defaultdict(dict)
    take = ServerReplica.take_outer_gradient

    async def noted(self: ServerReplica) -> Update:
        update = await take(self)
        assert update.vector is not None
        assert len(set(update.base_version)) == 1
        deltas[update.base_version[0]][self.rank] = update.vector.tensor.numpy().copy()
        return update

    monkeypatch.setattr(ServerReplica, "take_outer_gradient", noted)
    return Pushed(deltas)


@pytest.mark.parametrize("seconds", [0.005, 0.15, 0.3])
def test_a_lost_worker_is_left_out_from_then_on(seconds: float, pushed: Pushed) -> None:
    model, data = least_squares(240, FEATURES, whole=False, reduction="mean")
    run = simulate(
        model, data, strategy=gs.DiLoCo(every=3), workers=3, servers=2, batch_size=8, epochs=6,
        optimizer=gs.optim.SGD(lr=LR), config=UNEVEN, chunk_elems=64, script=kill_at("worker-1", seconds),
    )  # fmt: skip
    assert run.summary["workers_lost"] == ["worker-1"]
    assert run.summary["samples_accounted"] == 6 * 240
    taking_part = [set(pushed.deltas[version]) for version in range(len(pushed.deltas))]
    alone = next(at for at, ranks in enumerate(taking_part) if 1 not in ranks)
    assert not any(1 in ranks for ranks in taking_part[alone:])
    assert np.allclose(run.parameters["w"], pushed.ends_at(), rtol=0, atol=1e-12)


def test_a_resumed_run_goes_on_with_the_outer_velocity(pushed: Pushed) -> None:
    async def stop(cluster: SimulatedCluster) -> None:
        await cluster.virtual.runtime("director").sleep(0.1)
        cluster.stop()

    model, data = least_squares(240, FEATURES, whole=False, reduction="mean")
    storage = MemoryStorage()
    options: dict[str, Any] = {
        "strategy": gs.DiLoCo(every=3), "workers": 3, "servers": 2, "batch_size": 8, "epochs": 3,
        "optimizer": gs.optim.SGD(lr=LR, momentum=MOMENTUM), "chunk_elems": 64, "config": UNEVEN, "storage": storage,
    }  # fmt: skip
    with pytest.raises(gs.errors.Interrupted) as stopped:
        simulate(model, data, script=stop, **options)
    resumed_at = len(pushed.deltas)
    assert resumed_at > 1
    assert "optimizer-momentum_buffer.safetensors" in storage.names(str(stopped.value.checkpoint))
    run = simulate(model, data, resume=True, **options)
    assert len(pushed.deltas) > resumed_at
    assert run.summary["samples_accounted"] == 3 * 240
    assert run.summary["staleness_max"] == 0
    assert np.allclose(run.parameters["w"], pushed.ends_at(), rtol=0, atol=1e-12)
    assert np.abs(run.parameters["w"] - pushed.ends_at(forgets_at=resumed_at)).max() > 1e-3


def test_a_worker_that_has_nothing_left_keeps_nobody_waiting() -> None:
    model, data = least_squares(250, 8, whole=False, reduction="mean")
    run = simulate(
        model, data, strategy=gs.DiLoCo(every=2), optimizer=gs.optim.SGD(lr=0.02), workers=3, batch_size=5,
        shares=[3, 1, 1], epochs=2, config=UNEVEN,
    )  # fmt: skip
    assert run.summary["samples_accounted"] == 500


def test_bytes_are_a_push_and_a_fetch_every_period() -> None:
    elems, config = 1 << 20, SimulationConfig(shape_only=True, costs=EVEN.costs, network=JITTERY)
    run = simulate(
        Sized([elems]), numbered(160), strategy=gs.DiLoCo(every=5), workers=2, batch_size=4, steps=20,
        config=config, assignment="partitions",
    )  # fmt: skip
    rounds = 2 * 20 // 5
    assert run.summary["pushed_bytes"] == 4 * elems * (rounds + 1)  # and the initial parameters
    assert run.summary["fetched_bytes"] == 4 * elems * (rounds + 2 + 1)  # to begin with; the result


# ---- options ------------------------------------------------------------------------------------------


def test_options_travel_and_are_settings() -> None:
    strategy = gs.DiLoCo(every=50, outer_lr=0.5, outer_momentum=0.8)
    assert find_strategy("diloco", describe(strategy)["fields"]) == strategy
    assert strategy.outer_optimizer(gs.optim.AdamW()) == gs.optim.SGD(lr=0.5, momentum=0.8, nesterov=True)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"outer_lr": 0.0}, r"outer_lr=0\.0.*a finite number > 0"),
        ({"outer_lr": gs.schedules.Cosine(0.7)}, r"outer_lr=.*expected a number; only"),
        ({"outer_momentum": 1.0}, r"outer_momentum=1\.0.*a number in \[0, 1\)"),
        ({"nesterov": "no"}, r"nesterov='no'\): expected True or False"),
    ],
)
def test_what_is_no_outer_optimizer_is_refused(options: Any, wanted: str) -> None:
    with pytest.raises(ConfigError, match=wanted):
        gs.DiLoCo(**options)


def test_real_processes_with_settings() -> None:
    job = load_job(str(JOB))
    options = {"every": 4, "outer_lr": 0.5, "outer_momentum": 0.5}
    run = gs.train(job, strategy="diloco", strategy_options=options, epochs=8, workers=2)
    assert np.allclose(run.parameters["weights"], [2.0, -1.0, 0.5], atol=0.2)


# ---- the seam: an outer optimizer of a strategy of one's own ---------------------------------------------


@dataclass(frozen=True)
class OuterAdam(gs.DiLoCo):
    """DiLoCo whose outer optimizer is Adam."""

    scheduled: bool = False
    pushes: ClassVar[Pushes] = "outer_gradients"

    def outer_optimizer(self, inner: Optimizer) -> Optimizer:
        return gs.optim.Adam(lr=gs.schedules.Cosine(0.01) if self.scheduled else 0.01)


def test_any_rule_can_be_the_outer_one(pushed: Pushed) -> None:
    """Its state is on the shards and in checkpoints, and a resumed run goes on with it."""

    async def stop(cluster: SimulatedCluster) -> None:
        await cluster.virtual.runtime("director").sleep(0.45)
        cluster.stop()

    storage = MemoryStorage()
    with pytest.raises(gs.errors.Interrupted) as stopped:
        trained(OuterAdam(every=2), 2, storage=storage, script=stop)
    files = storage.names(str(stopped.value.checkpoint))
    assert {"optimizer-exp_avg.safetensors", "optimizer-exp_avg_sq.safetensors"} <= set(files)
    found = trained(OuterAdam(every=2), 2, storage=storage, resume=True)
    w, m, s = (np.zeros(FEATURES) for _ in range(3))
    for version in range(len(pushed.deltas)):
        delta = np.mean(list(pushed.deltas[version].values()), 0)
        m, s = 0.9 * m + 0.1 * delta, 0.999 * s + 0.001 * delta**2
        corrected = m / (1 - 0.9 ** (version + 1)), s / (1 - 0.999 ** (version + 1))
        w -= 0.01 * corrected[0] / (np.sqrt(corrected[1]) + 1e-8)
    assert np.allclose(found, w, rtol=0, atol=1e-12)


def test_an_outer_schedule_is_refused_before_anything_is_started() -> None:
    with pytest.raises(ConfigError, match=r"outer optimizer is Adam.*lr is a schedule; expected a number"):
        trained(OuterAdam(scheduled=True), 1)
