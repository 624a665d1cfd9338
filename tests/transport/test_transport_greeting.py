"""How connections over sockets begin: every step done wrongly, by either side, and what is left behind."""

from __future__ import annotations

import asyncio
import hmac
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from gradstream.errors import DeadlineError, PeerLostError, RefusedError
from gradstream.memory.segments import SharedMemory
from gradstream.runtime import RealRuntime
from gradstream.testing.pairs import SECRET
from gradstream.testing.pieces import echo, reply_once
from gradstream.transport import proof
from gradstream.transport.base import Identity
from gradstream.transport.carriers import ShmEndpoint
from gradstream.transport.limits import LIMITS
from gradstream.transport.socket import endpoint
from gradstream.transport.socket.endpoint import SocketEndpoint
from gradstream.transport.socket.tcp import TcpEndpoint
from gradstream.wire import v1
from gradstream.wire.frames import PROTOCOL
from kit.bare import Bare, BareSocket, Refused, packed

CALLER = Bare(Identity("job", "worker-0", 7, secret=SECRET), called="shard-0")
GUESS = replace(CALLER, identity=replace(CALLER.identity, secret=b"a guess of sixteen bytes"))
SILENCE_S = 20.0
Make = Callable[..., SocketEndpoint]


def tcp(name: str = "shard-0", secret: bytes = SECRET, **options: Any) -> SocketEndpoint:
    return TcpEndpoint(Identity("job", name, 1, secret=secret), RealRuntime(name), **options)


def shm(name: str = "shard-0", secret: bytes = SECRET) -> SocketEndpoint:
    return ShmEndpoint(Identity("job", name, 1, secret=secret), RealRuntime(name, memory=SharedMemory()))


carriers = pytest.mark.parametrize("make", [tcp, shm], ids=["tcp", "shm"])


@asynccontextmanager
async def started(server: SocketEndpoint) -> AsyncIterator[SocketEndpoint]:
    """A shard that notes whom it has served: nobody, in most tests."""
    server.serve("reply", reply_once)
    server.serve("echo", echo)
    await server.start()
    try:
        yield server
    finally:
        await server.close()


def dialled(server: SocketEndpoint) -> BareSocket:
    """A connection to it, by hand."""
    if isinstance(server, TcpEndpoint):
        return BareSocket(server.address)
    connected = socket.socket(socket.AF_UNIX)
    connected.connect("\0" + server.address)
    return BareSocket(connected)


async def ask(make: Make, address: str, secret: bytes = SECRET) -> None:
    """A whole call of another node."""
    client = make("worker-9", secret)
    client.know("shard-0", address)
    try:
        assert (
            await client.call("shard-0", "reply", v1.Tensor(tag=7), v1.Tensor, silence_s=SILENCE_S)
        ).tag == 7
    finally:
        await client.close()


async def until(fact: Callable[[], object]) -> None:
    """Lets the loop turn until it is one."""
    while not fact():  # noqa: ASYNC110
        await asyncio.sleep(0)


# ---- what a caller may do wrongly ---------------------------------------------------------


async def without_proof(raw: BareSocket, server: SocketEndpoint) -> None:
    await raw.show(v1.Greeting(protocol=PROTOCOL, challenge=(await raw.challenge()).nonce, sender="worker-0"))


async def with_a_guess(raw: BareSocket, server: SocketEndpoint) -> None:
    await raw.greet(GUESS)


async def to_another_node(raw: BareSocket, server: SocketEndpoint) -> None:
    await raw.greet(replace(CALLER, called="shard-1"))


async def of_another_job(raw: BareSocket, server: SocketEndpoint) -> None:
    await raw.greet(replace(CALLER, identity=replace(CALLER.identity, job="another")))


async def replayed(raw: BareSocket, server: SocketEndpoint) -> None:
    """Word for word as it was accepted a moment ago, on another connection that is still open."""
    async with dialled(server) as before:
        accepted, _ = await before.greet(CALLER)
        await raw.challenge()
        await raw.show(accepted)


async def replayed_with_the_new_nonce(raw: BareSocket, server: SocketEndpoint) -> None:
    async with dialled(server) as before:
        accepted, _ = await before.greet(CALLER)
        accepted.challenge = (await raw.challenge()).nonce
        await raw.show(accepted)


async def under_another_name(raw: BareSocket, server: SocketEndpoint) -> None:
    said = CALLER.greeting(await raw.challenge())
    said.sender = "worker-1"
    await raw.show(said)


