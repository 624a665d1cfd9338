"""Conformance of a carrier: what `transport.base` promises, as checks that any endpoint passes.

A carrier brings a `MakePair`, which gives two endpoints that know each other, "near" and "far".
`check_endpoint` runs all of `CHECKS`; a test suite may run them one by one::

    async def test_order():
        await run_check(order, make_pair)

A check raises `ConformanceError` when a promise is broken; what an endpoint raises where it
should not comes through. Each takes bounded time: a carrier that loses a frame fails by deadline.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

import torch

from gradstream.errors import (
    ClosedError,
    ConfigError,
    DeadlineError,
    GradstreamError,
    LentMemoryError,
    PeerLostError,
    RefusedError,
)
from gradstream.memory import Vector
from gradstream.runtime.base import Runtime
from gradstream.transport.base import Endpoint, Priority, Received, Stream
from gradstream.wire import v1
from gradstream.wire.frames import ABSENT, MAX_PAYLOAD_BYTES, PROTOCOL

__all__ = ["CHECKS", "Check", "ConformanceError", "MakePair", "Pair", "check_endpoint", "run_check"]

LIMIT_S = 60.0
SILENCE_S = 20.0


class ConformanceError(AssertionError):
    """The carrier breaks a promise of `transport.base`."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two started endpoints of one job that know each other, named "near" and "far".

    Args:
        near: calls.
        far: is called.
        runtime: of near.
        far_runtime: of far.
        kill_far: ends far as the death of its process would.
        dial: opens a stream from near with an Open made by hand.
        window: chunks that far holds per stream.
        ping_s: the median round trip that a control call may take behind a bulk transfer.
        tick_s: enough time for a few frames to arrive.
        bulk_bytes: size of the bulk transfer.
    """

    near: Endpoint
    far: Endpoint
    runtime: Runtime
    far_runtime: Runtime
    kill_far: Callable[[], Awaitable[None]]
    dial: Callable[[str, v1.Open], Stream]
    window: int = 16
    ping_s: float = 5e-3
    tick_s: float = 0.05
    bulk_bytes: int = 300_000_000


MakePair = Callable[[], AbstractAsyncContextManager[Pair]]
Check = Callable[[Pair], Coroutine[Any, Any, None]]


async def check_endpoint(make_pair: MakePair) -> None:
    """Runs every check, each on a fresh pair.

    Raises:
        ConformanceError: a promise is broken; the message says which check found it.
    """
    for check in CHECKS:
        await run_check(check, make_pair)


async def run_check(check: Check, make_pair: MakePair) -> None:
    """Runs one check on a fresh pair, for `LIMIT_S` at most."""
    async with make_pair() as pair:
        try:
            await pair.runtime.within(LIMIT_S, check(pair))
        except TimeoutError as error:
            if isinstance(error, GradstreamError):
                raise
            raise ConformanceError(f"{check.__name__}: not done in {LIMIT_S:g} s") from None
        except ConformanceError as error:
            raise ConformanceError(f"{check.__name__}: {error}") from None


# ---- pieces -----------------------------------------------------------------------------------


def _expect(fact: bool, message: str) -> None:
    if not fact:
        raise ConformanceError(message)


def _chunk(index: int, elems: int = 1, **fields: Any) -> v1.Frame:
    fields.setdefault("dtype", v1.FLOAT32)
    return v1.Frame(chunk=v1.Chunk(index=index, elems=elems, **fields))


def _body(data: bytes = b"") -> v1.Frame:
    return v1.Frame(body=v1.Body(data=data))


def _number(index: int, elems: int = 1) -> torch.Tensor:
    return torch.full((elems,), float(index))


async def _raises(kind: type[GradstreamError], work: Awaitable[object], where: str) -> GradstreamError:
    try:
        await work
    except GradstreamError as error:
        _expect(isinstance(error, kind), f"{where}: expected {kind.__name__}, got {error!r}")
        return error
    raise ConformanceError(f"{where}: expected {kind.__name__}, nothing was raised")


async def _take(stream: Stream) -> Received:
    received = await stream.recv(SILENCE_S)
    if received is None:
        raise ConformanceError(f"{stream.peer} ended where a frame was due")
    return received


async def _echo(stream: Stream) -> None:
    """Sends everything back."""
    while (received := await stream.recv(SILENCE_S)) is not None:
        await stream.send(received.frame, received.payload)


async def _reply(stream: Stream) -> None:
    """Answers a call with its own request."""
    await stream.send(_body(stream.opened.body))


async def _sink(stream: Stream) -> None:
    """Counts chunks and answers with their number."""
    count = 0
    while await stream.recv(SILENCE_S) is not None:
        count += 1
    await stream.send(_body(str(count).encode()))


async def _ping(pair: Pair, count: int) -> None:
    """Round trips, and so time for other frames to arrive."""
    pair.far.serve("ping", _reply, model=False)
    for _ in range(count):
        await pair.near.call("far", "ping", v1.Tensor(), v1.Tensor, silence_s=SILENCE_S)


async def _settle(pair: Pair, sent: list[int], expected: int) -> None:
    """Gives a sender every chance to send more than it may; it must have sent `expected`."""
    for _ in range(200):
        await _ping(pair, 1)
        if len(sent) >= expected:
            break
    await _ping(pair, 10)
    await pair.runtime.sleep(pair.tick_s)
    _expect(len(sent) == expected, f"{len(sent)} chunks were sent under a window of {expected}")


class _Held:
    """A handler that does nothing until it is released, and keeps its stream for the check."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()
        self.released = asyncio.Event()
        self.stream: Stream | None = None

    async def __call__(self, stream: Stream) -> None:
        self.stream = stream
        self.opened.set()
        await self.released.wait()

    async def arrived(self) -> Stream:
        await self.opened.wait()
        assert self.stream is not None
        return self.stream


