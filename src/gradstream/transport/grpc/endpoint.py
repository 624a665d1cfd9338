"""The gRPC carrier: works anywhere that gRPC does, and any language with gRPC can join in.

One stream is one bidirectional call of `/gradstream.v1.Peer/Stream`. Messages cross gRPC as bytes,
so that a payload is copied once on its way out (`wire.frames.encode`) and not at all on its way in.
Each peer has two connections, one per priority: a ping never queues behind a gradient.

Before its first stream, a connection proves both ways that the run's secret is known: `Challenge`, then
`Session`, which stays open as long as the connection. Each stream shows a pass of that session. All of this
goes in metadata, which is short: of a stranger no message is ever read.

The death of a process breaks its connections at once. That of a machine or a cable is noticed by whoever
waits for it; keepalive ends a connection after `Deadlines.connection_s` of silence, and not before.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import grpc
import grpc.aio
import torch

from gradstream.errors import ConfigError, GradstreamError, PeerLostError, RefusedError
from gradstream.runtime.base import Runtime
from gradstream.runtime.tasks import finish_despite_cancel
from gradstream.transport import proof
from gradstream.transport.addresses import host_and_port, is_loopback
from gradstream.transport.base import Caller, Identity, Priority
from gradstream.transport.endpoint import CONNECTION_S, WINDOW, EndpointCore
from gradstream.transport.grpc.connection import (
    CHALLENGE,
    EOF,
    FAILURES,
    GREETING,
    PASS,
    SESSION,
    GrpcConnection,
    is_cancelled,
)
from gradstream.transport.grpc.sessions import BAD_SECRET, CallerSession, Sessions
from gradstream.transport.limits import LIMITS
from gradstream.transport.security import Shown, Tls, explain
from gradstream.transport.silence import Broadcast
from gradstream.transport.stream import StreamCore, refusal_of
from gradstream.wire import v1
from gradstream.wire.frames import MAX_FRAME_BYTES, FrameError, decode, encode, payload_tensor

__all__ = ["METHOD", "GrpcEndpoint"]

METHOD = "/gradstream.v1.Peer/Stream"
"""The one rpc."""

MAX_MESSAGE_BYTES = MAX_FRAME_BYTES + (1 << 20)  # a frame that is too long is refused with a word
HOLD_S = 2e-3  # how long control calls hold a bulk message back, at most
FLUSH_S = 1.0  # how long `close` lets peers be told

LOOKAHEAD_BYTES = 1 << 20  # that a caller may send of each call ahead of what is read

OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
SERVER_OPTIONS = [
    *OPTIONS,
    ("grpc.max_allowed_incoming_connections", LIMITS.connections),
    ("grpc.max_concurrent_streams", LIMITS.streams + 8),  # one too many is refused with a word
    ("grpc.max_connection_idle_ms", int(LIMITS.handshake_s * 1e3)),  # strangers': a node's has its session
    ("grpc.server_handshake_timeout_ms", int(LIMITS.handshake_s * 1e3)),
    # A sender's window for each call is fixed, not measured: gRPC would let it grow to 100 MB and more.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", LOOKAHEAD_BYTES),
    ("grpc.so_reuseport", 0),  # a port in use is an error, not a lottery
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),  # peers may have other deadlines
    ("grpc.http2.max_ping_strikes", 0),
]
CLIENT_OPTIONS = [
    *OPTIONS,
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # a connection of its own for each channel
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
]
CONNECT_MS = "grpc.min_reconnect_backoff_ms"  # the time that gRPC gives a try to connect
USUAL_OPTIONS = [(CONNECT_MS, 1000)]
ANEW_OPTIONS = [(CONNECT_MS, 5000)]  # others are tried beside it: a slow handshake may end
_NO_OPEN = "no Open came"
_RpcHandler: TypeAlias = "grpc.RpcMethodHandler[bytes, bytes]"


def patience_options(connection_s: float) -> list[tuple[str, int]]:
    """Has gRPC end a silent connection after `connection_s`, and not earlier for any reason of its own.

    A ping after half of it, half of it for the answer. The last one bounds pings that gRPC sends to measure
    the connection; by default it ends a connection whose peer was stopped for a minute.
    """
    half_ms = int(500 * connection_s)
    names = ("keepalive_time_ms", "keepalive_timeout_ms", "http2.ping_timeout_ms")
    return [(f"grpc.{name}", half_ms) for name in names]


class _Gate:
    """Lets control calls pass: while one is under way, bulk is neither sent nor read, for `HOLD_S` at most.

    On one event loop, each of the ten or so steps of a call would otherwise wait for a chunk. A
    control stream that stays open holds for `HOLD_S` too, from its opening.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._holders: dict[StreamCore, None] = {}
        self._opened = Broadcast()

    def hold(self, stream: StreamCore) -> None:
        """Holds bulk back until the stream is over, or its time is."""
        self._holders[stream] = None
        timer = self._runtime.call_later(HOLD_S, partial(self._let_go, stream))
        stream.on_release(timer.cancel)
        stream.on_release(partial(self._let_go, stream))

    def _let_go(self, stream: StreamCore) -> None:
        self._holders.pop(stream, None)
        if not self._holders:
            self._opened.ring()

    async def passed(self) -> None:
        """Returns once no call holds, or after `HOLD_S`."""
        if self._holders:
            timer = self._runtime.call_later(HOLD_S, self._opened.ring)
            try:
                await self._opened.wait()
            finally:
                timer.cancel()


