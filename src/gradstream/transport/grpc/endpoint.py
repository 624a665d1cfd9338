"""The gRPC carrier: it works wherever gRPC does, and programs in any language with gRPC can take part.

One stream is one bidirectional call of `/gradstream.v1.Peer/Stream`. Messages cross gRPC as bytes,
so that a payload is copied once when it is sent (`wire.frames.encode`) and not at all when it is received.
Each peer has two connections, one for each priority: a ping never waits behind a gradient.

Before its first stream, a connection proves to both sides that the other side knows the run's secret:
`Challenge`, then `Session`, which stays open as long as the connection. Each stream shows a pass of that
session. All of this goes in metadata, which is short: the node never reads a stranger's message.

The death of a process breaks its connections at once. The loss of a machine or a cable shows as silence to
the streams that wait for it; keepalive ends a connection after `Deadlines.connection_s` of silence, and not
before.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeAlias
from urllib.parse import unquote

import grpc
import grpc.aio
from typing_extensions import override

from gradstream.errors import ConfigError, GradstreamError, PeerLostError, RefusedError
from gradstream.runtime.base import Runtime
from gradstream.runtime.tasks import finish_despite_cancel
from gradstream.transport import proof
from gradstream.transport.base import Caller, Identity, Priority
from gradstream.transport.endpoint import CONNECTION_S, WINDOW, EndpointCore
from gradstream.transport.grpc.calls import BulkGate, GrpcCarrier, OutgoingCall
from gradstream.transport.grpc.connection import (
    CHALLENGE,
    CLIENT_OPTIONS,
    EOF,
    FAILURES,
    GREETING,
    MAX_MESSAGE_BYTES,
    METHOD,
    NEW_CONNECTION_OPTIONS,
    PASS,
    SERVER_OPTIONS,
    SESSION,
    SHARED_CONNECTION_OPTIONS,
    GrpcConnection,
    Sessions,
    patience_options,
)
from gradstream.transport.limits import LIMITS
from gradstream.transport.offers import host_and_port, is_loopback
from gradstream.transport.security import Shown, Tls
from gradstream.wire import v1
from gradstream.wire.frames import DamagedError, FrameError, encode

FLUSH_S = 1.0  # time that `close` gives messages to leave, and calls of a server without members to end

MOST_CONNECTIONS = 8
"""Bulk connections to one peer: a node accepts `Limits.sessions` in all, with those of control and of retries."""

_NO_OPEN = "no Open came"
_RpcHandler: TypeAlias = "grpc.RpcMethodHandler[bytes, bytes]"
_Context: TypeAlias = "grpc.aio.ServicerContext[bytes, bytes]"


async def _read(carrier: GrpcCarrier, context: _Context) -> None:
    try:
        await carrier.read_admitted(context.read)
    except FAILURES:
        pass  # gRPC cancels the call itself when its caller is gone


class _Peers(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """Routes the calls of one of gRPC's servers to the endpoint."""

    def __init__(self, endpoint: GrpcEndpoint) -> None:
        self._endpoint = endpoint
        self._sessions = 0
        self.handlers = {
            method: grpc.stream_stream_rpc_method_handler(serve)
            for method, serve in (
                (METHOD, endpoint.answer),
                (CHALLENGE, endpoint.challenge),
                (SESSION, self._session),
            )
        }

    def has_sessions(self) -> bool:
        """Whether callers have sessions on this server."""
        return self._sessions > 0

    async def _session(self, request: object, context: _Context) -> None:
        self._sessions += 1
        try:
            await self._endpoint.session(request, context)
        finally:
            self._sessions -= 1

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> _RpcHandler | None:
        """The endpoint's handler of a method; None for an unknown method."""
        return self.handlers.get(handler_call_details.method)


def _certificate(context: _Context) -> Shown | None:
    """The certificate that the caller has shown to TLS."""
    for pem in context.auth_context().get("x509_pem_cert", ()):
        try:
            return Shown.read(pem)
        except ValueError:
            continue
    return None


def _shown(context: _Context, key: str) -> bytes:
    """The value of a key of the caller's metadata; b"" if it has none."""
    value = dict(context.invocation_metadata() or ()).get(key, b"")
    return value if isinstance(value, bytes) else b""


