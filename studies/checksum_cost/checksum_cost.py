"""Question: what do checksums cost, where connections have them?

A worker and a shard, and a group of two ranks, in one process over loopback, once with checksums and once
without: the same bytes by turns. CPU seconds (of all threads, both ends) of a push, a fetch and an allreduce with
checksums, divided by those without; and the rate of the hash alone. The least of `--repeats` measurements of each: what
other processes of the machine add is never less than nothing. Beside it the median of the ratios of neighbours.

    python studies/checksum_cost/checksum_cost.py  # 20,000,000 float32; writes record.json
    python studies/checksum_cost/checksum_cost.py --elems 1000000 --out ""
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import torch

from gradstream.collectives.factory import form_group
from gradstream.collectives.group import GroupMembers
from gradstream.memory import Vector
from gradstream.optim import SGD
from gradstream.runtime.deadlines import Deadlines
from gradstream.runtime.real import RealRuntime
from gradstream.server.aggregation import EveryPush
from gradstream.server.client.client import ServerClient
from gradstream.server.client.links import ShardLinks
from gradstream.server.client.push import Update
from gradstream.server.shard.config import ShardConfig
from gradstream.server.shard.service import ShardService
from gradstream.transport.base import Identity
from gradstream.transport.endpoint import EndpointCore
from gradstream.transport.grpc.endpoint import GrpcEndpoint
from gradstream.transport.socket.tcp import TcpEndpoint
from gradstream.wire import v1
from gradstream.wire.chunks import CHUNK_ELEMS, ChunkMap, Placement
from gradstream.wire.frames import checksum

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))
from common import command_line, keep, origin

SECRET = b"the same for all nodes of a bench"
FINGERPRINT = 1
HASH_BYTES = 1 << 20  # of one piece
Work = Callable[[], Awaitable[None]]


@asynccontextmanager
async def started(
    kind: type[TcpEndpoint] | type[GrpcEndpoint], names: tuple[str, str], *, checked: bool
) -> AsyncIterator[tuple[EndpointCore, EndpointCore]]:
    """Two endpoints that know each other."""
    runtimes = [RealRuntime(name) for name in names]
    first, second = (
        kind(Identity("bench", one.node, 1, fingerprint=FINGERPRINT, secret=SECRET), one) for one in runtimes
    )
    for one in (first, second):
        one.leaves_machine = lambda own, peer: checked
        await one.start()
    first.know(names[1], second.address)
    second.know(names[0], first.address)
    try:
        yield first, second
    finally:
        await first.close()
        await second.close()
        for runtime in runtimes:
            runtime.close()


async def exchange(
    stack: AsyncExitStack, kind: type[TcpEndpoint] | type[GrpcEndpoint], elems: int, *, checked: bool
) -> tuple[Work, Work]:
    """A push to a shard, and a fetch."""
    shard, worker = await stack.enter_async_context(started(kind, ("shard-0", "worker-0"), checked=checked))
    service = ShardService(shard.runtime, shard, ShardConfig(0, 1, EveryPush(), SGD(lr=0.1)))
    service.register(
        v1.ModelSpec(fingerprint=FINGERPRINT, elems=elems, dtype=v1.FLOAT32, chunk_elems=CHUNK_ELEMS)
    )
    memory = worker.runtime.memory
    back, update = (
        memory.allocate(elems, torch.float32, name, exchanged=True) for name in ("back", "update")
    )
    links = ShardLinks(
        worker.runtime, worker, Placement(0, 1), ChunkMap(elems, CHUNK_ELEMS, 1), Deadlines(silence_s=60)
    )
    client = ServerClient(links, back)
    update.tensor.uniform_()
    await client.assign(update)

    async def push() -> None:
        versions = [0] * client.chunks.num_chunks
        await client.push_soon(Update(update, samples=1, lr=1e-3, base_version=versions))
        await client.flush()

    async def fetch() -> None:
        arrival = client.fetch_soon()
        await arrival.done()
        client.back_buffer = arrival.vector

    return push, fetch


async def reduction(stack: AsyncExitStack, elems: int, *, checked: bool) -> Work:
    """An allreduce of two ranks, by a ring."""
    names = ("rank-0", "rank-1")
    ends = await stack.enter_async_context(started(TcpEndpoint, names, checked=checked))
    forming = (
        form_group(own.runtime, own, GroupMembers(names, rank, 1, 60.0), "ring", host=names[rank])
        for rank, own in enumerate(ends)
    )
    groups = await asyncio.gather(*forming)
    vectors = [Vector(name, torch.zeros(elems)) for name in names]
    for group in groups:
        stack.push_async_callback(group.close)

    async def allreduce() -> None:
        await asyncio.gather(
            *(group.allreduce(vector.all) for group, vector in zip(groups, vectors, strict=True))
        )

    return allreduce


async def measure(elems: int, repeats: int) -> dict[str, list[tuple[float, float]]]:
    """CPU seconds with and without checksums, by what was done, in pairs that follow each other."""
    seconds: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    async with AsyncExitStack() as stack:
        works: dict[str, list[Work]] = {}
        for checked in (True, False):
            push, fetch = await exchange(stack, TcpEndpoint, elems, checked=checked)
            by_grpc, from_grpc = await exchange(stack, GrpcEndpoint, elems, checked=checked)
            allreduce = await reduction(stack, elems, checked=checked)
            named = {
                "push": push,
                "fetch": fetch,
                "grpc push": by_grpc,
                "grpc fetch": from_grpc,
                "allreduce": allreduce,
            }
            for name, work in named.items():
                works.setdefault(name, []).append(work)
        for repeat in range(repeats + 1):
            for name, (checked_work, plain) in works.items():
                with_s = await cpu_s(checked_work) if repeat % 2 else 0.0
                without_s = await cpu_s(plain)
                with_s = with_s or await cpu_s(checked_work)
                if repeat:  # the first one touches memory for the first time
                    seconds[name].append((with_s, without_s))
    return seconds


async def cpu_s(work: Work) -> float:
    """CPU seconds of a piece of work, of all threads of this process."""
    begun = time.process_time()
    await work()
    return time.process_time() - begun


def hash_gb_s(repeats: int) -> float:
    """The rate of the hash over pieces that are not in the cache, in GB/s."""
    data = memoryview(bytearray(os.urandom(HASH_BYTES) * 256))
    pieces = [data[start : start + HASH_BYTES] for start in range(0, len(data), HASH_BYTES)]
    rates = []
    for _ in range(repeats):
        begun = time.process_time()
        for piece in pieces:
            checksum(piece)
        rates.append(len(data) / (time.process_time() - begun) / 1e9)
    return statistics.median(rates)


def main() -> None:
    """Measures, prints, and writes the record."""
    parser = command_line(__doc__)
    parser.add_argument("--elems", type=int, default=20_000_000)
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument(
        "--out", default=str(Path(__file__).with_name("record.json")), help='"" writes nothing'
    )
    given = parser.parse_args()
    seconds = asyncio.run(measure(given.elems, given.repeats))
    record = {
        "elems": given.elems,
        "hash_gb_s": round(hash_gb_s(given.repeats), 1),
        "cpu_ratio_of_least": {
            name: round(min(one for one, _ in found) / min(other for _, other in found), 3)
            for name, found in seconds.items()
        },
        "cpu_ratio_median": {
            name: round(statistics.median(one / other for one, other in found), 3)
            for name, found in seconds.items()
        },
        **origin(),
    }
    print(json.dumps(record, indent=1))
    if given.out:
        keep(Path(given.out), record)


if __name__ == "__main__":
    main()