async def _until_closed(runtime: Runtime, stream: Stream, tick_s: float) -> GradstreamError:
    """Waits until a stream is known to be over."""
    for _ in range(200):
        try:
            await stream.waiting([])
        except GradstreamError as error:
            return error
        await runtime.sleep(tick_s)
    raise ConformanceError(f"the stream from {stream.peer} was not told that it is over")


# ---- order and flow ---------------------------------------------------------------------------


async def order(pair: Pair) -> None:
    """Frames of one stream arrive in order, each once, both ways, chunks and bodies mixed."""
    num_frames = 200
    pair.far.serve("echo", _echo)
    stream = await pair.near.open("far", "echo", v1.Tensor())

    async def send() -> None:
        for index in range(num_frames):
            if index % 3:
                await stream.send(_chunk(index, 5), _number(index, 5))
            else:
                await stream.send(_body(str(index).encode()))
        await stream.end()

    async def receive() -> None:
        for index in range(num_frames):
            received = await _take(stream)
            if index % 3:
                _expect(received.frame.chunk.index == index, f"frame {index} is {received.frame}")
                _expect(received.payload is not None, f"chunk {index} has no payload")
                assert received.payload is not None
                same = received.payload.tolist() == [float(index)] * 5
                _expect(same, f"chunk {index} holds {received.payload.tolist()}")
            else:
                got = received.frame.body.data
                _expect(got == str(index).encode(), f"frame {index} is {received.frame}")
        _expect(await stream.recv(SILENCE_S) is None, "there is more than was sent")

    await pair.runtime.gather(send(), receive())


async def independence(pair: Pair) -> None:
    """A stream that nobody reads does not hold up another."""
    held = _Held()
    pair.far.serve("held", held)
    stuck = await pair.near.open("far", "held", v1.Tensor())
    filler = pair.runtime.spawn(_fill(stuck, 10 * pair.window, []), name="filler")
    await held.arrived()
    await order(pair)
    _expect(not filler.done(), "a sender was not held back although nobody reads")
    stuck.cancel()
    await _raises(ClosedError, filler, "sending on a cancelled stream")
    held.released.set()