class GrpcEndpoint(EndpointCore):
    """An endpoint on grpc.aio.

    Args:
        runtime: a real runtime.
        listen: host:port; port 0 takes a free port, see `address` after `start`.
        security: TLS, for listening and for dialling; None is plain text.
        insecure: whether it may listen on other interfaces than loopback without encryption or authentication.
        window: chunks held for each incoming stream.
        connection_s: silence in seconds after which gRPC ends a connection.
        connections: number of connections, up to `MOST_CONNECTIONS`, which the bulk streams to a peer take in turn.
        max_message_bytes: the longest message that a caller may send; less than a chunk may have, if
            callers are strangers.

    Raises:
        ConfigError: `listen` is not host:port, or not loopback without `security` or `insecure`; or the
            identity has no secret.
    """

    def __init__(
        self,
        identity: Identity,
        runtime: Runtime,
        *,
        listen: str = "127.0.0.1:0",
        security: Tls | None = None,
        insecure: bool = False,
        window: int = WINDOW,
        connection_s: float = CONNECTION_S,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        connections: int = 1,
    ) -> None:
        super().__init__(identity, runtime, window=window)
        proof.check_secret(identity.secret, identity.name)
        self._sessions = Sessions(identity)
        # By session: its caller, and how to end it.
        self._ends: dict[int, tuple[Caller, asyncio.Future[None]]] = {}
        self._max_message_bytes = max_message_bytes
        self._patience = patience_options(connection_s)
        self._host = _host_of(listen, trusted=insecure or security is not None)
        self._listen = listen
        self._security = security
        self.protected = security is not None
        self._gate = BulkGate(runtime)
        self._routes = _Peers(self)
        self._listener = Listener(runtime, self._new_server, self._listen_with)
        self._num_bulk = min(connections, MOST_CONNECTIONS)
        self._turns: defaultdict[str, itertools.count[int]] = defaultdict(itertools.count)  # by peer
        self._connections: dict[tuple[str, Priority, int], GrpcConnection] = {}
        self.detoured: set[str] = set()
        """Peers that are reached by a detour, which begins on loopback and leaves this machine: see `Detours`."""
        self._background: dict[asyncio.Task[None], None] = {}

    @override
    async def start(self) -> None:
        port = await self._listener.start(*host_and_port(self._listen))
        if not port:
            raise ConfigError(
                f"{self.identity.name} cannot listen on {self._listen}: the port is in use, or the address "
                "is not this machine's; give another one, or port 0 for any free port"
            )
        self.address = f"{self._host}:{port}"

    def _new_server(self) -> tuple[grpc.aio.Server, Callable[[], bool]]:
        received = ("grpc.max_receive_message_length", self._max_message_bytes)
        server = grpc.aio.server(options=[*SERVER_OPTIONS, *self._patience, received])
        self._routes = _Peers(self)
        server.add_generic_rpc_handlers((self._routes,))
        return server, self._routes.has_sessions

    def _listen_with(self, server: grpc.aio.Server, address: str) -> int:
        if self._security is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, self._security.server_credentials())

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Spawns a task that `close` waits for."""
        task = self.runtime.spawn(work, name=name)
        self._background[task] = None
        task.add_done_callback(lambda done: self._background.pop(done, None))
        return task

    async def challenge(self, _: object, context: _Context) -> None:
        """Gives a stranger a challenge to prove that it knows the secret. The node keeps no state for it."""
        challenge = self._sessions.challenge(self.runtime.now(), checked=self._is_from_afar(context))
        await context.write(encode(v1.Frame(challenge=challenge), seed=0))

    async def session(self, _: object, context: _Context) -> None:
        """Holds the session of a caller that has proved knowledge of the secret, until its connection ends."""
        raw, checked = _shown(context, GREETING), self._is_from_afar(context)
        answered = self._sessions.greeted(raw, self.runtime.now(), checked=checked)
        if isinstance(answered, v1.Refuse):
            if answered.code == v1.BAD_SECRET:
                self.on_stranger(context.peer())
            await self._delay_refusal()
            await context.write(encode(v1.Frame(refuse=answered), seed=0))
            return
        session, proven = answered
        try:
            caller = Caller(session.sender, session.incarnation)
            refuse = self._objection(session.sender, context) or self.access.block(caller)
            if refuse is not None:
                await self._delay_refusal()
                await context.write(encode(v1.Frame(refuse=refuse), seed=0))
                return
            ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._ends[session.number] = caller, ended
            await context.write(encode(v1.Frame(proven=proven), seed=0))
            await ended  # or cancelled with the connection
        except FAILURES:
            pass
        finally:
            self._ends.pop(session.number, None)
            self._sessions.over(session)

    def _disconnect_caller(self, caller: Caller) -> None:
        self._end_sessions(caller)
        for stream in list(self._streams):
            if stream.called and Caller.of(stream.opened) == caller:
                stream.refuse(v1.OVER_LIMIT, "it has been refused too much")

    def _end_sessions(self, caller: Caller | None = None) -> None:
        """Ends the sessions of one caller, or all."""
        for number, (of, ended) in list(self._ends.items()):
            if caller in (of, None):
                del self._ends[number]  # at once: none of its streams may begin any more
                if not ended.done():
                    ended.set_result(None)

    async def answer(self, _: object, context: _Context) -> None:
        """Serves one incoming call: its first message is Open, the others belong to its stream."""
        passed = self._sessions.passes(_shown(context, PASS))
        if passed is None:
            self.on_stranger(context.peer())
            await self._delay_refusal()
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, proof.BAD_SECRET)
        session, number = passed
        damaged = partial(self.damaged, session.sender)
        carrier = GrpcCarrier(self._gate, number, checked=session.checked, on_damage=damaged)
        try:
            opened = await self._first(context, carrier)
        except DamagedError as error:
            await context.abort(grpc.StatusCode.DATA_LOSS, str(error))
        except GradstreamError as error:
            refuse = v1.Refuse(code=v1.BAD_REQUEST, message=str(error))
            carrier.transmit(v1.Frame(refuse=refuse), None)
            carrier.over()
            await carrier.write_all(context.write)
            return
        if opened is None:
            return
        if session.number not in self._ends:  # ended while the Open was on its way
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, proof.BAD_SECRET)
        if opened.urgent:
            carrier.hurry()
        stream = carrier.stream = self.incoming(
            opened,
            carrier,
            caller=Caller(session.sender, session.incarnation),
            objection=self._objection(opened.sender, context),
        )
        if self._security is not None and (shown := _certificate(context)) is not None:
            stream.certificate = shown.digest
        if opened.urgent:
            self._gate.hold(stream)
        name = f"{self.identity.name}: {opened.method} from {opened.sender}, reader"
        reader = self.runtime.spawn(_read(carrier, context), name=name)
        try:
            await carrier.write_all(context.write)
            # A caller that writes to a finished call loses messages that it has not read (grpc.aio raises
            # an error instead), so the caller finishes first. A refused caller cancels the call.
            await self.runtime.within(FLUSH_S, reader)
        except TimeoutError:
            pass
        finally:
            reader.cancel()
            stream.broken("the connection was lost")

    def _objection(self, sender: str, context: _Context) -> v1.Refuse | None:
        """Why the certificate of the caller does not allow a stream; None if it does."""
        if self._security is None:
            return None
        return self._security.objection(_certificate(context), sender, self.identity.revoked)

    async def _first(self, context: _Context, carrier: GrpcCarrier) -> v1.Open | None:
        call = asyncio.current_task()
        assert call is not None

        def expire() -> None:
            call.cancel(_NO_OPEN)

        timer = self.runtime.expire_after(LIMITS.handshake_s, expire)
        try:
            message = await context.read()
        except asyncio.CancelledError as error:
            if error.args != (_NO_OPEN,) or call.uncancel():
                raise
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, _NO_OPEN)
        finally:
            timer.cancel()
        if message is EOF:
            return None
        assert isinstance(message, bytes)
        frame, _ = carrier.decode(message)
        if not frame.HasField("open"):
            raise FrameError(f"a first frame of kind {frame.WhichOneof('kind')}: expected open")
        return frame.open

    def _dial(self, peer: str, address: str, priority: Priority) -> OutgoingCall:
        key = peer, priority, next(self._turns[peer]) % self._num_bulk if priority is Priority.BULK else 0
        connection = self._connections.get(key)
        if connection is not None and connection.spoilt:
            self._spawn(connection.close(), f"{self.identity.name}: leave a connection with {peer}")
        if connection is None or connection.spoilt:
            connection = self._connection(peer, address, SHARED_CONNECTION_OPTIONS)
            self._connections[key] = connection
        damaged, bulk = partial(self.damaged, peer), priority is Priority.BULK
        return OutgoingCall(self._gate, self._spawn, connection, bulk=bulk, on_damage=damaged)

    def _dial_anew(self, peer: str, address: str, priority: Priority) -> OutgoingCall:
        connection = self._connection(peer, address, NEW_CONNECTION_OPTIONS)
        damaged, bulk = partial(self.damaged, peer), priority is Priority.BULK
        return OutgoingCall(
            self._gate, self._spawn, connection, bulk=bulk, own_connection=True, on_damage=damaged
        )

    def _connection(self, peer: str, address: str, connect: Sequence[tuple[str, int]]) -> GrpcConnection:
        afar = peer in self.detoured and self._security is None
        checked = afar or self._needs_checksums(host_and_port(address)[0])
        channel = self._channel(peer, address, connect)
        return GrpcConnection(self.identity, self.runtime, peer, channel, checked=checked)

    async def reaches(self, peer: str, address: str, *, keep: bool) -> bool:
        """Whether the peer itself answers at an address, rather than another program, or a node of another network.

        Args:
            peer, address: as for `know`.
            keep: whether the connection becomes that of the first bulk stream: a new one would take as
                many round trips again.
        """
        connection, kept = self._connection(peer, address, SHARED_CONNECTION_OPTIONS), False
        try:
            await connection.opened()
            kept = keep and self._connections.setdefault((peer, Priority.BULK, 0), connection) is connection
        except (PeerLostError, RefusedError):
            return False
        finally:
            if not kept:
                await connection.close()
        return True

    def _needs_checksums(self, host: str) -> bool:
        """Whether a connection with a host leaves this machine unencrypted."""
        return self._security is None and self.leaves_machine(self._host, host)

    def _is_from_afar(self, context: _Context) -> bool:
        """Whether a caller's connection needs checksums. gRPC writes addresses as ipv6:%5B::1%5D:4000."""
        _, _, address = unquote(context.peer()).partition(":")
        return self._needs_checksums(address.rpartition(":")[0])

    def _channel(self, peer: str, address: str, connect: Sequence[tuple[str, int]]) -> grpc.aio.Channel:
        if self._security is None:
            return grpc.aio.insecure_channel(address, options=[*CLIENT_OPTIONS, *self._patience, *connect])
        # Certificates carry names of nodes: addresses change, and are not known in advance.
        options = [*CLIENT_OPTIONS, *self._patience, *connect, ("grpc.ssl_target_name_override", peer)]
        return grpc.aio.secure_channel(address, self._security.channel_credentials(), options=options)

    def _disconnect(self, peer: str) -> None:
        for key in self._keys_of(peer):
            connection = self._connections.pop(key)
            self._spawn(connection.close(), f"{self.identity.name}: disconnect from {peer}")

    def _keys_of(self, peer: str) -> list[tuple[str, Priority, int]]:
        return [key for key in self._connections if key[0] == peer]

    @override
    def redial(self, peer: str, silent_s: float) -> None:
        for key in self._keys_of(peer):
            connection = self._connections[key]
            if self.runtime.left_s(connection.made_ns, silent_s) <= 0:
                del self._connections[key]
                self._spawn(connection.close(), f"{self.identity.name}: redial {peer}")

    async def _shut(self, *, abruptly: bool) -> None:
        # A cancelled stop would leave a server running, with a thread of gRPC; a process with several event
        # loops would wait for this thread at its end.
        await finish_despite_cancel(asyncio.ensure_future(self._shut_all(abruptly=abruptly)))

    async def _shut_all(self, *, abruptly: bool) -> None:
        if not abruptly:
            try:
                await self.runtime.within(FLUSH_S, self._finish_background())
            except TimeoutError:
                pass  # does not wait for a peer that does not read
        for connection in list(self._connections.values()):
            await connection.close()
        self._connections.clear()
        self._end_sessions()
        await self._listener.stop(None if abruptly else FLUSH_S)
        await self._finish_background()

    async def _finish_background(self) -> None:
        await asyncio.gather(*self._background, return_exceptions=True)


