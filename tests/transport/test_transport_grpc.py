"""What only gRPC has: ports, interfaces, processes that die, callers that are not ours."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import pytest
import torch

from gradstream.errors import ConfigError, PeerLostError, RefusedError
from gradstream.runtime import RealRuntime
from gradstream.testing.pairs import SECRET, grpc_pairs
from gradstream.testing.pieces import reply_once
from gradstream.transport.base import Identity, Priority, Stream
from gradstream.transport.grpc.connection import MAX_MESSAGE_BYTES, METHOD
from gradstream.transport.grpc.endpoint import GrpcEndpoint
from gradstream.transport.limits import Method
from gradstream.wire import v1
from gradstream.wire.frames import MAX_HEADER_BYTES
from gradstream.wire.v1_pb2_grpc import PeerStub
from kit.bare import Bare, BareSession, open_session

EOF: object = grpc.aio.EOF  # type: ignore[attr-defined]


def endpoint(name: str = "node", **options: object) -> GrpcEndpoint:
    return GrpcEndpoint(Identity("job", name, 1, secret=SECRET), RealRuntime(name), **options)  # type: ignore[arg-type]


async def echo(stream: Stream) -> None:
    while (received := await stream.recv(20)) is not None:
        await stream.send(received.frame, received.payload)


@asynccontextmanager
async def serving(
    method: str, handler: Callable[[Stream], Awaitable[None]], **options: object
) -> AsyncIterator[GrpcEndpoint]:
    server = endpoint("server", **options)
    server.serve(method, handler)
    await server.start()
    try:
        yield server
    finally:
        await server.close()


def test_port_in_use_names_the_address() -> None:
    async def main() -> None:
        async with serving("echo", echo) as server:
            with pytest.raises(ConfigError, match=rf"cannot listen on {server.address}: the port is in use"):
                await endpoint("other", listen=server.address).start()

    asyncio.run(main())


@pytest.mark.parametrize("num_turns", [0, 1, 2, 5])
def test_a_close_that_is_cancelled_leaves_no_server(num_turns: int) -> None:
    async def main() -> None:
        server = endpoint("server")
        await server.start()
        closing = asyncio.ensure_future(server.close())
        for _ in range(num_turns + 1):
            await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        successor = endpoint("successor", listen=server.address)
        await successor.start()  # the port is free
        await successor.close()

    asyncio.run(main())


def test_port_in_use_by_another_program() -> None:
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="in use"):
            await endpoint(listen=f"127.0.0.1:{taken.getsockname()[1]}").start()

    asyncio.run(main())


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0", "example.org:0", "192.0.2.1:7000"])
def test_other_interfaces_than_loopback_need_a_word(listen: str) -> None:
    with pytest.raises(ConfigError, match="neither encrypted"):
        endpoint(listen=listen)
    endpoint(listen=listen, insecure=True)


@pytest.mark.parametrize("listen", ["127.0.0.1", ":0", "127.0.0.1:http", "127.0.0.1:70000", ""])
def test_addresses_that_are_none(listen: str) -> None:
    with pytest.raises(ConfigError, match="expected host:port"):
        endpoint(listen=listen)


@pytest.mark.parametrize("forks", [False, True])
def test_a_killed_process_is_noticed_at_once(forks: bool) -> None:
    """SIGKILL in the middle of a conversation, also while a process lives that has copies of the sockets."""
    code = (
        "import asyncio, os, signal, time, test_transport_grpc as t\n"
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
        await stream.send(v1.Frame(body=v1.Body(data=b"x")))
        assert await stream.recv(20) is not None
        begun = client.runtime.now()
        if forks:
            process.send_signal(signal.SIGUSR1)
            assert process.stdout is not None
            children.append(int(process.stdout.readline()))
        process.send_signal(signal.SIGKILL)
        with pytest.raises(PeerLostError):
            await stream.recv(20)
        assert client.runtime.now() - begun < 2e9
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


def test_a_caller_that_vanishes_breaks_its_handlers_stream() -> None:
    async def main() -> None:
        ended: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()

        async def note(stream: Stream) -> None:
            try:
                while await stream.recv(20) is not None:
                    pass
            except BaseException as error:
                ended.set_result(error)
                raise
            ended.set_result(None)

        async with serving("note", note) as server:
            client = endpoint("client")
            client.know("server", server.address)
            stream = await client.open("server", "note", v1.Tensor())
            await stream.send(v1.Frame(chunk=v1.Chunk(elems=1, dtype=v1.FLOAT32)), torch.zeros(1))
            await client.abort()
            assert isinstance(await ended, PeerLostError)

    asyncio.run(main())


async def read(call: grpc.aio.StreamStreamCall[object, object]) -> v1.Frame:
    message = await call.read()
    assert isinstance(message, bytes)
    return v1.Frame.FromString(message)


STUB = Bare(Identity("job", "stub", 3, secret=SECRET), called="server")
opening = STUB.opening


@asynccontextmanager
async def greeted(server: GrpcEndpoint) -> AsyncIterator[tuple[grpc.aio.Channel, BareSession]]:
    """A channel of somebody else's program, and a session on it."""
    async with grpc.aio.insecure_channel(server.address) as channel:
        yield channel, await open_session(channel, STUB)


