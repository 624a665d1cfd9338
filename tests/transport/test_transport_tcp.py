"""What only stream sockets have: strangers, half a payload, descriptors, peers that do not read."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import torch

from gradstream.errors import ClosedError, ConfigError, PeerLostError
from gradstream.memory import Vector
from gradstream.runtime import RealRuntime
from gradstream.testing.pairs import SECRET, tcp_pairs
from gradstream.testing.pieces import chunk_frame, echo, numbered, reply_once, take_chunk
from gradstream.transport.base import Identity, Stream
from gradstream.transport.socket import framing, multiplexer, tcp
from gradstream.transport.socket.connection import answer
from gradstream.transport.socket.framing import PREFIX, FrameReader, OutgoingFrame, PayloadPlace
from gradstream.transport.socket.tcp import TcpEndpoint, choose_congestion_control
from gradstream.wire import v1
from gradstream.wire.frames import MAX_PAYLOAD_BYTES
from kit.bare import Bare, BareSocket, Refused, packed


async def until(fact: Callable[[], object]) -> None:
    """Lets the loop turn until it is one; what runs on it cannot be waited for otherwise."""
    while not fact():  # noqa: ASYNC110
        await asyncio.sleep(0)


def endpoint(name: str = "node", **options: object) -> TcpEndpoint:
    return TcpEndpoint(Identity("job", name, 1, secret=SECRET), RealRuntime(name), **options)  # type: ignore[arg-type]


@asynccontextmanager
async def serving(
    method: str, handler: Callable[[Stream], Awaitable[None]], **options: object
) -> AsyncIterator[TcpEndpoint]:
    server = endpoint("server", **options)
    server.serve(method, handler)
    await server.start()
    try:
        yield server
    finally:
        await server.close()


async def still_serves(server: TcpEndpoint, **options: object) -> None:
    client = endpoint("client", **options)
    client.know("server", server.address)
    server.serve("reply", reply_once)
    assert (await client.call("server", "reply", v1.Tensor(tag=7), v1.Tensor)).tag == 7
    await client.close()


RAW = Bare(Identity("job", "raw", 5, secret=SECRET), called="server")
opening = RAW.opening


@asynccontextmanager
async def greeted(server: TcpEndpoint) -> AsyncIterator[BareSocket]:
    """A connection of a program of somebody else's that knows the secret."""
    async with BareSocket(server.address) as raw:
        await raw.greet(RAW)
        yield raw


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0", "192.0.2.1:7000"])
def test_other_interfaces_than_loopback_need_a_word(listen: str) -> None:
    with pytest.raises(ConfigError, match="neither encrypted"):
        endpoint(listen=listen)
    endpoint(listen=listen, insecure=True)


def test_a_port_in_use_names_the_address() -> None:
    async def main() -> None:
        async with serving("echo", echo) as server:
            with pytest.raises(ConfigError, match=rf"cannot listen on {server.address}.*the port is in use"):
                await endpoint("other", listen=server.address).start()

    asyncio.run(main())


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "localhost:0", "[::1]:0"])
def test_addresses_of_loopback(listen: str) -> None:
    async def main() -> None:
        async with serving("reply", reply_once, listen=listen) as server:
            await still_serves(server)

    if listen.startswith("["):
        try:
            socket.create_server(("::1", 0), family=socket.AF_INET6).close()
        except OSError as error:
            pytest.skip(f"this system has no IPv6 on loopback: {error}")
    asyncio.run(main())


