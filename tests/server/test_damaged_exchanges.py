"""A worker and a shard over a wire that flips bits or falls silent: the model is the undamaged run's, to the bit."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import xxhash

from gradstream.errors import GradstreamError
from gradstream.memory import Vector
from gradstream.optim import SGD
from gradstream.run.remote.certificate_authority import CertificateAuthority
from gradstream.runtime import RealRuntime
from gradstream.runtime.deadlines import Deadlines
from gradstream.server.client.client import ServerClient
from gradstream.server.client.links import ShardLinks
from gradstream.server.client.push import Update
from gradstream.server.shard.config import ShardConfig
from gradstream.server.shard.service import ShardService
from gradstream.strategies.ssp import Clocked
from gradstream.testing.pairs import SECRET
from gradstream.testing.pieces import echo
from gradstream.transport.base import Identity
from gradstream.transport.endpoint import EndpointCore
from gradstream.transport.grpc.connection import CHALLENGE, METHOD, SESSION
from gradstream.transport.grpc.endpoint import GrpcEndpoint
from gradstream.transport.socket import framing
from gradstream.transport.socket.tcp import TcpEndpoint
from gradstream.wire import frames, v1
from gradstream.wire.chunks import ChunkMap, Placement

ELEMS, CHUNK_ELEMS, FINGERPRINT = 100, 64, 7
SILENCE_S, WAIT_S = 0.3, 20.0
CARRIERS: dict[str, Callable[..., EndpointCore]] = {"tcp": TcpEndpoint, "grpc": GrpcEndpoint}


class Wire:
    """Forwards connections to an address.

    Attributes:
        at: number of bytes of `direction` to pass before the one that is damaged; below 0: none is.
        word: once these bytes pass upwards, their last one is damaged; empty: none is.
        deaf: connections of which nothing more is forwarded.
        fired: number of flipped bits.
    """

    def __init__(self, target: str) -> None:
        self.at, self.direction, self.bit, self.fired = -1, "up", 0, 0
        self.passed = {"up": 0, "down": 0}
        self.word = b""
        self.connections = 0
        self.deaf: set[int] = set()
        self.target = target
        self._target = target.rpartition(":")

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def close(self) -> None:
        self._server.close()

    def arm(self, direction: str, at: int, bit: int) -> None:
        self.direction, self.at, self.bit = direction, at, bit

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        number = self.connections
        there = await asyncio.open_connection(self._target[0], int(self._target[2]))
        try:
            await asyncio.gather(
                self._forward("up", number, reader, there[1]), self._forward("down", number, there[0], writer)
            )
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            writer.close()
            there[1].close()

    async def _forward(
        self, direction: str, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            while data := await reader.read(1 << 16):
                if number not in self.deaf:
                    writer.write(self._damaged(direction, data))
                    await writer.drain()
        finally:
            writer.close()

    def _damaged(self, direction: str, data: bytes) -> bytes:
        self.passed[direction] += len(data)
        if direction == "up" and self.word and self.word in data:
            self.at, self.word = data.index(self.word) + len(self.word) - 1, b""
        if direction != self.direction or self.at < 0:
            return data
        at, self.at = self.at, self.at - len(data)
        if at >= len(data):
            return data
        self.fired += 1
        flipped = bytearray(data)
        flipped[at] ^= 1 << self.bit
        return bytes(flipped)


class Trained:
    """A model of integers, which float32 adds without rounding: so its bits are known."""

    def __init__(
        self,
        client: ServerClient,
        endpoint: EndpointCore,
        shard: Any,
        vector: Vector,
        wire: Wire,
        damages: list[int],
    ) -> None:
        self.endpoint, self.shard, self.wire, self.damages = endpoint, shard, wire, damages
        self.client = client
        self._vector = vector
        self._expected = torch.zeros(ELEMS)
        self._random = torch.Generator().manual_seed(1)

    async def begin(self) -> None:
        self._vector.tensor.zero_()
        await self.client.assign(self._vector)

    async def step(self) -> None:
        """Pushes, fetches, and compares."""
        client, values = self.client, self._vector.tensor
        values.copy_(torch.randint(-99, 99, (ELEMS,), generator=self._random))
        self._expected -= values
        await client.push_soon(Update(self._vector, samples=1, lr=1.0, base_version=[0, 0]))
        await client.flush()
        arrival = client.fetch_soon()
        await arrival.done()
        client.back_buffer = arrival.vector
        assert torch.equal(arrival.vector.tensor, self._expected), "damage has reached the model"


@asynccontextmanager
async def training(
    carrier: str, *, afar: bool = True, near_worker: bool = False, tls: CertificateAuthority | None = None
) -> AsyncIterator[Trained]:
    """A shard and a worker.

    Args:
        carrier: one of `CARRIERS`.
        afar: the connection counts as one that leaves the machine.
        near_worker: but not for the worker, as behind a tunnel.
        tls: encrypts it.
    """
    runtimes = [RealRuntime("shard-0"), RealRuntime("worker-0")]
    make = CARRIERS[carrier]
    protected = [{} if tls is None else {"security": tls.issue(one.node)} for one in runtimes]
    shard = make(Identity("job", "shard-0", 1, secret=SECRET), runtimes[0], **protected[0])
    worker = make(Identity("job", "worker-0", 2, FINGERPRINT, secret=SECRET), runtimes[1], **protected[1])
    damages: list[int] = []
    shard.leaves_machine = lambda own, peer: afar
    worker.leaves_machine = lambda own, peer: afar and not near_worker
    for one in (shard, worker):
        one.on_damage = lambda peer, size_bytes: damages.append(size_bytes)
    service = ShardService(runtimes[0], shard, ShardConfig(0, 1, Clocked(), SGD(lr=1.0)))
    service.register(
        v1.ModelSpec(fingerprint=FINGERPRINT, elems=ELEMS, dtype=v1.FLOAT32, chunk_elems=CHUNK_ELEMS)
    )
    await shard.start()
    await worker.start()
    wire = Wire(shard.address)
    worker.know("shard-0", await wire.start())
    back, vector = (
        runtimes[1].memory.allocate(ELEMS, torch.float32, name, exchanged=True) for name in ("back", "update")
    )
    deadlines = Deadlines(silence_s=SILENCE_S, retry_s=40.0)
    links = ShardLinks(runtimes[1], worker, Placement(0, 1), ChunkMap(ELEMS, CHUNK_ELEMS, 1), deadlines)
    trained = Trained(ServerClient(links, back), worker, shard, vector, wire, damages)
    try:
        await trained.begin()
        yield trained
    finally:
        wire.close()
        await worker.close()
        await shard.close()
        for runtime in runtimes:
            runtime.close()


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 60.0))


async def damage(trained: Trained, rounds: int, *, anew: bool = False) -> int:
    """Flips a bit of each round's bytes, anywhere. Returns the number of bytes of a round, in both directions.

    With `anew`, each round begins with new connections.
    """
    drawn, wire = random.Random(3), trained.wire

    def begin() -> None:
        if anew:
            trained.endpoint.redial("shard-0", 0.0)

    begin()
    before = dict(wire.passed)
    await trained.step()
    lengths = {name: wire.passed[name] - before[name] for name in before}
    for number in range(rounds):
        begin()
        direction = "up" if number % 2 else "down"
        wire.arm(direction, drawn.randrange(lengths[direction] * 9 // 10), drawn.randrange(8))
        await trained.step()
    return sum(lengths.values())


def test_no_bit_that_is_flipped_over_tcp_reaches_the_model() -> None:
    """Payload, header, length or checksum: each is found at once, by its sum, and the retry is counted once."""

    async def main() -> None:
        async with training("tcp") as trained:
            await damage(trained, 120)
            assert trained.wire.fired == 120
            assert len(trained.damages) == 120
            assert trained.client.traffic.retries >= 90

    run(main())


@pytest.mark.limit_s(90)
@pytest.mark.parametrize(("anew", "rounds"), [(False, 30), (True, 90)])
def test_no_bit_that_is_flipped_over_grpc_reaches_the_model(anew: bool, rounds: int) -> None:
    """Where the flip is in gRPC's own framing, gRPC sees it, or a new connection follows the silence."""

    async def main() -> None:
        async with training("grpc") as trained:
            await damage(trained, rounds, anew=anew)
            assert trained.wire.fired == rounds
            assert len(trained.damages) > (0 if anew else 10)

    run(main())


