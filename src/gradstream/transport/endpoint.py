"""`EndpointCore`: what all endpoints have in common, whatever carries their streams.

It passes each incoming stream to the handler of its method, unless `AccessControl` objects, and opens
outgoing streams; `call` and tagged `send`/`recv` use such streams. A carrier's endpoint adds `start`,
`_dial` (make a carrier for an outgoing stream), `_disconnect` (break connections) and `_shut`.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from google.protobuf.message import DecodeError, Message
from typing_extensions import override

from gradstream.errors import ClosedError, ConfigError, GradstreamError, InternalError, RefusedError
from gradstream.memory import Span
from gradstream.runtime.base import Runtime
from gradstream.runtime.deadlines import Deadlines
from gradstream.runtime.tasks import Broadcast, Throttle
from gradstream.transport.base import (
    Caller,
    Carrier,
    Endpoint,
    Handler,
    Identity,
    NullCarrier,
    Priority,
    code_of,
)
from gradstream.transport.forks import break_in_forks
from gradstream.transport.limits import (
    COORDINATOR,
    LIMITS,
    METHODS,
    UNLISTED,
    Intakes,
    Method,
    ReceiveQueue,
    role_of,
)
from gradstream.transport.offers import leaves_machine
from gradstream.transport.shm.channel import Channel, PayloadChannels
from gradstream.transport.stream import StreamCore
from gradstream.transport.tagged_tensors import TaggedTensors
from gradstream.untrusted import escaped
from gradstream.wire import v1
from gradstream.wire.frames import PROTOCOL

M = TypeVar("M", bound=Message)

WINDOW = 16
"""Chunks that a called endpoint is ready to hold for each stream."""

CONNECTION_S = Deadlines().connection_s
"""Default time of silence after which a carrier ends a connection."""

ADDRESS_BYTES = 64
"""Most bytes of a stranger's address in the log."""

_log = logging.getLogger(__name__)


class OutgoingCarrier(Carrier, Protocol):
    """The carrier of the calling side, which exists before its stream."""

    def connect(self, stream: StreamCore, opened: v1.Open) -> None:
        """Transmits the Open, and from now on passes arrivals to `stream`."""
        ...