async def reflected(raw: BareSocket, server: SocketEndpoint) -> None:
    """The called side's own nonce and, of another connection, its own proof."""
    async with dialled(server) as before:
        _, proven = await before.greet(CALLER)
    nonce = (await raw.challenge()).nonce
    who = {"sender": "worker-0", "incarnation": 7, "count": 1}
    await raw.show(
        v1.Greeting(protocol=PROTOCOL, challenge=nonce, nonce=nonce, proof=proven.proof, **who)  # type: ignore[arg-type]
    )


@carriers
@pytest.mark.parametrize(
    "wrongly",
    [
        without_proof,
        with_a_guess,
        to_another_node,
        of_another_job,
        replayed,
        replayed_with_the_new_nonce,
        under_another_name,
        reflected,
    ],
)
def test_who_does_not_prove_it_is_told_nothing(
    make: Make, wrongly: Callable[[BareSocket, SocketEndpoint], Awaitable[None]]
) -> None:
    async def main() -> None:
        async with started(make()) as server, dialled(server) as raw:
            with pytest.raises(Refused) as refused:
                await wrongly(raw, server)
            assert refused.value.refuse.code == v1.BAD_SECRET
            assert (
                refused.value.refuse.message
                == "the caller has not proved that it knows the secret of this run"
            )
            await raw.closed()
            await until(lambda: not server._strangers)
            await ask(make, server.address)

    asyncio.run(main())


@carriers
def test_the_steps_above_are_right_but_for_one(make: Make) -> None:
    """The same greeting, by hand and with nothing wrong in it, is served."""

    async def main() -> None:
        async with started(make()) as server, dialled(server) as raw:
            await raw.greet(CALLER)
            await raw.say(packed(1, 0, CALLER.opening("reply")))
            kinds = {(await raw.hear())[1].WhichOneof("kind") for _ in range(2)}
            assert kinds == {"accept", "body"}

    asyncio.run(main())


@carriers
def test_streams_before_the_greeting_are_none(make: Make) -> None:
    async def main() -> None:
        async with started(make()) as server, dialled(server) as raw:
            await raw.challenge()
            await raw.say(packed(1, 0, CALLER.opening("reply")))
            await raw.closed()
            assert not server._callers and not server._streams

    asyncio.run(main())


@carriers
@pytest.mark.parametrize(
    "said",
    [b"", b"\0", packed(0, 0, v1.Frame())[:-1], packed(0, 0, v1.Frame(refuse=v1.Refuse(message="no")))],
)
def test_a_stranger_has_so_much_time_and_no_more(
    make: Make, said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "LIMITS", replace(LIMITS, handshake_s=0.05))

    async def main() -> None:
        async with started(make()) as server, dialled(server) as raw:
            await raw.challenge()
            await raw.say(said)
            await raw.closed()
            await until(lambda: not server._strangers)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


@carriers
def test_idle_strangers_do_not_keep_others_out(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "LIMITS", replace(LIMITS, strangers=3))

    async def main() -> None:
        async with started(make()) as server:
            idle = [await dialled(server).__aenter__() for _ in range(10)]
            for raw in idle[:7]:
                await raw.closed()
            assert len(server._strangers) == 3
            await ask(make, server.address)
            for raw in idle:
                await raw.__aexit__()
            await until(lambda: not server._strangers)

    asyncio.run(main())


@carriers
def test_refused_greetings_leave_no_descriptor(make: Make) -> None:
    async def main() -> None:
        async with started(make()) as server:
            before = set(os.listdir("/proc/self/fd"))
            for _ in range(6):
                async with dialled(server) as raw:
                    with pytest.raises(Refused):
                        await raw.greet(GUESS)
                    await raw.closed()
                with pytest.raises(RefusedError, match="BAD_SECRET"):
                    await ask(make, server.address, b"a guess of sixteen bytes")
            await until(lambda: len(os.listdir("/proc/self/fd")) <= len(before) + 1)  # that of listdir itself

    asyncio.run(main())


@carriers
def test_closing_while_strangers_greet(make: Make) -> None:
    async def main() -> None:
        async with started(make()) as server, dialled(server) as raw, dialled(server) as other:
            await raw.challenge()
            await other.challenge()
            await server.close()
            await raw.closed()
            await other.closed()
        await until(lambda: asyncio.all_tasks() == {asyncio.current_task()})

    asyncio.run(main())


@carriers
def test_a_wrong_secret_has_its_word_on_both_sides(make: Make) -> None:
    async def main() -> None:
        async with started(make()) as server:
            with pytest.raises(RefusedError, match="has not proved that it knows the secret") as refused:
                await ask(make, server.address, b"another secret of a run")
            assert (refused.value.code, refused.value.peer) == ("BAD_SECRET", "shard-0")

    asyncio.run(main())


