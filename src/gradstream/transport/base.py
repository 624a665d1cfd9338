"""The `Endpoint`: communication between nodes. Each carrier implements it; no code above it sees a socket.

There is one primitive, a `Stream` of frames in both directions. It opens with the sender's identity, is
flow-controlled by credit, has a priority, and ends by `end`, `cancel` or the death of the peer.
`call`, and tagged `send`/`recv` between ranks, use it.

Every carrier keeps these promises, and `gradstream.testing.check_endpoint` tests them:

* frames of one stream arrive in order, each once, or the stream fails; different streams have no order
  among each other;
* a Chunk is sent only with credit, so a receiver holds at most `window` of them;
* CONTROL streams do not wait behind BULK streams;
* a deadline bounds silence, not waiting: a WAITING frame restarts it;
* memory passed to a call belongs to the carrier until the call returns; after that the carrier never
  touches it again, even if data arrives late.
"""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, Self, TypeVar, cast

import torch
from google.protobuf.message import DecodeError, Message

from gradstream.errors import GradstreamError, RefusedError
from gradstream.memory import Span
from gradstream.wire import v1

# ---- base --------------------------------------------------------------------------------

M = TypeVar("M", bound=Message)


class Priority(enum.Enum):
    """CONTROL frames overtake BULK frames, between chunks."""

    CONTROL = 0
    BULK = 1


class Caller(NamedTuple):
    """The node that opens a stream: its name, and the incarnation of its process."""

    name: str
    incarnation: int

    @classmethod
    def of(cls, opened: v1.Open) -> Self:
        """The caller that an Open claims to come from."""
        return cls(opened.sender, opened.incarnation)


@dataclass(slots=True)
class Identity:
    """The identity of an endpoint. It goes into each Open, and incoming Opens are checked against it.

    Args:
        name: node name, "worker-3".
        incarnation: a number that differs after each start of the node's process.
        fingerprint: fingerprint of the registered model; 0 while none is registered.
        epoch: membership epoch; 0 before joining.
        secret: secret of the run. Each connection proves to both sides that the other side knows it (see
            `proof`); it is never sent.
        members: incarnations of the run's members by name; None before joining.
        chunk_bytes: bytes of the longest chunk of the registered model; 0 while none is registered.
        revoked: SHA-256 digests of certificates that are no longer accepted.
        nodes: number of nodes with which the run begins; each may have one request open before it has joined.
    """

    job: str
    name: str
    incarnation: int
    fingerprint: int = 0
    epoch: int = 0
    secret: bytes = field(default=b"", repr=False)
    members: Mapping[str, int] | None = None
    chunk_bytes: int = 0
    revoked: frozenset[bytes] = frozenset()
    nodes: int = 0


@dataclass(frozen=True, slots=True)
class Received:
    """A frame as it arrived.

    Args:
        frame: the header. Users of a stream see two kinds: chunk and body.
        payload: elements of a chunk, read-only, in the carrier's memory, valid as long as they are
            referenced. None if the chunk is flagged absent.
        landed: whether the payload lies in memory that the receiver has named with `Stream.land`.
    """

    frame: v1.Frame
    payload: torch.Tensor | None
    landed: bool = False


Landing = Callable[[v1.Chunk], torch.Tensor | None]
"""Names the memory for the payload of a chunk, with exactly the elements and the dtype of the header; None
leaves the choice to the carrier. The receiver takes sizes from its own knowledge, not from the header."""


class Lent(Protocol):
    """A span that a peer may still be reading in place."""

    @property
    def returned(self) -> bool:
        """Whether the owner has the span back."""
        ...

    async def back(self, patience_s: float) -> None:
        """Returns once the owner has the span back.

        If the peer has not released it after `patience_s` seconds, the carrier closes the connection. The
        peer must not trust a payload that it has not finished reading; its streams with this node may break.
        """
        ...


