"""`EndpointCore`: what all endpoints do alike, on whatever carries their streams.

Incoming streams are checked against this endpoint's identity and given to the handler of their
method; `call` and tagged `send`/`recv` are posted on streams. A carrier's endpoint adds `start`,
`_dial` (make a carrier for an outgoing stream), `_hang_up` (drop connections) and `_shut`.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from google.protobuf.message import DecodeError, Message

from gradstream.errors import (
    ClosedError,
    ConfigError,
    DeadlineError,
    GradstreamError,
    InternalError,
    RefusedError,
)
from gradstream.memory import Span
from gradstream.runtime.base import Runtime
from gradstream.runtime.deadlines import Deadlines
from gradstream.runtime.throttle import Throttle
from gradstream.transport.base import Caller, Handler, Identity, Priority, Stream
from gradstream.transport.carrier import Carrier, OutgoingCarrier, PayloadChannel
from gradstream.transport.intake import Intakes
from gradstream.transport.limits import LIMITS
from gradstream.transport.mailbox import Mailbox, ReceivedTensor
from gradstream.transport.methods import COORDINATOR, METHODS, UNLISTED, Method, role_of
from gradstream.transport.shm.lending import Lending
from gradstream.transport.silence import Broadcast
from gradstream.transport.stream import StreamCore, code_of
from gradstream.untrusted import escaped
from gradstream.wire import v1
from gradstream.wire.dtypes import from_wire, to_wire
from gradstream.wire.frames import PROTOCOL

__all__ = ["CONNECTION_S", "PIECE_BYTES", "WINDOW", "EndpointCore"]

M = TypeVar("M", bound=Message)

WINDOW = 16
"""Chunks that a called endpoint is ready to hold per stream."""

CONNECTION_S = Deadlines().connection_s
"""A carrier ends a silent connection after this where nobody says otherwise."""

PIECE_BYTES = 1 << 20
"""Tagged sends go in chunks of this size."""

ADDRESS_BYTES = 64
"""Of a stranger's address, as it is told."""

