"""What only shared memory has: loans, readers in place, peers that keep what they were lent, nothing left."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from gradstream.errors import ConfigError, LentMemoryError, PeerLostError, RefusedError
from gradstream.memory import Vector
from gradstream.memory.segments import SHARED_BYTES, Segment, SharedMemory
from gradstream.optim import SGD
from gradstream.runtime import RealRuntime
from gradstream.runtime.deadlines import Deadlines
from gradstream.server.aggregation import AggregationRule, EveryN, EveryPush
from gradstream.server.client.client import ServerClient
from gradstream.server.client.links import ShardLinks
from gradstream.server.client.push import Update
from gradstream.server.shard import executor
from gradstream.server.shard.config import ShardConfig
from gradstream.server.shard.service import ShardService
from gradstream.testing.pairs import SECRET
from gradstream.testing.pieces import HeldReference, chunk_frame, take_chunk
from gradstream.transport.base import Identity, Lent, Received, Stream
from gradstream.transport.carriers import ShmEndpoint
from gradstream.transport.shm.leases import ARENA_BYTES, Arena
from gradstream.transport.socket.unix import send_descriptors
from gradstream.transport.stream import StreamCore
from gradstream.wire import v1
from gradstream.wire.chunks import MAX_CHUNK_ELEMS, ChunkMap, Placement
from gradstream.wire.frames import to_wire

ELEMS = 1 << 16


def in_a_loop(work: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Runs a test on an event loop."""

    def test() -> None:
        asyncio.run(work())

    test.__name__ = work.__name__
    return test


# ---- memory -----------------------------------------------------------------------------


def test_places_of_an_arena_are_taken_again() -> None:
    arena = Arena(0, 4 << 20)
    first, second = arena.take(1 << 20), arena.take(1_000_000)
    assert first is not None and second is not None and first != second
    assert arena.take(2 << 20) is not None
    assert arena.take(1) is None, "there is no room"
    arena.give_back(first, 1 << 20)
    arena.give_back(second, 1_000_000)
    assert arena.take((1 << 20) - 5) == second, "the one that was given back last"
    assert arena.take(2 << 20) is None, "two places are not joined"


