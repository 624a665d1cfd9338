"""`RequestService`: answers the requests of workers. The workers' side is `client.requests`."""

from __future__ import annotations

from collections.abc import Callable

from gradstream.coordinator.context import CoordinatorContext
from gradstream.coordinator.instructions import Refuse
from gradstream.runtime.wakeup import Wakeup
from gradstream.transport.base import Stream
from gradstream.wire import v1


class RequestService:
    """Serves "assign", "ending", "take_over" and "shares".

    Args:
        context: see `CoordinatorContext`.
    """

    def __init__(self, context: CoordinatorContext) -> None:
        self._context = context
        self._replies = context.membership.replies
        self._waiting: dict[Wakeup, None] = {}  # one for each request whose answer has to wait
        context.endpoint.serve("assign", self._serve_assign, model=False)
        context.endpoint.serve("ending", self._serve_ending, model=False)
        context.endpoint.serve("take_over", self._serve_take_over, model=False)
        context.endpoint.serve("shares", self._serve_shares, model=False)

    def wake(self) -> None:
        """Looks again at all requests whose answer has to wait."""
        for wakeup in self._waiting:
            wakeup.ring()

    async def _serve_assign(self, stream: Stream) -> None:
        request, who = v1.Ask.FromString(stream.opened.body), stream.opened.sender
        self._context.carry_out(self._replies.measured(who, request))
        await self._answer(stream, lambda: self._replies.assign(who, request, self._context.age_s()))

    async def _serve_ending(self, stream: Stream) -> None:
        request, who = v1.Ending.FromString(stream.opened.body), stream.opened.sender
        self.wake()  # others may wait for this request
        await self._answer(stream, lambda: self._replies.ending(who, request))

    async def _serve_take_over(self, stream: Stream) -> None:
        request, who = v1.TakeOver.FromString(stream.opened.body), stream.opened.sender
        await self._answer(stream, lambda: self._replies.take_over(who, request))

    async def _serve_shares(self, stream: Stream) -> None:
        request, who = v1.Took.FromString(stream.opened.body), stream.opened.sender
        self._context.carry_out(self._replies.took(who, request))
        self.wake()  # others may wait for this request
        await self._answer(stream, lambda: self._replies.shares(who, request))

    async def _answer(
        self,
        stream: Stream,
        decide: Callable[[], v1.Assigned | v1.Ended | v1.Shares | v1.TakenOver | Refuse | None],
    ) -> None:
        """Answers once there is a decision; until then tells the worker which others it waits for."""
        who, wakeup, context = stream.opened.sender, Wakeup(), self._context
        self._waiting[wakeup] = None
        told_ns, told = 0, list[v1.Node]()
        runtime, notice_s = context.runtime, context.deadlines.notice_s
        try:
            while (answer := decide()) is None:
                others = context.membership.nodes.workers
                if others is not told or runtime.left_s(told_ns, notice_s) <= 0:
                    await stream.waiting(node.name for node in others if node.name != who)
                    told_ns, told = runtime.now(), others
                await wakeup.rung(runtime, notice_s)
        finally:
            del self._waiting[wakeup]
        context.keeper.changed()
        await context.keeper.durable()
        if isinstance(answer, Refuse):
            stream.refuse(answer.code, answer.message)
            return
        await stream.send(v1.Frame(body=v1.Body(data=answer.SerializeToString())))
