"""Steps of a procedure on a shard's vectors: each runs once on each chunk, in turn with fetches and updates."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch

from gradstream.errors import NonFiniteError, RefusedError
from gradstream.memory import Vector
from gradstream.memory.segments import SharedMemory, supported
from gradstream.optim import SGD
from gradstream.runtime.deadlines import Deadlines
from gradstream.runtime.real import RealRuntime
from gradstream.server.aggregation import AggregationRule, EveryPush
from gradstream.server.client.client import ServerClient
from gradstream.server.client.links import ShardLinks
from gradstream.server.client.push import Update
from gradstream.server.shard.config import ShardConfig
from gradstream.server.shard.executor import ChunkLeases
from gradstream.server.shard.service import ShardService
from gradstream.strategies.synchronous import SynchronousRound
from gradstream.testing.pairs import SECRET
from gradstream.transport.base import Identity
from gradstream.transport.carriers import ShmEndpoint
from gradstream.wire import v1
from gradstream.wire.chunks import ChunkMap, Placement

CHUNK_ELEMS, NUM_CHUNKS = 1 << 19, 2  # so long that arithmetic is done on a thread, and payloads are lent
ELEMS = CHUNK_ELEMS * NUM_CHUNKS
KIND = v1.Command

pytestmark = pytest.mark.skipif(not supported(), reason="this system has no memory that processes can share")


class There:
    """A shard, a client of it, and a reader that reads chunks in shared memory."""

    def __init__(
        self, service: ShardService, client: ServerClient, reader: ShmEndpoint, ones: Vector
    ) -> None:
        self.service = service
        self.client = client
        self.reader = reader
        self.ones = ones
        self.num_by_reference = 0
        self.num_steps = 0

    @property
    def parameters(self) -> torch.Tensor:
        return self.service.store.parameters.tensor

    async def read(self) -> list[tuple[int, float]]:
        """(version, value) of each chunk; the test fails where its elements differ."""
        stream, found = await self.reader.open("shard-0", "fetch", v1.Fetch()), []
        await stream.end()
        while (received := await stream.recv(20)) is not None:
            assert received.payload is not None
            lent = self.service.executor.leases._lent.get(received.frame.chunk.index, ())
            self.num_by_reference += any(not one.returned for one in lent)
            low, high = await asyncio.to_thread(partial(torch.aminmax, received.payload))
            assert low == high, f"chunk {received.frame.chunk.index} is from {low} to {high}"
            found.append((received.frame.chunk.version, float(low)))
        stream.cancel("done")
        return found

    async def command(self, kind: v1.Command.Kind, out: str = "", x: str = "", alpha: float = 0.0) -> float:
        """Has one command carried out as a step. Returns its dot product."""
        self.num_steps += 1
        step, command = (
            v1.Procedure(number=self.num_steps),
            v1.Command(kind=kind, out=out, x=x, y=x, alpha=alpha),
        )
        return sum((await self.client.step(step, [command])).scalars)


@dataclass(frozen=True, slots=True)
class Beside(SGD):
    """SGD on shards that have two more vectors, which no update changes."""

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("ones", "v")

    def apply(self, *args: Any, **options: Any) -> None:
        parameters, gradient, _ = args
        SGD.apply(self, parameters, gradient, {}, **options)


@asynccontextmanager
async def there(rule: AggregationRule, optimizer: SGD = Beside(lr=1.0)) -> AsyncIterator[There]:
    names = ("shard-0", "worker-0", "worker-1")
    ends = {
        name: ShmEndpoint(
            Identity("job", name, at, fingerprint=1, secret=SECRET), RealRuntime(name, memory=SharedMemory())
        )
        for at, name in enumerate(names, 1)
    }
    shard, worker, reader = ends.values()
    service = ShardService(shard.runtime, shard, ShardConfig(0, 1, rule, optimizer, in_passes=True))
    service.register(v1.ModelSpec(fingerprint=1, elems=ELEMS, dtype=v1.FLOAT32, chunk_elems=CHUNK_ELEMS))
    for end in ends.values():
        await end.start()
        end.know("shard-0", shard.address)
    try:
        memory = worker.runtime.memory
        spare, ones = (
            memory.allocate(ELEMS, torch.float32, name, exchanged=True) for name in ("spare", "ones")
        )
        ones.tensor.fill_(1)
        chunks = ChunkMap(ELEMS, CHUNK_ELEMS, 1)
        links = ShardLinks(
            worker.runtime, worker, Placement(0, 1), chunks, Deadlines(silence_s=20, retry_s=20)
        )
        client = ServerClient(links, spare)
        await client.assign(ones)
        yield There(service, client, reader, ones)
    finally:
        for end in ends.values():
            await end.close()


@pytest.mark.limit_s(300)
def test_hundreds_of_commands_during_fetches() -> None:
    """No command writes memory that a fetch has lent, each chunk is from one command, and the result is right."""
    asyncio.run(_hundreds())


async def _hundreds() -> None:
    async with there(EveryPush()) as here:
        await here.command(KIND.COPY, "ones", x="")
        stopped, reads = asyncio.Event(), list[Sequence[tuple[int, float]]]()

        async def keep_reading() -> None:
            while not stopped.is_set():
                reads.append(await here.read())

        reading = [asyncio.ensure_future(keep_reading()) for _ in range(2)]
        value, values = 1.0, {1.0}
        try:
            for number in range(300):
                match number % 4:
                    case 0:
                        await here.command(KIND.SCALE, alpha=3.0)
                        value *= 3
                    case 1 | 2:
                        await here.command(KIND.ADD, x="ones", alpha=2.0)
                        value += 2
                    case 3:
                        await here.command(KIND.COPY, x="ones")
                        value = 1.0
                values.add(value)
        finally:
            stopped.set()
            failures = await asyncio.gather(*reading, return_exceptions=True)
        assert failures == [None, None]
        assert not here.service.executor.failure.done()
        assert bool((here.parameters == value).all())
        assert here.num_by_reference > 0, "nothing was lent, so nothing was tried"
        assert len(reads) > 10
        told = {one for read in reads for one in read}
        assert {value for _, value in told} <= values
        assert len({version for version, _ in told}) == len(told), "a version had two values"
        assert here.service.state.versions() == [300, 300]
        assert await here.command(KIND.DOT, x="ones") == ELEMS


def test_commands_and_pushes_take_turns() -> None:
    """The parameters include each of them once: these commute, so any order gives the same sum."""

    async def both() -> None:
        async with there(EveryPush()) as here:
            await here.command(KIND.COPY, "ones", x="")

            async def push() -> None:
                for _ in range(30):
                    await here.client.push_soon(Update(here.ones, samples=1, lr=1.0, base_version=[0, 0]))
                    await here.client.flush()

            async def command() -> None:
                for _ in range(30):
                    await here.command(KIND.ADD, x="ones", alpha=10.0)

            async def read() -> None:
                for _ in range(30):
                    await here.read()

            await asyncio.gather(push(), command(), read())
            assert bool((here.parameters == 1 - 30 + 300).all())
            assert here.service.state.versions() == [60, 60]

    asyncio.run(both())


def test_an_overflow_after_a_command_is_found() -> None:
    """A command changes the parameters beyond the bounds that the shard knows of them."""

    async def run() -> None:
        async with there(EveryPush(), Beside(lr=1.0, weight_decay=3.0)) as here:
            update = Update(here.ones, samples=1, lr=1.0, base_version=[0, 0])
            await here.client.push_soon(update)
            await here.client.flush()
            await here.command(KIND.SCALE, alpha=1e38)
            pushing = asyncio.ensure_future(here.client.push_soon(update))
            with pytest.raises(NonFiniteError, match="update"):
                await asyncio.wait_for(here.service.executor.failure, 20)
            pushing.cancel()
            await asyncio.gather(pushing, return_exceptions=True)

    asyncio.run(run())


def test_where_versions_are_rounds_a_command_makes_none() -> None:
    async def run() -> None:
        async with there(SynchronousRound(2, "sum")) as here:
            await here.command(KIND.SCALE, alpha=5.0)
            assert await here.read() == [(0, 5.0), (0, 5.0)]

    asyncio.run(run())


def test_a_vector_that_is_zeroed_while_it_is_read() -> None:
    """ZERO waits for its turn, too."""

    async def run() -> None:
        async with there(EveryPush()) as here:
            for _ in range(3):
                await here.command(KIND.COPY, "v", x="")
                stream = await here.reader.open("shard-0", "fetch", v1.Fetch(vector="v"))
                await stream.end()
                received = await stream.recv(20)
                assert received is not None and received.payload is not None
                zeroing = asyncio.ensure_future(here.command(KIND.ZERO, "v"))
                for _ in range(10):
                    await asyncio.sleep(0)
                    assert bool((received.payload == 1).all())
                del received
                stream.cancel("done")
                await zeroing
                assert bool((here.service.store.vector("v").tensor == 0).all())

    asyncio.run(run())


def test_a_cut_finds_no_command_half_carried_out() -> None:
    async def run() -> None:
        async with there(EveryPush()) as here:
            holder, seen = here.service.copies, set[float]()

            async def command() -> None:
                for _ in range(40):
                    await here.command(KIND.SCALE, alpha=1.5)

            commanding = asyncio.ensure_future(command())
            while not commanding.done():
                async with holder.still():
                    low, high = torch.aminmax(here.parameters)
                    assert low == high
                    seen.add(float(low))
                await asyncio.sleep(0)
            await commanding
            assert len(seen) > 2

    asyncio.run(run())


def test_the_checker_of_turns_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that does not wait for the readers of a chunk writes lent memory."""

    async def at_once(self: ChunkLeases, chunk: int) -> None:
        del self, chunk

    monkeypatch.setattr(ChunkLeases, "gone", at_once)
    with pytest.raises(RefusedError, match="which is being read"):
        asyncio.run(_hundreds())