class Stream(Protocol):
    """One conversation with a peer.

    Every method raises PeerLostError once the peer's process or connection is gone,
    RefusedError once the peer has refused the stream, ClosedError once this side has cancelled it, and
    PeerCancelledError once the peer has.
    """

    peer: str
    opened: v1.Open  # the opening frame: identity, method, request
    certificate: bytes  # SHA-256 of the caller's certificate; b"" without TLS

    @property
    def failure(self) -> GradstreamError | None:
        """The error that the stream failed with; None if it has not failed."""
        ...

    @property
    def heard_ns(self) -> int:
        """Time of the last frame of any kind, on the runtime's clock, in ns."""
        ...

    def heard(self) -> None:
        """Notes another sign of life of the peer, as if a frame had come now."""
        ...

    def on_release(self, callback: Callable[[], object]) -> None:
        """Calls back once both directions are over, for any reason; at once if they are."""
        ...

    async def send(
        self, frame: v1.Frame, payload: torch.Tensor | Span | None = None, silence_s: float | None = None
    ) -> None:
        """Sends a frame. A chunk waits for credit first, as long as the peer is not silent for `silence_s`.

        A Span is borrowed for reading until the carrier has copied it or written it out, which has happened
        when the call returns; the frame may not have arrived by then. With credit, this takes little time,
        however slow the peer is.
        """
        ...

    async def lend(self, frame: v1.Frame, span: Span, silence_s: float | None = None) -> Lent:
        """Like `send`, but the peer may read the span in place, if the carrier supports that.

        The span stays borrowed for reading after the call returns, and after the stream is over. The loan
        ends when the peer has released the payload, or is gone; with carriers that copy, it ends after the
        copy.
        """
        ...

    async def credit(self, silence_s: float | None = None) -> None:
        """Returns once a chunk can be sent without waiting, as long as the peer is not silent for `silence_s`.

        A sender that must read memory atomically (a chunk that is updated all the time) prevents updates
        from here until the following `send` has returned: no longer than a copy takes.
        """
        ...

    def land(self, place: Landing | None) -> None:
        """From now on, receives payloads into the memory that `place` names, if it names any.

        Not all carriers can do this: `Received.landed` shows it for each chunk. The carrier calls `place` on
        the event loop before a payload arrives; it must not raise. The memory belongs to the carrier until
        the peer has ended or the stream is over, for example after `cancel` or a deadline; nothing writes to it
        after that.
        """
        ...

    async def recv(self, silence_s: float | None = None) -> Received | None:
        """The next chunk or body; None when the peer has ended its side.

        Taking a chunk returns one credit to the peer. Frames that arrived before the peer's
        end, refusal or death are delivered first.

        Raises:
            DeadlineError: no frame of any kind arrived for `silence_s`. The message names the peer, and the
                nodes that it said it was waiting for. The stream is cancelled.
        """
        ...

    async def waiting(self, on: Iterable[str]) -> None:
        """Tells the peer that the answer has to wait for other nodes; the peer gets the first names in `on`."""
        ...

    async def end(self) -> None:
        """Ends this side; the other side may continue to send."""
        ...

    def refuse(self, code: v1.Code, message: str) -> None:
        """Called side only: ends the stream; the caller gets a RefusedError."""
        ...

    def cancel(self, reason: str = "", cause: v1.Cancel.Cause = v1.Cancel.NO_MORE) -> None:
        """Ends both sides at once, and drops frames queued on either side; the peer gets both arguments."""
        ...


Handler = Callable[[Stream], Awaitable[None]]
"""Serves one incoming stream of one method. When it returns, the endpoint ends the stream; when it raises, the
endpoint refuses the caller with the error."""


class ByteSocket(Protocol):
    """A connected, non-blocking socket, or one that encrypts: see `socket.socket`."""

    def sendmsg(self, buffers: Sequence[bytes | memoryview], /) -> int:
        """Sends some of the bytes, and returns their number."""
        ...

    def recv_into(self, buffer: memoryview, /) -> int:
        """Receives some bytes, and returns their number; 0 at the end."""
        ...

    def fileno(self) -> int:
        """The file descriptor."""
        ...

    def shutdown(self, how: int, /) -> None:
        """Ends one direction, or both."""
        ...

    def close(self) -> None:
        """Closes the socket."""
        ...


