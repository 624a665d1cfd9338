"""What carriers over stream sockets have in common: who listens, who dials, who is calling.

A node has a link to each peer that it opens streams to, and one for each priority, so that a ping
never waits behind a gradient in a socket's buffer. A connection begins with a greeting, which binds it
to a job, a node and the start of its process, and proves both ways that the run's secret is known.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
from abc import abstractmethod
from functools import partial

from gradstream.errors import ConfigError, RefusedError
from gradstream.runtime.base import Runtime
from gradstream.transport.base import Caller, Identity, Priority
from gradstream.transport.endpoint import WINDOW, EndpointCore
from gradstream.transport.limits import LIMITS
from gradstream.transport.proof import check_secret
from gradstream.transport.socket.data_sockets import DataSockets
from gradstream.transport.socket.greeting import answer, greet
from gradstream.transport.socket.multiplexer import MultiplexedCarrier, Multiplexer
from gradstream.transport.stream import StreamCore
from gradstream.wire import v1
from gradstream.wire.frames import FrameError

__all__ = ["SocketEndpoint"]

CONNECT_S = 10.0
FLUSH_S = 1.0  # how long `close` lets peers be told
ACCEPT_AGAIN_S = 0.1  # after running out of descriptors
MAX_CONNECTIONS = 16  # of one link


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


class SocketEndpoint(EndpointCore):
    """Base of endpoints over stream sockets. One of them adds how to listen and how to connect.

    Args:
        identity, runtime, window: as of every endpoint.
        connections: over how many sockets a link carries bulk: more than one helps where a single
            one cannot fill a long fat line.

    Raises:
        ConfigError: more connections than there may be, or none; or the identity has no secret.
    """

    has_lines = False
    """See `Endpoint.line`."""

    def __init__(
        self,
        identity: Identity,
        runtime: Runtime,
        *,
        connections: int = 1,
        window: int = WINDOW,
    ) -> None:
        super().__init__(identity, runtime, window=window)
        if not 1 <= connections <= MAX_CONNECTIONS:
            raise ConfigError(f"connections = {connections}: expected from 1 to {MAX_CONNECTIONS}")
        check_secret(identity.secret, identity.name)
        self._strangers: dict[asyncio.Task[None], None] = {}
        self._connections = connections
        self._listener: socket.socket | None = None
        self._links: dict[tuple[str, Priority], Multiplexer] = {}
        self._callers: dict[tuple[str, int, int], Multiplexer] = {}  # by name, incarnation and their number
        self._link_numbers = itertools.count(1)
        self._dialling: dict[asyncio.Task[None], None] = {}
        self._lines = DataSockets(runtime)

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
        self._hear_out(connected)

    def _hear_out(self, connected: socket.socket) -> None:
        """Hears who is calling, unless too many are calling."""
        if len(self._callers) + len(self._links) >= LIMITS.connections:
            connected.close()
            return
        if len(self._strangers) >= LIMITS.strangers:
            oldest = next(iter(self._strangers))  # it has had the most time
            del self._strangers[oldest]  # now: others may come before it has ended
            oldest.cancel()
        task = self.runtime.spawn(self._meet(connected), name=f"{self.identity.name}: a caller")
        self._strangers[task] = None
        task.add_done_callback(lambda done: self._strangers.pop(done, None))

    async def _meet(self, connected: socket.socket) -> None:
        try:
            heard = answer(connected, self.identity, self._objection)
            greeting = await self.runtime.within(LIMITS.handshake_s, heard)
        except RefusedError as error:
            if error.code == "BAD_SECRET":
                self.on_stranger(_address_of(connected))
        except (TimeoutError, OSError, FrameError):
            pass
        except BaseException:
            connected.close()
            raise
        else:
            self._greeted(greeting, connected)
            return
        try:
            await self._turned_away()
        finally:
            connected.close()

    def _objection(self, greeting: v1.Greeting) -> v1.Refuse | None:
        """Why a connection of a caller that knows the secret is not wanted; None if it is."""
        sender, caller = greeting.sender, self._callers.get(_key_of(greeting))
        if not sender:
            return v1.Refuse(code=v1.BAD_REQUEST, message="a greeting of a node without a name")
        if (refuse := self._not_heard(Caller(sender, greeting.incarnation))) is not None:
            return refuse
        if greeting.line:
            num_open = self._lines.num_unclaimed(sender)
        elif caller is None:
            num_open = sum(name == sender for name, _, _ in self._callers)
        else:
            num_open = 0
        if num_open >= LIMITS.sessions:
            text = f"{sender} has {num_open} connections to {self.identity.name} already: close some"
            return v1.Refuse(code=v1.OVER_LIMIT, message=text)
        count = greeting.count if caller is None else len(caller.connections)
        if not greeting.line and not greeting.index < greeting.count == count <= MAX_CONNECTIONS:
            most = count if caller is not None else MAX_CONNECTIONS
            text = f"connection {greeting.index} of {greeting.count}: expected at most {most} of a link"
            return v1.Refuse(code=v1.BAD_REQUEST, message=text)
        if caller is not None and caller.connections[greeting.index].started:
            text = f"connection {greeting.index} of link {greeting.link} of {sender} is there already"
            return v1.Refuse(code=v1.BAD_REQUEST, message=text)
        return None

    def _greeted(self, greeting: v1.Greeting, connected: socket.socket) -> None:
        """A caller that knows the secret, and that this node wants, has said who it is."""
        if self._closed or self._objection(greeting) is not None:  # since it was answered
            connected.close()
            return
        if greeting.line:
            self._lines.arrived(greeting.sender, greeting.line, connected)
            return
        key = _key_of(greeting)
        if key not in self._callers:
            lost = partial(self._lost_caller, key)
            caller = Multiplexer(self, greeting.sender, greeting.count, called=True, on_lost=lost)
            caller.incarnation = greeting.incarnation
            self._callers[key] = caller
        self._callers[key].connections[greeting.index].start(connected)

    def answer(self, link: Multiplexer, carrier: MultiplexedCarrier, opened: v1.Open) -> StreamCore:
        """Answers an Open that came over a link that a peer has made."""
        return self._incoming(opened, carrier, caller=Caller(link.peer, link.incarnation))

    def _hang_up_on(self, caller: Caller) -> None:
        for (name, incarnation, _), link in list(self._callers.items()):
            if (name, incarnation) == caller:
                link.fail("it has been refused too much")

    def _lost_caller(self, key: tuple[str, int, int], link: Multiplexer) -> None:
        del link
        self._callers.pop(key, None)

    # ---- dialling -----------------------------------------------------------------------

    def _dial(self, peer: str, address: str | None, priority: Priority) -> MultiplexedCarrier | Unreachable:
        if address is None:
            return Unreachable("its address is not known")
        link = self._links.get((peer, priority))
        if link is None:
            count = self._connections if priority is Priority.BULK else 1
            link = Multiplexer(
                self, peer, count, called=False, on_lost=partial(self._lost_link, (peer, priority))
            )
            self._links[peer, priority] = link
            task = self.runtime.spawn(self._join(link, address), name=f"{self.identity.name}: dial {peer}")
            self._dialling[task] = None
            task.add_done_callback(lambda done: self._dialling.pop(done, None))
        return link.carrier()

    async def _join(self, link: Multiplexer, address: str) -> None:
        """Connects a link's sockets, each with a greeting."""
        number = next(self._link_numbers)
        try:
            for index, connection in enumerate(link.connections):
                greeting = v1.Greeting(link=number, index=index, count=len(link.connections))
                connection.start(
                    await self.runtime.within(CONNECT_S, self._reach(link.peer, address, greeting))
                )
        except TimeoutError:
            link.fail(f"no connection to {address} within {CONNECT_S:g} s")
        except RefusedError as error:
            link.turned_away(error)
        except FrameError as error:
            link.fail(f"who answers at {address} is no node of gradstream: {error}")
        except OSError as error:
            link.fail(f"nobody listens at {address} ({error.strerror or error})")

    async def _reach(self, peer: str, address: str, greeting: v1.Greeting) -> socket.socket:
        """A connection on which both sides know who the other one is."""
        connected = await self._connect(address)
        try:
            greeting.sender, greeting.incarnation = self.identity.name, self.identity.incarnation
            await greet(connected, greeting, self.identity, peer)
        except BaseException:
            connected.close()
            raise
        return connected

    # ---- lines --------------------------------------------------------------------------

    async def line(self, peer: str, name: str, *, dial: bool) -> socket.socket | None:
        """See `Endpoint.line`. Who asked for several connections has a use for them that one line is not."""
        address = self._addresses.get(peer)
        if not self.has_lines or self._connections > 1 or address is None:
            return None
        dialled = (
            self._reach(peer, address, v1.Greeting(line=name)) if dial else self._lines.taken(peer, name)
        )
        try:
            return await self.runtime.within(CONNECT_S, dialled)
        except (TimeoutError, OSError, FrameError, RefusedError):
            return None

    def _lost_link(self, key: tuple[str, Priority], link: Multiplexer) -> None:
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
        for task in [*self._dialling, *self._strangers]:
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
            self._lines.close()
            self._links.clear()
            self._callers.clear()


def _key_of(greeting: v1.Greeting) -> tuple[str, int, int]:
    return greeting.sender, greeting.incarnation, greeting.link


def _address_of(connected: socket.socket) -> str:
    """Of the other side, as far as the system says."""
    try:
        return str(connected.getpeername())
    except OSError:
        return "unknown"
