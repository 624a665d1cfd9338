"""Parts of the conformance checks: the pair under test, frames, and expectations."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

import torch

from gradstream.errors import ClosedError, DeadlineError, GradstreamError, LentMemoryError
from gradstream.memory import Vector
from gradstream.runtime.base import Runtime
from gradstream.transport.base import Endpoint, Received, Stream
from gradstream.wire import v1

# ---- pieces ------------------------------------------------------------------------------

LIMIT_S = 60.0
SILENCE_S = 20.0


class ConformanceError(AssertionError):
    """The carrier breaks a promise of `transport.base`."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two started endpoints of one job that know each other, named "near" and "far".

    Args:
        near: the calling endpoint.
        far: the called endpoint.
        runtime: runtime of near.
        far_runtime: runtime of far.
        kill_far: ends far as the death of its process would.
        dial: opens a stream from near with any Open.
        window: chunks that far holds for each stream.
        tick_s: seconds in which a few frames arrive.
        bulk_bytes: size of the bulk transfer.
    """

    near: Endpoint
    far: Endpoint
    runtime: Runtime
    far_runtime: Runtime
    kill_far: Callable[[], Awaitable[None]]
    dial: Callable[[str, v1.Open], Stream]
    window: int = 16
    tick_s: float = 0.05
    bulk_bytes: int = 300_000_000


MakePair = Callable[[], AbstractAsyncContextManager[Pair]]
Check = Callable[[Pair], Coroutine[Any, Any, None]]


def expect(fact: bool, message: str) -> None:
    """Raises ConformanceError with `message` unless `fact` is true."""
    if not fact:
        raise ConformanceError(message)


def chunk_frame(index: int, elems: int = 1, **fields: Any) -> v1.Frame:
    """A chunk's header."""
    fields.setdefault("dtype", v1.FLOAT32)
    return v1.Frame(chunk=v1.Chunk(index=index, elems=elems, **fields))


def body_frame(data: bytes = b"") -> v1.Frame:
    """A body."""
    return v1.Frame(body=v1.Body(data=data))


def numbered(index: int, elems: int = 1) -> torch.Tensor:
    """A payload in which every element is the index of its chunk."""
    return torch.full((elems,), float(index))


async def raises(kind: type[GradstreamError], work: Awaitable[object], where: str) -> GradstreamError:
    """Awaits work that must fail with this kind of error, and returns the error."""
    try:
        await work
    except GradstreamError as error:
        expect(isinstance(error, kind), f"{where}: expected {kind.__name__}, got {error!r}")
        return error
    raise ConformanceError(f"{where}: expected {kind.__name__}, nothing was raised")


async def take_chunk(stream: Stream) -> Received:
    """The next frame. Raises ConformanceError if the peer has ended instead."""
    received = await stream.recv(SILENCE_S)
    if received is None:
        raise ConformanceError(f"{stream.peer} ended where a frame was due")
    return received


async def echo(stream: Stream) -> None:
    """Sends everything back."""
    while (received := await stream.recv(SILENCE_S)) is not None:
        await stream.send(received.frame, received.payload)


async def reply_once(stream: Stream) -> None:
    """Answers a call with its own request."""
    await stream.send(body_frame(stream.opened.body))


async def sink_all(stream: Stream) -> None:
    """Counts chunks and answers with their number."""
    count = 0
    while await stream.recv(SILENCE_S) is not None:
        count += 1
    await stream.send(body_frame(str(count).encode()))


async def ping(pair: Pair, count: int) -> None:
    """Makes `count` round trips, in which other frames arrive."""
    pair.far.serve("ping", reply_once, model=False)
    for _ in range(count):
        await pair.near.call("far", "ping", v1.Tensor(), v1.Tensor, silence_s=SILENCE_S)


async def settle(pair: Pair, sent: list[int], expected: int) -> None:
    """Gives a sender time to send more than its credit; checks that it has sent `expected` chunks."""
    for _ in range(200):
        await ping(pair, 1)
        if len(sent) >= expected:
            break
    await ping(pair, 10)
    await pair.runtime.sleep(pair.tick_s)
    expect(len(sent) == expected, f"{len(sent)} chunks were sent under a window of {expected}")