class PeerSocket(NamedTuple):
    """A connected, non-blocking socket to a peer.

    Args:
        socket: it encrypts if the carrier does.
        checked: whether its two users must add and verify checksums: nothing else guards the bytes.
    """

    socket: ByteSocket
    checked: bool


class Endpoint(Protocol):
    """The end of a node's connections: it opens streams to peers, and serves streams of peers."""

    identity: Identity
    address: str  # where others connect, once `start` has returned
    connections: int  # to each peer for bulk data, if the carrier can use several
    protected: bool  # whether connections are encrypted, and certificates name both sides
    on_damage: Callable[[str, int], None]
    """Called with a peer, and a number of bytes from it that had a wrong checksum. The connection then ends."""

    @property
    def routes(self) -> Mapping[str, str]:
        """Name of the carrier that reaches each known peer; empty if there is only one carrier."""
        return {}

    async def start(self) -> None:
        """Begins to accept streams. Raises ConfigError if it cannot listen at its address."""
        ...

    def serve(self, method: str, handler: Handler, *, model: bool = True) -> None:
        """Registers the handler of a method.

        Args:
            method: name of the method.
            handler: serves its streams.
            model: whether the method touches the model: the endpoint then refuses callers whose fingerprint or
                membership epoch differs from its own. It always checks protocol version and job.
        """
        ...

    def serve_tensors(self) -> None:
        """Accepts tensors that peers send to this node, for `recv`."""
        ...

    def members_changed(self, members: Mapping[str, int], revoked: Iterable[bytes] = ()) -> None:
        """Sets the members of the run. Other nodes are refused, except requests to join.

        Args:
            members: incarnations by name.
            revoked: SHA-256 digests of certificates that are no longer accepted.
        """
        ...

    def know(self, peer: str, address: str) -> None:
        """Sets the address of a peer; a changed address closes the old connections."""
        ...

    def redial(self, peer: str, silent_s: float) -> None:
        """Closes the connections to a peer on which it was silent for `silent_s` seconds.

        The next stream makes a new connection: one that something on the way has spoilt stays silent. Connections made
        since the silence began stay.
        """
        ...

    async def open(
        self,
        peer: str,
        method: str,
        request: Message,
        *,
        priority: Priority = Priority.BULK,
        window: int = 16,
        new_connection: bool = False,
    ) -> Stream:
        """Opens a stream. Returns at once; a refusal or an unreachable peer is reported at first use.

        Args:
            new_connection: whether to make a connection for this stream alone, if the carrier has connections: the old
                one may have been cut.
        """
        ...

    async def call(
        self,
        peer: str,
        method: str,
        request: Message,
        reply: type[M],
        *,
        priority: Priority = Priority.CONTROL,
        silence_s: float = 30.0,
        new_connection: bool = False,
    ) -> M:
        """Sends one small request and returns the small reply. For `new_connection` see `open`."""
        stream = await self.open(peer, method, request, priority=priority, new_connection=new_connection)
        try:
            await stream.end()
            received = await stream.recv(silence_s)
        except BaseException:
            stream.cancel("the call was given up")
            raise
        if received is None:
            raise RefusedError(peer, "INTERNAL", f"{method} ended without a reply")
        try:
            return reply.FromString(received.frame.body.data)
        except DecodeError as error:
            message = f"{peer} answered {method} with bytes that are no {reply.__name__}: {error}"
            raise RefusedError(self.identity.name, "BAD_REQUEST", message) from None

    async def send(self, peer: str, tag: int, tensor: Span, *, silence_s: float = 30.0) -> None:
        """Sends elements to a `recv` of the peer with this node and tag. Returns when they have arrived."""
        ...

    async def recv(self, peer: str, tag: int, into: Span, *, silence_s: float = 30.0) -> None:
        """Receives the elements that `peer` sends under `tag` into the caller's memory.

        `into` is borrowed for writing until the call returns. After an error its contents are
        undefined, and nothing writes it any more.

        Raises:
            RefusedError: size or dtype of the sender and of `into` differ (raised on both sides).
        """
        ...

    async def data_socket(
        self, peer: str, name: str, *, dial: bool, copies: bool = False
    ) -> PeerSocket | None:
        """A non-blocking socket to a peer, for a thread that moves bytes without the event loop.

        Both sides ask for it by the same name, and one of them dials. Each side closes its own end. The two
        sides agree on the bytes that they exchange: there are no frames, no credit, and no heartbeats.

        Args:
            peer: name of the other node.
            name: name of the socket, the same at both sides.
            dial: whether this side connects; the other side accepts.
            copies: whether to return a socket even if the carrier shares memory, and streams send large vectors
                uncopied.

        Returns:
            None if the carrier to that peer has no such sockets (gRPC, or in memory), or if the two
            sides did not connect in time.
        """
        del peer, name, dial, copies
        return None

    async def close(self) -> None:
        """Cancels every stream and stops accepting. Idempotent."""
        ...


