"""`SocketEndpoint`: what carriers over stream sockets have in common: listening, dialling, greetings.

A node has a multiplexer for each peer to which it opens streams, and for each priority, so that a ping
never waits behind a gradient in a socket's buffer. A connection begins with a greeting. It binds the
connection to a job, a node and the start of the node's process, and proves to both sides that the other side
knows the run's secret.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
from abc import abstractmethod
from functools import partial

from typing_extensions import override

from gradstream.errors import ConfigError, RefusedError
from gradstream.runtime.base import Runtime
from gradstream.transport.base import Caller, Identity, PeerSocket, Priority
from gradstream.transport.endpoint import WINDOW, EndpointCore
from gradstream.transport.limits import LIMITS
from gradstream.transport.proof import check_secret
from gradstream.transport.security import Tls, explain
from gradstream.transport.socket.connection import TcpSocket, answer, greet
from gradstream.transport.socket.multiplexer import MultiplexedCarrier, Multiplexer
from gradstream.transport.socket.tls import TlsSocket
from gradstream.transport.stream import StreamCore
from gradstream.wire import v1
from gradstream.wire.frames import FrameError

# ---- data sockets ------------------------------------------------------------------------
# Data sockets: connections beside the streams of two nodes, for a thread that moves bytes by itself.
#
# A data socket begins with a greeting like every connection, so it is bound to a job, a node and the start of the
# node's process. From then on it belongs to its two users, and carries the bytes that they agree on.

UNCLAIMED_S = 10.0  # a socket that nobody asks for is closed after this time


class DataSockets:
    """Keeps data sockets that peers have dialled until the node asks for them."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._arrived: dict[tuple[str, str], PeerSocket] = {}
        self._awaited: dict[tuple[str, str], asyncio.Future[PeerSocket]] = {}

    def arrived(self, peer: str, name: str, connected: PeerSocket) -> None:
        """Keeps a socket that a peer has dialled. It replaces an unclaimed one of that name: the peer gave that up."""
        key = (peer, name)
        awaited = self._awaited.get(key)
        if awaited is not None and not awaited.done():
            awaited.set_result(connected)
            return
        if key in self._arrived:
            self._arrived[key].socket.close()
        self._arrived[key] = connected
        self._runtime.expire_after(UNCLAIMED_S, lambda: self._expire(key, connected))

    async def taken(self, peer: str, name: str) -> PeerSocket:
        """The data socket of that name, once the peer has dialled."""
        key = (peer, name)
        if key in self._arrived:
            return self._arrived.pop(key)
        awaited: asyncio.Future[PeerSocket] = asyncio.get_running_loop().create_future()
        self._awaited[key] = awaited
        try:
            return await awaited
        except asyncio.CancelledError:
            if awaited.done() and not awaited.cancelled():
                awaited.result().socket.close()  # it came at the moment of the cancellation
            raise
        finally:
            del self._awaited[key]

    def num_unclaimed(self, peer: str) -> int:
        """Number of data sockets of a peer that nobody has asked for yet."""
        return sum(of == peer for of, _ in self._arrived)

    def close(self) -> None:
        """Closes the sockets that nobody has asked for."""
        for connected in self._arrived.values():
            connected.socket.close()
        self._arrived.clear()

    def _expire(self, key: tuple[str, str], connected: PeerSocket) -> None:
        if self._arrived.get(key) is connected:
            self._arrived.pop(key).socket.close()


# ---- endpoint ----------------------------------------------------------------------------

CONNECT_S = 10.0
FLUSH_S = 1.0  # time that `close` gives frames to leave
ACCEPT_AGAIN_S = 0.1  # after running out of descriptors
MAX_CONNECTIONS = 16  # of one multiplexer


class _NotBegunError(OSError):
    """The other side of a connection has not begun as a node of this run would."""


