"""Question: what does a message cost over each RPC and carrier, by its size?

One process sends a message of n bytes out of its memory, another receives it into memory of its own
and answers with a few bytes; then comes the next one. Seconds of that round trip, and n over them:

* `grpc unary`: a bare grpc.aio call with the message as its request;
* `grpc`, `tcp`, `shm`: a stream of gradstream's over that carrier, in chunks of 1 MiB at most;
* `socket`: blocking `sendall` and `recv_into` over TCP, and nothing else;
* `zeromq`: a pair of ZeroMQ's sockets over TCP; `flight`: a put of Arrow Flight.

All in the same two processes over loopback, by turns. Medians of `--repeats` batches.

    python bench/carriers.py            # prints the table; writes bench/results/carriers.json and .png

ZeroMQ and Arrow Flight take `pip install 'gradstream[bench]'`, and are left out with a word without.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import torch

from common import RESULTS, command_line, keep, origin
from gradstream.errors import GradstreamError
from gradstream.memory import Vector
from gradstream.run.local.environment import node_environment
from gradstream.runtime.real import RealRuntime
from gradstream.transport.base import Identity, Stream
from gradstream.transport.carriers import make_endpoint, make_memory
from gradstream.wire import v1

SECRET = b"the same for all nodes of a bench"
SIZES = [1 << exponent for exponent in range(10, 27, 2)]
OURS = ("grpc", "tcp", "shm")
CHUNK_ELEMS = 1 << 18
BATCH_BYTES, BATCH_MESSAGES = 32 << 20, 200  # of one batch, whichever is less
OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]

Send = Callable[[int], Awaitable[None]]
"""Sends so many messages of one size, one after the other."""


# ---- the receiving process ---------------------------------------------------------------------


class Bare(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """A unary call that copies its request into memory."""

    def __init__(self) -> None:
        self.memory = np.ones(max(SIZES), dtype=np.uint8)

    def service(self, handler_call_details: Any) -> Any:
        """The one method."""
        return grpc.unary_unary_rpc_method_handler(self.one)

    async def one(self, message: bytes, context: Any) -> bytes:
        """Takes a message."""
        self.memory[: len(message)] = np.frombuffer(message, dtype=np.uint8)
        return b"k"


def serve_socket(listener: socket.socket) -> None:
    memory = memoryview(np.ones(max(SIZES), dtype=np.uint8))  # type: ignore[arg-type]
    connection, _ = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while order := connection.recv(8, socket.MSG_WAITALL):
        view = memory[: struct.unpack("<q", order)[0]]
        while view:
            view = view[connection.recv_into(view) :]
        connection.sendall(b"k")


def serve_zeromq(puller: Any) -> None:
    memory = np.ones(max(SIZES), dtype=np.uint8)
    while True:
        message = puller.recv(copy=False)
        memory[: len(message)] = np.frombuffer(message, dtype=np.uint8)
        puller.send(b"k")


def flight_server() -> Any:
    from pyarrow import flight

    class Server(flight.FlightServerBase):  # type: ignore[misc]
        memory = np.ones(max(SIZES), dtype=np.uint8)

        def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
            """Takes batches, and answers each."""
            for chunk in reader:
                data = np.frombuffer(chunk.data.column(0).buffers()[1], dtype=np.uint8)
                self.memory[: len(data)] = data
                writer.write(b"k")

    return Server("grpc://127.0.0.1:0")


async def take(stream: Stream) -> None:
    """Receives messages of the size that the Open says, and answers each when all of it is here."""
    elems = v1.Tensor.FromString(stream.opened.body).elems
    memory, got = torch.ones(elems), 0

    def place(chunk: v1.Chunk) -> torch.Tensor | None:
        start = chunk.index * CHUNK_ELEMS
        return memory[start : start + chunk.elems]

    stream.land(place)
    while (received := await stream.recv(60)) is not None:
        chunk = received.frame.chunk
        if not received.landed:
            assert received.payload is not None
            place(chunk).numpy()[...] = received.payload.numpy()  # type: ignore[union-attr]
        got += chunk.elems
        if got == elems:
            got = 0
            await stream.send(v1.Frame(body=v1.Body()))


async def serve() -> None:
    addresses: dict[str, Any] = {}
    endpoints = []
    for carrier in ours():
        identity = Identity("bench", "server", 1, secret=SECRET)
        endpoint = make_endpoint(identity, runtime_of("server", carrier), carrier)  # type: ignore[arg-type]
        endpoint.serve("take", take)
        await endpoint.start()
        endpoints.append(endpoint)
        addresses[carrier] = endpoint.address
    bare = grpc.aio.server(options=OPTIONS)
    bare.add_generic_rpc_handlers((Bare(),))
    addresses["grpc unary"] = f"127.0.0.1:{bare.add_insecure_port('127.0.0.1:0')}"
    await bare.start()
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=serve_socket, args=(listener,), daemon=True).start()
    addresses["socket"] = listener.getsockname()[1]
    try:
        import zmq

        puller = zmq.Context().socket(zmq.PAIR)
        addresses["zeromq"] = f"tcp://127.0.0.1:{puller.bind_to_random_port('tcp://127.0.0.1')}"
        threading.Thread(target=serve_zeromq, args=(puller,), daemon=True).start()
    except ImportError:
        pass
    try:
        server = flight_server()
        addresses["flight"] = f"grpc://127.0.0.1:{server.port}"
    except ImportError:
        pass
    print(json.dumps(addresses), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    os._exit(0)  # threads of libraries would be waited for


def runtime_of(name: str, carrier: str) -> RealRuntime:
    runtime = RealRuntime(name)
    runtime.memory = make_memory(carrier, "127.0.0.1:0")  # type: ignore[arg-type]
    return runtime


def ours() -> list[str]:
    """Those of our carriers that this system has."""
    there = []
    for carrier in OURS:
        try:
            make_endpoint(Identity("bench", "trial", 1, secret=SECRET), RealRuntime("trial"), carrier)  # type: ignore[arg-type]
        except GradstreamError as error:
            print(f"{carrier} is left out: {error}", file=sys.stderr)
        else:
            there.append(carrier)
    return there


# ---- the sending process -----------------------------------------------------------------------


async def our_sender(carrier: str, address: str, stack: AsyncExitStack) -> Callable[[int], Awaitable[Send]]:
    runtime = runtime_of("client", carrier)
    endpoint = make_endpoint(Identity("bench", "client", 2, secret=SECRET), runtime, carrier)  # type: ignore[arg-type]
    await endpoint.start()
    stack.push_async_callback(endpoint.close)
    endpoint.know("server", address)

    async def of_size(size: int) -> Send:
        elems = size // 4
        vector = runtime.memory.allocate(elems, torch.float32, "message", exchanged=True)
        vector.tensor.fill_(1)
        stream = await endpoint.open("server", "take", v1.Tensor(elems=elems))

        async def send(count: int) -> None:
            for _ in range(count):
                await send_once(stream, vector)

        return send

    return of_size


async def send_once(stream: Stream, vector: Vector) -> None:
    lent = []
    for index, start in enumerate(range(0, len(vector), CHUNK_ELEMS)):
        span = vector[start : start + CHUNK_ELEMS]
        chunk = v1.Chunk(index=index, elems=len(span), dtype=v1.FLOAT32)
        lent.append(await stream.lend(v1.Frame(chunk=chunk), span, 60))
    await stream.recv(60)
    for one in lent:  # the memory is the sender's again
        await one.back(60)


async def unary_sender(address: str, stack: AsyncExitStack) -> Callable[[int], Awaitable[Send]]:
    channel = await stack.enter_async_context(grpc.aio.insecure_channel(address, options=OPTIONS))
    one = channel.unary_unary("/bare/one")  # type: ignore[call-arg]

    async def of_size(size: int) -> Send:
        source = np.ones(size, dtype=np.uint8)

        async def send(count: int) -> None:
            for _ in range(count):
                await one(source.tobytes())

        return send

    return of_size


async def socket_sender(port: int) -> Callable[[int], Awaitable[Send]]:
    connection = socket.create_connection(("127.0.0.1", port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    async def of_size(size: int) -> Send:
        source = np.ones(size, dtype=np.uint8)

        async def send(count: int) -> None:
            for _ in range(count):
                connection.sendall(struct.pack("<q", size))
                connection.sendall(source)
                connection.recv(1)

        return send

    return of_size


async def zeromq_sender(address: str) -> Callable[[int], Awaitable[Send]]:
    import zmq

    pusher = zmq.Context().socket(zmq.PAIR)
    pusher.connect(address)

    async def of_size(size: int) -> Send:
        source = np.ones(size, dtype=np.uint8)

        async def send(count: int) -> None:
            for _ in range(count):
                pusher.send(source, copy=False)
                pusher.recv()

        return send

    return of_size


async def flight_sender(address: str) -> Callable[[int], Awaitable[Send]]:
    import pyarrow as pa
    from pyarrow import flight

    client = flight.connect(address)
    schema = pa.schema([("data", pa.uint8())])

    async def of_size(size: int) -> Send:
        batch = pa.record_batch([pa.array(np.ones(size, dtype=np.uint8))], schema=schema)
        writer, reader = client.do_put(flight.FlightDescriptor.for_path("message"), schema)

        async def send(count: int) -> None:
            for _ in range(count):
                writer.write_batch(batch)
                reader.read()

        return send

    return of_size


async def measure(addresses: dict[str, Any], repeats: int) -> dict[str, dict[int, float]]:
    async with AsyncExitStack() as stack:
        return await measured(addresses, repeats, stack)


async def measured(
    addresses: dict[str, Any], repeats: int, stack: AsyncExitStack
) -> dict[str, dict[int, float]]:
    makers: dict[str, Callable[[Any], Awaitable[Callable[[int], Awaitable[Send]]]]] = {
        "grpc unary": lambda address: unary_sender(address, stack),
        **{name: lambda address, name=name: our_sender(name, address, stack) for name in OURS},  # type: ignore[misc]
        "socket": socket_sender,
        "zeromq": zeromq_sender,
        "flight": flight_sender,
    }
    senders = {name: await make(addresses[name]) for name, make in makers.items() if name in addresses}
    for name in [name for name in makers if name not in addresses]:
        print(f"{name} is not there: left out", file=sys.stderr)
    found: dict[str, dict[int, float]] = {name: {} for name in senders}
    for size in SIZES:
        count = max(1, min(BATCH_MESSAGES, BATCH_BYTES // size))
        sends = {name: await of_size(size) for name, of_size in senders.items()}
        times: dict[str, list[float]] = {name: [] for name in sends}
        for round_ in range(repeats + 1):
            for name, send in sends.items():
                begun = time.perf_counter()
                await send(count)
                if round_:  # the first touches memory
                    times[name].append((time.perf_counter() - begun) / count)
        for name, values in times.items():
            found[name][size] = statistics.median(values)
    return found


# ---- what is shown -----------------------------------------------------------------------------


def size_text(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def show(found: dict[str, dict[int, float]]) -> None:
    print(f"{'':9s}" + "".join(f"{name:>19s}" for name in found))
    for size in SIZES:
        cells = [f"{1e6 * row[size]:9.0f} µs {size / row[size] / 1e9:5.2f} G" for row in found.values()]
        print(f"{size_text(size):9s}" + "".join(f"{cell:>19s}" for cell in cells))


def plot(found: dict[str, dict[int, float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for name, row in found.items():
        style = "-" if name in OURS else ":"
        axes.plot(list(row), [size / row[size] / 1e9 for size in row], style, marker="o", ms=4, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(SIZES, [size_text(size) for size in SIZES], rotation=30)
    axes.set_xlabel("message (one at a time, acknowledged)")
    axes.set_ylabel("GB/s between two processes")
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--no-record", action="store_true", help="print only")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    environment = node_environment(2)
    if any(os.environ.get(name) != value for name, value in environment.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **environment})
    sys.setswitchinterval(2e-4)
    torch.set_num_threads(1)
    if given.serve:
        asyncio.run(serve())
        return
    command = [sys.executable, __file__, "--serve"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None and server.stdin is not None
        try:
            found = asyncio.run(measure(json.loads(server.stdout.readline()), given.repeats))
        finally:
            server.kill()
    show(found)
    if not given.no_record:
        record = {
            **origin(environment),
            "repeats": given.repeats,
            "median_s": found,
        }
        keep(RESULTS / "carriers.json", record)
        try:
            plot(found, RESULTS / "carriers.png")
        except ImportError:
            print("no plot: it takes matplotlib (pip install 'gradstream[bench]')", file=sys.stderr)
    sys.stdout.flush()
    os._exit(0)  # threads of libraries would be waited for


if __name__ == "__main__":
    main()
