"""`Presence`: a stream on which a node's beats go to the coordinator, and notices come back.

A connection may die silently, when something between two machines drops its packets. So beats are numbered,
and kept until a notice acknowledges them. If the first connection stays silent while a new one works (see
`Heartbeat`), the node moves to the new one: it resends the unacknowledged beats, in order, and the
coordinator takes each beat once.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from gradstream.coordinator.nodes import COORDINATOR
from gradstream.errors import DeadlineError, GradstreamError, PeerCancelledError, PeerLostError, RefusedError
from gradstream.runtime.base import Runtime
from gradstream.runtime.deadlines import Deadlines
from gradstream.runtime.tasks import Wakeup
from gradstream.transport.base import Endpoint, Priority, Stream
from gradstream.wire import v1

# ---- presence ----------------------------------------------------------------------------

EVICTED = ("NOT_MEMBER", "BAD_CERTIFICATE")
"""Codes of refusals that tell a node that it is no longer in the run."""

REDIAL_S = 0.1
"""Seconds between two attempts to reach a coordinator that has died."""


class Presence:
    """Sends a node's beats to the coordinator and receives the notices; moves to another stream if one is silent.

    Args:
        runtime: the node's runtime; only its time is used.
        stream: the first stream, opened by "join".
        deadlines: bound the silence of the coordinator.

    Attributes:
        num_receipts: number of receipts that the coordinator has acknowledged.
    """

    def __init__(self, runtime: Runtime, endpoint: Endpoint, stream: Stream, deadlines: Deadlines) -> None:
        self._runtime = runtime
        self._endpoint = endpoint
        self._stream = stream
        self._deadlines = deadlines
        self._said = 0  # number of the latest beat
        self._unheard: deque[v1.Beat] = deque()
        self._saying = asyncio.Lock()
        self._answer: v1.Notice | None = None  # first notice of a resumed presence, not yet returned
        self._latest: dict[Stream, v1.Notice] = {}  # by stream
        self._attempt = 0
        self._resuming = False
        self.num_receipts = 0
        self._resumed = Wakeup()  # set when an attempt has ended
        self._ruling = 0  # the highest ruling so far

    @property
    def comes_back(self) -> bool:
        """Whether a new process replaces a coordinator that has died."""
        return self._ruling > 0

    @property
    def heard_ns(self) -> int:
        """When the coordinator was last heard, in nanoseconds on the runtime's clock."""
        return self._stream.heard_ns

    async def say(self, beat: v1.Beat) -> None:
        """Sends a beat. The coordinator takes it once, however often the presence is resumed.

        Raises:
            GradstreamError: the stream is over.
        """
        async with self._saying:
            self._said += 1
            beat.number = self._said
            self._unheard.append(beat)
            stream = self._stream
            try:
                await _send(stream, beat)
            except GradstreamError:
                if not (self._resuming or self.comes_back):  # otherwise `resume` sends it again
                    raise

    async def hear(self) -> v1.Notice:
        """Returns the next notice; the same object again if nothing has changed.

        Raises:
            GradstreamError: the coordinator is silent for `Deadlines.patience_s`, or the stream is over.
        """
        while self._answer is None:
            stream = self._stream
            try:
                return await self._recv(stream, self._deadlines.patience_s)
            except GradstreamError as error:
                while self._resuming:
                    await self._resumed.rung(self._runtime, self._deadlines.lease_s)
                if self._stream is stream and not await self._found_again(stream, error):
                    raise
        answer, self._answer = self._answer, None
        return answer

    async def _found_again(self, stream: Stream, error: GradstreamError) -> bool:
        """Dials a dead coordinator until a new process answers. Returns whether that happened in time.

        Raises:
            RefusedError: the new process does not know this node.
        """
        decided = isinstance(error, DeadlineError | RefusedError) or was_silent(error)
        if not self.comes_back or decided:
            return False
        heard_ns = stream.heard_ns
        while self._stream is stream and self._runtime.left_s(heard_ns, self._deadlines.patience_s) > 0:
            try:
                await self.resume()
            except RefusedError as refused:
                if refused.code in EVICTED:
                    raise
            except GradstreamError:
                pass
            if self._stream is stream:
                await self._runtime.sleep(min(REDIAL_S, self._deadlines.beat_s))
        return self._stream is not stream

    async def _recv(self, stream: Stream, silence_s: float) -> v1.Notice:
        received = await stream.recv(silence_s)
        if received is None:
            raise PeerLostError(COORDINATOR, "closed its stream with this node before the run was over")
        notice = v1.Notice.FromString(received.frame.body.data)
        if notice.ruling < self._ruling:
            raise PeerLostError(
                COORDINATOR, f"its process {notice.ruling} is superseded by process {self._ruling}"
            )
        self._ruling = notice.ruling
        notice.ClearField("ruling")
        while self._unheard and self._unheard[0].number <= notice.heard:
            self.num_receipts += len(self._unheard.popleft().receipts)
        if notice.unchanged:
            if (latest := self._latest.get(stream)) is None:
                raise PeerLostError(COORDINATOR, "says that nothing has changed, before its first notice")
            return latest
        notice.ClearField("heard")
        self._latest[stream] = notice
        return notice

    async def resume(self) -> None:
        """Moves to a new connection. Does nothing while another attempt is under way.

        Raises:
            RefusedError: the coordinator has counted this node as lost.
            PeerLostError: no process listens at the coordinator's address.
        """
        if self._resuming:
            return
        self._resuming = True
        self._attempt += 1
        try:
            stream = await self._endpoint.open(
                COORDINATOR,
                "resume",
                v1.Resume(attempt=self._attempt),
                priority=Priority.CONTROL,
                new_connection=True,
            )
            await self._go_on(stream)
        finally:
            self._resuming = False
            self._resumed.ring()

    async def _go_on(self, stream: Stream) -> None:
        try:
            answer = await self._recv(stream, self._deadlines.lease_s / 2)
        except BaseException:
            stream.cancel("it was not answered in time")
            raise
        self._stream.cancel("resumed over another connection")  # so that a waiting `say` releases the lock
        async with self._saying:
            self._stream, self._answer, self._latest = stream, answer, {stream: answer}
            for beat in list(self._unheard):
                await _send(stream, beat)

    async def end(self) -> None:
        """Says goodbye, and waits until the coordinator has received it. Raises as `hear` does."""
        while True:
            stream = self._stream
            try:
                await stream.end()
                while await stream.recv(self._deadlines.patience_s) is not None:
                    pass
                return
            except GradstreamError as error:
                if not await self._found_again(stream, error):
                    raise

    def cancel(self, reason: str) -> None:
        """Cancels the stream."""
        self._stream.cancel(reason)


