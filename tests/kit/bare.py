"""Begins connections by hand, step by step, over sockets and gRPC, as a program without gradstream would.

Each step is a separate call and returns the message that it has sent. So tests that play other programs or
attackers can omit, change or replay a step::

    bare = Bare(Identity("job", "worker-9", 1, secret=...), called="shard-0")
    async with BareSocket(address) as raw:          # or a connected socket
        await raw.greet(bare)                       # challenge, greeting, proven
        await raw.say(packed(1, 0, bare.opening("fetch")))

    async with grpc.aio.insecure_channel(address) as channel:
        session = await open_session(channel, bare)
        call = PeerStub(channel).Stream(metadata=session.metadata())
        await call.write(bare.opening("fetch"))
"""

from __future__ import annotations

import asyncio
import itertools
import socket
from dataclasses import dataclass
from typing import Any

import grpc.aio

from gradstream.errors import RefusedError
from gradstream.transport import proof
from gradstream.transport.base import Identity
from gradstream.transport.grpc.connection import GREETING as GREETING_METADATA
from gradstream.transport.grpc.connection import PASS, CallerSession
from gradstream.transport.socket.framing import GREETING, PREFIX
from gradstream.wire import v1
from gradstream.wire.frames import PROTOCOL, decode
from gradstream.wire.v1_pb2_grpc import PeerStub


class Refused(Exception):
    """The called side has refused a greeting.

    Args:
        refuse: the refusal.
    """

    def __init__(self, refuse: v1.Refuse) -> None:
        super().__init__(f"{v1.Code.Name(refuse.code)}: {refuse.message}")
        self.refuse = refuse


@dataclass(frozen=True, slots=True)
class Bare:
    """A caller and the node that it calls.

    Args:
        identity: identity of the caller; its secret makes the proof.
        called: name of the node that is called.
    """

    identity: Identity
    called: str

    def greeting(self, challenge: v1.Challenge, **fields: Any) -> v1.Greeting:
        """A greeting that answers a challenge, with its proof.

        Args:
            challenge: challenge of the called side.
            fields: fields of the greeting that replace the usual ones. The proof covers them.
        """
        mine = self.identity
        said = v1.Greeting(**{"sender": mine.name, "incarnation": mine.incarnation, "count": 1, **fields})
        proof.greet(mine.secret, challenge, said, job=mine.job, called=self.called)
        return said

    def knows(self, greeting: v1.Greeting, proven: v1.Proven) -> bool:
        """Whether the called side has proved that it knows the secret."""
        try:
            proof.check_called(self.identity, self.called, greeting, proven)
        except RefusedError:
            return False
        return True

    def opening(self, method: str, request: bytes = b"", **fields: Any) -> v1.Frame:
        """The first frame of a stream.

        Args:
            method: name of the method.
            request: serialised request of the method.
            fields: fields of the Open that replace the usual ones.
        """
        mine = self.identity
        usual: dict[str, Any] = {
            "protocol": PROTOCOL,
            "job": mine.job,
            "sender": mine.name,
            "incarnation": mine.incarnation,
            "fingerprint": mine.fingerprint,
            "epoch": mine.epoch,
            "window": 4,
        }
        return v1.Frame(open=v1.Open(method=method, body=request, **{**usual, **fields}))


# ---- sockets ----------------------------------------------------------------------------


def packed(
    stream: int, number: int, frame: v1.Frame, payload: bytes = b"", promised_bytes: int | None = None
) -> bytes:
    """A frame as it goes over a socket.

    Args:
        stream: number of the stream on this connection, from 1; 0 is for frames before the streams.
        number: number of the frame in its stream.
        frame: the header.
        payload: the payload.
        promised_bytes: length of the payload in the prefix, where it differs from the true one.
    """
    header = frame.SerializeToString()
    payload_bytes = len(payload) if promised_bytes is None else promised_bytes
    return PREFIX.pack(stream, number, len(header), payload_bytes) + header + payload


