"""Asynchronous DiLoCo: delayed Nesterov on the shards, exchanges behind computing; beside numpy's arithmetic."""

from __future__ import annotations

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
from gradstream.errors import ConfigError
from gradstream.job.descriptions import describe
from gradstream.job.files import load_job
from gradstream.job.registry import find_strategy
from gradstream.optim.delayed_nesterov import DelayedNesterov
from gradstream.run.simulated import SimulatedCluster
from gradstream.runtime.simulation import Cost, Exponential, Link, Network, SimulationConfig
from gradstream.runtime.storage import MemoryStorage
from gradstream.server.aggregation import PushHeader
from gradstream.server.client.push import Update
from gradstream.strategies.async_diloco import AsyncDiLoCo, EqualShares
from gradstream.testing import check_strategy
from gradstream.testing.runs import kill_at, least_squares
from gradstream.worker.server.replica import ServerReplica

Array = np.ndarray[Any, Any]

LR, MOMENTUM, FEATURES = 2.0**-5, 0.5, 60
JOB = Path(__file__).resolve().parents[2] / "examples" / "linear_regression.py"
UNEVEN = SimulationConfig(
    costs={"gradient": Cost(base_s=0.01, jitter=Exponential())},
    network=Network(link=Link(latency_s=1e-3, jitter_s=1e-3)),
)
FAR = SimulationConfig(costs={"gradient": Cost(base_s=0.1)}, network=Network(link=Link(latency_s=0.1)))


@pytest.mark.parametrize("delay", [0, 3])
@pytest.mark.usefixtures("few_seeds")
def test_it_obeys_the_laws(delay: int) -> None:
    assert not check_strategy(AsyncDiLoCo(every=3, delay=delay)).broken


def trained(strategy: gs.Strategy, workers: int = 1, steps: int = 8, **options: Any) -> gs.Run:
    """A run of minibatches of 4 samples."""
    model, data = least_squares(4 * steps * workers, FEATURES, whole=False, reduction="mean")
    given = {"optimizer": gs.optim.SGD(lr=LR, momentum=MOMENTUM), "config": UNEVEN, **options}
    return simulate(
        model, data, strategy=strategy, workers=workers, batch_size=4, epochs=1, seed=3,
        chunk_elems=64, **given,
    )  # fmt: skip


def alone(every: int, delay: int, momentum_every: int, *, forgets: bool = False) -> Array:
    """One worker's 8 minibatches in numpy.

    Args:
        forgets: a planted fault: what the worker has moved since its push is lost when it fetches.
    """
    data = least_squares(32, FEATURES, whole=False, reduction="mean")[1]
    plan = PartitionPlan(32, 4, 1, seed=3)
    outer, v, p, velocity = np.zeros(FEATURES), np.zeros(FEATURES), np.zeros(FEATURES), np.zeros(FEATURES)
    own, start, pushed, arrives, pushes, done = outer.copy(), outer.copy(), outer.copy(), None, 0, 0

    def push() -> None:
        nonlocal outer, v, p, pushes, pushed
        delta = start - own
        pushed, pushes, p, outer = own.copy(), pushes + 1, p + delta, outer - 0.7 * delta
        if pushes % momentum_every == 0:
            v = 0.9 * v + p
            outer, p = outer - 0.7 * 0.9 * v, np.zeros(FEATURES)

    for at in range(8):
        if arrives == at:
            own = outer + (0.0 if forgets else 1.0) * (own - pushed)
            start, arrives = outer.copy(), None
        batch = data.batch(plan.ids(BatchRef(0, 0, at)))
        x, y = np.asarray(batch.inputs), np.asarray(batch.targets)
        velocity = MOMENTUM * velocity + (x @ own - y) @ x / 4
        own, done = own - LR * velocity, done + 1
        if done == every:
            if arrives is not None:
                own, start = outer + (own - pushed), outer.copy()
            push()
            done, arrives = 0, at + 1 + delay if delay < every else None
            if delay == every:
                arrives = at + 1 + every  # taken in just before the next push, or at the end
    if done or arrives is not None:
        if arrives is not None:
            own, start = outer + (own - pushed), outer.copy()
        if done:
            push()
    return outer


@pytest.mark.parametrize(("every", "delay"), [(1, 0), (3, 0), (3, 1), (3, 2), (4, 4), (8, 3)])
@pytest.mark.parametrize("momentum_every", [1, 2])
def test_it_is_the_modules_formula(every: int, delay: int, momentum_every: int) -> None:
    strategy = AsyncDiLoCo(every=every, delay=delay, momentum_every=momentum_every)
    found = trained(strategy, config=FAR).parameters["w"]
    assert np.allclose(found, alone(every, delay, momentum_every), rtol=0, atol=1e-12)
    if 0 < delay < every and every < 8:
        assert np.abs(found - alone(every, delay, momentum_every, forgets=True)).max() > 1e-3


