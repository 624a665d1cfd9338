"""`Detours`: reaches peers that cannot be dialled, because they are behind a firewall or a router (NAT).

If a connection to a peer fails, the coordinator, which every node reaches, tells the peer who wants to talk to it:

    caller ──✗──▶ called                          1. it is dialled
    caller ◀────── called                         2. the called node dials the caller, if it can
    caller ──▶ coordinator ◀── called             3. both dial the coordinator, which passes the bytes on

All three carry the same bytes: those of gRPC between caller and called node. Their TLS and their proofs of the secret
are end to end, so the coordinator needs no more trust than a router.

A detour begins at an *entry*: a port on this machine's loopback. gRPC dials it instead of the peer, without knowing.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

import torch

from gradstream.errors import GradstreamError, PeerLostError
from gradstream.runtime.base import Runtime
from gradstream.transport.base import Priority, Stream
from gradstream.transport.grpc.endpoint import GrpcEndpoint
from gradstream.transport.limits import COORDINATOR, LIMITS
from gradstream.transport.offers import host_and_port
from gradstream.wire import v1

# ---- tunnels -----------------------------------------------------------------------------
# Carries the bytes of one connection through another one, or through a stream. Nobody reads them on the way.

PIECE_BYTES = 128 << 10
"""The most bytes of a Chunk of a tunnel. With `endpoint.WINDOW` of them, a receiver holds 2 MB of each direction."""

ANSWER_S = 15.0
"""Seconds within which a node that is called through a relay answers."""

TICKET_BYTES = 16
"""Random bytes that name a tunnel."""

_WORD_BYTES = 4


class Line(NamedTuple):
    """One end of a connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


async def dial(host: str, port: int) -> Line:
    """A connection to an address. Raises OSError if nobody listens there."""
    return Line(*await asyncio.open_connection(host.strip("[]"), port, limit=PIECE_BYTES))


async def tunnel(runtime: Runtime, line: Line, stream: Stream, silence_s: float) -> None:
    """Carries a connection through a stream of Chunks, both ways, until both directions have ended.

    Args:
        line: the connection; closed when this returns.
        stream: leads to the other end of the tunnel. It fails, and so does this, if that end is gone.
        silence_s: the longest time for which the stream may be silent while bytes wait for its credit.
    """
    try:
        await runtime.gather(_pack(line, stream, silence_s), _unpack(stream, line))
    except BaseException as error:
        stream.cancel(f"a connection through it has ended: {type(error).__name__}")
        raise
    finally:
        line.writer.close()


async def join(runtime: Runtime, first: Line, other: Line) -> None:
    """Forwards bytes between two connections, both ways, until both have ended; closes both."""
    try:
        await runtime.gather(_copy(first, other), _copy(other, first))
    finally:
        first.writer.close()
        other.writer.close()


async def _copy(source: Line, target: Line) -> None:
    while data := await source.reader.read(PIECE_BYTES):
        target.writer.write(data)
        await target.writer.drain()
    target.writer.close()


