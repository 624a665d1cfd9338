"""Conformance checks of how streams end: regularly, by cancel, by deadline, and by the death of the peer."""

from __future__ import annotations

import torch

from gradstream.errors import ClosedError, DeadlineError, PeerLostError
from gradstream.memory import Vector
from gradstream.testing.pieces import (
    SILENCE_S,
    Check,
    HeldReference,
    Pair,
    body_frame,
    chunk_frame,
    expect,
    fill,
    numbered,
    ping,
    raises,
    take_chunk,
    until_closed,
)
from gradstream.transport.base import Stream
from gradstream.wire import v1


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


CHECKS: tuple[Check, ...] = (
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