def test_each_push_counts_once_in_the_order_in_which_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three workers of random speeds beside the server's formula, on the pushes in the order of one shard's updates."""
    deltas: dict[tuple[int, int], Array] = {}
    order: list[tuple[int, int]] = []
    take, weights = ServerReplica.take_outer_gradient, EqualShares.weights

    async def noted(self: ServerReplica, *, goes_on: bool = False) -> Update:
        update = await take(self, goes_on=goes_on)
        assert update.vector is not None
        number = sum(rank == self.rank for rank, _ in deltas) + 1
        deltas[self.rank, number] = update.vector.tensor.numpy().copy()
        return update

    def seen(self: EqualShares, version: int, update: Sequence[PushHeader]) -> Sequence[float]:
        order.append((update[0].rank, sum(rank == update[0].rank for rank, _ in order) + 1))
        return weights(self, version, update)

    monkeypatch.setattr(ServerReplica, "take_outer_gradient", noted)
    monkeypatch.setattr(EqualShares, "weights", seen)
    run = trained(AsyncDiLoCo(every=2, delay=1, momentum_every=3), workers=3, steps=10)
    assert run.summary["staleness_max"] > 0
    assert len(order) == len(deltas) > 12
    w, v, p = np.zeros(FEATURES), np.zeros(FEATURES), np.zeros(FEATURES)
    for number, which in enumerate(order, 1):
        w, p = w - 0.7 * deltas[which] / 3, p + deltas[which] / 3
        if number % 3 == 0:
            v = 0.9 * v + p
            w, p = w - 0.7 * 0.9 * v, np.zeros(FEATURES)
    assert np.allclose(run.parameters["w"], w, rtol=0, atol=1e-12)


def test_without_an_outer_optimizer_one_worker_is_its_inner_optimizer() -> None:
    strategy = AsyncDiLoCo(every=3, outer_lr=1.0, outer_momentum=0.0)
    plain = trained(gs.Synchronous(), servers=1)
    assert np.abs(trained(strategy).parameters["w"] - plain.parameters["w"]).max() < 1e-15


def test_an_exchange_goes_on_while_the_worker_computes() -> None:
    """An exchange takes 0.6 s. Eight minibatches of 0.1 s follow: only the first and the last one are waited for."""
    seconds = [
        trained(AsyncDiLoCo(every=8, delay=delay), steps=80, config=FAR).summary["train_s"]
        for delay in (0, 8)
    ]
    assert seconds[0] > 80 * 0.1 + 9 * 0.6
    assert seconds[1] < 80 * 0.1 + 2 * 0.6


def test_nobody_waits_for_a_slow_worker() -> None:
    slow = SimulationConfig(
        costs={"gradient": Cost(base_s=0.01)}, network=UNEVEN.network, speeds={"worker-2": 0.1}
    )
    run = trained(AsyncDiLoCo(every=2), workers=3, steps=40, config=slow)
    assert run.summary["samples_accounted"] == 480
    assert run.summary["train_s"] < 1.15 * 120 * 0.01 / 2.1 + 0.3  # 0.3: its last minibatches


@pytest.mark.parametrize("delay", [0, 2])
@pytest.mark.parametrize("seconds", [0.02, 0.1])
def test_a_dead_worker_costs_its_own_work_alone(seconds: float, delay: int) -> None:
    run = trained(
        AsyncDiLoCo(every=2, delay=delay), workers=3, steps=10, servers=2, script=kill_at("worker-1", seconds)
    )
    assert run.summary["workers_lost"] == ["worker-1"]
    assert run.summary["samples_accounted"] == 120


@pytest.mark.parametrize("delay", [0, 2])
def test_a_stopped_run_is_resumed_with_its_velocity(delay: int) -> None:
    async def stop(cluster: SimulatedCluster) -> None:
        await cluster.virtual.runtime("director").sleep(0.08)
        cluster.stop()

    storage, strategy = MemoryStorage(), AsyncDiLoCo(every=2, delay=delay, momentum_every=2)
    with pytest.raises(gs.errors.Interrupted) as stopped:
        trained(strategy, workers=2, steps=12, storage=storage, script=stop)
    files = storage.names(str(stopped.value.checkpoint))
    assert {"optimizer-momentum_buffer.safetensors", "optimizer-pending.safetensors"} <= set(files)
    run = trained(strategy, workers=2, steps=12, storage=storage, resume=True)
    assert run.summary["samples_accounted"] == 96


def test_real_processes() -> None:
    options = {"every": 4, "delay": 2, "outer_momentum": 0.5}
    run = gs.train(load_job(str(JOB)), strategy="async-diloco", strategy_options=options, epochs=8, workers=2)
    assert np.allclose(run.parameters["weights"], [2.0, -1.0, 0.5], atol=0.2)


# ---- options, and the rule ----------------------------------------------------------------------------


def test_options_travel() -> None:
    strategy = AsyncDiLoCo(every=50, outer_lr=0.5, outer_momentum=0.8, momentum_every=7, delay=20)
    assert find_strategy("async-diloco", describe(strategy)["fields"]) == strategy


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"outer_lr": 0.0}, r"outer_lr=0\.0.*a finite number > 0"),
        ({"outer_lr": gs.schedules.Cosine(0.7)}, r"outer_lr=.*expected a number; only"),
        ({"outer_momentum": 1.0}, r"outer_momentum=1\.0.*a number in \[0, 1\)"),
        ({"momentum_every": 0}, r"momentum_every=0"),
        ({"every": 4, "delay": 5}, r"every=4, delay=5\): expected a delay of 0 to 4"),
    ],
)
def test_what_is_no_outer_optimizer_is_refused(options: Any, wanted: str) -> None:
    with pytest.raises(ConfigError, match=wanted):
        AsyncDiLoCo(**options)


def test_a_delay_of_one_gradient_is_nesterovs_momentum() -> None:
    rule, torchs = DelayedNesterov(0.5, 0.9, every=1), gs.optim.SGD(0.5, momentum=0.9, nesterov=True)
    generator = torch.Generator().manual_seed(0)
    ours, theirs = torch.zeros(8, dtype=torch.float64), torch.zeros(8, dtype=torch.float64)
    state = {name: torch.zeros(8, dtype=torch.float64) for name in rule.state_names}
    other = {"momentum_buffer": torch.zeros(8, dtype=torch.float64)}
    for step in range(1, 9):
        gradient = torch.randn(8, dtype=torch.float64, generator=generator)
        rule.apply(ours, gradient, state, lr=0.5, step=step)
        torchs.apply(theirs, gradient, other, lr=0.5, step=step)
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-13)
