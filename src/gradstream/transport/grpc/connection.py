"""The caller's side of a gRPC connection: a channel to a peer, and the session that its streams show.

gRPC reconnects by itself. The session of the old connection is then no longer valid: a stream that learns
this calls `lost`, and the next stream begins a session on the new connection.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import secrets
import struct
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from gradstream.errors import PeerLostError, RefusedError
from gradstream.runtime.base import Runtime
from gradstream.transport import proof
from gradstream.transport.base import Identity, refused_by
from gradstream.transport.limits import LIMITS
from gradstream.transport.security import explain, is_refused
from gradstream.wire import v1
from gradstream.wire.frames import (
    MAX_FRAME_BYTES,
    PROTOCOL,
    DamagedError,
    FrameError,
    SequenceWindow,
    decode,
    seal,
    unseal,
)

# ---- sessions ----------------------------------------------------------------------------
# Sessions of gRPC: callers that have proved knowledge of the run's secret, and the passes of their streams.
#
# gRPC does not report on which connection a call came. So a caller proves once per connection that it knows
# the secret (`proof`), and each of its streams carries a pass: a number that counts up, and its HMAC under a key that
# only the two nodes have. A pass is valid once, so a recorded pass opens no stream.
#
# A node keeps nothing for strangers: a challenge carries its own date, and a signature of the node that made it.
# Nothing in this module waits or sends.

NO_CHALLENGE = "the challenge is not of this node, is too old, or was answered before: ask for another one"
"""The answer to a greeting that knows the secret, but was recorded or came too late."""

PASS_BYTES = 64
_STAMP = struct.Struct("<Q16s")  # when a challenge was made, in ns, and random bytes
_NUMBER = struct.Struct("<Q")


@dataclass(slots=True)
class PeerSession:
    """The session of one caller, as the called side knows it."""

    number: int
    key: bytes
    sender: str
    incarnation: int
    checked: bool  # whether its messages have checksums
    used: SequenceWindow = field(default_factory=SequenceWindow)


class Sessions:
    """The sessions of peers that connect to this node: makes challenges, and checks the peers' answers and frames."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._challenge_key = secrets.token_bytes(32)
        self._answered: dict[bytes, int] = {}  # challenges and when they expire, in ns: each is valid once
        self._sessions: dict[int, PeerSession] = {}
        self._of = Counter[str]()

    def challenge(self, now_ns: int, *, checked: bool = False) -> v1.Challenge:
        """A new challenge for a stranger; `checked` says whether its connection needs checksums."""
        stamp = _STAMP.pack(now_ns, secrets.token_bytes(16))
        return v1.Challenge(protocol=PROTOCOL, nonce=stamp + self._sign(stamp), checked=checked)

    def greeted(
        self, raw: bytes, now_ns: int, *, checked: bool = False
    ) -> tuple[PeerSession, v1.Proven] | v1.Refuse:
        """Checks a stranger's greeting: returns its session and our answer, or a refusal without details.

        Args:
            checked: whether the connection needs checksums.
        """
        refused = v1.Refuse(code=v1.BAD_SECRET, message=proof.BAD_SECRET)
        damaged = v1.Refuse(code=v1.TOO_OLD, message="the greeting was damaged on its way: try again")
        if checked and not raw:  # a damaged name in the metadata, so its value is missing
            return damaged
        if len(raw) > LIMITS.greeting_bytes:
            return refused
        try:
            greeting = v1.Greeting.FromString(raw[unseal(raw, seed=0) :])
        except DamagedError:
            return damaged
        except DecodeError:
            return refused
        mine = self._identity
        if (refuse := proof.objection(mine, greeting.challenge, greeting, checked=checked)) is not None:
            return refuse
        if not greeting.sender:
            return refused
        if not self._is_fresh(greeting.challenge, now_ns):
            return v1.Refuse(code=v1.TOO_OLD, message=NO_CHALLENGE)
        self._answered[greeting.challenge] = now_ns + round(LIMITS.handshake_s * 1e9)
        if self._of[greeting.sender] >= LIMITS.sessions:
            text = f"{greeting.sender} has {LIMITS.sessions} connections to {mine.name} already: close some"
            return v1.Refuse(code=v1.OVER_LIMIT, message=text)
        key = proof.session_key(mine.secret, greeting, job=mine.job, called=mine.name)
        number = secrets.randbits(63) | 1
        session = PeerSession(number, key, greeting.sender, greeting.incarnation, greeting.checked)
        self._sessions[session.number] = session
        self._of[session.sender] += 1
        answer = proof.called_proof(mine.secret, greeting, job=mine.job, called=mine.name)
        return session, v1.Proven(proof=answer, session=session.number)

    def passes(self, raw: bytes) -> tuple[PeerSession, int] | None:
        """The session and number of a pass; None if the pass is invalid, or was used before."""
        if len(raw) > PASS_BYTES:
            return None
        try:
            shown = v1.Pass.FromString(raw)
        except DecodeError:
            return None
        session = self._sessions.get(shown.session)
        if session is None or not hmac.compare_digest(shown.proof, _sign(session.key, shown.number)):
            return None
        return (session, shown.number) if session.used.add(shown.number) else None

    def over(self, session: PeerSession) -> None:
        """Forgets a session whose connection is gone. Idempotent."""
        if self._sessions.pop(session.number, None) is not None:
            self._of[session.sender] -= 1
            self._of += Counter()  # removes zeros

    def _is_fresh(self, challenge: bytes, now_ns: int) -> bool:
        """Whether this node made the challenge, not long ago, and nobody has answered it before."""
        stamp, signature = challenge[: _STAMP.size], challenge[_STAMP.size :]
        if len(stamp) != _STAMP.size or not hmac.compare_digest(signature, self._sign(stamp)):
            return False
        self._answered = {known: expires for known, expires in self._answered.items() if expires > now_ns}
        age_ns = now_ns - _STAMP.unpack(stamp)[0]
        return challenge not in self._answered and 0 <= age_ns < LIMITS.handshake_s * 1e9

    def _sign(self, stamp: bytes) -> bytes:
        return hmac.digest(self._challenge_key, stamp, "sha256")


