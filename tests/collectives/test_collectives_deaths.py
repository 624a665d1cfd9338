"""A rank dies or falls silent at any point of any algorithm: all others learn its name within the deadline."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from gradstream.collectives.algorithms import ALGORITHMS
from gradstream.collectives.communicator import BEATS
from gradstream.collectives.group import Group
from gradstream.errors import DeadlineError, PeerLostError
from gradstream.memory import Vector
from gradstream.runtime import Link, Network, Partition, SimulationConfig
from kit.group_runs import VirtualRanks
from kit.schedule_checks import check_allreduce
from standstill import Standstill

SIZE, ELEMS, SILENCE_S = 4, 64, 1.0
NETWORK = Network(bandwidth_bytes_s=1e7, link=Link(latency_s=1e-3, jitter_s=1e-3))


async def twice(group: Group) -> Any:
    """Two sums, the second of the first one's result, and then an operation of the broken group."""
    vector = Vector("v", torch.full((ELEMS,), float(group.rank)))
    try:
        await group.allreduce(vector.all)
        await group.allreduce(vector.all)
    except Exception as error:
        with pytest.raises(type(error), match=re.escape(str(error))):
            await group.allreduce(vector.all)
        raise
    return vector.tensor.tolist()


@pytest.mark.parametrize("piece_elems", [ELEMS, ELEMS // 8], ids=["short", "in pieces"])
@pytest.mark.parametrize("how", ALGORITHMS)
def test_killed_at_each_chunk(how: str, piece_elems: int) -> None:
    """Kills one rank or another at every chunk of both sums, or at some chunks if there are many pieces."""
    messages = 2 * check_allreduce(ALGORITHMS[how].schedule, SIZE, ELEMS).messages
    right = [float(sum(range(SIZE)) * SIZE)] * ELEMS
    failed = 0
    for number in range(1, messages + 1):
        victim = (number + number // SIZE) % SIZE
        ranks = VirtualRanks(SIZE, seed=number, config=SimulationConfig(network=NETWORK))
        ranks.kill_at_chunk(victim, number)
        outcomes = ranks.run(twice, how=how, silence_s=SILENCE_S, piece_bytes=4 * piece_elems)
        assert ranks.killed is not None, f"the fault at chunk {number} never fired"
        assert ranks.killed[0] == victim
        for rank, outcome in enumerate(outcomes):
            if rank == victim or outcome == right:
                continue  # it has got all it needed from the victim before
            failed += 1
            assert isinstance(outcome, PeerLostError), (number, rank, outcome)
            assert outcome.peer == f"worker-{victim}", (number, rank, outcome)
            assert ranks.ended_s[rank] - ranks.killed[1] < 0.1, (number, rank)  # a broken connection is seen
    assert failed > messages


def test_killed_in_an_operation_inside_of_another_one() -> None:
    """As in a group of several hosts. The loss ends both, and whoever waits for it to be told."""

    async def nested(group: Group) -> None:
        vector = Vector("v", torch.zeros(ELEMS))
        await group._communicator.guarded(group.allreduce(vector.all))  # type: ignore[attr-defined]

    for number in range(1, 13):
        ranks = VirtualRanks(SIZE, seed=number, config=SimulationConfig(network=NETWORK))
        ranks.kill_at_chunk(1, number)
        outcomes = ranks.run(nested, silence_s=SILENCE_S)
        for rank in (0, 2, 3):
            assert isinstance(outcomes[rank], PeerLostError), (number, rank, outcomes[rank])
            assert outcomes[rank].peer == "worker-1"


@pytest.mark.parametrize("how", ALGORITHMS)
def test_silent_from_any_moment(how: str) -> None:
    """A cable is pulled: no rank gets a report, and all notice the silence."""

    async def many(group: Group) -> None:
        vector = Vector("v", torch.zeros(ELEMS))
        for _ in range(1000):
            await group.allreduce(vector.all)

    victim, others = "worker-1", frozenset({"worker-0", "worker-2", "worker-3"})
    for start_s in (0.05, 0.0537, 0.06, 0.0713):
        cuts = [Partition(start_s, 1e9, frozenset({victim}), others)]
        cuts.append(Partition(start_s, 1e9, others, frozenset({victim})))
        network = Network(bandwidth_bytes_s=1e7, link=NETWORK.link, partitions=cuts)
        ranks = VirtualRanks(SIZE, config=SimulationConfig(network=network))
        outcomes = ranks.run(many, how=how, silence_s=SILENCE_S)
        for rank in (0, 2, 3):
            assert isinstance(outcomes[rank], DeadlineError), outcomes[rank]
            assert outcomes[rank].peer == victim, outcomes[rank]
            assert ranks.ended_s[rank] - start_s < SILENCE_S * (1 + 1 / BEATS) + 0.01
        assert isinstance(outcomes[1], DeadlineError)  # to the victim, all others are silent


def test_who_is_slow_is_not_silent() -> None:
    """A rank that computes for a hundred deadlines gives signs of life meanwhile."""

    async def work(group: Group) -> float:
        runtime = ranks.cluster.runtime(group.names[group.rank])
        vector = Vector("v", torch.ones(ELEMS))
        if group.rank == 2:
            await runtime.sleep(100 * SILENCE_S)
        await group.allreduce(vector.all)
        return vector.tensor[0].item()

    ranks = VirtualRanks(SIZE, config=SimulationConfig(network=NETWORK))
    assert ranks.run(work, silence_s=SILENCE_S) == [4.0] * SIZE


@pytest.mark.parametrize("hosts", ["aabb", "abbb"])
def test_killed_in_two_storeys(hosts: str) -> None:
    messages, failed = 12, 0
    for number in range(1, messages + 1):
        victim = (number + number // SIZE) % SIZE
        ranks = VirtualRanks(SIZE, seed=number, config=SimulationConfig(network=NETWORK))
        ranks.kill_at_chunk(victim, number)
        outcomes = ranks.run(twice, how="hierarchical", hosts=hosts, silence_s=SILENCE_S)
        assert ranks.killed is not None
        for rank in {0, 1, 2, 3} - {victim}:
            if outcomes[rank] == [24.0] * ELEMS:
                continue  # it has got all it needed before
            failed += 1
            assert isinstance(outcomes[rank], PeerLostError), (number, rank, outcomes[rank])
            assert outcomes[rank].peer == f"worker-{victim}"
    assert failed > 2 * messages


def test_who_never_comes_is_named() -> None:
    async def work(group: Group) -> None:
        raise AssertionError("there is no group")

    for absent in range(3):
        outcomes = VirtualRanks(3, config=SimulationConfig(network=NETWORK)).run(
            work, absent=[absent], silence_s=SILENCE_S
        )
        for rank in {0, 1, 2} - {absent}:
            assert isinstance(outcomes[rank], DeadlineError)
            assert outcomes[rank].peer == f"worker-{absent}"
            assert "has not come to the group" in str(outcomes[rank])


async def many(group: Group) -> int:
    """Sums for three times the silence that is allowed."""
    vector = Vector("v", torch.zeros(ELEMS))
    for _ in range(30):
        await group.allreduce(vector.all)
        await group._communicator.runtime.sleep(SILENCE_S / 10)  # type: ignore[attr-defined]
    return 30


@pytest.mark.parametrize("how", ALGORITHMS)
def test_a_rank_that_stands_still_for_less_loses_nobody(how: str) -> None:
    ranks = VirtualRanks(SIZE, config=SimulationConfig(network=NETWORK))
    with Standstill(ranks.cluster, "worker-1", 0.5, 0.5 + 0.9 * SILENCE_S):
        assert ranks.run(many, how=how, silence_s=SILENCE_S) == [30] * SIZE


@pytest.mark.parametrize("how", ALGORITHMS)
def test_a_rank_that_stands_still_for_longer_is_lost_and_knows_that_it_is_the_one(how: str) -> None:
    ranks = VirtualRanks(SIZE, config=SimulationConfig(network=NETWORK))
    with Standstill(ranks.cluster, "worker-1", 0.5, 0.5 + 3 * SILENCE_S):
        for outcome in ranks.run(many, how=how, silence_s=SILENCE_S):
            assert isinstance(outcome, DeadlineError), outcome
            assert outcome.peer == "worker-1", outcome
