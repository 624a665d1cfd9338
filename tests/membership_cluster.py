"""A coordinator and members on the virtual network, and what a member may do there."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

from gradstream._version import __version__
from gradstream.coordinator import Coordinator, Member, Membership, RunOutcome
from gradstream.coordinator.assignment import BatchAssignment
from gradstream.coordinator.durable import Unkept
from gradstream.coordinator.lifecycle import LossTolerance
from gradstream.coordinator.registry import CoordinatorPlan
from gradstream.data.base import BatchRef
from gradstream.data.ledger import Ledger
from gradstream.data.plan import PartitionPlan
from gradstream.data.shares import WorkerSpeed
from gradstream.errors import GradstreamError
from gradstream.runtime import Network, SimulationConfig, VirtualCluster
from gradstream.runtime.deadlines import Deadlines
from gradstream.telemetry.events import StartedEvent, StepEvent
from gradstream.transport.base import Identity
from gradstream.transport.simulated import MemoryEndpoint, MemoryNetwork
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
        assignment = BatchAssignment(ledger, 2, lead_s=10.0)
        membership = Membership(
            CoordinatorPlan(
                started=started,
                ledger=ledger,
                assignment=assignment,
                losses=LossTolerance(survives_worker_loss=self.survives),
                deadlines=DEADLINES,
            )
        )
        coordinator = Coordinator(
            self.virtual.runtime("coordinator"),
            endpoint,
            membership,
            keeper=Unkept(lambda lines: self.events.extend(map(json.loads, lines.splitlines()))),
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
        return Member(self.virtual.runtime(name), endpoint, node, software=__version__, deadlines=DEADLINES)

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
        batches, complete = await member.requests.assign(True, 0, WorkerSpeed())
        member.receipt(batches)
    member.finished()
    assert (await member.over()).status == v1.Notice.FINISHED


async def dies(cluster: Cluster, member: Member) -> None:
    await member.training()
    for _ in range(2):
        await member.requests.assign(False, 0, WorkerSpeed())
    member.receipt(refs(member.node.rank, 0))
    await cluster.virtual.runtime("director").sleep(1.5)
    cluster.network.kill(member.node.name)
    cluster.virtual.runtime(member.node.name).kill()
