"""`TaggedTensors`: tensors that nodes send each other by (node, tag), over streams of method "tensor"."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress

import torch

from gradstream.errors import DeadlineError, RefusedError
from gradstream.memory import Span
from gradstream.runtime.base import Runtime
from gradstream.transport.base import Caller, Identity, Stream, code_of, copy_elements
from gradstream.transport.stream import StreamCore
from gradstream.wire import v1
from gradstream.wire.frames import SequenceWindow, from_wire, to_wire

PIECE_BYTES = 1 << 20
"""Bytes of each chunk of a tagged tensor."""

PARKED_S = 1.0
"""How often the sender of a tensor that nobody has asked for yet gets a heartbeat."""

_Key = tuple[str, int]  # name of the sender, tag


class ReceivedTensor:
    """A stream of method "tensor", held until a receive has taken it and is done with it."""

    def __init__(self, stream: StreamCore, request: v1.Tensor) -> None:
        self.stream = stream
        self.request = request
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def finish(self) -> None:
        """Releases the stream: the receive is over, for any reason."""
        if not self.done.done():
            self.done.set_result(None)


class Mailbox:
    """Matches streams of tagged tensors with the receives that wait for them, both in order of arrival."""

    def __init__(self) -> None:
        self._arrivals: dict[_Key, deque[ReceivedTensor]] = {}
        self._receives: dict[_Key, deque[asyncio.Future[ReceivedTensor]]] = {}
        self._windows: dict[Caller, SequenceWindow] = {}  # numbers of the tensors that arrived
        self._members: Mapping[str, int] | None = None

    def keep_senders(self, members: Mapping[str, int]) -> None:
        """Sets the incarnations of the run's members, and frees what is kept for other senders."""
        self._members = members
        self._windows = {sender: window for sender, window in self._windows.items() if self.knows(*sender)}

    def knows(self, sender: str, incarnation: int) -> bool:
        """Whether a sender is a member; before the members are known, every sender is."""
        return self._members is None or self._members.get(sender) == incarnation

    def first_time(self, sender: str, incarnation: int, sequence: int) -> bool:
        """Notes a transfer. Returns whether it was not delivered before."""
        return self._windows.setdefault(Caller(sender, incarnation), SequenceWindow()).add(sequence)

    def offer(self, key: _Key, arrival: ReceivedTensor) -> bool:
        """Hands a stream to the oldest receive; keeps it and returns False if none waits yet."""
        receives = self._receives.get(key)
        while receives:
            future = receives.popleft()
            if not future.done():
                future.set_result(arrival)
                return True
        self._arrivals.setdefault(key, deque()).append(arrival)
        return False

    def withdraw(self, key: _Key, arrival: ReceivedTensor) -> None:
        """Removes a kept stream."""
        parked = self._arrivals.get(key)
        if parked and arrival in parked:
            parked.remove(arrival)
        if not parked:
            self._arrivals.pop(key, None)

    async def take(self, key: _Key) -> ReceivedTensor:
        """The oldest stream that its sender has not given up, as soon as there is one."""
        parked = self._arrivals.get(key)
        while parked:
            arrival = parked.popleft()
            if not arrival.stream.failed and not arrival.done.done():
                return arrival
        future: asyncio.Future[ReceivedTensor] = asyncio.get_running_loop().create_future()
        waiting = self._receives.setdefault(key, deque())
        waiting.append(future)
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():  # it came at the moment of the cancellation
                self.offer(key, future.result())
            raise
        finally:
            if future in waiting:
                waiting.remove(future)
            if not waiting and self._receives.get(key) is waiting:
                del self._receives[key]