async def _fill(stream: Stream, count: int, sent: list[int]) -> None:
    for index in range(count):
        await stream.send(_chunk(index, 64), _number(index, 64))
        sent.append(index)


async def credit(pair: Pair) -> None:
    """A sender stops at the window until the receiver takes; then all arrives."""
    held, count, sent = _Held(), 4 * pair.window, list[int]()
    pair.far.serve("held", held)
    stream = await pair.near.open("far", "held", v1.Tensor())
    filler = pair.runtime.spawn(_fill(stream, count, sent), name="filler")
    far_stream = await held.arrived()
    await _settle(pair, sent, pair.window)
    for taken in range(count):
        received = await _take(far_stream)
        _expect(received.frame.chunk.index == taken, f"chunk {taken} is {received.frame}")
        _expect(len(sent) <= taken + 2 + pair.window, f"{len(sent)} sent when {taken + 1} were taken")
    await filler
    held.released.set()


async def callers_window(pair: Pair) -> None:
    """The caller's window bounds what the called side sends."""
    window, count, sent = 3, 20, list[int]()

    async def flood(stream: Stream) -> None:
        await _fill(stream, count, sent)

    pair.far.serve("flood", flood)
    stream = await pair.near.open("far", "flood", v1.Tensor(), window=window)
    await _settle(pair, sent, window)
    for index in range(count):
        received = await _take(stream)
        _expect(received.frame.chunk.index == index, f"chunk {index} is {received.frame}")
    _expect(await stream.recv(SILENCE_S) is None, "there is more than was sent")


async def credit_then_send(pair: Pair) -> None:
    """After `credit`, a send takes its payload over before anything else runs."""
    pair.far.serve("echo", _echo)
    stream = await pair.near.open("far", "echo", v1.Tensor())
    values = torch.zeros(8)
    for index in range(2 * pair.window):
        await stream.credit()
        values.fill_(index)
        await stream.send(_chunk(index, 8), values)
        values.fill_(-1)
        echoed = await _take(stream)
        assert echoed.payload is not None
        _expect(bool((echoed.payload == index).all()), f"chunk {index} changed after send: {echoed.payload}")


