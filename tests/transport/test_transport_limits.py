"""What one peer may have of a node: streams, bytes, refusals. Everything counted comes back to nothing."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from gradstream.errors import ClosedError, GradstreamError, PeerLostError, RefusedError
from gradstream.runtime import RealRuntime
from gradstream.testing.pairs import SECRET, Run, grpc_pairs, memory_pairs, shm_pairs, tcp_pairs
from gradstream.testing.pieces import (
    HeldReference,
    MakePair,
    Pair,
    body_frame,
    chunk_frame,
    echo,
    numbered,
    reply_once,
    take_chunk,
)
from gradstream.transport import endpoint as access_module
from gradstream.transport import limits as intake_module
from gradstream.transport.base import Caller, Identity, Priority, Stream
from gradstream.transport.endpoint import EndpointCore
from gradstream.transport.grpc.endpoint import GrpcEndpoint
from gradstream.transport.limits import LIMITS, MAX_FREE_BYTES, Intake, Intakes, Method, ReceiveQueue
from gradstream.transport.socket.tcp import TcpEndpoint
from gradstream.wire import v1
from gradstream.wire.frames import PROTOCOL

SECOND_NS = 10**9
PERIOD_NS = round(LIMITS.refusals_s * 1e9)
carriers = pytest.mark.parametrize(
    "carrier",
    [memory_pairs, grpc_pairs, tcp_pairs, partial(tcp_pairs, 3), shm_pairs],
    ids=["memory", "grpc", "tcp", "tcp, 3 connections", "shm"],
)
Carrier = Callable[[], tuple[Run, MakePair]]


# ---- the counts alone ---------------------------------------------------------------------


def test_too_many_refusals_in_a_period() -> None:
    intake = Intake(lambda: 0)
    assert [intake.refused(at) for at in range(LIMITS.refusals)] == [False] * (LIMITS.refusals - 1) + [True]
    last = LIMITS.refusals - 1
    assert intake.is_closed(last)
    assert intake.is_closed(last + PERIOD_NS - 1)
    assert not intake.is_closed(last + PERIOD_NS)
    assert not intake.refused(last + PERIOD_NS)  # it begins anew


def test_refusals_now_and_then_are_forgiven() -> None:
    intake = Intake(lambda: 0)
    step_ns = PERIOD_NS // (LIMITS.refusals - 1) + 1
    assert not any(intake.refused(step_ns * index) for index in range(10 * LIMITS.refusals))


def test_members_have_their_own_and_all_others_share_one() -> None:
    identity = Identity("job", "shard-0", 1)
    intakes = Intakes(identity, 16)
    early = intakes.of(Caller("worker-0", 1))
    identity.members = {"worker-0": 1, "worker-1": 2}
    assert intakes.of(Caller("worker-0", 1)) is early is not intakes.of(Caller("worker-1", 2))
    others = intakes.of(Caller("", 0))
    assert intakes.of(Caller("worker-7", 7)) is intakes.of(Caller("worker-8", 1)) is others
    assert intakes.of(Caller("worker-0", 7)) is others  # who takes the name of a member has nothing of its
    identity.members = {"worker-1": 2}
    assert intakes.of(Caller("worker-0", 1)) is others  # one that was lost


def test_many_names_are_worth_no_more_than_a_few() -> None:
    intakes = Intakes(Identity("job", "launcher", 1), 16)
    for index in range(1000):
        intakes.of(Caller(f"machine-{index}", 1)).num_streams = 1
    assert len(intakes._of) <= LIMITS.sessions + 2


def test_who_is_not_listened_to_is_remembered_among_many() -> None:
    intakes = Intakes(Identity("job", "launcher", 1), 16)
    bad = intakes.of(Caller("machine-bad", 1))
    for _ in range(LIMITS.refusals):
        bad.refused(0)
    for index in range(1000):
        intakes.of(Caller(f"machine-{index}", 1))
    assert intakes.of(Caller("machine-bad", 1)) is bad
    assert bad.is_closed(1)


def test_room_is_that_of_the_registered_models_chunks() -> None:
    identity = Identity("job", "shard-0", 1, chunk_bytes=4 << 20)
    intake = Intakes(identity, 16).of(Caller("worker-0", 1))
    allowed = LIMITS.unread_bytes + 4 * 16 * (4 << 20)
    assert intake.has_room(allowed) and not intake.has_room(allowed + 1)
    intake.unread_bytes = allowed
    assert intake.has_room(0) and not intake.has_room(1)


# ---- whatever ends a stream -----------------------------------------------------------------


async def until(pair: Pair, fact: Callable[[], object]) -> None:
    """Waits in the pair's own time until it is one."""
    while not fact():
        await pair.far_runtime.sleep(pair.tick_s / 10)