class CallerSession:
    """The caller's side: makes the passes of its streams.

    Args:
        session: number of the session, chosen by the called side.
        key: key that both sides have.
        checked: whether messages have checksums.
    """

    def __init__(self, session: int, key: bytes, *, checked: bool = False) -> None:
        self.checked = checked
        self._session = session
        self._key = key

    def pass_of(self, number: int) -> bytes:
        """The pass of the stream of this number, which no other stream of the session has."""
        signature = _sign(self._key, number)
        return v1.Pass(session=self._session, number=number, proof=signature).SerializeToString()


def proved(identity: Identity, called: str, greeting: v1.Greeting, proven: v1.Proven) -> CallerSession:
    """The session that answers a greeting. Raises RefusedError if the called side does not know the secret."""
    proof.check_called(identity, called, greeting, proven)
    key = proof.session_key(identity.secret, greeting, job=identity.job, called=called)
    return CallerSession(proven.session, key, checked=greeting.checked)


def _sign(key: bytes, number: int) -> bytes:
    return hmac.digest(key, _NUMBER.pack(number), "sha256")


# ---- connection --------------------------------------------------------------------------

METHOD = "/gradstream.v1.Peer/Stream"
"""The rpc that carries a stream."""

CHALLENGE = "/gradstream.v1.Peer/Challenge"
SESSION = "/gradstream.v1.Peer/Session"
"""The rpcs before the first stream of a connection."""
GREETING, PASS = "gradstream-greeting-bin", "gradstream-pass-bin"
"""Keys of metadata."""

EOF: object = grpc.aio.EOF  # type: ignore[attr-defined]
SPOILT = (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL)
"""Status codes of a call whose method or headers the peer does not know. Each node has all methods, so bytes of the
headers were damaged on their way. HTTP/2 refers to earlier headers: each later call of the connection
would have the same damage."""
FAILURES = (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError)
"""Exceptions that gRPC raises when a call or its connection has failed."""

_Call: TypeAlias = "grpc.aio.StreamStreamCall[bytes, bytes]"