class EndpointCore(Endpoint, ABC):
    """Base of every carrier's endpoint; implements `transport.base.Endpoint`.

    Args:
        identity: identity of this node; may be changed later (a model is registered, a new epoch begins).
        window: chunks that the endpoint is ready to hold for each stream it is called on.
    """

    address: str = ""
    connections: int = 1
    protected: bool = False
    methods: Mapping[str, Method] = METHODS
    leaves_machine: Callable[[str, str], bool] = staticmethod(leaves_machine)
    """Whether a connection between two hosts leaves the machine, and so has checksums. Tests replace it."""

    def __init__(self, identity: Identity, runtime: Runtime, *, window: int = WINDOW) -> None:
        if window < 1:
            raise ConfigError(f"window = {window} chunks for {identity.name}: expected at least 1")
        self.identity = identity
        self.runtime = runtime
        self.access = AccessControl(identity, runtime, window)
        self._window = window
        self._tensors = TaggedTensors(identity, runtime)
        self._addresses: dict[str, str] = {}
        break_in_forks(self, self._addresses)
        # Dicts serve as ordered sets: what happens at close must not depend on addresses of objects.
        self._streams: dict[StreamCore, None] = {}
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._closed = False
        self._payload_channels: PayloadChannels | None = None
        self._num_delayed = 0  # refused callers that wait for their answer
        self._stranger_log = Throttle(runtime, self._log_stranger)
        self.on_stranger: Callable[[str], None] = self._stranger_log.tell
        """Called with the address of a caller that did not prove knowledge of the secret."""
        self.on_damage: Callable[[str, int], None] = self._log_damage
        """See `Endpoint.on_damage`."""

    # ---- what a carrier adds ----------------------------------------------------------

    @abstractmethod
    async def start(self) -> None:
        """See `Endpoint.start`."""

    @abstractmethod
    def _dial(self, peer: str, address: str, priority: Priority) -> OutgoingCarrier:
        """Makes a carrier for a new stream."""

    def _dial_anew(self, peer: str, address: str, priority: Priority) -> OutgoingCarrier:
        """Like `_dial`, over a connection for this stream alone, if the carrier has connections."""
        return self._dial(peer, address, priority)

    @abstractmethod
    def _disconnect(self, peer: str) -> None:
        """Breaks all connections to a peer whose address has changed."""

    def redial(self, peer: str, silent_s: float) -> None:
        """See `Endpoint.redial`; does nothing if the carrier has no connections."""
        del peer, silent_s

    @abstractmethod
    async def _shut(self, *, abruptly: bool) -> None:
        """Stops accepting and breaks all connections; sends waiting frames first, unless `abruptly`."""

    def _disconnect_caller(self, caller: Caller) -> None:
        """Closes the connections of a caller that was refused too often."""
        del caller

    def _log_stranger(self, address: str, more: int) -> None:
        _log.warning(
            "%s: refused %s, which does not know the secret of this run%s",
            self.identity.name,
            escaped(address, ADDRESS_BYTES),
            f" (and {more:,} more)" if more else "",
        )

    def _log_damage(self, peer: str, size_bytes: int) -> None:
        _log.warning("%s: %d bytes from %s were damaged on their way", self.identity.name, size_bytes, peer)

    def damaged(self, peer: str, size_bytes: int) -> None:
        """Reports bytes with a wrong checksum to the current `on_damage`."""
        self.on_damage(peer, size_bytes)

    def share(self, other: EndpointCore) -> None:
        """Takes over the handlers, members and tagged tensors of another endpoint of the same node."""
        self.access = other.access
        self._tensors = other._tensors

    # ---- the user's side --------------------------------------------------------------

    def serve(self, method: str, handler: Handler, *, model: bool = True) -> None:
        """See `Endpoint.serve`. A second call for a method replaces the handler."""
        self.access.services[method] = Service(handler, model, self.methods.get(method, UNLISTED))

    @override
    def serve_tensors(self) -> None:
        self.access.intakes.takes_tensors = True
        self.serve("tensor", self._tensors.serve)

    @override
    def members_changed(self, members: Mapping[str, int], revoked: Iterable[bytes] = ()) -> None:
        self.identity.revoked = frozenset(revoked)
        if members != self.identity.members:
            self.identity.members = kept = dict(members)
            if self.identity.epoch:  # training has begun
                self._tensors.members_changed(kept)
            self.access.members_changed()

    @override
    def know(self, peer: str, address: str) -> None:
        before = self._addresses.get(peer)
        self._addresses[peer] = address
        if before is not None and before != address:
            if self._payload_channels is not None:
                self._payload_channels.disconnect(peer)
            self._disconnect(peer)

    def forget(self, peer: str) -> None:
        """Breaks all connections to a peer that another carrier reaches from now on."""
        if self._addresses.pop(peer, None) is not None:
            self._disconnect(peer)

    @override
    async def open(
        self,
        peer: str,
        method: str,
        request: Message,
        *,
        priority: Priority = Priority.BULK,
        window: int = WINDOW,
        new_connection: bool = False,
    ) -> StreamCore:
        if self._closed:
            raise ClosedError(f"{self.identity.name} is closed: it opens no stream {method} to {peer}")
        opened = v1.Open(
            protocol=PROTOCOL,
            job=self.identity.job,
            fingerprint=self.identity.fingerprint,
            sender=self.identity.name,
            incarnation=self.identity.incarnation,
            epoch=self.identity.epoch,
            method=method,
            window=window,
            body=request.SerializeToString(),
            urgent=priority is Priority.CONTROL,
        )
        return self.dial(peer, opened, priority, new_connection=new_connection)

    def dial(
        self, peer: str, opened: v1.Open, priority: Priority = Priority.BULK, *, new_connection: bool = False
    ) -> StreamCore:
        """Opens a stream with any Open; tests use it to send what another program might send."""
        address, dial = self._addresses.get(peer), self._dial_anew if new_connection else self._dial
        carrier = None if address is None else dial(peer, address, priority)
        channel = partial(self._channel_to, peer)
        inbox, me = ReceiveQueue(opened.window), self.identity.name
        stream = StreamCore(
            self.runtime, me, peer, opened, carrier or NullCarrier(), inbox, called=False, channel=channel
        )
        self._keep(stream)
        if carrier is None:
            stream.broken("its address is not known")
            return stream
        if priority is Priority.BULK:
            channel()  # connects: the peer may be the first to send a payload
        carrier.connect(stream, opened)
        return stream

    @override
    def send(
        self, peer: str, tag: int, tensor: Span, *, silence_s: float = 30.0
    ) -> Coroutine[Any, Any, None]:
        return self._tensors.send(self.open, peer, tag, tensor, silence_s)

    @override
    def recv(self, peer: str, tag: int, into: Span, *, silence_s: float = 30.0) -> Coroutine[Any, Any, None]:
        return self._tensors.recv(peer, tag, into, silence_s)

    async def close(self) -> None:
        """See `Endpoint.close`. It tells the peers, and cancels and awaits the handlers."""
        if self._closed:
            return
        self._closed = True
        for stream in list(self._streams):
            stream.cancel(f"{self.identity.name} closes")
        try:
            await self._stop_handlers()
        finally:
            await self._shut(abruptly=False)
            self._close_payload_channels()
            self._stranger_log.close()

    async def abort(self) -> None:
        """Ends as a killed process would: it tells nobody, and its connections break. For fault tests."""
        if self._closed:
            return
        self._closed = True
        self._close_payload_channels()
        await self._shut(abruptly=True)
        for stream in list(self._streams):
            stream.broken(f"{self.identity.name} was aborted")
        await self._stop_handlers()

    def _close_payload_channels(self) -> None:
        if self._payload_channels is not None:
            self._payload_channels.close()
            self._payload_channels = None

    async def _stop_handlers(self) -> None:
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---- the carrier's side -----------------------------------------------------------

    def incoming(
        self,
        opened: v1.Open,
        carrier: Carrier,
        *,
        window: int | None = None,
        caller: Caller | None = None,
        objection: v1.Refuse | None = None,
    ) -> StreamCore:
        """Answers an Open: refuses it, or accepts it and starts its handler.

        Args:
            carrier: moves the frames of the stream.
            window: chunks that this side holds for the stream; None takes the endpoint's.
            caller: the node that made the connection; None if the carrier does not know.
            objection: why the carrier refuses the stream; None if it does not.
        """
        blamed = Caller.of(opened) if caller is None else caller
        stream = StreamCore(
            self.runtime,
            self.identity.name,
            opened.sender,
            opened,
            carrier,
            ReceiveQueue(
                self._window if window is None else window,
                self.access.intakes.of(blamed),
                takes_chunks=self.methods.get(opened.method, UNLISTED).chunks,
            ),
            called=True,
            channel=partial(self._channel_from, opened.sender, opened.incarnation),
        )
        if not self.access.serves_at_other_times(opened.method):
            stream.on_refuse = partial(self._count_refusal, blamed)
        refuse = objection or self._objection_to(opened, caller)
        if refuse is not None:
            stream.turn_away(refuse)
            return stream
        self._keep(stream)
        self.access.count_stream(stream)
        service = self.access.services[opened.method]
        name = f"{self.identity.name}: {opened.method} for {opened.sender}"
        task = self.runtime.spawn(self._handle(service, stream), name=name)
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))
        return stream

    def _objection_to(self, opened: v1.Open, caller: Caller | None) -> v1.Refuse | None:
        return self.access.objection(opened, caller, closed=self._closed, protected=self.protected)

    async def _handle(self, service: Service, stream: StreamCore) -> None:
        """Runs a handler. An exception of the handler refuses its stream, and does not reach the endpoint."""
        try:
            if service.method.members:
                if not self.access.is_member(stream.opened):
                    await self.access.await_member(stream)
                # It may have become a member since it called, and gets room for its chunks, which non-members do not
                # have.
                stream.belongs_to(self.access.intakes.of(Caller.of(stream.opened)))
            # An answer that is ready at once leaves before the Accept: that saves half a round trip.
            asyncio.get_running_loop().call_soon(stream.accept)
            await service.handler(stream)
        except DecodeError as error:
            stream.refuse(v1.BAD_REQUEST, f"{stream.opened.method}: malformed request: {error}")
        except Exception as error:
            if not isinstance(error, GradstreamError) or isinstance(error, InternalError):
                _log.exception("%s: handler of %s failed", self.identity.name, stream.opened.method)
            stream.refuse(*code_of(error))
        else:
            stream.finish()
        finally:
            stream.forget()

    def _count_refusal(self, caller: Caller) -> None:
        """Closes the connections of a caller that was refused too often within a short time."""
        if self.access.count_refusal(caller):
            _log.warning(
                "%s: closes the connections of a caller, of which it has refused too much", self.identity.name
            )
            asyncio.get_running_loop().call_soon(self._disconnect_caller, caller)

    async def _delay_refusal(self) -> None:
        """Waits before a caller is refused, so that many attempts take long; not if too many wait already."""
        if self._num_delayed >= LIMITS.strangers:
            return
        self._num_delayed += 1
        try:
            await self.runtime.sleep(LIMITS.turned_away_s)
        finally:
            self._num_delayed -= 1

    def share_memory(self) -> None:
        """Sends payloads to peers on this host by reference from here on. Call it after `start`.

        Raises:
            ConfigError: this system cannot do that.
        """
        channels = PayloadChannels(self.runtime, self.identity)
        channels.start(self.address)
        self._payload_channels = channels

    def _channel_to(self, peer: str) -> Channel | None:
        address, channels = self._addresses.get(peer), self._payload_channels
        return None if channels is None or address is None else channels.towards(peer, address)

    def _channel_from(self, sender: str, incarnation: int) -> Channel | None:
        channels = self._payload_channels
        return None if channels is None else channels.with_sender(sender, incarnation)

    def _keep(self, stream: StreamCore) -> None:
        self._streams[stream] = None
        stream.on_release(lambda: self._streams.pop(stream, None))