@pytest.mark.parametrize("count", [0, 17])
def test_numbers_of_connections(count: int) -> None:
    with pytest.raises(ConfigError, match="expected from 1 to 16"):
        endpoint(connections=count)


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
        bytes(64),
        b"\xff" * 64,
        PREFIX.pack(0, 0, 5 << 20, 0),  # more than a greeting may have, and nothing is allocated for it
        PREFIX.pack(0, 0, 4, 0) + b"\xff\xff\xff\xff",
        packed(0, 0, v1.Frame(end=v1.End())),
        packed(1, 0, opening("echo")),
    ],
)
def test_strangers_are_sent_away(said: bytes) -> None:
    async def main() -> None:
        async with serving("echo", echo) as server, BareSocket(server.address) as raw:
            await raw.say(said)
            await raw.closed()
            await still_serves(server)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("bare", "said", "code"),
    [
        (replace(RAW, identity=replace(RAW.identity, job="other")), {}, v1.BAD_SECRET),
        (replace(RAW, called="another"), {}, v1.BAD_SECRET),
        (RAW, {"count": 99}, v1.BAD_REQUEST),
        (RAW, {"count": 0}, v1.BAD_REQUEST),
        (RAW, {"index": 1}, v1.BAD_REQUEST),
        (RAW, {"sender": ""}, v1.BAD_REQUEST),
    ],
)
def test_greetings_are_checked(bare: Bare, said: dict[str, object], code: v1.Code) -> None:
    async def main() -> None:
        async with serving("echo", echo) as server, BareSocket(server.address) as raw:
            with pytest.raises(Refused) as refused:
                await raw.greet(bare, **said)
            assert refused.value.refuse.code == code
            assert refused.value.refuse.message
            await raw.closed()
            await still_serves(server)

    asyncio.run(main())


def test_a_connection_belongs_to_who_greeted() -> None:
    async def main() -> None:
        async with serving("echo", echo) as server, greeted(server) as raw:
            await raw.say(packed(1, 0, opening("echo", sender="worker-0")))
            assert (await raw.hear())[1].refuse.code == v1.BAD_REQUEST
            await raw.say(packed(2, 0, opening("echo", incarnation=6)))
            assert (await raw.hear())[1].refuse.code == v1.BAD_REQUEST
            await raw.say(packed(3, 0, opening("echo")))
            assert (await raw.hear())[1].HasField("accept")

    asyncio.run(main())


@pytest.mark.parametrize(
    "said",
    [
        b"\xff" * 64,
        PREFIX.pack(1, 1, 4, 0) + b"\xff\xff\xff\xff",
        PREFIX.pack(1, 1, 6 << 20, 0),
        packed(1, 1, chunk_frame(0, 1), b"\x00", promised_bytes=1 << 30),
    ],
)
def test_garbage_later_breaks_the_connection(said: bytes) -> None:
    async def main() -> None:
        async with serving("echo", echo) as server, greeted(server) as raw:
            await raw.say(packed(1, 0, opening("echo")))
            await raw.hear()
            await raw.say(said)
            await raw.closed()
            await still_serves(server)

    asyncio.run(main())


def test_payloads_that_do_not_fit_are_skipped_and_others_go_on() -> None:
    async def main() -> None:
        async with serving("echo", echo) as server, greeted(server) as raw:
            await raw.say(packed(1, 0, opening("echo")), packed(2, 0, opening("echo")))
            await raw.say(
                packed(1, 1, chunk_frame(0, 1), bytes(MAX_PAYLOAD_BYTES + 4))
            )  # more than a chunk may have
            await raw.say(packed(2, 1, chunk_frame(3, 1), bytes(4)))
            awaited = {(1, "refuse"), (2, "chunk")}
            while awaited:
                stream, frame = await raw.hear()
                awaited.discard((stream, frame.WhichOneof("kind") or ""))

    asyncio.run(main())


def test_frames_out_of_order_are_put_in_order_and_twice_is_refused() -> None:
    async def main() -> None:
        async with serving("echo", echo) as server, greeted(server) as raw:
            await raw.say(packed(1, 0, opening("echo")))
            assert (await raw.hear())[1].HasField("accept")
            for number in (3, 2, 1):
                await raw.say(packed(1, number, chunk_frame(number, 1), bytes(4)))
            assert [(await raw.hear())[1].chunk.index for _ in range(3)] == [1, 2, 3]
            await raw.say(packed(1, 2, chunk_frame(2, 1), bytes(4)))
            assert (await raw.hear())[1].refuse.code == v1.BAD_REQUEST

    asyncio.run(main())


class Landed:
    """A stream whose chunks of 1000 elements land in memory of ours, sent by a raw program."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.stream: Stream | None = None
        self.opened, self.released = asyncio.Event(), asyncio.Event()

    async def __call__(self, stream: Stream) -> None:
        self.stream = stream
        stream.land(lambda chunk: self.memory if chunk.elems == len(self.memory) else None)
        self.opened.set()
        await self.released.wait()


async def half_a_chunk(raw: BareSocket, held: Landed) -> Stream:
    """Sends half of a chunk's payload, and returns when some of it has landed."""
    await raw.greet(RAW)
    await raw.say(packed(1, 0, opening("held")))
    await held.opened.wait()
    payload = bytes(torch.ones(1000).numpy())
    await raw.say(packed(1, 1, chunk_frame(0, 1000), payload[:2000], promised_bytes=4000))
    await until(lambda: held.memory.any())
    assert held.stream is not None
    return held.stream