async def opened(pair: Pair, held: HeldReference, *, num_chunks: int = 3) -> tuple[Stream, Stream]:
    """A stream with chunks and bodies that nobody has taken, as both sides have it."""
    pair.far.serve("held", held)
    near = await pair.near.open("far", "held", v1.Tensor())
    for index in range(num_chunks):
        await near.send(chunk_frame(index, 100), numbered(index, 100))
    await near.send(body_frame(bytes(1000)))
    far = await held.arrived()
    intake = intake_of(pair)
    await until(pair, lambda: intake.unread_bytes == 400 * num_chunks + 1000)
    assert intake.num_streams == 1
    return near, far


async def answer_to(stream: Stream, *sent: tuple[v1.Frame, torch.Tensor | None]) -> object:
    """What comes back for frames; a refusal is raised by whichever call meets it first."""
    for frame, payload in sent:
        await stream.send(frame, payload)
    while await stream.recv(20) is not None:
        pass
    return None


def intake_of(pair: Pair) -> Intake:
    assert isinstance(pair.far, EndpointCore)
    return pair.far.access.intakes.of(Caller("near", 1))


async def both_end(pair: Pair) -> None:
    pair.far.serve("echo", echo)
    stream = await pair.near.open("far", "echo", v1.Tensor())
    await stream.send(chunk_frame(0, 100), numbered(0, 100))
    await take_chunk(stream)
    await stream.end()
    assert await stream.recv(20) is None


async def the_caller_cancels(pair: Pair) -> None:
    held = HeldReference()
    near, _ = await opened(pair, held)
    near.cancel("enough")
    await until(pair, lambda: not intake_of(pair).num_streams)
    held.released.set()


async def the_handler_reads_nothing_and_returns(pair: Pair) -> None:
    held = HeldReference()
    near, _ = await opened(pair, held)
    held.released.set()
    with suppress(ClosedError):  # its End may come first
        assert await near.recv(20) is None


async def the_caller_ends_and_nobody_reads(pair: Pair) -> None:
    held = HeldReference()
    near, _ = await opened(pair, held)
    await near.end()
    held.released.set()
    assert await near.recv(20) is None


async def the_handler_refuses(pair: Pair) -> None:
    held = HeldReference()
    near, far = await opened(pair, held)
    far.refuse(v1.STALE_EPOCH, "join again")
    with pytest.raises(RefusedError, match="STALE_EPOCH"):
        await near.recv(20)
    held.released.set()


async def the_handler_raises(pair: Pair) -> None:
    opened_one = asyncio.Event()

    async def fails(stream: Stream) -> None:
        await stream.recv(20)
        opened_one.set()
        raise PeerLostError("worker-9", "on purpose")

    pair.far.serve("held", fails)
    near = await pair.near.open("far", "held", v1.Tensor())
    for index in range(3):
        await near.send(chunk_frame(index, 100), numbered(index, 100))
    with pytest.raises(RefusedError, match="on purpose"):
        await answer_to(near)


