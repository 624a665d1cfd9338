"""Carries the bytes of one connection through another one, or through a stream. Nobody reads them on the way."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

import torch

from gradstream.runtime.base import Runtime
from gradstream.transport.base import Stream
from gradstream.wire import v1

PIECE_BYTES = 128 << 10
"""The most bytes of a Chunk of a tunnel. With `endpoint.WINDOW` of them, a receiver holds 2 MB of each direction."""

ANSWER_S = 15.0
"""Seconds within which a node that is called by way of a relay answers."""

TICKET_BYTES = 16
"""Random bytes that name a tunnel."""

_WORD_BYTES = 4


class Line(NamedTuple):
    """One end of a connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


async def dial(host: str, port: int) -> Line:
    """A connection to an address. Raises OSError if nobody listens there."""
    return Line(*await asyncio.open_connection(host.strip("[]"), port, limit=PIECE_BYTES))


async def tunnel(runtime: Runtime, line: Line, stream: Stream, silence_s: float) -> None:
    """Carries a connection through a stream of Chunks, both ways, until both directions have ended.

    Args:
        runtime: runtime of this node.
        line: the connection; closed when this returns.
        stream: leads to the other end of the tunnel. It fails, and so does this, where that end is gone.
        silence_s: the longest time for which the stream may be silent while bytes wait for its credit.
    """
    try:
        await runtime.gather(_pack(line, stream, silence_s), _unpack(stream, line))
    except BaseException as error:
        stream.cancel(f"a connection through it has ended: {type(error).__name__}")
        raise
    finally:
        line.writer.close()


async def join(runtime: Runtime, one: Line, other: Line) -> None:
    """Carries what comes from one connection to the other, both ways, until both have ended; closes both."""
    try:
        await runtime.gather(_copy(one, other), _copy(other, one))
    finally:
        one.writer.close()
        other.writer.close()


async def _copy(source: Line, target: Line) -> None:
    while data := await source.reader.read(PIECE_BYTES):
        target.writer.write(data)
        await target.writer.drain()
    target.writer.close()


async def _pack(line: Line, stream: Stream, silence_s: float) -> None:
    """Chunks have whole words of 4 bytes; `sequence` says how many bytes of them count."""
    while data := await line.reader.read(PIECE_BYTES):
        words = bytearray(data + bytes(-len(data) % _WORD_BYTES))
        chunk = v1.Chunk(elems=len(words) // _WORD_BYTES, dtype=v1.FLOAT32, sequence=len(data))
        await stream.send(v1.Frame(chunk=chunk), torch.frombuffer(words, dtype=torch.float32), silence_s)
    await stream.end()


async def _unpack(stream: Stream, line: Line) -> None:
    while (received := await stream.recv()) is not None:
        if received.payload is not None:
            words = memoryview(received.payload.numpy()).cast("B")  # type: ignore[arg-type]
            line.writer.write(words[: received.frame.chunk.sequence])
            await line.writer.drain()
    line.writer.close()
