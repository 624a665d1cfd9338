"""`TaggedTensors`: tensors that nodes send each other by (node, tag), over streams of method "tensor"."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping

import torch

from gradstream.errors import DeadlineError, RefusedError
from gradstream.memory import Span
from gradstream.runtime.base import Runtime
from gradstream.transport.base import Caller, Identity, Stream
from gradstream.transport.mailbox import Mailbox, ReceivedTensor
from gradstream.transport.refusals import code_of
from gradstream.transport.stream import StreamCore
from gradstream.wire import v1
from gradstream.wire.dtypes import from_wire, to_wire

__all__ = ["PIECE_BYTES", "TaggedTensors"]

PIECE_BYTES = 1 << 20
"""Bytes of each chunk of a tagged tensor."""


class TaggedTensors:
    """Sends and receives tagged tensors of one node, over all of its carriers.

    Args:
        identity: identity of the node.
        runtime: runtime of the node.
    """

    def __init__(self, identity: Identity, runtime: Runtime) -> None:
        self._identity = identity
        self._runtime = runtime
        self._mailbox = Mailbox()
        self._sequences: Counter[str] = Counter()

    def members_changed(self, members: Mapping[str, int]) -> None:
        """Forgets what was kept for senders that are no longer members."""
        self._mailbox.keep_senders({Caller(*member) for member in members.items()})

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
        if not self._mailbox.offer(key, arrival):
            await stream.waiting([f"{self._identity.name}: no recv posted for tag {request.tag}"])
        stream.on_release(arrival.finish)
        try:
            await arrival.done
        finally:
            self._mailbox.withdraw(key, arrival)

    def _bad(self, message: str) -> RefusedError:
        return RefusedError(self._identity.name, "BAD_REQUEST", message)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copies a piece on this thread alone: torch would wake its other threads for one megabyte."""
    if not target.is_meta:
        target.numpy()[...] = source.numpy()