@carriers
def test_connections_of_one_caller_are_bounded(make: Make) -> None:
    async def main() -> None:
        async with started(make()) as server:
            raws = [await dialled(server).__aenter__() for _ in range(LIMITS.sessions)]
            for number, raw in enumerate(raws):
                await raw.greet(CALLER, link=number)
            async with dialled(server) as raw:
                with pytest.raises(Refused, match="OVER_LIMIT: worker-0 has 16 connections"):
                    await raw.greet(CALLER, link=99)
            await ask(make, server.address)  # somebody else's are not counted
            await raws[0].__aexit__()
            await until(lambda: len(server._callers) < LIMITS.sessions)
            async with dialled(server) as raw:
                await raw.greet(CALLER, link=100)
            for raw in raws[1:]:
                await raw.__aexit__()
            await until(lambda: not server._callers)

    asyncio.run(main())


def test_lines_that_nobody_takes_are_bounded() -> None:
    async def main() -> None:
        async with started(tcp()) as server:
            raws = [await dialled(server).__aenter__() for _ in range(LIMITS.sessions)]
            for number, raw in enumerate(raws):
                await raw.greet(CALLER, line=f"exchange/{number}")
            async with dialled(server) as raw:
                with pytest.raises(Refused, match="OVER_LIMIT"):
                    await raw.greet(CALLER, line="exchange/99")
            for raw in raws:
                await raw.__aexit__()

    asyncio.run(main())


@carriers
def test_a_connection_of_a_link_is_there_once(make: Make) -> None:
    async def main() -> None:
        async with started(make()) as server, dialled(server) as first, dialled(server) as second:
            await first.greet(CALLER, link=3, count=2)
            with pytest.raises(Refused, match="connection 0 of multiplexer 3 of worker-0 is there already"):
                await second.greet(CALLER, link=3, count=2)
            async with dialled(server) as third:
                with pytest.raises(Refused, match="BAD_REQUEST"):
                    await third.greet(CALLER, link=3, index=5, count=9)

    asyncio.run(main())


# ---- what a called side may do wrongly -----------------------------------------------------


class Impostor:
    """Listens where a shard is expected, and knows no secret.

    Args:
        answers: what it says after its challenge and a greeting; None says nothing.
        challenge: what it begins with; None says nothing.
    """

    def __init__(
        self, answers: Callable[[v1.Greeting], bytes | None], challenge: bytes | None = b"default"
    ) -> None:
        self._answers = answers
        default = packed(0, 0, v1.Frame(challenge=v1.Challenge(protocol=PROTOCOL, nonce=proof.new_nonce())))
        self._challenge = default if challenge == b"default" else challenge
        self.heard: list[bytes] = []
        self.address = ""

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        raw = BareSocket("")
        raw.reader, raw.writer = reader, writer
        try:
            if self._challenge is not None:
                await raw.say(self._challenge)
                greeting = (await raw.hear())[1].greeting
                self.heard.append(greeting.SerializeToString())
                said = self._answers(greeting)
                if said is not None:
                    await raw.say(said)
            while more := await reader.read(1 << 16):
                self.heard.append(more)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def __aenter__(self) -> Impostor:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        self.address = f"{host}:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()


def shown(proof_of: Callable[[v1.Greeting], bytes]) -> Callable[[v1.Greeting], bytes]:
    return lambda greeting: packed(0, 0, v1.Frame(proven=v1.Proven(proof=proof_of(greeting))))