class HeldReference:
    """A handler that waits until it is released, and keeps its stream for the check."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()
        self.released = asyncio.Event()
        self.stream: Stream | None = None

    async def __call__(self, stream: Stream) -> None:
        """Handles a stream: holds it until released."""
        self.stream = stream
        self.opened.set()
        await self.released.wait()

    async def arrived(self) -> Stream:
        """The stream, once there is one."""
        await self.opened.wait()
        assert self.stream is not None
        return self.stream


async def until_closed(runtime: Runtime, stream: Stream, tick_s: float) -> GradstreamError:
    """Waits until a stream is over, and returns its error."""
    for _ in range(200):
        try:
            await stream.waiting([])
        except GradstreamError as error:
            return error
        await runtime.sleep(tick_s)
    raise ConformanceError(f"the stream from {stream.peer} does not learn that it is over")


async def fill(stream: Stream, count: int, sent: list[int]) -> None:
    """Sends chunks, and adds the index of each to `sent` once the carrier has taken it over."""
    for index in range(count):
        await stream.send(chunk_frame(index, 64), numbered(index, 64))
        sent.append(index)


# ---- memory checks -----------------------------------------------------------------------
# Conformance checks of memory: its owner before and after each call.


async def tensors(pair: Pair) -> None:
    """Tagged send and recv work both ways, for sizes around a chunk, matched by tag, called in any order."""
    for elems in (0, 1, 262_143, 262_144, 262_145, 3_000_000):
        sent = [Vector("sent", torch.randn(elems)) for _ in range(2)]
        got = [Vector("got", torch.full((elems,), -1.0)) for _ in range(2)]
        await pair.runtime.gather(
            pair.near.send("far", 1, sent[0].all),
            pair.far.send("near", 2, sent[1].all),
            pair.near.recv("far", 2, got[1].all),
            pair.far.recv("near", 1, got[0].all),
        )
        for source, other in zip(sent, got, strict=True):
            expect(torch.equal(source.tensor, other.tensor), f"{elems} elements arrived changed")
            expect(not (source.lent or other.lent), "a span is still lent")
    doubles = Vector("sent", torch.randn(1000, dtype=torch.float64))
    into = Vector("got", torch.zeros(2000, dtype=torch.float64))
    await pair.runtime.gather(pair.near.send("far", 3, doubles.all), pair.far.recv("near", 3, into[500:1500]))
    expect(torch.equal(into.tensor[500:1500], doubles.tensor), "float64 elements arrived changed")
    expect(not into.tensor[:500].any() and not into.tensor[1500:].any(), "memory beside the span was written")


async def taken_over(pair: Pair) -> None:
    """Once `send` has returned, a write to the payload changes nothing that arrives."""
    held = HeldReference()
    pair.far.serve("held", held)
    stream = await pair.near.open("far", "held", v1.Tensor())
    vector = Vector("x", torch.ones(100_000))
    for index in range(pair.window):
        vector.tensor.fill_(index)
        await stream.send(chunk_frame(index, len(vector)), vector.all)
    vector.tensor.fill_(-1)
    far_stream = await held.arrived()
    for index in range(pair.window):
        received = await take_chunk(far_stream)
        assert received.payload is not None
        expect(bool((received.payload == index).all()), f"chunk {index} was changed after it was sent")
    held.released.set()


async def landing(pair: Pair) -> None:
    """A payload lies in the place that `land` has named, if it fits, or in the carrier's memory; `landed` tells."""
    held, memory = HeldReference(), torch.zeros(3, 64)
    pair.far.serve("held", held)
    stream = await pair.near.open("far", "held", v1.Tensor())
    far_stream = await held.arrived()
    far_stream.land(lambda chunk: memory[chunk.index] if chunk.index < 2 else None)
    for index, elems in ((0, 64), (1, 32), (2, 64)):  # the second does not fit, the third is not wanted
        await stream.send(chunk_frame(index, elems), numbered(index + 1, elems))
        received = await take_chunk(far_stream)
        payload = received.payload
        expect(payload is not None and bool((payload == index + 1).all()), f"chunk {index} arrived changed")
        if received.landed:
            expect(index == 0, f"chunk {index} has landed where it does not belong")
            expect(bool((memory[0] == 1).all()), "a payload that has landed is not in its place")
    expect(not memory[1:].any(), "the carrier wrote memory that no payload fits, or that was not named")
    await stream.send(chunk_frame(0, 64), numbered(7, 64))
    far_stream.cancel()
    memory.fill_(5)
    try:
        await fill(stream, 2 * pair.window, [])
    except ClosedError:
        pass
    await ping(pair, 5)
    expect(bool((memory == 5).all()), "memory was written after the stream was over")
    held.released.set()


