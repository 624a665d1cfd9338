"""Carriers of streams over gRPC: one stream is one bidirectional call."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

import grpc
import grpc.aio
import torch

from gradstream.errors import PeerLostError, RefusedError
from gradstream.runtime.base import Runtime
from gradstream.runtime.tasks import Broadcast
from gradstream.transport.base import bytes_of, refusal_of
from gradstream.transport.grpc.connection import (
    EOF,
    FAILURES,
    METHOD,
    PASS,
    CallerSession,
    GrpcConnection,
    is_cancelled,
)
from gradstream.transport.security import explain, is_refused
from gradstream.transport.stream import StreamCore
from gradstream.wire import v1
from gradstream.wire.frames import SEAL_BYTES, DamagedError, FrameError, decode, encode, payload_tensor, seal

HOLD_S = 2e-3  # the longest time for which control calls hold back a bulk message

Spawn = Callable[[Coroutine[Any, Any, None], str], "asyncio.Task[None]"]
"""Spawns a task by a name; the endpoint waits for it when it closes."""


class BulkGate:
    """Lets control calls overtake: while one is in progress, bulk is neither sent nor read, for `HOLD_S` at most.

    On one event loop, each of the ten or so steps of a call would otherwise wait for a chunk. A control
    stream that stays open holds back bulk only for `HOLD_S` after its opening.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._holders: dict[StreamCore, None] = {}
        self._opened = Broadcast()

    def hold(self, stream: StreamCore) -> None:
        """Holds back bulk until the stream is over, or `HOLD_S` has passed."""
        self._holders[stream] = None
        timer = self._runtime.call_later(HOLD_S, partial(self._release, stream))
        stream.on_release(timer.cancel)
        stream.on_release(partial(self._release, stream))

    def _release(self, stream: StreamCore) -> None:
        self._holders.pop(stream, None)
        if not self._holders:
            self._opened.ring()

    async def passed(self) -> None:
        """Returns once no call holds bulk back, or after `HOLD_S`."""
        if self._holders:
            timer = self._runtime.call_later(HOLD_S, self._opened.ring)
            try:
                await self._opened.wait()
            finally:
                timer.cancel()


class GrpcCarrier:
    """The queue between a stream and its gRPC call; implements `transport.base.Carrier`.

    Args:
        gate: holds back each message while control calls are in progress; None for control streams.
        number: number of the stream's pass.
        checked: whether messages have checksums.
        on_damage: called with the number of bytes of a message with a wrong checksum.
    """

    def __init__(
        self, gate: BulkGate | None, number: int, *, checked: bool, on_damage: Callable[[int], None]
    ) -> None:
        self.checked = checked
        self._gate = gate
        self._seed_out = number << 32  # of the next message
        self._seeds_in = itertools.count(number << 32)
        self._on_damage = on_damage
        self._outbox: deque[tuple[bytes, bool]] = deque()  # message; whether a cancel drops it
        self._over = False
        self._stopped = False
        self._filled, self._emptied = Broadcast(), Broadcast()
        self._admitted = asyncio.Event()
        self.stream: StreamCore | None = None

    def hurry(self) -> None:
        """Treats the stream as a control stream: nothing holds it back."""
        self._gate = None

    def transmit(self, frame: v1.Frame, payload: torch.Tensor | None) -> None:
        """See `Carrier.transmit`."""
        if self._over or self._stopped:
            return
        if frame.HasField("accept") or frame.HasField("end"):
            self._admitted.set()
        droppable = frame.HasField("chunk") or frame.HasField("body")
        seed = self._next_seed() if self.checked else None
        self._outbox.append((encode(frame, bytes_of(payload), seed=seed), droppable))
        self._filled.ring()

    def _next_seed(self) -> int:
        self._seed_out += 1
        return self._seed_out - 1

    async def drained(self) -> None:
        """See `Carrier.drained`."""
        while self._outbox and not self._stopped:  # a message is encoded while gRPC takes the one before
            await self._emptied.wait()

    def drop(self) -> None:
        """See `Carrier.drop`."""
        kept = [entry for entry in self._outbox if not entry[1]]
        if self.checked and len(kept) < len(self._outbox):  # the kept messages move up, and are short
            self._seed_out -= len(self._outbox)
            kept = [(seal(message[SEAL_BYTES:], seed=self._next_seed()), False) for message, _ in kept]
        self._outbox.clear()
        self._outbox.extend(kept)
        self._emptied.ring()

    def over(self) -> None:
        """See `Carrier.over`; frames that were transmitted still leave."""
        self._over = True
        self._filled.ring()

    async def write_all(self, write: Callable[[bytes], Awaitable[object]]) -> None:
        """Writes messages until the stream is over or the call has failed."""
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
            pass  # the reader learns why, after the last messages that had arrived
        finally:
            self._stopped = True
            self._emptied.ring()

    def decode(self, message: bytes) -> tuple[v1.Frame, memoryview | None]:
        """The next message of the peer as a frame. Raises as `wire.frames.decode` does."""
        try:
            return decode(message, seed=next(self._seeds_in), checked=self.checked)
        except DamagedError as error:
            self._on_damage(error.size_bytes)
            raise

    async def read_all(self, read: Callable[[], Awaitable[Any]]) -> None:
        """Passes messages to the stream until there are no more, or the peer has refused the stream."""
        assert self.stream is not None
        while (message := await read()) is not EOF:
            if self._gate is not None:
                await self._gate.passed()
            try:
                frame, view = self.decode(message)
                payload = payload_tensor(frame.chunk, view) if frame.HasField("chunk") else None
            except DamagedError as error:
                self.stream.broken(str(error))
                return
            except FrameError as error:
                self.stream.reject(error)
            else:
                self.stream.arrived(frame, payload)
                if frame.HasField("refuse"):
                    return

    async def read_admitted(self, read: Callable[[], Awaitable[Any]]) -> None:
        """Called side: reads once the stream was accepted. Reads nothing of a refused stream."""
        await self._admitted.wait()
        await self.read_all(read)