async def the_caller_breaks_the_protocol(pair: Pair) -> None:
    held = HeldReference()
    near, _ = await opened(pair, held)
    with pytest.raises(RefusedError, match="BAD_REQUEST"):
        await answer_to(near, (chunk_frame(9, 8), numbered(9, 7)))
    held.released.set()


async def the_caller_dies(pair: Pair) -> None:
    held = HeldReference()
    await opened(pair, held)
    assert isinstance(pair.near, EndpointCore)
    await pair.near.abort()
    await until(pair, lambda: not intake_of(pair).num_streams)
    held.released.set()


async def it_is_turned_away(pair: Pair) -> None:
    with pytest.raises(RefusedError, match="UNKNOWN_METHOD"):
        await pair.near.call("far", "nonsense", v1.Tensor(), v1.Tensor)


ENDS = [
    both_end,
    the_caller_cancels,
    the_handler_reads_nothing_and_returns,
    the_caller_ends_and_nobody_reads,
    the_handler_refuses,
    the_handler_raises,
    the_caller_breaks_the_protocol,
    the_caller_dies,
    it_is_turned_away,
]


@carriers
@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
def test_nothing_is_counted_after_the_end(carrier: Carrier, end: Callable[[Pair], Awaitable[None]]) -> None:
    run, make_pair = carrier()

    async def main() -> None:
        async with make_pair() as pair:
            await end(pair)
            intake = intake_of(pair)
            await until(pair, lambda: (intake.num_streams, intake.unread_bytes) == (0, 0))
            assert isinstance(pair.far, EndpointCore)
            await until(pair, lambda: not pair.far._tasks)  # type: ignore[attr-defined]

    run(main())


def test_a_count_that_is_forgotten_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above fails where what was dropped is still counted."""
    monkeypatch.setattr(ReceiveQueue, "clear", lambda queue: queue._frames.clear())
    run, make_pair = memory_pairs()

    async def main() -> None:
        async with make_pair() as pair:
            await the_caller_cancels(pair)
            assert intake_of(pair).unread_bytes > 0

    run(main())


# ---- bodies and chunks ----------------------------------------------------------------------


@carriers
def test_long_bodies_need_credit(carrier: Carrier) -> None:
    run, make_pair = carrier()

    async def main() -> None:
        async with make_pair() as pair:
            held = HeldReference()
            pair.far.serve("held", held)
            near = await pair.near.open("far", "held", v1.Tensor())
            far = await held.arrived()
            sent = list[int]()

            async def send_all() -> None:
                for index in range(pair.window + 4):
                    await near.send(body_frame(bytes(LIMITS.free_body_bytes + 1)))
                    sent.append(index)

            sending = pair.runtime.spawn(send_all(), name="sender")
            await until(pair, lambda: len(sent) == pair.window)
            await near.send(body_frame(bytes(LIMITS.free_body_bytes)))  # a shorter one is free
            for _ in range(pair.window // 2):
                await far.recv(20)
            await sending
            held.released.set()

    run(main())


@carriers
def test_a_long_body_without_credit_is_refused(carrier: Carrier, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a caller that does not count."""
    run, make_pair = carrier()

    async def main() -> None:
        async with make_pair() as pair:
            held = HeldReference()
            pair.far.serve("held", held)
            near: Any = await pair.near.open("far", "held", v1.Tensor())
            await held.arrived()
            near._credit, long_body = 1000, body_frame(bytes(LIMITS.free_body_bytes + 1))
            with pytest.raises(RefusedError, match=r"BAD_REQUEST.*a body of 65537 bytes without credit"):
                await answer_to(near, *[(long_body, None)] * (pair.window + 1))
            held.released.set()

    run(main())


