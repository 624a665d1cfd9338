"""A presence outlives its connections: what a member and the coordinator say arrives once, in order."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable

import pytest

from gradstream.coordinator import Member
from gradstream.coordinator.client.presence import Presence
from gradstream.errors import PeerLostError
from gradstream.runtime import Network, Partition
from gradstream.telemetry.events import StepEvent
from gradstream.wire import v1
from membership_cluster import DEADLINES, Cluster, diligent, refs, shard, worker

LEASE_S = DEADLINES.lease_s
NUM_EVENTS = 600


def cuts(seed: int, node: str) -> list[Partition]:
    """Eight cuts of one direction each, shorter than the lease, after each of which the stream is dead."""
    rng = random.Random(seed)
    begin_s, found = 1.0, []
    there, coordinator = frozenset({node}), frozenset({"coordinator"})
    for _ in range(8):
        ends = rng.choice([(there, coordinator), (coordinator, there)])
        end_s = begin_s + rng.uniform(0.01, 0.9) * LEASE_S
        found.append(Partition(begin_s, end_s, *ends))
        begin_s = end_s + rng.uniform(0.2, 0.5) * LEASE_S
    return found


def telling(rank: int) -> Callable[[Cluster], Awaitable[None]]:
    """A worker that tells of `NUM_EVENTS` events, one each 0.1 s, and then does its work."""

    async def body(cluster: Cluster, member: Member) -> None:
        await member.training()
        for number in range(NUM_EVENTS):
            member.emit(
                StepEvent(rank=rank, step=number, epoch=0, samples=0, loss=0.0, compute_s=0.0, wait_s=0.0)
            )
            await cluster.virtual.runtime(member.node.name).sleep(0.1)
        member.receipt(refs(rank, 0, 1))
        member.finished()
        await member.over()

    return worker(rank, body)


def told(cluster: Cluster, node: str) -> list[int]:
    return [e["step"] for e in cluster.events if e["event"] == "step" and e["node"] == node]


def lost(cluster: Cluster) -> list[tuple[str, str]]:
    return [(e["who"], e["reason"]) for e in cluster.events if e["event"] == "left" and e["lost"]]


@pytest.mark.parametrize("seed", range(8))
def test_over_dead_connections_everything_is_told_once_and_nobody_is_lost(seed: int) -> None:
    partitions = cuts(seed, "worker-1")
    cluster = Cluster(network=Network(partitions=partitions))
    cluster.run(shard, telling(0), telling(1))
    assert partitions[-1].stop_s < cluster.now_s, "all cuts were within the run"
    for node in ("worker-0", "worker-1"):
        assert told(cluster, node) == list(range(NUM_EVENTS))
    assert not lost(cluster)
    assert cluster.outcome is not None
    assert cluster.outcome.notice.status == v1.Notice.FINISHED


@pytest.mark.parametrize(
    ("fault", "seen"),
    [("nothing is said again", "gap"), ("a beat is said twice under a new number", "twice")],
)
def test_the_check_can_fail(fault: str, seen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = Presence._go_on

    async def forgets(self: Presence, stream: object) -> None:
        self._unheard.clear()
        await begin(self, stream)  # type: ignore[arg-type]

    async def repeats(self: Presence, stream: object) -> None:
        again = [v1.Beat.FromString(beat.SerializeToString()) for beat in self._unheard]
        await begin(self, stream)  # type: ignore[arg-type]
        for beat in again:
            await self.say(beat)

    monkeypatch.setattr(Presence, "_go_on", forgets if seen == "gap" else repeats)
    cluster = Cluster(network=Network(partitions=cuts(0, "worker-1")))
    if seen == "gap":
        with pytest.raises(PeerLostError, match="follows"):
            cluster.run(shard, telling(0), telling(1))
    else:
        cluster.run(shard, telling(0), telling(1))
        assert told(cluster, "worker-1") != list(range(NUM_EVENTS)), fault


async def leaps(cluster: Cluster, member: Member) -> None:
    """Leaves out a number."""
    await member.training()
    assert member._presence is not None
    member._presence._said += 1
    await member._presence.say(v1.Beat())
    await member.over()


def test_a_beat_that_was_left_out_is_noticed() -> None:
    cluster = Cluster()

    async def gone(cluster: Cluster, member: Member) -> None:
        with pytest.raises(Exception, match="BAD_REQUEST"):
            await leaps(cluster, member)

    cluster.run(shard, worker(0, diligent), worker(1, gone))
    [(who, reason)] = lost(cluster)
    assert who == "worker-1"
    assert "follows" in reason


def test_an_attempt_that_comes_late_does_not_take_the_presence_back() -> None:
    cluster = Cluster()

    async def late(cluster: Cluster, member: Member) -> None:
        await member.training()
        presence = member._presence
        assert presence is not None
        await presence.resume()
        await presence.resume()
        stream = presence._stream
        presence._attempt = 0
        with pytest.raises(Exception, match="attempt 1 comes after attempt 2"):
            await presence.resume()
        assert presence._stream is stream
        await diligent(cluster, member)

    cluster.run(shard, worker(0, diligent), worker(1, late))
    assert not lost(cluster)
    assert cluster.outcome is not None
    assert cluster.outcome.notice.status == v1.Notice.FINISHED