class _GrpcCarrier:
    """The queue between a stream and its gRPC call.

    Args:
        gate: to wait at before each message; None for control streams.
    """

    def __init__(self, gate: _Gate | None) -> None:
        self._gate = gate
        self._outbox: deque[tuple[bytes, bool]] = deque()  # message, whether a cancel drops it
        self._over = False
        self._stopped = False
        self._filled, self._emptied = Broadcast(), Broadcast()
        self._admitted = asyncio.Event()
        self.stream: StreamCore | None = None

    def transmit(self, frame: v1.Frame, payload: torch.Tensor | None) -> None:
        """See `Carrier.transmit`."""
        if self._over or self._stopped:
            return
        if frame.HasField("accept") or frame.HasField("end"):
            self._admitted.set()
        view = None
        if payload is not None and payload.numel():
            view = memoryview(payload.detach().numpy()).cast("B")  # type: ignore[arg-type]
        droppable = frame.HasField("chunk") or frame.HasField("body")
        self._outbox.append((encode(frame, view), droppable))
        self._filled.ring()

    async def drained(self) -> None:
        """See `Carrier.drained`."""
        while self._outbox and not self._stopped:  # one is encoded while gRPC takes the one before
            await self._emptied.wait()

    def drop(self) -> None:
        """See `Carrier.drop`."""
        kept = [entry for entry in self._outbox if not entry[1]]
        self._outbox.clear()
        self._outbox.extend(kept)
        self._emptied.ring()

    def over(self) -> None:
        """See `Carrier.over`; what was transmitted still goes out."""
        self._over = True
        self._filled.ring()

    async def write_all(self, write: Callable[[bytes], Awaitable[object]]) -> None:
        """Writes messages until the stream is over or gRPC takes no more."""
        try:
            while True:
                while self._outbox:
                    message, _ = self._outbox.popleft()
                    self._emptied.ring()
                    if self._gate is not None:
                        await self._gate.passed()
                    await write(message)
                if self._over:
                    return
                await self._filled.wait()
        except FAILURES:
            pass  # the reader finds out why, after what had still arrived
        finally:
            self._stopped = True
            self._emptied.ring()

    async def read_all(self, read: Callable[[], Awaitable[Any]]) -> None:
        """Feeds the stream with messages until there are no more, or the peer has refused it."""
        assert self.stream is not None
        while (message := await read()) is not EOF:
            if self._gate is not None:
                await self._gate.passed()
            try:
                frame, view = decode(message)
                payload = payload_tensor(frame.chunk, view) if frame.HasField("chunk") else None
            except FrameError as error:
                self.stream.reject(error)
            else:
                self.stream.arrived(frame, payload)
                if frame.HasField("refuse"):
                    return

    async def read_admitted(self, read: Callable[[], Awaitable[Any]]) -> None:
        """Called side: reads once the stream was accepted. Of one that is refused nothing is read."""
        await self._admitted.wait()
        await self.read_all(read)


