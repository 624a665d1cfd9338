"""The choice of an algorithm by measured figures, and of a kind of group by where its ranks are."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch

import gradstream as gs
from gradstream.collectives.algorithms import ALGORITHMS, hierarchical
from gradstream.collectives.autotune import TIE, Choice, MeasuredCosts
from gradstream.collectives.factory import form_group
from gradstream.collectives.group import Group, GroupMembers
from gradstream.collectives.message_group import HierarchicalGroup, MessageGroup
from gradstream.collectives.shm.group import SharedGroup
from gradstream.errors import ConfigError, PeerLostError, UnknownNameError
from gradstream.memory import Vector
from gradstream.runtime import Cost, Link, Network, RealRuntime, SimulationConfig
from gradstream.telemetry.events import GroupEvent
from gradstream.testing.pairs import SECRET
from gradstream.testing.runs import least_squares
from gradstream.transport.base import Identity
from gradstream.transport.carriers import make_endpoint
from kit.group_runs import VirtualRanks
from kit.schedule_checks import execute

LAYOUTS = (
    [[0, 1], [2, 3]],
    [[0, 2, 4], [1, 3, 5]],
    [[0], [1, 2, 3]],
    [[0, 1, 2], [3, 4]],
    [[0, 1], [2], [3, 4, 5]],
)

WAITED_S = 2.0


# ---- pure --------------------------------------------------------------------------------


@pytest.mark.parametrize("hosts", LAYOUTS, ids=str)
def test_hierarchical_sums(hosts: list[list[int]]) -> None:
    size = sum(map(len, hosts))
    for elems in (0, 1, 5, 6, 7, 1000):
        vectors = list(np.random.default_rng(0).integers(-9, 9, (size, elems)).astype(np.float32))
        expected = np.add.reduce(vectors, axis=0)
        tally = execute([hierarchical.allreduce(rank, hosts, elems) for rank in range(size)], vectors)
        for vector in vectors:
            np.testing.assert_array_equal(vector, expected)
        if len({len(host) for host in hosts}) == 1:
            m, g = len(hosts), len(hosts[0])
            assert tally.elems == 2 * (size - 1) * elems
            if elems >= size:
                assert tally.messages == 2 * m * g * (g - 1) + 2 * g * m * (m - 1)
                assert tally.depth == sum(cost.alphas for cost in hierarchical.costs(m, g))
    between = [
        s for r in range(size) for s in hierarchical.allreduce(r, hosts, 960) if away(r, s.peer, hosts)
    ]
    m = len(hosts)
    assert sum(step.stop - step.start for step in between) // 2 == 2 * (m - 1) * 960  # each sent and received


def away(rank: int, peer: int, hosts: list[list[int]]) -> bool:
    return next(host for host in hosts if rank in host) != next(host for host in hosts if peer in host)


def test_the_cheapest_by_size() -> None:
    choice = Choice(8, MeasuredCosts(1e-4, 1e-9, 0.0, 1e-4))
    for num_bytes in (0, 1000, 10**5, 10**7, 10**9):
        best = choice.allreduce(num_bytes)
        cheapest_s = min(choice.seconds(name, num_bytes) for name in ALGORITHMS)
        if best == "ring":
            assert choice.seconds(best, num_bytes) <= (1 + TIE) * cheapest_s
        else:
            assert choice.seconds(best, num_bytes) == cheapest_s
            assert choice.seconds("ring", num_bytes) > (1 + TIE) * cheapest_s
    table = choice.table()
    assert list(table) == sorted(table)
    assert table[0] == "butterfly"
    assert table[max(table)] == "ring"
    for edge in list(table)[1:]:  # where two formulas cross, or the ring is as good as another
        assert choice.allreduce(edge - 1) != choice.allreduce(edge)


@pytest.mark.parametrize(("size", "factor"), [(4, 4.0), (8, 2.4)])
def test_butterfly_and_halving_doubling_cross_where_the_sheet_says(size: int, factor: float) -> None:
    """n* = α lg p / (β (lg p - 2(p-1)/p))."""
    choice = Choice(size, MeasuredCosts(1e-4, 1e-9, 0.0, 0.0))
    at = round(factor * 1e-4 / 1e-9)
    first, second = "butterfly", "halving-doubling"
    assert choice.seconds(first, at) == pytest.approx(choice.seconds(second, at))
    assert choice.seconds(first, at // 2) < choice.seconds(second, at // 2)
    assert choice.seconds(first, at * 2) > choice.seconds(second, at * 2)


# ---- on virtual time ---------------------------------------------------------------------


def test_figures_are_those_of_the_network() -> None:
    network = Network(bandwidth_bytes_s=1e8, link=Link(latency_s=2e-3), header_bytes=0)
    config = SimulationConfig(costs={"reduce": Cost(per_elem_s=4e-10)}, network=network)
    events: list[Any] = []

    async def work(group: Group) -> MeasuredCosts:
        assert isinstance(group, MessageGroup)
        assert group.choice is not None
        return group.choice.figures

    outcomes = VirtualRanks(5, config=config).run(work, how="auto", on_event=events.append)
    for found in outcomes:
        assert found == outcomes[0]
        assert found.alpha_s == pytest.approx(2e-3, rel=1e-3)
        assert found.beta_s_byte == pytest.approx(1e-8, rel=1e-3)
        assert found.gamma_s_byte == pytest.approx(1e-10, rel=1e-3)
        assert found.message_s < 1e-6
    (event,) = events
    assert isinstance(event, GroupEvent)
    assert event.kind == "messages"
    assert list(event.choices.values())[-2:] == ["direct", "ring"]  # 2α, until that is next to nothing
    assert event.alpha_s == outcomes[0].alpha_s


@pytest.mark.parametrize("far", [[3], [0, 1, 2, 3]])
def test_bytes_are_measured_though_a_rank_is_far_away(far: list[int]) -> None:
    """Its neighbours have each message late, which says nothing of bytes. On this network a megabyte takes 8 ms."""
    names, away_s = [f"worker-{rank}" for rank in range(4)], 0.05
    distant = {names[rank] for rank in far}
    links = {pair: Link(latency_s=away_s) for pair in permutations(names, 2) if distant & {*pair}}
    network = Network(bandwidth_bytes_s=1.25e8, link=Link(latency_s=1e-4), links=links, header_bytes=0)

    async def work(group: Group) -> MeasuredCosts:
        assert isinstance(group, MessageGroup) and group.choice is not None
        return group.choice.figures

    found = VirtualRanks(4, config=SimulationConfig(network=network)).run(work, how="auto")[0]
    assert found.alpha_s == pytest.approx(away_s, rel=0.01)
    assert found.beta_s_byte == pytest.approx(8e-9, rel=0.1)


@pytest.mark.parametrize("hosts", ["aabb", "aaabbb", "aabbccdd", "aaaabbbbccccdddd" * 2])
def test_two_storeys_take_the_seconds_of_their_formula(hosts: str) -> None:
    size, m = len(hosts), len(set(hosts))
    elems, alpha_s, bytes_s = 1000 * size, 1e-3, 1e9
    network = Network(bandwidth_bytes_s=bytes_s, link=Link(latency_s=alpha_s), header_bytes=0)
    config = SimulationConfig(costs={"reduce": Cost()}, network=network, shape_only=True)

    async def work(group: Group) -> float:
        span = group.allocate(elems, torch.float32, "gradient").all
        await ranks.cluster.runtime(group.names[group.rank]).sleep(1 - ranks.now_s)
        await group.allreduce(span)
        return ranks.now_s - 1

    ranks = VirtualRanks(size, config=config)
    took_s = max(ranks.run(work, how="hierarchical", hosts=hosts))
    costs = hierarchical.costs(m, size // m)
    assert took_s == pytest.approx(sum(cost.seconds(4 * elems, alpha_s, 1 / bytes_s) for cost in costs), 1e-6)


@pytest.mark.parametrize("hosts", ["aabb", "abab", "aaabb", "abbb"])
def test_ranks_on_hosts(hosts: str) -> None:
    size = len(hosts)
    parts = np.random.default_rng(1).integers(-99, 99, (size, 500)).astype(np.float32)

    async def work(group: Group) -> Any:
        vector = Vector("v", torch.from_numpy(parts[group.rank].copy()))
        await group.allreduce(vector.all)
        return vector.tensor.numpy()

    network = Network(link=Link(latency_s=1e-3, jitter_s=1e-3))
    for outcome in VirtualRanks(size, config=SimulationConfig(network=network)).run(
        work, how="auto", hosts=hosts
    ):
        np.testing.assert_array_equal(outcome, parts.sum(axis=0))


async def in_two_storeys(group: Group) -> Any:
    """A hierarchical group made of message groups alone: ranks 0 and 1 on one host, 2 and 3 on another."""
    assert isinstance(group, MessageGroup)
    communicator = group._communicator
    rank = communicator.rank
    own, across = ([0, 1], [2, 3])[rank // 2], ([0, 2], [1, 3])[rank % 2]
    inside, between = MessageGroup(communicator, ranks=own), MessageGroup(communicator, ranks=across)
    composite = HierarchicalGroup(communicator, inside, between, group)
    vector = Vector("v", torch.arange(300.0) + rank)
    await composite.allreduce(vector.all, weight=2.0)
    found = vector.tensor.numpy().copy()
    await composite.broadcast(vector.all, root=3)
    await composite.all_gather(vector.all)
    own_slice = await composite.reduce_scatter(vector.all)
    assert own_slice.tensor.tolist() == (4 * found)[own_slice.start : own_slice.stop].tolist()
    return found


def test_groups_of_groups() -> None:
    for outcome in VirtualRanks(4).run(in_two_storeys):
        np.testing.assert_array_equal(outcome, 2 * (4 * np.arange(300.0) + 6))


def test_groups_of_groups_name_who_was_killed() -> None:
    failed = 0
    for number in range(1, 30):
        ranks = VirtualRanks(4, seed=number)
        ranks.kill_at_chunk(number % 4, number)
        outcomes = ranks.run(in_two_storeys)
        assert ranks.killed is not None
        for rank in {0, 1, 2, 3} - {number % 4}:
            if isinstance(outcomes[rank], Exception):
                failed += 1
                assert isinstance(outcomes[rank], PeerLostError), outcomes[rank]
                assert outcomes[rank].peer == f"worker-{number % 4}", outcomes[rank]
    assert failed > 60


# ---- for real ----------------------------------------------------------------------------


def really(
    size: int, work: Callable[[Group], Coroutine[Any, Any, Any]], *, hosts: Sequence[str] = (), **options: Any
) -> list[Any]:
    """The results of `work` at all ranks, which are in this process and use the carrier of the options."""
    names = [f"worker-{rank}" for rank in range(size)]
    carrier = options.pop("carrier", "auto")

    async def live(rank: int, endpoint: Any, runtime: RealRuntime) -> Any:
        host = hosts[rank] if hosts else ""
        group = await form_group(runtime, endpoint, GroupMembers(names, rank, 1, 10.0), host=host, **options)
        try:
            return await work(group)
        finally:
            await group.close()

    async def main() -> list[Any]:
        runtimes = [RealRuntime(name) for name in names]
        job = f"test-{os.getpid()}"
        endpoints = [
            make_endpoint(Identity(job, n, 1, secret=SECRET), r, carrier)
            for n, r in zip(names, runtimes, strict=True)
        ]
        for endpoint in endpoints:
            await endpoint.start()
        for endpoint in endpoints:
            for other in endpoints:
                endpoint.know(other.identity.name, other.address)
        try:
            lives = (live(*one) for one in zip(range(size), endpoints, runtimes, strict=True))
            return list(await asyncio.gather(*lives))
        finally:
            for endpoint in endpoints:
                await endpoint.close()
            for runtime in runtimes:
                runtime.close()

    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(2e-4)
    try:
        return asyncio.run(main())
    finally:
        sys.setswitchinterval(interval_s)


async def kind_and_sum(group: Group) -> tuple[str, float]:
    vector = group.allocate(70_001, torch.float32, "v")
    vector.tensor.fill_(group.rank + 1.0)
    total = await group.allreduce(vector.all)
    values = set(total.tensor.tolist())
    assert len(values) == 1
    return type(group).__name__, values.pop()


@pytest.mark.parametrize("carrier", ["grpc", "tcp", "shm"])
@pytest.mark.parametrize("how", ["messages", "butterfly", "ring"])
def test_four_ranks_over(carrier: str, how: str) -> None:
    assert really(4, kind_and_sum, how=how, carrier=carrier) == [("MessageGroup", 10.0)] * 4


@pytest.mark.parametrize("how", ["auto", *ALGORITHMS])
def test_up_to_16_ranks_of_vectors_shorter_than_the_ranks(how: str) -> None:
    async def work(group: Group) -> list[list[float]]:
        sums = []
        for elems in (0, 1, group.size - 1, group.size + 1, 1000):
            vector = group.allocate(elems, torch.float32, f"v{elems}")
            vector.tensor.copy_(torch.arange(elems) % 7 + group.rank)
            sums.append((await group.allreduce(vector.all)).tensor.tolist())
        return sums

    for size in (1, 2, 3, 7, 16) if how in ("auto", "ring") else (5, 16):
        ranks = range(size)
        expected = [
            [sum(index % 7 + rank for rank in ranks) for index in range(elems)]
            for elems in (0, 1, size - 1, size + 1, 1000)
        ]
        assert really(size, work, how=how) == [expected] * size


@pytest.mark.parametrize("carrier", ["grpc", "tcp", "shm", "in place"])
def test_waiting_for_a_rank_costs_nothing(carrier: str) -> None:
    async def work(group: Group) -> float:
        vector = group.allocate(100, torch.float32, "v")
        await group.allreduce(vector.all)
        begun_s = time.process_time()
        if group.rank == 1:
            await asyncio.sleep(WAITED_S)
        await group.allreduce(vector.all)
        return time.process_time() - begun_s

    options = {"how": "auto"} if carrier == "in place" else {"how": "ring", "carrier": carrier}
    assert max(really(2, work, **options)) < 0.05 * WAITED_S  # of both ranks: they are in one process


def test_on_one_host_memory_is_shared() -> None:
    assert really(3, kind_and_sum) == [(SharedGroup.__name__, 6.0)] * 3


def test_on_two_hosts_memory_is_shared_inside() -> None:
    assert really(4, kind_and_sum, hosts="aabb") == [(HierarchicalGroup.__name__, 10.0)] * 4


def test_what_cannot_be_had_is_said() -> None:
    with pytest.raises(ConfigError, match="cannot share memory"):
        really(2, kind_and_sum, hosts="ab", how="shared")
    with pytest.raises(UnknownNameError, match="did you mean 'ring'"):
        really(1, kind_and_sum, how="rong")


def test_a_run_says_how_its_group_sums() -> None:
    model, data = least_squares(16, 4)
    options: dict[str, Any] = {"workers": 4, "batch_size": 2, "epochs": 1, "optimizer": gs.optim.SGD(lr=0.01)}
    run = gs.simulate(model, data, strategy=gs.AllReduce(), **options)
    assert re.fullmatch(r"messages: .*; alpha [\d.]+ µs, beta [\d.]+ s/GB", run.summary["group"])
    run = gs.simulate(model, data, strategy=gs.AllReduce(algorithm="ring"), **options)
    assert run.summary["group"] == "messages: ring"
    assert gs.simulate(model, data, strategy="synchronous", **options).summary["group"] is None
