"""`Relay`: the coordinator's part of `transport.detours`. It connects nodes that cannot dial each other, and counts.

It forwards Chunks as they come, without reading them. Of each tunnel it holds at most a window of Chunks in each
direction: a sender that is faster than its receiver gets no credit.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from gradstream.errors import GradstreamError, RefusedError
from gradstream.runtime.base import Runtime
from gradstream.runtime.tasks import Broadcast
from gradstream.telemetry.events import RelayEvent
from gradstream.transport.base import Endpoint, Stream
from gradstream.transport.detours import ANSWER_S, TICKET_BYTES
from gradstream.wire import v1

# ---- relay -------------------------------------------------------------------------------

How = Literal["dialled back", "relayed"]


@dataclass(slots=True, eq=False)
class _Call:
    """A call that waits for the answer of the called node: the stream of a tunnel, or None if it has dialled back."""

    caller: str
    called: str
    answered: asyncio.Future[Stream | None] = field(default_factory=asyncio.Future)
    over: asyncio.Event = field(default_factory=asyncio.Event)


class Relay:
    """Serves "post", "tunnel" and "answer".

    Args:
        runtime: runtime of the coordinator.
        endpoint: endpoint of the coordinator. It admits only members of the run, each under its own name.
        emit: takes events.
        silence_s: the longest silence of a node that does not take what was sent to it.

    Attributes:
        num_bytes: bytes that were passed on, both ways, by pair of nodes.
    """

    def __init__(
        self, runtime: Runtime, endpoint: Endpoint, emit: Callable[[RelayEvent], None], *, silence_s: float
    ) -> None:
        self.num_bytes: Counter[tuple[str, str]] = Counter()
        self._runtime = runtime
        self._me = endpoint.identity.name
        self._emit = emit
        self._silence_s = silence_s
        self._posts: dict[str, Stream] = {}  # by node
        self._new_post = Broadcast()
        self._calls: dict[bytes, _Call] = {}  # by ticket
        self._told: set[tuple[tuple[str, str], How]] = set()
        endpoint.serve("post", self._post, model=False)
        endpoint.serve("tunnel", self._tunnel, model=False)
        endpoint.serve("answer", self._answer, model=False)

    def report(self) -> None:
        """Emits how many bytes have gone through the coordinator, for each pair of nodes."""
        for (caller, called), size_bytes in sorted(self.num_bytes.items()):
            self._emit(RelayEvent(caller=caller, called=called, how="relayed", size_bytes=size_bytes))

    async def _post(self, stream: Stream) -> None:
        """Keeps the stream on which a node learns of callers, until the node leaves."""
        who = stream.opened.sender
        self._posts[who] = stream
        self._new_post.ring()
        try:
            await stream.recv()
        finally:
            if self._posts.get(who) is stream:
                del self._posts[who]

    async def _tunnel(self, stream: Stream) -> None:
        """Tells a node that another one wants to talk to it, and forwards their bytes unless it has dialled back."""
        request, caller = v1.Tunnel.FromString(stream.opened.body), stream.opened.sender
        if len(request.ticket) != TICKET_BYTES or request.ticket in self._calls:
            raise RefusedError(self._me, "BAD_REQUEST", f"a tunnel of {caller} without a ticket of its own")
        call = self._calls[request.ticket] = _Call(caller, request.peer)
        stream.on_release(call.over.set)
        try:
            answer = await self._runtime.within(ANSWER_S, self._answered(call, request))
        except TimeoutError:
            text = f"{request.peer} has not answered a call of {caller} within {ANSWER_S:g} s"
            raise RefusedError(self._me, "NOT_MEMBER", text) from None
        finally:
            del self._calls[request.ticket]
        how: How = "dialled back" if answer is None else "relayed"
        pair = min(caller, request.peer), max(caller, request.peer)
        known = pair if how == "relayed" else (caller, request.peer)
        if (known, how) not in self._told:
            self._told.add((known, how))
            self._emit(RelayEvent(caller=caller, called=request.peer, how=how, size_bytes=0))
        reply = v1.Tunnel(peer=request.peer, ticket=request.ticket, back=answer is None)
        await stream.send(v1.Frame(body=v1.Body(data=reply.SerializeToString())))
        if answer is None:
            return
        try:
            await self._runtime.gather(
                self._pass_on(stream, answer, pair), self._pass_on(answer, stream, pair)
            )
        finally:
            call.over.set()

    async def _answered(self, call: _Call, request: v1.Tunnel) -> Stream | None:
        answer = v1.Tunnel(peer=call.caller, ticket=request.ticket, port=request.port)
        while True:
            while (post := self._posts.get(call.called)) is None:
                await self._new_post.wait()
            try:
                await post.send(v1.Frame(body=v1.Body(data=answer.SerializeToString())))
            except GradstreamError:
                if self._posts.get(call.called) is post:
                    del self._posts[call.called]
                continue
            return await call.answered

    async def _answer(self, stream: Stream) -> None:
        """Passes the answer of a called node to its caller; lasts as long as their tunnel."""
        request, who = v1.Tunnel.FromString(stream.opened.body), stream.opened.sender
        call = self._calls.get(request.ticket)
        if call is None or (call.called, call.caller) != (who, request.peer) or call.answered.done():
            raise RefusedError(self._me, "NOT_MEMBER", f"{request.peer[:80]!r} does not call {who} any more")
        call.answered.set_result(None if request.back else stream)
        if not request.back:
            await call.over.wait()

    async def _pass_on(self, source: Stream, target: Stream, pair: tuple[str, str]) -> None:
        while (received := await source.recv()) is not None:
            if received.payload is not None:
                frame = v1.Frame(chunk=received.frame.chunk)
                await target.send(frame, received.payload, self._silence_s)
                self.num_bytes[pair] += received.payload.numel() * received.payload.element_size()
        await target.end()


# ---- run clock ---------------------------------------------------------------------------
# The time in the events of a run, and the time of the coordinator's state machines.


class RunClock:
    """Counts the seconds of training, including those before the run was resumed.

    Args:
        runtime: supplies the time.
        earlier_s: seconds of training before the run was resumed.
        zero_ns: the coordinator's, for a node on its machine that comes later; None starts the clock anew.
    """

    KEPT = ("_began_ns",)
    """See `durable.state`."""

    def __init__(self, runtime: Runtime, earlier_s: float = 0.0, zero_ns: int | None = None) -> None:
        self.earlier_s = earlier_s
        self._runtime = runtime
        self._given_ns = zero_ns
        self._began_ns: int | None = None

    def begin(self) -> bool:
        """Starts the clock; returns False if it runs already."""
        if self._began_ns is not None:
            return False
        self._began_ns = self._runtime.now()
        if self._given_ns is not None:
            self._began_ns = self._given_ns + round(self.earlier_s * 1e9)
        return True

    @property
    def zero_ns(self) -> int | None:
        """Time of the machine at which the clock showed 0, or would have; None before it begins."""
        return None if self._began_ns is None else self._began_ns - round(self.earlier_s * 1e9)

    def time_s(self) -> float:
        """Seconds of training so far."""
        if self._began_ns is None:
            return self.earlier_s
        return self.earlier_s + (self._runtime.now() - self._began_ns) / 1e9


class Age:
    """Seconds since the first process of the coordinator began, excluding the time in which this one stood still.

    Args:
        runtime: supplies the time.
    """

    KEPT = ("_born_ns",)
    """See `durable.state`. The clock belongs to the machine, so a new process continues to count."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._born_ns = runtime.now()
        self._stood_still_ns = runtime.now() - runtime.awake_ns()  # before this process began

    def __call__(self) -> float:
        """The current age."""
        return (self._runtime.awake_ns() + self._stood_still_ns - self._born_ns) / 1e9
