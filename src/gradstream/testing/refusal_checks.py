"""Conformance checks: the requests that an endpoint must refuse, and the codes of the refusals."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import torch

from gradstream.errors import ConfigError, DeadlineError, RefusedError
from gradstream.memory import Vector
from gradstream.testing.pieces import (
    SILENCE_S,
    Check,
    HeldReference,
    Pair,
    body_frame,
    chunk_frame,
    echo,
    expect,
    raises,
    reply_once,
    sink_all,
    take_chunk,
    until_closed,
)
from gradstream.transport.base import Stream
from gradstream.wire import v1
from gradstream.wire.frames import ABSENT, MAX_PAYLOAD_BYTES, PROTOCOL


async def _refused(pair: Pair, code: str, method: str = "reply", *words: str) -> None:
    work = pair.near.call("far", method, v1.Tensor(tag=1), v1.Tensor, silence_s=SILENCE_S)
    error = await raises(RefusedError, work, code)
    assert isinstance(error, RefusedError)
    expect(error.code == code, f"expected {code}, got {error}")
    expect(error.peer == "far", f"the error is about {error.peer}")
    for word in words:
        expect(word in str(error), f"{word!r} is missing: {error}")


async def identity(pair: Pair) -> None:
    """Another job, model, epoch, method or protocol is refused with a helpful message."""
    pair.far.serve("reply", reply_once)
    pair.far.serve("join", reply_once, model=False)
    mine, far = pair.near.identity, pair.far.identity
    mine.fingerprint, far.fingerprint, mine.epoch, far.epoch = 0xA, 0xA, 3, 3
    await pair.near.call("far", "reply", v1.Tensor(), v1.Tensor)
    await _refused(pair, "UNKNOWN_METHOD", "nonsense", "nonsense")
    mine.fingerprint = 0xB
    await _refused(pair, "BAD_FINGERPRINT", "reply", f"{0xA:016x}", f"{0xB:016x}")
    mine.fingerprint, mine.epoch = 0xA, 2
    await _refused(pair, "STALE_EPOCH", "reply", "3", "2")
    mine.fingerprint = 0xB
    await pair.near.call("far", "join", v1.Tensor(), v1.Tensor)
    mine.fingerprint, mine.epoch = 0xA, 4
    await pair.near.call("far", "reply", v1.Tensor(), v1.Tensor)
    right, mine.job = mine.job, "another"
    await _refused(pair, "BAD_JOB", "join", repr(right), "'another'")
    mine.job = right
    opened = v1.Open(protocol=PROTOCOL + 1, job=mine.job, sender="near", method="join", window=1)
    error = await raises(RefusedError, pair.dial("far", opened).recv(SILENCE_S), "another protocol")
    assert isinstance(error, RefusedError)
    expect(error.code == "BAD_PROTOCOL", f"expected BAD_PROTOCOL, got {error}")
    expect(str(PROTOCOL + 1) in error.reason and str(PROTOCOL) in error.reason, f"no versions: {error}")


async def bad_chunks(pair: Pair) -> None:
    """A chunk that is too large, or differs from its header, is refused."""
    too_many = MAX_PAYLOAD_BYTES // 4 + 1
    cases = [
        ("too large", chunk_frame(0, too_many), torch.zeros(too_many)),
        ("wrong dtype", chunk_frame(0, 8, dtype=v1.FLOAT64), torch.zeros(8)),
        ("no dtype", chunk_frame(0, 8, dtype=v1.DTYPE_UNSPECIFIED), torch.zeros(8)),
        ("too short", chunk_frame(0, 8), torch.zeros(7)),
        ("too long", chunk_frame(0, 8), torch.zeros(9)),
        ("no payload", chunk_frame(0, 8), None),
        ("absent with payload", chunk_frame(0, 8, flags=ABSENT), torch.zeros(8)),
    ]
    pair.far.serve("sink", sink_all)

    async def flood(frame: v1.Frame, payload: torch.Tensor | None) -> None:
        stream = await pair.near.open("far", "sink", v1.Tensor())
        await stream.send(frame, payload)
        await stream.recv(SILENCE_S)

    for name, frame, payload in cases:
        error = await raises(RefusedError, flood(frame, payload), name)
        assert isinstance(error, RefusedError)
        expect(error.code == "BAD_REQUEST", f"{name}: expected BAD_REQUEST, got {error}")


async def bad_answers(pair: Pair) -> None:
    """A caller also refuses a bad chunk from the called side, which learns of it."""
    held = HeldReference()
    pair.far.serve("held", held)
    stream = await pair.near.open("far", "held", v1.Tensor())
    far_stream = await held.arrived()
    await far_stream.send(chunk_frame(0, 8), torch.zeros(7))
    await raises(RefusedError, stream.recv(SILENCE_S), "a short chunk")
    await until_closed(pair.far_runtime, far_stream, pair.tick_s)
    held.released.set()


async def wrong_tensor(pair: Pair) -> None:
    """A tensor of another size or dtype than the receiver's is refused on both sides."""
    sent = Vector("sent", torch.ones(10))
    for into in (Vector("into", torch.zeros(9)), Vector("into", torch.zeros(10, dtype=torch.float64))):
        receiver = pair.runtime.spawn(pair.far.recv("near", 5, into.all), name="receiver")
        send = pair.near.send("far", 5, sent.all, silence_s=SILENCE_S)
        await raises(RefusedError, send, f"send of 10 float32 to {into.tensor.dtype}")
        await raises(RefusedError, receiver, f"recv of 10 float32 into {len(into)} {into.tensor.dtype}")
        expect(not (sent.lent or into.lent), "a span is still lent")
        expect(not into.tensor.any(), "refused elements were written")
    await _raises_config(pair.near.send("far", 5, Vector("ints", torch.zeros(3, dtype=torch.int32)).all))


