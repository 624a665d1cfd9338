"""The coordinator: carries the membership state machine out over streams.

It is not on the data path: it knows who is in and which batches are in the model, and
sees neither gradients nor parameters.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradstream.checkpoint.manifest import Evaluated
from gradstream.coordinator.checkpoint_handler import CheckpointHandler
from gradstream.coordinator.checkpoint_writer import CheckpointOptions, CheckpointWriter
from gradstream.coordinator.event_gate import EventGate
from gradstream.coordinator.instructions import Commit, Discard, Emit, Instruction, Notify, Prepare, Refuse
from gradstream.coordinator.membership import Membership
from gradstream.coordinator.participation_driver import ParticipationDriver
from gradstream.coordinator.stopping import StoppingCriterion
from gradstream.errors import GradstreamError, PeerLostError, RefusedError
from gradstream.runtime.base import Runtime
from gradstream.runtime.deadlines import Deadlines
from gradstream.runtime.throttle import Throttle
from gradstream.runtime.wakeup import Wakeup
from gradstream.telemetry.events import Event, FailedEvent, RefusedEventsEvent, encode
from gradstream.transport.base import Endpoint, Stream
from gradstream.untrusted import escaped
from gradstream.wire import v1

__all__ = ["Coordinator", "RunOutcome"]

WHY_BYTES = 100
"""Of the reason in a `refused_events` event, which has at most 256 bytes in all."""

REASON_BYTES = 512
"""Of what a member or its carrier says about the end of its stream."""


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """How a run ended: `failed` is None when every sample is accounted for."""

    notice: v1.Notice
    failed: FailedEvent | None


class _Attendance:
    """How the coordinator hears a node that is in the run (the node's side is `Presence`).

    Args:
        stream: that "join" came on, or the last "resume".
        gate: for its events.
        refusals: tells of events that are refused.
    """

    def __init__(self, stream: Stream, gate: EventGate, refusals: Throttle[str]) -> None:
        self.stream = stream
        self.gate = gate
        self.refusals = refusals
        self.incarnation = stream.opened.incarnation
        self.wakeup = Wakeup()  # rings when it is to be told something
        self.heard = 0  # number of its last beat
        self.attempt = 0  # to resume


class Coordinator:
    """Serves "join" (the presence of each node), "resume", "assign" (minibatches for who asks), and so on.

    Args:
        runtime: time and tasks.
        endpoint: not started yet.
        membership: the state machine to carry out.
        on_events: gets JSON lines, the coordinator's own and those of all nodes, as they come.
        deadlines: how long membership waits.
        checkpoints: what checkpoints are made; None makes none.
        earlier_s: of the run's time before it was resumed.
        criterion: ends the run early.
        drive: says who takes part, and when; None where all do.
        num_samples: of a data epoch; None where nobody counts.
    """

    def __init__(
        self,
        runtime: Runtime,
        endpoint: Endpoint,
        membership: Membership,
        *,
        on_events: Callable[[bytes], None],
        deadlines: Deadlines,
        checkpoints: CheckpointOptions | None = None,
        earlier_s: float = 0.0,
        criterion: StoppingCriterion | None = None,
        drive: Callable[[ParticipationDriver], Awaitable[None]] | None = None,
        num_samples: int | None = None,
    ) -> None:
        self._runtime = runtime
        self._membership = membership
        self._on_events = on_events
        self._deadlines = deadlines
        self._born_ns = runtime.awake_ns()
        self._training_ns: int | None = None
        self._attending: dict[str, _Attendance] = {}
        self._reasons: dict[str, str] = {}  # why nodes were lost
        self._askers: dict[Wakeup, None] = {}
        self._ended = Wakeup()
        self._failed: FailedEvent | None = None
        self._endpoint = endpoint
        self._earlier_s = earlier_s
        self._criterion = criterion
        self._drive = drive
        self._driver: ParticipationDriver | None = None
        self._driving: asyncio.Task[None] | None = None
        if drive is not None:
            self._driver = ParticipationDriver(
                runtime,
                membership,
                self._carry_out,
                time_s=self._time_s,
                num_samples=num_samples,
                look_s=deadlines.notice_s,
            )
        self._writer = (
            None if checkpoints is None else CheckpointWriter(runtime, endpoint, membership, checkpoints)
        )
        if self._writer is not None:
            CheckpointHandler(runtime, endpoint, self._writer)
        self._jobs: dict[asyncio.Task[None], None] = {}  # of the writer
        endpoint.serve("join", self._serve_join, model=False)
        endpoint.serve("alive", self._serve_alive, model=False)
        endpoint.serve("resume", self._serve_resume, model=False)
        endpoint.serve("assign", self._serve_assign, model=False)
        endpoint.serve("ending", self._serve_ending, model=False)
        endpoint.serve("take_over", self._serve_take_over, model=False)
        endpoint.serve("shares", self._serve_shares, model=False)

    def emit(self, event: Event) -> None:
        """Adds a record of the coordinator's own."""
        self._on_events(encode(event, node=self._runtime.node, time_s=self._time_s()))

    async def run(self) -> RunOutcome:
        """Returns when the run is over and every member has left, or had a lease's time to."""
        deadline = self._runtime.expire_after(
            self._deadlines.join_s, lambda: self._carry_out(self._membership.overdue())
        )
        if self._writer is not None:
            await self._writer.sweep()
        try:
            while not self._membership.phases.over:
                await self._ended.rung(self._runtime, self._deadlines.join_s)
        finally:
            deadline.cancel()
            if self._driving is not None:
                self._driving.cancel()
        while self._attending and await self._ended.rung(self._runtime, self._deadlines.lease_s):
            pass
        await self._runtime.gather(*self._jobs)
        return RunOutcome(self._membership.notice, self._failed)

    def stop(self) -> None:
        """Asks the run to stop, with a checkpoint if there is anything to keep; `run` returns then."""
        self._carry_out(self._membership.stop(self._age_s()))

    # ---- attendance ---------------------------------------------------------------------

    async def _serve_join(self, stream: Stream) -> None:
        request = v1.Join.FromString(stream.opened.body)
        who = request.node.name
        if who != stream.opened.sender:
            stream.refuse(v1.BAD_REQUEST, f"{stream.opened.sender} asks to join as {who}")
            return
        instructions = self._membership.join(request, self._age_s())
        for instruction in instructions:
            if isinstance(instruction, Refuse):
                stream.refuse(instruction.code, instruction.message)
                return
        self._endpoint.know(who, request.node.address)
        refusals: Throttle[str] = Throttle(
            self._runtime, lambda why, more: self.emit(_refused_events(who, more + 1, why))
        )
        attendance = self._attending[who] = _Attendance(stream, EventGate(who, self._age_s()), refusals)
        self._carry_out(instructions)
        await self._attend(attendance, stream, who)

    async def _attend(self, attendance: _Attendance, stream: Stream, who: str) -> None:
        """Hears and tells a member over one stream, until it leaves, is lost, or has another stream."""
        reason = ""
        try:
            await self._runtime.gather(self._listen(attendance, stream, who), self._tell(attendance, stream))
        except Exception as error:  # its stream is broken, or what came on it makes no sense
            reason = escaped(str(error).removeprefix(f"{who}: "), REASON_BYTES)
            if isinstance(error, RefusedError):
                stream.refuse(v1.BAD_REQUEST, error.reason)
        resumed = reason and attendance.stream is not stream
        if resumed or self._attending.get(who) is not attendance:
            return
        # Not in a `finally`: a coordinator that is itself being stopped has lost nobody.
        del self._attending[who]
        attendance.refusals.close()
        self._reasons[who] = reason or "it left"
        self._carry_out(self._membership.lost(who, reason, self._age_s(), stream.certificate))
        self._tell_driver()
        self._ended.ring()

    async def _listen(self, attendance: _Attendance, stream: Stream, who: str) -> None:
        """Takes beats until the member leaves. Raises when it was not allowed to, or is gone."""
        while True:
            received = await stream.recv(self._deadlines.lease_s)
            if received is None:
                if not self._membership.phases.over:
                    raise PeerLostError(who, "left before the run was over")
                return
            attendance.stream.heard()
            beat = v1.Beat.FromString(received.frame.body.data)
            if beat.number <= attendance.heard:
                continue  # said again over another stream
            if beat.number != attendance.heard + 1:
                raise RefusedError(who, "BAD_REQUEST", f"beat {beat.number} follows {attendance.heard}")
            self._membership.check(who, beat)
            attendance.heard = beat.number
            if beat.events:
                admitted = attendance.gate.take(beat.events, self._age_s())
                if admitted.num_refused:
                    attendance.refusals.tell(admitted.why, admitted.num_refused)
                if admitted.lines:
                    self._on_events(admitted.lines)
                    self._note(admitted.events)
            self._carry_out(self._membership.beat(who, beat, self._age_s()))
            self._tell_driver()
            if (beat.receipts or beat.verdicts) and self._criterion is not None:
                self._reached(self._criterion.counted(self._membership.progress.num_samples))
            if beat.receipts or beat.verdicts:
                self._wake_askers()

    def _tell_driver(self) -> None:
        if self._driver is not None:
            self._driver.look()

    async def _tell(self, attendance: _Attendance, stream: Stream) -> None:
        """Sends the notice at each change, and now and then as a sign of life, up to the last one.

        Whom the coordinator does not hear gets no sign of life: so a member that cannot be heard notices, and
        says over a new connection that it is alive.

        The stream ends only when the member has ended its side: that is how a member knows that
        its last beat was heard.
        """
        while True:
            notice, heard = self._membership.notice, v1.Notice(heard=attendance.heard)
            # Two serialized messages, one behind the other, are one that has the fields of both.
            said = notice.SerializeToString() + heard.SerializeToString()
            await stream.send(v1.Frame(body=v1.Body(data=said)))
            if notice.phase >= v1.Notice.FINISHED:
                return
            while not await attendance.wakeup.rung(self._runtime, self._deadlines.notice_s):
                if self._runtime.left_s(stream.heard_ns, 3 * self._deadlines.beat_s) > 0:
                    break

    async def _serve_alive(self, stream: Stream) -> None:
        """A member that has not heard the coordinator for some time shows itself over another connection."""
        attendance = self._present(stream)
        if attendance is not None:
            attendance.stream.heard()
            await stream.send(v1.Frame(body=v1.Body()))

    async def _serve_resume(self, stream: Stream) -> None:
        """A member whose connection is silent goes on over another one.

        The old stream is left to end by itself: the member may go on with it until it hears the answer.
        """
        attendance, attempt = self._present(stream), v1.Resume.FromString(stream.opened.body).attempt
        if attendance is None:
            return
        if attempt <= attendance.attempt:
            stream.refuse(v1.BAD_REQUEST, f"attempt {attempt} comes after attempt {attendance.attempt}")
            return
        attendance.stream, attendance.attempt = stream, attempt
        await self._attend(attendance, stream, stream.peer)

    def _present(self, stream: Stream) -> _Attendance | None:
        """The attendance of the caller. Refuses a caller that is not in the run, or no more."""
        attendance = self._attending.get(stream.peer)
        if attendance is not None and attendance.incarnation == stream.opened.incarnation:
            return attendance
        not_in = f"it is not in this run; in are {', '.join(self._attending)}"
        stream.refuse(v1.NOT_MEMBER, self._reasons.get(stream.peer, not_in))
        return None

    # ---- what workers ask ---------------------------------------------------------------

    async def _serve_assign(self, stream: Stream) -> None:
        request, who = v1.Ask.FromString(stream.opened.body), stream.opened.sender
        replies = self._membership.replies
        self._carry_out(replies.measured(who, request))
        await self._answer(stream, lambda: replies.assign(who, request, self._age_s()))

    async def _serve_ending(self, stream: Stream) -> None:
        request, who = v1.Ending.FromString(stream.opened.body), stream.opened.sender
        self._wake_askers()  # what this one says may be what they wait for
        await self._answer(stream, lambda: self._membership.replies.ending(who, request))

    async def _serve_take_over(self, stream: Stream) -> None:
        request, who = v1.TakeOver.FromString(stream.opened.body), stream.opened.sender
        await self._answer(stream, lambda: self._membership.replies.take_over(who, request))

    async def _serve_shares(self, stream: Stream) -> None:
        request, who = v1.Took.FromString(stream.opened.body), stream.opened.sender
        self._carry_out(self._membership.replies.took(who, request))
        self._wake_askers()  # this one may be whom they wait for
        await self._answer(stream, lambda: self._membership.replies.shares(who, request))

    async def _answer(
        self,
        stream: Stream,
        decide: Callable[[], v1.Assigned | v1.Ended | v1.Shares | v1.TakenOver | Refuse | None],
    ) -> None:
        """Answers once there is a decision; until then says for whom it has to wait."""
        who, wakeup = stream.opened.sender, Wakeup()
        self._askers[wakeup] = None
        try:
            while (answer := decide()) is None:
                others = [name for name in self._membership.nodes.worker_names if name != who]
                await stream.waiting(others)
                await wakeup.rung(self._runtime, self._deadlines.notice_s)
        finally:
            del self._askers[wakeup]
        if isinstance(answer, Refuse):
            stream.refuse(answer.code, answer.message)
            return
        await stream.send(v1.Frame(body=v1.Body(data=answer.SerializeToString())))

    def _wake_askers(self) -> None:
        for wakeup in self._askers:
            wakeup.ring()

    # ---- instructions -------------------------------------------------------------------

    def _carry_out(self, instructions: Sequence[Instruction]) -> None:
        if self._training_ns is None and self._membership.phases.training:
            self._training_ns = self._runtime.now()
            self._watch_clock()
            if self._driver is not None and self._drive is not None:
                work = self._driver.run(self._drive)
                self._driving = self._runtime.spawn(work, name=f"{self._runtime.node}-drive")
        nodes = self._membership.nodes
        self._endpoint.members_changed(nodes.incarnations, nodes.revoked)
        for instruction in instructions:
            if isinstance(instruction, Emit):
                if isinstance(instruction.event, FailedEvent):
                    self._failed = instruction.event
                self.emit(instruction.event)
            elif isinstance(instruction, Notify):
                for attendance in self._attending.values():
                    attendance.wakeup.ring()
                self._wake_askers()
            elif isinstance(instruction, Prepare | Commit | Discard):
                name = (
                    f"{self._runtime.node}-{type(instruction).__name__.lower()}-{instruction.snapshot.number}"
                )
                job = self._runtime.spawn(self._keep(instruction), name=name)
                self._jobs[job] = None
                job.add_done_callback(lambda done: self._jobs.pop(done, None))
        if self._membership.phases.over:
            self._ended.ring()

    async def _keep(self, instruction: Prepare | Commit | Discard) -> None:
        """Has the writer do it, and tells the state machine what came of it."""
        snapshot, membership, writer = instruction.snapshot, self._membership, self._writer
        assert writer is not None
        try:
            if isinstance(instruction, Prepare):
                places = await writer.prepare(snapshot)
                self._carry_out(membership.prepared(snapshot, places, self._age_s()))
            elif isinstance(instruction, Commit):
                folder, size_bytes = await writer.commit(snapshot)
                self._carry_out(membership.committed(snapshot, folder, size_bytes, self._age_s()))
            else:
                await writer.discard(snapshot)
        except (OSError, GradstreamError) as error:
            why = f"{type(error).__name__}: {error}"
            self._carry_out(membership.snapshot_failed(snapshot, self._runtime.node, why, self._age_s()))

    def _note(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Remembers the latest evaluation, which the next checkpoint tells of, and looks for the criterion."""
        criterion = self._criterion if self._criterion is not None and self._criterion.needs_events else None
        for event in events:
            if event["event"] == "evaluated":
                self._membership.snapshots.evaluated = Evaluated(
                    event["step"], event["accuracy"], event["loss"]
                )
            if criterion is not None:
                self._reached(criterion.event(event))

    def _reached(self, reason: str) -> None:
        """Ends the run if there is a reason to."""
        if reason:
            self._carry_out(self._membership.finish(reason, self._age_s()))

    def _watch_clock(self) -> None:
        criterion = self._criterion
        if criterion is not None and criterion.until.seconds is not None:
            left_s = max(0.0, criterion.until.seconds - self._earlier_s)
            self._runtime.call_later(left_s, lambda: self._reached(criterion.timed()))

    def _age_s(self) -> float:
        """What membership goes by: nobody is late by what the coordinator itself stood still."""
        return (self._runtime.awake_ns() - self._born_ns) / 1e9

    def _time_s(self) -> float:
        """Seconds of training so far, those before the run was resumed included."""
        if self._training_ns is None:
            return self._earlier_s
        return self._earlier_s + (self._runtime.now() - self._training_ns) / 1e9


def _refused_events(who: str, count: int, why: str) -> RefusedEventsEvent:
    return RefusedEventsEvent(who=who, count=count, why=escaped(ascii(why)[1:-1], WHY_BYTES))