@carriers
def test_short_bodies_that_nobody_takes_are_bounded(carrier: Carrier) -> None:
    run, make_pair = carrier()

    async def main() -> None:
        async with make_pair() as pair:
            held = HeldReference()
            pair.far.serve("held", held)
            near = await pair.near.open("far", "held", v1.Tensor())
            await held.arrived()
            num_bodies = MAX_FREE_BYTES // LIMITS.free_body_bytes
            for _ in range(num_bodies):
                await near.send(body_frame(bytes(LIMITS.free_body_bytes)))
            intake = intake_of(pair)
            await until(pair, lambda: intake.unread_bytes == MAX_FREE_BYTES)
            with pytest.raises(RefusedError, match=r"BAD_REQUEST.*unread bytes of bodies"):
                await answer_to(near, (body_frame(b"x"), None))
            held.released.set()

    run(main())


@carriers
def test_what_waits_on_all_streams_together_is_bounded(
    carrier: Carrier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake_module, "LIMITS", replace(LIMITS, unread_bytes=100_000))
    monkeypatch.setattr(intake_module, "_CHUNK_BYTES", 0)
    run, make_pair = carrier()

    async def main() -> None:
        async with make_pair() as pair:
            released = asyncio.Event()

            async def hold(stream: Stream) -> None:
                await released.wait()

            pair.far.serve("held", hold)
            streams = [await pair.near.open("far", "held", v1.Tensor()) for _ in range(3)]
            intake = intake_of(pair)
            for stream in streams[:2]:
                await stream.send(chunk_frame(0, 12_000), numbered(0, 12_000))
            await until(pair, lambda: intake.unread_bytes == 96_000)
            with pytest.raises(RefusedError, match="OVER_LIMIT"):
                await answer_to(streams[2], (chunk_frame(0, 12_000), numbered(0, 12_000)))
            assert intake.unread_bytes == 96_000
            released.set()
            await until(pair, lambda: intake.unread_bytes == 0)

    run(main())


@carriers
def test_what_a_method_takes(carrier: Carrier) -> None:
    """No chunks where it has none, and no longer a request than it may have."""
    run, make_pair = carrier()

    async def main() -> None:
        async with make_pair() as pair:
            assert isinstance(pair.far, EndpointCore)
            pair.far.methods = {"held": Method(callers=frozenset({"near"}), members=False, request_bytes=100)}
            held = HeldReference()
            pair.far.serve("held", held)
            near: Any = await pair.near.open("far", "held", v1.Tensor())
            await held.arrived()
            with pytest.raises(RefusedError, match=r"BAD_REQUEST.*chunk 0 without credit"):
                await answer_to(near, (chunk_frame(0, 10), numbered(0, 10)))
            with pytest.raises(
                RefusedError, match=r"BAD_REQUEST.*a request of .* bytes, expected at most 100"
            ):
                await pair.near.call("far", "held", v1.Body(data=bytes(100)), v1.Body)
            held.released.set()

    run(main())


@carriers
def test_streams_of_one_peer_are_bounded(carrier: Carrier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access_module, "LIMITS", replace(LIMITS, streams=3))
    run, make_pair = carrier()

    async def main() -> None:
        async with make_pair() as pair:
            released, num_held = asyncio.Event(), list[int]()

            async def hold(stream: Stream) -> None:
                num_held.append(1)
                await released.wait()

            pair.far.serve("held", hold)
            streams = [await pair.near.open("far", "held", v1.Tensor()) for _ in range(3)]
            await until(pair, lambda: len(num_held) == 3)
            over = await pair.near.open("far", "held", v1.Tensor())
            with pytest.raises(RefusedError, match=r"OVER_LIMIT.*has 3 streams to far open already"):
                await over.recv(20)
            streams[0].cancel("make room")
            await until(pair, lambda: intake_of(pair).num_streams == 2)
            await pair.near.open("far", "held", v1.Tensor())
            await until(pair, lambda: len(num_held) == 4)
            released.set()

    run(main())


# ---- hanging up -----------------------------------------------------------------------------


class Clock(RealRuntime):
    """Real time, and a jump on top of it."""

    ahead_ns = 0

    def now(self) -> int:
        """See `RealRuntime.now`."""
        return super().now() + self.ahead_ns