def test_memory_is_not_touched_after_a_cancel() -> None:
    async def main() -> None:
        held = Landed(torch.zeros(1000))
        async with serving("held", held) as server, BareSocket(server.address) as raw:
            stream = await half_a_chunk(raw, held)
            stream.cancel("enough")
            held.memory.fill_(5)
            await raw.say(bytes(2000))
            await still_serves(server)
            assert bool((held.memory == 5).all())
            await raw.say(packed(2, 0, opening("held")))  # the connection goes on behind what was skipped
            kinds = [(await raw.hear())[1].WhichOneof("kind") for _ in range(3)]
            assert kinds == ["accept", "cancel", "accept"]
            held.released.set()

    asyncio.run(main())


def test_writing_after_a_cancel_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check above fails for a carrier that goes on filling memory."""
    monkeypatch.setattr(FrameReader, "abandon", lambda inbox, stream: None)
    with pytest.raises(AssertionError):
        test_memory_is_not_touched_after_a_cancel()


def test_chunks_land_where_they_are_wanted() -> None:
    async def main() -> None:
        held = Landed(torch.zeros(1000))
        async with serving("held", held) as server:
            client = endpoint("client")
            client.know("server", server.address)
            stream = await client.open("server", "held", v1.Tensor())
            await held.opened.wait()
            assert held.stream is not None
            await stream.send(chunk_frame(0, 1000), numbered(3, 1000))
            await stream.send(chunk_frame(1, 10), numbered(4, 10))
            first, second = await take_chunk(held.stream), await take_chunk(held.stream)
            assert first.landed and first.payload is held.memory
            assert bool((held.memory == 3).all())
            assert not second.landed and second.payload is not None
            assert second.payload.tolist() == [4.0] * 10
            held.released.set()
            await client.close()

    asyncio.run(main())


class Deaf:
    """A peer that accepts connections, grants credit, and then reads nothing until it is asked to."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.listener.setblocking(False)

    async def accept(self, window: int) -> socket.socket:
        loop = asyncio.get_running_loop()
        connected, _ = await loop.sock_accept(self.listener)
        await answer(connected, Identity("job", "deaf", 1, secret=SECRET), lambda greeting: None)
        accept = packed(1, 0, v1.Frame(accept=v1.Accept(window=window)))
        await loop.sock_sendall(connected, accept)
        return connected


@pytest.mark.parametrize("lends", [False, True], ids=["send", "lend"])
def test_a_peer_that_does_not_read_keeps_nobodys_memory(monkeypatch: pytest.MonkeyPatch, lends: bool) -> None:
    """More than any socket's buffer: memory comes back all the same, and what is sent is what was given."""
    monkeypatch.setattr(multiplexer, "PATIENCE_S", 1e-3)

    async def main() -> None:
        peer, elems = Deaf(), 1 << 20
        client = endpoint("client")
        client.know("deaf", peer.address)
        stream = await client.open("deaf", "sink", v1.Tensor(), window=16)
        connected = await peer.accept(window=64)
        vector = Vector("x", torch.zeros(elems))
        num_sent = 0

        async def send_all() -> None:
            nonlocal num_sent
            while True:
                vector.tensor.fill_(num_sent)
                if lends:
                    await (await stream.lend(chunk_frame(num_sent, elems), vector.all)).back(20)
                else:
                    await stream.send(chunk_frame(num_sent, elems), vector.all)
                assert not vector.lent
                vector.tensor.fill_(-1)
                num_sent += 1

        sender = asyncio.ensure_future(send_all())
        before = -1
        while before != num_sent:  # until it is stuck
            before = num_sent
            await asyncio.sleep(20 * multiplexer.PATIENCE_S)
        sender.cancel()
        await asyncio.gather(sender, return_exceptions=True)
        reader, writer = await asyncio.open_connection(sock=connected)
        seen = 0
        while seen < num_sent:
            _, _, header_bytes, payload_bytes = PREFIX.unpack(await reader.readexactly(PREFIX.size))
            frame = v1.Frame.FromString(await reader.readexactly(header_bytes))
            payload = await reader.readexactly(payload_bytes)
            if frame.HasField("chunk"):
                assert frame.chunk.index == seen
                assert bool((torch.frombuffer(bytearray(payload), dtype=torch.float32) == seen).all())
                seen += 1
        writer.close()
        await client.close()

    asyncio.run(main())