@pytest.mark.parametrize(
    ("answers", "error", "words"),
    [
        (shown(lambda greeting: b""), RefusedError, "BAD_SECRET.*does not know this run's secret"),
        (shown(lambda greeting: bytes(32)), RefusedError, "BAD_SECRET.*does not know this run's secret"),
        (shown(lambda greeting: greeting.proof), RefusedError, "BAD_SECRET.*does not know this run's secret"),
        (shown(lambda greeting: greeting.nonce), RefusedError, "BAD_SECRET.*does not know this run's secret"),
        (lambda greeting: packed(0, 0, v1.Frame(end=v1.End())), PeerLostError, "no node of gradstream"),
        (lambda greeting: b"HTTP/1.1 400 Bad Request\r\n\r\n", PeerLostError, "no node of gradstream"),
        (lambda greeting: None, PeerLostError, "then said nothing for 0.5 s"),
    ],
)
def test_who_is_called_proves_it_too(
    answers: Callable[[v1.Greeting], bytes | None],
    error: type[Exception],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And no stream is opened to whoever has not."""
    monkeypatch.setattr(endpoint, "CONNECT_S", 0.5)

    async def main() -> None:
        async with Impostor(answers) as impostor:
            with pytest.raises(error, match=words):
                await ask(tcp, impostor.address)
            assert len(impostor.heard) == 1  # the greeting, and nothing after it
        assert SECRET not in b"".join(impostor.heard)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("challenge", "error", "words"),
    [
        (None, PeerLostError, "then said nothing for 0.5 s"),
        (b"SSH-2.0-Other and some more\r\n", PeerLostError, "no node of gradstream"),
        (packed(0, 0, v1.Frame(challenge=v1.Challenge(protocol=PROTOCOL + 1))), RefusedError, "BAD_PROTOCOL"),
        (packed(0, 0, v1.Frame(proven=v1.Proven())), PeerLostError, "no node of gradstream"),
        (
            packed(0, 0, v1.Frame(refuse=v1.Refuse(code=v1.OVER_LIMIT, message="enough"))),
            RefusedError,
            "OVER_LIMIT.*enough",
        ),
    ],
)
def test_a_beginning_that_is_no_challenge(
    challenge: bytes | None, error: type[Exception], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "CONNECT_S", 0.5)

    async def main() -> None:
        async with Impostor(lambda greeting: None, challenge) as impostor:
            with pytest.raises(error, match=words):
                await ask(tcp, impostor.address)
            assert impostor.heard == []  # nothing was proved to it

    asyncio.run(main())


def test_a_greeting_thrown_back_at_its_sender_opens_nothing() -> None:
    """An impostor has a worker greet, and shows that greeting to the worker's own endpoint."""

    async def main() -> None:
        async with started(tcp("worker-0")) as worker:
            loop = asyncio.get_running_loop()
            thrown: asyncio.Future[v1.Code] = loop.create_future()

            async def throw_back(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                victim = BareSocket("")
                victim.reader, victim.writer = reader, writer
                async with BareSocket(worker.address) as back:
                    await victim.say(packed(0, 0, v1.Frame(challenge=await back.challenge())))
                    greeting = (await victim.hear())[1].greeting
                    try:
                        await back.show(greeting)
                    except Refused as refused:
                        thrown.set_result(refused.refuse.code)
                writer.close()

            listener = await asyncio.start_server(throw_back, "127.0.0.1", 0)
            worker.know("shard-0", "{}:{}".format(*listener.sockets[0].getsockname()))
            with pytest.raises(PeerLostError):
                await worker.call("shard-0", "reply", v1.Tensor(), v1.Tensor)
            assert await thrown == v1.BAD_SECRET
            listener.close()

    asyncio.run(main())


def test_a_missing_check_of_the_called_side_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above fails for a caller that believes any proof."""
    monkeypatch.setattr(hmac, "compare_digest", lambda one, other: True)
    monkeypatch.setitem(globals(), "SILENCE_S", 0.2)
    with pytest.raises(DeadlineError):
        test_who_is_called_proves_it_too(shown(lambda g: b""), RefusedError, "BAD_SECRET", monkeypatch)


def test_closing_while_a_greeting_waits_for_its_answer() -> None:
    async def main() -> None:
        async with Impostor(lambda greeting: None) as impostor:
            client = tcp("worker-0")
            client.know("shard-0", impostor.address)
            stream = await client.open("shard-0", "reply", v1.Tensor())
            await until(lambda: impostor.heard)
            await client.close()
            assert stream.failure is not None
            await until(lambda: not client._dialling)

    asyncio.run(main())


# ---- a process that restarts ----------------------------------------------------------------


async def restarted(server: SocketEndpoint, secret: bytes = SECRET) -> SocketEndpoint:
    """Its process has died; another one listens at its address."""
    await server.abort()
    again = tcp(listen=server.address, secret=secret)
    again.identity.incarnation = 2
    again.serve("reply", reply_once)
    await again.start()
    return again


async def called_in_the_end(client: SocketEndpoint) -> None:
    """A call that is made again for as long as the peer is lost, as nodes do."""
    while True:
        try:
            await client.call("shard-0", "reply", v1.Tensor(), v1.Tensor)
            return
        except PeerLostError:
            continue


def test_a_called_side_that_restarts_is_greeted_anew() -> None:
    async def main() -> None:
        async with started(tcp()) as server:
            client = tcp("worker-9")
            client.know("shard-0", server.address)
            held = await client.open("shard-0", "echo", v1.Tensor())
            await client.call("shard-0", "reply", v1.Tensor(), v1.Tensor)
            again = await restarted(server)
            with pytest.raises(PeerLostError):
                await held.recv(20)
            await called_in_the_end(client)
            another = await restarted(again, b"the secret of another run")
            with pytest.raises(RefusedError, match="BAD_SECRET"):
                await called_in_the_end(client)
            await client.close()
            await another.close()

    asyncio.run(main())
