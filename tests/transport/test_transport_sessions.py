"""Sessions of gRPC over real connections: attacked, lost, remade, and ended while streams begin."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest

from gradstream.errors import GradstreamError, PeerLostError, RefusedError
from gradstream.runtime import RealRuntime
from gradstream.testing.pairs import SECRET
from gradstream.testing.pieces import body_frame, echo, reply_once
from gradstream.transport.base import Caller, Identity, Priority, Stream
from gradstream.transport.grpc import connection
from gradstream.transport.grpc import endpoint as grpc_module
from gradstream.transport.grpc.connection import CHALLENGE, METHOD, NO_CHALLENGE, SESSION, GrpcConnection
from gradstream.transport.grpc.endpoint import GrpcEndpoint
from gradstream.transport.limits import LIMITS
from gradstream.transport.proof import BAD_SECRET
from gradstream.wire import v1
from gradstream.wire.frames import PROTOCOL
from gradstream.wire.v1_pb2_grpc import PeerStub
from kit.bare import (
    Bare,
    BareSession,
    Refused,
    challenge,
    open_session,
    pass_metadata,
    show,
)

CALLER = Bare(Identity("job", "worker-0", 7, secret=SECRET), called="shard-0")
GUESS = replace(CALLER, identity=replace(CALLER.identity, secret=b"a guess of sixteen bytes"))


def endpoint(name: str = "shard-0", secret: bytes = SECRET, **options: Any) -> GrpcEndpoint:
    return GrpcEndpoint(Identity("job", name, 1, secret=secret), RealRuntime(name), **options)


@asynccontextmanager
async def shard(**options: Any) -> AsyncIterator[GrpcEndpoint]:
    server = endpoint(**options)
    server.serve("reply", reply_once)
    server.serve("echo", echo)
    await server.start()
    try:
        yield server
    finally:
        await server.close()
        assert not server._ends and not server._sessions._sessions and not server._background


@asynccontextmanager
async def caller(server: GrpcEndpoint, secret: bytes = SECRET) -> AsyncIterator[GrpcEndpoint]:
    client = endpoint("worker-9", secret)
    client.know("shard-0", server.address)
    try:
        yield client
    finally:
        await client.close()


async def call(client: GrpcEndpoint) -> None:
    assert (await client.call("shard-0", "reply", v1.Tensor(tag=7), v1.Tensor, silence_s=20)).tag == 7


async def call_in_the_end(client: GrpcEndpoint) -> None:
    """A call that is made again for as long as the peer is lost, as nodes do."""
    while True:
        try:
            return await call(client)
        except PeerLostError:
            continue


async def until(fact: Callable[[], object]) -> None:
    """Lets the loop turn until it is one."""
    while not fact():  # noqa: ASYNC110
        await asyncio.sleep(0)


def channel(server: GrpcEndpoint) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(server.address, options=[("grpc.use_local_subchannel_pool", 1)])


async def stream_code(dialled: grpc.aio.Channel, metadata: grpc.aio.Metadata | None) -> grpc.StatusCode:
    """How a stream that shows this ends. An Open follows it, which nobody is to read."""
    return await code_of(PeerStub(dialled).Stream(metadata=metadata))  # type: ignore[no-untyped-call]


async def code_of(begun: Any) -> grpc.StatusCode:
    try:
        await begun.write(CALLER.opening("reply"))
        while await begun.read() is not grpc.aio.EOF:  # type: ignore[attr-defined]
            pass
    except grpc.aio.AioRpcError:
        pass
    code: grpc.StatusCode = await begun.code()
    return code


# ---- what a caller may do wrongly -------------------------------------------------------


async def nothing(dialled: grpc.aio.Channel, session: BareSession) -> grpc.aio.Metadata | None:
    return None


async def garbage(dialled: grpc.aio.Channel, session: BareSession) -> grpc.aio.Metadata | None:
    return pass_metadata(b"\xff" * 1000)


async def a_used_pass(dialled: grpc.aio.Channel, session: BareSession) -> grpc.aio.Metadata | None:
    shown = session.metadata()
    assert await stream_code(dialled, shown) is grpc.StatusCode.OK
    return shown


async def a_forged_number(dialled: grpc.aio.Channel, session: BareSession) -> grpc.aio.Metadata | None:
    shown = v1.Pass.FromString(session.passes.pass_of(next(session.numbers)))
    shown.number += 1
    return pass_metadata(shown.SerializeToString())


async def a_forged_key(dialled: grpc.aio.Channel, session: BareSession) -> grpc.aio.Metadata | None:
    guess = BareSession(GUESS, session.greeting, session.proven, None)
    return guess.metadata()


async def of_a_session_that_has_ended(
    dialled: grpc.aio.Channel, session: BareSession
) -> grpc.aio.Metadata | None:
    session.close()
    while await stream_code(dialled, session.metadata()) is grpc.StatusCode.OK:
        pass  # until the called side has heard of it
    return session.metadata()


@pytest.mark.parametrize(
    "wrongly", [nothing, garbage, a_used_pass, a_forged_number, a_forged_key, of_a_session_that_has_ended]
)
def test_a_stream_without_a_good_pass_is_not_read(
    wrongly: Callable[[grpc.aio.Channel, BareSession], Awaitable[grpc.aio.Metadata | None]],
) -> None:
    async def main() -> None:
        served = list[Stream]()

        async def note(stream: Stream) -> None:
            served.append(stream)
            await reply_once(stream)

        async with shard() as server, channel(server) as dialled:
            server.serve("reply", note)
            metadata = await wrongly(dialled, await open_session(dialled, CALLER))
            num_served = len(served)
            assert await stream_code(dialled, metadata) is grpc.StatusCode.UNAUTHENTICATED
            assert len(served) == num_served
            async with caller(server) as client:
                await call(client)

    asyncio.run(main())


@pytest.mark.parametrize("replays", [False, True], ids=["a guess", "a replay"])
def test_sessions_are_proved(replays: bool) -> None:
    async def main() -> None:
        async with shard() as server, channel(server) as dialled, channel(server) as another:
            accepted = (await open_session(dialled, CALLER)).greeting
            said = accepted if replays else GUESS.greeting(await challenge(another))
            with pytest.raises(Refused) as refused:
                await show(another, CALLER, said)
            code, message = (v1.TOO_OLD, NO_CHALLENGE) if replays else (v1.BAD_SECRET, BAD_SECRET)
            assert (refused.value.refuse.code, refused.value.refuse.message) == (code, message)
            assert len(server._sessions._sessions) == 1

    asyncio.run(main())


def test_many_sessions_of_one_caller_are_refused_in_words() -> None:
    async def main() -> None:
        async with shard() as server, channel(server) as dialled:
            sessions = [await open_session(dialled, CALLER) for _ in range(LIMITS.sessions)]
            with pytest.raises(Refused, match="OVER_LIMIT: worker-0 has 16 connections to shard-0 already"):
                await open_session(dialled, CALLER)
            async with caller(server) as client:
                await call(client)
            sessions[0].close()
            await until(lambda: len(server._ends) < LIMITS.sessions)
            await open_session(dialled, CALLER)

    asyncio.run(main())


def test_a_wrong_secret_has_its_word() -> None:
    async def main() -> None:
        async with shard() as server, caller(server, b"another secret of a run") as client:
            for priority in Priority:  # each has a connection of its own
                stream = await client.open("shard-0", "reply", v1.Tensor(), priority=priority)
                with pytest.raises(RefusedError, match="BAD_SECRET") as refused:
                    await stream.recv(20)
                assert refused.value.peer == "shard-0"

    asyncio.run(main())


# ---- what a called side may do wrongly --------------------------------------------------


class Impostor(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """Serves the rpcs as it likes: what it answers to each, or None to say nothing."""

    def __init__(self, **answers: Callable[[], v1.Frame | None]) -> None:
        self._answers = answers
        self.num_streams = 0
        self.asked = asyncio.Event()
        self.address = ""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """See gRPC."""
        method = handler_call_details.method

        async def serve(_: object, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
            self.num_streams += method == METHOD
            self.asked.set()
            answer = self._answers[{CHALLENGE: "challenge", SESSION: "session"}[method]]()
            if answer is None:
                await asyncio.get_running_loop().create_future()
            else:
                await context.write(answer.SerializeToString())

        return grpc.stream_stream_rpc_method_handler(serve)

    async def __aenter__(self) -> Impostor:
        self._server = grpc.aio.server()
        self._server.add_generic_rpc_handlers((self,))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(None)


def challenged(protocol: int = PROTOCOL) -> v1.Frame:
    return v1.Frame(challenge=v1.Challenge(protocol=protocol, nonce=bytes(32)))


@pytest.mark.parametrize(
    ("answers", "error", "words"),
    [
        ({"challenge": lambda: None}, PeerLostError, "has not answered the greeting within 0.2 s"),
        ({"challenge": challenged, "session": lambda: None}, PeerLostError, "has not answered the greeting"),
        ({"challenge": lambda: challenged(2)}, RefusedError, "BAD_PROTOCOL.*protocol 2, worker-9 1"),
        (
            {"challenge": challenged, "session": lambda: v1.Frame(proven=v1.Proven(proof=bytes(32)))},
            RefusedError,
            "BAD_SECRET.*does not know this run's secret",
        ),
        ({"challenge": challenged, "session": v1.Frame}, PeerLostError, "no node of gradstream"),
        (
            {
                "challenge": challenged,
                "session": lambda: v1.Frame(refuse=v1.Refuse(code=v1.OVER_LIMIT, message="enough")),
            },
            RefusedError,
            "OVER_LIMIT.*enough",
        ),
    ],
)
def test_who_is_called_proves_it_too(
    answers: dict[str, Callable[[], v1.Frame | None]],
    error: type[GradstreamError],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "LIMITS", replace(LIMITS, handshake_s=0.2))

    async def main() -> None:
        async with Impostor(**answers) as impostor:
            client = endpoint("worker-9")
            client.know("shard-0", impostor.address)
            for _ in range(2):  # the second one greets anew
                with pytest.raises(error, match=words):
                    await call(client)
            assert impostor.num_streams == 0
            await client.close()

    asyncio.run(main())


def test_closing_while_a_greeting_waits_for_its_answer() -> None:
    async def main() -> None:
        async with Impostor(challenge=lambda: None) as impostor:
            client = endpoint("worker-9")
            client.know("shard-0", impostor.address)
            stream = await client.open("shard-0", "echo", v1.Tensor())
            sending = asyncio.ensure_future(stream.send(body_frame(b"x")))
            await impostor.asked.wait()
            await client.close()
            await asyncio.gather(sending, return_exceptions=True)
            assert stream.failure is not None
            assert not client._background and not client._connections

    asyncio.run(main())


@pytest.mark.parametrize("cancels", [False, True])
def test_a_send_before_the_session_does_not_outlive_it(cancels: bool) -> None:
    """Nobody is there, or the stream is cancelled: whoever waits for room to send is woken."""

    async def main() -> None:
        async with Impostor(challenge=lambda: None) as impostor:
            client = endpoint("worker-9")
            client.know("shard-0", impostor.address if cancels else "127.0.0.1:1")
            stream = await client.open("shard-0", "echo", v1.Tensor())
            sending = asyncio.ensure_future(stream.send(body_frame(b"x")))
            if cancels:
                await impostor.asked.wait()
                stream.cancel("enough")
            await sending
            with pytest.raises(GradstreamError):
                await stream.recv(20)
            await client.close()

    asyncio.run(main())


# ---- sessions that are lost -------------------------------------------------------------


def test_a_session_that_the_called_side_has_ended_is_made_anew() -> None:
    async def main() -> None:
        async with shard() as server, caller(server) as client:
            await call(client)
            server._end_sessions()
            await call_in_the_end(client)
            assert len(server._ends) == 1

    asyncio.run(main())


def test_a_session_that_the_called_side_has_forgotten_is_made_anew() -> None:
    """The connection lives, and with it the rpc of the session: nothing but a refused pass tells."""

    async def main() -> None:
        async with shard() as server, caller(server) as client:
            await call(client)
            (forgotten,) = server._sessions._sessions.values()
            server._sessions.over(forgotten)
            with pytest.raises(PeerLostError, match=r"its session has ended|INTERNAL"):
                await call(client)  # which of the two depends on whether gRPC had taken the Open
            await call(client)
            await until(lambda: len(server._ends) == 1)  # that of the forgotten one has ended, too

    asyncio.run(main())


def test_old_news_of_a_lost_session_do_not_end_the_new_one() -> None:
    async def main() -> None:
        async with shard() as server, caller(server) as client:
            await call(client)
            (connection,) = client._connections.values()
            old = connection.session
            assert old is not None
            server._end_sessions()
            await call_in_the_end(client)
            new = connection.session
            assert new is not old
            connection.lost(old)  # a stream that began under it hears only now
            assert connection.session is new
            await call(client)

    asyncio.run(main())


def test_a_stream_whose_session_ends_before_its_open_came_is_not_served() -> None:
    async def main() -> None:
        async with shard() as server, channel(server) as dialled:
            session = await open_session(dialled, CALLER)
            begun = PeerStub(dialled).Stream(metadata=session.metadata())  # type: ignore[no-untyped-call]
            (known,) = server._sessions._sessions.values()
            await until(lambda: 1 in known.used)  # its pass was looked at
            session.close()
            await until(lambda: not server._ends)
            assert await code_of(begun) is grpc.StatusCode.UNAUTHENTICATED

    asyncio.run(main())


def test_a_caller_that_is_hung_up_on_begins_no_stream_that_it_had_ready() -> None:
    async def main() -> None:
        async with shard() as server, channel(server) as dialled:
            session = await open_session(dialled, CALLER)
            ready = [PeerStub(dialled).Stream(metadata=session.metadata()) for _ in range(5)]  # type: ignore[no-untyped-call]
            (known,) = server._sessions._sessions.values()
            await until(lambda: all(number in known.used for number in range(1, 6)))
            server._disconnect_caller(Caller("worker-0", CALLER.identity.incarnation))
            codes = [await code_of(begun) for begun in ready]
            assert codes == [grpc.StatusCode.UNAUTHENTICATED] * 5
            await session.ended()
            assert not server._streams and not server._tasks

    asyncio.run(main())


def test_a_stream_whose_open_never_comes_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with shard() as server, channel(server) as dialled:
            session = await open_session(dialled, CALLER)
            monkeypatch.setattr(grpc_module, "LIMITS", replace(LIMITS, handshake_s=0.1))
            begun = PeerStub(dialled).Stream(metadata=session.metadata())  # type: ignore[no-untyped-call]
            assert await begun.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert await stream_code(dialled, session.metadata()) is grpc.StatusCode.OK

    asyncio.run(main())


def test_a_called_side_that_restarts_at_its_address() -> None:
    """gRPC connects anew by itself: streams after that have a session with the new process, or an error."""

    async def main() -> None:
        async with shard() as server, caller(server) as client:
            held = await client.open("shard-0", "echo", v1.Tensor())
            await held.send(body_frame(b"x"))
            await held.recv(20)
            await call(client)
            await server.abort()
            with pytest.raises(PeerLostError):
                await held.recv(20)
            async with shard(listen=server.address) as again:
                again.identity.incarnation = 2
                await call_in_the_end(client)
                stream = await client.open("shard-0", "echo", v1.Tensor())
                await stream.send(body_frame(b"y"))
                received = await stream.recv(20)
                assert received is not None and received.frame.body.data == b"y"
                assert len(again._ends) == 2
                address = again.address
            async with shard(listen=address, secret=b"the secret of another run"):
                with pytest.raises(RefusedError, match="BAD_SECRET"):
                    await call_in_the_end(client)

    asyncio.run(main())


class Wire:
    """Passes bytes on between a caller and a called side, and can be cut."""

    def __init__(self, target: str) -> None:
        self._target = target.rpartition(":")[::2]
        self._writers = list[asyncio.StreamWriter]()
        self.num_connections = 0
        self.address = ""

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        there, back = await asyncio.open_connection(self._target[0], int(self._target[1]))
        self._writers += [writer, back]
        await asyncio.gather(self._pass(reader, back), self._pass(there, writer))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
        except ConnectionError:
            pass
        finally:
            writer.close()

    def cut(self) -> None:
        """Breaks the connections that there are."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def __aenter__(self) -> Wire:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        self.address = f"{host}:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cut()
        self._server.close()


def test_a_connection_that_breaks_and_is_remade_has_a_new_session() -> None:
    async def main() -> None:
        async with shard() as server, Wire(server.address) as wire, caller(server) as client:
            client.know("shard-0", wire.address)
            await call(client)
            numbers = set(server._ends)
            for _ in range(3):
                wire.cut()
                await call_in_the_end(client)
                assert not numbers & set(server._ends)
                await until(lambda: len(server._ends) == 1)
                numbers |= set(server._ends)
            assert wire.num_connections >= 4

    asyncio.run(main())


def test_a_connection_that_ends_while_a_call_is_about_to_begin() -> None:
    """The channel is closed between session and stream: the stream is lost, and nobody waits for it."""

    async def main() -> None:
        async with shard() as server, caller(server) as client:
            await call(client)
            (connection,) = client._connections.values()
            assert isinstance(connection, GrpcConnection)
            await connection._channel.close(None)
            with pytest.raises(PeerLostError):
                await call(client)

    asyncio.run(main())
