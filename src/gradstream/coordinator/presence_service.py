"""`PresenceService`: hears the nodes of a run, and sends them notices. The nodes' side is `client.presence`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from gradstream.coordinator.context import CoordinatorContext
from gradstream.coordinator.lead import Refuse
from gradstream.errors import DeadlineError, PeerLostError, RefusedError
from gradstream.runtime.deadlines import to_wait_longer
from gradstream.runtime.tasks import Throttle, Wakeup
from gradstream.telemetry.event_lines import EventError, parse_event
from gradstream.telemetry.events import Event, RefusedEventsEvent
from gradstream.transport.base import Stream
from gradstream.transport.limits import LIMITS
from gradstream.untrusted import escaped
from gradstream.wire import v1

# ---- event gate --------------------------------------------------------------------------
# `EventGate`: checks the events that a member sends. Pure, but for the time that callers pass.
#
# A member reports only in its own name, only records of known classes, and a bounded number of bytes. The gate drops
# and counts everything else. So no member can fill the run directory, speak for another, or break a reader of events.


class Admitted(NamedTuple):
    """The admitted events of a beat.

    Args:
        lines: the events as JSON lines.
        events: the same events, parsed.
        num_refused: number of lines that were dropped.
        why: why the latest of them was dropped.
    """

    lines: bytes
    events: list[dict[str, Any]]
    num_refused: int
    why: str


class EventGate:
    """Checks the events of one member.

    Args:
        member: name of the member.
        at_s: current time in seconds.
    """

    def __init__(self, member: str, at_s: float) -> None:
        self._member = member
        self._at_s = at_s
        self._left_bytes = float(LIMITS.events_burst_bytes)

    def take(self, data: bytes, at_s: float) -> Admitted:
        """Checks the events of one beat.

        Args:
            data: JSON lines from the member.
            at_s: current time in seconds.
        """
        earned_bytes = (at_s - self._at_s) * LIMITS.events_bytes_s
        self._left_bytes = min(LIMITS.events_burst_bytes, self._left_bytes + earned_bytes)
        self._at_s = at_s
        num_refused, why = 0, ""
        if len(data) > LIMITS.beat_events_bytes:
            why = f"{len(data):,} bytes of events in one beat, expected at most {LIMITS.beat_events_bytes:,}"
        elif len(data) > self._left_bytes:
            why = f"more than {LIMITS.events_bytes_s:,} bytes of events a second"
        if why:
            return Admitted(b"", [], max(1, data.count(b"\n")), why)
        self._left_bytes -= len(data)
        admitted: list[bytes] = []
        events: list[dict[str, Any]] = []
        lines = data.split(b"\n")
        last = lines.pop()
        for line in [*lines, last] if last else lines:
            try:
                events.append(parse_event(line, max_bytes=LIMITS.event_bytes, member=self._member))
                admitted.append(line + b"\n")
            except EventError as error:
                num_refused, why = num_refused + 1, str(error)
        return Admitted(b"".join(admitted), events, num_refused, why)


def in_beats(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Divides lines into pieces that the gate accepts in one beat each; at least one, which may be empty."""
    piece: list[bytes] = []
    size_bytes = 0
    for line in lines:
        if size_bytes + len(line) > LIMITS.beat_events_bytes:
            yield b"".join(piece)
            piece, size_bytes = [], 0
        piece.append(line)
        size_bytes += len(line)
    yield b"".join(piece)


# ---- presence service --------------------------------------------------------------------

WHY_BYTES = 100
"""Most bytes of the reason in a `refused_events` event, which has at most 256 bytes in all."""

ENTER_S = 0.05
"""Seconds between two checks whether a worker that came after training had begun can enter."""

RETURN_S = 1.0
"""Seconds in which a live member finds a new process of the coordinator. Another process that asks for its
place has to wait that long: otherwise it could push out a live member."""

REASON_BYTES = 512
"""Most bytes of the reason why a stream ended."""


@dataclass(slots=True, eq=False)
class _Presence:
    """The presence of one node."""

    stream: Stream | None  # of "join", or of the latest "resume"; None while it is awaited
    gate: EventGate
    refusals: Throttle[str]  # reports refused events
    incarnation: int
    wakeup: Wakeup = field(default_factory=Wakeup)  # set when there is a new notice
    attempt: int = 0  # number of the latest "resume"
    settled: Stream | None = None  # the stream that the member uses: it has sent a beat there

    def hear(self) -> None:
        """Notes a heartbeat."""
        if self.stream is not None:
            self.stream.heard()


