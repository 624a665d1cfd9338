"""Coordinator and members together, on the virtual network."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from gradstream._version import __version__
from gradstream.coordinator import Member, RunAbortedError
from gradstream.coordinator.presence_service import PresenceService
from gradstream.errors import PeerLostError, RefusedError
from gradstream.runtime import Network, Partition
from gradstream.transport.base import Identity
from gradstream.transport.endpoint import EndpointCore
from gradstream.transport.simulated import MemoryEndpoint
from gradstream.transport.stream import StreamCore
from gradstream.wire import v1
from membership_cluster import DEADLINES, SPEC, Cluster, dies, diligent, shard, worker


def test_a_run_from_the_first_join_to_the_last_goodbye() -> None:
    cluster = Cluster()
    cluster.run(shard, worker(0, diligent), worker(1, diligent))
    assert cluster.outcome is not None
    assert cluster.outcome.failed is None
    assert cluster.names().count("joined") == 3
    assert cluster.names().count("step") == 4
    assert cluster.names()[-3:] == ["left"] * 3
    finished = next(event for event in cluster.events if event["event"] == "finished")
    assert finished["samples"] == 8
    assert 2.0 < finished["train_s"] < 3.0
    # A clean end waits for nobody: not for a lease, and not for a sign of life.
    assert cluster.now_s < 3.0


def test_one_seed_is_one_history() -> None:
    histories = []
    for seed in (1, 1, 2):
        cluster = Cluster(seed=seed)
        cluster.run(shard, worker(0, diligent), worker(1, diligent))
        histories.append(json.dumps(cluster.events))
    assert histories[0] == histories[1]


def test_batches_of_a_worker_that_dies_are_taken_over() -> None:
    cluster = Cluster()
    cluster.run(shard, worker(0, diligent), worker(1, dies))
    assert cluster.outcome is not None
    assert cluster.outcome.failed is None
    left = next(event for event in cluster.events if event["event"] == "left" and event["lost"])
    assert (left["who"], left["epoch"]) == ("worker-1", 2)
    ledger = next(event for event in cluster.events if event["event"] == "ledger")
    assert (ledger["samples"], ledger["reassigned"]) == (8, 1)


def test_members_hear_of_certificates_that_are_revoked(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under TLS: from the stream of a member that is lost to what the endpoints of the others refuse."""
    incoming = EndpointCore.incoming

    def with_certificate(endpoint: EndpointCore, opened: v1.Open, *given: Any, **named: Any) -> StreamCore:
        stream = incoming(endpoint, opened, *given, **named)
        stream.certificate = f"digest of {opened.sender}".encode()
        return stream

    monkeypatch.setattr(EndpointCore, "incoming", with_certificate)
    cluster = Cluster()
    seen: dict[str, tuple[frozenset[bytes], set[str]]] = {}
    take = EndpointCore.members_changed

    def note(endpoint: EndpointCore, members: Any, revoked: Any = ()) -> None:
        take(endpoint, members, revoked)
        if endpoint.identity.revoked:
            seen.setdefault(endpoint.identity.name, (endpoint.identity.revoked, set(members)))

    monkeypatch.setattr(EndpointCore, "members_changed", note)
    cluster.run(shard, worker(0, diligent), worker(1, dies))
    expected = (frozenset({b"digest of worker-1"}), {"shard-0", "worker-0"})
    assert seen == dict.fromkeys(["coordinator", "shard-0", "worker-0"], expected)


async def waits(cluster: Cluster, member: Member) -> None:
    await member.training()
    await cluster.virtual.runtime(member.node.name).sleep(20 * DEADLINES.notice_s)
    await diligent(cluster, member)


@pytest.mark.parametrize("whole", [False, True])
def test_signs_of_life_do_not_repeat_the_notice(monkeypatch: pytest.MonkeyPatch, whole: bool) -> None:
    """Of 2,000 nodes it has 100 kB. `whole`: the planted fault."""
    told: list[bytes] = []
    send = StreamCore.send

    async def note(stream: StreamCore, frame: v1.Frame, *given: Any, **named: Any) -> None:
        if stream.opened.method == "join" and stream.peer.startswith("worker"):
            told.append(frame.body.data)
        await send(stream, frame, *given, **named)

    monkeypatch.setattr(StreamCore, "send", note)
    if whole:
        newest = PresenceService._newest
        monkeypatch.setattr(PresenceService, "_newest", lambda service: replace(newest(service)))
    cluster = Cluster()
    cluster.run(shard, worker(0, waits), worker(1, waits))
    assert cluster.outcome is not None and cluster.outcome.failed is None
    notices = [v1.Notice.FromString(data) for data in told]
    unchanged = [one for one in notices if one.unchanged]
    assert all(not one.nodes and one.epoch == 0 for one in unchanged)
    assert len(notices) >= 40
    assert (len(unchanged) > 0.7 * len(notices)) is not whole