async def _pack(line: Line, stream: Stream, silence_s: float) -> None:
    """Sends a connection's bytes as Chunks of whole 4-byte words; `sequence` says how many of the bytes count."""
    while data := await line.reader.read(PIECE_BYTES):
        words = bytearray(data + bytes(-len(data) % _WORD_BYTES))
        chunk = v1.Chunk(elems=len(words) // _WORD_BYTES, dtype=v1.FLOAT32, sequence=len(data))
        await stream.send(v1.Frame(chunk=chunk), torch.frombuffer(words, dtype=torch.float32), silence_s)
    await stream.end()


async def _unpack(stream: Stream, line: Line) -> None:
    while (received := await stream.recv()) is not None:
        if received.payload is not None:
            words = memoryview(received.payload.numpy()).cast("B")  # type: ignore[arg-type]
            line.writer.write(words[: received.frame.chunk.sequence])
            await line.writer.drain()
    line.writer.close()


# ---- detours -----------------------------------------------------------------------------

DIAL_S = 5.0
"""Seconds that a direct connection, or one back, may take."""

_AGAIN_S = 1.0
_WELCOME = b"\1"

_log = logging.getLogger(__name__)


class Detours:
    """The detours of one node.

    Args:
        grpc: the node's endpoint of gRPC, which reaches the coordinator.
        silence_s: the longest silence of the coordinator while bytes wait to leave through it.
    """

    def __init__(self, runtime: Runtime, grpc: GrpcEndpoint, *, silence_s: float) -> None:
        self._runtime = runtime
        self._grpc = grpc
        self._silence_s = silence_s
        self._me = grpc.identity.name
        self._hosts: dict[str, str] = {}  # of peers, as they report them
        self._searches: dict[
            str, tuple[str, asyncio.Task[str | None]]
        ] = {}  # by peer: its address, and its entry
        self._servers: dict[str, asyncio.Server] = {}  # entries, by peer; and "", where nodes dial back
        self._back_port = 0
        self._num_strangers = 0  # connections to it that have shown no ticket yet
        self._awaited: dict[bytes, Line | None] = {}  # by ticket: a node that has dialled back
        self._closed_to: set[str] = set()  # peers that cannot be dialled back
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._attending = False

    # ---- the endpoint's side ----------------------------------------------------------------

    async def start(self) -> None:
        """Begins to listen for nodes that dial back."""
        host = host_and_port(self._grpc.address)[0]
        self._servers[""] = await self._listen(host, self._welcome)
        self._back_port = _port_of(self._servers[""])

    def know(self, peer: str, address: str) -> None:
        """Notes the address of a peer for gRPC. The first peer shows that this node is a member, and can be called."""
        self._hosts[peer] = host_and_port(address)[0]
        if peer in self._searches and self._searches[peer][0] != address:
            self._forget(peer)
        if peer != COORDINATOR and self._me != COORDINATOR and not self._attending:
            self._attending = True
            self._spawn(self._attend(), "post")

    def entry(self, peer: str) -> str | None:
        """What `find` has returned for a peer; None before."""
        _, finding = self._searches.get(peer, ("", None))
        ended = finding is not None and finding.done() and not finding.cancelled()
        return finding.result() if finding is not None and ended and not finding.exception() else None

    async def find(self, peer: str, address: str, others: list[str]) -> str | None:
        """Finds out how to reach a peer, once. Returns the address for gRPC; None if any carrier reaches the peer.

        That address is the entry of a detour, or, if a firewall leaves only the port of gRPC, the peer's own.

        Args:
            peer: name of the peer; `know` has named it.
            address: its address for gRPC.
            others: its addresses for other carriers.
        """
        if peer == COORDINATOR:
            return None
        if peer not in self._searches:
            self._searches[peer] = address, self._spawn(self._find(peer, address, others), f"way to {peer}")
        # It is cancelled if the address changes meanwhile, but this caller is not.
        await asyncio.gather(asyncio.shield(self._searches[peer][1]), return_exceptions=True)
        return self.entry(peer)

    async def close(self) -> None:
        """Closes all detours."""
        for server in self._servers.values():
            server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ---- the caller ---------------------------------------------------------------------------

    async def _find(self, peer: str, address: str, others: list[str]) -> str | None:
        open_to_all = await self._are_dialled(others)
        if await self._is_reached(peer, address, keep=not (others and open_to_all)):
            return None if open_to_all else address
        try:
            connection = await self._call(peer)
        except (GradstreamError, OSError) as error:
            _log.warning(
                "%s: no way to %s, which cannot be dialled at %s: %s", self._me, peer, address, error
            )
            self._searches.pop(peer, None)  # dialling reports what is wrong; later there may be a way
            return None
        if isinstance(connection, Line):
            connection.writer.close()
        else:
            connection.cancel("there is a way")
        self._servers[peer] = entry = await self._listen("127.0.0.1", lambda line: self._enter(peer, line))
        self._grpc.detoured.add(peer)
        return f"127.0.0.1:{_port_of(entry)}"

    async def _are_dialled(self, addresses: list[str]) -> bool:
        try:
            for address in addresses:
                line = await self._runtime.within(DIAL_S, dial(*host_and_port(address)))
                line.writer.close()
        except OSError:
            return False
        return True

    async def _is_reached(self, peer: str, address: str, *, keep: bool) -> bool:
        try:
            return await self._runtime.within(DIAL_S, self._grpc.reaches(peer, address, keep=keep))
        except OSError:
            return False

    async def _call(self, peer: str) -> Line | Stream:
        """A connection that the peer has made, or the stream of a tunnel to it.

        Raises:
            RefusedError: the peer has not answered.
            PeerLostError, DeadlineError: the coordinator is gone or silent.
        """
        ticket = secrets.token_bytes(TICKET_BYTES)
        request = v1.Tunnel(peer=peer, ticket=ticket, port=self._back_port)
        self._awaited[ticket] = None
        stream = await self._grpc.open(COORDINATOR, "tunnel", request)
        try:
            received = await stream.recv(2 * ANSWER_S)
            if received is None:
                raise PeerLostError(COORDINATOR, f"has ended the tunnel to {peer}")
            if not v1.Tunnel.FromString(received.frame.body.data).back:
                return stream
            line = self._awaited[ticket]
            if line is None:
                raise PeerLostError(peer, "has not dialled this node, as it said")
            self._awaited[ticket] = None
            await stream.end()
            return line
        except BaseException:
            stream.cancel("the tunnel was given up")
            raise
        finally:
            if (unused := self._awaited.pop(ticket)) is not None:
                unused.writer.close()

    async def _enter(self, peer: str, line: Line) -> None:
        """Carries a connection that gRPC made to an entry."""
        try:
            await self._carry(line, await self._call(peer))
        except (GradstreamError, OSError) as error:
            _log.info("%s: the connection to %s by a detour has ended: %s", self._me, peer, error)
        finally:
            line.writer.close()

    async def _welcome(self, line: Line) -> None:
        """Accepts a connection of a node that dials back, if it shows a ticket of this node."""
        if self._num_strangers >= LIMITS.strangers:
            line.writer.close()
            return
        self._num_strangers += 1
        try:
            ticket = await self._runtime.within(DIAL_S, line.reader.readexactly(TICKET_BYTES))
            if self._awaited.get(ticket, line) is None:
                self._awaited[ticket] = line
                line.writer.write(_WELCOME)
                return
        except (OSError, EOFError, TimeoutError):
            pass
        finally:
            self._num_strangers -= 1
        line.writer.close()

    # ---- the called node ------------------------------------------------------------------------

    async def _attend(self) -> None:
        """Answers callers, as long as this node lives."""
        while True:
            try:
                stream = await self._grpc.open(COORDINATOR, "post", v1.Tunnel(), priority=Priority.CONTROL)
                while (received := await stream.recv()) is not None:
                    call = v1.Tunnel.FromString(received.frame.body.data)
                    self._spawn(self._answer(call), f"tunnel for {call.peer}")
            except GradstreamError:
                pass  # the coordinator may come back
            await self._runtime.sleep(_AGAIN_S)

    async def _answer(self, call: v1.Tunnel) -> None:
        """Connects a caller to this node's own gRPC port."""
        own: Line | None = None
        try:
            own = await dial(*host_and_port(self._grpc.address))
            back = await self._dial_back(call)
            answer = v1.Tunnel(peer=call.peer, ticket=call.ticket, back=back is not None)
            stream = await self._grpc.open(COORDINATOR, "answer", answer)
            if back is not None:
                await stream.end()
            await self._carry(own, stream if back is None else back)
        except (GradstreamError, OSError) as error:
            _log.info("%s: the connection of %s by a detour has ended: %s", self._me, call.peer, error)
        finally:
            if own is not None:
                own.writer.close()

    async def _dial_back(self, call: v1.Tunnel) -> Line | None:
        """A connection to the caller; None if it cannot be dialled. Later calls of that peer do not try again."""
        host = self._hosts.get(call.peer)
        if host is None or call.peer in self._closed_to:
            return None
        try:
            return await self._runtime.within(DIAL_S, self._show_ticket(host, call))
        except (OSError, EOFError, TimeoutError):
            self._closed_to.add(call.peer)
            return None

    async def _show_ticket(self, host: str, call: v1.Tunnel) -> Line:
        line = await dial(host, call.port)
        try:
            line.writer.write(call.ticket)
            await line.reader.readexactly(len(_WELCOME))
        except BaseException:
            line.writer.close()
            raise
        return line

    # ---- both -----------------------------------------------------------------------------------

    async def _carry(self, line: Line, connection: Line | Stream) -> None:
        if isinstance(connection, Line):
            await join(self._runtime, line, connection)
        else:
            await tunnel(self._runtime, line, connection, self._silence_s)

    def _forget(self, peer: str) -> None:
        _, finding = self._searches.pop(peer)
        finding.cancel()
        self._grpc.detoured.discard(peer)
        self._closed_to.discard(peer)
        if (server := self._servers.pop(peer, None)) is not None:
            server.close()

    async def _listen(self, host: str, take: Callable[[Line], Coroutine[Any, Any, None]]) -> asyncio.Server:
        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._spawn(take(Line(reader, writer)), "a connection of a detour")

        return await asyncio.start_server(accept, host.strip("[]"), 0, limit=PIECE_BYTES)

    def _spawn(self, work: Coroutine[Any, Any, Any], what: str) -> asyncio.Task[Any]:
        task = self._runtime.spawn(work, name=f"{self._me}: {what}")
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))
        return task


def _port_of(server: asyncio.Server) -> int:
    port: int = server.sockets[0].getsockname()[1]
    return port