def grpc_made(name: str) -> GrpcEndpoint:
    return GrpcEndpoint(Identity("job", name, 1, secret=SECRET), Clock(name))


def tcp_made(name: str) -> TcpEndpoint:
    return TcpEndpoint(Identity("job", name, 1, secret=SECRET), Clock(name))


@asynccontextmanager
async def three(make: Callable[[str], EndpointCore]) -> AsyncIterator[list[EndpointCore]]:
    """A shard and two workers that know it."""
    made = [make(name) for name in ("shard-0", "worker-0", "worker-1")]
    made[0].serve("reply", reply_once)
    made[0].serve("echo", echo)
    for one in made:
        await one.start()
    for one in made[1:]:
        one.know("shard-0", made[0].address)
    try:
        yield made
    finally:
        for one in made:
            await one.close()


async def call(one: EndpointCore) -> None:
    assert (await one.call("shard-0", "reply", v1.Tensor(tag=7), v1.Tensor, silence_s=20)).tag == 7


async def in_the_end(calls: Iterable[Awaitable[None]]) -> None:
    """What a call comes to that is made again for as long as the peer is lost."""
    for attempt in calls:
        try:
            return await attempt
        except PeerLostError:  # until the end of its connections has come
            continue


async def misbehave(one: EndpointCore, times: int) -> None:
    """Asks for what there is not."""
    for _ in range(times):
        with pytest.raises(RefusedError, match="UNKNOWN_METHOD"):
            await one.call("shard-0", "nonsense", v1.Tensor(), v1.Tensor)


@pytest.mark.parametrize("make", [grpc_made, tcp_made], ids=["grpc", "tcp"])
def test_who_is_refused_too_much_is_hung_up_on_and_heard_again(make: Callable[[str], EndpointCore]) -> None:
    async def main() -> None:
        async with three(make) as (shard, bad, good):
            held = await bad.open("shard-0", "echo", v1.Tensor())
            await held.send(body_frame(b"x"))
            await held.recv(20)
            await misbehave(bad, LIMITS.refusals - 1)
            await call(bad)
            await held.send(body_frame(b"y"))
            assert await held.recv(20) is not None
            try:
                await misbehave(bad, 1)
            except PeerLostError:
                pass  # the refusal that was once too often may go down with the connection
            with pytest.raises((PeerLostError, RefusedError)):
                await held.recv(20)
            with pytest.raises(
                RefusedError, match="refused too much to worker-0: it listens again within 10 s"
            ):
                await in_the_end(call(bad) for _ in itertools.count())
            await call(good)
            clock = shard.runtime
            assert isinstance(clock, Clock)
            clock.ahead_ns += PERIOD_NS
            await call(bad)
            assert shard.access.intakes.of(Caller("worker-0", 1)).num_streams <= 1

    asyncio.run(main())


@pytest.mark.parametrize("make", [grpc_made, tcp_made], ids=["grpc", "tcp"])
def test_who_speaks_for_another_is_blamed_itself(make: Callable[[str], EndpointCore]) -> None:
    async def main() -> None:
        async with three(make) as (shard, bad, good):
            await call(good)
            for _ in range(LIMITS.refusals):
                opened = v1.Open(
                    protocol=PROTOCOL, job="job", sender="worker-1", incarnation=1, method="reply"
                )
                with pytest.raises((RefusedError, PeerLostError)):
                    await bad.dial("shard-0", opened, Priority.CONTROL).recv(20)
            now_ns = shard.runtime.now()
            assert shard.access.intakes.of(Caller("worker-0", 1)).is_closed(now_ns)
            assert not shard.access.intakes.of(Caller("worker-1", 2)).is_closed(now_ns)
            await call(good)

    asyncio.run(main())


