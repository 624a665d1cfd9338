"""Question: what does the parameter server cost on top of the bytes?

Pushes a vector to one shard in another process (which applies it) and fetches it back, beside the
barest thing that moves the same bytes each way and does nothing with them: for the carrier grpc a
grpc.aio byte stream, for tcp a blocking socket, for shm a copy of the same size from one vector into
another on one thread. All run in the same two processes, alternately; the ratio of medians is the
answer. For shm also: the update alone, as one node would make it, which is the least that a push can
take; and both nodes' own memory, in which pages that both have mapped count half.

    python bench/server_bulk.py                       # gRPC, 20,000,000 float32: 80 MB
    python bench/server_bulk.py --elems 600000000     # 2.4 GB: more than 2 GiB in one vector
    python bench/server_bulk.py --carrier tcp --elems 74770901
    python bench/server_bulk.py --carrier shm --elems 74770901
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import resource
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
import numpy as np
import torch

from common import RESULTS, command_line, keep_part, origin
from gradstream.memory import Vector
from gradstream.optim import SGD
from gradstream.run.local.environment import node_environment
from gradstream.runtime.deadlines import Deadlines
from gradstream.runtime.real import RealRuntime, own_bytes
from gradstream.server.client.client import ServerClient
from gradstream.server.client.links import ShardLinks
from gradstream.server.client.push import Update
from gradstream.server.shard.config import ShardConfig
from gradstream.server.shard.service import ShardService
from gradstream.strategies.ssp import Clocked
from gradstream.transport.base import Identity
from gradstream.transport.carriers import make_endpoint, make_memory
from gradstream.wire import v1
from gradstream.wire.chunks import CHUNK_ELEMS, ChunkMap, Placement, shared_chunk_elems

SECRET = b"the same for all nodes of a bench"
MESSAGE_BYTES = 1 << 20
FINGERPRINT = 1
LISTEN = "127.0.0.1:0"
OPTIONS = [("grpc.max_receive_message_length", 8 << 20), ("grpc.max_send_message_length", 8 << 20)]


class BareStream(grpc.GenericRpcHandler):
    """Takes bytes and drops them, or sends bytes out of memory."""

    source: np.ndarray[Any, Any] | None = None

    def service(self, details: Any) -> Any:
        """put: bytes up. get: as many bytes down as the first message asks for."""
        if details.method == "/bare/put":
            return grpc.stream_unary_rpc_method_handler(self.put)
        return grpc.unary_stream_rpc_method_handler(self.get)

    async def put(self, messages: Any, context: Any) -> bytes:
        """Counts what comes."""
        count = 0
        async for message in messages:
            count += len(message)
        return str(count).encode()

    async def get(self, request: bytes, context: Any) -> Any:
        """Sends."""
        if self.source is None:
            self.source = np.ones(int(request), dtype=np.uint8)
        for start in range(0, len(self.source), MESSAGE_BYTES):
            yield self.source[start : start + MESSAGE_BYTES].tobytes()


class BareSocket(threading.Thread):
    """Takes bytes into memory, or sends them out of it: blocking, one connection, one thread."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]

    def run(self) -> None:
        """Orders are a size in bytes, positive to put and negative to get."""
        connection, _ = self.listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        memory = np.ones(0, dtype=np.uint8)
        while order := connection.recv(8, socket.MSG_WAITALL):
            (size,) = struct.unpack("<q", order)
            if len(memory) != abs(size):
                memory = np.ones(abs(size), dtype=np.uint8)
            if size > 0:
                receive_all(connection, memory)
                connection.sendall(b"k")
            else:
                connection.sendall(memory)


def receive_all(connection: socket.socket, into: np.ndarray[Any, Any]) -> None:
    """Fills memory."""
    view = memoryview(into)
    while view:
        view = view[connection.recv_into(view) :]


