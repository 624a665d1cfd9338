"""`StreamCore`: what a stream means, the same over every carrier.

Credit, the receive queue, the silence deadline, end, refusal, cancellation and the death of the
peer are decided here. A carrier only moves frames: it implements `Carrier`, and tells the core
what happened with `arrived` and `broken`. So a program that is correct over one carrier meets the
same failures over another.

The two directions of a stream end apart. `_send_over` and `_recv_over` say why one is over::

    end()            sending is over, receiving goes on
    peer's End       receiving is over once the queue is empty: recv() returns None
    Cancel, local    both at once, the queue is dropped
    Cancel, peer's   the same; after the peer's End it only tells that the peer reads no more
    Refuse, broken   both, but frames that had arrived are delivered first
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import cast

import torch

from gradstream.errors import ClosedError, DeadlineError, GradstreamError, PeerLostError, RefusedError
from gradstream.memory import Span
from gradstream.runtime.base import Runtime
from gradstream.transport.base import Landing, Lent, Received
from gradstream.transport.carrier import Carrier, PayloadChannel, ReferenceLostError, SendHandle
from gradstream.transport.intake import Intake
from gradstream.transport.limits import LIMITS
from gradstream.transport.silence import Broadcast, Silence
from gradstream.wire import v1
from gradstream.wire.frames import FrameError, payload_tensor

__all__ = ["EXPIRED", "StreamCore", "code_of", "refusal_of", "refused_by"]

EXPIRED = "deadline: "
"""How the reason begins that a peer is told when it was silent for too long."""

PATIENCE_S = 1.0
"""A carrier has taken a payload over in less; where the peer does not read, by copying it."""

_MISBEHAVIOUR = frozenset(
    {v1.BAD_REQUEST, v1.UNKNOWN_METHOD, v1.BAD_CERTIFICATE, v1.FORBIDDEN, v1.OVER_LIMIT, v1.NOT_MEMBER}
)
"""Refusals that no node meets again and again that goes by the protocol."""

MAX_FREE_BYTES = 4 << 20
"""Of Bodies that cost no credit, and that nobody has taken yet."""

_CODES = cast("dict[str, v1.Code]", dict(v1.Code.items()))

Failure = Callable[[], GradstreamError]
"""Makes the exception anew for each who meets it: a raised exception carries its own traceback."""


class _Kept:
    """A span that was not lent: its payload was copied."""

    returned = True

    async def back(self, patience_s: float) -> None:
        """At once."""


_KEPT = _Kept()


def _nothing_shared() -> None:
    """There is no depot."""


class StreamCore:
    """One side of a stream; implements `transport.base.Stream`.

    Args:
        runtime: of this node.
        me: this node's name.
        peer: the other's.
        opened: the opening frame.
        carrier: moves the frames.
        called: whether this is the called side.
        window: how many chunks this side holds for its user at most.
        depot: finds the memory that it shares with the peer; None while there is none.
        intake: what the peer has of this node; None, where this side calls, leaves that to credit.
        takes_chunks: the method has the peer send some.
    """

    def __init__(
        self,
        runtime: Runtime,
        me: str,
        peer: str,
        opened: v1.Open,
        carrier: Carrier,
        *,
        called: bool,
        window: int,
        depot: Callable[[], PayloadChannel | None] = _nothing_shared,
        intake: Intake | None = None,
        takes_chunks: bool = True,
    ) -> None:
        self.peer = peer
        self.opened = opened
        self.certificate = b""
        self._takes_chunks = takes_chunks
        self._me = me
        self._carrier = carrier
        self._called = called
        self._depot = depot
        self._credit = opened.window if called else 0  # chunks that we may send
        self._window = self._allowed = window  # chunks that the peer may send
        self._batch = max(1, window // 2)  # credits are returned so many at a time
        self._taken = 0  # chunks taken since credits were returned
        self._queue: deque[Received] = deque()
        self._intake = intake
        self._unread_bytes = self._free_bytes = 0  # that wait in the queue; of Bodies that cost no credit
        self._landing: Landing | None = None
        self._ended = self._peer_ended = self._released = False
        self._send_over: Failure | None = None
        self._recv_over: Failure | None = None
        self._waiting_on: list[str] = []
        self._readable, self._writable = Broadcast(), Broadcast()
        self._silence = Silence(runtime, self._readable, self._writable)
        self._on_release: list[Callable[[], object]] = []
        self.on_refuse: Callable[[], object] = _nothing_shared

    # ---- the user's side --------------------------------------------------------------

    @property
    def called(self) -> bool:
        """Whether the peer has opened it."""
        return self._called

    @property
    def failed(self) -> bool:
        """Whether the peer can no longer be answered: refused, cancelled or lost."""
        return self._send_over is not None

    @property
    def failure(self) -> GradstreamError | None:
        """What whoever uses it is told, once it is over other than by both sides' end."""
        return None if self._send_over is None else self._send_over()

    @property
    def heard_ns(self) -> int:
        """When the last frame of any kind came, on the runtime's clock."""
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
        if not _costs_credit(frame):
            self._check_sending()
            self._carrier.transmit(frame, payload)
            await self._carrier.drained()
            return
        await self.credit(silence_s)
        posted = self._post(frame, payload)
        # Room in the carrier's own queue is waited for before the next chunk: the payload is free earlier.
        if posted is not None:
            await posted.back(PATIENCE_S)

    def _post(self, frame: v1.Frame, payload: torch.Tensor | None) -> SendHandle | None:
        """Transmits a chunk, its payload through shared memory where there is any."""
        self._credit -= 1
        depot = None if payload is None else self._depot()
        reference = None if payload is None or depot is None else depot.stow(self, payload)
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
            depot = self._depot()
            lent = None if depot is None else depot.lend(self, span, end)
        except BaseException:
            end()
            raise
        if lent is None:
            posted = self._post(frame, span.tensor)
            if posted is None:
                end()
                return _KEPT
            posted.then(end)
            return posted
        self._credit -= 1
        self._carrier.transmit(_referring(frame, lent[0]), None)
        return lent[1]

    async def credit(self, silence_s: float | None = None) -> None:
        """See `Stream.credit`."""
        await self._carrier.drained()
        await self._until(self._writable, self._may_send, silence_s)
        self._check_sending()

    def land(self, place: Landing | None) -> None:
        """See `Stream.land`."""
        self._landing = None if self._released else place

    def landing(self, chunk: v1.Chunk) -> torch.Tensor | None:
        """Where the payload of a chunk that is about to arrive belongs, by the word of this side's user."""
        return None if self._landing is None or self._peer_ended else self._landing(chunk)

    async def recv(self, silence_s: float | None = None) -> Received | None:
        """See `Stream.recv`."""
        await self._until(self._readable, self._may_recv, silence_s)
        if self._queue:
            received = self._queue.popleft()
            self._count(received, -1)
            if _costs_credit(received.frame):
                self._return_credit()
            return received
        if self._recv_over is not None:
            raise self._recv_over()
        return None

    async def waiting(self, on: list[str]) -> None:
        """See `Stream.waiting`."""
        self._check_sending()
        self._carrier.transmit(v1.Frame(waiting=v1.Waiting(on=on)), None)

    async def end(self) -> None:
        """See `Stream.end`. Ending twice is ending once."""
        if self._ended:
            return
        self._check_sending()
        self._ended = True
        self._carrier.transmit(v1.Frame(end=v1.End()), None)
        self._release_if_done()

    def refuse(self, code: v1.Code, message: str) -> None:
        """See `Stream.refuse`. Does nothing where the stream is over already."""
        self._refuse(v1.Refuse(code=code, message=message))

    def cancel(self, reason: str = "") -> None:
        """See `Stream.cancel`. Does nothing where the stream is over already."""
        self._cancel(partial(ClosedError, self._text(f"cancelled by {self._me}", reason)), reason)

    # ---- the endpoint's side ----------------------------------------------------------

    def on_release(self, callback: Callable[[], object]) -> None:
        """Calls back once both directions are over; at once if they are."""
        if self._released:
            callback()
        else:
            self._on_release.append(callback)

    def accept(self) -> None:
        """Called side: grants the caller its chunks, unless the stream is over already."""
        if not self._released:
            self._carrier.transmit(v1.Frame(accept=v1.Accept(window=self._window)), None)

    def forget(self) -> None:
        """Called side: nobody will take what has arrived."""
        self._forget_queue()

    def turn_away(self, refuse: v1.Refuse) -> None:
        """Called side: refuses instead of accepting."""
        self._refuse(refuse)

    def finish(self) -> None:
        """Called side: the handler has returned. Says End, and that nothing more is read."""
        if self._send_over is not None:
            return
        if not self._ended:
            self._ended = True
            self._carrier.transmit(v1.Frame(end=v1.End()), None)
        if not self._peer_ended:
            reason = "finished serving"
            self._carrier.transmit(v1.Frame(cancel=v1.Cancel(reason=reason)), None)
            self._close(partial(ClosedError, self._text(f"{self._me} has finished", "")), drop=True)
        self._release_if_done()

    # ---- the carrier's side -----------------------------------------------------------

    def arrived(self, frame: v1.Frame, payload: torch.Tensor | None, *, landed: bool = False) -> None:
        """A frame came, in its order. Its payload was checked by `check_chunk`.

        Args:
            landed: the payload lies where `landing` has said.
        """
        self._silence.heard()
        kind = frame.WhichOneof("kind")
        if frame.HasField("chunk") and frame.chunk.HasField("reference"):
            try:
                payload, landed = self._found(frame.chunk)
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
            self._credit += frame.credit.frames if kind == "credit" else frame.accept.window
            self._writable.ring()
        elif kind == "waiting":
            self._waiting_on = list(frame.waiting.on)
        elif kind == "end":
            self._peer_ended = True
            self._readable.ring()
            self._release_if_done()
        elif kind == "cancel":
            reason = frame.cancel.reason
            closed = partial(ClosedError, self._text(f"cancelled by {self.peer}", reason))
            self._close(closed, drop=not self._peer_ended)
        elif kind == "refuse" and not self._called:
            self._close(partial(refused_by, self.peer, frame.refuse), drop=False)
        else:
            self.reject(FrameError(f"a frame of kind {kind} where none may come"))

    def reject(self, error: FrameError) -> None:
        """What the peer sent breaks the protocol: the stream is over for both."""
        message = f"{self.opened.method}: {self.peer} sent {error}"
        if self._called:
            self._refuse(v1.Refuse(code=v1.BAD_REQUEST, message=message))
        else:
            self._cancel(partial(RefusedError, self._me, "BAD_REQUEST", message), message)

    def broken(self, message: str) -> None:
        """The connection or the peer is gone."""
        text = f"{message} (stream {self.opened.method}); what was in flight may or may not have been applied"
        self._close(partial(PeerLostError, self.peer, text), drop=False)

    # ---- inside -----------------------------------------------------------------------

    def _found(self, chunk: v1.Chunk) -> tuple[torch.Tensor | None, bool]:
        """The payload that a chunk refers to, and whether it has landed. The chunk may be sent on."""
        depot = self._depot()
        if depot is None:
            raise ReferenceLostError
        view = depot.find(chunk.reference)
        chunk.ClearField("reference")
        payload = payload_tensor(chunk, view)
        place = None if payload is None else self.landing(chunk)
        if place is None or payload is None or (len(place), place.dtype) != (len(payload), payload.dtype):
            return payload, False
        place.numpy()[...] = payload.numpy()  # on this thread alone
        if not depot.intact():
            raise ReferenceLostError
        return place, True

    def _enqueue(self, received: Received) -> None:
        if self._recv_over is not None:
            return  # a straggler
        if self._peer_ended:
            self.reject(FrameError("a frame after its end"))
            return
        costs = _costs_credit(received.frame)
        if (costs and not self._allowed) or (received.frame.HasField("chunk") and not self._takes_chunks):
            self.reject(FrameError(f"{_name_of(received.frame)} without credit"))
            return
        if not self.has_room(_size_bytes(received), free=not costs):
            return
        self._allowed -= costs
        self._count(received, 1)
        self._queue.append(received)
        self._readable.ring()

    def may_bring(self, num_chunks: int) -> bool:
        """Whether the peer has credit for so many chunks more."""
        return num_chunks <= self._allowed and self._takes_chunks

    def has_room(self, num_bytes: int, *, free: bool = False) -> bool:
        """Whether so many bytes more may wait here; if not, the stream is over for both.

        Args:
            free: of a Body that costs no credit.
        """
        unread = self._free_bytes + num_bytes
        if free and unread > MAX_FREE_BYTES:
            self.reject(
                FrameError(f"{unread} bytes of bodies that nobody has taken, at most {MAX_FREE_BYTES}")
            )
            return False
        if self._intake is not None and not self._intake.has_room(num_bytes):
            text = f"{self.opened.method}: {self.peer} has sent more than {self._me} has taken, by too much"
            if self._called:
                self._refuse(v1.Refuse(code=v1.OVER_LIMIT, message=text))
            else:
                self._cancel(partial(RefusedError, self._me, "OVER_LIMIT", text), text)
            return False
        return True

    def _count(self, received: Received, sign: int) -> None:
        """A frame waits to be taken, or does not any more."""
        num_bytes = sign * _size_bytes(received)
        self._unread_bytes += num_bytes
        if not _costs_credit(received.frame):
            self._free_bytes += num_bytes
        if self._intake is not None:
            self._intake.unread_bytes += num_bytes

    def _forget_queue(self) -> None:
        while self._queue:
            self._count(self._queue.popleft(), -1)

    def _return_credit(self) -> None:
        self._taken += 1
        if self._taken >= self._batch and self._send_over is None and not self._peer_ended:
            self._carrier.transmit(v1.Frame(credit=v1.Credit(frames=self._taken)), None)
            self._allowed += self._taken
            self._taken = 0

    def _may_send(self) -> bool:
        return self._credit > 0 or self._send_over is not None

    def _may_recv(self) -> bool:
        return bool(self._queue) or self._peer_ended or self._recv_over is not None

    def _check_sending(self) -> None:
        if self._send_over is not None:
            raise self._send_over()
        if self._ended:
            raise ClosedError(self._text(f"{self._me} has ended its side", ""))

    async def _until(self, bell: Broadcast, ready: Callable[[], bool], silence_s: float | None) -> None:
        """Waits until `ready`; a peer that has been silent for too long ends the stream."""
        if not await self._silence.until(bell, ready, silence_s):
            self._expire(silence_s or 0.0)

    def _expire(self, silence_s: float) -> None:
        on = f", after saying that it waits for {', '.join(self._waiting_on)}" if self._waiting_on else ""
        message = f"silent for {silence_s:g} s in {self.opened.method} with {self._me}{on}"
        self._cancel(partial(DeadlineError, self.peer, message), f"{EXPIRED}{message}")

    def _cancel(self, failure: Failure, reason: str) -> None:
        if self._released:
            self._forget_queue()
            return
        self._carrier.drop()
        self._carrier.transmit(v1.Frame(cancel=v1.Cancel(reason=reason)), None)
        self._close(failure, drop=True)

    def _refuse(self, refuse: v1.Refuse) -> None:
        assert self._called
        if self._released:
            return
        if refuse.code in _MISBEHAVIOUR:
            self.on_refuse()
        self._carrier.transmit(v1.Frame(refuse=refuse), None)
        text = self._text(f"refused by {self._me}", refuse.message)
        self._close(partial(ClosedError, text), drop=True)

    def _close(self, failure: Failure, *, drop: bool) -> None:
        """Both directions are over; without `drop`, what has arrived is delivered first."""
        if self._released:
            return
        self._send_over = failure
        if drop:
            self._forget_queue()
        if drop or not self._peer_ended:
            self._recv_over = failure
        self._release()

    def _release_if_done(self) -> None:
        if self._ended and self._peer_ended:
            self._release()

    def _release(self) -> None:
        if not self._released:
            self._released = True
            self._landing = None
            self._carrier.over()
            self._silence.over()
            for callback in self._on_release:
                callback()

    def _text(self, what: str, reason: str) -> str:
        why = f": {reason}" if reason else ""
        return f"stream {self.opened.method} between {self._me} and {self.peer}: {what}{why}"


