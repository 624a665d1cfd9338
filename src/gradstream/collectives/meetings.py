"""`Meetings`: one node exchanges vectors with one partner at a time, in rounds, and no third node has a part in it.

    opens a stream for round r ──▶ ◀── opens a stream for round r       each of the two gives on its own stream
    "I am there"               ──▶      waits until it is in round r itself
                               ◀── "come" or "I go on without you"
    its vectors                ──▶
                               ◀── "I have them all"

An exchange is done when a node has the partner's vectors, and the partner has said that it has this node's. Otherwise
the node goes on alone, and so does the partner; they can differ only where their connection breaks between the two last
messages. What was received of an exchange that is not done is used by nobody.

A stream says for which round it is, and comes from one incarnation of a node. Rounds of a node only grow. So what comes
late, or again, or from a process that was replaced, is never part of another round: the answer is that the node has
gone on. The two may have heard of different members. A node that waits for a partner which waits for somebody else gets
the same answer once that one is in this round, or past it. Until then it hears that the partner lives.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from gradstream.errors import ClosedError, DeadlineError, PeerLostError, RefusedError
from gradstream.memory import Span, borrow_all
from gradstream.runtime.base import Runtime
from gradstream.transport.base import Endpoint, Stream
from gradstream.transport.carrier import copy_elements
from gradstream.transport.silence import Broadcast
from gradstream.wire import v1
from gradstream.wire.dtypes import to_wire

METHOD = "meet"

PIECE_BYTES = 1 << 20
"""Bytes of a chunk."""

SIGNS = 4
"""How often a partner that waits hears within its patience that this node lives."""

COME, GO_ON, HAVE = b"come", b"go on", b"have"
"""The answers to a partner: see above."""

LOST = (PeerLostError, DeadlineError, ClosedError, RefusedError)
"""What the failure of a partner, or of the connection to it, raises."""

OVER = 1 << 62
"""A round after all others."""


class GoneOnError(PeerLostError):
    """The partner goes through this round without this node."""


@dataclass(slots=True, eq=False)
class _Meeting:
    """An exchange that is under way.

    Args:
        partner: name of the partner.
        into: where its vectors land.
        done: set when both sides have everything; fails when one cannot.
    """

    partner: str
    into: Sequence[Span]
    done: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    given: bool = False
    received: bool = False
    incoming: Stream | None = None

    def step(self, *, given: bool = False, received: bool = False) -> None:
        """One half of the exchange is complete."""
        self.given, self.received = self.given or given, self.received or received
        if self.given and self.received and not self.done.done():
            self.done.set_result(None)

    def fail(self, error: Exception) -> None:
        """The exchange cannot be completed."""
        if not self.done.done():
            self.done.set_exception(error)
            self.done.exception()  # it may be that nobody awaits it any more


class Meetings:
    """The exchanges of one node.

    Args:
        runtime: runtime of this node.
        endpoint: a started endpoint, which knows the addresses of all partners.
        silence_s: a partner that is silent for so long is given up, in seconds.

    Attributes:
        given_bytes, taken_bytes: bytes of vectors that this node has sent and received so far.
    """

    def __init__(self, runtime: Runtime, endpoint: Endpoint, silence_s: float) -> None:
        self.given_bytes = self.taken_bytes = 0
        self._runtime = runtime
        self._endpoint = endpoint
        self._me = runtime.node
        self._silence_s = silence_s
        self._round = -1  # the newest one of which it is known whom this node meets in it
        self._meeting: _Meeting | None = None
        self._changed = Broadcast()

    def serve(self) -> None:
        """Answers partners from now on. Epochs may differ: a partner may know of a loss, and this node not yet."""
        self._endpoint.serve(METHOD, self._answer, model=False)

    async def meet(self, number: int, partner: str, given: Sequence[Span], into: Sequence[Span]) -> str:
        """Exchanges vectors in a round.

        Args:
            number: number of the round, larger than that of every call before.
            partner: name of the partner; "" for none.
            given: borrowed for reading until the call returns.
            into: borrowed for writing until the call returns; undefined if the exchange is not done.

        Returns:
            "" if the exchange is done; else why not.
        """
        assert number > self._round
        self._round = number
        meeting = self._meeting = _Meeting(partner, into) if partner else None
        self._changed.ring()
        if meeting is None:
            return "there is no partner"
        to = f"{self._me}: meets {partner} in round {number}"
        with borrow_all(given, into, to=to):
            giving = self._runtime.spawn(
                self._give(meeting, number, given), name=f"{self._me}/gives-{number}"
            )
            try:
                await meeting.done
                return ""
            except LOST as error:
                return str(error)
            finally:
                self._meeting = None
                giving.cancel()
                await asyncio.gather(giving, return_exceptions=True)
                if meeting.incoming is not None and not meeting.received:
                    meeting.incoming.cancel("the exchange was given up")  # nothing is written any more

    def lost(self, node: str, why: str) -> None:
        """Gives up the exchange with a node that is no member any more."""
        if self._meeting is not None and self._meeting.partner == node:
            self._meeting.fail(PeerLostError(node, why))

    def end(self) -> None:
        """This node meets nobody any more."""
        self._round = OVER
        self._changed.ring()

    # ---- the giving half ------------------------------------------------------------------

    async def _give(self, meeting: _Meeting, number: int, spans: Sequence[Span]) -> None:
        try:
            await self._send(meeting.partner, number, spans)
            meeting.step(given=True)
        except LOST as error:
            meeting.fail(error)

    async def _send(self, partner: str, number: int, spans: Sequence[Span]) -> None:
        wire = to_wire(spans[0].tensor.dtype)
        request = v1.Tensor(tag=number, elems=sum(map(len, spans)), dtype=wire)
        stream = await self._endpoint.open(partner, METHOD, request)
        try:
            await stream.send(v1.Frame(body=v1.Body(data=COME)))
            await self._expect(stream, COME)
            index = 0
            for span in spans:
                for piece in _pieces(span):
                    chunk = v1.Chunk(
                        index=index, sequence=number, elems=len(piece), dtype=to_wire(piece.tensor.dtype)
                    )
                    await stream.send(v1.Frame(chunk=chunk), piece, self._silence_s)
                    self.given_bytes += piece.tensor.nbytes
                    index += 1
            await stream.end()  # before the last answer, after which the partner drops the stream
            await self._expect(stream, HAVE)
        except BaseException:
            stream.cancel("the exchange was given up")
            raise

    async def _expect(self, stream: Stream, word: bytes) -> None:
        received = await stream.recv(self._silence_s)
        got = b"" if received is None else received.frame.body.data
        if got == GO_ON:
            raise GoneOnError(stream.peer, "goes through this round without this worker")
        if got != word:
            raise PeerLostError(stream.peer, "has ended the exchange")

    # ---- the receiving half ---------------------------------------------------------------

    async def _answer(self, stream: Stream) -> None:
        """Serves the stream of a partner, or of one that takes this node for its partner."""
        request = v1.Tensor.FromString(stream.opened.body)
        while self._round < request.tag:
            try:
                await self._runtime.within(self._silence_s / SIGNS, self._changed.wait())
            except TimeoutError:
                await stream.waiting([f"{self._me}: not in round {request.tag} yet"])
        meeting = self._meeting
        if self._round != request.tag or meeting is None or meeting.partner != stream.opened.sender:
            await stream.send(v1.Frame(body=v1.Body(data=GO_ON)))
            return
        if meeting.incoming is not None:
            raise RefusedError(self._me, "BAD_REQUEST", f"{stream.peer} gives in round {request.tag} already")
        meeting.incoming = stream
        try:
            await self._take(stream, request, meeting.into)
        except LOST as error:
            meeting.fail(error)
            raise
        meeting.step(received=True)

    async def _take(self, stream: Stream, request: v1.Tensor, into: Sequence[Span]) -> None:
        pieces = [piece for span in into for piece in _pieces(span)]
        expected = sum(map(len, into)), to_wire(into[0].tensor.dtype)
        if (request.elems, request.dtype) != expected:
            text = (
                f"{stream.peer} gives {request.elems} elements of type {request.dtype}; expected {expected}"
            )
            raise RefusedError(self._me, "BAD_REQUEST", text)

        def place(chunk: v1.Chunk) -> torch.Tensor | None:
            if chunk.index >= len(pieces) or not _fits(chunk, pieces[chunk.index]):
                return None
            return pieces[chunk.index].tensor

        await self._expect(stream, COME)
        stream.land(place)
        await stream.send(v1.Frame(body=v1.Body(data=COME)))
        for index, piece in enumerate(pieces):
            received = await stream.recv(self._silence_s)
            if received is None:
                raise PeerLostError(stream.peer, "has ended the exchange")
            chunk, payload = received.frame.chunk, received.payload
            if (
                payload is None
                or chunk.index != index
                or chunk.sequence != request.tag
                or not _fits(chunk, piece)
            ):
                text = (
                    f"{stream.peer}: chunk {chunk.index} of {chunk.elems} elements in place of chunk {index}"
                )
                raise RefusedError(self._me, "BAD_REQUEST", f"{text} of {len(piece)}")
            if not received.landed:
                copy_elements(piece.tensor, payload)
            self.taken_bytes += piece.tensor.nbytes
        await stream.send(v1.Frame(body=v1.Body(data=HAVE)))


def _fits(chunk: v1.Chunk, piece: Span) -> bool:
    return chunk.elems == len(piece) and chunk.dtype == to_wire(piece.tensor.dtype)


def _pieces(span: Span) -> list[Span]:
    """The chunks of a span, as both sides cut it."""
    step = PIECE_BYTES // span.tensor.element_size()
    return [
        Span(span.vector, start, min(start + step, span.stop)) for start in range(span.start, span.stop, step)
    ]