async def serve(elems: int, chunk_elems: int, carrier: Any) -> None:
    runtime = RealRuntime("shard-0", memory=make_memory(carrier, LISTEN))
    endpoint = make_endpoint(Identity("bench", "shard-0", 1, secret=SECRET), runtime, carrier)
    service = ShardService(runtime, endpoint, ShardConfig(0, 1, Clocked(), SGD(lr=0.1)))
    service.register(
        v1.ModelSpec(fingerprint=FINGERPRINT, elems=elems, dtype=v1.FLOAT32, chunk_elems=chunk_elems)
    )
    await endpoint.start()
    bare = grpc.aio.server(options=OPTIONS)
    bare.add_generic_rpc_handlers((BareStream(),))
    port = bare.add_insecure_port("127.0.0.1:0")
    await bare.start()
    sockets = BareSocket()
    sockets.start()
    print(json.dumps([endpoint.address, f"127.0.0.1:{port}", sockets.port]), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    print(json.dumps(memory_mb(carrier)), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await endpoint.close()
    await bare.stop(None)


def memory_mb(carrier: str) -> dict[str, float]:
    """Most that was ever resident, and what is now but for files."""
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    return {"peak_mb": peak_mb, "own_mb": own_bytes(shared=carrier == "shm") / 1e6}


async def measure(
    given: argparse.Namespace, ask: Callable[[], Any], ours: str, bare: str, port: int
) -> tuple[dict[str, list[float]], dict[str, dict[str, float]]]:
    runtime = RealRuntime("worker-0", memory=make_memory(given.carrier, LISTEN))
    identity = Identity("bench", "worker-0", 2, fingerprint=FINGERPRINT, secret=SECRET)
    endpoint = make_endpoint(identity, runtime, given.carrier)
    await endpoint.start()
    endpoint.know("shard-0", ours)
    chunks = ChunkMap(given.elems, given.chunk, 1)
    spare = runtime.memory.allocate(given.elems, torch.float32, "spare", exchanged=True)
    update = runtime.memory.allocate(given.elems, torch.float32, "update", exchanged=True)
    deadlines = Deadlines(silence_s=60, retry_s=60)
    client = ServerClient(ShardLinks(runtime, endpoint, Placement(0, 1), chunks, deadlines), spare)
    update.tensor.uniform_()
    await client.assign(update)
    channel = grpc.aio.insecure_channel(bare, options=OPTIONS)
    connection = socket.create_connection(("127.0.0.1", port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    times: dict[str, list[float]] = {}
    source, sink = (np.ones(given.elems * 4 * (given.carrier != "shm"), dtype=np.uint8) for _ in range(2))

    async def timed(name: str, work: Awaitable[None]) -> None:
        begun = time.perf_counter()
        await work
        times.setdefault(name, []).append(time.perf_counter() - begun)

    bare_ones: dict[str, tuple[Callable[[], Awaitable[None]], Callable[[], Awaitable[None]]]] = {
        "grpc": (lambda: bare_put(channel, source), lambda: bare_get(channel, sink)),
        "tcp": (lambda: socket_put(connection, source), lambda: socket_get(connection, sink)),
    }
    copies = Copies(given.elems if given.carrier == "shm" else 0, given.chunk)
    if given.carrier == "shm":
        bare_ones["shm"] = copies.copy, copies.copy
    put, get = bare_ones[given.carrier]
    for _ in range(given.repeats):
        await timed("bare put", put())
        await timed("push", push(client, update))
        await timed("bare get", get())
        await timed("fetch", fetch(client))
        if given.carrier == "shm":
            await timed("update", copies.update())
    source = sink = np.zeros(0, dtype=np.uint8)  # their memory is not that of a worker
    copies = Copies(0, 1)
    bare_ones.clear()
    put = get = copies.copy
    own = {"worker": memory_mb(given.carrier), "shard": ask()}
    connection.close()
    await channel.close()
    await endpoint.close()
    return times, own


class Copies:
    """What the same memory traffic takes in one process: a copy, and an update."""

    def __init__(self, elems: int, chunk_elems: int) -> None:
        self.source, self.sink = np.ones(elems, dtype=np.float32), np.ones(elems, dtype=np.float32)
        self.chunk_elems = chunk_elems
        self.rule = SGD(lr=1e-3)

    async def copy(self) -> None:
        """One memcpy, on one thread."""
        self.sink[...] = self.source

    async def update(self) -> None:
        """The rule, chunk by chunk, each looked at before: is it finite?"""
        gradient, parameters = torch.from_numpy(self.source), torch.from_numpy(self.sink)
        for start in range(0, len(gradient), self.chunk_elems):
            chunk = slice(start, start + self.chunk_elems)
            assert math.isfinite(gradient[chunk].sum().item())
            self.rule.apply(parameters[chunk], gradient[chunk], {}, lr=1e-3, step=1)


async def socket_put(connection: socket.socket, source: np.ndarray[Any, Any]) -> None:
    """The same bytes up."""
    connection.sendall(struct.pack("<q", len(source)))
    connection.sendall(source)
    assert connection.recv(1) == b"k"


async def socket_get(connection: socket.socket, into: np.ndarray[Any, Any]) -> None:
    """The same bytes down."""
    connection.sendall(struct.pack("<q", -len(into)))
    receive_all(connection, into)


async def push(client: ServerClient, vector: Vector) -> None:
    """One push, applied and acknowledged."""
    base_version = [0] * client.chunks.num_chunks
    await client.push_soon(Update(vector, samples=1, lr=1e-3, base_version=base_version))
    await client.flush()


async def fetch(client: ServerClient) -> None:
    """One fetch into the spare vector."""
    arrival = client.fetch_soon()
    await arrival.done()
    client.back_buffer = arrival.vector


async def bare_put(channel: grpc.aio.Channel, source: np.ndarray[Any, Any]) -> None:
    """The same bytes up; made of memory as ours are, one copy each."""

    async def messages() -> Any:
        for start in range(0, len(source), MESSAGE_BYTES):
            yield source[start : start + MESSAGE_BYTES].tobytes()

    count = await channel.stream_unary("/bare/put")(messages())
    assert int(count) == len(source)


async def bare_get(channel: grpc.aio.Channel, into: np.ndarray[Any, Any]) -> None:
    """The same bytes down, into memory of one's own."""
    start = 0
    async for message in channel.unary_stream("/bare/get")(str(len(into)).encode()):
        into[start : start + len(message)] = np.frombuffer(message, dtype=np.uint8)
        start += len(message)
    assert start == len(into)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--elems", type=int, default=20_000_000)
    parser.add_argument("--chunk", type=int, help="elements; 262,144, over shm as a job would have it")
    parser.add_argument("--carrier", choices=["grpc", "tcp", "shm"], default="grpc")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.chunk = given.chunk or (
        shared_chunk_elems(given.elems, 4, 1) if given.carrier == "shm" else CHUNK_ELEMS
    )
    sys.setswitchinterval(2e-4)
    torch.set_num_threads(1)
    if given.serve:
        asyncio.run(serve(given.elems, given.chunk, given.carrier))
        return
    environment = {**os.environ, **node_environment(2)}
    server = subprocess.Popen(
        [sys.executable, __file__, *sys.argv[1:], "--serve"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert server.stdout is not None and server.stdin is not None
    commands, answers = server.stdin, server.stdout

    def ask() -> Any:
        commands.write("\n")
        commands.flush()
        return json.loads(answers.readline())

    times, memory = asyncio.run(measure(given, ask, *json.loads(answers.readline())))
    commands.close()
    server.wait(timeout=60)
    median = {name: statistics.median(values) for name, values in times.items()}
    size_gb = given.elems * 4 / 1e9
    for name, seconds in median.items():
        print(f"{name:9s} {seconds:7.3f} s  {size_gb / seconds:5.2f} GB/s")
    ratio = (median["bare put"] + median["bare get"]) / (median["push"] + median["fetch"])
    barest = {"grpc": "the bare stream", "tcp": "the bare socket", "shm": "one copy each way"}[given.carrier]
    print(f"push + fetch at {ratio:.2f} of {barest}")
    each = {"push": median["bare put"] / median["push"], "fetch": median["bare get"] / median["fetch"]}
    print(", ".join(f"{name} {value:.2f}" for name, value in each.items()))
    for name, figures in memory.items():
        print(f"{name}: own memory {figures['own_mb']:.0f} MB, peak {figures['peak_mb']:.0f} MB")
    record = {
        **origin(node_environment(2)),
        "carrier": given.carrier,
        "elems": given.elems,
        "median_s": median,
        "ratio": ratio,
        "ratio_each": each,
        "chunk_elems": given.chunk,
        "memory": memory,
    }
    keep_part(RESULTS / "server-bulk.json", f"{given.carrier}, {given.elems}", record)


if __name__ == "__main__":
    main()
