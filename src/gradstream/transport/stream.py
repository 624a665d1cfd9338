"""`StreamCore`: the behaviour of a stream, the same over every carrier.

Credit, the receive queue, the silence deadline, end, refusal, cancellation and the death of the
peer are decided here. A carrier only moves frames: it implements `Carrier`, and calls `arrived` and
`broken` to report what happened. So a correct program meets the same failures over every carrier.

The two directions of a stream end separately; `_State` says which are over, and why::

    end()            sending is over, receiving goes on
    peer's End       receiving is over once the queue is empty: recv() returns None
    Cancel, local    both are over at once, the queue is dropped
    Cancel, peer's   the same; after the peer's End it only says that the peer reads no more
    Refuse, broken   both are over, but frames that had arrived are delivered first
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice

import torch

from gradstream.errors import (
    ClosedError,
    DeadlineError,
    GradstreamError,
    PeerCancelledError,
    PeerLostError,
    RefusedError,
)
from gradstream.memory import Span
from gradstream.runtime.base import Runtime
from gradstream.runtime.deadlines import STILL, to_wait_longer
from gradstream.runtime.tasks import Broadcast, Silence
from gradstream.transport.base import (
    COPIED,
    MISBEHAVIOUR,
    Carrier,
    Landing,
    Lent,
    Received,
    SendHandle,
    refused_by,
)
from gradstream.transport.limits import Intake, ReceiveQueue, costs_credit
from gradstream.transport.shm.channel import Channel
from gradstream.transport.shm.leases import ReferenceLostError
from gradstream.wire import v1
from gradstream.wire.frames import FrameError

NAMES = 8
"""Most names in a WAITING frame: thousands of nodes may wait for thousands."""

PATIENCE_S = 1.0
"""A carrier takes over a payload in less time; it copies the payload if the peer does not read."""

Failure = Callable[[], GradstreamError]
"""Makes a new exception for each caller that gets it: a raised exception carries its own traceback."""


class _State:
    """Which directions of a stream are over, and why."""

    __slots__ = ("ended", "peer_ended", "peer_waits_for", "recv_failure", "released", "send_failure")

    def __init__(self) -> None:
        self.ended = self.peer_ended = False  # whether End was sent; whether End has arrived
        self.released = False  # whether both directions are over
        self.send_failure: Failure | None = None
        self.recv_failure: Failure | None = None
        self.peer_waits_for: list[str] = []  # as its last WAITING frame said


def _nothing() -> None:
    """Default for "no channel", and for a refusal that nobody counts."""


class StreamCore:
    """One side of a stream; implements `transport.base.Stream`.

    Args:
        peer: name of the other node.
        carrier: moves the frames.
        inbox: receives chunks and bodies until the user takes them.
        called: whether this is the called side.
        channel: finds the memory shared with the peer; returns None while there is none.
    """

    def __init__(
        self,
        runtime: Runtime,
        me: str,
        peer: str,
        opened: v1.Open,
        carrier: Carrier,
        inbox: ReceiveQueue,
        *,
        called: bool,
        channel: Callable[[], Channel | None] = _nothing,
    ) -> None:
        self.peer = peer
        self.opened = opened
        self.certificate = b""
        self.called = called
        self.on_refuse: Callable[[], object] = _nothing
        self._me = me
        self._carrier = carrier
        self._channel = channel
        self._credit = opened.window if called else 0  # chunks that this side may send
        self._early = 0  # of these, chunks sent or to be sent before the Accept that grants them
        self._inbox = inbox
        self._landing: Landing | None = None
        self._state = _State()
        self._writable = Broadcast()
        self._silence = Silence(runtime, inbox.readable, self._writable)
        self._on_release: list[Callable[[], object]] = []

    # ---- the user's side --------------------------------------------------------------

    @property
    def failed(self) -> bool:
        """Whether the peer can no longer be answered: the stream was refused, cancelled or lost."""
        return self._state.send_failure is not None

    @property
    def failure(self) -> GradstreamError | None:
        """See `Stream.failure`."""
        failure = self._state.send_failure
        return None if failure is None else failure()

    @property
    def heard_ns(self) -> int:
        """See `Stream.heard_ns`."""
        return self._silence.heard_ns

    def heard(self) -> None:
        """See `Stream.heard`."""
        self._silence.heard()

    async def send(
        self, frame: v1.Frame, payload: torch.Tensor | Span | None = None, silence_s: float | None = None
    ) -> None:
        """See `Stream.send`."""
        if isinstance(payload, Span):
            to = f"{self._me}: {self.opened.method} to {self.peer}"
            with payload.borrowed(write=False, to=to) as tensor:
                await self._take_over(frame, tensor, silence_s)
        else:
            await self._take_over(frame, payload, silence_s)

    async def _take_over(
        self, frame: v1.Frame, payload: torch.Tensor | None, silence_s: float | None
    ) -> None:
        if not costs_credit(frame):
            self._check_sending()
            self._carrier.transmit(frame, payload)
            await self._carrier.drained()
            return
        await self.credit(silence_s)
        handle = self._transmit_chunk(frame, payload)
        # Waiting for room in the carrier's queue comes before the next chunk: the payload is free earlier.
        if handle is not None:
            await handle.back(PATIENCE_S)

    def _transmit_chunk(self, frame: v1.Frame, payload: torch.Tensor | None) -> SendHandle | None:
        """Transmits a chunk; its payload goes through shared memory if there is any."""
        self._credit -= 1
        channel = None if payload is None else self._channel()
        reference = None if payload is None or channel is None else channel.stow(self, payload)
        if reference is not None:
            frame, payload = _referring(frame, reference), None
        return self._carrier.transmit(frame, payload)

    async def lend(self, frame: v1.Frame, span: Span, silence_s: float | None = None) -> Lent:
        """See `Stream.lend`."""
        to = f"{self._me}: {self.opened.method} lent to {self.peer}"
        vector = span.vector
        loan = vector.borrow(span.start, span.stop, write=False, to=to)
        end = partial(vector.give_back, loan)
        try:
            await self.credit(silence_s)
            channel = self._channel()
            lent = None if channel is None else channel.lend(self, span, end)
        except BaseException:
            end()
            raise
        if lent is None:
            handle = self._transmit_chunk(frame, span.tensor)
            if handle is None:
                end()
                return COPIED
            handle.then(end)
            return handle
        self._credit -= 1
        self._carrier.transmit(_referring(frame, lent[0]), None)
        return lent[1]

    def belongs_to(self, intake: Intake) -> None:
        """Called side: from now on another intake counts the arrivals of this stream."""
        self._inbox.belongs_to(intake)

    def send_early(self) -> None:
        """Calling side, once: lets the first chunk go before the Accept, which saves a round trip.

        The called side has room for it, since it grants at least one chunk; if it refuses the stream, the chunk is
        lost.
        """
        self._early = 1
        self._credit += 1

    async def credit(self, silence_s: float | None = None) -> None:
        """See `Stream.credit`."""
        await self._carrier.drained()
        await self._until(self._writable, self._may_send, silence_s)
        self._check_sending()

    def land(self, place: Landing | None) -> None:
        """See `Stream.land`."""
        self._landing = None if self._state.released else place

    async def recv(self, silence_s: float | None = None) -> Received | None:
        """See `Stream.recv`."""
        await self._until(self._inbox.readable, self._may_recv, silence_s)
        if self._inbox:
            received = self._inbox.take()
            if costs_credit(received.frame) and self._inbox.owes_credit():
                self._return_credit()
            return received
        if self._state.recv_failure is not None:
            raise self._state.recv_failure()
        return None

    async def waiting(self, on: Iterable[str]) -> None:
        """See `Stream.waiting`."""
        self._check_sending()
        names = list(islice(on, NAMES + 1))
        if len(names) > NAMES:
            names[NAMES] = "others"
        self._carrier.transmit(v1.Frame(waiting=v1.Waiting(on=names)), None)

    async def end(self) -> None:
        """See `Stream.end`. A second call does nothing."""
        if self._state.ended:
            return
        self._check_sending()
        self._state.ended = True
        self._carrier.transmit(v1.Frame(end=v1.End()), None)
        self._release_if_done()

    def refuse(self, code: v1.Code, message: str) -> None:
        """See `Stream.refuse`. Does nothing if the stream is over already."""
        self.turn_away(v1.Refuse(code=code, message=message))

    def cancel(self, reason: str = "", cause: v1.Cancel.Cause = v1.Cancel.NO_MORE) -> None:
        """See `Stream.cancel`. Does nothing if the stream is over already."""
        self._cancel(partial(ClosedError, self._text(f"cancelled by {self._me}", reason)), reason, cause)

    # ---- the endpoint's side ----------------------------------------------------------

    def on_release(self, callback: Callable[[], object]) -> None:
        """See `Stream.on_release`."""
        if self._state.released:
            callback()
        else:
            self._on_release.append(callback)

    def accept(self) -> None:
        """Called side: grants the caller its chunks, unless the stream is over already."""
        if not self._state.released:
            self._carrier.transmit(v1.Frame(accept=v1.Accept(window=self._inbox.window)), None)

    def forget(self) -> None:
        """Called side: drops what has arrived; nobody will take it."""
        self._inbox.clear()

    def turn_away(self, refuse: v1.Refuse) -> None:
        """Called side: refuses the stream, before or after it was accepted."""
        assert self.called
        if self._state.released:
            return
        if refuse.code in MISBEHAVIOUR:
            self.on_refuse()
        self._carrier.transmit(v1.Frame(refuse=refuse), None)
        text = self._text(f"refused by {self._me}", refuse.message)
        self._close(partial(ClosedError, text), drop=True)

    def finish(self) -> None:
        """Called side: sends End, and tells the caller that nothing more is read; the handler has returned."""
        if self.failed:
            return
        if not self._state.ended:
            self._state.ended = True
            self._carrier.transmit(v1.Frame(end=v1.End()), None)
        if not self._state.peer_ended:
            reason = "finished serving"
            self._carrier.transmit(v1.Frame(cancel=v1.Cancel(reason=reason)), None)
            self._close(partial(ClosedError, self._text(f"{self._me} has finished", "")), drop=True)
        self._release_if_done()

    # ---- the carrier's side -----------------------------------------------------------

    def landing(self, chunk: v1.Chunk) -> torch.Tensor | None:
        """The memory that this side's user has named for the payload of a chunk that is about to arrive."""
        return None if self._landing is None or self._state.peer_ended else self._landing(chunk)

    def may_bring(self, num_chunks: int) -> bool:
        """Whether the peer has credit for this many more chunks."""
        return self._inbox.may_bring(num_chunks)

    def has_room(self, num_bytes: int) -> bool:
        """Returns whether this many more bytes may wait here. If not, ends the stream for both sides."""
        if self._inbox.has_room(num_bytes):
            return True
        self._refuse_excess()
        return False

    def arrived(self, frame: v1.Frame, payload: torch.Tensor | None, *, landed: bool = False) -> None:
        """Takes the next frame of the peer, in order. `check_chunk` has checked its payload.

        Args:
            landed: whether the payload lies where `landing` said.
        """
        self._silence.heard()
        kind = frame.WhichOneof("kind")
        if frame.HasField("chunk") and frame.chunk.HasField("reference"):
            try:
                channel = self._channel()
                if channel is None:
                    raise ReferenceLostError
                payload, landed = channel.find(frame.chunk, self.landing)
            except ReferenceLostError:
                text = f"the memory that it shared is gone (stream {self.opened.method})"
                self._cancel(partial(PeerLostError, self.peer, text), text)
                return
            except FrameError as error:
                self.reject(error)
                return
        if kind == "chunk" or kind == "body":
            self._enqueue(Received(frame, payload, landed))
        elif kind == "credit" or kind == "accept":
            self._credit += frame.credit.frames if kind == "credit" else frame.accept.window - self._early
            self._writable.ring()
        elif kind == "waiting":
            self._state.peer_waits_for = list(frame.waiting.on)
        elif kind == "end":
            self._state.peer_ended = True
            self._inbox.readable.ring()
            self._release_if_done()
        elif kind == "cancel":
            cancel = frame.cancel
            text = self._text(f"cancelled by {self.peer}", cancel.reason)
            cancelled = partial(PeerCancelledError, text, cancel.cause, cancel.reason)
            self._close(cancelled, drop=not self._state.peer_ended)
        elif kind == "refuse" and not self.called:
            self._close(partial(refused_by, self.peer, frame.refuse), drop=False)
        else:
            self.reject(FrameError(f"a frame of kind {kind} where none may come"))

    def reject(self, error: FrameError) -> None:
        """Ends the stream for both sides: the peer has sent what the protocol does not allow."""
        message = f"{self.opened.method}: {self.peer} sent {error}"
        if self.called:
            self.refuse(v1.BAD_REQUEST, message)
        else:
            self._cancel(partial(RefusedError, self._me, "BAD_REQUEST", message), message)

    def broken(self, message: str, *, nobody_listens: bool = False) -> None:
        """Ends the stream at this side: the connection or the peer is gone, or nobody listens at its address."""
        text = f"{message} (stream {self.opened.method}); the last messages may not have arrived"
        lost = partial(PeerLostError, self.peer, text, nobody_listens=nobody_listens)
        self._close(lost, drop=False)

    # ---- inside -----------------------------------------------------------------------

    def _enqueue(self, received: Received) -> None:
        if self._state.recv_failure is not None:
            return  # sent before the peer knew that the stream is over
        if self._state.peer_ended:
            self.reject(FrameError("a frame after its end"))
            return
        try:
            if not self._inbox.put(received):
                self._refuse_excess()
        except FrameError as error:
            self.reject(error)

    def _refuse_excess(self) -> None:
        text = f"{self.opened.method}: {self.peer} has sent more than {self._me} has taken, by too much"
        if self.called:
            self.refuse(v1.OVER_LIMIT, text)
        else:
            self._cancel(partial(RefusedError, self._me, "OVER_LIMIT", text), text)

    def _return_credit(self) -> None:
        if not self.failed and not self._state.peer_ended:
            frames = self._inbox.return_credit()
            self._carrier.transmit(v1.Frame(credit=v1.Credit(frames=frames)), None)

    def _may_send(self) -> bool:
        return self._credit > 0 or self._state.send_failure is not None

    def _may_recv(self) -> bool:
        return bool(self._inbox) or self._state.peer_ended or self._state.recv_failure is not None

    def _check_sending(self) -> None:
        if self._state.send_failure is not None:
            raise self._state.send_failure()
        if self._state.ended:
            raise ClosedError(self._text(f"{self._me} has ended its side", ""))

    async def _until(self, changed: Broadcast, ready: Callable[[], bool], silence_s: float | None) -> None:
        """Waits until `ready`; cancels the stream if the peer is silent for too long."""
        if not await self._silence.until(changed, ready, silence_s):
            on = self._state.peer_waits_for
            why = f", after saying that it waits for {', '.join(on)}" if on else ""
            message = f"silent for {silence_s or 0.0:g} s in {self.opened.method} with {self._me}{why}"
            setting = "lease_s" if self.opened.method == "join" else "silence_s"
            silent = partial(DeadlineError, self.peer, message, f"{STILL}; {to_wait_longer(setting)}")
            self._cancel(silent, message, v1.Cancel.SILENT)

    def _cancel(self, failure: Failure, reason: str, cause: v1.Cancel.Cause = v1.Cancel.NO_MORE) -> None:
        if self._state.released:
            self._inbox.clear()
            return
        self._carrier.drop()
        self._carrier.transmit(v1.Frame(cancel=v1.Cancel(reason=reason, cause=cause)), None)
        self._close(failure, drop=True)

    def _close(self, failure: Failure, *, drop: bool) -> None:
        """Ends both directions; without `drop`, what has arrived is delivered first."""
        state = self._state
        if state.released:
            return
        state.send_failure = failure
        if drop:
            self._inbox.clear()
        if drop or not state.peer_ended:
            state.recv_failure = failure
        self._release()

    def _release_if_done(self) -> None:
        if self._state.ended and self._state.peer_ended:
            self._release()

    def _release(self) -> None:
        if not self._state.released:
            self._state.released = True
            self._landing = None
            self._carrier.over()
            self._silence.over()
            for callback in self._on_release:
                callback()

    def _text(self, what: str, reason: str) -> str:
        why = f": {reason}" if reason else ""
        return f"stream {self.opened.method} between {self._me} and {self.peer}: {what}{why}"


def _referring(frame: v1.Frame, reference: v1.Reference) -> v1.Frame:
    """A copy of a chunk's frame that refers to its payload."""
    referring = v1.Frame()
    referring.CopyFrom(frame)
    referring.chunk.reference.CopyFrom(reference)
    return referring
