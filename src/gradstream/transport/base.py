"""The `Endpoint`: how nodes talk. A carrier implements it; nothing above it sees a socket.

There is one primitive, a `Stream` of frames each way. It opens with the sender's identity, is
flow-controlled by credit, has a priority, and ends by `end`, `cancel` or the death of the peer.
`call` and tagged `send`/`recv` between ranks are posted on it.

What every carrier promises, and `gradstream.testing.check_endpoint` tests:

* frames of one stream arrive in order, each once, or the stream fails; streams are not ordered
  among one another;
* a Chunk is sent only under credit, so a receiver holds at most `window` of them;
* CONTROL streams are not held up behind BULK streams;
* a deadline bounds silence, not waiting: a WAITING frame starts it anew;
* memory given to a call belongs to the carrier until the call returns, and after that is never
  touched by it again, whatever arrives late.
"""

from __future__ import annotations

import enum
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, Self, TypeVar

import torch
from google.protobuf.message import Message

from gradstream.errors import GradstreamError
from gradstream.memory import Span
from gradstream.wire import v1

__all__ = ["Caller", "Endpoint", "Handler", "Identity", "Landing", "Lent", "Priority", "Received", "Stream"]

M = TypeVar("M", bound=Message)


class Priority(enum.Enum):
    """CONTROL frames overtake BULK frames, at the granularity of a chunk."""

    CONTROL = 0
    BULK = 1


class Caller(NamedTuple):
    """Who opens streams: a node by name, in one life of its process."""

    name: str
    incarnation: int

    @classmethod
    def of(cls, opened: v1.Open) -> Self:
        """Who a stream says that it is from."""
        return cls(opened.sender, opened.incarnation)


@dataclass(slots=True)
class Identity:
    """Who an endpoint is; goes into each Open, and is what incoming Opens are checked against.

    Args:
        job: job id.
        name: node name, "worker-3".
        incarnation: differs after each start of the node's process.
        fingerprint: of the registered model; 0 while none is registered.
        epoch: membership epoch; 0 before joining.
        secret: of the run. Each connection proves both ways that it is known (see `proof`); it is never sent.
        members: incarnations of the run's members by name, as membership tells them; None before joining.
        chunk_bytes: the longest chunk of the registered model; 0 while none is registered.
        revoked: SHA-256 of certificates that are not accepted any more.
        nodes: how many the run begins with: each may wait at a time for what it has asked before it joined.
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
        frame: its header. Kinds seen by users of a stream: chunk and body.
        payload: a chunk's elements: read-only, in the carrier's memory, valid for as long as it is
            referenced. None where the chunk is flagged absent.
        landed: the payload lies in the receiver's own memory, where it asked for it with `Stream.land`.
    """

    frame: v1.Frame
    payload: torch.Tensor | None
    landed: bool = False


Landing = Callable[[v1.Chunk], torch.Tensor | None]
"""Names the memory that the payload of a chunk is to be received into, of exactly the elements and the
dtype that the header says; None leaves it to the carrier. Sizes come from what the receiver knows."""


class Lent(Protocol):
    """A span that a peer may still be reading where it lies."""

    @property
    def returned(self) -> bool:
        """Whether it is the owner's again."""
        ...

    async def back(self, patience_s: float) -> None:
        """Returns once it is the owner's again.

        A peer that has not let go of it after `patience_s` is hung up on, and must not believe what it
        has not finished reading; its streams with this node may break.
        """
        ...


