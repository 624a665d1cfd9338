"""Question: how long does a control call wait behind a large transfer?

One process pushes 300 MB to a shard in another, then fetches them back, and all the while tells the
shard every 20 ms that it has nothing to do. Goal: a median of at most 5 ms.

    python bench/ping_behind_bulk.py                  # over gRPC
    python bench/ping_behind_bulk.py --carrier tcp
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import torch

import server_bulk
from common import RESULTS, command_line, keep_part, origin
from gradstream.run.local.environment import node_environment
from gradstream.runtime.deadlines import Deadlines
from gradstream.runtime.real import RealRuntime
from gradstream.server.client.client import ServerClient
from gradstream.server.client.links import ShardLinks
from gradstream.transport.base import Identity
from gradstream.transport.carriers import make_endpoint
from gradstream.wire.chunks import ChunkMap, Placement

ELEMS, CHUNK_ELEMS, REPEATS, EVERY_S = 75_000_000, 262_144, 7, 0.02


async def measure(address: str, carrier: Any) -> dict[str, dict[str, float]]:
    runtime = RealRuntime("worker-0")
    identity = Identity(
        "bench", "worker-0", 2, fingerprint=server_bulk.FINGERPRINT, secret=server_bulk.SECRET
    )
    endpoint = make_endpoint(identity, runtime, carrier)
    await endpoint.start()
    endpoint.know("shard-0", address)
    spare, update = (runtime.memory.allocate(ELEMS, torch.float32, name) for name in ("spare", "update"))
    update.tensor.uniform_()
    chunks = ChunkMap(ELEMS, CHUNK_ELEMS, 1)
    deadlines = Deadlines(silence_s=60, retry_s=60)
    client = ServerClient(ShardLinks(runtime, endpoint, Placement(0, 1), chunks, deadlines), spare)
    await client.assign(update)

    async def ping_until(stop: asyncio.Event) -> list[float]:
        times = []
        while not stop.is_set():
            begun = time.perf_counter()
            await client.pause()
            times.append(time.perf_counter() - begun)
            await asyncio.sleep(EVERY_S)
        return times

    async def behind(transfer: Callable[[], Awaitable[None]]) -> dict[str, float]:
        pings: list[float] = []
        for _ in range(REPEATS):
            stop = asyncio.Event()
            pinging = asyncio.ensure_future(ping_until(stop))
            await transfer()
            stop.set()
            pings += await pinging
        pings.sort()
        return {
            "num_pings": len(pings),
            "median_ms": 1e3 * statistics.median(pings),
            "p90_ms": 1e3 * pings[int(0.9 * len(pings))],
            "max_ms": 1e3 * pings[-1],
        }

    rows = {
        "push": await behind(lambda: server_bulk.push(client, update)),
        "fetch": await behind(lambda: server_bulk.fetch(client)),
    }
    await endpoint.close()
    return rows


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--carrier", choices=["grpc", "tcp"], default="grpc")
    carrier = parser.parse_args().carrier
    sys.setswitchinterval(2e-4)
    torch.set_num_threads(1)
    server = subprocess.Popen(
        [
            sys.executable,
            str(Path(__file__).resolve().with_name("server_bulk.py")),
            "--elems",
            str(ELEMS),
            "--carrier",
            carrier,
            "--serve",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **node_environment(2)},
    )
    assert server.stdout is not None and server.stdin is not None
    rows = asyncio.run(measure(json.loads(server.stdout.readline())[0], carrier))
    server.stdin.close()
    server.wait(timeout=60)
    for name, row in rows.items():
        print(
            f"{carrier}, behind a 300 MB {name}: "
            + ", ".join(f"{key} {value:.2f}" for key, value in row.items())
        )
    record = {
        **origin(node_environment(2)),
        "carrier": carrier,
        "rows": rows,
    }
    keep_part(RESULTS / "ping-behind-bulk.json", carrier, record)


if __name__ == "__main__":
    main()