class GrpcConnection:
    """A channel of one priority to a peer, and the session on it.

    Args:
        peer: name of the called node.
        channel: channel to the peer; `close` closes it.
        checked: whether messages have checksums, whatever the peer wants.

    Attributes:
        spoilt: whether no more calls may be made; see `SPOILT`.
    """

    def __init__(
        self, identity: Identity, runtime: Runtime, peer: str, channel: grpc.aio.Channel, *, checked: bool
    ) -> None:
        self.checked = checked
        self.spoilt = False
        self.made_ns = runtime.now()
        self._numbers = itertools.count(1)
        self._identity = identity
        self._runtime = runtime
        self._peer = peer
        self._channel = channel
        self._session_tasks: dict[asyncio.Task[None], None] = {}
        self._session_task: asyncio.Task[None] | None = None  # task of the current session
        self._opening: asyncio.Future[CallerSession] | None = None
        self.session: CallerSession | None = None
        """The current session; None before it has begun, and after it has ended."""

    def next_number(self) -> int:
        """The number of the next stream."""
        return next(self._numbers)

    def call(self, method: str, name: str = "", value: bytes = b"") -> _Call:
        """Begins a call with one entry of metadata, if `name` is given."""
        metadata = grpc.aio.Metadata((name, value)) if name else None
        return self._channel.stream_stream(method)(metadata=metadata)  # type: ignore[call-arg]

    async def opened(self) -> CallerSession:
        """The session; begins one if there is none.

        Raises:
            RefusedError: the peer refuses this node, or does not know the secret.
            PeerLostError: the peer cannot be reached, or has not answered within `LIMITS.handshake_s`.
        """
        if self._opening is None:
            self._opening = asyncio.get_running_loop().create_future()
            self._opening.add_done_callback(_retrieve_exception)
            name = f"{self._identity.name}: session with {self._peer}"
            task = self._session_task = self._runtime.spawn(self._hold_session(self._opening), name=name)
            self._session_tasks[task] = None
            task.add_done_callback(lambda done: self._session_tasks.pop(done, None))
        return await asyncio.shield(self._opening)

    def ended(self, code: grpc.StatusCode) -> None:
        """Handles the status of a failed call."""
        self.spoilt = self.spoilt or code in SPOILT

    def lost(self, session: CallerSession) -> None:
        """Ends a session that the peer does not know. A newer session stays."""
        if session is self.session and self._session_task is not None:
            self._session_task.cancel()
            self._forget()

    async def close(self) -> None:
        """Ends all calls at once."""
        await self._channel.close(None)
        for task in self._session_tasks:
            task.cancel()
        await asyncio.gather(*self._session_tasks, return_exceptions=True)

    def _forget(self) -> None:
        self.session = self._opening = self._session_task = None

    async def _hold_session(self, opening: asyncio.Future[CallerSession]) -> None:
        """Opens a session, and holds it as long as its connection lives."""
        failure: RefusedError | PeerLostError = self._lost("the connection was closed by this side")
        try:
            call, session = await self._runtime.within(LIMITS.handshake_s, self._begin())
            self.session = session
            opening.set_result(session)
            await call.read()  # nothing but the end can come
        except (RefusedError, PeerLostError) as error:
            failure = error
        except TimeoutError:
            self.spoilt = True  # the peer may wait for bytes that were never sent: a length was damaged
            failure = self._lost(f"it has not answered the greeting within {LIMITS.handshake_s:g} s")
        except asyncio.CancelledError:
            if is_cancelled():
                raise
        except FAILURES as error:
            failure = self._failed(error)
        finally:
            if not opening.done():
                opening.set_exception(failure)
            if self._opening is opening:
                self._forget()

    async def _begin(self) -> tuple[_Call, CallerSession]:
        mine = self._identity
        challenge = (await self._first(self.call(CHALLENGE))).challenge
        greeting = v1.Greeting(sender=mine.name, incarnation=mine.incarnation, checked=self.checked)
        proof.answer_challenge(mine, self._peer, challenge, greeting)
        call = self.call(SESSION, GREETING, seal(greeting.SerializeToString(), seed=0))
        answer = await self._first(call)
        if answer.HasField("refuse"):
            if answer.refuse.code == v1.TOO_OLD:  # one of the two nodes stood still, or was restarted
                raise self._lost(answer.refuse.message)
            raise refused_by(self._peer, answer.refuse)
        if not answer.HasField(
            "proven"
        ):  # an answer of another method: a bit of the name's number was damaged
            raise self._lost("it has answered something else than a greeting")
        try:
            return call, proved(mine, self._peer, greeting, answer.proven)
        except RefusedError:
            call.cancel()
            raise

    async def _first(self, call: _Call) -> v1.Frame:
        message = await call.read()
        if message is EOF:
            code, details = await call.code(), await call.details()
            self.ended(code)
            if code is grpc.StatusCode.OK:
                raise self._lost("it has ended the call")
            raise self._call_failed(code, details)
        try:
            return decode(cast(bytes, message))[0]
        except FrameError as error:
            raise self._lost(
                f"the program that answers at its address is no node of gradstream: {error}"
            ) from None

    def _lost(self, text: str) -> PeerLostError:
        return PeerLostError(self._peer, text)

    def _call_failed(self, code: grpc.StatusCode, details: str | None) -> PeerLostError:
        text = f"{code.name}: {explain(details or '')}"
        return PeerLostError(self._peer, text, nobody_listens=is_refused(details or ""))

    def _failed(self, error: BaseException) -> PeerLostError:
        if isinstance(error, grpc.aio.AioRpcError):
            self.ended(error.code())
            return self._call_failed(error.code(), error.details())
        return self._lost(f"the connection was lost: {error!r}")


