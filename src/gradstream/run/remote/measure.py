"""Measures the speed to a launcher and back: both sides of the measurement."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gradstream.errors import RefusedError
from gradstream.machine.description import machine_facts
from gradstream.runtime.base import Runtime
from gradstream.transport.base import Endpoint, Stream
from gradstream.wire import v1

CHUNK_BYTES = 1 << 20
MAX_CHUNKS = 512
SILENCE_S = 20.0


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """The speed of a link.

    Args:
        up_bytes_s, down_bytes_s: bytes per second to the launcher, and from it.
        facts: description of the launcher's machine.
    """

    up_bytes_s: float
    down_bytes_s: float
    facts: dict[str, str]


async def serve_measure(stream: Stream, request: v1.Measure) -> None:
    """The launcher's side: counts the bytes it receives, then sends as many chunks as requested."""
    received_bytes = 0
    while (received := await stream.recv(SILENCE_S)) is not None:
        if received.payload is not None:
            received_bytes += received.payload.numel() * received.payload.element_size()
    measured = v1.Measured(received_bytes=received_bytes, facts=machine_facts())
    await _send_chunks(stream, min(request.chunks, MAX_CHUNKS))
    await stream.send(v1.Frame(body=v1.Body(data=measured.SerializeToString())))


async def measure(runtime: Runtime, endpoint: Endpoint, peer: str, *, num_bytes: int) -> LinkSpeed:
    """Measures the speed of the link to a launcher with `num_bytes` each way.

    Raises:
        RefusedError: this machine does not know the run's token.
        PeerLostError, DeadlineError: the launcher is gone, or silent.
    """
    chunks = max(1, min(MAX_CHUNKS, num_bytes // CHUNK_BYTES))
    stream = await endpoint.open(peer, "measure", v1.Measure(chunks=chunks))
    begun = runtime.now()
    await _send_chunks(stream, chunks)
    await stream.end()
    turned: int | None = None
    measured = None
    while (received := await stream.recv(SILENCE_S)) is not None:
        turned = turned or runtime.now()  # the first chunk back: the launcher has received all
        if received.frame.HasField("body"):
            measured = v1.Measured.FromString(received.frame.body.data)
    ended = runtime.now()
    if measured is None or turned is None or measured.received_bytes != chunks * CHUNK_BYTES:
        raise RefusedError(peer, "INTERNAL", "the measurement ended early")
    total = chunks * CHUNK_BYTES
    back = (chunks - 1) * CHUNK_BYTES  # the first had arrived when the clock was read
    return LinkSpeed(
        up_bytes_s=total / max(turned - begun, 1) * 1e9,
        down_bytes_s=back / max(ended - turned, 1) * 1e9,
        facts=dict(measured.facts),
    )


async def _send_chunks(stream: Stream, count: int) -> None:
    elems = CHUNK_BYTES // 4
    payload = torch.rand(elems)  # random, so that no network compresses it
    for index in range(count):
        chunk = v1.Chunk(index=index, elems=elems, dtype=v1.FLOAT32)
        await stream.send(v1.Frame(chunk=chunk), payload, SILENCE_S)