async def priority(pair: Pair) -> None:
    """A control call is not held up behind a bulk transfer."""
    piece = torch.zeros(262_144)
    num_chunks = -(-pair.bulk_bytes // piece.nbytes)
    pair.far.serve("sink", _sink)
    pair.far.serve("ping", _reply, model=False)
    await _ping(pair, 3)  # connections are there

    async def bulk() -> None:
        stream = await pair.near.open("far", "sink", v1.Tensor(), priority=Priority.BULK)
        for index in range(num_chunks):
            await stream.send(_chunk(index, piece.numel()), piece)
        await stream.end()
        answer = await _take(stream)
        _expect(
            int(answer.frame.body.data) == num_chunks, f"{answer.frame.body.data!r} of {num_chunks} chunks"
        )

    for _ in range(3):  # a busy machine may be late; a carrier that queues is so each time
        transfer = pair.runtime.spawn(bulk(), name="bulk")
        await pair.runtime.sleep(pair.tick_s / 10)
        times_s = []
        while not transfer.done():
            begun = pair.runtime.now()
            await _ping(pair, 1)
            times_s.append((pair.runtime.now() - begun) / 1e9)
        await transfer
        _expect(len(times_s) >= 5, f"{len(times_s)} pings passed during {pair.bulk_bytes} bytes")
        median_s = statistics.median(times_s)
        if median_s <= pair.ping_s:
            return
    raise ConformanceError(
        f"a ping behind {pair.bulk_bytes} bytes takes {median_s * 1e3:.2f} ms (median, third attempt): "
        f"expected at most {pair.ping_s * 1e3:g} ms"
    )


async def concurrent_calls(pair: Pair) -> None:
    """Fifty calls at once: each gets its own reply."""
    pair.far.serve("reply", _reply)
    pair.near.serve("reply", _reply)
    works = [pair.near.call("far", "reply", v1.Tensor(tag=tag), v1.Tensor) for tag in range(50)]
    works += [pair.far.call("near", "reply", v1.Tensor(tag=tag), v1.Tensor) for tag in range(50, 60)]
    replies = await pair.runtime.gather(*works)
    _expect([reply.tag for reply in replies] == list(range(60)), f"replies are {[r.tag for r in replies]}")


# ---- how streams end --------------------------------------------------------------------------


async def ends(pair: Pair) -> None:
    """`end` ends one direction; what was sent before it is delivered before it."""

    async def late(stream: Stream) -> None:
        _expect((await _take(stream)).frame.body.data == b"one", "the body before the end is missing")
        _expect(await stream.recv(SILENCE_S) is None, "no end")
        for _ in range(3):
            await stream.send(_body(b"after the end"))

    pair.far.serve("late", late)
    stream = await pair.near.open("far", "late", v1.Tensor())
    await stream.send(_body(b"one"))
    await stream.end()
    await stream.end()
    await _raises(ClosedError, stream.send(_body()), "sending after end")
    for _ in range(3):
        await _take(stream)
    _expect(await stream.recv(SILENCE_S) is None, "the stream does not end with its handler")
    _expect(await stream.recv(SILENCE_S) is None, "the end does not last")


async def early_finish(pair: Pair) -> None:
    """A handler that returns early ends the stream; its answers arrive, and a blocked sender learns of it."""

    async def early(stream: Stream) -> None:
        await _take(stream)
        await stream.send(_body(b"enough"))

    pair.far.serve("early", early)
    stream = await pair.near.open("far", "early", v1.Tensor())
    await _raises(ClosedError, _fill(stream, 10 * pair.window, []), "sending to a handler that has returned")
    _expect((await _take(stream)).frame.body.data == b"enough", "the answer was lost")
    _expect(await stream.recv(SILENCE_S) is None, "no end")


async def cancel_by_caller(pair: Pair) -> None:
    """The called side is told, and what is queued on either side is dropped."""
    held = _Held()
    pair.far.serve("held", held)
    stream = await pair.near.open("far", "held", v1.Tensor())
    far_stream = await held.arrived()
    for index in range(3):
        await stream.send(_chunk(index), _number(index))
        await far_stream.send(_chunk(index), _number(index))
    await _ping(pair, 5)
    stream.cancel("changed its mind")
    await _raises(ClosedError, stream.recv(SILENCE_S), "recv after cancel")
    await _raises(ClosedError, stream.send(_body()), "send after cancel")
    error = await _until_closed(pair.far_runtime, far_stream, pair.tick_s)
    _expect(isinstance(error, ClosedError), f"the called side got {error!r}")
    _expect("changed its mind" in str(error), f"the reason is missing: {error}")
    await _raises(ClosedError, far_stream.recv(SILENCE_S), "recv of a cancelled stream")
    held.released.set()


async def cancel_by_called(pair: Pair) -> None:
    """The caller is told."""

    async def leave(stream: Stream) -> None:
        await stream.send(_chunk(0), _number(0))
        stream.cancel("no longer needed")

    pair.far.serve("leave", leave)
    stream = await pair.near.open("far", "leave", v1.Tensor())
    error = await _until_closed(pair.runtime, stream, pair.tick_s)
    _expect(isinstance(error, ClosedError), f"the caller got {error!r}")
    await _raises(ClosedError, stream.recv(SILENCE_S), "recv of a cancelled stream")
    await _raises(ClosedError, stream.send(_chunk(0), _number(0)), "send on a cancelled stream")


async def deadline(pair: Pair) -> None:
    """Silence is a DeadlineError that names the peer and whom it waits for; the peer is told."""
    held, silence_s = _Held(), 4 * pair.tick_s
    pair.far.serve("held", held)
    stream = await pair.near.open("far", "held", v1.Tensor())
    far_stream = await held.arrived()
    await far_stream.waiting(["worker-9"])
    begun = pair.runtime.now()
    error = await _raises(DeadlineError, stream.recv(silence_s), "recv from a silent peer")
    took_s = (pair.runtime.now() - begun) / 1e9
    _expect(took_s >= 0.9 * silence_s, f"the deadline of {silence_s} s came after {took_s:.3f} s")
    assert isinstance(error, DeadlineError)
    _expect(error.peer == "far", f"the error is about {error.peer}")
    _expect("worker-9" in str(error), f"it does not say whom the peer waits for: {error}")
    await _raises(DeadlineError, stream.send(_body()), "send after the deadline")
    closed = await _until_closed(pair.far_runtime, far_stream, pair.tick_s)
    _expect(isinstance(closed, ClosedError), f"the called side got {closed!r}")
    held.released.set()


async def waiting_resets(pair: Pair) -> None:
    """A WAITING frame starts the deadline anew: waiting is not silence."""

    async def slow(stream: Stream) -> None:
        for _ in range(6):
            await pair.far_runtime.sleep(2 * pair.tick_s)
            await stream.waiting(["worker-9"])
        await stream.send(_body(b"at last"))

    pair.far.serve("slow", slow)
    stream = await pair.near.open("far", "slow", v1.Tensor())
    received = await stream.recv(8 * pair.tick_s)
    _expect(received is not None and received.frame.body.data == b"at last", f"got {received}")


async def sender_deadline(pair: Pair) -> None:
    """A tagged send to somebody who does not receive ends by its deadline, and names them."""
    vector = Vector("x", torch.ones(10))
    work = pair.near.send("far", 1, vector.all, silence_s=4 * pair.tick_s)
    error = await _raises(DeadlineError, work, "send that nobody receives")
    _expect("far" in str(error), f"it does not name the peer: {error}")
    _expect(not vector.lent, "the span is still lent")


async def peer_death(pair: Pair) -> None:
    """What had arrived is delivered, then PeerLostError; calls in flight and new ones fail too."""
    held = _Held()
    pair.far.serve("held", held)
    stream = await pair.near.open("far", "held", v1.Tensor())
    far_stream = await held.arrived()
    for index in range(3):
        await far_stream.send(_body(str(index).encode()))
    _expect((await _take(stream)).frame.body.data == b"0", "the first frame is missing")
    await _ping(pair, 5)
    begun = pair.runtime.now()
    await pair.kill_far()
    for index in (1, 2):
        got = (await _take(stream)).frame.body.data
        _expect(got == str(index).encode(), f"frame {index}, which had arrived, is {got!r}")
    error = await _raises(PeerLostError, stream.recv(SILENCE_S), "recv from a dead peer")
    assert isinstance(error, PeerLostError)
    _expect(error.peer == "far", f"the error is about {error.peer}")
    await _raises(PeerLostError, stream.send(_body()), "send to a dead peer")
    work = pair.near.call("far", "ping", v1.Tensor(), v1.Tensor, silence_s=SILENCE_S)
    await _raises(PeerLostError, work, "call to a dead peer")
    took_s = (pair.runtime.now() - begun) / 1e9
    _expect(took_s < 5.0, f"the death was noticed after {took_s:.1f} s")


async def unknown_peer(pair: Pair) -> None:
    """Nobody there is a PeerLostError at first use, not at `open`."""
    stream = await pair.near.open("nobody", "echo", v1.Tensor())
    await _raises(PeerLostError, stream.recv(SILENCE_S), "recv from nobody")


async def closing(pair: Pair) -> None:
    """`close` tells peers, is idempotent, and ends everything."""
    held = _Held()
    pair.far.serve("held", held)
    stream = await pair.near.open("far", "held", v1.Tensor())
    await held.arrived()
    await pair.far.close()
    await pair.far.close()
    error = await _until_closed(pair.runtime, stream, pair.tick_s)
    _expect(isinstance(error, ClosedError | PeerLostError), f"the peer got {error!r}")
    work = pair.near.call("far", "held", v1.Tensor(), v1.Tensor, silence_s=SILENCE_S)
    await _raises(PeerLostError, work, "call to a closed endpoint")
    await _raises(ClosedError, pair.far.open("near", "echo", v1.Tensor()), "open by a closed endpoint")


# ---- memory -----------------------------------------------------------------------------------


async def tensors(pair: Pair) -> None:
    """Tagged send and recv: sizes around the chunk's, both ways, matched by tag, posted in any order."""
    for elems in (0, 1, 262_143, 262_144, 262_145, 3_000_000):
        sent = [Vector("sent", torch.randn(elems)) for _ in range(2)]
        got = [Vector("got", torch.full((elems,), -1.0)) for _ in range(2)]
        await pair.runtime.gather(
            pair.near.send("far", 1, sent[0].all),
            pair.far.send("near", 2, sent[1].all),
            pair.near.recv("far", 2, got[1].all),
            pair.far.recv("near", 1, got[0].all),
        )
        for one, other in zip(sent, got, strict=True):
            _expect(torch.equal(one.tensor, other.tensor), f"{elems} elements arrived changed")
            _expect(not (one.lent or other.lent), "a span is still lent")
    doubles = Vector("sent", torch.randn(1000, dtype=torch.float64))
    into = Vector("got", torch.zeros(2000, dtype=torch.float64))
    await pair.runtime.gather(pair.near.send("far", 3, doubles.all), pair.far.recv("near", 3, into[500:1500]))
    _expect(torch.equal(into.tensor[500:1500], doubles.tensor), "float64 elements arrived changed")
    _expect(
        not into.tensor[:500].any() and not into.tensor[1500:].any(), "memory beside the span was written"
    )


async def taken_over(pair: Pair) -> None:
    """Once `send` has returned, writing the payload changes nothing that arrives."""
    held = _Held()
    pair.far.serve("held", held)
    stream = await pair.near.open("far", "held", v1.Tensor())
    vector = Vector("x", torch.ones(100_000))
    for index in range(pair.window):
        vector.tensor.fill_(index)
        await stream.send(_chunk(index, len(vector)), vector.all)
    vector.tensor.fill_(-1)
    far_stream = await held.arrived()
    for index in range(pair.window):
        received = await _take(far_stream)
        assert received.payload is not None
        _expect(bool((received.payload == index).all()), f"chunk {index} was changed after it was sent")
    held.released.set()


async def lent_while_waiting(pair: Pair) -> None:
    """A span given to `recv` or to a blocked `send` is lent until the call returns."""
    held, sent, source, into = (
        _Held(),
        list[int](),
        Vector("source", torch.ones(64)),
        Vector("into", torch.zeros(64)),
    )
    pair.far.serve("held", held)
    stream = await pair.near.open("far", "held", v1.Tensor())
    receiver = pair.runtime.spawn(pair.near.recv("far", 7, into.all, silence_s=SILENCE_S), name="receiver")

    async def fill() -> None:
        for index in range(2 * pair.window):
            await stream.send(_chunk(index, 64), source.all)
            sent.append(index)

    filler = pair.runtime.spawn(fill(), name="filler")
    await held.arrived()
    await _settle(pair, sent, pair.window)
    for vector in (source, into):
        try:
            vector.give_back(vector.borrow(0, 64, write=True, to="the check"))
        except LentMemoryError:
            continue
        raise ConformanceError(f"{vector.name} could be written while the carrier had it")
    stream.cancel()
    await _raises(ClosedError, filler, "a blocked send on a cancelled stream")
    await pair.far.send("near", 7, source.all, silence_s=SILENCE_S)
    await receiver
    _expect(not (source.lent or into.lent), "a span is still lent")
    held.released.set()


async def ownership_after_deadline(pair: Pair) -> None:
    """After a deadline the memory is free at once, and what arrives late is never written into it."""
    into, source = Vector("into", torch.zeros(8)), Vector("source", torch.ones(8))
    work = pair.near.recv("far", 7, into.all, silence_s=2 * pair.tick_s)
    error = await _raises(DeadlineError, work, "recv of what nobody sends")
    assert isinstance(error, DeadlineError)
    _expect(error.peer == "far", f"the error is about {error.peer}")
    _expect(not into.lent, "the span is still lent after the deadline")
    into.tensor.fill_(5)
    late = pair.far.send("near", 7, source.all, silence_s=2 * pair.tick_s)
    await _raises(DeadlineError, late, "a send that comes too late")
    _expect(into.tensor.tolist() == [5.0] * 8, f"late data was written: {into.tensor.tolist()}")


async def ownership_after_half(pair: Pair) -> None:
    """The same where the first half had arrived, and the sender is told."""
    into = Vector("into", torch.zeros(8))
    request = v1.Tensor(tag=8, elems=8, dtype=v1.FLOAT32, sequence=1000)
    stream = await pair.far.open("near", "tensor", request)
    await stream.send(_chunk(0, 4), _number(1, 4))
    work = pair.near.recv("far", 8, into.all, silence_s=2 * pair.tick_s)
    await _raises(DeadlineError, work, "recv of half a tensor")
    _expect(not into.lent, "the span is still lent after the deadline")
    into.tensor.fill_(5)
    try:
        await stream.send(_chunk(1, 4), _number(1, 4))
    except ClosedError:
        pass
    await _until_closed(pair.far_runtime, stream, pair.tick_s)
    _expect(into.tensor.tolist() == [5.0] * 8, f"late data was written: {into.tensor.tolist()}")


# ---- refusals ---------------------------------------------------------------------------------


async def _refused(pair: Pair, code: str, method: str = "reply", *words: str) -> None:
    work = pair.near.call("far", method, v1.Tensor(tag=1), v1.Tensor, silence_s=SILENCE_S)
    error = await _raises(RefusedError, work, code)
    assert isinstance(error, RefusedError)
    _expect(error.code == code, f"expected {code}, got {error}")
    _expect(error.peer == "far", f"the error is about {error.peer}")
    for word in words:
        _expect(word in str(error), f"{word!r} is missing: {error}")


async def identity(pair: Pair) -> None:
    """Another job, model, epoch, method or protocol is refused with a word that helps."""
    pair.far.serve("reply", _reply)
    pair.far.serve("join", _reply, model=False)
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
    error = await _raises(RefusedError, pair.dial("far", opened).recv(SILENCE_S), "another protocol")
    assert isinstance(error, RefusedError)
    _expect(error.code == "BAD_PROTOCOL", f"expected BAD_PROTOCOL, got {error}")
    _expect(str(PROTOCOL + 1) in error.reason and str(PROTOCOL) in error.reason, f"no versions: {error}")


async def bad_chunks(pair: Pair) -> None:
    """A chunk that is too large, or is not what its header says, is refused."""
    too_many = MAX_PAYLOAD_BYTES // 4 + 1
    cases = [
        ("too large", _chunk(0, too_many), torch.zeros(too_many)),
        ("wrong dtype", _chunk(0, 8, dtype=v1.FLOAT64), torch.zeros(8)),
        ("no dtype", _chunk(0, 8, dtype=v1.DTYPE_UNSPECIFIED), torch.zeros(8)),
        ("too short", _chunk(0, 8), torch.zeros(7)),
        ("too long", _chunk(0, 8), torch.zeros(9)),
        ("no payload", _chunk(0, 8), None),
        ("absent with payload", _chunk(0, 8, flags=ABSENT), torch.zeros(8)),
    ]
    pair.far.serve("sink", _sink)

    async def flood(frame: v1.Frame, payload: torch.Tensor | None) -> None:
        stream = await pair.near.open("far", "sink", v1.Tensor())
        await stream.send(frame, payload)
        await stream.recv(SILENCE_S)

    for name, frame, payload in cases:
        error = await _raises(RefusedError, flood(frame, payload), name)
        assert isinstance(error, RefusedError)
        _expect(error.code == "BAD_REQUEST", f"{name}: expected BAD_REQUEST, got {error}")


async def bad_answers(pair: Pair) -> None:
    """A caller refuses a bad chunk of the called side, too, and that side is told."""
    held = _Held()
    pair.far.serve("held", held)
    stream = await pair.near.open("far", "held", v1.Tensor())
    far_stream = await held.arrived()
    await far_stream.send(_chunk(0, 8), torch.zeros(7))
    await _raises(RefusedError, stream.recv(SILENCE_S), "a short chunk")
    await _until_closed(pair.far_runtime, far_stream, pair.tick_s)
    held.released.set()


async def wrong_tensor(pair: Pair) -> None:
    """A tensor of another size or dtype than the receiver's is refused on both sides."""
    sent = Vector("sent", torch.ones(10))
    for into in (Vector("into", torch.zeros(9)), Vector("into", torch.zeros(10, dtype=torch.float64))):
        receiver = pair.runtime.spawn(pair.far.recv("near", 5, into.all), name="receiver")
        send = pair.near.send("far", 5, sent.all, silence_s=SILENCE_S)
        await _raises(RefusedError, send, f"send of 10 float32 to {into.tensor.dtype}")
        await _raises(RefusedError, receiver, f"recv of 10 float32 into {len(into)} {into.tensor.dtype}")
        _expect(not (sent.lent or into.lent), "a span is still lent")
        _expect(not into.tensor.any(), "refused elements were written")
    await _raises_config(pair.near.send("far", 5, Vector("ints", torch.zeros(3, dtype=torch.int32)).all))


async def _raises_config(work: Awaitable[object]) -> None:
    await _raises(ConfigError, work, "send of int32")


async def absent(pair: Pair) -> None:
    """A chunk flagged absent arrives as None, and counts as a chunk."""
    pair.far.serve("echo", _echo)
    stream = await pair.near.open("far", "echo", v1.Tensor())
    for index in range(2 * pair.window):
        await stream.send(_chunk(index, 100, flags=ABSENT))
        received = await _take(stream)
        _expect(received.payload is None, f"absent chunk {index} has a payload")
        _expect(received.frame.chunk.index == index, f"chunk {index} is {received.frame}")


async def handler_errors(pair: Pair) -> None:
    """A handler that raises refuses its caller, after what it had sent, and hurts nobody else."""

    def failing(error: Exception) -> Callable[[Stream], Awaitable[None]]:
        async def handler(stream: Stream) -> None:
            await stream.send(_body(b"first"))
            raise error

        return handler

    pair.far.serve("reply", _reply)
    pair.far.serve("refusing", failing(RefusedError("far", "NON_FINITE", "element 3 is NaN")))
    pair.far.serve("failing", failing(DeadlineError("shard-1", "silent for 3 s")))
    for method, code, word in (
        ("refusing", "NON_FINITE", "element 3 is NaN"),
        ("failing", "INTERNAL", "silent for 3 s"),
    ):
        stream = await pair.near.open("far", method, v1.Tensor())
        _expect((await _take(stream)).frame.body.data == b"first", "what was sent before is lost")
        error = await _raises(RefusedError, stream.recv(SILENCE_S), method)
        assert isinstance(error, RefusedError)
        _expect(error.code == code and word in str(error), f"expected {code} {word!r}, got {error}")
        await _raises(RefusedError, stream.send(_body()), "send on a refused stream")
    await pair.near.call("far", "reply", v1.Tensor(), v1.Tensor)


CHECKS: tuple[Check, ...] = (
    order,
    independence,
    credit,
    callers_window,
    credit_then_send,
    priority,
    concurrent_calls,
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
    tensors,
    taken_over,
    lent_while_waiting,
    ownership_after_deadline,
    ownership_after_half,
    identity,
    bad_chunks,
    bad_answers,
    wrong_tensor,
    absent,
    handler_errors,
)