def is_cancelled() -> bool:
    """Whether this task was cancelled: a cancelled call raises the same exception."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _retrieve_exception(future: asyncio.Future[Any]) -> None:
    """Keeps asyncio from logging a failure for which nobody waits any more."""
    if not future.cancelled():
        future.exception()


# ---- options -----------------------------------------------------------------------------
# Options of gRPC channels and servers.

MAX_MESSAGE_BYTES = MAX_FRAME_BYTES + (1 << 20)  # so that too long a frame is refused with a message

_LOOKAHEAD_BYTES = 1 << 20  # per call, that a caller may send before they are read

_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
SERVER_OPTIONS = [
    *_OPTIONS,
    ("grpc.max_allowed_incoming_connections", LIMITS.connections),
    ("grpc.max_concurrent_streams", LIMITS.streams + 8),  # one too many is refused with a message
    (
        "grpc.max_connection_idle_ms",
        int(LIMITS.handshake_s * 1e3),
    ),  # for strangers: a node has a session open
    ("grpc.server_handshake_timeout_ms", int(LIMITS.handshake_s * 1e3)),
    # A sender's window for each call is fixed, not measured: gRPC would let it grow to 100 MB and more.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", _LOOKAHEAD_BYTES),
    ("grpc.so_reuseport", 0),  # otherwise two servers could share a port, and get each other's calls
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),  # peers may have other deadlines
    ("grpc.http2.max_ping_strikes", 0),
]
CLIENT_OPTIONS = [
    *_OPTIONS,
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # one connection per channel
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
]
_CONNECT_MS = "grpc.min_reconnect_backoff_ms"  # the time that gRPC gives one attempt to connect
SHARED_CONNECTION_OPTIONS = [(_CONNECT_MS, 3000)]  # round trips of 0.6 s: TCP and TLS take three
# Other connections are tried beside a new one, so a slow handshake may take its time.
NEW_CONNECTION_OPTIONS = [(_CONNECT_MS, 5000)]


def patience_options(connection_s: float) -> list[tuple[str, int]]:
    """Options that make gRPC end a silent connection after `connection_s` seconds, and not earlier.

    gRPC sends a ping after half of the time, and waits for the answer during the other half. The last option
    bounds pings that gRPC sends to measure the connection; with its default, gRPC ends a connection whose
    peer was stopped for a minute.
    """
    half_ms = int(500 * connection_s)
    names = ("keepalive_time_ms", "keepalive_timeout_ms", "http2.ping_timeout_ms")
    return [(f"grpc.{name}", half_ms) for name in names]