@pytest.mark.parametrize("method", [CHALLENGE, SESSION, METHOD])
def test_a_method_whose_name_was_damaged_costs_its_connection(method: str) -> None:
    """HTTP/2 sends a header once, and refers to it then: each later call of the connection would name what is not."""

    async def main() -> None:
        async with training("grpc") as trained:
            trained.endpoint.redial("shard-0", 0.0)
            trained.wire.word = method.encode()
            await trained.step()
            assert trained.wire.fired == 1
            assert trained.client.traffic.retries >= 1

    run(main())


@pytest.mark.parametrize("times", [1, 6])
def test_a_strangers_method_that_is_no_text_ends_nothing(
    times: int, caplog: pytest.LogCaptureFixture
) -> None:
    """grpc.aio ends its server there: see `transport.grpc.listener`."""

    def frame(kind: int, flags: int, stream: int, content: bytes) -> bytes:
        return len(content).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + content

    async def call(address: str) -> asyncio.StreamWriter:
        headers = {":method": b"POST", ":scheme": b"http", ":path": b"/\xf4/", ":authority": b"x"}
        headers |= {"te": b"trailers", "content-type": b"application/grpc"}
        block = b"".join(
            b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value
            for name, value in headers.items()
        )
        reader, writer = await asyncio.open_connection(*address.split(":"))
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b"") + frame(1, 4, 1, block))
        await reader.readexactly(9)  # it has been taken
        return writer

    async def main() -> None:
        async with training("grpc") as trained:
            await trained.step()
            trained.shard.serve("held", echo, model=False)
            # On a connection of its own, as the call by which the coordinator knows who lives: a server that ends may
            # answer a step's call with INTERNAL, by which the worker leaves a connection with all its streams.
            held = await trained.endpoint.open("shard-0", "held", v1.Body(), new_connection=True)

            async def goes_on() -> None:
                await held.send(v1.Frame(body=v1.Body()))
                assert await held.recv(WAIT_S) is not None

            await goes_on()
            strangers = []
            for number in range(1, times + 1):
                strangers.append(await call(trained.wire.target))
                while caplog.text.count("a new one begins") < number:
                    await trained.step()
                await trained.step()
            listener = trained.shard._listener
            while len(listener._ended) > 2:  # the held call's session is on the first one, the steps' on any
                await trained.step()
            await goes_on()
            for writer in strangers:
                writer.close()

    run(main())
    assert caplog.text.count("a new one begins") == times