_log = logging.getLogger(__name__)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copies a piece on this thread alone: torch would wake its others for a mere megabyte."""
    if not target.is_meta:
        target.numpy()[...] = source.numpy()


@dataclass(frozen=True, slots=True)
class _Service:
    handler: Handler
    model: bool
    method: Method


class EndpointCore(ABC):
    """Base of every carrier's endpoint; implements `transport.base.Endpoint`.

    Args:
        identity: who this endpoint is; may be changed later (a model registered, a new epoch).
        runtime: of the node.
        window: chunks that it is ready to hold for each stream it is called on.
    """

    address: str = ""
    protected: bool = False
    methods: Mapping[str, Method] = METHODS

    def __init__(self, identity: Identity, runtime: Runtime, *, window: int = WINDOW) -> None:
        if window < 1:
            raise ConfigError(f"window = {window} chunks for {identity.name}: expected at least 1")
        self.identity = identity
        self.runtime = runtime
        self._window = window
        self.intakes = Intakes(identity, window)
        self._num_waiting = 0  # who were turned away
        self._services: dict[str, _Service] = {}
        self._addresses: dict[str, str] = {}
        self._mailbox = Mailbox()
        self._sequences: Counter[str] = Counter()
        # Dicts are ordered sets: what happens at close must not depend on addresses of objects.
        self._streams: dict[StreamCore, None] = {}
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._closed = False
        self._lending: Lending | None = None
        self._news = Broadcast()  # of membership
        self._strangers_told = Throttle(runtime, self._log_stranger)
        self.on_stranger: Callable[[str], None] = self._strangers_told.tell
        """Called with the address of whoever has not proved to know the secret."""

    # ---- what a carrier adds ----------------------------------------------------------

    @abstractmethod
    async def start(self) -> None:
        """See `Endpoint.start`."""

    @abstractmethod
    def _dial(self, peer: str, address: str | None, priority: Priority) -> OutgoingCarrier:
        """A carrier for a new stream; None is the address of a peer nobody told about."""

    def _dial_anew(self, peer: str, address: str | None, priority: Priority) -> OutgoingCarrier:
        """As `_dial`, over a connection of the stream's own; carriers without connections have none."""
        return self._dial(peer, address, priority)

    @abstractmethod
    def _hang_up(self, peer: str) -> None:
        """Breaks all connections to a peer: its address has changed."""

    @abstractmethod
    async def _shut(self, *, abruptly: bool) -> None:
        """Stops accepting and breaks all connections; unless `abruptly`, what waits is sent first."""

    def _hang_up_on(self, caller: Caller) -> None:
        """Closes the connections of a caller that has been refused too much."""
        del caller

    def _log_stranger(self, address: str, more: int) -> None:
        _log.warning(
            "%s: refused %s, which does not know the secret of this run%s",
            self.identity.name,
            escaped(address, ADDRESS_BYTES),
            f" (and {more:,} more)" if more else "",
        )

    def share(self, other: EndpointCore) -> None:
        """Has handlers, parked tensors and their numbers in common with another endpoint of the same node."""
        self.intakes = other.intakes
        self._news = other._news
        self._services = other._services
        self._mailbox = other._mailbox
        self._sequences = other._sequences

    # ---- the user's side --------------------------------------------------------------

    def serve(self, method: str, handler: Handler, *, model: bool = True) -> None:
        """See `Endpoint.serve`. A method registered again is served by the new handler."""
        self._services[method] = _Service(handler, model, self.methods.get(method, UNLISTED))

    def serve_tensors(self) -> None:
        """See `Endpoint.serve_tensors`."""
        self.intakes.takes_tensors = True
        self.serve("tensor", self._serve_tensor)

    def members_changed(self, members: Mapping[str, int], revoked: Iterable[bytes] = ()) -> None:
        """See `Endpoint.members_changed`."""
        self.identity.revoked = frozenset(revoked)
        if members != self.identity.members:
            self.identity.members = dict(members)
            if self.identity.epoch:  # training has begun
                self._mailbox.keep_senders({Caller(*member) for member in members.items()})
            self._news.ring()

    def know(self, peer: str, address: str) -> None:
        """See `Endpoint.know`."""
        before = self._addresses.get(peer)
        self._addresses[peer] = address
        if before is not None and before != address:
            if self._lending is not None:
                self._lending.hang_up(peer)
            self._hang_up(peer)

    @property
    def routes(self) -> Mapping[str, str]:
        """See `Endpoint.routes`."""
        return {}

    def forget(self, peer: str) -> None:
        """Breaks all connections to a peer that is reached in another way from now on."""
        if self._addresses.pop(peer, None) is not None:
            self._hang_up(peer)

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
        """See `Endpoint.open`."""
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
        """Opens a stream with an Open made by hand: what another program might send, for tests."""
        dial = self._dial_anew if new_connection else self._dial
        carrier = dial(peer, self._addresses.get(peer), priority)
        name, window = self.identity.name, opened.window
        depot = partial(self._depot, peer)
        stream = StreamCore(
            self.runtime, name, peer, opened, carrier, called=False, window=window, depot=depot
        )
        self._keep(stream)
        if priority is Priority.BULK:
            depot()  # connects: the peer may be the first to send a payload
        carrier.connect(stream, opened)
        return stream

    async def line(self, peer: str, name: str, *, dial: bool) -> socket.socket | None:
        """See `Endpoint.line`: most carriers have none."""
        del peer, name, dial
        return None

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
        """See `Endpoint.call`."""
        stream = await self.open(peer, method, request, priority=priority, new_connection=new_connection)
        try:
            await stream.end()
            received = await stream.recv(silence_s)
        except BaseException:
            stream.cancel("the call was given up")
            raise
        if received is None:
            raise RefusedError(peer, "INTERNAL", f"{method} ended without a reply")
        try:
            return reply.FromString(received.frame.body.data)
        except DecodeError as error:
            message = f"{peer} answered {method} with what is no {reply.__name__}: {error}"
            raise RefusedError(self.identity.name, "BAD_REQUEST", message) from None

    async def send(self, peer: str, tag: int, tensor: Span, *, silence_s: float = 30.0) -> None:
        """See `Endpoint.send`. The elements go in chunks of `PIECE_BYTES`."""
        self._sequences[peer] += 1
        wire = to_wire(tensor.vector.tensor.dtype)
        request = v1.Tensor(tag=tag, elems=len(tensor), dtype=wire, sequence=self._sequences[peer])
        with tensor.borrowed(write=False, to=f"{self.identity.name}: send to {peer}, tag {tag}") as elements:
            stream = await self.open(peer, "tensor", request)
            try:
                step = PIECE_BYTES // elements.element_size()
                for index, start in enumerate(range(0, len(tensor), step)):
                    piece = elements[start : start + step]
                    chunk = v1.Chunk(index=index, elems=piece.numel(), dtype=wire)
                    await stream.send(v1.Frame(chunk=chunk), piece, silence_s)
                await stream.end()
                if await stream.recv(silence_s) is None:
                    raise RefusedError(peer, "INTERNAL", f"ended tensor {tag} without confirming it")
            except BaseException:
                stream.cancel("the send was given up")
                raise

    async def recv(self, peer: str, tag: int, into: Span, *, silence_s: float = 30.0) -> None:
        """See `Endpoint.recv`."""
        with into.borrowed(write=True, to=f"{self.identity.name}: recv from {peer}, tag {tag}") as elements:
            try:
                arrival = await self.runtime.within(silence_s, self._mailbox.take((peer, tag)))
            except TimeoutError:
                message = f"nothing came for {self.identity.name} under tag {tag} in {silence_s:g} s"
                raise DeadlineError(peer, message) from None
            try:
                await self._receive(arrival, elements, silence_s)
            except RefusedError as error:
                arrival.stream.refuse(*code_of(error))
                raise
            except BaseException:
                arrival.stream.cancel("the receive was given up")
                raise
            finally:
                arrival.finish()

    async def _receive(self, arrival: ReceivedTensor, elements: torch.Tensor, silence_s: float) -> None:
        stream, request = arrival.stream, arrival.request
        if (request.elems, from_wire(request.dtype)) != (elements.numel(), elements.dtype):
            sent = f"{request.elems} elements of {from_wire(request.dtype)}"
            expected = f"{elements.numel()} of {elements.dtype}"
            raise self._bad(f"tensor {request.tag} from {stream.peer} has {sent}: expected {expected}")
        filled, step = 0, PIECE_BYTES // elements.element_size()

        def place(chunk: v1.Chunk) -> torch.Tensor | None:
            """Where a piece belongs, if it is cut as `send` does; what is not, is copied."""
            start = chunk.index * step
            return elements[start : start + chunk.elems] if start < elements.numel() else None

        stream.land(place)
        while (received := await stream.recv(silence_s)) is not None:
            chunk, payload = received.frame.chunk, received.payload
            if payload is None or payload.dtype != elements.dtype or filled + chunk.elems > elements.numel():
                raise self._bad(f"chunk {chunk.index} of tensor {request.tag} does not fit")
            if not received.landed:
                _copy(elements[filled : filled + chunk.elems], payload)
            elif chunk.index * step != filled:
                raise self._bad(f"chunk {chunk.index} of tensor {request.tag} is not the next one")
            filled += chunk.elems
        if filled != elements.numel():
            raise self._bad(
                f"tensor {request.tag} from {stream.peer} ended after {filled} elements: "
                f"expected {elements.numel()}"
            )
        await stream.send(v1.Frame(body=v1.Body()))

    def _bad(self, message: str) -> RefusedError:
        return RefusedError(self.identity.name, "BAD_REQUEST", message)

    async def close(self) -> None:
        """See `Endpoint.close`. Peers are told; handlers are cancelled and awaited."""
        if self._closed:
            return
        self._closed = True
        for stream in list(self._streams):
            stream.cancel(f"{self.identity.name} closes")
        try:
            await self._stop_handlers()
        finally:
            await self._shut(abruptly=False)
            self._stop_lending()
            self._strangers_told.close()

    async def abort(self) -> None:
        """Ends as a killed process would: nobody is told, connections just break. For fault tests."""
        if self._closed:
            return
        self._closed = True
        self._stop_lending()
        await self._shut(abruptly=True)
        for stream in list(self._streams):
            stream.broken(f"{self.identity.name} was aborted")
        await self._stop_handlers()

    def _stop_lending(self) -> None:
        if self._lending is not None:
            self._lending.close()
            self._lending = None

    async def _stop_handlers(self) -> None:
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---- the carrier's side -----------------------------------------------------------

    def _incoming(
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
            caller: who has opened the connection; None where nothing is known.
            objection: why the carrier does not want it, if so.
        """
        # Whom it may only say to be is not blamed.
        known = Caller.of(opened) if caller is None else caller
        stream = StreamCore(
            self.runtime,
            self.identity.name,
            opened.sender,
            opened,
            carrier,
            called=True,
            window=self._window if window is None else window,
            depot=partial(self._depot_of, opened.sender, opened.incarnation),
            intake=self.intakes.of(known),
            takes_chunks=self.methods.get(opened.method, UNLISTED).chunks,
        )
        stream.on_refuse = partial(self._count_refusal, known)
        refuse = objection or self._check(opened, caller)
        if refuse is not None:
            stream.turn_away(refuse)
            return stream
        self._keep(stream)
        self._count_stream(stream)
        service = self._services[opened.method]
        name = f"{self.identity.name}: {opened.method} for {opened.sender}"
        task = self.runtime.spawn(self._handle(service, stream), name=name)
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))
        return stream

    def _check(self, opened: v1.Open, caller: Caller | None) -> v1.Refuse | None:
        """Why an Open cannot be served here; None if it can."""
        mine, service = self.identity, self._services.get(opened.method)
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
        if service is None or self._closed:
            known = ", ".join(sorted(self._services))
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
        if (mine.members is not None or self.protected) and role_of(opened.sender) not in method.callers:
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
        if method.members and not self._is_member(opened) and not self._may_become_member(opened):
            text = f"{who} is no member of this run, or no longer"
            return refuse(code=v1.NOT_MEMBER, message=text)
        return None

    def _is_member(self, opened: v1.Open) -> bool:
        """Whether the caller is a member, as far as this node has heard; before it has joined, all may be."""
        members = self.identity.members
        if members is None or opened.sender == COORDINATOR:
            return True
        return members.get(opened.sender) == opened.incarnation

    def _may_become_member(self, opened: v1.Open) -> bool:
        """Whether the caller has heard of a membership that this node has not heard of yet."""
        return opened.epoch > self.identity.epoch

    async def _await_member(self, stream: StreamCore) -> None:
        """Holds a stream whose sender is ahead of this node's own news."""
        opened, mine = stream.opened, self.identity

        async def heard() -> None:
            while not self._is_member(opened) and self._may_become_member(opened) and not stream.failed:
                await self._news.wait()

        stream.on_release(self._news.ring)  # a caller that has given up is not waited for
        try:
            await self.runtime.within(LIMITS.handshake_s, heard())
        except TimeoutError:
            pass
        if not self._is_member(opened):
            text = f"{mine.name} has not heard that {opened.sender} is a member of this run"
            raise RefusedError(mine.name, "NOT_MEMBER", text)

    async def _handle(self, service: _Service, stream: StreamCore) -> None:
        """Runs a handler; whatever it raises refuses its stream, and never hurts the endpoint."""
        try:
            if service.method.members and not self._is_member(stream.opened):
                await self._await_member(stream)
            # An answer that is there at once goes out before the Accept: half the round trip of a call.
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

    def _count_stream(self, stream: StreamCore) -> None:
        intake = self.intakes.of(Caller.of(stream.opened))
        intake.num_streams += 1

        def over() -> None:
            intake.num_streams -= 1

        stream.on_release(over)

    def _count_refusal(self, caller: Caller) -> None:
        """A caller was refused something. One that goes on and on is not listened to for a while."""
        if self.intakes.of(caller).refused(self.runtime.now()):
            _log.warning(
                "%s: too much of what a caller sent was refused; it is hung up on", self.identity.name
            )
            asyncio.get_running_loop().call_soon(self._hang_up_on, caller)

    async def _turned_away(self) -> None:
        """Whoever is turned away waits before it is told, as long as not too many do."""
        if self._num_waiting >= LIMITS.strangers:
            return
        self._num_waiting += 1
        try:
            await self.runtime.sleep(LIMITS.turned_away_s)
        finally:
            self._num_waiting -= 1

    def _not_heard(self, caller: Caller) -> v1.Refuse | None:
        """Why connections of a caller that knows the secret are turned away for now; None if they are not."""
        if not self.intakes.of(caller).is_closed(self.runtime.now()):
            return None
        again = f"it listens again within {LIMITS.refusals_s:g} s"
        text = f"{self.identity.name} has refused too much to {caller.name}: {again}"
        return v1.Refuse(code=v1.OVER_LIMIT, message=text)

    def share_memory(self) -> None:
        """From here on, payloads for peers on this host go by reference; once it has started.

        Raises:
            ConfigError: this system cannot do that.
        """
        lending = Lending(self.runtime, self.identity)
        lending.start(self.address)
        self._lending = lending

    def _depot(self, peer: str) -> PayloadChannel | None:
        address = self._addresses.get(peer)
        return None if self._lending is None or address is None else self._lending.towards(peer, address)

    def _depot_of(self, sender: str, incarnation: int) -> PayloadChannel | None:
        return None if self._lending is None else self._lending.with_sender(sender, incarnation)

    def _keep(self, stream: StreamCore) -> None:
        self._streams[stream] = None
        stream.on_release(lambda: self._streams.pop(stream, None))

    async def _serve_tensor(self, stream: Stream) -> None:
        assert isinstance(stream, StreamCore)
        request, opened = v1.Tensor.FromString(stream.opened.body), stream.opened
        gone = not self._mailbox.knows(opened.sender, opened.incarnation)
        if gone and opened.epoch <= self.identity.epoch:  # one of a later epoch is not known here yet
            text = f"{opened.sender} (incarnation {opened.incarnation:x}) has left the run; join again"
            raise RefusedError(self.identity.name, "NOT_MEMBER", text)
        if not self._mailbox.first_time(opened.sender, opened.incarnation, request.sequence):
            raise self._bad(f"tensor {request.tag} number {request.sequence} was delivered before")
        key, arrival = (opened.sender, request.tag), ReceivedTensor(stream, request)
        if not self._mailbox.offer(key, arrival):
            await stream.waiting([f"{self.identity.name}: no recv posted for tag {request.tag}"])
        stream.on_release(arrival.finish)
        try:
            await arrival.done
        finally:
            self._mailbox.withdraw(key, arrival)