class BareSocket:
    """A connection over TCP, or over any connected stream socket.

    Args:
        to: host:port, or the connected socket.
    """

    def __init__(self, to: str | socket.socket) -> None:
        self._to = to

    async def __aenter__(self) -> BareSocket:
        if isinstance(self._to, socket.socket):
            self.reader, self.writer = await asyncio.open_connection(sock=self._to)
        else:
            host, _, port = self._to.rpartition(":")
            self.reader, self.writer = await asyncio.open_connection(host, int(port))
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()

    async def say(self, *data: bytes) -> None:
        """Sends raw bytes."""
        self.writer.write(b"".join(data))
        await self.writer.drain()

    async def hear(self) -> tuple[int, v1.Frame]:
        """The number of the next frame's stream, and the frame; drops its payload."""
        stream, _, header_bytes, payload_bytes = PREFIX.unpack(await self.reader.readexactly(PREFIX.size))
        frame, _ = decode(await self.reader.readexactly(header_bytes))
        await self.reader.readexactly(payload_bytes)
        return stream, frame

    async def closed(self) -> None:
        """Returns once the other side has closed the connection."""
        try:
            while await self.reader.read(1 << 16):
                pass
        except ConnectionError:
            pass

    async def challenge(self) -> v1.Challenge:
        """Reads the challenge of the called side."""
        return (await self.hear())[1].challenge

    async def show(self, greeting: v1.Greeting) -> v1.Proven:
        """Sends a greeting, valid or not, and returns the answer. Raises Refused."""
        await self.say(packed(GREETING, 0, v1.Frame(greeting=greeting)))
        answer = (await self.hear())[1]
        if answer.HasField("refuse"):
            raise Refused(answer.refuse)
        return answer.proven

    async def greet(self, bare: Bare, **fields: Any) -> tuple[v1.Greeting, v1.Proven]:
        """Takes all steps: challenge, greeting, proof. Raises Refused.

        Args:
            bare: the caller and the called node.
            fields: see `Bare.greeting`.
        """
        greeting = bare.greeting(await self.challenge(), **fields)
        proven = await self.show(greeting)
        assert bare.knows(greeting, proven)
        return greeting, proven


# ---- gRPC -------------------------------------------------------------------------------


class BareSession:
    """A session of gRPC, which lasts until `close` or the end of its channel.

    Args:
        bare: caller and called node.
        greeting, proven: the messages that have made the session.
        call: the open rpc.
    """

    def __init__(self, bare: Bare, greeting: v1.Greeting, proven: v1.Proven, call: Any) -> None:
        self.greeting, self.proven = greeting, proven
        self._call = call
        mine = bare.identity
        key = proof.session_key(mine.secret, greeting, job=mine.job, called=bare.called)
        self.passes = CallerSession(proven.session, key)
        self.numbers = itertools.count(1)

    def metadata(self) -> grpc.aio.Metadata:
        """The metadata of one more stream; a second use of it is a replay."""
        return pass_metadata(self.passes.pass_of(next(self.numbers)))

    async def ended(self) -> None:
        """Returns once the called side has ended the session, or the connection is lost."""
        try:
            while await self._call.read() is not grpc.aio.EOF:  # type: ignore[attr-defined]
                pass
        except grpc.aio.AioRpcError:
            pass

    def close(self) -> None:
        """Ends the session from this side."""
        self._call.cancel()


def pass_metadata(raw: bytes) -> grpc.aio.Metadata:
    """Metadata of a stream that shows these bytes as its pass."""
    return grpc.aio.Metadata((PASS, raw))


async def challenge(channel: grpc.aio.Channel) -> v1.Challenge:
    """Asks the called side for a challenge."""
    answer: v1.Frame = await PeerStub(channel).Challenge().read()  # type: ignore[no-untyped-call]
    return answer.challenge


async def show(channel: grpc.aio.Channel, bare: Bare, greeting: v1.Greeting | bytes) -> BareSession:
    """Begins a session with a greeting, valid or not. Raises Refused."""
    raw = greeting if isinstance(greeting, bytes) else greeting.SerializeToString()
    metadata = grpc.aio.Metadata((GREETING_METADATA, raw))
    call = PeerStub(channel).Session(metadata=metadata)  # type: ignore[no-untyped-call]
    answer = await call.read()
    if answer.HasField("refuse"):
        raise Refused(answer.refuse)
    said = v1.Greeting.FromString(raw)
    return BareSession(bare, said, answer.proven, call)


async def open_session(channel: grpc.aio.Channel, bare: Bare, **fields: Any) -> BareSession:
    """Takes all steps: challenge, greeting, proof. Raises Refused.

    Args:
        channel: the connection.
        bare: the caller and the called node.
        fields: see `Bare.greeting`.
    """
    session = await show(channel, bare, bare.greeting(await challenge(channel), **fields))
    assert bare.knows(session.greeting, session.proven)
    return session