@pytest.mark.parametrize("carrier", CARRIERS)
def test_one_side_that_sees_the_network_is_enough(carrier: str) -> None:
    async def main() -> None:
        async with training(carrier, near_worker=True) as trained:
            await damage(trained, 20)
            assert len(trained.damages) > 5

    run(main())


@pytest.mark.parametrize(("carrier", "module"), [("tcp", framing), ("grpc", frames)])
def test_without_the_checks_damage_reaches_the_model(
    carrier: str, module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "verify", lambda *data: None)

    async def main() -> None:
        async with training(carrier) as trained:
            await damage(trained, 50)

    with pytest.raises((AssertionError, GradstreamError)):
        run(main())


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_connection_within_the_machine_or_over_tls_hashes_nothing(
    carrier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one hashes all: so the counter counts."""

    async def hashes(**how: Any) -> bool:
        async with training(carrier, **how) as trained:
            with monkeypatch.context() as patched:
                hashing = Mock(wraps=xxhash)
                patched.setattr(frames, "xxhash", hashing)
                await trained.step()
            return bool(hashing.mock_calls)

    async def main() -> None:
        assert await hashes(afar=True)
        assert not await hashes(afar=False)
        if carrier == "grpc":
            assert not await hashes(afar=True, tls=CertificateAuthority())

    run(main())


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_retry_leaves_a_connection_that_has_fallen_silent(carrier: str) -> None:
    """It is not closed by anybody: bytes that are lost on the way are waited for."""

    async def main() -> None:
        async with training(carrier, afar=False) as trained:
            wire = trained.wire
            for _ in range(2):
                wire.deaf |= set(range(wire.connections + 1))
                before = wire.connections
                await trained.step()
                assert wire.connections > before
            assert trained.client.traffic.retries >= 2  # more on a machine that stands still meanwhile
            await trained.client.pause()
            wire.deaf |= set(range(wire.connections + 1))
            await trained.client.pause()  # over a connection of its own
            assert trained.client.traffic.retries >= 3

    run(main())
