"""Exchanges of pairs on virtual time: what each gets, what becomes of them at deaths, and who is not delayed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from gradstream.collectives import pairwise
from gradstream.collectives.pairwise import PairwiseExchange
from gradstream.runtime.simulation import Link, Network, Partition, SimulationConfig
from gradstream.runtime.virtual import VirtualCluster
from gradstream.transport.base import Identity
from gradstream.transport.simulated import MemoryEndpoint, MemoryNetwork

ELEMS, SILENCE_S = 1000, 2.0
NETWORK = Network(bandwidth_bytes_s=1e6, link=Link(latency_s=1e-3))
"""A vector takes 8 ms."""


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vector has eight chunks."""
    monkeypatch.setattr(pairwise, "PIECE_BYTES", 1000)


class Nodes:
    """Some nodes that exchange; each gives its rank, and has what it got in `got`.

    Attributes:
        why: what `meet` has returned, by (rank, round).
        ended_s: virtual time at which it did.
    """

    def __init__(self, count: int, *, network: Network = NETWORK, seed: int = 0) -> None:
        self.cluster = VirtualCluster(seed, SimulationConfig(network=network))
        self.network = MemoryNetwork(self.cluster)
        self.names = [f"worker-{rank}" for rank in range(count)]
        self.got: dict[tuple[int, int], list[float]] = {}
        self.why: dict[tuple[int, int], str] = {}
        self.ended_s: dict[tuple[int, int], float] = {}
        self.chunks = 0
        self.doomed = (-1, -1)  # rank, and the number of the chunk at whose arrival it dies
        self._endpoints: list[MemoryEndpoint] = []
        self._pairwise: list[PairwiseExchange] = []
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def run(
        self,
        plans: Sequence[Sequence[tuple[float, int, int | tuple[int, int]]]],
        lost: tuple[float, int, str] | None = None,
    ) -> None:
        """Lets each rank go through its plan: (seconds of computing, round, partner; or (to, giver)).

        Args:
            plans: by rank.
            lost: when which rank hears that which node is lost.
        """

        async def lose(seconds: float, rank: int, name: str) -> None:
            await self.cluster.runtime("director").sleep(seconds)
            self._pairwise[rank].lost(name, "was lost, as the coordinator says")

        async def live(rank: int, plan: Sequence[tuple[float, int, int | tuple[int, int]]]) -> None:
            runtime = self.cluster.runtime(self.names[rank])
            own, into = (runtime.memory.allocate(ELEMS, torch.float64, name) for name in ("own", "into"))
            for seconds, number, partner in plan:
                await runtime.sleep(seconds)
                own.tensor.fill_(10 * number + rank)
                key = rank, number
                if isinstance(partner, tuple):
                    to, giver = (self.names[one] for one in partner)
                    why = await self._pairwise[rank].pass_on(number, to, giver, [own.all], [into.all])
                    self.why[key] = ", ".join(filter(None, why))
                else:
                    name = "" if partner < 0 else self.names[partner]
                    self.why[key] = await self._pairwise[rank].swap(number, name, [own.all], [into.all])
                self.got[key] = sorted(set(into.tensor.tolist()))
                self.ended_s[key] = self.cluster.clock.now_ns / 1e9
            self._pairwise[rank].end()

        async def main() -> None:
            for name in self.names:
                endpoint = self._endpoint(name)
                await endpoint.start()
                self._endpoints.append(endpoint)
                self._pairwise.append(PairwiseExchange(self.cluster.runtime(name), endpoint, SILENCE_S))
                self._pairwise[-1].serve()
            for endpoint in self._endpoints:
                for other in self._endpoints:
                    endpoint.know(other.identity.name, other.address)
            if lost is not None:
                self.cluster.runtime("director").spawn(lose(*lost), name="loss")
            loop = asyncio.get_running_loop()
            self._tasks = {rank: loop.create_task(live(rank, plan)) for rank, plan in enumerate(plans)}
            for task in self._tasks.values():
                await asyncio.gather(task, return_exceptions=True)

        self.cluster.run(main())

    def _endpoint(self, name: str) -> MemoryEndpoint:
        nodes = self

        class Counting(MemoryEndpoint):
            """Counts each chunk before it is read."""

            def _keep(self, stream: Any) -> None:
                super()._keep(stream)
                arrived = stream.arrived

                def counted(frame: Any, payload: Any, **how: Any) -> None:
                    if frame.HasField("chunk"):
                        nodes.chunks += 1
                        if nodes.chunks == nodes.doomed[1]:
                            nodes.kill(nodes.doomed[0])
                    arrived(frame, payload, **how)

                stream.arrived = counted

        identity = Identity("job", name, 1, members=dict.fromkeys(self.names, 1))
        return Counting(identity, self.cluster.runtime(name), self.network)

    def kill(self, rank: int) -> None:
        """Kills a node, as SIGKILL does."""
        self.network.kill(self.names[rank])
        self.cluster.runtime(self.names[rank]).kill()
        self.cluster.runtime("director").spawn(self._bury(self._tasks[rank]), name="burial")

    async def _bury(self, task: asyncio.Task[None]) -> None:
        while not task.done():
            task.cancel()
            await self.cluster.runtime("director").sleep(1e-3)