def test_bare_stubs_get_along() -> None:
    """Generated code and nothing else: payload as a plain protobuf field, both ways."""

    async def main() -> None:
        async with serving("echo", echo) as server, greeted(server) as (channel, session):
            payload = torch.arange(6.0).numpy().tobytes()
            call = PeerStub(channel).Stream(metadata=session.metadata())  # type: ignore[no-untyped-call]
            await call.write(opening("echo"))
            accept = await call.read()
            assert accept.accept.window == 16
            for index in range(3):
                chunk = v1.Chunk(index=index, elems=6, dtype=v1.FLOAT32)
                await call.write(v1.Frame(chunk=chunk, payload=payload))
                echoed = await call.read()
                assert (echoed.chunk.index, echoed.payload) == (index, payload)
            await call.write(v1.Frame(end=v1.End()))
            await call.done_writing()
            assert (await call.read()).WhichOneof("kind") == "end"
            assert await call.read() is EOF
            assert await call.code() is grpc.StatusCode.OK

    asyncio.run(main())


@pytest.mark.parametrize(
    ("first", "code"),
    [
        (b"\xff\xff\xff", "BAD_REQUEST"),
        (b"", "BAD_REQUEST"),
        (v1.Frame(end=v1.End()).SerializeToString(), "BAD_REQUEST"),
        (opening("echo", protocol=2).SerializeToString(), "BAD_PROTOCOL"),
        (opening("echo", job="other").SerializeToString(), "BAD_JOB"),
        (opening("echo", fingerprint=5).SerializeToString(), "BAD_FINGERPRINT"),
        (opening("echo", sender="another").SerializeToString(), "BAD_REQUEST"),
        (opening("echo", incarnation=4).SerializeToString(), "BAD_REQUEST"),
        (opening("nonsense").SerializeToString(), "UNKNOWN_METHOD"),
    ],
)
def test_first_frames_are_checked(first: bytes, code: str) -> None:
    async def main() -> None:
        async with serving("echo", echo) as server, greeted(server) as (channel, session):
            server.identity.fingerprint = 7
            call = channel.stream_stream(METHOD)(metadata=session.metadata())  # type: ignore[call-arg]
            await call.write(first)
            refuse = (await read(call)).refuse
            assert v1.Code.Name(refuse.code) == code
            assert refuse.message
            await call.done_writing()
            assert await call.read() is EOF

    asyncio.run(main())