@dataclass(slots=True, eq=False)
class _SentNotice:
    """A notice to members. It names all nodes, so it is made once for all of them."""

    notice: v1.Notice
    data: bytes
    seen_ns: int  # when it was last known to be up to date


class PresenceService:
    """Serves "join", "alive" and "resume".

    Args:
        context: see `CoordinatorContext`.
        emit: adds a record to the events of the run.
        on_events: takes the admitted events of a beat, before the beat.
        on_beat: called after the state machine has taken a beat.
        on_lost: called after the state machine has removed a member.

    Attributes:
        heard: by member, the number of its latest beat.
        certificates: by member, the SHA-256 of its certificate; b"" without TLS.
    """

    KEPT = ("heard", "certificates")
    """See `durable.state`."""

    def __init__(
        self,
        context: CoordinatorContext,
        emit: Callable[[Event], None],
        on_events: Callable[[Admitted], None],
        on_beat: Callable[[], None],
        on_lost: Callable[[], None],
    ) -> None:
        self._context = context
        self._membership = context.membership
        self._emit = emit
        self._on_events = on_events
        self._on_beat = on_beat
        self._on_lost = on_lost
        self.heard: dict[str, int] = {}
        self.certificates: dict[str, bytes] = {}
        self._presences: dict[str, _Presence] = {}
        self._sent: _SentNotice | None = None
        self._outdated = True
        self._reasons: dict[str, str] = {}  # why nodes were lost, or may soon be
        context.endpoint.serve("join", self._serve_join, model=False)
        context.endpoint.serve("alive", self._serve_alive, model=False)
        context.endpoint.serve("resume", self._serve_resume, model=False)

    @property
    def any_left(self) -> bool:
        """Whether a node is present."""
        return bool(self._presences)

    def notify(self) -> None:
        """Sends the new notice to all members."""
        self._outdated = True
        for presence in self._presences.values():
            presence.wakeup.ring()

    async def _serve_join(self, stream: Stream) -> None:
        request, context = v1.Join.FromString(stream.opened.body), self._context
        who = request.node.name
        if who != stream.opened.sender:
            stream.refuse(v1.BAD_REQUEST, f"{stream.opened.sender} asks to join as {who}")
            return
        awaited = self._presences.get(who)
        if (
            awaited is not None
            and awaited.stream is None
            and awaited.incarnation != stream.opened.incarnation
        ):
            await stream.waiting([who])
            await context.runtime.sleep(min(RETURN_S, context.deadlines.lease_s / 2))
            self._reasons[who] = why = "another process has taken its place"
            self._give_up(awaited, who, awaited.attempt, why, self.certificates.get(who, b""))
        await self._left(stream, who)
        while not (instructions := self._membership.join(request, context.age_s())):
            context.carry_out(self._membership.waits(context.age_s()))
            await stream.waiting(self._membership.nodes.worker_names)
            await context.runtime.sleep(ENTER_S)
        for instruction in instructions:
            if isinstance(instruction, Refuse):
                stream.refuse(instruction.code, instruction.message)
                return
        context.endpoint.know(who, request.node.address)
        self.heard[who] = 0
        self.certificates[who] = stream.certificate
        presence = self._expect(request.node, stream)
        context.carry_out(instructions)
        await self._attend(presence, stream, who)

    async def _left(self, stream: Stream, who: str) -> None:
        """Waits until the coordinator notices that an earlier process is gone; not if that process still answers."""
        runtime, since_ns = self._context.runtime, self._context.runtime.now()
        while self._membership.life.training and (there := self._presences.get(who)) is not None:
            if there.stream is not None and there.stream.heard_ns > since_ns:
                return
            await stream.waiting([who])
            await runtime.sleep(ENTER_S)

    def _expect(self, node: v1.Node, stream: Stream | None) -> _Presence:
        """Notes that a member is present, or may come back."""
        context, who = self._context, node.name
        refusals: Throttle[str] = Throttle(
            context.runtime, lambda why, more: self._emit(_refused_events(who, more + 1, why))
        )
        gate = EventGate(who, context.age_s())
        presence = self._presences[who] = _Presence(stream, gate, refusals, node.incarnation)
        return presence

    def await_members(self) -> None:
        """Waits for the members of an earlier process of the coordinator; after a lease they count as lost."""
        lease_s = self._context.deadlines.lease_s
        for node in self._membership.nodes.as_notice():
            why = f"did not come back within {lease_s:g} s after the coordinator was started again"
            self._reasons[node.name] = why = f"{why}; {to_wait_longer('lease_s')}"
            self._await(self._expect(node, None), node.name, why, self.certificates.get(node.name, b""))
        for shard in self._membership.nodes.missing_shards:
            self._await_shard(shard)

    def _await_shard(self, name: str) -> None:
        """Ends the run unless a new process of a lost shard joins in time."""
        context, wait_s = self._context, self._context.deadlines.retry_s

        def overdue() -> None:
            if not context.keeper.superseded:
                context.carry_out(self._membership.abandon(name, wait_s))

        context.runtime.expire_after(wait_s, overdue)

    def _await(self, presence: _Presence, who: str, why: str, certificate: bytes) -> None:
        """Waits a lease for a member to come back."""
        give_up = partial(self._give_up, presence, who, presence.attempt, why, certificate)
        self._context.runtime.expire_after(self._context.deadlines.lease_s, give_up)

    def _give_up(self, presence: _Presence, who: str, attempt: int, why: str, certificate: bytes) -> None:
        """Removes a member that has not come back since an attempt."""
        comes_back = presence.stream is not None or presence.attempt > attempt
        if not comes_back and self._presences.get(who) is presence:
            self._remove(presence, who, why, certificate)

    def _remove(self, presence: _Presence, who: str, reason: str, certificate: bytes) -> None:
        del self._presences[who]
        presence.refusals.close()
        context = self._context
        context.carry_out(self._membership.lost(who, reason, context.age_s(), certificate))
        if who in self._membership.nodes.missing_shards and not self._membership.life.over:
            self._await_shard(who)
        self._on_lost()

    async def _attend(self, presence: _Presence, stream: Stream, who: str) -> None:
        """Serves a member over one stream, until the member leaves, is lost, or has another stream."""
        reason, brief = "", "it left"
        try:
            listening, telling = self._listen(presence, stream, who), self._tell(presence, stream)
            await self._context.runtime.gather(listening, telling)
        except Exception as error:  # the stream is broken, or a message on it makes no sense
            reason = escaped(str(error).removeprefix(f"{who}: "), REASON_BYTES)
            brief = escaped(error.what, REASON_BYTES) if isinstance(error, DeadlineError) else reason
            if isinstance(error, RefusedError):
                stream.refuse(v1.BAD_REQUEST, error.reason)
        resumed = reason and presence.stream is not stream
        if resumed or self._presences.get(who) is not presence or self._context.keeper.superseded:
            return
        self._reasons[who] = brief
        if reason and presence.attempt and presence.settled is not stream:
            presence.stream = None  # the member may have given up only this attempt
            self._await(presence, who, reason, self.certificates.get(who, b""))
            return
        # Not in a `finally`: a coordinator that is itself being stopped has lost no member.
        self._remove(presence, who, reason, self.certificates.get(who, b""))

    async def _listen(self, presence: _Presence, stream: Stream, who: str) -> None:
        """Takes beats until the member leaves. Raises if it leaves too early, or is gone."""
        context = self._context
        while True:
            received = await stream.recv(context.deadlines.lease_s)
            if received is None:
                if not self._membership.life.over:
                    raise PeerLostError(who, "left before the run was over")
                return
            presence.hear()
            presence.settled = stream
            presence.stream = presence.stream or stream  # the member uses an older stream
            beat = v1.Beat.FromString(received.frame.body.data)
            heard = self.heard.get(who, 0)
            if beat.number <= heard:
                continue  # repeated over another stream
            if beat.number != heard + 1:
                raise RefusedError(who, "BAD_REQUEST", f"beat {beat.number} follows {heard}")
            self._membership.check(who, beat)
            self.heard[who] = beat.number
            context.keeper.changed()
            if beat.events:
                admitted = presence.gate.take(beat.events, context.age_s())
                if admitted.num_refused:
                    presence.refusals.tell(admitted.why, admitted.num_refused)
                if admitted.lines:
                    self._on_events(admitted)
            context.carry_out(self._membership.beat(who, beat, context.age_s()))
            self._on_beat()
            why = self._membership.nodes.expelled.get(who, "")
            if why and not self._membership.life.over:
                stream.refuse(v1.NOT_MEMBER, why)
                raise PeerLostError(who, why)

    async def _tell(self, presence: _Presence, stream: Stream) -> None:
        """Sends the notice at each change, and repeatedly as a heartbeat, until the last one is sent.

        A heartbeat does not repeat the notice: for 2,000 nodes it has 100 kB, and each of them gets one.

        A member that the coordinator does not hear gets no heartbeat. So a member whose messages are lost
        notices it, and reports over a new connection that it is alive.

        The coordinator does not end the stream before the member has ended its side: so the member knows that
        its last beat was received.
        """
        runtime, deadlines = self._context.runtime, self._context.deadlines
        before: _SentNotice | None = None
        self._outdated = True
        while True:
            newest, heard = self._newest(), v1.Notice(heard=self.heard.get(stream.peer, 0))
            notice, heard.unchanged = newest.notice, newest is before
            before = newest
            if notice.status != v1.Notice.GATHERING or self._membership.life.boundary.resume:
                heard.ruling = self._context.keeper.ruling
            # Two serialized messages, one after the other, are one message with the fields of both.
            data = (b"" if heard.unchanged else newest.data) + heard.SerializeToString()
            await self._context.keeper.durable()
            await stream.send(v1.Frame(body=v1.Body(data=data)))
            if notice.status >= v1.Notice.FINISHED:
                return
            while not await presence.wakeup.rung(runtime, deadlines.notice_s):
                if runtime.left_s(stream.heard_ns, 3 * deadlines.beat_s) > 0:
                    break

    def _newest(self) -> _SentNotice:
        """The notice as it is now, or was `Deadlines.notice_s` ago if nobody has been notified since.

        Making it takes milliseconds if there are thousands of nodes, each of which may ask for it.
        """
        newest, runtime = self._sent, self._context.runtime
        fresh_s = 0.0 if newest is None else runtime.left_s(newest.seen_ns, self._context.deadlines.notice_s)
        if newest is not None and fresh_s > 0 and not self._outdated:
            return newest
        self._outdated = False
        notice, now_ns = self._membership.notice, runtime.now()
        if newest is None or newest.notice != notice:
            self._sent = newest = _SentNotice(notice, notice.SerializeToString(), now_ns)
        newest.seen_ns = now_ns
        return newest

    async def _serve_alive(self, stream: Stream) -> None:
        """Answers a member that has not heard the coordinator for some time, over another connection."""
        presence = self._present(stream)
        if presence is not None:
            presence.hear()
            await stream.send(v1.Frame(body=v1.Body()))

    async def _serve_resume(self, stream: Stream) -> None:
        """Moves the presence of a member, whose connection is silent, to another connection.

        The old stream is left to end by itself: the member may use it until it receives the answer.
        """
        presence, attempt = self._present(stream), v1.Resume.FromString(stream.opened.body).attempt
        if presence is None:
            return
        if attempt <= presence.attempt:
            stream.refuse(v1.BAD_REQUEST, f"attempt {attempt} comes after attempt {presence.attempt}")
            return
        presence.stream, presence.attempt = stream, attempt
        await self._attend(presence, stream, stream.peer)

    def _present(self, stream: Stream) -> _Presence | None:
        """Returns the presence of the caller; refuses a caller that is not a member."""
        presence = self._presences.get(stream.peer)
        if presence is not None and presence.incarnation == stream.opened.incarnation:
            return presence
        not_in = f"it is not in this run; in are {', '.join(self._presences)}"
        stream.refuse(v1.NOT_MEMBER, self._reasons.get(stream.peer, not_in))
        return None


def _refused_events(who: str, count: int, why: str) -> RefusedEventsEvent:
    return RefusedEventsEvent(who=who, count=count, why=escaped(ascii(why)[1:-1], WHY_BYTES))
