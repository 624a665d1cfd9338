"""`Coordinator`: carries the membership state machine out over streams.

It is not on the data path: it knows which nodes are in and which minibatches are in the model, and sees
neither gradients nor parameters. Where two nodes cannot dial each other, its process passes their bytes on, without
reading them: see `relay`.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from gradstream.checkpoint.manifest import Evaluated
from gradstream.coordinator.checkpoint_writer import CheckpointHandler, CheckpointOptions, CheckpointWriter
from gradstream.coordinator.context import CoordinatorContext
from gradstream.coordinator.durable.keeper import Keeper
from gradstream.coordinator.durable.state import KeptState
from gradstream.coordinator.early_ends import EarlyEnds
from gradstream.coordinator.membership import Membership
from gradstream.coordinator.nodes import Commit, Discard, Emit, Instruction, Notify, Prepare, Refuse
from gradstream.coordinator.phases import PhasePlace
from gradstream.coordinator.presence_service import Admitted, PresenceService
from gradstream.coordinator.relay import Age, RunClock
from gradstream.data.ledger import Ledger
from gradstream.errors import ConfigError, GradstreamError, UserCodeError
from gradstream.runtime.base import Runtime
from gradstream.runtime.tasks import Wakeup
from gradstream.telemetry.events import (
    CoordinatorEvent,
    DamagedEvent,
    Event,
    FailedEvent,
    ReshardEvent,
    encode,
)
from gradstream.transport.base import Endpoint, Stream
from gradstream.wire import v1

# ---- participation driver ----------------------------------------------------------------
# `ParticipationDriver`: runs a strategy's `drive` on the coordinator.
#
# A checkpoint contains nothing of the drive. The drive goes by what is in the model: in a resumed run it begins
# again, and all waits that were over return at once.


class ParticipationDriver:
    """Runs a strategy's `drive`, which sets how many workers take part. Implements `strategies.api.Participation`.

    Args:
        context: see `CoordinatorContext`, of a run whose strategy has a `drive`.
        drive: the strategy's schedule.
        clock: time of the run.
    """

    def __init__(
        self,
        context: CoordinatorContext,
        drive: Callable[[ParticipationDriver], Awaitable[None]],
        clock: RunClock,
    ) -> None:
        assert context.membership.participation is not None
        self._context = context
        self._membership = context.membership
        self._participation = context.membership.participation
        self._drive = drive
        self._clock = clock
        self._look_s = context.deadlines.notice_s
        self._changed = Wakeup()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins the drive."""
        runtime = self._context.runtime
        self._task = runtime.spawn(self._run(), name=f"{runtime.node}-drive")

    def stop(self) -> None:
        """Ends the drive."""
        if self._task is not None:
            self._task.cancel()

    def look(self) -> None:
        """Lets the drive look whether what it waits for has come."""
        self._changed.ring()

    async def _run(self) -> None:
        """Runs the drive to its end. An exception that it raises ends the run."""
        try:
            await self._drive(self)
            self._check_active("drive() is over")
        except Exception as error:
            text = "" if isinstance(error, ConfigError) else traceback.format_exc()
            name, message = type(error).__name__, str(error)
            if not isinstance(error, GradstreamError):
                name, message = "UserCodeError", f"drive() of the strategy raised {name}: {message}"
            self._context.carry_out(self._membership.participation_failed(name, message, text))

    # ---- the strategy's view --------------------------------------------------------------

    @property
    def workers(self) -> list[str]:
        """See `Participation`."""
        return self._membership.nodes.worker_names

    @property
    def num_samples(self) -> int:
        """See `Participation`."""
        return self._counted(self._membership.progress.samples_per_epoch)

    @property
    def total_samples(self) -> int:
        """See `Participation`."""
        ledger = self._membership.progress.ledger
        assert isinstance(ledger, Ledger)
        return self._counted(ledger.total_samples) + self._membership.progress.num_samples_before

    @property
    def samples(self) -> int:
        """See `Participation`."""
        return self._counted(self._membership.progress.num_samples)

    async def set_active_workers(self, count: int, phase: str = "") -> None:
        """See `Participation`."""
        self._context.carry_out(self._membership.set_active_workers(count, phase))
        while self._participation.awaited:
            await self._changed.rung(self._context.runtime, self._look_s)

    async def until(self, *, samples: float | None = None, seconds: float | None = None) -> None:
        """See `Participation`."""
        while not self._passed(samples, seconds):
            self._check_active("drive() waits for progress")
            left_s = self._look_s if seconds is None else min(self._look_s, seconds - self._clock.time_s())
            await self._changed.rung(self._context.runtime, max(left_s, 1e-3))

    def _passed(self, samples: float | None, seconds: float | None) -> bool:
        if samples is not None and self.samples >= samples:
            return True
        if seconds is not None:
            return self._clock.time_s() >= seconds
        return samples is None

    def _check_active(self, when: str) -> None:
        if self._participation.wanted < 1:
            raise UserCodeError(
                f"{when}, but no worker takes part: it must call set_active_workers() with at least 1 before",
                "",
            )

    @staticmethod
    def _counted(samples: int | None) -> int:
        if samples is None:
            raise ConfigError(
                "a drive goes by the number of samples in the model, and a stream does not count its samples: "
                "leave out warm starts and waves, or wait for seconds"
            )
        return samples