_NO_PASS = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.INTERNAL)
"""What a caller may see whose pass was refused: grpc.aio puts the second in the place of the first, where the
call has ended before it took the caller's message."""


class _Outgoing(_GrpcCarrier):
    """The caller's end: makes the call, once the connection has a session."""

    def __init__(
        self, endpoint: GrpcEndpoint, peer: str, connection: GrpcConnection | None, gate: _Gate | None
    ) -> None:
        super().__init__(gate)
        self._endpoint = endpoint
        self._peer = peer
        self._connection = connection
        self.own_connection = False  # nobody else's: it is closed with the stream
        self._session: CallerSession | None = None  # that the call belongs to
        self._waiting: asyncio.Task[None] | None = None

    def connect(self, stream: StreamCore, opened: v1.Open) -> None:
        """See `OutgoingCarrier.connect`."""
        self.stream = stream
        if self._connection is None:
            stream.broken("its address is not known")
            return
        self.transmit(v1.Frame(open=opened), None)
        if opened.urgent:
            self._endpoint.gate.hold(stream)
        if self.own_connection:
            close, name = self._connection.close, f"{self._endpoint.identity.name}: hang up on {self._peer}"
            stream.on_release(lambda: self._endpoint.background(close(), name))
        if self._connection.session is not None:
            self._begin(self._connection, self._connection.session, stream)
            return
        name = f"{self._endpoint.identity.name}: {opened.method} to {self._peer}, before it begins"
        self._waiting = self._endpoint.background(self._begin_later(self._connection, stream), name)

    def over(self) -> None:
        """See `Carrier.over`. Of a call that has not begun, nothing goes out any more."""
        super().over()
        if self._session is None:
            self._stopped = True
            self._emptied.ring()
            if self._waiting is not None:
                self._waiting.cancel()

    async def _begin_later(self, connection: GrpcConnection, stream: StreamCore) -> None:
        try:
            session = await connection.opened()
        except RefusedError as error:
            self._waiting = None
            stream.arrived(v1.Frame(refuse=refusal_of(error)), None)
        except PeerLostError as error:
            self._waiting = None
            stream.broken(str(error).removeprefix(f"{self._peer}: "))
        except asyncio.CancelledError:
            self._waiting = None
            stream.broken("the connection was closed by this side")
            raise
        else:
            if not self._over:
                self._begin(connection, session, stream)

    def _begin(self, connection: GrpcConnection, session: CallerSession, stream: StreamCore) -> None:
        self._session, self._waiting = session, None
        try:
            call = connection.call(METHOD, PASS, session.next_pass())
        except FAILURES:
            stream.broken("the connection was closed by this side")
            return
        name = f"{self._endpoint.identity.name}: {stream.opened.method} to {self._peer}"
        self._endpoint.background(self._write(call), f"{name}, writer")
        self._endpoint.background(self._read(call, stream), f"{name}, reader")

    async def _write(self, call: grpc.aio.StreamStreamCall[bytes, bytes]) -> None:
        try:
            await self.write_all(call.write)
            await call.done_writing()
        except FAILURES:
            pass
        except asyncio.CancelledError:
            call.cancel()
            if is_cancelled():
                raise

    async def _read(self, call: grpc.aio.StreamStreamCall[bytes, bytes], stream: StreamCore) -> None:
        try:
            await self.read_all(call.read)
            if stream.failed:
                call.cancel()  # it was refused: the other side waits for no more
                return
            code, details = await call.code(), await call.details()
            if code is grpc.StatusCode.OK:
                stream.arrived(v1.Frame(end=v1.End()), None)
                stream.broken("has finished the call")
            else:
                self._failed(stream, code, details)
        except grpc.aio.AioRpcError as error:
            self._failed(stream, error.code(), error.details())
        except asyncio.CancelledError:
            stream.broken("the connection was closed by this side")
            call.cancel()
            if is_cancelled():
                raise

    def _failed(self, stream: StreamCore, code: grpc.StatusCode, details: str | None) -> None:
        if code in _NO_PASS and self._connection is not None and self._session:
            self._connection.lost(self._session)
        if code is grpc.StatusCode.UNAUTHENTICATED:
            stream.broken("its session has ended with the connection that it belonged to")
        else:
            stream.broken(f"{code.name}: {explain(details or '')}")


