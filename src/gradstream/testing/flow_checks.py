"""Conformance checks of the flow of frames: order, independence, credit and priority of streams."""

from __future__ import annotations

import statistics

import torch

from gradstream.errors import ClosedError
from gradstream.testing.pieces import (
    SILENCE_S,
    Check,
    ConformanceError,
    HeldReference,
    Pair,
    body_frame,
    chunk_frame,
    echo,
    expect,
    fill,
    numbered,
    ping,
    raises,
    reply_once,
    settle,
    sink_all,
    take_chunk,
)
from gradstream.transport.base import Priority, Stream
from gradstream.wire import v1
from gradstream.wire.frames import MAX_PAYLOAD_BYTES

PING_SHARE = 0.03
"""Share of a bulk transfer's time that the median control call beside it may take; a queued call takes half."""
PING_TIMES = 10
"""Alternative limit for short transfers: a multiple of the time of a call alone."""


async def order(pair: Pair) -> None:
    """Frames of one stream arrive in order, each once, both ways, chunks and bodies mixed."""
    num_frames = 200
    pair.far.serve("echo", echo)
    stream = await pair.near.open("far", "echo", v1.Tensor())

    async def send() -> None:
        for index in range(num_frames):
            if index % 3:
                await stream.send(chunk_frame(index, 5), numbered(index, 5))
            else:
                await stream.send(body_frame(str(index).encode()))
        await stream.end()

    async def receive() -> None:
        for index in range(num_frames):
            received = await take_chunk(stream)
            if index % 3:
                expect(received.frame.chunk.index == index, f"frame {index} is {received.frame}")
                expect(received.payload is not None, f"chunk {index} has no payload")
                assert received.payload is not None
                same = received.payload.tolist() == [float(index)] * 5
                expect(same, f"chunk {index} holds {received.payload.tolist()}")
            else:
                got = received.frame.body.data
                expect(got == str(index).encode(), f"frame {index} is {received.frame}")
        expect(await stream.recv(SILENCE_S) is None, "there is more than was sent")

    await pair.runtime.gather(send(), receive())


async def largest_chunk(pair: Pair) -> None:
    """A chunk of the protocol's greatest length arrives unchanged, both ways."""
    elems = MAX_PAYLOAD_BYTES // 8
    pair.far.serve("echo", echo)
    stream = await pair.near.open("far", "echo", v1.Tensor())
    sent = torch.arange(elems, dtype=torch.float64)
    await stream.send(chunk_frame(0, elems, dtype=v1.FLOAT64), sent, SILENCE_S)
    await stream.end()
    payload = (await take_chunk(stream)).payload
    expect(payload is not None and torch.equal(payload, sent), "it did not come back as it was sent")


async def independence(pair: Pair) -> None:
    """A stream that the other side does not read delays no other stream."""
    held = HeldReference()
    pair.far.serve("held", held)
    stuck = await pair.near.open("far", "held", v1.Tensor())
    filler = pair.runtime.spawn(fill(stuck, 10 * pair.window, []), name="filler")
    await held.arrived()
    await order(pair)
    expect(not filler.done(), "a sender went on although the other side does not read")
    stuck.cancel()
    await raises(ClosedError, filler, "sending on a cancelled stream")
    held.released.set()


async def credit(pair: Pair) -> None:
    """A sender stops at the window until the receiver takes chunks; then all arrive."""
    held, count, sent = HeldReference(), 4 * pair.window, list[int]()
    pair.far.serve("held", held)
    stream = await pair.near.open("far", "held", v1.Tensor())
    filler = pair.runtime.spawn(fill(stream, count, sent), name="filler")
    far_stream = await held.arrived()
    await settle(pair, sent, pair.window)
    for taken in range(count):
        received = await take_chunk(far_stream)
        expect(received.frame.chunk.index == taken, f"chunk {taken} is {received.frame}")
        expect(len(sent) <= taken + 2 + pair.window, f"{len(sent)} sent when {taken + 1} were taken")
    await filler
    held.released.set()