# ---- request service ---------------------------------------------------------------------
# `RequestService`: answers the requests of workers. The workers' side is `client.requests`.


class RequestService:
    """Serves "assign", "ending", "take_over" and "shares".

    Args:
        context: see `CoordinatorContext`.
    """

    def __init__(self, context: CoordinatorContext) -> None:
        self._context = context
        self._replies = context.membership.replies
        self._waiting: dict[Wakeup, None] = {}  # one for each request whose answer has to wait
        context.endpoint.serve("assign", self._serve_assign, model=False)
        context.endpoint.serve("ending", self._serve_ending, model=False)
        context.endpoint.serve("take_over", self._serve_take_over, model=False)
        context.endpoint.serve("shares", self._serve_shares, model=False)

    def wake(self) -> None:
        """Looks again at all requests whose answer has to wait."""
        for wakeup in self._waiting:
            wakeup.ring()

    async def _serve_assign(self, stream: Stream) -> None:
        request, who = v1.Ask.FromString(stream.opened.body), stream.opened.sender
        self._context.carry_out(self._replies.measured(who, request))
        await self._answer(stream, lambda: self._replies.assign(who, request, self._context.age_s()))

    async def _serve_ending(self, stream: Stream) -> None:
        request, who = v1.Ending.FromString(stream.opened.body), stream.opened.sender
        self.wake()  # others may wait for this request
        await self._answer(stream, lambda: self._replies.ending(who, request))

    async def _serve_take_over(self, stream: Stream) -> None:
        request, who = v1.TakeOver.FromString(stream.opened.body), stream.opened.sender
        await self._answer(stream, lambda: self._replies.take_over(who, request))

    async def _serve_shares(self, stream: Stream) -> None:
        request, who = v1.Took.FromString(stream.opened.body), stream.opened.sender
        self._context.carry_out(self._replies.took(who, request))
        self.wake()  # others may wait for this request
        await self._answer(stream, lambda: self._replies.shares(who, request))

    async def _answer(
        self,
        stream: Stream,
        decide: Callable[[], v1.Assigned | v1.Ended | v1.Shares | v1.TakenOver | Refuse | None],
    ) -> None:
        """Answers once there is a decision; until then tells the worker which others it waits for."""
        who, wakeup, context = stream.opened.sender, Wakeup(), self._context
        self._waiting[wakeup] = None
        told_ns, told = 0, list[v1.Node]()
        runtime, notice_s = context.runtime, context.deadlines.notice_s
        try:
            while (answer := decide()) is None:
                others = context.membership.nodes.workers
                if others is not told or runtime.left_s(told_ns, notice_s) <= 0:
                    await stream.waiting(node.name for node in others if node.name != who)
                    told_ns, told = runtime.now(), others
                await wakeup.rung(runtime, notice_s)
        finally:
            del self._waiting[wakeup]
        context.keeper.changed()
        await context.keeper.durable()
        if isinstance(answer, Refuse):
            stream.refuse(answer.code, answer.message)
            return
        await stream.send(v1.Frame(body=v1.Body(data=answer.SerializeToString())))


