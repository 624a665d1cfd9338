"""Conformance checks of memory: its owner before and after each call."""

from __future__ import annotations

import torch

from gradstream.errors import (
    ClosedError,
    DeadlineError,
    LentMemoryError,
)
from gradstream.memory import Vector
from gradstream.testing.pieces import (
    SILENCE_S,
    Check,
    ConformanceError,
    HeldReference,
    Pair,
    chunk_frame,
    expect,
    fill,
    numbered,
    ping,
    raises,
    settle,
    take_chunk,
    until_closed,
)
from gradstream.wire import v1


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
        for one, other in zip(sent, got, strict=True):
            expect(torch.equal(one.tensor, other.tensor), f"{elems} elements arrived changed")
            expect(not (one.lent or other.lent), "a span is still lent")
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
