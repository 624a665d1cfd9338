"""`PairwiseExchange`: one node exchanges vectors with one partner at a time, in rounds. No third node has a part in it.

    opens a stream for round r ──▶ ◀── opens a stream for round r       each of a pair gives on its own stream
    "I am there"               ──▶      waits until it is in round r itself
                               ◀── "come" or "I continue without you"
    its vectors                ──▶
                               ◀── "I have them all"

An exchange is done when a node has the partner's vectors, and the partner has said that it has this node's. Otherwise
the node continues alone, and so does the partner; they can differ only where their connection breaks between the two
last messages. What was received of an exchange that is not done is used by nobody. A node may also give to one node,
and
take from another: `pass_on`. Then each half is done, or not, by itself.

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
from gradstream.runtime.tasks import Broadcast
from gradstream.transport.base import Endpoint, Stream, copy_elements
from gradstream.wire import v1
from gradstream.wire.frames import to_wire

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
class _Exchange:
    """The exchange of a round in progress.

    Args:
        to: name of the node that gets this one's vectors.
        giver: name of the node that gives to this one.
        into: where its vectors land.
        pair: both halves are done, or none is.
        over: set when the exchange is over, for whoever asks for its end.

    Attributes:
        gave, took: done when a half is complete; fail when it cannot be.
    """

    to: str
    giver: str
    into: Sequence[Span]
    pair: bool
    over: asyncio.Event = field(default_factory=asyncio.Event)
    gave: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    took: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    incoming: Stream | None = None

    def fail(self, error: Exception, *halves: asyncio.Future[None]) -> None:
        """These halves cannot be completed; those of a pair fail together."""
        for half in (self.gave, self.took) if self.pair else halves:
            if not half.done():
                half.set_exception(error)
                half.exception()  # it may be that nobody awaits it any more


class PairwiseExchange:
    """The exchanges of one node.

    Args:
        endpoint: a started endpoint, which knows the addresses of all partners.
        silence_s: a partner that is silent for this long is given up, in seconds.

    Attributes:
        given_bytes, taken_bytes: bytes of vectors that this node has sent and received so far.
        contains: what the vectors that it gives contain of whom, for the partner.
        taken_contain: the same of the vectors that it has taken last.
    """

    def __init__(self, runtime: Runtime, endpoint: Endpoint, silence_s: float) -> None:
        self.given_bytes = self.taken_bytes = 0
        self.contains: Sequence[v1.SenderPushes] = ()
        self.taken_contain: Sequence[v1.SenderPushes] = ()
        self._runtime = runtime
        self._endpoint = endpoint
        self._me = runtime.node
        self._silence_s = silence_s
        self._round = -1  # the newest one of which it is known whom this node meets in it
        self._current: _Exchange | None = None
        self._absent = False
        self._changed = Broadcast()

    def serve(self) -> None:
        """Answers partners from now on. Epochs may differ: a partner may know of a loss, and this node not yet."""
        self._endpoint.serve(METHOD, self._answer, model=False)

    async def swap(self, number: int, partner: str, given: Sequence[Span], into: Sequence[Span]) -> str:
        """Exchanges vectors with a partner in a round: both have the other's, or none has.

        Args:
            number: number of the round, larger than that of every call before.
            partner: name of the partner; "" for none.
            given: borrowed for reading until the call returns.
            into: borrowed for writing until the call returns; undefined if the exchange is not done.

        Returns:
            "" if the exchange is done; else why not.
        """
        gave, took = await self._carry_out(number, _Exchange(partner, partner, into, pair=True), given)
        return gave or took

    async def pass_on(
        self, number: int, to: str, giver: str, given: Sequence[Span], into: Sequence[Span]
    ) -> tuple[str, str]:
        """Gives vectors to one node, and takes those of another, in a round. Each half is done, or not, by itself.

        Args:
            number, given, into: as for `swap`.
            to: name of the node that gets them; "" for none.
            giver: name of the node that gives; "" for none.

        Returns:
            "" if `to` has the vectors, else why not; "" if `into` has those of `giver`, else why not.
        """
        return await self._carry_out(number, _Exchange(to, giver, into, pair=False), given)

    async def _carry_out(self, number: int, exchange: _Exchange, given: Sequence[Span]) -> tuple[str, str]:
        assert number > self._round
        self._round, self._current = number, exchange if exchange.to else None
        self._changed.ring()
        if not exchange.to:
            return ("there is no partner",) * 2
        halves = [self._give(exchange, number, given)]
        if not exchange.pair:  # else what the partner answers to the one half tells of the other
            halves.append(self._ask(exchange, number))
        with borrow_all(given, exchange.into, to=f"{self._me}: round {number}"):
            tasks = [self._runtime.spawn(half, name=f"{self._me}/round-{number}") for half in halves]
            try:
                return await _why(exchange.gave), await _why(exchange.took)
            finally:
                self._current = None
                exchange.over.set()
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                if exchange.incoming is not None and not _complete(exchange.took):
                    exchange.incoming.cancel("the exchange was given up")  # nothing is written any more

    def lost(self, node: str, why: str) -> None:
        """Gives up what is exchanged with a node that is not a member any more."""
        exchange, error = self._current, PeerLostError(node, why)
        if exchange is not None and exchange.to == node:
            exchange.fail(error, exchange.gave)
        if exchange is not None and exchange.giver == node:
            exchange.fail(error, exchange.took)

    def absent(self, is_absent: bool) -> None:
        """Whether this node takes part in no round now. Then nobody waits for it: it may be waiting for them."""
        self._absent = is_absent
        self._changed.ring()

    def end(self) -> None:
        """This node meets nobody any more."""
        self._round = OVER
        self._changed.ring()

    # ---- the giving half ------------------------------------------------------------------

    async def _give(self, exchange: _Exchange, number: int, spans: Sequence[Span]) -> None:
        try:
            await self._send(exchange.to, number, spans)
        except LOST as error:
            exchange.fail(error, exchange.gave)
            return
        if not exchange.gave.done():
            exchange.gave.set_result(None)

    async def _send(self, partner: str, number: int, spans: Sequence[Span]) -> None:
        wire = to_wire(spans[0].tensor.dtype)
        elems = sum(map(len, spans))
        request = v1.Meet(round=number, elems=elems, dtype=wire, contains=self.contains)
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

    async def _ask(self, exchange: _Exchange, number: int) -> None:
        """Fails unless the giver gives to this node in this round, or once it is gone before it has."""
        stream = await self._endpoint.open(exchange.giver, METHOD, v1.Meet(round=number))
        try:
            await stream.send(v1.Frame(body=v1.Body(data=COME)))
            await self._expect(stream, COME)
            await stream.recv(self._silence_s)  # its end: the giver is through with this round
            if exchange.incoming is None:
                raise GoneOnError(stream.peer, "has given nothing in this round")
        except LOST as error:
            exchange.fail(error, exchange.took)
        finally:
            stream.cancel("the answer is there")

    async def _answer(self, stream: Stream) -> None:
        """Serves the stream of a partner, or of one that takes this node for its partner."""
        request = v1.Meet.FromString(stream.opened.body)
        while not self._knows(request.round):
            try:
                await self._runtime.within(self._silence_s / SIGNS, self._reached(request.round))
            except TimeoutError:
                await stream.waiting([f"{self._me}: not in round {request.round} yet"])
        exchange, sender = self._current, stream.opened.sender
        asks = not request.elems
        if (
            self._absent
            or self._round != request.round
            or exchange is None
            or sender != (exchange.to if asks else exchange.giver)
        ):
            await stream.send(v1.Frame(body=v1.Body(data=GO_ON)))
            return
        if asks:
            await self._attend(stream, exchange)
            return
        if exchange.incoming is not None:
            raise RefusedError(
                self._me, "BAD_REQUEST", f"{stream.peer} gives in round {request.round} already"
            )
        exchange.incoming = stream
        try:
            await self._take(stream, request, exchange.into)
        except LOST as error:
            exchange.fail(error, exchange.took)
            raise
        if not exchange.took.done():
            self.taken_contain = request.contains
            exchange.took.set_result(None)

    def _knows(self, number: int) -> bool:
        """Whether it is known whom this node meets in a round."""
        return self._absent or self._round >= number

    async def _reached(self, number: int) -> None:
        while not self._knows(number):
            await self._changed.wait()

    async def _attend(self, stream: Stream, exchange: _Exchange) -> None:
        """Answers a node that asks whether this one gives to it, and stays until it has."""
        await stream.send(v1.Frame(body=v1.Body(data=COME)))
        while not exchange.over.is_set():
            try:
                await self._runtime.within(self._silence_s / SIGNS, exchange.over.wait())
            except TimeoutError:
                await stream.waiting([f"{self._me}: its exchange is under way"])

    async def _take(self, stream: Stream, request: v1.Meet, into: Sequence[Span]) -> None:
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
                or chunk.sequence != request.round
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


async def _why(half: asyncio.Future[None]) -> str:
    """Why a half cannot be complete; "" when it is."""
    try:
        await half
    except LOST as error:
        return str(error)
    return ""


def _complete(half: asyncio.Future[None]) -> bool:
    return half.done() and not half.cancelled() and half.exception() is None