def test_a_send_that_is_cancelled_gives_the_memory_back() -> None:
    async def main() -> None:
        peer = Deaf()
        client = endpoint("client")
        client.know("deaf", peer.address)
        stream = await client.open("deaf", "sink", v1.Tensor())
        await peer.accept(window=64)
        vector = Vector("x", torch.ones(1 << 20))
        sends = [asyncio.ensure_future(stream.send(chunk_frame(i, 1 << 20), vector.all)) for i in range(8)]
        await asyncio.sleep(0.01)
        for send in sends:
            send.cancel()
        await asyncio.gather(*sends, return_exceptions=True)
        assert not vector.lent
        stream.cancel()
        await client.close()

    asyncio.run(main())


def test_cancel_drops_what_is_queued_over_several_connections() -> None:
    """What was dropped leaves no gap in the order that the peer waits for."""
    run, make_pair = tcp_pairs(3)

    async def main() -> None:
        async with make_pair() as pair:
            told: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()

            async def read(stream: Stream) -> None:
                try:
                    while await stream.recv() is not None:
                        pass
                except BaseException as error:
                    told.set_result(error)
                    raise

            pair.far.serve("read", read)
            stream = await pair.near.open("far", "read", v1.Tensor())
            sends = [stream.send(chunk_frame(i, 100_000), numbered(i, 100_000)) for i in range(12)]
            tasks = [asyncio.ensure_future(send) for send in sends]
            await until(lambda: any(task.done() for task in tasks))
            stream.cancel("enough")
            await asyncio.gather(*tasks, return_exceptions=True)
            assert isinstance(await told, ClosedError)

    run(main())


@pytest.mark.parametrize("forks", [False, True])
def test_a_killed_process_is_noticed_at_once(forks: bool) -> None:
    """SIGKILL in the middle of a conversation, also while a process lives that has copies of the sockets."""
    code = (
        "import asyncio, os, signal, time, test_transport_tcp as t\n"
        "def fork(*_):\n"
        "    if child := os.fork():\n"
        "        print(child, flush=True)\n"
        "    else:\n"
        "        time.sleep(30)\n"
        "        os._exit(0)\n"
        "signal.signal(signal.SIGUSR1, fork)\n"
        "async def main():\n"
        "    async with t.serving('echo', t.echo) as server:\n"
        "        print(server.address, flush=True)\n"
        "        await asyncio.get_running_loop().create_future()\n"
        "asyncio.run(main())\n"
    )
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert process.stdout is not None
    children: list[int] = []

    async def main(address: str) -> None:
        client = endpoint("client")
        client.know("server", address)
        stream = await client.open("server", "echo", v1.Tensor())
        await stream.send(chunk_frame(0, 8), numbered(1, 8))
        await take_chunk(stream)
        if forks:
            process.send_signal(signal.SIGUSR1)
            assert process.stdout is not None
            children.append(int(process.stdout.readline()))
        process.send_signal(signal.SIGKILL)
        with pytest.raises(PeerLostError, match="server"):
            await stream.recv(20)
        with pytest.raises(PeerLostError):
            await client.call("server", "echo", v1.Tensor(), v1.Tensor)
        await client.close()

    with process:
        try:
            asyncio.run(main(process.stdout.readline().strip()))
        finally:
            process.kill()
            for child in children:
                os.kill(child, signal.SIGKILL)


