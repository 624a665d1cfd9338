"""Downpour with one worker is SGD with a known delay: bit for bit, on any network."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import gradstream as gs
from gradstream._simulate import simulate
from gradstream.data.arrays import ArrayDataset
from gradstream.data.base import BatchRef
from gradstream.data.plan import PartitionPlan
from gradstream.model.base import Model
from gradstream.runtime.simulation import Cost, Exponential, Link, LogNormal, Network, SimulationConfig
from gradstream.strategies import ServerWorker, Strategy
from gradstream.testing.runs import Tokens, check_exactly_once, least_squares, numbered

LR = 2.0**-7
FEATURES = 300  # 5 chunks of 64 elements

FAST = SimulationConfig(costs={"gradient": Cost(base_s=0.1)}, network=Network(bandwidth_bytes_s=1e9))
SLOW = SimulationConfig(  # the network takes much longer than the gradient
    costs={"gradient": Cost(base_s=1e-4), "apply": Cost(base_s=1e-4, jitter=Exponential())},
    network=Network(bandwidth_bytes_s=1e5, link=Link(latency_s=5e-3, jitter_s=2e-2)),
)
LOPSIDED = SimulationConfig(
    costs={"gradient": Cost(base_s=1e-2, jitter=LogNormal(1.0))},
    network=Network(links={("worker-0", "shard-0"): Link(latency_s=0.05, jitter_s=0.05)}),
)
WORLDS = {"fast": FAST, "slow": SLOW, "lopsided": LOPSIDED}


def own_batches(data: ArrayDataset, batch_size: int, steps: int, seed: int) -> list[np.ndarray[Any, Any]]:
    """The minibatches of a worker that has all of the data."""
    plan = PartitionPlan(data.num_samples, batch_size, 1, seed=seed)
    places = [divmod(step, plan.batches_per_epoch(0)) for step in range(steps)]
    return [plan.ids(BatchRef(epoch, 0, batch)) for epoch, batch in places]


def gradient_of(model: Model, w: torch.Tensor, data: ArrayDataset, ids: np.ndarray[Any, Any]) -> torch.Tensor:
    gradient = torch.zeros_like(w)
    model.gradient(w, data.batch(ids), gradient, seed=0, report=lambda _: None)
    return gradient.mul_(1 / len(ids)) if model.reduction == "sum" else gradient


def delayed_sgd(
    model: Model,
    data: ArrayDataset,
    batches: list[np.ndarray[Any, Any]],
    *,
    push_every: int,
    fetch_every: int,
    overlap: bool,
    momentum: float = 0.0,
) -> torch.Tensor:
    """The reference: Algorithm 1.1 by one node, with a server that is a vector beside it."""
    server = torch.zeros(model.layout.elems, dtype=model.layout.dtype)
    asked, local, accumulated = server.clone(), server.clone(), None
    velocity = torch.zeros_like(server)
    for step, ids in enumerate(batches):
        if step % fetch_every == 0:
            local = asked.clone() if overlap else server.clone()
            asked = server.clone()
        gradient = gradient_of(model, local, data, ids)
        gradient = velocity = velocity * momentum + gradient
        accumulated = gradient.clone() if accumulated is None else accumulated + gradient
        local.sub_(gradient, alpha=LR)
        if (step + 1) % push_every == 0 or step + 1 == len(batches):
            torch._fused_sgd_(
                [server], [accumulated], [], weight_decay=0.0, momentum=0.0, lr=LR, dampening=0.0,
                nesterov=False, maximize=False, is_first_step=False,
            )  # fmt: skip
            accumulated = None
    return server


def simulated(model: Model, data: ArrayDataset, strategy: Strategy, **options: Any) -> np.ndarray[Any, Any]:
    options = {"workers": 1, "batch_size": 4, "steps": 11, "chunk_elems": 64, "seed": 3, **options}
    run = simulate(model, data, strategy=strategy, optimizer=gs.optim.SGD(lr=LR), **options)
    return run.parameters["w"]


@pytest.mark.parametrize("every", [1, 2, 3, 4])
def test_without_overlap_it_is_local_sgd_on_whole_numbers(every: int) -> None:
    """Pushing the sum of k gradients is the same as k local steps, where sums are exact."""
    model, data = least_squares(64, FEATURES, grid=2.0**-10)
    batches = own_batches(data, 4, 12, seed=3)
    local = torch.zeros(FEATURES, dtype=torch.float64)
    for ids in batches:
        local.sub_(gradient_of(model, local, data, ids), alpha=LR)
    strategy = gs.Downpour(push_every=every, fetch_every=every, overlap=False)
    got = simulated(model, data, strategy, steps=12)
    assert np.array_equal(got, local.numpy())
    assert np.abs(got).max() > 0


PERIODS = [
    ((1, 1), 0.0, "slow"),
    ((2, 2), 0.0, "fast"),
    ((4, 4), 0.5, "lopsided"),
    ((1, 3), 0.0, "lopsided"),
    ((3, 1), 0.5, "fast"),
    ((2, 3), 0.5, "slow"),
]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("periods", "momentum", "config"), PERIODS, ids=str)
def test_one_worker_is_sgd_with_this_delay(
    periods: tuple[int, int], config: str, overlap: bool, momentum: float
) -> None:
    model, data = least_squares(64, FEATURES, whole=False)
    strategy = gs.Downpour(*periods, overlap=overlap, local_momentum=momentum)
    expected = delayed_sgd(
        model, data, own_batches(data, 4, 11, seed=3),
        push_every=periods[0], fetch_every=periods[1], overlap=overlap, momentum=momentum,
    )  # fmt: skip
    for servers in (1, 2):
        got = simulated(model, data, strategy, config=WORLDS[config], servers=servers)
        assert np.array_equal(got, expected.numpy()), f"S={servers}"


def test_overlap_is_another_algorithm_and_the_reference_can_tell() -> None:
    model, data = least_squares(64, FEATURES, whole=False)
    with_overlap = simulated(model, data, gs.Downpour(overlap=True))
    without = simulated(model, data, gs.Downpour(overlap=False))
    assert not np.array_equal(with_overlap, without)


def test_a_fetch_that_does_not_wait_for_own_pushes_would_be_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The planted fault: the server answers fetches whatever the worker has pushed before."""
    from gradstream.server.shard.state import ShardState

    def satisfied(self: ShardState, state: Any, terms: Any) -> bool:
        return bool(state.version >= max(terms.min_version, 0))

    model, data = least_squares(64, FEATURES, whole=False)
    strategy = gs.Downpour(overlap=False)
    right = simulated(model, data, strategy, config=LOPSIDED)
    monkeypatch.setattr(ShardState, "_satisfied", satisfied)
    assert not np.array_equal(simulated(model, data, strategy, config=LOPSIDED), right)


