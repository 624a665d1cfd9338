"""What carriers over stream sockets have in common: who listens, who dials, who is calling.

A node has a link to each peer that it opens streams to, and one for each priority, so that a ping
never waits behind a gradient in a socket's buffer. A connection begins with a greeting, which binds
it to a job, a node and the start of its process, and where the run has a token, proves it known.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import socket
import struct
from abc import abstractmethod
from functools import partial

from gradstream.errors import ConfigError
from gradstream.runtime.base import Runtime
from gradstream.transport.base import Identity, Priority
from gradstream.transport.connection import Connection
from gradstream.transport.endpoint import WINDOW, EndpointCore
from gradstream.transport.framing import Parcel, Place
from gradstream.transport.lines import Lines
from gradstream.transport.link import GREETING, Link, LinkCarrier
from gradstream.transport.stream import StreamCore
from gradstream.wire import v1
from gradstream.wire.frames import PROTOCOL

__all__ = ["SocketEndpoint"]

GREETING_S = 10.0  # who connects and says nothing is sent away after this
MAX_GREETING_BYTES = 4 << 10
CONNECT_S = 10.0
FLUSH_S = 1.0  # how long `close` lets peers be told
ACCEPT_AGAIN_S = 0.1  # after running out of descriptors
MAX_CONNECTIONS = 16  # of one link

_GREETING = struct.Struct("<QII32s")  # link, index and number of its connections, proof


class Unreachable:
    """The carrier of a stream to a peer that cannot be reached."""

    def __init__(self, why: str) -> None:
        self._why = why

    def connect(self, stream: StreamCore, opened: v1.Open) -> None:
        """See `OutgoingCarrier.connect`."""
        del opened
        stream.broken(self._why)

    def transmit(self, frame: v1.Frame, payload: object) -> None:
        """There is nobody."""

    async def drained(self) -> None:
        """At once."""

    def drop(self) -> None:
        """There is nothing."""

    def over(self) -> None:
        """From the beginning."""


class _Guest:
    """A connection of which it is not known yet who is calling."""

    def __init__(self, endpoint: SocketEndpoint, connected: socket.socket) -> None:
        self._endpoint = endpoint
        self.connection = Connection(self)
        self.connection.inbox.max_header_bytes = MAX_GREETING_BYTES
        self.turned_away = False
        self.timer = endpoint.runtime.expire_after(GREETING_S, self.leave)
        self.connection.start(connected)

    def place(self, stream: int, frame: v1.Frame, payload_bytes: int) -> Place | None:
        """See `Receiver.place`: a greeting has none."""
        return None

    def arrived(self, stream: int, number: int, frame: v1.Frame, place: Place | None) -> None:
        """See `Receiver.arrived`."""
        if self.turned_away:
            return
        if stream == GREETING and frame.HasField("open"):
            self._endpoint.greeted(self, frame.open)
        else:
            self.leave()

    def lost(self, connection: Connection, message: str) -> None:
        """See `Owner.lost`."""
        self.leave()

    def leave(self) -> None:
        """Sends it away."""
        self.timer.cancel()
        self.connection.close()
        self._endpoint.guests.pop(self, None)


class SocketEndpoint(EndpointCore):
    """Base of endpoints over stream sockets. One of them adds how to listen and how to connect.

    Args:
        identity, runtime, window: as of every endpoint.
        connections: over how many sockets a link carries bulk: more than one helps where a single
            one cannot fill a long fat line.
        token: a secret of the run, which callers have to know; empty asks for none.

    Raises:
        ConfigError: more connections than there may be, or none.
    """

    has_lines = False
    """See `Endpoint.line`."""

    def __init__(
        self,
        identity: Identity,
        runtime: Runtime,
        *,
        connections: int = 1,
        token: bytes = b"",
        window: int = WINDOW,
    ) -> None:
        super().__init__(identity, runtime, window=window)
        if not 1 <= connections <= MAX_CONNECTIONS:
            raise ConfigError(f"connections = {connections}: expected from 1 to {MAX_CONNECTIONS}")
        self.guests: dict[_Guest, None] = {}
        self._connections = connections
        self._token = token
        self._listener: socket.socket | None = None
        self._links: dict[tuple[str, Priority], Link] = {}
        self._callers: dict[tuple[str, int, int], Link] = {}  # by name, incarnation and their number
        self._link_numbers = itertools.count(1)
        self._dialling: dict[asyncio.Task[None], None] = {}
        self._lines = Lines(runtime)

    # ---- what a carrier adds ----------------------------------------------------------

    @abstractmethod
    def _listen(self) -> tuple[socket.socket, str]:
        """A listening, non-blocking socket and its address. Raises ConfigError where it cannot be had."""

    @abstractmethod
    async def _connect(self, address: str) -> socket.socket:
        """A connected, non-blocking socket. Raises OSError where nobody is there."""

    @abstractmethod
    def _admit(self, connected: socket.socket) -> None:
        """Prepares a socket that was accepted. Raises OSError or ConfigError to close it."""

    # ---- listening ----------------------------------------------------------------------

    async def start(self) -> None:
        """See `Endpoint.start`."""
        self._listener, self.address = self._listen()
        self._accept_from(self._listener)

    def _accept_from(self, listener: socket.socket) -> None:
        if self._listener is listener:
            asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        try:
            connected, _ = listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionError):
            return
        except OSError:  # no descriptor is left: the others are served meanwhile
            asyncio.get_running_loop().remove_reader(listener)
            self.runtime.call_later(ACCEPT_AGAIN_S, partial(self._accept_from, listener))
            return
        try:
            connected.setblocking(False)
            self._admit(connected)
        except (OSError, ConfigError):
            connected.close()
            return
        self.guests[_Guest(self, connected)] = None

    def greeted(self, guest: _Guest, greeting: v1.Open) -> None:
        """Somebody has said who they are."""
        link, index, count, proof = 0, 0, 0, b""
        if len(greeting.body) == _GREETING.size:
            link, index, count, proof = _GREETING.unpack(greeting.body)
        refuse = self._objection(greeting, index, count, proof)
        if refuse is not None:
            self._turn_away(guest, refuse)
            return
        if greeting.method:
            guest.timer.cancel()
            self.guests.pop(guest, None)
            self._lines.arrived(greeting.sender, greeting.method, guest.connection.detach())
            return
        key = (greeting.sender, greeting.incarnation, link)
        caller = self._callers.get(key)
        if caller is None:
            caller = Link(self, greeting.sender, count, called=True, on_lost=partial(self._lost_caller, key))
            caller.incarnation = greeting.incarnation
            self._callers[key] = caller
        guest.timer.cancel()
        self.guests.pop(guest, None)
        self._attach(caller, index, guest.connection)

    def _attach(self, caller: Link, index: int, connection: Connection) -> None:
        before = caller.connections[index] if index < len(caller.connections) else None
        if before is None or before.started:
            connection.close()  # this one is taken
            return
        caller.connections[index] = connection
        connection.belong(caller, before)

    def _objection(self, greeting: v1.Open, index: int, count: int, proof: bytes) -> v1.Refuse | None:
        mine = self.identity
        who = f"{greeting.sender} (incarnation {greeting.incarnation:x})"
        if greeting.protocol != PROTOCOL:
            text = f"{who} speaks protocol {greeting.protocol}, {mine.name} {PROTOCOL}: install one version"
            return v1.Refuse(code=v1.BAD_PROTOCOL, message=text)
        if greeting.job != mine.job:
            text = f"{who} belongs to job {greeting.job!r}, {mine.name} to {mine.job!r}: check the address"
            return v1.Refuse(code=v1.BAD_JOB, message=text)
        if not (index < count <= MAX_CONNECTIONS and greeting.sender):
            return v1.Refuse(code=v1.BAD_REQUEST, message=f"the greeting of {who} is malformed")
        if self._token and not hmac.compare_digest(proof, self._proof(greeting, mine.name)):
            text = f"{who} does not know the token of this run"
            return v1.Refuse(code=v1.BAD_TOKEN, message=text)
        return None

    def _proof(self, greeting: v1.Open, called: str) -> bytes:
        """Shows that the token is known, and not the token; for this caller and this called node alone."""
        if not self._token:
            return bytes(32)
        said = f"{greeting.job}\n{greeting.sender}\n{greeting.incarnation:x}\n{called}".encode()
        return hmac.digest(self._token, said, "sha256")

    def _turn_away(self, guest: _Guest, refuse: v1.Refuse) -> None:
        """Says why, and closes once that has had time to leave."""
        guest.turned_away = True
        guest.timer.cancel()
        guest.timer = self.runtime.call_later(FLUSH_S, guest.leave)
        guest.connection.post(Parcel(GREETING, 0, v1.Frame(refuse=refuse), on_sent=lambda _: None))

    def answer(self, link: Link, carrier: LinkCarrier, opened: v1.Open) -> StreamCore:
        """Answers an Open that came over a link that a peer has made."""
        objection = self._check(opened)
        if objection is None and (opened.sender, opened.incarnation) != (link.peer, link.incarnation):
            text = f"a stream of {opened.sender} on a connection of {link.peer}"
            objection = v1.Refuse(code=v1.BAD_REQUEST, message=text)
        return self._incoming(opened, carrier, objection=objection)

    def _lost_caller(self, key: tuple[str, int, int], link: Link) -> None:
        del link
        self._callers.pop(key, None)

    # ---- dialling -----------------------------------------------------------------------

    def _dial(self, peer: str, address: str | None, priority: Priority) -> LinkCarrier | Unreachable:
        if address is None:
            return Unreachable("its address is not known")
        link = self._links.get((peer, priority))
        if link is None:
            count = self._connections if priority is Priority.BULK else 1
            link = Link(self, peer, count, called=False, on_lost=partial(self._lost_link, (peer, priority)))
            self._links[peer, priority] = link
            task = self.runtime.spawn(self._join(link, address), name=f"{self.identity.name}: dial {peer}")
            self._dialling[task] = None
            task.add_done_callback(lambda done: self._dialling.pop(done, None))
        return link.carrier()

    async def _join(self, link: Link, address: str) -> None:
        """Connects a link's sockets, each with a greeting."""
        number = next(self._link_numbers)
        try:
            for index, connection in enumerate(link.connections):
                connected = await self.runtime.within(CONNECT_S, self._connect(address))
                connection.greet(self._greeting(link.peer, number, index, len(link.connections)))
                connection.start(connected)
        except TimeoutError:
            link.fail(f"no connection to {address} within {CONNECT_S:g} s")
        except OSError as error:
            link.fail(f"nobody listens at {address} ({error.strerror or error})")

    def _greeting(self, peer: str, number: int, index: int, count: int, line: str = "") -> Parcel:
        mine = self.identity
        greeting = v1.Open(protocol=PROTOCOL, job=mine.job, sender=mine.name, incarnation=mine.incarnation)
        greeting.method = line
        greeting.body = _GREETING.pack(number, index, count, self._proof(greeting, peer))
        return Parcel(GREETING, 0, v1.Frame(open=greeting), on_sent=lambda _: None)

    # ---- lines --------------------------------------------------------------------------

    async def line(self, peer: str, name: str, *, dial: bool) -> socket.socket | None:
        """See `Endpoint.line`. Who asked for several connections has a use for them that one line is not."""
        address = self._addresses.get(peer)
        if not self.has_lines or self._connections > 1 or address is None:
            return None
        dialled = self._dial_line(peer, address, name) if dial else self._lines.taken(peer, name)
        try:
            return await self.runtime.within(CONNECT_S, dialled)
        except (TimeoutError, OSError):
            return None

    async def _dial_line(self, peer: str, address: str, name: str) -> socket.socket:
        connected = await self._connect(address)
        try:
            greeting = self._greeting(peer, 0, 0, 1, name)
            await asyncio.get_running_loop().sock_sendall(connected, b"".join(greeting.pieces(0)))
        except BaseException:
            connected.close()
            raise
        return connected

    def _lost_link(self, key: tuple[str, Priority], link: Link) -> None:
        if self._links.get(key) is link:
            del self._links[key]

    def _hang_up(self, peer: str) -> None:
        for priority in Priority:
            link = self._links.get((peer, priority))
            if link is not None:
                link.fail("its address has changed")

    # ---- the end ------------------------------------------------------------------------

    async def _shut(self, *, abruptly: bool) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        for task in list(self._dialling):
            task.cancel()
        links = [*self._links.values(), *self._callers.values()]
        try:
            if not abruptly:
                connections = [connection for link in links for connection in link.connections]
                await self.runtime.within(
                    FLUSH_S, self.runtime.gather(*(one.flushed() for one in connections if one.started))
                )
        except TimeoutError:
            pass  # a peer that does not read is not waited for
        finally:
            for link in links:
                link.close()
            for guest in list(self.guests):
                guest.leave()
            self._lines.close()
            self._links.clear()
            self._callers.clear()