class Kept:
    """A receiver that keeps everything but what comes of stream 0."""

    def __init__(self) -> None:
        self.frames: list[tuple[int, int, int, list[float]]] = []

    def place(self, stream: int, frame: v1.Frame, payload_bytes: int) -> PayloadPlace | None:
        return PayloadPlace(torch.empty(payload_bytes // 4), landed=False) if stream else None

    def arrived(self, stream: int, number: int, frame: v1.Frame, place: PayloadPlace | None) -> None:
        elements = [] if place is None else place.memory.tolist()
        self.frames.append((stream, number, len(frame.body.data), elements))


@pytest.mark.parametrize("seed", range(20))
def test_frames_are_the_same_however_they_are_cut(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Written in pieces of any size, read in pieces of any other."""
    monkeypatch.setattr(framing, "PIECE_BYTES", 1000)
    rng = random.Random(seed)
    sent, expected, wire = list[OutgoingFrame](), list[tuple[int, int, int, list[float]]](), bytearray()
    for number in range(60):
        stream, elems, body = number % 4, rng.choice([0, 1, 9, 250, 3000]), rng.choice([0, 5, 20_000])
        if number % 3:
            payload = torch.full((elems,), float(number))
            view = memoryview(payload.numpy()).cast("B") if elems else None  # type: ignore[arg-type]
            parcel = OutgoingFrame(stream, number, chunk_frame(number, elems), view, on_sent=sent.append)
            if stream or not elems:
                expected.append((stream, number, 0, payload.tolist()))
        else:
            frame = v1.Frame(body=v1.Body(data=bytes(body)))
            parcel = OutgoingFrame(stream, number, frame, on_sent=sent.append)
            expected.append((stream, number, body, []))
        while parcel.left_bytes:
            pieces = b"".join(parcel.pieces(rng.choice([1, 100, 1000])))[: rng.randint(1, 5000)]
            wire += pieces
            parcel.sent_bytes += len(pieces)
    kept = Kept()
    inbox, at = FrameReader(kept), 0
    while at < len(wire):
        took = 0
        for room in inbox.room():
            part = wire[at + took : at + took + min(len(room), rng.choice([1, 7, 300, 20_000]))]
            room[: len(part)] = part
            took += len(part)
            if len(part) < len(room):
                break
        at += took
        inbox.took(took)
    assert kept.frames == expected


def congestion_control(connected: socket.socket) -> str:
    return connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()


def test_a_near_peer_is_not_sent_to_by_bbr(monkeypatch: pytest.MonkeyPatch) -> None:
    """A far one is, where the system would; whoever has chosen something else keeps it."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as connected,
    ):
        try:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")
        except OSError:
            pytest.skip("this system has no BBR, or does not let this user have it")
        with monkeypatch.context() as patch:
            patch.setattr(tcp, "NEAR_S", 0.0)
            choose_congestion_control(connected)
            assert congestion_control(connected) == "bbr"
        choose_congestion_control(connected)
        assert congestion_control(connected) in ("cubic", "reno")
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
        choose_congestion_control(connected)
        assert congestion_control(connected) == "reno"


def test_a_near_peer_is_found_out_once_the_line_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that was made in a full line looks like one to a far peer."""
    round_trips_s = iter([0.3, 0.2, 2e-4])
    monkeypatch.setattr(tcp, "_shortest_round_trip_s", lambda connected: next(round_trips_s))
    monkeypatch.setattr(tcp, "LOOK_AGAIN_S", (0.0, 0.0, 0.0))

    async def main() -> None:
        with (
            socket.create_server(("127.0.0.1", 0)) as listener,
            socket.create_connection(listener.getsockname()) as connected,
        ):
            try:
                connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")
            except OSError:
                pytest.skip("this system has no BBR, or does not let this user have it")
            endpoint()._admit(connected)
            assert congestion_control(connected) == "bbr"
            await until(lambda: congestion_control(connected) in ("cubic", "reno"))

    asyncio.run(main())


def test_the_shortest_round_trip_on_loopback_is_short() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as connected,
    ):
        assert 0 < tcp._shortest_round_trip_s(connected) < 1


def test_no_connection_on_loopback_has_bbr() -> None:
    async def main() -> str:
        async with serving("echo", echo) as server:
            client = endpoint("client")
            client.know("server", server.address)
            line = await client.data_socket("server", "name", dial=True)
            assert line is not None
            assert isinstance(line.socket, socket.socket)
            with line.socket:
                found = congestion_control(line.socket)
            await client.close()
        return found

    assert asyncio.run(main()) != "bbr"