async def lending(pair: Pair) -> None:
    """A lent span stays borrowed until the peer has released it, or can no longer receive it."""
    held, elems = HeldReference(), 100_000
    pair.far.serve("held", held)
    stream = await pair.near.open("far", "held", v1.Tensor())
    far_stream = await held.arrived()
    vector = pair.runtime.memory.allocate(elems, torch.float32, "lent", exchanged=True)
    for index in range(2 * pair.window):
        vector.tensor.fill_(index)
        lent = await stream.lend(chunk_frame(index, elems), vector.all)
        received = await take_chunk(far_stream)
        expect(vector.lent is not lent.returned, "the vector and the loan disagree on whether it is lent")
        expect(received.payload is not None and bool((received.payload == index).all()), "it arrived changed")
        del received
        await lent.back(SILENCE_S)
        expect(not vector.lent, "a span is still lent that has come back")
    lent = await stream.lend(chunk_frame(0, elems), vector.all)
    stream.cancel()
    await lent.back(SILENCE_S)
    expect(not vector.lent, "a span is still lent that nobody can read any more")
    await raises(ClosedError, stream.lend(chunk_frame(0, elems), vector.all), "lending on a cancelled stream")
    expect(not vector.lent, "a span is lent that was never sent")
    held.released.set()


async def lent_while_waiting(pair: Pair) -> None:
    """A span given to `recv` or to a blocked `send` is lent until the call returns."""
    held, sent, source, into = (
        HeldReference(),
        list[int](),
        Vector("source", torch.ones(64)),
        Vector("into", torch.zeros(64)),
    )
    pair.far.serve("held", held)
    stream = await pair.near.open("far", "held", v1.Tensor())
    receiver = pair.runtime.spawn(pair.near.recv("far", 7, into.all, silence_s=SILENCE_S), name="receiver")

    async def fill() -> None:
        for index in range(2 * pair.window):
            await stream.send(chunk_frame(index, 64), source.all)
            sent.append(index)

    filler = pair.runtime.spawn(fill(), name="filler")
    await held.arrived()
    await settle(pair, sent, pair.window)
    for vector in (source, into):
        try:
            vector.give_back(vector.borrow(0, 64, write=True, to="the check"))
        except LentMemoryError:
            continue
        raise ConformanceError(f"{vector.name} could be written while the carrier borrowed it")
    stream.cancel()
    await raises(ClosedError, filler, "a blocked send on a cancelled stream")
    await pair.far.send("near", 7, source.all, silence_s=SILENCE_S)
    await receiver
    expect(not (source.lent or into.lent), "a span is still lent")
    held.released.set()


async def ownership_after_deadline(pair: Pair) -> None:
    """After a deadline the memory is free at once, and late data is never written into it."""
    into, source = Vector("into", torch.zeros(8)), Vector("source", torch.ones(8))
    with into.all.borrowed(write=False, to="the check"):
        work = pair.near.recv("far", 7, into.all, silence_s=2 * pair.tick_s)
        await raises(LentMemoryError, work, "recv into what others read")
    work = pair.near.recv("far", 7, into.all, silence_s=2 * pair.tick_s)
    error = await raises(DeadlineError, work, "recv of what nobody sends")
    assert isinstance(error, DeadlineError)
    expect(error.peer == "far", f"the error is about {error.peer}")
    expect(not into.lent, "the span is still lent after the deadline")
    into.tensor.fill_(5)
    late = pair.far.send("near", 7, source.all, silence_s=2 * pair.tick_s)
    await raises(DeadlineError, late, "a send that comes too late")
    expect(into.tensor.tolist() == [5.0] * 8, f"late data was written: {into.tensor.tolist()}")


async def ownership_after_half(pair: Pair) -> None:
    """The same holds where the first half had arrived; the sender learns of the deadline."""
    into = Vector("into", torch.zeros(8))
    request = v1.Tensor(tag=8, elems=8, dtype=v1.FLOAT32, sequence=1000)
    stream = await pair.far.open("near", "tensor", request)
    await stream.send(chunk_frame(0, 4), numbered(1, 4))
    work = pair.near.recv("far", 8, into.all, silence_s=2 * pair.tick_s)
    await raises(DeadlineError, work, "recv of half a tensor")
    expect(not into.lent, "the span is still lent after the deadline")
    into.tensor.fill_(5)
    try:
        await stream.send(chunk_frame(1, 4), numbered(1, 4))
    except ClosedError:
        pass
    await until_closed(pair.far_runtime, stream, pair.tick_s)
    expect(into.tensor.tolist() == [5.0] * 8, f"late data was written: {into.tensor.tolist()}")


CHECKS: tuple[Check, ...] = (
    tensors,
    taken_over,
    landing,
    lending,
    lent_while_waiting,
    ownership_after_deadline,
    ownership_after_half,
)
"""In the order in which they are run."""