_NO_PASS = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.INTERNAL)
"""Status codes of a call whose pass was refused: grpc.aio reports the second where the call has ended before it
took the caller's message."""


class OutgoingCall(GrpcCarrier):
    """The carrier of the calling side: makes the call once the connection has a session.

    Args:
        spawn: spawns the tasks of the call.
        connection: connection to the peer.
        bulk: whether the stream carries bulk data, which the gate holds back.
        own_connection: whether the connection serves this stream alone, and is closed with it.
        on_damage: see `GrpcCarrier`.
    """

    def __init__(
        self,
        gate: BulkGate,
        spawn: Spawn,
        connection: GrpcConnection,
        *,
        bulk: bool,
        own_connection: bool = False,
        on_damage: Callable[[int], None],
    ) -> None:
        self._number = connection.next_number()
        checked = connection.checked
        super().__init__(gate if bulk else None, self._number, checked=checked, on_damage=on_damage)
        self._control_gate = gate
        self._spawn = spawn
        self._connection = connection
        self._own_connection = own_connection
        self._session: CallerSession | None = None  # the session that the call belongs to
        self._waiting: asyncio.Task[None] | None = None

    def connect(self, stream: StreamCore, opened: v1.Open) -> None:
        """See `OutgoingCarrier.connect`."""
        self.stream = stream
        self.transmit(v1.Frame(open=opened), None)
        if opened.urgent:
            self._control_gate.hold(stream)
        if self._own_connection:
            close, name = self._connection.close, f"{opened.sender}: disconnect from {stream.peer}"
            stream.on_release(lambda: self._spawn(close(), name))
        if self._connection.session is not None:
            self._begin(self._connection.session, stream)
            return
        name = f"{opened.sender}: {opened.method} to {stream.peer}, before it begins"
        self._waiting = self._spawn(self._begin_later(stream), name)

    def over(self) -> None:
        """See `Carrier.over`. Of a call that has not begun, nothing leaves."""
        super().over()
        if self._session is None:
            self._stopped = True
            self._emptied.ring()
            if self._waiting is not None:
                self._waiting.cancel()

    async def _begin_later(self, stream: StreamCore) -> None:
        try:
            session = await self._connection.opened()
        except RefusedError as error:
            self._waiting = None
            stream.arrived(v1.Frame(refuse=refusal_of(error)), None)
        except PeerLostError as error:
            self._waiting = None
            text = str(error).removeprefix(f"{stream.peer}: ")
            stream.broken(text, nobody_listens=error.nobody_listens)
        except asyncio.CancelledError:
            self._waiting = None
            stream.broken("the connection was closed by this side")
            raise
        else:
            if not self._over:
                self._begin(session, stream)

    def _begin(self, session: CallerSession, stream: StreamCore) -> None:
        self._session, self._waiting = session, None
        if session.checked and not self.checked:  # only the peer sees that the connection leaves the machine
            self.checked = True
            queued = [(seal(message, seed=self._next_seed()), drops) for message, drops in self._outbox]
            self._outbox = deque(queued)
        try:
            call = self._connection.call(METHOD, PASS, session.pass_of(self._number))
        except FAILURES:
            stream.broken("the connection was closed by this side")
            return
        name = f"{stream.opened.sender}: {stream.opened.method} to {stream.peer}"
        self._spawn(self._write(call), f"{name}, writer")
        self._spawn(self._read(call, stream), f"{name}, reader")

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
                call.cancel()  # it was refused: the other side expects nothing more
                return
            code, details = await call.code(), await call.details()
            if code is grpc.StatusCode.OK:
                if (
                    not self.checked
                ):  # otherwise a missing End was lost on its way, perhaps with other messages
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
        self._connection.ended(code)
        if code in _NO_PASS and self._session:
            self._connection.lost(self._session)
        if code is grpc.StatusCode.UNAUTHENTICATED:
            stream.broken("its session has ended with the connection that it belonged to")
        else:
            details = details or ""
            stream.broken(f"{code.name}: {explain(details)}", nobody_listens=is_refused(details))