async def callers_window(pair: Pair) -> None:
    """The caller's window bounds what the called side sends."""
    window, count, sent = 3, 20, list[int]()

    async def flood(stream: Stream) -> None:
        await fill(stream, count, sent)

    pair.far.serve("flood", flood)
    stream = await pair.near.open("far", "flood", v1.Tensor(), window=window)
    await settle(pair, sent, window)
    for index in range(count):
        received = await take_chunk(stream)
        expect(received.frame.chunk.index == index, f"chunk {index} is {received.frame}")
    expect(await stream.recv(SILENCE_S) is None, "there is more than was sent")


async def credit_then_send(pair: Pair) -> None:
    """After `credit`, a send takes its payload over before other code runs."""
    pair.far.serve("echo", echo)
    stream = await pair.near.open("far", "echo", v1.Tensor())
    values = torch.zeros(8)
    for index in range(2 * pair.window):
        await stream.credit()
        values.fill_(index)
        await stream.send(chunk_frame(index, 8), values)
        values.fill_(-1)
        echoed = await take_chunk(stream)
        assert echoed.payload is not None
        expect(bool((echoed.payload == index).all()), f"chunk {index} changed after send: {echoed.payload}")


async def priority(pair: Pair) -> None:
    """A control call does not wait behind a bulk transfer."""
    piece = torch.zeros(262_144)
    num_chunks = -(-pair.bulk_bytes // piece.nbytes)
    pair.far.serve("sink", sink_all)
    pair.far.serve("ping", reply_once, model=False)
    await ping(pair, 3)  # connections are there

    async def bulk() -> float:
        begun = pair.runtime.now()
        stream = await pair.near.open("far", "sink", v1.Tensor(), priority=Priority.BULK)
        for index in range(num_chunks):
            await stream.send(chunk_frame(index, piece.numel()), piece)
        await stream.end()
        answer = await take_chunk(stream)
        expect(
            int(answer.frame.body.data) == num_chunks, f"{answer.frame.body.data!r} of {num_chunks} chunks"
        )
        return (pair.runtime.now() - begun) / 1e9

    async def pinged() -> float:
        begun = pair.runtime.now()
        await ping(pair, 1)
        return (pair.runtime.now() - begun) / 1e9

    idle_s = statistics.median([await pinged() for _ in range(5)])
    for _ in range(3):  # a busy machine may be late once; a carrier that queues is late each time
        transfer = pair.runtime.spawn(bulk(), name="bulk")
        await pair.runtime.sleep(pair.tick_s / 10)
        times_s = []
        while not transfer.done():
            times_s.append(await pinged())
        limit_s = max(PING_SHARE * await transfer, PING_TIMES * idle_s)
        expect(len(times_s) >= 5, f"{len(times_s)} pings passed during {pair.bulk_bytes} bytes")
        median_s = statistics.median(times_s)
        if median_s <= limit_s:
            return
    raise ConformanceError(
        f"a ping behind {pair.bulk_bytes} bytes takes {median_s * 1e3:.4g} ms (median, third attempt): "
        f"expected at most {limit_s * 1e3:.4g} ms, {PING_SHARE:.0%} of the time of the bytes, or of {PING_TIMES} "
        "idle pings"
    )


async def concurrent_calls(pair: Pair) -> None:
    """Fifty calls at once: each gets its own reply."""
    pair.far.serve("reply", reply_once)
    pair.near.serve("reply", reply_once)
    works = [pair.near.call("far", "reply", v1.Tensor(tag=tag), v1.Tensor) for tag in range(50)]
    works += [pair.far.call("near", "reply", v1.Tensor(tag=tag), v1.Tensor) for tag in range(50, 60)]
    replies = await pair.runtime.gather(*works)
    expect([reply.tag for reply in replies] == list(range(60)), f"replies are {[r.tag for r in replies]}")


CHECKS: tuple[Check, ...] = (
    order,
    largest_chunk,
    independence,
    credit,
    callers_window,
    credit_then_send,
    priority,
    concurrent_calls,
)
"""In the order in which they are run."""