def was_silent(error: GradstreamError) -> bool:
    """Whether the coordinator has cancelled the stream because this node was silent for longer than its lease."""
    return isinstance(error, PeerCancelledError) and error.cause == v1.Cancel.SILENT


async def _send(stream: Stream, beat: v1.Beat) -> None:
    await stream.send(v1.Frame(body=v1.Body(data=beat.SerializeToString())))


# ---- heartbeat ----------------------------------------------------------------------------
# `Heartbeat`: shows that a node is alive while the coordinator is silent.
#
# A connection that has lost packets resends them after growing pauses (0.2 s, 0.4 s, 0.8 s, and so on), so it may
# stay silent long after the network works again. A new connection does not. So a node that has not heard the
# coordinator for some time sends "alive" over new connections, one every `Deadlines.beat_s`. If the coordinator
# answers there while the first connection is still silent, the node moves its presence to another connection (see
# `Presence`).

_log = logging.getLogger(__name__)

MAX_TRIES = 8
"""Most attempts at a time; half of the connections that the coordinator allows a node (`LIMITS.sessions`)."""


class EvictedError(GradstreamError):
    """The coordinator has counted this node as lost; the run continues without it, or has ended.

    Args:
        reason: the coordinator's reason.
    """

    def __init__(self, node: str, reason: str) -> None:
        super().__init__(
            f"{node} was stopped, or cut off from the coordinator, for longer than its lease: the "
            f"coordinator has counted it as lost ({reason}), and takes nothing from it any more. "
            "Resume the run, if it has ended; raise deadlines.lease_s where such pauses are to be expected"
        )