async def _read(carrier: _GrpcCarrier, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
    try:
        await carrier.read_admitted(context.read)
    except FAILURES:
        pass  # the call itself is cancelled when its caller is gone


class _Peers(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """Routes the methods to the endpoint."""

    def __init__(self, endpoint: GrpcEndpoint) -> None:
        self.handlers = {
            method: grpc.stream_stream_rpc_method_handler(serve)
            for method, serve in (
                (METHOD, endpoint.answer),
                (CHALLENGE, endpoint.challenge),
                (SESSION, endpoint.session),
            )
        }

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> _RpcHandler | None:
        """The endpoint's handler; None where the method is another."""
        return self.handlers.get(handler_call_details.method)


def _certificate(context: grpc.aio.ServicerContext[bytes, bytes]) -> Shown | None:
    """What the caller has shown to TLS."""
    for pem in context.auth_context().get("x509_pem_cert", ()):
        try:
            return Shown.read(pem)
        except ValueError:
            continue
    return None


def _shown(context: grpc.aio.ServicerContext[bytes, bytes], key: str) -> bytes:
    """Metadata that a caller has shown, b"" for none."""
    found = dict(context.invocation_metadata() or ()).get(key, b"")
    return found if isinstance(found, bytes) else b""


class GrpcEndpoint(EndpointCore):
    """An endpoint on grpc.aio.

    Args:
        identity: who it is.
        runtime: a real one.
        listen: host:port; port 0 takes a free one, see `address` after `start`.
        security: TLS, for listening and for dialling; None is plain text.
        insecure: listen on other interfaces than loopback without encryption or authentication.
        window: chunks held per incoming stream.
        connection_s: silence after which gRPC ends a connection; see `Deadlines.connection_s`.
        max_message_bytes: the most that a caller may send at once; less than chunks may have, where
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
    ) -> None:
        super().__init__(identity, runtime, window=window)
        proof.check_secret(identity.secret, identity.name)
        self._sessions = Sessions(identity)
        self._ends: dict[int, tuple[Caller, asyncio.Future[None]]] = {}  # whose session; how to end it
        self._max_message_bytes = max_message_bytes
        self._patience = patience_options(connection_s)
        self._host = _host_of(listen, trusted=insecure or security is not None)
        self._listen = listen
        self._security = security
        self.protected = security is not None
        self.gate = _Gate(runtime)
        self._routes = _Peers(self)
        self._server: grpc.aio.Server | None = None
        self._connections: dict[tuple[str, Priority], GrpcConnection] = {}
        self._background: dict[asyncio.Task[None], None] = {}

    async def start(self) -> None:
        """See `Endpoint.start`."""
        received = ("grpc.max_receive_message_length", self._max_message_bytes)
        self._server = grpc.aio.server(options=[*SERVER_OPTIONS, *self._patience, received])
        self._server.add_generic_rpc_handlers((self._routes,))
        try:
            port = self._listen_with(self._server)
        except RuntimeError:
            port = 0
        if not port:
            self._server = None
            raise ConfigError(
                f"{self.identity.name} cannot listen on {self._listen}: the port is in use, or the address "
                "is not this machine's; give another one, or port 0 for any free port"
            )
        await self._server.start()
        self.address = f"{self._host}:{port}"

    def _listen_with(self, server: grpc.aio.Server) -> int:
        if self._security is None:
            return server.add_insecure_port(self._listen)
        return server.add_secure_port(self._listen, self._security.server_credentials())

    def background(self, work: Any, name: str) -> asyncio.Task[None]:
        """Spawns a task that `close` waits for."""
        task: asyncio.Task[None] = self.runtime.spawn(work, name=name)
        self._background[task] = None
        task.add_done_callback(lambda done: self._background.pop(done, None))
        return task

    async def challenge(self, _: object, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        """Serves a stranger: something to prove by that it knows the secret. Nothing is kept."""
        challenge = self._sessions.challenge(self.runtime.now())
        await context.write(encode(v1.Frame(challenge=challenge)))

    async def session(self, _: object, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        """Serves the session of a caller that has proved to know the secret, until its connection ends."""
        answered = self._sessions.greeted(_shown(context, GREETING), self.runtime.now())
        if isinstance(answered, v1.Refuse):
            if answered.code == v1.BAD_SECRET:
                self.on_stranger(context.peer())
            await self._turned_away()
            await context.write(encode(v1.Frame(refuse=answered)))
            return
        session, proven = answered
        try:
            claimed = v1.Open(sender=session.sender)
            refuse = self._objection(claimed, context) or self._not_heard(
                Caller(session.sender, session.incarnation)
            )
            if refuse is not None:
                await self._turned_away()
                await context.write(encode(v1.Frame(refuse=refuse)))
                return
            ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._ends[session.number] = Caller(session.sender, session.incarnation), ended
            await context.write(encode(v1.Frame(proven=proven)))
            await ended  # or cancelled with the connection
        except FAILURES:
            pass
        finally:
            self._ends.pop(session.number, None)
            self._sessions.over(session)

    def _hang_up_on(self, caller: Caller) -> None:
        self._end_sessions(caller)
        for stream in list(self._streams):
            if stream.called and Caller.of(stream.opened) == caller:
                stream.refuse(v1.OVER_LIMIT, "it has been refused too much")

    def _end_sessions(self, caller: Caller | None = None) -> None:
        """Those of one caller, or all."""
        for number, (of, ended) in list(self._ends.items()):
            if caller in (of, None):
                del self._ends[number]  # now: none of its streams begins any more
                if not ended.done():
                    ended.set_result(None)

    async def answer(self, _: object, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        """Serves one incoming call: its first message is Open, the rest is its stream's."""
        session = self._sessions.passes(_shown(context, PASS))
        if session is None:
            self.on_stranger(context.peer())
            await self._turned_away()
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, BAD_SECRET)
        try:
            opened = await self._first(context)
        except GradstreamError as error:
            refuse = v1.Refuse(code=v1.BAD_REQUEST, message=str(error))
            await context.write(encode(v1.Frame(refuse=refuse)))
            return
        if opened is None:
            return
        if session.number not in self._ends:  # ended while the Open was on its way
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, BAD_SECRET)
        carrier = _GrpcCarrier(None if opened.urgent else self.gate)
        stream = carrier.stream = self._incoming(
            opened,
            carrier,
            caller=Caller(session.sender, session.incarnation),
            objection=self._objection(opened, context),
        )
        if self._security is not None and (shown := _certificate(context)) is not None:
            stream.certificate = shown.digest
        if opened.urgent:
            self.gate.hold(stream)
        name = f"{self.identity.name}: {opened.method} from {opened.sender}, reader"
        reader = self.runtime.spawn(_read(carrier, context), name=name)
        try:
            await carrier.write_all(context.write)
            # A caller that writes to a finished call loses what it has not read yet (grpc.aio puts
            # an error in its place), so let it finish first. One that was refused cancels the call.
            await self.runtime.within(FLUSH_S, reader)
        except TimeoutError:
            pass
        finally:
            reader.cancel()
            stream.broken("the connection was lost")

    def _objection(
        self, opened: v1.Open, context: grpc.aio.ServicerContext[bytes, bytes]
    ) -> v1.Refuse | None:
        """Why the certificate of the caller does not allow this stream; None if it does."""
        if self._security is None:
            return None
        return self._security.objection(_certificate(context), opened, self.identity.revoked)

    async def _first(self, context: grpc.aio.ServicerContext[bytes, bytes]) -> v1.Open | None:
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
        frame, _ = decode(message)
        if not frame.HasField("open"):
            raise FrameError(f"a first frame of kind {frame.WhichOneof('kind')}: expected open")
        return frame.open

    def _dial(self, peer: str, address: str | None, priority: Priority) -> _Outgoing:
        if address is None:
            return _Outgoing(self, peer, None, None)
        connection = self._connections.get((peer, priority))
        if connection is None:
            channel = self._channel(peer, address)
            connection = GrpcConnection(self.identity, self.runtime, peer, channel)
            self._connections[peer, priority] = connection
        return _Outgoing(self, peer, connection, self.gate if priority is Priority.BULK else None)

    def _dial_anew(self, peer: str, address: str | None, priority: Priority) -> _Outgoing:
        if address is None:
            return _Outgoing(self, peer, None, None)
        channel = self._channel(peer, address, ANEW_OPTIONS)
        connection = GrpcConnection(self.identity, self.runtime, peer, channel)
        outgoing = _Outgoing(self, peer, connection, self.gate if priority is Priority.BULK else None)
        outgoing.own_connection = True
        return outgoing

    def _channel(
        self, peer: str, address: str, connect: Sequence[tuple[str, int]] = USUAL_OPTIONS
    ) -> grpc.aio.Channel:
        if self._security is None:
            return grpc.aio.insecure_channel(address, options=[*CLIENT_OPTIONS, *self._patience, *connect])
        # Certificates carry names of nodes: addresses change, and are not known beforehand.
        options = [*CLIENT_OPTIONS, *self._patience, *connect, ("grpc.ssl_target_name_override", peer)]
        return grpc.aio.secure_channel(address, self._security.channel_credentials(), options=options)

    def _hang_up(self, peer: str) -> None:
        for priority in Priority:
            connection = self._connections.pop((peer, priority), None)
            if connection is not None:
                self.background(connection.close(), f"{self.identity.name}: hang up on {peer}")

    async def _shut(self, *, abruptly: bool) -> None:
        # Cut short, it would leave a server running, and with it a thread of gRPC's that a process
        # with several event loops waits for when it ends.
        await finish_despite_cancel(asyncio.ensure_future(self._shut_all(abruptly=abruptly)))

    async def _shut_all(self, *, abruptly: bool) -> None:
        if not abruptly:
            try:
                await self.runtime.within(FLUSH_S, self._quiet())
            except TimeoutError:
                pass  # a peer that does not read is not waited for
        for connection in list(self._connections.values()):
            await connection.close()
        self._connections.clear()
        self._end_sessions()
        if self._server is not None:
            await self._server.stop(None if abruptly else FLUSH_S)
        await self._quiet()

    async def _quiet(self) -> None:
        await asyncio.gather(*self._background, return_exceptions=True)


def _host_of(listen: str, *, trusted: bool) -> str:
    """The host part of host:port, once it is clear that one may listen there."""
    host, _ = host_and_port(listen)
    if not (trusted or is_loopback(host)):
        raise ConfigError(
            f"listen = {listen!r} can be reached from other machines, and connections are neither encrypted "
            "nor authenticated: listen on 127.0.0.1, give it `security`, or say insecure=True on a network "
            "that you trust"
        )
    return host
