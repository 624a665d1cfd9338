"""How much of a bare grpc.aio byte stream is left once it is an Endpoint's stream?

Two processes over loopback. `bare` writes ready-made 1 MiB messages and counts what it reads: it
copies nothing. `bare_vector` does what any use of it must: its messages are cut from a vector, and
landed in one. `ours` does that in chunks with headers, under credit. One round puts the same bytes
and gets them back; rounds of the three alternate.

    python bench/grpc_bulk.py            # prints the ratio, writes bench/results/grpc_bulk.json
    python bench/grpc_bulk.py --sweep    # and message and chunk sizes, with a plot
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import torch

from common import RESULTS, command_line, keep
from gradstream.runtime import RealRuntime
from gradstream.transport.base import Identity, Stream
from gradstream.transport.grpc.endpoint import GrpcEndpoint
from gradstream.wire import v1

SECRET = b"the same for all nodes of a bench"
MESSAGE_BYTES = 1 << 20  # where a bare stream is fastest
CHUNK_BYTES = 2 << 20  # where an Endpoint is: half the headers, and still an even flow
NODE_ENV = {  # as gradstream's nodes have it, for both sides of the comparison
    "OMP_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
EOF_MESSAGE: object = grpc.aio.EOF  # type: ignore[attr-defined]
BARE_OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]

Timed = Callable[[], Awaitable[None]]


@functools.cache  # ready-made: the bare stream copies nothing
def pieces(num_bytes: int, message_bytes: int) -> list[bytes]:
    return [bytes(min(message_bytes, num_bytes - at)) for at in range(0, num_bytes, message_bytes)]


@functools.cache
def vector_bytes(num_bytes: int) -> memoryview:
    return memoryview(torch.zeros(num_bytes, dtype=torch.uint8).numpy())  # type: ignore[arg-type]


# ---- the bare byte stream -------------------------------------------------------------------


class Bare(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """The least that moves bytes: no header, no credit, no vector."""

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        """Routes the three methods."""
        stream = grpc.stream_stream_rpc_method_handler
        handlers = {
            "/bare/put": lambda: stream(self.put),
            "/bare/get": lambda: stream(self.get),
            "/bare/put_vector": lambda: stream(self.put_vector),
            "/bare/get_vector": lambda: stream(self.get_vector),
            "/bare/one": lambda: grpc.unary_unary_rpc_method_handler(self.one),
        }
        return handlers[handler_call_details.method]()

    async def put(self, _: object, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        """Reads everything and answers with the number of bytes."""
        total = 0
        while (message := await context.read()) is not EOF_MESSAGE:
            total += len(message)
        await context.write(b"%d" % total)

    async def get(self, _: object, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        """Asked for "total,size": sends that many bytes in messages of that size."""
        total, size = (int(part) for part in (await context.read()).split(b","))
        for message in pieces(total, size):
            await context.write(message)

    async def put_vector(self, _: object, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        """As `put`, into a vector of the size that the first message says."""
        vector = vector_bytes(int(await context.read()))
        at = 0
        while (message := await context.read()) is not EOF_MESSAGE:
            vector[at : at + len(message)] = message
            at += len(message)
        await context.write(b"%d" % at)

    async def get_vector(self, _: object, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        """As `get`, out of a vector."""
        vector = vector_bytes(int(await context.read()))
        for at in range(0, len(vector), MESSAGE_BYTES):
            await context.write(bytes(vector[at : at + MESSAGE_BYTES]))

    async def one(self, message: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        """Answers one message with its length."""
        return b"%d" % len(message)


async def next_message(call: grpc.aio.StreamStreamCall[bytes, bytes]) -> bytes | None:
    message: Any = await call.read()
    return None if message is EOF_MESSAGE else message


async def bare_round(channel: grpc.aio.Channel, messages: list[bytes]) -> None:
    total = sum(map(len, messages))
    call = channel.stream_stream("/bare/put")()  # type: ignore[call-arg]
    for message in messages:
        await call.write(message)
    await call.done_writing()
    assert int(await call.read()) == total  # type: ignore[call-overload]
    call = channel.stream_stream("/bare/get")()  # type: ignore[call-arg]
    await call.write(b"%d,%d" % (total, len(messages[0])))
    await call.done_writing()
    got = 0
    while (answer := await next_message(call)) is not None:
        got += len(answer)
    assert got == total


async def bare_vector_round(channel: grpc.aio.Channel, vector: memoryview) -> None:
    call = channel.stream_stream("/bare/put_vector")()  # type: ignore[call-arg]
    await call.write(b"%d" % len(vector))
    for at in range(0, len(vector), MESSAGE_BYTES):
        await call.write(bytes(vector[at : at + MESSAGE_BYTES]))
    await call.done_writing()
    assert int(await call.read()) == len(vector)  # type: ignore[call-overload]
    call = channel.stream_stream("/bare/get_vector")()  # type: ignore[call-arg]
    await call.write(b"%d" % len(vector))
    await call.done_writing()
    at = 0
    while (message := await next_message(call)) is not None:
        vector[at : at + len(message)] = message
        at += len(message)
    assert at == len(vector)


async def unary(channel: grpc.aio.Channel, messages: list[bytes]) -> None:
    one = channel.unary_unary("/bare/one")  # type: ignore[call-arg]
    for message in messages:
        await one(message)


async def streamed(channel: grpc.aio.Channel, messages: list[bytes]) -> None:
    call = channel.stream_stream("/bare/put")()  # type: ignore[call-arg]
    for message in messages:
        await call.write(message)
    await call.done_writing()
    await call.read()


# ---- the same bytes through an Endpoint ------------------------------------------------------


async def send_vector(stream: Stream, vector: torch.Tensor, chunk_elems: int) -> None:
    for index, start in enumerate(range(0, len(vector), chunk_elems)):
        piece = vector[start : start + chunk_elems]
        header = v1.Chunk(index=index, sequence=1, elems=len(piece), dtype=v1.FLOAT32, version=index)
        await stream.send(v1.Frame(chunk=header), piece)
    await stream.end()


async def land_vector(stream: Stream, vector: torch.Tensor, chunk_elems: int) -> None:
    landed = 0
    while (received := await stream.recv(30)) is not None:
        assert received.payload is not None
        start, elems = received.frame.chunk.index * chunk_elems, received.frame.chunk.elems
        # By numpy, which is a plain memcpy: 5 to 8 % of the whole faster here than torch's copy_.
        vector[start : start + elems].numpy()[...] = received.payload.numpy()
        landed += elems
    assert landed == len(vector)


def serve_vector(endpoint: GrpcEndpoint) -> None:
    vectors: dict[int, torch.Tensor] = {}

    def vector(elems: int) -> torch.Tensor:
        return vectors.setdefault(elems, torch.zeros(elems))

    async def put(stream: Stream) -> None:
        size = v1.ModelSpec.FromString(stream.opened.body)
        await land_vector(stream, vector(size.elems), size.chunk_elems)
        await stream.send(v1.Frame(body=v1.Body()))

    async def get(stream: Stream) -> None:
        size = v1.ModelSpec.FromString(stream.opened.body)
        await send_vector(stream, vector(size.elems), size.chunk_elems)

    endpoint.serve("put", put)
    endpoint.serve("get", get)


async def our_round(endpoint: GrpcEndpoint, vector: torch.Tensor, chunk_elems: int) -> None:
    size = v1.ModelSpec(elems=len(vector), chunk_elems=chunk_elems)
    stream = await endpoint.open("server", "put", size)
    await send_vector(stream, vector, chunk_elems)
    assert await stream.recv(30) is not None
    stream = await endpoint.open("server", "get", size)
    await stream.end()
    await land_vector(stream, vector, chunk_elems)


# ---- measuring -------------------------------------------------------------------------------


async def seconds(work: Callable[[], Awaitable[None]]) -> float:
    begun = time.perf_counter()
    await work()
    return time.perf_counter() - begun


async def serve() -> None:
    server = grpc.aio.server(options=BARE_OPTIONS)
    server.add_generic_rpc_handlers((Bare(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    endpoint = GrpcEndpoint(Identity("bench", "server", 1, secret=SECRET), RealRuntime("server"))
    serve_vector(endpoint)
    await endpoint.start()
    print(f"127.0.0.1:{port}", endpoint.address, flush=True)
    await server.wait_for_termination()


async def compare(
    channel: grpc.aio.Channel, endpoint: GrpcEndpoint, num_bytes: int, rounds: int
) -> dict[str, Any]:
    messages, vector = pieces(num_bytes, MESSAGE_BYTES), torch.zeros(num_bytes // 4)
    works: dict[str, Timed] = {
        "bare": lambda: bare_round(channel, messages),
        "bare_vector": lambda: bare_vector_round(channel, vector_bytes(num_bytes)),
        "ours": lambda: our_round(endpoint, vector, CHUNK_BYTES // 4),
    }
    times_s: dict[str, list[float]] = {name: [] for name in works}
    for round_ in range(rounds + 1):
        for name, work in works.items():
            time_s = await seconds(work)
            if round_:  # the first one connects and touches memory
                times_s[name].append(time_s)
    median_s = {name: statistics.median(times) for name, times in times_s.items()}
    return {
        "bytes_each_way": num_bytes,
        "message_bytes": MESSAGE_BYTES,
        "chunk_bytes": CHUNK_BYTES,
        "rounds": rounds,
        "times_s": times_s,
        "gb_s": {name: 2 * num_bytes / median / 1e9 for name, median in median_s.items()},
        "ratio_to_bare": median_s["bare"] / median_s["ours"],
        "ratio_to_bare_vector": median_s["bare_vector"] / median_s["ours"],
    }


async def sweep(channel: grpc.aio.Channel, endpoint: GrpcEndpoint) -> dict[str, list[list[float]]]:
    rates: dict[str, list[list[float]]] = {"unary": [], "streamed": [], "chunks": []}
    for exponent in range(10, 23, 2):
        size = 1 << exponent
        total = min(32 << 20, size * 512)
        messages = pieces(total, size)
        for name, work in (("unary", unary), ("streamed", streamed)):
            best = min([await seconds(lambda work=work, m=messages: work(channel, m)) for _ in range(3)])  # type: ignore[misc]
            rates[name].append([size, total / best / 1e9])
    vector = torch.zeros(8 << 20)
    for exponent in range(16, 23):
        size = 1 << exponent
        best = min([await seconds(lambda s=size: our_round(endpoint, vector, s // 4)) for _ in range(3)])  # type: ignore[misc]
        rates["chunks"].append([size, 2 * vector.nbytes / best / 1e9])
    return rates


def plot(rates: dict[str, list[list[float]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    labels = {
        "unary": "bare, unary calls",
        "streamed": "bare, one stream",
        "chunks": "Endpoint, by chunk size",
    }
    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for name, points in rates.items():
        axes.plot(*zip(*points, strict=True), marker="o", label=labels[name])
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("bytes per message or chunk")
    axes.set_ylabel("GB/s over loopback")
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


async def client(addresses: list[str], arguments: argparse.Namespace) -> dict[str, Any]:
    endpoint = GrpcEndpoint(Identity("bench", "client", 2, secret=SECRET), RealRuntime("client"))
    endpoint.know("server", addresses[1])
    async with grpc.aio.insecure_channel(addresses[0], options=BARE_OPTIONS) as channel:
        result = await compare(channel, endpoint, arguments.bytes, arguments.rounds)
        if arguments.sweep:
            result["sweep_gb_s"] = await sweep(channel, endpoint)
        await endpoint.close()
    return result


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--bytes", type=int, default=80_000_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sweep", action="store_true", help="also message and chunk sizes, with a plot")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if any(os.environ.get(name) != value for name, value in NODE_ENV.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **NODE_ENV})
    torch.set_num_threads(1)
    sys.setswitchinterval(2e-4)
    if arguments.serve:
        asyncio.run(serve())
        return
    command = [sys.executable, __file__, "--serve"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            result = asyncio.run(client(server.stdout.readline().split(), arguments))
        finally:
            server.kill()
    result["machine"] = (
        f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()} {platform.release()}"
    )
    result["versions"] = {
        "python": platform.python_version(),
        "grpc": grpc.__version__,
        "torch": torch.__version__,
    }
    result["load_average"] = os.getloadavg()
    result["date"] = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    RESULTS.mkdir(exist_ok=True)
    keep(RESULTS / "grpc_bulk.json", result)
    if arguments.sweep:
        plot(result["sweep_gb_s"], RESULTS / "grpc_bulk.png")
    rates = ", ".join(f"{name} {rate:.2f} GB/s" for name, rate in result["gb_s"].items())
    print(
        f"put + get of {arguments.bytes / 1e6:g} MB, median of {arguments.rounds}: {rates}; ours is "
        f"{result['ratio_to_bare']:.2f} of bare, {result['ratio_to_bare_vector']:.2f} of bare_vector"
    )


if __name__ == "__main__":
    main()