@pytest.mark.parametrize("make", [grpc_made, tcp_made], ids=["grpc", "tcp"])
def test_what_a_node_meets_that_goes_by_the_protocol_is_not_held_against_it(
    make: Callable[[str], EndpointCore],
) -> None:
    async def main() -> None:
        async with three(make) as (shard, worker, _):
            shard.identity.epoch = 3
            for _ in range(LIMITS.refusals + 10):
                with pytest.raises(RefusedError, match="STALE_EPOCH"):
                    await worker.call("shard-0", "reply", v1.Tensor(), v1.Tensor)
            worker.identity.epoch = 3
            await call(worker)

    asyncio.run(main())


@pytest.mark.parametrize("make", [grpc_made, tcp_made], ids=["grpc", "tcp"])
def test_who_comes_before_a_node_serves_its_method_is_heard_later(
    make: Callable[[str], EndpointCore],
) -> None:
    """Hundreds of ranks that are ready call one that is not: no refusal of these counts, whoever it blames."""

    async def main() -> None:
        async with three(make) as (_, early, late):
            early.know("worker-1", late.address)
            for _ in range(LIMITS.refusals + 10):
                with pytest.raises(RefusedError, match="serves no method 'exchange'"):
                    await early.call("worker-1", "exchange", v1.Tensor(), v1.Tensor)
            late.serve("exchange", reply_once)
            answer = await early.call("worker-1", "exchange", v1.Tensor(tag=7), v1.Tensor, silence_s=20)
            assert answer.tag == 7

    asyncio.run(main())


@pytest.mark.parametrize("make", [grpc_made, tcp_made], ids=["grpc", "tcp"])
@pytest.mark.parametrize("heard_late", [True, False])
def test_who_is_heard_of_as_a_member_after_it_has_called_has_a_members_room(
    make: Callable[[str], EndpointCore], heard_late: bool
) -> None:
    """A chunk may be longer than all that callers have together that are no members."""
    elems = LIMITS.others_unread_bytes // 4 + 1

    async def main() -> None:
        async with three(make) as (shard, worker, _):
            released = asyncio.Event()

            async def hold(stream: Stream) -> None:
                await released.wait()
                await stream.recv(20)

            shard.serve("push", hold)
            shard.identity.members, worker.identity.epoch = {}, 1
            others = shard.access.intakes.of(Caller("worker-0", 1))
            stream = await worker.open("shard-0", "push", v1.Push())
            if heard_late:
                await turned(lambda: others.num_streams == 1)
                await asyncio.sleep(0)  # its handler waits now
            shard.members_changed({"worker-0": 1})
            await stream.send(chunk_frame(0, elems), numbered(0, elems))
            mine = shard.access.intakes.of(Caller("worker-0", 1))
            await turned(lambda: mine.unread_bytes == 4 * elems)
            assert not others.unread_bytes
            released.set()
            await turned(lambda: mine.unread_bytes == 0)

    asyncio.run(asyncio.wait_for(main(), 60))


async def turned(fact: Callable[[], bool]) -> None:
    """Waits until a fact holds in the process that both ends are in."""
    while not fact():  # noqa: ASYNC110 - nothing rings when an intake changes
        await asyncio.sleep(0.001)


def test_strangers_by_name_share_their_refusals() -> None:
    """Once the members are known, names that are none add up; members are not counted with them."""
    run, make_pair = memory_pairs()

    async def main() -> None:
        async with make_pair() as pair:
            far = pair.far
            assert isinstance(far, EndpointCore)
            far.serve("reply", reply_once)
            far.identity.members = {"near": 1}
            for index in range(LIMITS.refusals):
                made_up = v1.Open(
                    protocol=PROTOCOL, job="job", sender=f"worker-{index}", method="reply", window=1
                )
                with pytest.raises(GradstreamError):
                    await pair.dial("far", made_up).recv(20)
            now_ns = far.runtime.now()
            assert far.access.intakes.of(Caller("worker-999", 0)).is_closed(now_ns)
            assert not far.access.intakes.of(Caller("near", 1)).is_closed(now_ns)

    run(main())