def _host_of(listen: str, *, trusted: bool) -> str:
    """The host part of host:port. Raises ConfigError if the node may not listen there."""
    host, _ = host_and_port(listen)
    if not (trusted or is_loopback(host)):
        raise ConfigError(
            f"listen = {listen!r} can be reached from other machines, and connections are neither encrypted "
            "nor authenticated: listen on 127.0.0.1, give it `security`, or say insecure=True on a network "
            "that you trust"
        )
    return host


# ---- listener ----------------------------------------------------------------------------
# A gRPC server at one address, which survives input of strangers that ends gRPC's own server.
#
# grpc.aio decodes the method of a call as UTF-8, and ends the whole server if that fails (`_server_main_loop`, seen in
# 1.85.1). One call by anybody who reaches the port does that, before any code of ours sees it, and so does one damaged
# bit. gRPC reports it only on request, so this asks every `CHECK_S`, and starts a new server with the same handlers on
# the same port. If members have sessions on the old server, its calls go on: they show the coordinator who lives. New
# calls use new connections. An old server without members is freed, after `FLUSH_S`, with the stranger's call.

CHECK_S = 0.1

_log = logging.getLogger(__name__)


class Listener:
    """A gRPC server, or the one that has replaced it.

    Args:
        make: makes a server with its handlers, and a function that says whether members have sessions on it.
        listen: makes a server listen on an address, and returns the port.
    """

    def __init__(
        self,
        runtime: Runtime,
        make: Callable[[], tuple[grpc.aio.Server, Callable[[], bool]]],
        listen: Callable[[grpc.aio.Server, str], int],
    ) -> None:
        self._runtime = runtime
        self._make = make
        self._listen = listen
        self._server: grpc.aio.Server | None = None
        self._in_use: Callable[[], bool] = bool
        self._watching: asyncio.Task[None] | None = None
        self._ended: dict[grpc.aio.Server, asyncio.Task[None]] = {}  # those that are not freed yet

    async def start(self, host: str, port: int) -> int:
        """Listens from now on. Returns the port, a free one for 0; returns 0 if it cannot listen."""
        port = await self._begin(f"{host}:{port}")
        if port:
            self._watching = self._runtime.spawn(self._watch(f"{host}:{port}"), name=f"server on port {port}")
        return port

    async def stop(self, grace_s: float | None) -> None:
        """Ends all calls, after `grace_s` seconds if it is not None, and stops listening."""
        tasks = [*self._ended.values(), *([self._watching] if self._watching else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        servers = {*self._ended, *([self._server] if self._server else [])}
        await asyncio.gather(*(server.stop(grace_s) for server in servers))

    async def _begin(self, address: str) -> int:
        server, in_use = self._make()
        try:
            port = self._listen(server, address)
        except RuntimeError:
            return 0
        if port:
            self._server, self._in_use = server, in_use
            await server.start()
        return port

    async def _watch(self, address: str) -> None:
        while (server := self._server) is not None and (failure := await _failure(server)) is not None:
            _log.warning("gRPC's server on %s has ended: %s; a new one begins", address, failure)
            freeing = self._free(server, self._in_use)
            self._ended[server] = self._runtime.spawn(freeing, name=f"a server on {address} that has ended")
            if not await self._begin(address):
                _log.error(
                    "%s is taken by another program; until it is free, nobody reaches this node", address
                )
                while not await self._begin(address):
                    await self._runtime.sleep(FLUSH_S)

    async def _free(self, server: grpc.aio.Server, in_use: Callable[[], bool]) -> None:
        while in_use():
            await self._runtime.sleep(FLUSH_S)
        await server.stop(FLUSH_S)
        del self._ended[server]


async def _failure(server: grpc.aio.Server) -> Exception | None:
    """Returns once a server has ended, with the cause; None if it was stopped."""
    while True:
        try:
            if not await server.wait_for_termination(CHECK_S):
                return None
        except Exception as error:  # whatever its loop raised
            return error