async def expects_abort(cluster: Cluster, member: Member) -> None:
    await member.training()
    with pytest.raises(RunAbortedError, match="worker-1") as caught:
        await member.over()
    assert caught.value.culprit == "worker-1"


def test_a_strategy_that_needs_every_worker_ends_when_one_dies() -> None:
    cluster = Cluster(survives=False)
    cluster.run(shard, worker(0, expects_abort), worker(1, dies))
    assert cluster.outcome is not None
    assert cluster.outcome.failed is not None
    assert cluster.outcome.failed.culprit == "worker-1"
    assert cluster.now_s < 3.0, "a broken connection is noticed at once"


async def fails(cluster: Cluster, member: Member) -> None:
    await member.training()
    await member.failed(ValueError("mine"), "Traceback: mine")


def test_a_failure_ends_the_run_with_its_traceback() -> None:
    cluster = Cluster()
    cluster.run(shard, worker(0, expects_abort), worker(1, fails))
    assert cluster.outcome is not None
    failed = cluster.outcome.failed
    assert failed is not None
    assert (failed.culprit, failed.error, failed.traceback) == ("worker-1", "ValueError", "Traceback: mine")


async def blames_another(cluster: Cluster, member: Member) -> None:
    await member.training()
    await member.failed(PeerLostError("worker-1", "does not answer"), "")


def test_a_lost_peer_is_for_the_coordinator_to_judge() -> None:
    cluster = Cluster(survives=False)
    cluster.run(shard, worker(0, blames_another), worker(1, dies))
    assert cluster.outcome is not None
    assert cluster.outcome.failed is not None
    assert cluster.outcome.failed.culprit == "worker-1"
    cluster = Cluster()
    cluster.run(shard, worker(1, blames_another), worker(0, expects_abort))  # nobody else finds it lost
    assert cluster.outcome is not None
    assert cluster.outcome.failed is not None
    assert "does not answer" in cluster.outcome.failed.message


CUT_S = 0.5


def cut(*names: str) -> Network:
    ends = frozenset({"coordinator"})
    there = frozenset(names)
    return Network(partitions=[Partition(CUT_S, 1e9, there, ends), Partition(CUT_S, 1e9, ends, there)])


async def loses_the_coordinator(cluster: Cluster, member: Member) -> None:
    await member.training()
    with pytest.raises(PeerLostError, match="coordinator"):
        await member.over()


def test_silence_for_a_lease_is_a_loss_on_either_side() -> None:
    cluster = Cluster(survives=False, network=cut("worker-1"))
    cluster.run(shard, worker(0, expects_abort), worker(1, loses_the_coordinator))
    assert cluster.outcome is not None
    assert cluster.outcome.failed is not None
    assert cluster.outcome.failed.culprit == "worker-1"
    failed = next(event for event in cluster.events if event["event"] == "failed")
    since_s = failed["time_s"] - CUT_S
    assert DEADLINES.lease_s - DEADLINES.beat_s <= since_s <= DEADLINES.lease_s


def test_who_never_joins_is_named() -> None:
    cluster = Cluster()

    async def waits(cluster: Cluster, member: Member) -> None:
        with pytest.raises(RunAbortedError, match="worker-1"):
            await member.training()

    cluster.run(shard, worker(0, waits))
    assert cluster.outcome is not None
    assert cluster.outcome.failed is not None
    assert "worker-1" in cluster.outcome.failed.message
    assert cluster.now_s < DEADLINES.join_s + 1


def test_a_refused_member_hears_why() -> None:
    cluster = Cluster()

    async def twin(cluster: Cluster) -> None:
        await cluster.virtual.runtime("director").sleep(0.5)
        identity = Identity("job", "worker-9", 2)
        endpoint = MemoryEndpoint(identity, cluster.virtual.runtime("twin"), cluster.network)
        await endpoint.start()
        endpoint.know("coordinator", cluster.address)
        node = v1.Node(name="worker-0", role="worker", rank=0, address="twin", incarnation=2)
        member = Member(
            cluster.virtual.runtime("twin"), endpoint, node, software=__version__, deadlines=DEADLINES
        )
        with pytest.raises(RefusedError, match="worker-9 asks to join as worker-0"):
            await member.join(SPEC)
        endpoint.identity.name = "worker-0"
        with pytest.raises(RefusedError, match="is in already"):
            await member.join(SPEC)

    cluster.run(shard, worker(0, diligent), worker(1, diligent), twin)
    assert cluster.outcome is not None
    assert cluster.outcome.failed is None