def test_local_rate_is_its_own() -> None:
    """Local steps of rate 0 leave the server alone in moving: k gradients at the same parameters."""
    model, data = least_squares(64, FEATURES, grid=2.0**-10)
    expected = torch.zeros(FEATURES, dtype=torch.float64)
    batches = own_batches(data, 4, 12, seed=3)
    for first in range(0, 12, 3):
        total = sum(gradient_of(model, expected, data, ids) for ids in batches[first : first + 3])
        expected = expected - LR * total
    strategy = gs.Downpour(push_every=3, fetch_every=3, overlap=False, local_lr=0.0)
    assert np.array_equal(simulated(model, data, strategy, steps=12), expected.numpy())


@pytest.mark.parametrize("push_every", [1, 3])
@pytest.mark.parametrize("overlap", [False, True])
def test_all_that_several_workers_push_is_applied(overlap: bool, push_every: int) -> None:
    run = simulate(
        Tokens(num_chunks=5),
        numbered(50),
        strategy=gs.Downpour(push_every=push_every, fetch_every=2, overlap=overlap),
        optimizer=gs.optim.SGD(lr=1.0),
        workers=4,
        servers=2,
        batch_size=3,
        shares=[3, 1, 0, 2],
        assignment="partitions",
        epochs=3,
        chunk_elems=64,
        config=SLOW,
    )
    check_exactly_once(run, num_samples=50, epochs=3)


def test_a_strategy_that_forgets_a_push_does_not_pass() -> None:
    """The planted fault: every third gradient is thrown away."""

    class Forgetful(gs.Downpour):
        async def train(self, worker: ServerWorker) -> None:
            await worker.swap_in(worker.server.fetch_soon())
            async for batch in worker.batches():
                gradient = await worker.gradient(batch)
                await worker.accumulate(gradient)
                update = worker.take_accumulated()
                if worker.step % 3 == 2:
                    assert update.vector is not None
                    update.vector.tensor.zero_()
                await worker.server.push_soon(update)

    run = simulate(
        Tokens(num_chunks=2),
        numbered(20),
        strategy=Forgetful(),
        optimizer=gs.optim.SGD(lr=1.0),
        workers=2,
        batch_size=2,
        epochs=1,
        chunk_elems=64,
    )
    with pytest.raises(AssertionError, match="was applied 0 times"):
        check_exactly_once(run, num_samples=20, epochs=1)