def test_exchanged_vectors_lie_in_segments_that_go_with_them() -> None:
    memory = SharedMemory()
    own = memory.allocate(SHARED_BYTES, torch.float32, "own")
    small = memory.allocate(SHARED_BYTES // 4 - 1, torch.float32, "small", exchanged=True)
    assert own.home is None and small.home is None
    vector = memory.allocate(SHARED_BYTES // 4, torch.float32, "gradient", exchanged=True)
    assert memory.allocated_bytes["gradient"] == SHARED_BYTES
    assert isinstance(vector.home, Segment)
    descriptor = vector.home.fd
    view = vector.tensor[3:5]
    view.fill_(7)
    del vector
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    assert view.tolist() == [7, 7], "a tensor keeps its memory"


def test_segments_of_others_are_looked_at_before_they_are_mapped() -> None:
    with open("/dev/zero", "rb") as file, pytest.raises(ConfigError, match="sealed"):
        Segment.attach(os.dup(file.fileno()))
    with Segment.create(4096, "small") as segment:
        with pytest.raises(ConfigError, match="at least 8192"):
            Segment.attach(os.dup(segment.fd), 8192)
        other = Segment.attach(os.dup(segment.fd), writable=False)
        segment.bytes[5] = 9
        assert other.bytes[5] == 9 and other.bytes.readonly
        other.close()


# ---- loans ------------------------------------------------------------------------------


class Pair:
    """Two endpoints, a stream from near to far that far's end keeps open, and a vector of near's."""

    def __init__(self, near: ShmEndpoint, far: ShmEndpoint, stream: Stream, far_stream: Stream) -> None:
        self.near, self.far = near, far
        self.stream, self.far_stream = stream, far_stream
        self.vector = near.runtime.memory.allocate(ELEMS, torch.float32, "lent", exchanged=True)

    async def lend(self, index: int = 0, vector: Vector | None = None) -> tuple[Lent, Received]:
        """Lends the vector, or another. The first chunks are copied, until far has mapped it."""
        vector = self.vector if vector is None else vector
        dtype = to_wire(vector.tensor.dtype)
        for _ in range(100):
            lent = await self.stream.lend(chunk_frame(index, len(vector), dtype=dtype), vector.all)
            received = await take_chunk(self.far_stream)
            if not lent.returned:
                return lent, received
        raise AssertionError("the peer does not map the segment")


@asynccontextmanager
async def pair() -> AsyncIterator[Pair]:
    ends = [
        ShmEndpoint(
            Identity("job", name, os.getpid(), secret=SECRET), RealRuntime(name, memory=SharedMemory())
        )
        for name in ("near", "far")
    ]
    near, far = ends
    held = HeldReference()
    far.serve("held", held)
    for end in ends:
        await end.start()
    near.know("far", far.address)
    far.know("near", near.address)
    try:
        stream = await near.open("far", "held", v1.Tensor(), window=64)
        yield Pair(near, far, stream, await held.arrived())
    finally:
        for end in ends:
            await end.close()


@in_a_loop
async def test_a_lent_span_is_read_where_it_lies_until_it_is_let_go_of() -> None:
    async with pair() as both:
        lent, received = await both.lend()
        assert received.payload is not None
        both.vector.tensor.fill_(3)  # nobody may, while it is lent: it shows that nothing was copied
        assert bool((received.payload == 3).all())
        assert both.vector.lent
        part = received.payload[5:9]  # whatever is made of the payload keeps the loan
        del received
        with pytest.raises(LentMemoryError, match="lent to far"):
            both.vector.borrow(0, 1, write=True, to="somebody")
        assert not lent.returned
        del part
        await lent.back(20)
        assert not both.vector.lent


@in_a_loop
async def test_the_largest_chunk_is_lent_too() -> None:
    async with pair() as both:
        memory = both.near.runtime.memory
        vector = memory.allocate(MAX_CHUNK_ELEMS, torch.float64, "largest", exchanged=True)
        lent, received = await both.lend(vector=vector)
        assert received.payload is not None and len(received.payload) == MAX_CHUNK_ELEMS
        vector.tensor[-1] = 3  # as above
        assert received.payload[-1].item() == 3
        del received
        await lent.back(20)


@in_a_loop
async def test_payloads_that_lie_nowhere_are_copied_once_and_then_through_the_socket() -> None:
    async with pair() as both:
        piece = torch.zeros(1 << 20)
        count = ARENA_BYTES // piece.nbytes + 8
        kept = []
        for index in range(count):  # nobody lets go of any: the arena is full before the end
            await both.stream.send(chunk_frame(index, len(piece)), piece.fill_(index))
            kept.append((await take_chunk(both.far_stream)).payload)
        assert [payload[-1].item() for payload in kept if payload is not None] == list(range(count))


@in_a_loop
async def test_who_keeps_a_loan_for_too_long_is_hung_up_on() -> None:
    async with pair() as both:
        lent, received = await both.lend()
        await lent.back(0.02)
        assert not both.vector.lent
        assert received.payload is not None and len(received.payload) == ELEMS, "its mapping stays"
        stream = await both.near.open("far", "held", v1.Tensor())  # a new channel
        await stream.send(chunk_frame(0, ELEMS), both.vector.all)


@in_a_loop
async def test_what_was_taken_back_while_it_was_copied_is_not_believed() -> None:
    async with pair() as both:
        await both.lend()
        into = torch.zeros(ELEMS)

        def place(chunk: v1.Chunk) -> torch.Tensor:
            (channel,) = both.near._payload_channels._outgoing.values()  # type: ignore[union-attr]
            channel.close("the owner writes it, at this very moment")
            return into

        both.far_stream.land(place)
        await both.stream.lend(chunk_frame(1, ELEMS), both.vector.all)
        with pytest.raises(PeerLostError, match="memory that it shared is gone"):
            await both.far_stream.recv(20)


@in_a_loop
async def test_a_loan_whose_frame_never_came_is_returned() -> None:
    async with pair() as both:
        lent, received = await both.lend()
        del received
        await lent.back(20)
        lost = await both.stream.lend(chunk_frame(1, ELEMS), both.vector.all)
        both.stream.cancel("before it has left")
        assert not lost.returned
        await lost.back(20)
        assert not both.vector.lent


BAD = {
    "no such segment": {"segment": 77},
    "begins outside": {"offset_bytes": 1 << 40},
    "ends outside": {"offset_bytes": 64},
    "not aligned": {"offset_bytes": 3, "size_bytes": 4 * ELEMS - 16},
    "smaller than it says": {"size_bytes": 4 * ELEMS - 16},
    "nothing": {"size_bytes": 0},
}


@pytest.mark.parametrize("wrong", BAD.values(), ids=BAD)
def test_references_are_checked_against_what_was_mapped(wrong: dict[str, int]) -> None:
    async def main() -> None:
        async with pair() as both:
            lent, received = await both.lend()
            del received
            await lent.back(20)
            (channel,) = both.near._payload_channels._outgoing.values()  # type: ignore[union-attr]
            assert isinstance(both.vector.home, Segment) and isinstance(both.stream, StreamCore)
            right = {"segment": both.vector.home.number, "size_bytes": 4 * ELEMS}
            reference = v1.Reference(channel=channel.number, loan=1000, **(right | wrong))
            chunk = v1.Chunk(index=1, elems=ELEMS, dtype=v1.FLOAT32, reference=reference)
            both.stream._carrier.transmit(v1.Frame(chunk=chunk), None)
            with pytest.raises(RefusedError, match="BAD_REQUEST"):
                await both.stream.recv(20)

    asyncio.run(main())


@in_a_loop
async def test_a_reference_without_shared_memory_is_refused() -> None:
    async with pair() as both:
        both.near._payload_channels.close()  # type: ignore[union-attr]
        assert isinstance(both.stream, StreamCore)
        chunk = v1.Chunk(elems=ELEMS, dtype=v1.FLOAT32, reference=v1.Reference(size_bytes=4 * ELEMS))
        both.stream._carrier.transmit(v1.Frame(chunk=chunk), None)
        with pytest.raises(PeerLostError, match="memory that it shared is gone"):
            await both.far_stream.recv(20)


HELLO = v1.Lending.Hello(job="job", sender="stranger", incarnation=1, channel=1)
STRANGERS = {
    "noise": [b"\xff" * 9],
    "another job": [v1.Lending(hello=v1.Lending.Hello(job="other", sender="x")).SerializeToString()],
    "nothing but a segment": [v1.Lending(segment=3).SerializeToString()],
    "noise behind a hello": [v1.Lending(hello=HELLO).SerializeToString(), b"\xff" * 9],
    "two hellos": [v1.Lending(hello=HELLO).SerializeToString()] * 2,
}


@pytest.mark.parametrize("packets", STRANGERS.values(), ids=STRANGERS)
def test_who_is_not_one_of_ours_is_sent_away(packets: list[bytes]) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with pair() as both:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
                stranger.setblocking(False)
                await loop.sock_connect(stranger, f"\0gradstream/{both.far.address}/memory")
                for packet in packets:
                    await loop.sock_sendall(stranger, packet)
                assert await loop.sock_recv(stranger, 100) == b""
            await both.lend()

    asyncio.run(main())


@in_a_loop
async def test_a_segment_that_is_not_sealed_ends_the_channel() -> None:
    async with pair() as both:
        await both.lend()
        (channel,) = both.near._payload_channels._outgoing.values()  # type: ignore[union-attr]
        descriptor = os.memfd_create("unsealed")
        os.ftruncate(descriptor, 8192)
        before = len(os.listdir("/proc/self/fd"))
        send_descriptors(channel._connection, v1.Lending(segment=500).SerializeToString(), [descriptor])
        for _ in range(100_000):
            if channel.closed:
                break
            await asyncio.sleep(0)
        os.close(descriptor)
        assert len(os.listdir("/proc/self/fd")) < before, "nothing is kept of it"
        stream = await both.near.open("far", "held", v1.Tensor())  # and over a new channel it goes on
        await stream.send(chunk_frame(0, ELEMS), both.vector.all)


# ---- the parameter server ---------------------------------------------------------------


PUSHED_ELEMS, PUSHED_CHUNK = 1 << 16, 1 << 15


@dataclass(frozen=True, slots=True)
class Served:
    """A shard that knows its parameters, all 1, and two workers."""

    service: ShardService
    client: ServerClient
    idler: ShmEndpoint
    ones: Vector

    async def push(self) -> None:
        await self.client.push_soon(Update(self.ones, samples=1, lr=1.0, base_version=[0, 0]))
        settled = asyncio.ensure_future(self.client.flush())
        await asyncio.wait({settled, self.service.executor.failure}, return_when=asyncio.FIRST_COMPLETED)
        if self.service.executor.failure.done():
            self.service.executor.failure.result()
        await settled
        assert not self.ones.lent, "a push is done when its vector is the worker's again"

    async def fetch(self) -> torch.Tensor:
        arrival = self.client.fetch_soon()
        await arrival.done()
        self.client.back_buffer = arrival.vector
        return arrival.vector.tensor

    async def kept(self) -> tuple[Stream, Received]:
        """The first chunk, lent to the other worker, who keeps it."""
        await self.service.executor.leases.gone(0)
        for _ in range(100):  # until it is lent what it reads
            stream = await self.idler.open("shard-0", "fetch", v1.Fetch(), window=1)
            kept = await take_chunk(stream)
            if any(not one.returned for one in self.service.executor.leases._lent.get(0, ())):
                break
        return stream, kept

    @property
    def parameters(self) -> torch.Tensor:
        return self.service.store.parameters.tensor


@asynccontextmanager
async def served(rule: AggregationRule) -> AsyncIterator[Served]:
    ends = {
        name: ShmEndpoint(
            Identity("job", name, index, fingerprint=1, secret=SECRET),
            RealRuntime(name, memory=SharedMemory()),
        )
        for index, name in enumerate(("shard-0", "worker-0", "worker-1"), start=1)
    }
    shard, worker, idler = ends.values()
    service = ShardService(shard.runtime, shard, ShardConfig(0, 1, rule, SGD(lr=1.0)))
    service.register(
        v1.ModelSpec(fingerprint=1, elems=PUSHED_ELEMS, dtype=v1.FLOAT32, chunk_elems=PUSHED_CHUNK)
    )
    for end in ends.values():
        await end.start()
        end.know("shard-0", shard.address)
    try:
        memory = worker.runtime.memory
        spare, ones = (
            memory.allocate(PUSHED_ELEMS, torch.float32, name, exchanged=True) for name in ("spare", "ones")
        )
        ones.tensor.fill_(1)
        chunks, deadlines = ChunkMap(PUSHED_ELEMS, PUSHED_CHUNK, 1), Deadlines(silence_s=20, retry_s=20)
        client = ServerClient(ShardLinks(worker.runtime, worker, Placement(0, 1), chunks, deadlines), spare)
        await client.assign(ones)
        yield Served(service, client, idler, ones)
    finally:
        for end in ends.values():
            await end.close()


def test_an_update_waits_for_its_readers_but_not_for_one_that_has_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asyncio.run(_reads_on(monkeypatch))


async def _reads_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(EveryPush()) as there:
        for _ in range(3):  # from the third on everything goes by reference
            await there.push()
            fetched = await there.fetch()
        assert bool((fetched == -2).all())
        stream, kept = await there.kept()
        monkeypatch.setattr(executor, "PATIENCE_S", 0.02)
        await there.push()
        assert bool((there.parameters == -3).all())
        assert kept.payload is not None and kept.payload[0] == -3, "it was lent, and is not what it was"
        following = await take_chunk(stream)  # by its stream, as copies
        assert following.payload is not None and bool((following.payload == -3).all())


def test_a_sum_grows_while_others_read_the_parameters() -> None:
    """And lets go of what was pushed, at once."""
    asyncio.run(_sums_up())


async def _sums_up() -> None:
    async with served(EveryN(3)) as there:
        for _ in range(6):
            await there.push()
        assert bool((await there.fetch() == -5).all())
        _, kept = await there.kept()
        await there.push()
        await there.push()
        assert bool((there.parameters == -5).all())
        assert kept.payload is not None and bool((kept.payload == -5).all()), "it waits for no reader"
        del kept
        await there.push()
        assert bool((there.parameters == -8).all())


# ---- processes that die -----------------------------------------------------------------


async def keep(stream: Stream) -> None:
    """Keeps what it gets, and lends back of its own memory."""
    mine = Vector("nothing", torch.empty(0))
    kept = []
    while (received := await stream.recv()) is not None:
        kept.append(received.payload)
        if not len(mine):
            mine = SharedMemory().allocate(ELEMS, torch.float32, "of the child", exchanged=True)
            mine.tensor.fill_(4)
        await stream.lend(received.frame, mine.all)


async def child() -> None:
    """The other process."""
    endpoint = ShmEndpoint(
        Identity("job", "child", os.getpid(), secret=SECRET), RealRuntime("child", memory=SharedMemory())
    )
    endpoint.serve("hold", keep)
    await endpoint.start()
    print(endpoint.address, flush=True)
    await asyncio.get_running_loop().create_future()


def python(code: str) -> subprocess.Popen[str]:
    """A process that can import this file."""
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)


@asynccontextmanager
async def with_child() -> AsyncIterator[tuple[subprocess.Popen[str], str, ShmEndpoint, Stream]]:
    process = python("import asyncio, test_transport_shm as t; asyncio.run(t.child())")
    assert process.stdout is not None
    endpoint = ShmEndpoint(
        Identity("job", "mother", os.getpid(), secret=SECRET), RealRuntime("mother", memory=SharedMemory())
    )
    with process:
        try:
            address = process.stdout.readline().strip()
            await endpoint.start()
            endpoint.know("child", address)
            yield process, address, endpoint, await endpoint.open("child", "hold", v1.Tensor())
        finally:
            process.kill()
            await endpoint.close()
            endpoint.runtime.close()  # type: ignore[attr-defined]


def sockets() -> str:
    """Names of all Unix sockets of this network namespace."""
    return Path("/proc/net/unix").read_text()


def maps(pid: int | str = "self") -> list[str]:
    """Shared segments that a process has mapped, by name."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [line.partition("/memfd:")[2] for line in lines if "/memfd:gradstream" in line]


def cpu_s(pid: int | str = "self") -> float:
    """CPU seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@in_a_loop
async def test_of_a_killed_process_nothing_is_left_and_its_loans_are_over() -> None:
    async with with_child() as (process, address, endpoint, stream):
        vector = endpoint.runtime.memory.allocate(ELEMS, torch.float32, "of the mother", exchanged=True)
        lents, payloads = [], []
        for index in range(50):
            lents.append(await stream.lend(chunk_frame(index, ELEMS), vector.all))
            payloads.append((await take_chunk(stream)).payload)
        assert not lents[-1].returned and vector.lent
        assert any("of the mother" in name for name in maps(process.pid))
        assert any("of the child" in name for name in maps())

        waited_s, used_s = time.monotonic(), cpu_s() + cpu_s(process.pid)
        await asyncio.sleep(1.5)  # both sides wait for each other
        used_s = cpu_s() + cpu_s(process.pid) - used_s
        assert used_s < 0.05 * 2 * (time.monotonic() - waited_s)

        process.send_signal(signal.SIGKILL)
        with pytest.raises(PeerLostError):
            await stream.recv(20)
        for one in lents:
            await one.back(20)
        process.wait()
        assert address not in sockets()
        assert payloads[-1] is not None and bool((payloads[-1] == 4).all()), "its memory is ours, too"
        del payloads, lents, one
        mine = endpoint.address
        assert mine in sockets()
    del vector, stream, endpoint
    gc.collect()
    assert mine not in sockets()
    assert not [name for name in maps() if "of the mother" in name or "of the child" in name]
    assert not [name for name in os.listdir("/dev/shm") if "gradstream" in name]


async def be_killed() -> None:
    """Has lent memory to a process of its own, says which, and waits."""
    async with with_child() as (process, _, endpoint, stream):
        vector = endpoint.runtime.memory.allocate(ELEMS, torch.float32, "of the victim", exchanged=True)
        for index in range(50):
            await stream.lend(chunk_frame(index, ELEMS), vector.all)
            await take_chunk(stream)
        print(process.pid, flush=True)
        await asyncio.get_running_loop().create_future()


def test_of_the_survivor_that_was_lent_to_nothing_is_left_either() -> None:
    """The other way round: the process that connected is killed; the one that serves goes on."""
    victim = python("import asyncio, test_transport_shm as t; asyncio.run(t.be_killed())")
    assert victim.stdout is not None
    with victim:
        survivor = int(victim.stdout.readline())
        try:
            assert any("of the victim" in name for name in maps(survivor))
            victim.send_signal(signal.SIGKILL)
            victim.wait()
            deadline = time.monotonic() + 20
            while any("of the victim" in name for name in maps(survivor)):  # its handler ends with its stream
                assert time.monotonic() < deadline, f"still mapped: {maps(survivor)}"
                time.sleep(0.01)
        finally:
            os.kill(survivor, signal.SIGKILL)