async def _raises_config(work: Awaitable[object]) -> None:
    await raises(ConfigError, work, "send of int32")


async def absent(pair: Pair) -> None:
    """A chunk with the flag ABSENT arrives as None, and counts as a chunk."""
    pair.far.serve("echo", echo)
    stream = await pair.near.open("far", "echo", v1.Tensor())
    for index in range(2 * pair.window):
        await stream.send(chunk_frame(index, 100, flags=ABSENT))
        received = await take_chunk(stream)
        expect(received.payload is None, f"absent chunk {index} has a payload")
        expect(received.frame.chunk.index == index, f"chunk {index} is {received.frame}")


async def handler_errors(pair: Pair) -> None:
    """A handler that raises refuses its caller, after the frames it had sent; other streams go on."""

    def failing(error: Exception) -> Callable[[Stream], Awaitable[None]]:
        async def handler(stream: Stream) -> None:
            await stream.send(body_frame(b"first"))
            raise error

        return handler

    pair.far.serve("reply", reply_once)
    pair.far.serve("refusing", failing(RefusedError("far", "NON_FINITE", "element 3 is NaN")))
    pair.far.serve("failing", failing(DeadlineError("shard-1", "silent for 3 s")))
    for method, code, word in (
        ("refusing", "NON_FINITE", "element 3 is NaN"),
        ("failing", "INTERNAL", "silent for 3 s"),
    ):
        stream = await pair.near.open("far", method, v1.Tensor())
        expect((await take_chunk(stream)).frame.body.data == b"first", "what was sent before is lost")
        error = await raises(RefusedError, stream.recv(SILENCE_S), method)
        assert isinstance(error, RefusedError)
        expect(error.code == code and word in str(error), f"expected {code} {word!r}, got {error}")
        await raises(RefusedError, stream.send(body_frame()), "send on a refused stream")
    await pair.near.call("far", "reply", v1.Tensor(), v1.Tensor)


CHECKS: tuple[Check, ...] = (identity, bad_chunks, bad_answers, wrong_tensor, absent, handler_errors)
"""In the order in which they are run."""
