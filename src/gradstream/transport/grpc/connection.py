"""The caller's side of a gRPC connection: a channel to a peer, and the session that its streams show.

gRPC reconnects by itself. The session of the old connection is no longer valid then: a stream that learns
this calls `lost`, and the next stream begins a session on the new connection.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import Any, TypeAlias, cast

import grpc
import grpc.aio

from gradstream.errors import PeerLostError, RefusedError
from gradstream.runtime.base import Runtime
from gradstream.transport import proof
from gradstream.transport.base import Identity
from gradstream.transport.grpc.sessions import CallerSession, proved
from gradstream.transport.limits import LIMITS
from gradstream.transport.refusals import refused_by
from gradstream.transport.security import explain
from gradstream.wire import v1
from gradstream.wire.frames import FrameError, decode, seal

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
headers were damaged on their way. HTTP/2 refers to headers that were sent before: each later call of the connection
would have the same ones."""
FAILURES = (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError)
"""Exceptions that gRPC raises where a call or its connection has failed."""

_Call: TypeAlias = "grpc.aio.StreamStreamCall[bytes, bytes]"


class GrpcConnection:
    """A channel of one priority to a peer, and the session on it.

    Args:
        identity: identity of this node.
        runtime: runtime of this node.
        peer: name of the node that is called.
        channel: channel to the peer; `close` closes it.
        checked: messages have checksums, whatever the peer wants.

    Attributes:
        spoilt: no more calls may be made; see `SPOILT`.
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
        """The number of one more stream."""
        return next(self._numbers)

    def call(self, method: str, name: str = "", value: bytes = b"") -> _Call:
        """Begins a call with one entry of metadata, if `name` is given."""
        metadata = grpc.aio.Metadata((name, value)) if name else None
        return self._channel.stream_stream(method)(metadata=metadata)  # type: ignore[call-arg]

    async def opened(self) -> CallerSession:
        """The session; begins one where there is none.

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
        """Takes the status of a call that has failed."""
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
        if not answer.HasField("proven"):  # of another method: a bit of the name's number was damaged
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
            ended = code is grpc.StatusCode.OK
            raise self._lost("it has ended the call" if ended else f"{code.name}: {explain(details or '')}")
        try:
            return decode(cast(bytes, message))[0]
        except FrameError as error:
            raise self._lost(
                f"the program that answers at its address is no node of gradstream: {error}"
            ) from None

    def _lost(self, text: str) -> PeerLostError:
        return PeerLostError(self._peer, text)

    def _failed(self, error: BaseException) -> PeerLostError:
        if isinstance(error, grpc.aio.AioRpcError):
            self.ended(error.code())
            return self._lost(f"{error.code().name}: {explain(error.details() or '')}")
        return self._lost(f"the connection was lost: {error!r}")


def is_cancelled() -> bool:
    """Whether this task was cancelled: a cancelled call raises the same exception."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _retrieve_exception(future: asyncio.Future[Any]) -> None:
    """Keeps asyncio from logging a failure for which nobody waits any more."""
    if not future.cancelled():
        future.exception()
