"""Coordinator and members together, on the virtual network."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from gradstream.coordinator import Coordinator, Member, Membership, RunAbortedError, RunOutcome
from gradstream.coordinator.assignment import BatchAssignment
from gradstream.data.base import BatchRef
from gradstream.data.ledger import Ledger
from gradstream.data.plan import PartitionPlan
from gradstream.data.shares import WorkerSpeed
from gradstream.errors import GradstreamError, PeerLostError, RefusedError
from gradstream.runtime import Network, Partition, SimulationConfig, VirtualCluster
from gradstream.runtime.deadlines import Deadlines
from gradstream.telemetry.events import StartedEvent, StepEvent
from gradstream.transport.base import Identity
from gradstream.transport.endpoint import EndpointCore
from gradstream.transport.simulated.endpoint import MemoryEndpoint, MemoryNetwork
from gradstream.transport.stream import StreamCore
from gradstream.wire import v1

SPEC = v1.ModelSpec(fingerprint=0xAB, elems=100, dtype=v1.FLOAT32, chunk_elems=64)
DEADLINES = Deadlines(join_s=30, lease_s=8)


class Cluster:
    """A coordinator, a shard and two workers with two batches each."""

    def __init__(self, *, survives: bool = True, network: Network | None = None, seed: int = 0) -> None:
        config = SimulationConfig(network=network or Network())
        self.virtual = VirtualCluster(seed, config)
        self.network = MemoryNetwork(self.virtual)
        self.survives = survives
        self.events: list[dict[str, Any]] = []
        self.outcome: RunOutcome | None = None
        self.address = ""

    def endpoint(self, name: str, incarnation: int = 1) -> MemoryEndpoint:
        return MemoryEndpoint(Identity("job", name, incarnation), self.virtual.runtime(name), self.network)

    async def coordinator(self) -> Coordinator:
        endpoint = self.endpoint("coordinator")
        started = StartedEvent(
            job="job",
            workers=2,
            servers=1,
            strategy="downpour",
            optimizer="sgd",
            num_parameters=0,
            num_samples=8,
            total_steps=4,
        )
        ledger = Ledger(PartitionPlan(8, 2, 2), epochs=1)
        membership = Membership(
            started,
            ledger,
            assignment=BatchAssignment(ledger, 2, lead_s=10.0),
            survives_worker_loss=self.survives,
            software="1",
        )
        coordinator = Coordinator(
            self.virtual.runtime("coordinator"),
            endpoint,
            membership,
            on_events=lambda lines: self.events.extend(map(json.loads, lines.splitlines())),
            deadlines=DEADLINES,
        )
        await endpoint.start()
        self.address = endpoint.address
        return coordinator

    async def conclude(self, coordinator: Coordinator) -> None:
        self.outcome = await coordinator.run()

    async def member(self, name: str) -> Member:
        endpoint = self.endpoint(name)
        await endpoint.start()
        endpoint.know("coordinator", self.address)
        role, _, rank = name.partition("-")
        node = v1.Node(name=name, role=role, rank=int(rank), address=endpoint.address, incarnation=1)
        return Member(self.virtual.runtime(name), endpoint, node, software="1", deadlines=DEADLINES)

    def run(self, *nodes: Callable[[Cluster], Awaitable[None]]) -> None:
        async def main() -> None:
            director = self.virtual.runtime("director")
            coordinator = await self.coordinator()
            await director.gather(self.conclude(coordinator), *(node(self) for node in nodes))

        self.virtual.run(main())

    def names(self) -> list[str]:
        return [event["event"] for event in self.events]

    @property
    def now_s(self) -> float:
        return self.virtual.clock.now_ns / 1e9


async def shard(cluster: Cluster) -> None:
    member = await cluster.member("shard-0")
    await member.join()
    try:
        await member.over()
    except GradstreamError:
        pass
    await member.leave()


def refs(rank: int, *batches: int) -> list[BatchRef]:
    return [BatchRef(0, rank, batch) for batch in batches]


def worker(
    rank: int, body: Callable[[Cluster, Member], Awaitable[None]]
) -> Callable[[Cluster], Awaitable[None]]:
    async def run(cluster: Cluster) -> None:
        member = await cluster.member(f"worker-{rank}")
        await member.join(SPEC)
        await body(cluster, member)
        if body is not dies:  # a process that is gone says no goodbye
            await member.leave()

    return run


async def diligent(cluster: Cluster, member: Member) -> None:
    """Does its own batches, then those of others, until all are done."""
    rank = member.node.rank
    notice = await member.training()
    assert notice.model == SPEC
    assert [node.name for node in notice.nodes] == ["shard-0", "worker-0", "worker-1"]
    for batch in (0, 1):
        await cluster.virtual.runtime(member.node.name).sleep(1.0)
        step = StepEvent(rank=rank, step=batch, epoch=0, samples=2, loss=0.0, compute_s=1.0, wait_s=0.0)
        member.emit(step)
        member.receipt(refs(rank, batch))
    complete = False
    while not complete:
        batches, complete, _ = await member.assign(True, 0, WorkerSpeed())
        member.receipt(batches)
    member.finished()
    assert (await member.over()).phase == v1.Notice.FINISHED


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


async def dies(cluster: Cluster, member: Member) -> None:
    await member.training()
    for _ in range(2):
        await member.assign(False, 0, WorkerSpeed())
    member.receipt(refs(member.node.rank, 0))
    await cluster.virtual.runtime("director").sleep(1.5)
    cluster.network.kill(member.node.name)
    cluster.virtual.runtime(member.node.name).kill()


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
    incoming = EndpointCore._incoming

    def with_certificate(endpoint: EndpointCore, opened: v1.Open, *given: Any, **named: Any) -> StreamCore:
        stream = incoming(endpoint, opened, *given, **named)
        stream.certificate = f"digest of {opened.sender}".encode()
        return stream

    monkeypatch.setattr(EndpointCore, "_incoming", with_certificate)
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
        member = Member(cluster.virtual.runtime("twin"), endpoint, node, software="1", deadlines=DEADLINES)
        with pytest.raises(RefusedError, match="worker-9 asks to join as worker-0"):
            await member.join(SPEC)
        endpoint.identity.name = "worker-0"
        with pytest.raises(RefusedError, match="is in already"):
            await member.join(SPEC)

    cluster.run(shard, worker(0, diligent), worker(1, diligent), twin)
    assert cluster.outcome is not None
    assert cluster.outcome.failed is None