def _costs_credit(frame: v1.Frame) -> bool:
    """Whether it takes room at the receiver that has to be granted: chunks do, and long bodies."""
    return frame.HasField("chunk") or len(frame.body.data) > LIMITS.free_body_bytes


def _size_bytes(received: Received) -> int:
    """Of memory that the receiver holds for it, beside what is its user's own."""
    if received.payload is None or received.landed:
        return len(received.frame.body.data)
    return received.payload.numel() * received.payload.element_size()


def _name_of(frame: v1.Frame) -> str:
    if frame.HasField("chunk"):
        return f"chunk {frame.chunk.index}"
    return f"a body of {len(frame.body.data)} bytes"


def refused_by(peer: str, refuse: v1.Refuse) -> RefusedError:
    """What a refusal means for whoever is refused."""
    code = next((name for name, value in _CODES.items() if value == refuse.code), str(refuse.code))
    return RefusedError(peer, code, refuse.message)


def _referring(frame: v1.Frame, reference: v1.Reference) -> v1.Frame:
    """The same chunk, with its payload elsewhere."""
    referring = v1.Frame()
    referring.CopyFrom(frame)
    referring.chunk.reference.CopyFrom(reference)
    return referring


def refusal_of(error: RefusedError) -> v1.Refuse:
    """A refusal as the peer would have sent it."""
    code, message = code_of(error)
    return v1.Refuse(code=code, message=message)


def code_of(error: BaseException) -> tuple[v1.Code, str]:
    """What a caller is refused with when its handler raised `error`: code and message."""
    if isinstance(error, RefusedError) and error.code in _CODES:
        return _CODES[error.code], error.reason
    return v1.INTERNAL, f"{type(error).__name__}: {error}"
