"""`Coordinator`: carries out the membership state machine over streams.

It is not on the data path: it knows the members and which minibatches are in the model, and sees
neither gradients nor parameters. If two nodes cannot dial each other, its process forwards their bytes, without
reading them: see `relay`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from google.protobuf.message import Message

from gradstream.coordinator.checkpoint_writer import CheckpointHandler, CheckpointOptions, CheckpointWriter
from gradstream.coordinator.context import CoordinatorContext
from gradstream.coordinator.durable import Keeper, KeptState
from gradstream.coordinator.lead import Emit, Instruction, Notify, Refuse
from gradstream.coordinator.membership import Membership
from gradstream.coordinator.presence_service import Admitted, PresenceService
from gradstream.coordinator.relay import Age, RunClock
from gradstream.coordinator.resharding import Resharding
from gradstream.errors import ConfigError
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

# ---- request service ---------------------------------------------------------------------
# `RequestService`: answers the requests of workers. The workers' side is `client.requests`.


class RequestService:
    """Serves the requests that leads answer.

    Args:
        context: see `CoordinatorContext`.
    """

    def __init__(self, context: CoordinatorContext) -> None:
        self._context = context
        self._waiting: dict[Wakeup, None] = {}  # one for each request whose answer has to wait
        for lead in context.membership.leads:
            for method, kind in lead.REQUESTS.items():
                serve = partial(self._serve, kind, others_wait=lead.OTHERS_WAIT)
                context.endpoint.serve(method, serve, model=False)

    def wake(self) -> None:
        """Rechecks all requests whose answer has to wait."""
        for wakeup in self._waiting:
            wakeup.ring()

    async def _serve(self, kind: type[Message], stream: Stream, *, others_wait: bool) -> None:
        context, who = self._context, stream.opened.sender
        request = kind.FromString(stream.opened.body)
        context.carry_out(context.membership.ask(who, request, context.age_s()))
        if others_wait:
            self.wake()
        await self._answer(stream, lambda: context.membership.answer(who, request, context.age_s()))

    async def _answer(self, stream: Stream, decide: Callable[[], Message | Refuse | None]) -> None:
        """Answers once there is a decision; until then tells the worker for which others it waits."""
        who, wakeup, context = stream.opened.sender, Wakeup(), self._context
        self._waiting[wakeup] = None
        told_ns, sent = 0, list[v1.Node]()
        runtime, notice_s = context.runtime, context.deadlines.notice_s
        try:
            while (answer := decide()) is None:
                others = context.membership.nodes.workers
                if others is not sent or runtime.left_s(told_ns, notice_s) <= 0:
                    await stream.waiting(node.name for node in others if node.name != who)
                    told_ns, sent = runtime.now(), others
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

    Attributes:
        clock: time of the events.
        membership: see above.
        on_begin: called when training begins, with `clock.zero_ns`; not in a process that replaces another.
    """

    def __init__(
        self,
        runtime: Runtime,
        endpoint: Endpoint,
        membership: Membership,
        *,
        keeper: Keeper,
        checkpoints: CheckpointOptions | None = None,
    ) -> None:
        self._runtime = runtime
        self._endpoint = endpoint
        self.membership = membership
        self._begun = False  # the training
        self._keeper = keeper
        boundary = membership.life.boundary
        self.clock = boundary.clock or RunClock(runtime, membership.progress.earlier_s)
        endpoint.on_damage = lambda peer, size_bytes: self.emit(
            DamagedEvent(peer=peer, size_bytes=size_bytes)
        )
        self.on_begin: Callable[[int], None] = lambda zero_ns: None
        self._age_s = Age(runtime)
        self._ended = Wakeup()  # set when the run is over, and when a node is gone
        self._failed: FailedEvent | None = None
        self._num_news = 0  # number of receipts seen
        context = CoordinatorContext(
            runtime, endpoint, membership, carry_out=self._carry_out, age_s=self._age_s, keeper=keeper
        )
        self._writer: CheckpointWriter | None = None
        if checkpoints is not None:
            self._writer = CheckpointWriter(context, checkpoints)
            CheckpointHandler(runtime, endpoint, self._writer)
        self._presences = PresenceService(
            context,
            self.emit,
            on_events=self._take_events,
            on_beat=self._after_beat,
            on_lost=self._ended.ring,
        )
        self._requests = RequestService(context)
        own = {"clock": self.clock, "age": self._age_s, "heard": self._presences, "boundary": boundary}
        state = KeptState({**membership.parts(), **own})
        restored = keeper.restored
        keeper.begin(state, self._ended.ring)
        if restored:
            self._go_on()

    def _go_on(self) -> None:
        """Continues where an earlier process of the coordinator died: waits for its members, and trains."""
        membership = self.membership
        self._presences.await_members()
        if membership.life.training:
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
        at_boundary = self.membership.life.boundary.resume and self.membership.progress.in_loops
        deadline = runtime.expire_after(
            deadlines.patience_s if at_boundary else deadlines.join_s,  # the scripts are under way
            lambda: self._carry_out(self.membership.overdue(self._age_s())),
        )
        for node in self.membership.nodes.as_notice():  # members from an earlier process
            self._endpoint.know(node.name, node.address)
        if self._writer is not None:
            await self._writer.sweep()
        try:
            while not (self.membership.life.over or self._keeper.superseded):
                await self._ended.rung(runtime, deadlines.join_s)
        finally:
            deadline.cancel()
        if self._keeper.superseded is not None:
            raise self._keeper.superseded
        while self._presences.any_left and await self._ended.rung(runtime, deadlines.lease_s):
            pass
        if self._writer is not None:
            await self._writer.finish()
        return RunOutcome(self.membership.notice, self._failed or self._failed_before())

    def _failed_before(self) -> FailedEvent | None:
        """Why the run has failed, if an earlier process of the coordinator reported that, and died."""
        life = self.membership.life
        if life.status != v1.Notice.ABORTED:
            return None
        return FailedEvent(culprit=life.culprit, error=life.error, message=life.reason, traceback="")

    async def close(self) -> None:
        """Stores the rest of the state and the events. The last call."""
        await self._keeper.close()

    def stop(self) -> None:
        """Asks the run to stop, with a checkpoint if training has begun; `run` then returns."""
        self._carry_out(self.membership.life.ask_to_stop(self._age_s()))

    def reshard(self, servers: int, token: str = "") -> list[str]:
        """Asks the running job to change its number of shards; "reshard" events report the outcome.

        Args:
            servers: new number of shards.
            token: name of this request, in its events.

        Returns:
            Names of the new shards, which the caller has to start.

        Raises:
            ConfigError: the run cannot do that, or not now; an event says so, too.
        """
        try:
            if not self.membership.life.training:
                raise ConfigError(
                    f"reshard: servers={servers}: the run is not training; ask again when it is"
                )
            self._carry_out(self.membership.lead(Resharding).begin(servers, token, self._age_s()))
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
        """Keeps events of a node; some of them have consequences."""
        self._keeper.emit(admitted.lines)
        for event in admitted.events:
            if out := self.membership.event(event, self._age_s()):
                self._carry_out(out)

    def _after_beat(self) -> None:
        if self.membership.progress.num_news > self._num_news:
            self._num_news = self.membership.progress.num_news
            self._requests.wake()

    # ---- instructions -------------------------------------------------------------------

    def _carry_out(self, instructions: Sequence[Instruction]) -> None:
        self._keeper.changed()
        begins = self.membership.life.training and not self._begun
        if begins:
            self._begun = True
            if self.clock.begin():
                assert self.clock.zero_ns is not None
                self.on_begin(self.clock.zero_ns)
            self._begin_training()
        nodes = self.membership.nodes
        self._endpoint.identity.epoch = (
            nodes.epoch
        )  # so that it does not hold back calls of members that it has lost
        self._endpoint.members_changed(nodes.incarnations, nodes.revoked)
        for instruction in instructions:
            if isinstance(instruction, Emit):
                if isinstance(instruction.event, FailedEvent):
                    self._failed = instruction.event
                self.emit(instruction.event)
            elif isinstance(instruction, Notify):
                self._presences.notify()
                self._requests.wake()
            elif self._writer is not None:
                self._writer.carry_out(instruction)
        if self.membership.life.over:
            self._ended.ring()

    def _begin_training(self) -> None:
        for lead in self.membership.leads:
            for time_s, ask in lead.timers():
                self._runtime.call_later(
                    max(0.0, time_s - self.clock.time_s()),
                    lambda ask=ask: self._carry_out(ask(self._age_s())),  # type: ignore[misc]
                )