def test_each_has_what_the_other_gave() -> None:
    nodes = Nodes(4)
    nodes.run(
        [[(0, 0, 1), (0, 1, 2)], [(0.5, 0, 0), (0, 1, 3)], [(0, 0, 3), (0, 1, 0)], [(0, 0, 2), (0, 1, 1)]]
    )
    assert set(nodes.why.values()) == {""}
    assert {key: one for key, (one,) in nodes.got.items()} == {
        (0, 0): 1, (1, 0): 0, (2, 0): 3, (3, 0): 2, (0, 1): 12, (1, 1): 13, (2, 1): 10, (3, 1): 11,
    }  # fmt: skip
    assert (
        nodes.ended_s[2, 0] < 0.03 < 0.5 < nodes.ended_s[1, 0] < 0.53
    )  # both directions at once: 8 ms, not 16


@pytest.mark.parametrize(("partner", "late_s"), [(2, 0.0), (-1, 0.0), (2, 5.0)])
def test_who_takes_a_node_for_its_partner_that_meets_another_goes_on_alone(
    partner: int, late_s: float
) -> None:
    """As after a loss of which one has heard, and another has not; also if the wait is longer than the silence."""
    nodes = Nodes(3)
    nodes.run([[(0, 4, 1)], [(late_s, 4, partner)], [(late_s, 4, 1)] if partner == 2 else [(0, 4, -1)]])
    assert "goes through this round without" in nodes.why[0, 4] and "worker-1" in nodes.why[0, 4]
    assert nodes.ended_s[0, 4] == pytest.approx(late_s, abs=0.1)
    assert nodes.why[1, 4] == ("" if partner == 2 else "there is no partner")


def test_what_comes_for_an_older_round_is_never_part_of_the_present_one() -> None:
    """Rank 0 is at round 3 when rank 1 is at round 5 with it, and then meets it there."""
    nodes = Nodes(2)
    nodes.run([[(0.2, 3, 1), (0, 5, 1)], [(0, 5, 0)]])
    assert "goes through this round without" in nodes.why[0, 3]
    assert nodes.why[0, 5] == nodes.why[1, 5] == "" and nodes.got[1, 5] == [50] and nodes.got[0, 5] == [51]


def test_a_node_that_has_ended_keeps_nobody_waiting() -> None:
    nodes = Nodes(2)
    nodes.run([[(0, 0, 1), (0, 1, 1)], [(0, 0, 0)]])
    assert "goes through this round without" in nodes.why[0, 1] and nodes.ended_s[0, 1] < 0.1


@pytest.mark.parametrize("chunk", range(1, 17))
def test_a_death_at_any_chunk_costs_the_partner_this_round_and_others_nothing(chunk: int) -> None:
    """Ranks 2 and 3 end each round at the time at which they end it without a death."""
    plans: list[list[tuple[float, int, int]]] = [
        [(0, 0, 1), (0.05, 1, 2)], [(0, 0, 0), (0.05, 1, 3)], [(0, 0, 3), (0.05, 1, 0)], [(0, 0, 2), (0.05, 1, -1)],
    ]  # fmt: skip
    whole, nodes = Nodes(4), Nodes(4)
    whole.run(plans)
    nodes.doomed = 1, 2 * chunk  # chunks of both pairs arrive alternately
    nodes.run(plans)
    assert "worker-1" in nodes.why[0, 0] if chunk < 15 else nodes.why[0, 0] or nodes.got[0, 0] == [1]
    assert nodes.why[0, 1] == "" and nodes.got[0, 1] == [12]
    for key in ((2, 0), (3, 0)):
        assert nodes.ended_s[key] == pytest.approx(whole.ended_s[key], abs=1e-9)
    assert nodes.ended_s[2, 1] <= whole.ended_s[2, 1] + 1e-9


