"""Parts of the conformance checks: the pair under test, frames, and expectations."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

import torch

from gradstream.errors import GradstreamError
from gradstream.runtime.base import Runtime
from gradstream.transport.base import Endpoint, Received, Stream
from gradstream.wire import v1

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