# ---- coordinator -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """How a run ended.

    Args:
        notice: the last notice.
        failed: the failure; None if every sample is accounted for.
    """

    notice: v1.Notice
    failed: FailedEvent | None


class Coordinator:
    """Leads a run from the first node that joins to the last that leaves.

    Args:
        runtime: time and tasks.
        endpoint: endpoint of the coordinator, not started yet.
        membership: the state machine to carry out.
        keeper: takes the events of all nodes and of the coordinator, and keeps the state.
        checkpoints: how checkpoints are made; None makes none.
        early_ends: ends the run or this phase early; None lets it run to its last data epoch.
        drive: the strategy's schedule of participation; None if all workers take part.
        place: the place of this phase of the job among the others; None if the job has none.

    Attributes:
        clock: time of the events.
        membership: see above.
        on_begin: called when training begins, with `clock.zero_ns`; not in a process that goes on after another.
    """

    def __init__(
        self,
        runtime: Runtime,
        endpoint: Endpoint,
        membership: Membership,
        *,
        keeper: Keeper,
        checkpoints: CheckpointOptions | None = None,
        early_ends: EarlyEnds | None = None,
        drive: Callable[[ParticipationDriver], Awaitable[None]] | None = None,
        place: PhasePlace | None = None,
    ) -> None:
        self._runtime = runtime
        self._endpoint = endpoint
        self.membership = membership
        self._begun = False  # the training of this phase
        self._keeper = keeper
        self._early_ends = early_ends or EarlyEnds(membership)
        clock = None if place is None else place.clock
        self.clock = clock or RunClock(runtime, membership.progress.earlier_s)
        endpoint.on_damage = lambda peer, size_bytes: self.emit(
            DamagedEvent(peer=peer, size_bytes=size_bytes)
        )
        self.on_begin: Callable[[int], None] = lambda zero_ns: None
        self._age_s = Age(runtime)
        self._ended = Wakeup()  # rings when the run is over, and when a node is gone
        self._failed: FailedEvent | None = None
        context = CoordinatorContext(
            runtime, endpoint, membership, carry_out=self._carry_out, age_s=self._age_s, keeper=keeper
        )
        self._driver: ParticipationDriver | None = None
        if drive is not None:
            self._driver = ParticipationDriver(context, drive, self.clock)
        self._writer: CheckpointWriter | None = None
        if checkpoints is not None:
            self._writer = CheckpointWriter(context, checkpoints)
            CheckpointHandler(runtime, endpoint, self._writer)
        self._presences = PresenceService(
            context,
            self.emit,
            on_events=self._take_events,
            on_beat=self._after_beat,
            on_lost=self._after_loss,
        )
        self._requests = RequestService(context)
        kept = {"clock": self.clock, "age": self._age_s, "heard": self._presences}
        state = KeptState({**membership.parts(), **kept, **self._early_ends.parts})
        if place is not None:
            state.add("job_phase", place)
        restored = keeper.restored
        keeper.begin(state, self._ended.ring)
        if restored:
            self._go_on()

    def _go_on(self) -> None:
        """Goes on where an earlier process of the coordinator died: waits for its members, and trains."""
        membership = self.membership
        self._presences.await_members()
        if membership.phases.training:
            self._begun = True
            self._begin_training()
        missing = membership.nodes.names
        self.emit(CoordinatorEvent(ruling=self._keeper.ruling, members=missing, epoch=membership.nodes.epoch))
        self._carry_out(membership.restored(self._age_s()))

    def emit(self, event: Event) -> None:
        """Adds a record of the coordinator to the events of the run."""
        self._keeper.emit(encode(event, node=self._runtime.node, time_s=self.clock.time_s()))

    async def run(self) -> RunOutcome:
        """Returns when the run is over, and all members have left or their lease has passed."""
        runtime, deadlines = self._runtime, self.membership.deadlines
        deadline = runtime.expire_after(
            deadlines.join_s, lambda: self._carry_out(self.membership.overdue(self._age_s()))
        )
        for node in self.membership.nodes.as_notice():  # of an earlier process
            self._endpoint.know(node.name, node.address)
        if self._writer is not None:
            await self._writer.sweep()
        try:
            while not (self.membership.phases.over or self._keeper.superseded):
                await self._ended.rung(runtime, deadlines.join_s)
        finally:
            deadline.cancel()
            if self._driver is not None:
                self._driver.stop()
        if self._keeper.superseded is not None:
            raise self._keeper.superseded
        while self._presences.any_left and await self._ended.rung(runtime, deadlines.lease_s):
            pass
        if self._writer is not None:
            await self._writer.finish()
        return RunOutcome(self.membership.notice, self._failed or self._failed_before())

    def _failed_before(self) -> FailedEvent | None:
        """Why the run has failed, where an earlier process of the coordinator has reported that, and died."""
        phases = self.membership.phases
        if phases.phase != v1.Notice.ABORTED:
            return None
        error, _, message = phases.reason.partition(": ")
        return FailedEvent(culprit=phases.culprit, error=error, message=message, traceback="")

    async def close(self) -> None:
        """Stores what is left of the state and the events. The last call."""
        await self._keeper.close()

    def stop(self) -> None:
        """Asks the run to stop, with a checkpoint if training has begun; `run` returns then."""
        self._carry_out(self.membership.stop(self._age_s()))

    def reshard(self, servers: int, token: str = "") -> list[str]:
        """Asks the run to change its number of shards while it goes on; "reshard" events tell the outcome.

        Args:
            servers: new number of shards.
            token: name of this request, in its events.

        Returns:
            Names of the new shards, which somebody has to start.

        Raises:
            ConfigError: the run cannot do that, or not now; an event says so, too.
        """
        try:
            self._carry_out(self.membership.reshard(servers, token, self._age_s()))
        except ConfigError as error:
            self.emit(
                ReshardEvent(
                    state="failed",
                    token=token,
                    servers=servers,
                    shards=[],
                    held_s=0.0,
                    who="",
                    message=str(error),
                )
            )
            raise
        newcomers = self.membership.nodes.newcomers
        return [] if newcomers is None else newcomers.names

    # ---- reports of the nodes -------------------------------------------------------------

    def _take_events(self, admitted: Admitted) -> None:
        """Keeps events of a node, notes the latest evaluation, and looks whether the criterion is reached."""
        self._keeper.emit(admitted.lines)
        for event in admitted.events:
            if event["event"] == "evaluated":
                score = self._early_ends.score(event)
                evaluated = Evaluated(event["step"], event["accuracy"], event["loss"], score)
                self.membership.snapshots.evaluated = evaluated
            if ends := self._early_ends.event(event, self._age_s()):
                self._carry_out(ends)

    def _after_beat(self, beat: v1.Beat) -> None:
        if self._driver is not None:
            self._driver.look()
        if beat.receipts or beat.verdicts:
            if ends := self._early_ends.counted(self._age_s()):
                self._carry_out(ends)
            self._requests.wake()

    def _after_loss(self) -> None:
        if self._driver is not None:
            self._driver.look()
        self._ended.ring()

    # ---- instructions -------------------------------------------------------------------

    def _carry_out(self, instructions: Sequence[Instruction]) -> None:
        self._keeper.changed()
        begins = self.membership.phases.training and not self._begun
        if begins:
            self._begun = True
            if self.clock.begin():
                assert self.clock.zero_ns is not None
                self.on_begin(self.clock.zero_ns)
            self._begin_training()
        nodes = self.membership.nodes
        self._endpoint.identity.epoch = (
            nodes.epoch
        )  # so that it holds back no call of a member that it has lost
        self._endpoint.members_changed(nodes.incarnations, nodes.revoked)
        for instruction in instructions:
            if isinstance(instruction, Emit):
                if isinstance(instruction.event, FailedEvent):
                    self._failed = instruction.event
                self.emit(instruction.event)
            elif isinstance(instruction, Notify):
                self._presences.notify()
                self._requests.wake()
            elif isinstance(instruction, Prepare | Commit | Discard):
                assert self._writer is not None
                self._writer.carry_out(instruction)
        if self.membership.phases.over:
            self._ended.ring()

    def _begin_training(self) -> None:
        self._early_ends.begin(self._runtime, self.clock, lambda ask: self._carry_out(ask(self._age_s())))
        if self._driver is not None:
            self._driver.start()
