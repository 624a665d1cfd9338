"""The beginning of a connection over a socket: challenge, greeting and answer, before its first stream.

`proof` describes their content. Both sides read exactly these frames and leave the next bytes in the socket.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from gradstream.transport import proof
from gradstream.transport.base import Identity
from gradstream.transport.limits import LIMITS
from gradstream.transport.refusals import refused_by
from gradstream.transport.socket.framing import GREETING, PREFIX
from gradstream.wire import v1
from gradstream.wire.frames import PROTOCOL, FrameError, decode, encode


async def greet(connected: socket.socket, greeting: v1.Greeting, identity: Identity, called: str) -> None:
    """Greets as the caller. Returns once each side has proved to the other that it knows the secret.

    Args:
        connected: connected non-blocking socket.
        greeting: the greeting without its nonces and proof. Afterwards, `checked` says whether the connection
            has checksums.
        identity: identity of this node.
        called: name of the node that the caller wants to reach.

    Raises:
        RefusedError: the called side refuses this node, or does not know the secret itself.
        FrameError: the program that answers is no node of gradstream.
        OSError: the connection is lost.
    """
    challenge = await _read(connected, "challenge", "refuse")
    if challenge.HasField("refuse"):
        raise refused_by(called, challenge.refuse)
    proof.answer_challenge(identity, called, challenge.challenge, greeting)
    await _write(connected, v1.Frame(greeting=greeting))
    answer = await _read(connected, "proven", "refuse")
    if answer.HasField("refuse"):
        raise refused_by(called, answer.refuse)
    proof.check_called(identity, called, greeting, answer.proven)


Objection = Callable[[v1.Greeting], "v1.Refuse | None"]


async def answer(
    connected: socket.socket, identity: Identity, objection: Objection, *, checked: bool = False
) -> v1.Greeting:
    """Answers as the called side. Returns the greeting of a caller that has proved to know the secret.

    A caller without the secret learns only that it has not proved to know it.

    Args:
        connected: connected non-blocking socket.
        identity: identity of this node.
        objection: says why this node refuses a caller that knows the secret; None if it accepts it.
        checked: this side wants checksums.

    Raises:
        RefusedError: the caller does not know the secret, or this node refuses it.
        FrameError: the caller is no node of gradstream.
        OSError: the connection is lost.
    """
    challenge = proof.new_nonce()
    asked = v1.Challenge(protocol=PROTOCOL, nonce=challenge, checked=checked)
    await _write(connected, v1.Frame(challenge=asked))
    greeting = (await _read(connected, "greeting")).greeting
    refuse = proof.objection(identity, challenge, greeting, checked=checked) or objection(greeting)
    if refuse is not None:
        await _write(connected, v1.Frame(refuse=refuse))
        raise refused_by(identity.name, refuse)
    shown = proof.called_proof(identity.secret, greeting, job=identity.job, called=identity.name)
    await _write(connected, v1.Frame(proven=v1.Proven(proof=shown)))
    return greeting


async def _write(connected: socket.socket, frame: v1.Frame) -> None:
    header = encode(frame, seed=0)
    data = PREFIX.pack(GREETING, 0, len(header), 0) + header
    await asyncio.get_running_loop().sock_sendall(connected, data)


async def _read(connected: socket.socket, kind: str, *others: str) -> v1.Frame:
    """Reads the next frame. Raises FrameError if it is of no given kind."""
    stream, _, header_bytes, payload_bytes = PREFIX.unpack(await _exactly(connected, PREFIX.size))
    if stream != GREETING or payload_bytes or header_bytes > LIMITS.greeting_bytes:
        raise FrameError(f"bytes that are no {kind}")
    frame, _ = decode(await _exactly(connected, header_bytes))
    if frame.WhichOneof("kind") not in (kind, *others):
        raise FrameError(f"a frame of kind {frame.WhichOneof('kind')}: expected {kind}")
    return frame


async def _exactly(connected: socket.socket, num_bytes: int) -> bytes:
    loop, got = asyncio.get_running_loop(), b""
    while len(got) < num_bytes:
        more = await loop.sock_recv(connected, num_bytes - len(got))
        if not more:
            raise ConnectionResetError("the connection was closed")
        got += more
    return got
