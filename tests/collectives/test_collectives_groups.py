"""Groups on virtual time: the same bits for every algorithm and number of ranks, in any order of events."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from gradstream.collectives.algorithms import ALGORITHMS
from gradstream.collectives.group import Group, slice_of
from gradstream.errors import ConfigError, PeerLostError
from gradstream.memory import Vector
from gradstream.runtime import Cost, Exponential, Link, Network, SimulationConfig
from kit.group_runs import VirtualRanks

RACK = SimulationConfig(network=Network(bandwidth_bytes_s=1.25e9, link=Link(latency_s=50e-6, jitter_s=20e-6)))
SIZES = [*range(1, 10), 12, 16]


def whole(size: int, elems: int) -> list[np.ndarray[Any, Any]]:
    rng = np.random.default_rng(size * 1000 + elems)
    return list(rng.integers(-1000, 1000, (size, elems)).astype(np.float32))


@pytest.mark.parametrize("how", ALGORITHMS)
def test_every_rank_has_the_sum(how: str) -> None:
    for size in SIZES:
        lengths = sorted({0, 1, size - 1, size, size + 1, 1000})
        inputs = {elems: whole(size, elems) for elems in lengths}

        async def work(group: Group, inputs: Any = inputs) -> list[Any]:
            sums = []
            for elems, parts in inputs.items():
                vector = group.allocate(elems, torch.float32, "gradient")
                vector.tensor.copy_(torch.from_numpy(parts[group.rank]))
                sums.append((await group.allreduce(vector.all)).tensor.clone().numpy())
            return sums

        for outcome in VirtualRanks(size, config=RACK).run(work, how=how):
            for parts, got in zip(inputs.values(), outcome, strict=True):
                np.testing.assert_array_equal(got, np.sum(parts, axis=0))


def test_scatter_gather_broadcast_and_weights() -> None:
    for size in (1, 2, 3, 5, 8):
        for elems in (0, 1, 64, 65, 1000):
            inputs = whole(size, elems)
            total = np.zeros(elems) + sum((rank + 1) * part for rank, part in enumerate(inputs))

            async def work(group: Group, inputs: Any = inputs, elems: int = elems) -> Any:
                vector = Vector("v", torch.from_numpy(inputs[group.rank].copy()))
                own = await group.reduce_scatter(vector.all, weight=group.rank + 1.0)
                assert (own.start, own.stop) == slice_of(elems, group.rank, group.size)
                await group.all_gather(vector.all)
                told = Vector("w", torch.full((elems,), float(group.rank)))
                await group.broadcast(told.all, root=group.size - 1)
                return vector.tensor.numpy(), told.tensor.numpy()

            for summed, told in VirtualRanks(size, config=RACK).run(work):
                np.testing.assert_array_equal(summed, total)
                np.testing.assert_array_equal(told, np.full(elems, float(size - 1)))


@pytest.mark.parametrize("how", ALGORITHMS)
def test_the_order_of_arrivals_changes_no_bit(how: str) -> None:
    """Numbers whose sum depends on the order, cut into pieces; another seed is another interleaving."""
    size, elems = 5, 300
    network = Network(bandwidth_bytes_s=1e8, link=Link(latency_s=1e-5, jitter_s=1e-3))
    config = SimulationConfig(costs={"reduce": Cost(base_s=1e-4, jitter=Exponential())}, network=network)
    parts = np.random.default_rng(7).standard_normal((size, elems)).astype(np.float32)

    async def work(group: Group) -> bytes:
        vector = Vector("v", torch.from_numpy(parts[group.rank].copy()))
        await group.allreduce(vector.all)
        return vector.tensor.numpy().tobytes()

    found, times = set(), set()
    for seed in range(200 // len(ALGORITHMS) + 1):
        ranks = VirtualRanks(size, seed=seed, config=config)
        found |= set(ranks.run(work, how=how, piece_bytes=256))
        times.add(ranks.now_s)
    assert len(found) == 1
    assert len(times) > 20  # the seeds did make a difference


def test_operations_may_be_asked_for_before_the_last_has_returned() -> None:
    async def work(group: Group) -> Any:
        vectors = [Vector(f"v{k}", torch.full((100,), float(k + group.rank))) for k in range(4)]
        runtime = ranks.cluster.runtime(group.names[group.rank])
        await runtime.gather(*(group.allreduce(vector.all) for vector in vectors))
        return [vector.tensor[0].item() for vector in vectors]

    ranks = VirtualRanks(3, config=RACK)
    for outcome in ranks.run(work, how="butterfly"):
        assert outcome == [3.0, 6.0, 9.0, 12.0]


def test_ranks_that_do_different_things_are_told() -> None:
    async def work(group: Group) -> None:
        await group.allreduce(Vector("v", torch.zeros(100 + group.rank // 2)).all)

    outcomes = VirtualRanks(3, config=RACK).run(work)
    assert all(isinstance(outcome, ConfigError | PeerLostError) for outcome in outcomes)
    assert any("all ranks must call the same operations" in str(outcome) for outcome in outcomes)


def test_an_operation_that_is_given_up_fails_for_all() -> None:
    async def work(group: Group) -> None:
        if group.rank == 1:
            raise ValueError("not today")
        await group.allreduce(Vector("v", torch.zeros(100)).all)

    outcomes = VirtualRanks(4, config=RACK).run(work, how="butterfly")
    for rank in (0, 2, 3):
        assert isinstance(outcomes[rank], PeerLostError)
        assert outcomes[rank].peer == "worker-1"


def test_a_shape_only_moves_sizes_only() -> None:
    config = SimulationConfig(
        shape_only=True, network=Network(bandwidth_bytes_s=1e9, link=Link(latency_s=1e-3))
    )

    async def work(group: Group) -> float:
        runtime = ranks.cluster.runtime(group.names[group.rank])
        vector = group.allocate(25_000_000, torch.float32, "gradient")
        begun_ns = runtime.now()
        await group.allreduce(vector.all)
        return (runtime.now() - begun_ns) / 1e9

    ranks = VirtualRanks(4, config=config)
    outcomes = ranks.run(work)
    assert max(outcomes) == pytest.approx(0.15, rel=0.1)  # 1.5 times 100 MB through cards of 1 GB/s