class Stream(Protocol):
    """One conversation with a peer.

    Every method raises PeerLostError once the peer's process or connection is gone,
    RefusedError once the peer has refused the stream, ClosedError once either side cancelled.
    """

    peer: str
    opened: v1.Open  # the opening frame: identity, method, request
    certificate: bytes  # SHA-256 of that of the caller; b"" without TLS

    @property
    def failure(self) -> GradstreamError | None:
        """What whoever uses it is told, once it is over other than by both sides' end."""
        ...

    @property
    def heard_ns(self) -> int:
        """When the last frame of any kind came, on the runtime's clock: who is silent?"""
        ...

    def heard(self) -> None:
        """The peer has shown in another way that it is alive: counts as a frame that came now."""
        ...

    def on_release(self, callback: Callable[[], object]) -> None:
        """Calls back once both directions are over, in whatever way; at once if they are."""
        ...

    async def send(
        self, frame: v1.Frame, payload: torch.Tensor | Span | None = None, silence_s: float | None = None
    ) -> None:
        """Sends a frame; a chunk waits for credit first, while the peer is not silent for `silence_s`.

        A Span is borrowed for reading until the carrier has taken it over (copied it, or written
        it out), which has happened when the call returns; that says nothing about arrival. It takes
        little time, however slow the peer is, once there was `credit`.
        """
        ...

    async def lend(self, frame: v1.Frame, span: Span, silence_s: float | None = None) -> Lent:
        """As `send`, but the peer may read the span where it lies, if the carrier can do that.

        The span is borrowed for reading until it has come back: after the call returns, and after the
        stream is over. It comes back when the peer has let go of the payload, or is gone; from carriers
        that copy, when they have, which is soon or has happened already.
        """
        ...

    async def credit(self, silence_s: float | None = None) -> None:
        """Returns once a chunk can be sent without waiting for the peer, if it is not silent for `silence_s`.

        What must be read atomically (a chunk that is updated all the time) is kept as it is from here
        until a `send` that follows has returned: no longer than it takes to copy it.
        """
        ...

    def land(self, place: Landing | None) -> None:
        """From here on, payloads are received into the memory that `place` names, where it names any.

        Only by carriers that can: `Received.landed` says so, chunk by chunk. `place` is called on the
        event loop before a payload arrives, and must not raise. Its memory is the carrier's until the
        peer has ended or the stream is over, as after `cancel` or a deadline: nothing writes it then.
        """
        ...

    async def recv(self, silence_s: float | None = None) -> Received | None:
        """The next chunk or body; None when the peer has ended its side.

        Taking a chunk returns one credit to the peer. Frames that arrived before the peer's
        end, refusal or death are delivered first.

        Raises:
            DeadlineError: nothing at all arrived for `silence_s`. Names the peer and whom it
                said it was waiting for. The stream is cancelled.
        """
        ...

    async def waiting(self, on: list[str]) -> None:
        """Tells the peer that the answer has to wait for others."""
        ...

    async def end(self) -> None:
        """This side has said everything; the other may go on."""
        ...

    def refuse(self, code: v1.Code, message: str) -> None:
        """Called side only: the stream is over, and the caller gets a RefusedError."""
        ...

    def cancel(self, reason: str = "") -> None:
        """Both sides are over at once; frames queued on either side are dropped."""
        ...


Handler = Callable[[Stream], Awaitable[None]]
"""Serves one incoming stream of one method. When it returns the stream is ended; when it raises,
a GradstreamError or a bug, the caller is refused with it."""


class Endpoint(Protocol):
    """A node's place on the network."""

    identity: Identity
    address: str  # what others connect to, once `start` has returned
    protected: bool  # its connections are encrypted, and both sides of each are known

    @property
    def routes(self) -> Mapping[str, str]:
        """By which carrier each known peer is reached; nothing where there is only one."""
        ...

    async def start(self) -> None:
        """Begins to accept streams. Raises ConfigError when the address cannot be had."""
        ...

    def serve(self, method: str, handler: Handler, *, model: bool = True) -> None:
        """Registers the handler of a method.

        Args:
            model: the method touches the model: refuse callers whose fingerprint or
                membership epoch is not this endpoint's. Protocol version and job are
                checked always.
        """
        ...

    def serve_tensors(self) -> None:
        """Takes tensors that peers send to this node, for `recv`."""
        ...

    def members_changed(self, members: Mapping[str, int], revoked: Iterable[bytes] = ()) -> None:
        """Who the members of the run are from now on. Nobody else is served, but those who ask to join.

        Args:
            members: incarnations by name.
            revoked: SHA-256 of certificates that nobody accepts any more.
        """
        ...

    def know(self, peer: str, address: str) -> None:
        """Teaches the address of a peer; a changed address drops old connections."""
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
        """Opens a stream. Returns at once; refusals and unreachable peers surface at first use.

        Args:
            new_connection: over one that is made for this stream and ends with it, by carriers that have
                connections: the old one may have been cut.
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
        """One small request, one small reply. For `new_connection` see `open`."""
        ...

    async def send(self, peer: str, tag: int, tensor: Span, *, silence_s: float = 30.0) -> None:
        """Sends elements to a peer, matched there by (this node, tag). Returns when they arrived."""
        ...

    async def recv(self, peer: str, tag: int, into: Span, *, silence_s: float = 30.0) -> None:
        """Receives into memory of one's own what `peer` sends under `tag`.

        `into` is borrowed for writing until the call returns. After an error its contents are
        undefined, and nothing will write it any more.

        Raises:
            RefusedError: the sender's size or dtype is not that of `into` (raised on both sides).
        """
        ...

    async def data_socket(self, peer: str, name: str, *, dial: bool) -> socket.socket | None:
        """A non-blocking socket to a peer, for a thread that moves bytes without the event loop.

        Both sides ask for it by the same name, and one of them dials. Each side closes its own end. The two
        sides agree on the bytes that they exchange: there are no frames, no credit, and no signs of life.

        Args:
            peer: name of the other node.
            name: name of the socket, the same at both sides.
            dial: whether this side connects; the other side accepts.

        Returns:
            None where the carrier to that peer has no such sockets (it encrypts, or is in memory), or the two
            sides did not connect in time.
        """
        ...

    async def close(self) -> None:
        """Cancels every stream and stops accepting. Idempotent."""
        ...