# ---- refusals ----------------------------------------------------------------------------
# Converts an exception to the frame that refuses a stream, and back.

MISBEHAVIOUR = frozenset(
    {v1.BAD_REQUEST, v1.UNKNOWN_METHOD, v1.BAD_CERTIFICATE, v1.FORBIDDEN, v1.OVER_LIMIT, v1.NOT_MEMBER}
)
"""Codes that a node following the protocol does not meet repeatedly."""

_CODES = cast("dict[str, v1.Code]", dict(v1.Code.items()))


def code_of(error: BaseException) -> tuple[v1.Code, str]:
    """The code and the message that refuse a stream whose handler raised `error`."""
    if isinstance(error, RefusedError) and error.code in _CODES:
        return _CODES[error.code], error.reason
    return v1.INTERNAL, f"{type(error).__name__}: {error}"


def refusal_of(error: RefusedError) -> v1.Refuse:
    """The refusal that the peer would have sent to cause this error."""
    code, message = code_of(error)
    return v1.Refuse(code=code, message=message)


def refused_by(peer: str, refuse: v1.Refuse) -> RefusedError:
    """The error that a refusal by `peer` raises on the refused side."""
    code = next((name for name, value in _CODES.items() if value == refuse.code), str(refuse.code))
    return RefusedError(peer, code, refuse.message)


# ---- carrier -----------------------------------------------------------------------------
# The contract between a stream and its carrier.


class SendHandle(Lent, Protocol):
    """A payload that is sent in place. It is returned soon, however slow the peer is."""

    def then(self, callback: Callable[[], None]) -> None:
        """Calls back when the payload is returned; at once if it is."""
        ...


class _Copied:
    """The `Lent` of a span whose payload was copied."""

    returned = True

    async def back(self, patience_s: float) -> None:
        """Returns at once."""


COPIED = _Copied()


class Carrier(Protocol):
    """Moves one stream's frames."""

    def transmit(self, frame: v1.Frame, payload: torch.Tensor | None) -> SendHandle | None:
        """Takes over a frame, in order, without waiting. The header may change afterwards.

        Returns:
            None if the payload may change at once as well; else a handle that says when it may.
        """
        ...

    async def drained(self) -> None:
        """Returns once there is room to transmit more without a growing queue, or the stream is over."""
        ...

    def drop(self) -> None:
        """Drops frames that were transmitted but have not left yet."""
        ...

    def over(self) -> None:
        """Ends the stream's use of the carrier: nothing more is transmitted, and arrivals are ignored."""
        ...


class NullCarrier:
    """A `Carrier` that leads nowhere: it drops all frames."""

    def transmit(self, frame: v1.Frame, payload: torch.Tensor | None) -> None:
        """Does nothing."""

    async def drained(self) -> None:
        """Returns at once."""

    def drop(self) -> None:
        """Does nothing."""

    def over(self) -> None:
        """Does nothing."""


def bytes_of(payload: torch.Tensor | None) -> memoryview | None:
    """The memory of a tensor as bytes; None for an empty tensor, and for None."""
    if payload is None or not payload.numel():
        return None
    return memoryview(payload.detach().numpy()).cast("B")  # type: ignore[arg-type]


def copy_elements(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copies on this thread alone: torch would wake its other threads for one megabyte. Skips shape-only tensors."""
    if not target.is_meta:
        target.numpy()[...] = source.numpy()
