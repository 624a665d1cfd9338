"""The coordinator is silent, or a member is, for a part of the lease or for longer: on virtual time."""

from __future__ import annotations

from typing import Any

import pytest

from gradstream.coordinator import EvictedError
from gradstream.errors import GradstreamError, PeerLostError
from gradstream.runtime import Network, Partition
from membership_cluster import DEADLINES, SPEC, Cluster
from standstill import Standstill

LEASE_S, BEGIN_S = DEADLINES.lease_s, 1.3
DIRECTIONS = ["from the member", "to the member"]


def cut(direction: str, seconds: float) -> Network:
    """One direction between worker 1 and the coordinator, for so long."""
    there, coordinator = frozenset({"worker-1"}), frozenset({"coordinator"})
    ends = (there, coordinator) if direction == "from the member" else (coordinator, there)
    return Network(partitions=[Partition(BEGIN_S, BEGIN_S + seconds, *ends)])


def run(
    network: Network,
    seconds: float,
    stands: tuple[str, float, bool] | None = None,
) -> tuple[Cluster, dict[str, Any]]:
    """A run that goes on for so long; and what its members failed with, if they did.

    Args:
        stands: a node, for how many leases it stands still, and whether it notices.
    """
    cluster = Cluster(network=network)
    ends: dict[str, Any] = {}

    async def present(name: str) -> None:
        member = await cluster.member(name)
        await member.join(SPEC if name.startswith("worker") else None)
        try:
            await member.over()
        except GradstreamError as error:
            ends[name] = error
            await member.leave()

    async def main() -> None:
        director = cluster.virtual.runtime("director")
        coordinator = await cluster.coordinator()
        director.spawn(cluster.conclude(coordinator), name="coordinator")
        for name in ("shard-0", "worker-0", "worker-1"):
            director.spawn(present(name), name=name)
        await director.sleep(seconds)

    if stands is None:
        cluster.virtual.run(main())
    else:
        node, leases, noticed = stands
        until_s = BEGIN_S + leases * LEASE_S
        with Standstill(cluster.virtual, node, BEGIN_S, until_s, noticed=noticed):
            cluster.virtual.run(main())
    return cluster, ends


def lost(cluster: Cluster) -> list[tuple[str, float]]:
    return [(event["who"], event["time_s"]) for event in cluster.events if event["event"] == "left"]


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("leases", [0.5, 0.9])
def test_a_cut_shorter_than_the_lease_loses_nobody(direction: str, leases: float) -> None:
    """The old connection stays silent for ever: the signs of life come over new ones."""
    cluster, ends = run(cut(direction, leases * LEASE_S), 10 * LEASE_S)
    assert cluster.names().count("joined") == 3
    assert lost(cluster) == []
    assert ends == {}


def test_a_longer_cut_is_noticed_and_the_member_learns_of_it() -> None:
    """In the other direction this network, unlike TCP, needs no acknowledgements: the member is heard."""
    cluster, ends = run(cut("from the member", 1.5 * LEASE_S), 10 * LEASE_S)
    [(who, at_s)] = lost(cluster)
    assert who == "worker-1"
    assert at_s <= BEGIN_S + LEASE_S + 1.0
    assert list(ends) == ["worker-1"], "nobody else is blamed, and nobody else gives up"
    assert isinstance(ends["worker-1"], EvictedError)
    assert "worker-1 was stopped, or cut off" in str(ends["worker-1"])
    assert "silent for" in str(ends["worker-1"]), "and says why"


@pytest.mark.parametrize("noticed", [True, False], ids=["as a stall", "as silence: the test can fail"])
@pytest.mark.parametrize("leases", [1.5, 6.0])
def test_the_coordinators_own_stall_is_nobodys_silence(leases: float, noticed: bool) -> None:
    """It wakes with its timers expired, and what the others have said unread."""
    cluster, ends = run(Network(), (leases + 3) * LEASE_S, stands=("coordinator", leases, noticed))
    assert (lost(cluster) == []) == noticed
    assert (ends == {}) == noticed


@pytest.mark.parametrize("node", ["shard-0", "worker-1"])
def test_a_member_that_stands_still_for_less_than_the_lease_stays(node: str) -> None:
    cluster, ends = run(Network(), 5 * LEASE_S, stands=(node, 0.9, True))
    assert (lost(cluster), ends) == ([], {})


def test_a_member_that_stands_still_for_longer_is_lost_alone_and_learns_why() -> None:
    cluster, ends = run(Network(), 5 * LEASE_S, stands=("worker-1", 1.5, True))
    [(who, at_s)] = lost(cluster)
    assert (who, list(ends)) == ("worker-1", ["worker-1"])
    assert at_s <= BEGIN_S + LEASE_S + 1.0
    assert isinstance(ends["worker-1"], EvictedError)


def test_a_coordinator_that_is_silent_is_waited_for_up_to_its_own_bound() -> None:
    everybody = frozenset({"worker-0", "worker-1", "shard-0"})
    network = Network(partitions=[Partition(BEGIN_S, 1e9, frozenset({"coordinator"}), everybody)])
    cluster, ends = run(network, DEADLINES.patience_s)
    assert ends == {}, "it is waited for"
    cluster, ends = run(network, BEGIN_S + DEADLINES.patience_s + DEADLINES.notice_s)
    assert set(ends) == everybody
    for error in ends.values():
        assert isinstance(error, PeerLostError)
        assert error.peer == "coordinator"
    del cluster