class SocketEndpoint(EndpointCore):
    """Base of endpoints over stream sockets. A subclass adds how to listen and how to connect.

    Args:
        identity, runtime, window: see `EndpointCore`.
        connections: number of sockets for the bulk streams to one peer. More than one helps if a single
            connection cannot fill a long path of high bandwidth.
        security: TLS, for listening and for dialling; None is plain text.

    Raises:
        ConfigError: `connections` is out of range, or the identity has no secret.
    """

    has_data_sockets = False
    """Whether `Endpoint.data_socket` returns sockets to callers that do not want copies."""

    def __init__(
        self,
        identity: Identity,
        runtime: Runtime,
        *,
        connections: int = 1,
        window: int = WINDOW,
        security: Tls | None = None,
    ) -> None:
        super().__init__(identity, runtime, window=window)
        if not 1 <= connections <= MAX_CONNECTIONS:
            raise ConfigError(
                f"connections={connections}: expected from 1 to {MAX_CONNECTIONS} sockets to each peer"
            )
        check_secret(identity.secret, identity.name)
        self._strangers: dict[asyncio.Task[None], None] = {}
        self.connections = connections
        self._security = security
        self.protected = security is not None
        self._listener: socket.socket | None = None
        self._outgoing: dict[tuple[str, Priority], Multiplexer] = {}
        self._callers: dict[tuple[str, int, int], Multiplexer] = {}  # by name, incarnation, caller's number
        self._numbers = itertools.count(1)
        self._dialling: dict[asyncio.Task[None], None] = {}
        self._data_sockets = DataSockets(runtime)

    # ---- what a carrier adds ----------------------------------------------------------

    @abstractmethod
    def _listen(self) -> tuple[socket.socket, str]:
        """A listening, non-blocking socket and its address. Raises ConfigError if it cannot listen."""

    @abstractmethod
    def _target(self, address: str) -> tuple[socket.socket, tuple[str, int] | str]:
        """A new socket, and the address to which to connect it."""

    @abstractmethod
    def _admit(self, connected: socket.socket) -> None:
        """Prepares a socket that was connected or accepted. Raises OSError to close it."""

    # ---- listening ----------------------------------------------------------------------

    @override
    async def start(self) -> None:
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
        except OSError:  # out of descriptors: serve the other connections until one is free
            asyncio.get_running_loop().remove_reader(listener)
            self.runtime.call_later(ACCEPT_AGAIN_S, partial(self._accept_from, listener))
            return
        try:
            connected.setblocking(False)
            self._admit(connected)
        except OSError:
            connected.close()
            return
        self._expect_greeting(connected)

    def _expect_greeting(self, connected: socket.socket) -> None:
        """Waits for the caller's greeting, unless there are too many connections."""
        if len(self._callers) + len(self._outgoing) >= LIMITS.connections:
            connected.close()
            return
        if len(self._strangers) >= LIMITS.strangers:
            oldest = next(iter(self._strangers))  # has had the most time to greet
            del self._strangers[oldest]  # now: others may come before it has ended
            oldest.cancel()
        task = self.runtime.spawn(self._receive_greeting(connected), name=f"{self.identity.name}: a caller")
        self._strangers[task] = None
        task.add_done_callback(lambda done: self._strangers.pop(done, None))

    async def _receive_greeting(self, connected: socket.socket) -> None:
        try:
            secured, greeting = await self.runtime.within(LIMITS.handshake_s, self._answered(connected))
        except RefusedError as error:
            if error.code == "BAD_SECRET":
                self.on_stranger(_address_of(connected))
        except (TimeoutError, OSError, FrameError):
            pass
        except BaseException:
            connected.close()
            raise
        else:
            self._greeted(greeting, secured)
            return
        try:
            await self._delay_refusal()
        finally:
            connected.close()

    async def _answered(self, connected: socket.socket) -> tuple[TcpSocket, v1.Greeting]:
        secured = await self._secured(connected)
        checked, objection = self._needs_checksums(secured), partial(self._objection, secured)
        return secured, await answer(secured, self.identity, objection, checked=checked)

    async def _secured(self, connected: socket.socket, peer: str | None = None) -> TcpSocket:
        """Encrypts a connection, if this node has certificates.

        Args:
            peer: the called node; None if this is the called side.
        """
        if self._security is None:
            return connected
        secured = TlsSocket(connected, self._security, peer)
        await secured.handshake()
        return secured

    def _disallows(self, connected: TcpSocket | None, sender: str) -> v1.Refuse | None:
        """Why the certificate of a caller does not allow a stream; None if it does."""
        if self._security is None:
            return None
        shown = connected.shown if isinstance(connected, TlsSocket) else None
        return self._security.objection(shown, sender, self.identity.revoked)

    def _objection(self, connected: TcpSocket, greeting: v1.Greeting) -> v1.Refuse | None:
        """Why this node refuses a connection of a caller that knows the secret; None if it accepts it."""
        sender, caller = greeting.sender, self._callers.get(_key_of(greeting))
        if not sender:
            return v1.Refuse(code=v1.BAD_REQUEST, message="a greeting of a node without a name")
        if (refuse := self._disallows(connected, sender)) is not None:
            return refuse
        if (refuse := self.access.block(Caller(sender, greeting.incarnation))) is not None:
            return refuse
        if greeting.line:
            num_open = self._data_sockets.num_unclaimed(sender)
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
            at = f"connection {greeting.index} of {greeting.count}"
            text = f"{at}: expected at most {most} of a multiplexer"
            return v1.Refuse(code=v1.BAD_REQUEST, message=text)
        if caller is not None and caller.connections[greeting.index].started:
            text = f"connection {greeting.index} of multiplexer {greeting.link} of {sender} is there already"
            return v1.Refuse(code=v1.BAD_REQUEST, message=text)
        return None

    def _greeted(self, greeting: v1.Greeting, connected: TcpSocket) -> None:
        """Takes the connection of a caller that knows the secret and that this node accepts."""
        if (
            self._closed or self._objection(connected, greeting) is not None
        ):  # something changed since the answer
            connected.close()
            return
        if greeting.line:
            peer = PeerSocket(connected, greeting.checked)
            self._data_sockets.arrived(greeting.sender, greeting.line, peer)
            return
        key = _key_of(greeting)
        if key not in self._callers:
            lost = partial(self._lost_caller, key)
            caller = Multiplexer(
                self.runtime,
                greeting.sender,
                greeting.count,
                answer=self._answer,
                on_lost=lost,
                on_damage=self.damaged,
            )
            caller.incarnation = greeting.incarnation
            self._callers[key] = caller
        self._callers[key].connections[greeting.index].start(connected, checked=greeting.checked)

    def _answer(self, multiplexer: Multiplexer, carrier: MultiplexedCarrier, opened: v1.Open) -> StreamCore:
        connected = multiplexer.connections[0].socket
        stream = self.incoming(
            opened,
            carrier,
            caller=Caller(multiplexer.peer, multiplexer.incarnation),
            objection=self._disallows(connected, opened.sender),
        )
        if isinstance(connected, TlsSocket):
            stream.certificate = connected.shown.digest
        return stream

    def _disconnect_caller(self, caller: Caller) -> None:
        for (name, incarnation, _), multiplexer in list(self._callers.items()):
            if (name, incarnation) == caller:
                multiplexer.fail("it has been refused too much")

    def _lost_caller(self, key: tuple[str, int, int], multiplexer: Multiplexer) -> None:
        del multiplexer
        self._callers.pop(key, None)

    # ---- dialling -----------------------------------------------------------------------

    def _dial(self, peer: str, address: str, priority: Priority) -> MultiplexedCarrier:
        multiplexer = self._outgoing.get((peer, priority))
        if multiplexer is None:
            count = self.connections if priority is Priority.BULK else 1
            lost = partial(self._lost_outgoing, (peer, priority))
            multiplexer = Multiplexer(self.runtime, peer, count, on_lost=lost, on_damage=self.damaged)
            self._outgoing[peer, priority] = multiplexer
            name = f"{self.identity.name}: dial {peer}"
            task = self.runtime.spawn(self._connect_all(multiplexer, address), name=name)
            self._dialling[task] = None
            task.add_done_callback(lambda done: self._dialling.pop(done, None))
        return multiplexer.carrier()

    async def _connect_all(self, multiplexer: Multiplexer, address: str) -> None:
        """Makes the connections of a multiplexer, each with a greeting."""
        number = next(self._numbers)
        try:
            for index, connection in enumerate(multiplexer.connections):
                greeting = v1.Greeting(link=number, index=index, count=len(multiplexer.connections))
                connected, checked = await self._connect_and_greet(multiplexer.peer, address, greeting)
                connection.start(connected, checked=checked)
        except TimeoutError:
            multiplexer.fail(f"no connection to {address} within {CONNECT_S:g} s")
        except RefusedError as error:
            multiplexer.turned_away(error)
        except _NotBegunError as error:
            multiplexer.fail(str(error))
        except FrameError as error:
            multiplexer.fail(f"the program that answers at {address} is no node of gradstream: {error}")
        except OSError as error:
            text = f"nobody listens at {address} ({error.strerror or error})"
            multiplexer.fail(text, nobody_listens=isinstance(error, ConnectionRefusedError))

    async def _connect_and_greet(
        self, peer: str, address: str, greeting: v1.Greeting
    ) -> tuple[TcpSocket, bool]:
        """Makes a connection on which each side has proved its identity to the other; see `PeerSocket`.

        Raises:
            OSError: there is no connection, or (`_NotBegunError`) the other side has not begun as a node would.
            RefusedError, FrameError: see `greet`.
        """
        connected, target = self._target(address)
        try:
            connected.setblocking(False)
            connecting = asyncio.get_running_loop().sock_connect(connected, target)
            await self.runtime.within(CONNECT_S, connecting)
            self._admit(connected)
            try:
                return await self.runtime.within(CONNECT_S, self._begin(connected, peer, greeting))
            except TimeoutError:
                hint = "" if self.protected else ", or speaks TLS, and this node plain text"
                text = f"it has accepted a connection at {address}, and then said nothing for {CONNECT_S:g} s"
                raise _NotBegunError(f"{text}: it is stopped{hint}") from None
        except BaseException:
            connected.close()
            raise

    async def _begin(
        self, connected: socket.socket, peer: str, greeting: v1.Greeting
    ) -> tuple[TcpSocket, bool]:
        try:
            secured = await self._secured(connected, peer)
            greeting.sender, greeting.incarnation = self.identity.name, self.identity.incarnation
            greeting.checked = self._needs_checksums(secured)
            await greet(secured, greeting, self.identity, peer)
        except OSError as error:
            raise _NotBegunError(
                f"it ended a connection before its greeting: {explain(str(error))}"
            ) from error
        return secured, greeting.checked

    def _needs_checksums(self, connected: TcpSocket) -> bool:
        """Whether a connection leaves this machine unencrypted."""
        if isinstance(connected, TlsSocket) or connected.family == socket.AF_UNIX:
            return False
        own, peer = connected.getsockname()[0], connected.getpeername()[0]
        return self.leaves_machine(own, peer)

    # ---- data sockets -------------------------------------------------------------------

    @override
    async def data_socket(
        self, peer: str, name: str, *, dial: bool, copies: bool = False
    ) -> PeerSocket | None:
        address = self._addresses.get(peer)
        if not (self.has_data_sockets or copies) or address is None:
            return None
        try:
            if dial:
                return PeerSocket(*await self._connect_and_greet(peer, address, v1.Greeting(line=name)))
            return await self.runtime.within(CONNECT_S, self._data_sockets.taken(peer, name))
        except (TimeoutError, OSError, FrameError, RefusedError):
            return None

    def _lost_outgoing(self, key: tuple[str, Priority], multiplexer: Multiplexer) -> None:
        if self._outgoing.get(key) is multiplexer:
            del self._outgoing[key]

    def _disconnect(self, peer: str) -> None:
        for priority in Priority:
            multiplexer = self._outgoing.get((peer, priority))
            if multiplexer is not None:
                multiplexer.fail("its address has changed")

    @override
    def redial(self, peer: str, silent_s: float) -> None:
        for priority in Priority:
            multiplexer = self._outgoing.get((peer, priority))
            if multiplexer is not None and self.runtime.left_s(multiplexer.made_ns, silent_s) <= 0:
                multiplexer.fail(f"silent for {silent_s:g} s: another connection is made")

    # ---- the end ------------------------------------------------------------------------

    async def _shut(self, *, abruptly: bool) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        for task in [*self._dialling, *self._strangers]:
            task.cancel()
        multiplexers = [*self._outgoing.values(), *self._callers.values()]
        try:
            if not abruptly:
                connections = [
                    connection for multiplexer in multiplexers for connection in multiplexer.connections
                ]
                await self.runtime.within(
                    FLUSH_S,
                    self.runtime.gather(
                        *(connection.flushed() for connection in connections if connection.started)
                    ),
                )
        except TimeoutError:
            pass  # does not wait for a peer that does not read
        finally:
            for multiplexer in multiplexers:
                multiplexer.close()
            self._data_sockets.close()
            self._outgoing.clear()
            self._callers.clear()


def _key_of(greeting: v1.Greeting) -> tuple[str, int, int]:
    return greeting.sender, greeting.incarnation, greeting.link


def _address_of(connected: socket.socket) -> str:
    """The address of the other side, as far as the system knows it."""
    try:
        return str(connected.getpeername())
    except OSError:
        return "unknown"
