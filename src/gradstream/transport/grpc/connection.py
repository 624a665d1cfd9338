"""The caller's side of a gRPC connection: a channel to a peer, and the session that its streams show.

gRPC connects anew by itself. The session of the connection before is worth nothing then, so whoever is told
that says so with `lost`, and the next stream begins a session on the new connection.
"""

from __future__ import annotations

import asyncio
from typing import Any, TypeAlias, cast

import grpc
import grpc.aio

from gradstream.errors import PeerLostError, RefusedError
from gradstream.runtime.base import Runtime
from gradstream.transport import proof
from gradstream.transport.base import Identity
from gradstream.transport.grpc.sessions import CallerSession, proved
from gradstream.transport.limits import LIMITS
from gradstream.transport.security import explain
from gradstream.transport.stream import refused_by
from gradstream.wire import v1
from gradstream.wire.frames import PROTOCOL, FrameError, decode

__all__ = ["CHALLENGE", "EOF", "FAILURES", "GREETING", "PASS", "SESSION", "GrpcConnection", "is_cancelled"]

CHALLENGE = "/gradstream.v1.Peer/Challenge"
SESSION = "/gradstream.v1.Peer/Session"
"""The rpcs before a connection's first stream."""
GREETING, PASS = "gradstream-greeting-bin", "gradstream-pass-bin"
"""Names of metadata."""

EOF: object = grpc.aio.EOF  # type: ignore[attr-defined]
FAILURES = (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError)
"""What gRPC raises where a call or its connection has failed."""

_Call: TypeAlias = "grpc.aio.StreamStreamCall[bytes, bytes]"


class GrpcConnection:
    """A channel of one priority to a peer, and the session on it.

    Args:
        identity: of this node.
        runtime: of this node.
        peer: name of the node that is called.
        channel: leads there; closed by `close`.
    """

    def __init__(self, identity: Identity, runtime: Runtime, peer: str, channel: grpc.aio.Channel) -> None:
        self._identity = identity
        self._runtime = runtime
        self._peer = peer
        self._channel = channel
        self._keepers: dict[asyncio.Task[None], None] = {}
        self._keeper: asyncio.Task[None] | None = None  # of the session that streams show, or wait for
        self._opening: asyncio.Future[CallerSession] | None = None
        self.session: CallerSession | None = None
        """None until there is one, and again once it has ended."""

    def call(self, method: str, name: str = "", value: bytes = b"") -> _Call:
        """Begins a call that shows this metadata."""
        metadata = grpc.aio.Metadata((name, value)) if name else None
        return self._channel.stream_stream(method)(metadata=metadata)  # type: ignore[call-arg]

    async def opened(self) -> CallerSession:
        """The session, once there is one.

        Raises:
            RefusedError: the peer does not want this node, or does not know the secret.
            PeerLostError: it cannot be reached, or has not answered within `LIMITS.handshake_s`.
        """
        if self._opening is None:
            self._opening = asyncio.get_running_loop().create_future()
            self._opening.add_done_callback(_look_at)
            name = f"{self._identity.name}: session with {self._peer}"
            task = self._keeper = self._runtime.spawn(self._keep(self._opening), name=name)
            self._keepers[task] = None
            task.add_done_callback(lambda done: self._keepers.pop(done, None))
        return await asyncio.shield(self._opening)

    def lost(self, session: CallerSession) -> None:
        """The peer does not know this session. A newer one, begun since, is not touched."""
        if session is self.session and self._keeper is not None:
            self._keeper.cancel()
            self._forget()

    async def close(self) -> None:
        """Ends all calls, at once."""
        await self._channel.close(None)
        for task in self._keepers:
            task.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)

    def _forget(self) -> None:
        self.session = self._opening = self._keeper = None

    async def _keep(self, opening: asyncio.Future[CallerSession]) -> None:
        """Opens a session, and holds it for as long as its connection lives."""
        failure: RefusedError | PeerLostError = self._lost("the connection was closed by this side")
        try:
            call, session = await self._runtime.within(LIMITS.handshake_s, self._begin())
            self.session = session
            opening.set_result(session)
            await call.read()  # there is nothing to come but the end
        except (RefusedError, PeerLostError) as error:
            failure = error
        except TimeoutError:
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
        if challenge.protocol != PROTOCOL:
            text = f"it speaks protocol {challenge.protocol}, {mine.name} {PROTOCOL}: install one version"
            raise RefusedError(self._peer, "BAD_PROTOCOL", text)
        greeting = v1.Greeting(sender=mine.name, incarnation=mine.incarnation)
        proof.greet(mine.secret, challenge, greeting, job=mine.job, called=self._peer)
        call = self.call(SESSION, GREETING, greeting.SerializeToString())
        answer = await self._first(call)
        if answer.HasField("refuse"):
            if answer.refuse.code == v1.TOO_OLD:  # one of the two stood still, or was started anew
                raise self._lost(answer.refuse.message)
            raise refused_by(self._peer, answer.refuse)
        session = proved(mine, self._peer, greeting, answer.proven)
        if session is None:
            call.cancel()
            text = "who listens at its address does not know this run's secret"
            raise RefusedError(self._peer, "BAD_SECRET", text)
        return call, session

    async def _first(self, call: _Call) -> v1.Frame:
        message = await call.read()
        if message is EOF:
            code, details = await call.code(), await call.details()
            ended = code is grpc.StatusCode.OK
            raise self._lost("it has ended the call" if ended else f"{code.name}: {explain(details or '')}")
        try:
            return decode(cast(bytes, message))[0]
        except FrameError as error:
            raise self._lost(f"who answers at its address is no node of gradstream: {error}") from None

    def _lost(self, text: str) -> PeerLostError:
        return PeerLostError(self._peer, text)

    def _failed(self, error: BaseException) -> PeerLostError:
        if isinstance(error, grpc.aio.AioRpcError):
            return self._lost(f"{error.code().name}: {explain(error.details() or '')}")
        return self._lost(f"the connection was lost: {error!r}")


def is_cancelled() -> bool:
    """Whether this task was cancelled: a call that was cancelled raises the same."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _look_at(future: asyncio.Future[Any]) -> None:
    """Nobody may be waiting any more: what failed is no surprise then."""
    if not future.cancelled():
        future.exception()