class Heartbeat:
    """Watches how long the coordinator has been silent, and sends "alive" over new connections.

    Args:
        runtime: time and tasks.
        deadlines: bound the silence of the coordinator.
        on_lost: called once, if this node was evicted or the coordinator's process has ended.
    """

    def __init__(
        self,
        runtime: Runtime,
        endpoint: Endpoint,
        presence: Presence,
        deadlines: Deadlines,
        on_lost: Callable[[GradstreamError], None],
    ) -> None:
        self._runtime = runtime
        self._endpoint = endpoint
        self._presence = presence
        self._deadlines = deadlines
        self._on_lost = on_lost
        self._tries: dict[asyncio.Task[None], bool] = {}  # attempts, and whether the coordinator has answered
        self._lost = False

    async def run(self) -> None:
        """Watches until it is cancelled."""
        deadlines, pause_s = self._deadlines, self._deadlines.beat_s
        long_s = deadlines.lease_s + 2 * deadlines.notice_s
        warned = False
        try:
            while True:
                await self._runtime.sleep(pause_s)
                pause_s = deadlines.beat_s
                if self._left_s(1.5 * deadlines.notice_s) > 0:
                    warned = False
                    continue
                self._try()
                if self._left_s(long_s) > 0:
                    continue
                # By now the coordinator counts this node as lost, or is suspended: there is no hurry.
                pause_s = deadlines.lease_s / 2
                if not warned:
                    warned = True
                    _log.warning(
                        "%s: waits for the coordinator, which has been silent for %g s. This node goes on as "
                        "far as it can without, and gives up after %g s in all (deadlines.coordinator_s)",
                        self._runtime.node,
                        long_s,
                        deadlines.patience_s,
                    )
        finally:
            for task in list(self._tries):
                task.cancel()

    def _try(self) -> None:
        unanswered = [task for task, answered in self._tries.items() if not answered]
        if len(unanswered) >= MAX_TRIES:
            unanswered[0].cancel()  # closes its connection, so that a suspended peer wakes up to only a few
        task = self._runtime.spawn(self._say_alive(), name=f"{self._runtime.node}: alive")
        self._tries[task] = False
        task.add_done_callback(lambda done: self._tries.pop(done, None))

    def _left_s(self, seconds: float) -> float:
        return self._runtime.left_s(self._presence.heard_ns, seconds)

    async def _say_alive(self) -> None:
        heard_ns = self._presence.heard_ns
        try:
            silence_s = self._deadlines.lease_s / 2
            await self._endpoint.call(
                COORDINATOR, "alive", v1.Body(), v1.Body, silence_s=silence_s, new_connection=True
            )
            this = asyncio.current_task()
            if this in self._tries:
                self._tries[this] = True
            if self._presence.heard_ns == heard_ns:
                await self._presence.resume()
        except RefusedError as error:
            if error.code in EVICTED:  # other refusals may pass, such as too many connections
                self._lose(EvictedError(self._runtime.node, error.reason))
        except PeerLostError as error:
            if error.nobody_listens and not self._presence.comes_back:
                self._lose(error)
        except GradstreamError:
            pass  # the next attempt may succeed

    def _lose(self, error: GradstreamError) -> None:
        if not self._lost:
            self._lost = True
            self._on_lost(error)
