"""Conformance checks of streams: their flow (order, independence, credit, priority), and how they end."""

from __future__ import annotations

import statistics

import torch

from gradstream.errors import ClosedError, DeadlineError, PeerLostError
from gradstream.memory import Vector
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
    until_closed,
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


FLOW_CHECKS: tuple[Check, ...] = (
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


# ---- ending checks -----------------------------------------------------------------------
# Conformance checks of how streams end: regularly, by cancel, by deadline, and by the death of the peer.


async def ends(pair: Pair) -> None:
    """`end` ends one direction; frames sent before it are delivered first."""

    async def late(stream: Stream) -> None:
        expect((await take_chunk(stream)).frame.body.data == b"one", "the body before the end is missing")
        expect(await stream.recv(SILENCE_S) is None, "no end")
        for _ in range(3):
            await stream.send(body_frame(b"after the end"))

    pair.far.serve("late", late)
    stream = await pair.near.open("far", "late", v1.Tensor())
    await stream.send(body_frame(b"one"))
    await stream.end()
    await stream.end()
    await raises(ClosedError, stream.send(body_frame()), "sending after end")
    for _ in range(3):
        await take_chunk(stream)
    expect(await stream.recv(SILENCE_S) is None, "the stream does not end with its handler")
    expect(await stream.recv(SILENCE_S) is None, "the end does not last")


async def early_finish(pair: Pair) -> None:
    """A handler that returns early ends the stream; its answers arrive, and a blocked sender learns of it."""

    async def early(stream: Stream) -> None:
        await take_chunk(stream)
        await stream.send(body_frame(b"enough"))

    pair.far.serve("early", early)
    stream = await pair.near.open("far", "early", v1.Tensor())
    await raises(ClosedError, fill(stream, 10 * pair.window, []), "sending to a handler that has returned")
    expect((await take_chunk(stream)).frame.body.data == b"enough", "the answer was lost")
    expect(await stream.recv(SILENCE_S) is None, "no end")


async def cancel_by_caller(pair: Pair) -> None:
    """The called side learns of the cancel, and frames queued on either side are dropped."""
    held = HeldReference()
    pair.far.serve("held", held)
    stream = await pair.near.open("far", "held", v1.Tensor())
    far_stream = await held.arrived()
    for index in range(3):
        await stream.send(chunk_frame(index), numbered(index))
        await far_stream.send(chunk_frame(index), numbered(index))
    await ping(pair, 5)
    stream.cancel("changed its mind")
    await raises(ClosedError, stream.recv(SILENCE_S), "recv after cancel")
    await raises(ClosedError, stream.send(body_frame()), "send after cancel")
    error = await until_closed(pair.far_runtime, far_stream, pair.tick_s)
    expect(isinstance(error, ClosedError), f"the called side got {error!r}")
    expect("changed its mind" in str(error), f"the reason is missing: {error}")
    await raises(ClosedError, far_stream.recv(SILENCE_S), "recv of a cancelled stream")
    held.released.set()


async def cancel_by_called(pair: Pair) -> None:
    """The caller learns of the cancel."""

    async def leave(stream: Stream) -> None:
        await stream.send(chunk_frame(0), numbered(0))
        stream.cancel("no longer needed")

    pair.far.serve("leave", leave)
    stream = await pair.near.open("far", "leave", v1.Tensor())
    error = await until_closed(pair.runtime, stream, pair.tick_s)
    expect(isinstance(error, ClosedError), f"the caller got {error!r}")
    await raises(ClosedError, stream.recv(SILENCE_S), "recv of a cancelled stream")
    await raises(ClosedError, stream.send(chunk_frame(0), numbered(0)), "send on a cancelled stream")


async def deadline(pair: Pair) -> None:
    """Silence raises a DeadlineError that names the peer and the nodes that it waits for; the peer learns of it."""
    held, silence_s = HeldReference(), 4 * pair.tick_s
    pair.far.serve("held", held)
    stream = await pair.near.open("far", "held", v1.Tensor())
    far_stream = await held.arrived()
    await far_stream.waiting(["worker-9"])
    begun = pair.runtime.now()
    error = await raises(DeadlineError, stream.recv(silence_s), "recv from a silent peer")
    took_s = (pair.runtime.now() - begun) / 1e9
    expect(took_s >= 0.9 * silence_s, f"the deadline of {silence_s} s came after {took_s:.3f} s")
    assert isinstance(error, DeadlineError)
    expect(error.peer == "far", f"the error is about {error.peer}")
    expect("worker-9" in str(error), f"it does not name the node that the peer waits for: {error}")
    await raises(DeadlineError, stream.send(body_frame()), "send after the deadline")
    closed = await until_closed(pair.far_runtime, far_stream, pair.tick_s)
    expect(isinstance(closed, ClosedError), f"the called side got {closed!r}")
    held.released.set()


async def waiting_resets(pair: Pair) -> None:
    """A WAITING frame restarts the deadline: waiting is not silence."""

    async def slow(stream: Stream) -> None:
        for _ in range(6):
            await pair.far_runtime.sleep(2 * pair.tick_s)
            await stream.waiting(["worker-9"])
        await stream.send(body_frame(b"at last"))

    pair.far.serve("slow", slow)
    stream = await pair.near.open("far", "slow", v1.Tensor())
    received = await stream.recv(8 * pair.tick_s)
    expect(received is not None and received.frame.body.data == b"at last", f"got {received}")


async def sender_deadline(pair: Pair) -> None:
    """A tagged send to a peer that does not receive ends by its deadline; the error names the peer."""
    vector = Vector("x", torch.ones(10))
    work = pair.near.send("far", 1, vector.all, silence_s=4 * pair.tick_s)
    error = await raises(DeadlineError, work, "send that nobody receives")
    expect("far" in str(error), f"it does not name the peer: {error}")
    expect(not vector.lent, "the span is still lent")


async def peer_death(pair: Pair) -> None:
    """Frames that had arrived are delivered, then PeerLostError is raised; calls in flight and new ones fail."""
    held = HeldReference()
    pair.far.serve("held", held)
    stream = await pair.near.open("far", "held", v1.Tensor())
    far_stream = await held.arrived()
    for index in range(3):
        await far_stream.send(body_frame(str(index).encode()))
    expect((await take_chunk(stream)).frame.body.data == b"0", "the first frame is missing")
    await ping(pair, 5)
    begun = pair.runtime.now()
    await pair.kill_far()
    for index in (1, 2):
        got = (await take_chunk(stream)).frame.body.data
        expect(got == str(index).encode(), f"frame {index}, which had arrived, is {got!r}")
    error = await raises(PeerLostError, stream.recv(SILENCE_S), "recv from a dead peer")
    assert isinstance(error, PeerLostError)
    expect(error.peer == "far", f"the error is about {error.peer}")
    await raises(PeerLostError, stream.send(body_frame()), "send to a dead peer")
    work = pair.near.call("far", "ping", v1.Tensor(), v1.Tensor, silence_s=SILENCE_S)
    await raises(PeerLostError, work, "call to a dead peer")
    took_s = (pair.runtime.now() - begun) / 1e9
    expect(took_s < SILENCE_S, f"the death was noticed after {took_s:.1f} s")


async def unknown_peer(pair: Pair) -> None:
    """An unknown peer raises PeerLostError at first use, not at `open`."""
    stream = await pair.near.open("nobody", "echo", v1.Tensor())
    await raises(PeerLostError, stream.recv(SILENCE_S), "recv from nobody")


async def closing(pair: Pair) -> None:
    """`close` tells peers, is idempotent, and ends everything."""
    held = HeldReference()
    pair.far.serve("held", held)
    stream = await pair.near.open("far", "held", v1.Tensor())
    await held.arrived()
    await pair.far.close()
    await pair.far.close()
    error = await until_closed(pair.runtime, stream, pair.tick_s)
    expect(isinstance(error, ClosedError | PeerLostError), f"the peer got {error!r}")
    work = pair.near.call("far", "held", v1.Tensor(), v1.Tensor, silence_s=SILENCE_S)
    await raises(PeerLostError, work, "call to a closed endpoint")
    await raises(ClosedError, pair.far.open("near", "echo", v1.Tensor()), "open by a closed endpoint")


ENDING_CHECKS: tuple[Check, ...] = (
    ends,
    early_finish,
    cancel_by_caller,
    cancel_by_called,
    deadline,
    waiting_resets,
    sender_deadline,
    peer_death,
    unknown_peer,
    closing,
)
"""In the order in which they are run."""
