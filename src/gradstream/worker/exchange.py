"""`Exchange`: a worker's exchange as its node sees it, in every topology."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from gradstream.checkpoint.manifest import Resume
from gradstream.checkpoint.snapshot import Carried, NodeSnapshots, SnapshotSource
from gradstream.coordinator.client.member import Member
from gradstream.errors import DeadlineError, PeerLostError
from gradstream.memory import Vector
from gradstream.runtime.base import Runtime, awaited_later
from gradstream.telemetry.events import Event, TransferEvent
from gradstream.telemetry.meters import Transfer
from gradstream.transport.base import Endpoint
from gradstream.wire import v1
from gradstream.worker.config import WorkerConfig
from gradstream.worker.replica import Replica

MAX_TRANSFERS = 128
"""Number of transfers reported individually between two reports of process metrics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeContext:
    """A worker's place in the run, for its exchange.

    Args:
        runtime: runtime of the worker's node.
        endpoint: endpoint of the worker's node.
        member: the node's membership; the run has begun.
        config: this process's part of the run's plan.
        late: whether this worker joined after training had begun.
        init: fills a vector with the model's initial parameters.
        is_lowest: whether this is the present worker of the lowest rank.
        failed: reports that this node cannot continue.
        enter_loop: copies the state of another worker's own loop, by the worker's name; None if there are none.
        carried: this process's in-memory part of the checkpoint from which the phase continues.
    """

    runtime: Runtime
    endpoint: Endpoint
    member: Member
    config: WorkerConfig
    late: bool
    init: Callable[[Vector], Awaitable[None]]
    is_lowest: Callable[[], bool]
    failed: Callable[[Exception], Awaitable[None]]
    enter_loop: Callable[[str], Awaitable[bool]] | None = None
    carried: Carried = field(default_factory=Carried)

    @property
    def resume(self) -> Resume | None:
        """See `RunPlan.vectors`."""
        return self.config.plan.vectors


class Exchange(ABC):
    """One worker's exchange, from the initial parameters to the final ones.

    Args:
        context: the worker's place in the run.

    Attributes:
        replica: the worker that the strategy gets.
    """

    replica: Replica

    def __init__(self, context: ExchangeContext) -> None:
        self._context = context
        self._task: asyncio.Task[None] | None = None

    @abstractmethod
    async def begin(self) -> None:
        """Gives all workers the same initial parameters, or those of a checkpoint."""

    @abstractmethod
    async def train(self) -> None:
        """Runs the strategy on this worker."""

    async def flush(self) -> None:
        """Waits until everything that the strategy has pushed is in the model; without servers, it already is."""
        return

    async def finish(self) -> None:
        """Brings the final parameters into the replica, unless it has them."""
        return

    @abstractmethod
    def report(self) -> Sequence[Event]:
        """Events of the traffic since the last report."""

    def carry(self) -> None:
        """Keeps in memory what the next phase continues from, if every worker has all of it; see `Carried`."""
        return

    async def close(self) -> None:
        """Ends the tasks that run beside the strategy. Idempotent."""
        if self._task is not None:
            self._task.cancel()

    def _tell_loop(self) -> None:
        """Lets a user's own loop hear who is there, where it does not hear that in rounds."""
        member, loop = self._context.member, self._context.config.loop
        if loop is None:
            return
        heard = 0

        def tell(notice: v1.Notice) -> None:
            nonlocal heard
            since = {node.rank: node.since for node in notice.nodes if node.role == "worker"}
            before = heard or notice.first_epoch
            loop.members(sorted(since), notice.epoch, [rank for rank in since if since[rank] > before])
            heard = notice.epoch

        member.listen(tell)
        tell(member.notice)

    @property
    def elders(self) -> list[str]:
        """Names of the workers that have been there for longer, by since when: so newcomers never ask one another."""
        workers = [node for node in self._context.member.notice.nodes if node.role == "worker"]
        names = [node.name for node in sorted(workers, key=lambda node: (node.since, node.rank))]
        own = self._context.runtime.node
        return names[: names.index(own)] if own in names else names

    async def _enter_loop(self) -> None:
        """Copies what a newcomer to users' own loops needs, from the worker that has been there for longest.

        Raises:
            PeerLostError: no worker is left that has it.
            ConfigError: this script cannot begin where the others are.
        """
        context, name = self._context, self._context.runtime.node
        assert context.enter_loop is not None
        while True:
            elders = self.elders
            if not elders:
                raise PeerLostError(
                    name, "has joined a run of which no worker is left; go on from its newest checkpoint"
                )
            for elder in elders:
                with suppress(PeerLostError, DeadlineError):
                    if await context.enter_loop(elder):
                        return
            await context.runtime.sleep(context.config.plan.job.deadlines.beat_s)

    def _keep_snapshots(self, source: SnapshotSource) -> None:
        """Writes this worker's part of every snapshot from now on."""
        runtime = self._context.runtime
        snapshots = NodeSnapshots(runtime, self._context.member, source)
        self._task = awaited_later(runtime.spawn(snapshots.run(), name=f"{runtime.node}-cuts"))


class Transfers:
    """Reports transfers individually, up to `MAX_TRANSFERS` between two `ExchangeEvent`s.

    Args:
        rank: rank of this worker.
        emit: adds an event to those of the run.
    """

    def __init__(self, rank: int, emit: Callable[[Event], None]) -> None:
        self._rank = rank
        self._emit = emit
        self._left = MAX_TRANSFERS

    def __call__(self, done: Transfer) -> None:
        """Reports a transfer that is done."""
        if self._left > 0:
            self._left -= 1
            self._emit(
                TransferEvent(
                    rank=self._rank, kind=done.kind, seconds=done.seconds, size_bytes=done.size_bytes
                )
            )

    def accounted(self) -> None:
        """Restarts the count, after an `ExchangeEvent`."""
        self._left = MAX_TRANSFERS