def test_garbage_in_the_middle_and_chunks_without_credit() -> None:
    """Both are refused, and the server goes on serving."""
    chunk = v1.Frame(chunk=v1.Chunk(elems=1, dtype=v1.FLOAT32), payload=bytes(4)).SerializeToString()

    async def hold(stream: Stream) -> None:
        await asyncio.get_running_loop().create_future()

    async def main() -> None:
        async with serving("hold", hold) as server, greeted(server) as (channel, session):
            server.methods = {"hold": Method(members=False, chunks=True)}
            server.serve("hold", hold)
            for messages in ([b"\xff\xff"], [chunk] * 17):
                call = channel.stream_stream(METHOD)(metadata=session.metadata())  # type: ignore[call-arg]
                for message in [opening("hold").SerializeToString(), *messages]:
                    await call.write(message)
                kinds = list[v1.Frame]()
                while not kinds or kinds[-1].WhichOneof("kind") != "refuse":
                    kinds.append(await read(call))
                assert kinds[-1].refuse.code == v1.BAD_REQUEST
                await call.done_writing()
            server.serve("echo", echo)
            client = endpoint("client")
            client.know("server", server.address)
            stream = await client.open("server", "echo", v1.Tensor())
            await stream.send(v1.Frame(body=v1.Body(data=b"still here")))
            received = await stream.recv(20)
            assert received is not None
            assert received.frame.body.data == b"still here"
            await client.close()

    asyncio.run(main())


@pytest.mark.parametrize("size_bytes", [MAX_HEADER_BYTES + 1, MAX_MESSAGE_BYTES])
def test_a_message_that_is_too_long_ends_its_stream_only(size_bytes: int) -> None:
    async def main() -> None:
        async with serving("echo", echo) as server:
            client = endpoint("client")
            client.know("server", server.address)
            stream = await client.open("server", "echo", v1.Tensor())
            await stream.send(v1.Frame(body=v1.Body(data=bytes(size_bytes))))
            with pytest.raises((RefusedError, PeerLostError)):
                await stream.recv(20)
            stream = await client.open("server", "echo", v1.Tensor())
            await stream.send(v1.Frame(body=v1.Body(data=b"x")))
            assert await stream.recv(20) is not None
            await client.close()

    asyncio.run(main())


def test_who_serves_strangers_takes_less_at_once() -> None:
    async def main() -> None:
        async with serving("echo", echo, max_message_bytes=1 << 20) as server:
            client = endpoint("client")
            client.know("server", server.address)
            for size_bytes, comes_back in ((1 << 19, True), (2 << 20, False)):
                stream = await client.open("server", "echo", v1.Tensor())
                await stream.send(v1.Frame(body=v1.Body(data=bytes(size_bytes))))
                if comes_back:
                    assert await stream.recv(20) is not None
                    await stream.end()
                else:
                    with pytest.raises((RefusedError, PeerLostError)):
                        await stream.recv(20)
            await client.close()

    asyncio.run(main())


def test_two_connections_per_peer() -> None:
    """Control and bulk do not share a TCP connection."""
    run, make_pair = grpc_pairs()

    async def main() -> None:
        peers = set[str]()

        async with make_pair() as pair:
            pair.far.serve("echo", echo)
            far = pair.far
            assert isinstance(far, GrpcEndpoint)
            answer = far.answer

            async def spy(request: object, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
                peers.add(context.peer())
                await answer(request, context)

            far._routes.handlers[METHOD] = grpc.stream_stream_rpc_method_handler(spy)
            stream = await pair.near.open("far", "echo", v1.Tensor())
            await stream.send(v1.Frame(body=v1.Body()))
            await stream.recv(20)
            with pytest.raises(RefusedError):
                await pair.near.call("far", "nonsense", v1.Tensor(), v1.Tensor)
        assert len(peers) == 2

    run(main())


def test_bulk_streams_take_their_connections_in_turn() -> None:
    run, make_pair = grpc_pairs(connections=3)

    async def main() -> None:
        async with make_pair() as pair:
            near = pair.near
            assert isinstance(near, GrpcEndpoint)
            pair.far.serve("reply", reply_once, model=False)
            for priority, most in ((Priority.CONTROL, 1), (Priority.BULK, 3)):
                for _ in range(4):
                    await near.call("far", "reply", v1.Body(), v1.Body, priority=priority)
                    for _ in range(2):  # each peer has turns of its own
                        near._dial("other", near.address, priority)
                assert sum(key[:2] == ("far", priority) for key in near._connections) == most
            near.redial("far", 0.0)
            near.redial("other", 0.0)
            assert not near._connections

    run(main())