class TaggedTensors:
    """Sends and receives tagged tensors of one node, over all of its carriers."""

    def __init__(self, identity: Identity, runtime: Runtime) -> None:
        self._identity = identity
        self._runtime = runtime
        self._mailbox = Mailbox()
        self._sequences: Counter[str] = Counter()

    def members_changed(self, members: Mapping[str, int]) -> None:
        """Forgets what was kept for senders that are no longer members.

        Args:
            members: incarnations by name. They are kept, not copied: each of 2,000 nodes knows all others.
        """
        self._mailbox.keep_senders(members)

    async def send(
        self,
        open_stream: Callable[[str, str, v1.Tensor], Awaitable[StreamCore]],
        peer: str,
        tag: int,
        tensor: Span,
        silence_s: float,
    ) -> None:
        """See `Endpoint.send`. The elements go in chunks of `PIECE_BYTES`.

        Args:
            open_stream: opens the stream: `Endpoint.open` of the carrier that reaches the peer.
        """
        me = self._identity.name
        self._sequences[peer] += 1
        wire = to_wire(tensor.vector.tensor.dtype)
        request = v1.Tensor(tag=tag, elems=len(tensor), dtype=wire, sequence=self._sequences[peer])
        with tensor.borrowed(write=False, to=f"{me}: send to {peer}, tag {tag}") as elements:
            stream = await open_stream(peer, "tensor", request)
            try:
                stream.send_early()
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

    async def recv(self, peer: str, tag: int, into: Span, silence_s: float) -> None:
        """See `Endpoint.recv`."""
        me = self._identity.name
        with into.borrowed(write=True, to=f"{me}: recv from {peer}, tag {tag}") as elements:
            try:
                arrival = await self._runtime.within(silence_s, self._mailbox.take((peer, tag)))
            except TimeoutError:
                message = f"nothing came for {me} under tag {tag} in {silence_s:g} s"
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
            """The place of a piece that was cut as `send` cuts; others are copied."""
            start = chunk.index * step
            return elements[start : start + chunk.elems] if start < elements.numel() else None

        stream.land(place)
        while (received := await stream.recv(silence_s)) is not None:
            chunk, payload = received.frame.chunk, received.payload
            if payload is None or payload.dtype != elements.dtype or filled + chunk.elems > elements.numel():
                raise self._bad(f"chunk {chunk.index} of tensor {request.tag} does not fit")
            if not received.landed:
                copy_elements(elements[filled : filled + chunk.elems], payload)
            elif chunk.index * step != filled:
                raise self._bad(f"chunk {chunk.index} of tensor {request.tag} is not the next one")
            filled += chunk.elems
        if filled != elements.numel():
            raise self._bad(
                f"tensor {request.tag} from {stream.peer} ended after {filled} elements: "
                f"expected {elements.numel()}"
            )
        await stream.send(v1.Frame(body=v1.Body()))

    async def serve(self, stream: Stream) -> None:
        """Serves a stream of method "tensor": holds it until a `recv` has taken it and is done."""
        assert isinstance(stream, StreamCore)
        request, opened = v1.Tensor.FromString(stream.opened.body), stream.opened
        gone = not self._mailbox.knows(opened.sender, opened.incarnation)
        if gone and opened.epoch <= self._identity.epoch:  # this node does not know a later epoch yet
            text = f"{opened.sender} (incarnation {opened.incarnation:x}) has left the run; join again"
            raise RefusedError(self._identity.name, "NOT_MEMBER", text)
        if not self._mailbox.first_time(opened.sender, opened.incarnation, request.sequence):
            raise self._bad(f"tensor {request.tag} number {request.sequence} was delivered before")
        key, arrival = (opened.sender, request.tag), ReceivedTensor(stream, request)
        stream.on_release(arrival.finish)
        parked = not self._mailbox.offer(key, arrival)
        try:
            while parked and not arrival.done.done():
                with suppress(TimeoutError):
                    await self._runtime.within(PARKED_S, asyncio.shield(arrival.done))
                    break
                await stream.waiting([f"{self._identity.name}: no recv posted for tag {request.tag}"])
            await arrival.done
        finally:
            self._mailbox.withdraw(key, arrival)

    def _bad(self, message: str) -> RefusedError:
        return RefusedError(self._identity.name, "BAD_REQUEST", message)