@pytest.mark.parametrize("start_s", [0.0, 0.004, 0.009])
def test_a_link_that_is_cut_is_given_up_after_the_silence_by_both(start_s: float) -> None:
    """And the round after that has new vectors, not those that were on their way."""
    ends = frozenset({"worker-0"}), frozenset({"worker-1"})
    cuts = [Partition(start_s, 3.0, *ends), Partition(start_s, 3.0, *reversed(ends))]
    nodes = Nodes(2, network=Network(bandwidth_bytes_s=1e6, link=Link(latency_s=1e-3), partitions=cuts))
    nodes.run([[(0.001, 0, 1), (4.0, 1, 1)], [(0.001, 0, 0), (4.0, 1, 0)]])
    for rank, other in ((0, 1), (1, 0)):
        assert f"worker-{other}" in nodes.why[rank, 0] and nodes.ended_s[rank, 0] < 1.5 * SILENCE_S
        assert nodes.why[rank, 1] == "" and nodes.got[rank, 1] == [10 + other]


@pytest.mark.parametrize("seed", range(6))
def test_streams_that_come_twice_and_late_change_nothing(seed: int) -> None:
    link = Link(latency_s=1e-3, jitter_s=5e-3, duplicate=0.7)
    nodes = Nodes(2, network=Network(bandwidth_bytes_s=1e6, link=link), seed=seed)
    rounds = range(6)
    nodes.run([[(0, number, 1) for number in rounds], [(0, number, 0) for number in rounds]])
    assert set(nodes.why.values()) == {""}
    assert all(nodes.got[rank, number] == [10 * number + 1 - rank] for rank in (0, 1) for number in rounds)


def test_a_node_that_is_no_member_any_more_is_given_up_at_once() -> None:
    nodes = Nodes(2)
    nodes.run([[(0, 0, 1)], [(5.0, 0, 0)]], lost=(0.3, 0, "worker-1"))
    assert nodes.why[0, 0] == "worker-1: was lost, as the coordinator says"
    assert nodes.ended_s[0, 0] == pytest.approx(0.3)


def test_each_takes_from_one_what_it_does_not_give_to_that_one() -> None:
    nodes = Nodes(3)
    nodes.run([[(0.1 * rank, 0, ((rank + 1) % 3, (rank - 1) % 3))] for rank in range(3)])
    assert set(nodes.why.values()) == {""}
    assert [nodes.got[rank, 0] for rank in range(3)] == [[2], [0], [1]]


@pytest.mark.parametrize("chunk", range(1, 25, 3))
def test_a_death_in_a_ring_costs_its_two_neighbours_a_half(chunk: int) -> None:
    """Rank 0 gives to 1, which dies, 2 takes from it; what 0 takes from 2 is not touched."""
    nodes = Nodes(3)
    nodes.doomed = 1, chunk
    nodes.run([[(0, 0, ((rank + 1) % 3, (rank - 1) % 3))] for rank in range(3)])
    assert nodes.got[0, 0] == [2]
    assert all("worker-1" in nodes.why[rank, 0] for rank in (0, 2)) or chunk > 20
    assert max(nodes.ended_s[rank, 0] for rank in (0, 2)) < 0.1


@pytest.mark.parametrize("other", [(0, 0), (2, 2), (0, 2), (2, 0)])
def test_views_that_differ_keep_nobody_waiting(other: tuple[int, int]) -> None:
    """Rank 0 takes rank 1 for both of its neighbours, rank 1 has others, and rank 2 is at another round already."""
    nodes = Nodes(3)
    nodes.run([[(0, 0, (1, 1))], [(0, 0, other)], [(0, 7, -1)]])
    assert max(nodes.ended_s.values()) < 0.1
    assert (nodes.why[0, 0] == "") is (other == (0, 0))
    assert (nodes.got[0, 0] == [1]) is (other[0] == 0)
