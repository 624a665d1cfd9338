"""`Presence`: one stream on which beats of a node go to the coordinator, and notices come back.

A connection may die silently, when something between two machines drops its packets. So beats are numbered,
and kept until a notice acknowledges them. Where the first connection stays silent and a new one works (see
`Lifeline`), the node goes on over the new one: it sends the unacknowledged beats again, in order, and the
coordinator takes each beat once.
"""

from __future__ import annotations

import asyncio
from collections import deque

from gradstream.coordinator.nodes import COORDINATOR
from gradstream.errors import DeadlineError, GradstreamError, PeerLostError, RefusedError
from gradstream.runtime.base import Runtime
from gradstream.runtime.deadlines import Deadlines
from gradstream.runtime.wakeup import Wakeup
from gradstream.transport.base import Endpoint, Priority, Stream
from gradstream.transport.stream import EXPIRED
from gradstream.wire import v1

EVICTED = ("NOT_MEMBER", "BAD_CERTIFICATE")
"""Codes of refusals by which a node learns that it is out of the run."""

REDIAL_S = 0.1
"""Seconds between two attempts to reach a coordinator that has died."""


class Presence:
    """Sends a node's beats to the coordinator and hears the notices; takes another stream when one is silent.

    Args:
        runtime: the node's runtime; only its time is used.
        endpoint: endpoint of this node.
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
        self._answer: v1.Notice | None = None  # first notice of a resumed presence, not returned yet
        self._latest: dict[Stream, v1.Notice] = {}  # of each stream
        self._attempt = 0
        self._resuming = False
        self.num_receipts = 0
        self._resumed = Wakeup()  # rings when an attempt has ended
        self._ruling = 0  # the highest that was heard

    @property
    def comes_back(self) -> bool:
        """Whether a new process takes the place of a coordinator that has died."""
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
        """Returns the next notice; the same object again where nothing has changed.

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
        """Dials a coordinator that has died until a new process answers. Returns whether one does, in time.

        Raises:
            RefusedError: the new process does not know this node.
        """
        if not self.comes_back or isinstance(error, DeadlineError | RefusedError) or EXPIRED in str(error):
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
        """Goes on over a new connection. Does nothing while another attempt is under way.

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
        """Says goodbye, and waits until the coordinator has heard it. Raises as `hear` does."""
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


async def _send(stream: Stream, beat: v1.Beat) -> None:
    await stream.send(v1.Frame(body=v1.Body(data=beat.SerializeToString())))