# ---- access ------------------------------------------------------------------------------
# `AccessControl`: which streams a node serves to whom, the same over all of its carriers.


@dataclass(frozen=True, slots=True)
class Service:
    """A method that this node serves, as in gRPC: peers open streams to call it.

    Args:
        handler: serves each stream.
        model: whether the method reads or writes the model; see `Endpoint.serve`.
        method: row of `METHODS` that describes the method.
    """

    handler: Handler
    model: bool
    method: Method


class AccessControl:
    """Checks each Open against the node's identity, its members and its limits.

    Args:
        window: chunks that the node holds for each stream it is called on.
    """

    def __init__(self, identity: Identity, runtime: Runtime, window: int) -> None:
        self.services: dict[str, Service] = {}
        self.intakes = Intakes(identity, window)
        self._identity = identity
        self._runtime = runtime
        self._members_changed = Broadcast()

    def members_changed(self) -> None:
        """Wakes the streams that wait for news of their caller's membership."""
        self._members_changed.ring()

    def objection(
        self, opened: v1.Open, caller: Caller | None, *, closed: bool, protected: bool
    ) -> v1.Refuse | None:
        """Why this node does not serve an Open; None if it does.

        Args:
            caller: the node that made the connection; None if the carrier does not know.
            closed: whether the endpoint serves no more streams.
            protected: whether the connection is encrypted, and certificates name both sides.
        """
        mine, service = self._identity, self.services.get(opened.method)
        refuse = partial(v1.Refuse, epoch=mine.epoch)
        who = f"{opened.sender} (incarnation {opened.incarnation:x})"
        if opened.protocol != PROTOCOL:
            text = f"{who} speaks protocol {opened.protocol}, {mine.name} {PROTOCOL}: install one version"
            return refuse(code=v1.BAD_PROTOCOL, message=text)
        if opened.job != mine.job:
            text = f"{who} belongs to job {opened.job!r}, {mine.name} to {mine.job!r}: check the address"
            return refuse(code=v1.BAD_JOB, message=text)
        if caller is not None and caller != Caller.of(opened):
            return refuse(code=v1.BAD_REQUEST, message=f"a stream of {who} on a connection of {caller.name}")
        if service is None or closed:
            known = ", ".join(sorted(self.services))
            text = f"{mine.name} serves no method {opened.method!r}; it serves {known}"
            return refuse(code=v1.UNKNOWN_METHOD, message=text)
        method = service.method
        if len(opened.body) > method.request_bytes:
            most = method.request_bytes
            text = f"{opened.method}: a request of {len(opened.body)} bytes, expected at most {most}"
            return refuse(code=v1.BAD_REQUEST, message=text)
        intake = self.intakes.of(Caller.of(opened))
        most_streams = LIMITS.streams + intake.more_streams
        if intake.num_streams >= most_streams:
            text = f"{who} has {most_streams} streams to {mine.name} open already"
            return refuse(code=v1.OVER_LIMIT, message=text)
        if (mine.members is not None or protected) and role_of(opened.sender) not in method.callers:
            text = f"{opened.sender} may not call {opened.method!r}: it is a {role_of(opened.sender)}"
            return refuse(code=v1.FORBIDDEN, message=text)
        if service.model and mine.fingerprint and opened.fingerprint != mine.fingerprint:
            text = (
                f"{who} has model fingerprint {opened.fingerprint:016x}, {mine.name} has "
                f"{mine.fingerprint:016x} (0: none): all nodes must run the same model"
            )
            return refuse(code=v1.BAD_FINGERPRINT, message=text)
        if service.model and opened.epoch < mine.epoch:
            text = f"{who} is at membership epoch {opened.epoch}, {mine.name} at {mine.epoch}: join again"
            return refuse(code=v1.STALE_EPOCH, message=text)
        if method.members and not self.is_member(opened) and not self._may_become_member(opened):
            text = f"{who} is no member of this run, or no longer"
            return refuse(code=v1.NOT_MEMBER, message=text)
        return None

    def serves_at_other_times(self, method: str) -> bool:
        """Whether a node of this role serves a method, just not now: callers may be early, or late.

        In a group of hundreds, all ready ranks call one that is not ready, so such refusals are no misbehaviour.
        """
        known = METHODS.get(method, UNLISTED)
        return method not in self.services and role_of(self._identity.name) in known.served_by

    def is_member(self, opened: v1.Open) -> bool:
        """Whether the caller is a member, as far as this node knows; before it has joined, all callers are."""
        members = self._identity.members
        if members is None or opened.sender == COORDINATOR:
            return True
        return members.get(opened.sender) == opened.incarnation

    def _may_become_member(self, opened: v1.Open) -> bool:
        """Whether the caller knows a later membership epoch than this node."""
        return opened.epoch > self._identity.epoch

    async def await_member(self, stream: StreamCore) -> None:
        """Waits until this node knows that the caller of a stream is a member.

        Raises:
            RefusedError: the caller is not a member, or its membership did not become known in time.
        """
        opened, mine = stream.opened, self._identity

        async def known() -> None:
            while not self.is_member(opened) and self._may_become_member(opened) and not stream.failed:
                await self._members_changed.wait()

        stream.on_release(self._members_changed.ring)  # stops waiting for a caller that has given up
        try:
            await self._runtime.within(LIMITS.handshake_s, known())
        except TimeoutError:
            pass
        if not self.is_member(opened):
            text = f"{mine.name} has not heard that {opened.sender} is a member of this run"
            raise RefusedError(mine.name, "NOT_MEMBER", text)

    def count_stream(self, stream: StreamCore) -> None:
        """Counts a stream against its caller's limit until it is over."""
        intake = self.intakes.of(Caller.of(stream.opened))
        intake.num_streams += 1

        def over() -> None:
            intake.num_streams -= 1

        stream.on_release(over)

    def count_refusal(self, caller: Caller) -> bool:
        """Counts a refusal; True if the caller has had too many, and its connections must be closed."""
        return self.intakes.of(caller).refused(self._runtime.now())

    def block(self, caller: Caller) -> v1.Refuse | None:
        """Why connections of a caller that knows the secret are refused for now; None if they are not."""
        if not self.intakes.of(caller).is_closed(self._runtime.now()):
            return None
        again = f"it listens again within {LIMITS.refusals_s:g} s"
        text = f"{self._identity.name} has refused too much to {caller.name}: {again}"
        return v1.Refuse(code=v1.OVER_LIMIT, message=text)
