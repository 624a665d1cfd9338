"""Where pushes come in: chunks are looked at and handed on, results are gathered and sent."""

from __future__ import annotations

from gradstream.runtime.base import Runtime
from gradstream.server.aggregation import PushHeader, rank_of
from gradstream.server.shard.executor import ShardExecutor
from gradstream.server.shard.inspection import Inspection
from gradstream.server.shard.known_members import KnownMembers
from gradstream.server.shard.pending_push import PendingPush
from gradstream.server.shard.quorum_agreement import QuorumProtocol
from gradstream.server.shard.row_store import Part
from gradstream.server.shard.wait_notifier import WaitNotifier
from gradstream.transport.base import Stream
from gradstream.wire import v1

__all__ = ["PushHandler"]

RESULTS_PER_FRAME = 16
"""Results of a push are gathered: a frame for each would cost as much as a tenth of its chunk."""


class PushHandler:
    """Serves "push".

    Args:
        runtime: of the shard's node.
        conductor: takes what was pushed.
        inspection: looks at it before.
        news: tells senders for whom they wait.
        agreement: is told what has come; None where there is no quorum.
        known_members: tell whose pushes are taken.
    """

    def __init__(
        self,
        runtime: Runtime,
        conductor: ShardExecutor,
        inspection: Inspection,
        news: WaitNotifier,
        agreement: QuorumProtocol | None,
        known_members: KnownMembers,
    ) -> None:
        self._runtime = runtime
        self._conductor = conductor
        self._inspection = inspection
        self._news = news
        self._agreement = agreement
        self._known_members = known_members

    async def serve(self, stream: Stream) -> None:
        """Takes a push, and returns once its sender has heard of every chunk.

        Raises:
            RefusedError: a chunk does not fit, or holds what is not finite; or its sender has left the run
                meanwhile. The chunks before it stand.
        """
        request = v1.Push.FromString(stream.opened.body)
        self._inspection.push(stream.opened.sender, request)
        inbox = PendingPush(stream, self._runtime.now())
        await self._runtime.gather(self._take(inbox, request), self._answer(inbox))

    async def _take(self, inbox: PendingPush, request: v1.Push) -> None:
        """Reads chunks until the sender has said everything."""
        came = set[int]()
        while (received := await inbox.stream.recv()) is not None:
            chunk = received.frame.chunk
            part = self._inspection.part(inbox.sender, received)
            if chunk.index in came:
                raise self._inspection.bad(inbox.sender, f"chunk {chunk.index} comes twice in one push")
            came.add(chunk.index)
            self._inspection.base_version(
                inbox.sender, chunk.index, chunk.version, self._conductor.version(chunk.index)
            )
            self._contribute(inbox, request, chunk.index, chunk.version, part)
            await self._runtime.sleep(0)  # its update begins now, while what was looked at is in the cache
        if request.rows:
            absent = [index for index in self._conductor.numbers() if index not in came]
            for index in absent:
                version = self._conductor.version(index)
                self._inspection.base_version(inbox.sender, index, request.base_version, version)
            for index in absent:
                inbox.absent.add(index)
                self._contribute(inbox, request, index, request.base_version, None)
        inbox.ended = True
        inbox.wake.set()

    def _contribute(
        self, inbox: PendingPush, request: v1.Push, chunk: int, base_version: int, part: Part | None
    ) -> None:
        """Hands one chunk of a push to the state machine; None of what is absent."""
        opened = inbox.stream.opened
        self._known_members.check(opened)
        contribution = PushHeader(
            sender=opened.sender,
            rank=rank_of(opened.sender),
            incarnation=opened.incarnation,
            sequence=request.sequence,
            samples=request.samples,
            num_gradients=request.num_gradients,
            learning_rate=request.learning_rate,
            round=request.round,
            base_version=base_version,
            empty=part is None,
            clock=request.clock,
            loss=request.loss,
            vector=request.vector,
        )
        assign = request.command == v1.Push.ASSIGN
        self._conductor.push(inbox, chunk, contribution, part, assign=assign)
        if self._agreement is not None and not assign:
            self._agreement.came(request.round, contribution.rank, chunk)

    async def _answer(self, inbox: PendingPush) -> None:
        """Sends results, many to a frame, until every chunk has one."""
        absent: set[int] = set()
        while inbox.results or absent != inbox.absent or inbox.pending or not inbox.ended:
            complete = inbox.ended and not inbox.pending
            more = len(inbox.results) < RESULTS_PER_FRAME and not complete
            if more and await self._news.of(inbox.stream, inbox.wake, inbox.pending):
                continue
            results, inbox.results = inbox.results, []
            told = inbox.absent - inbox.pending - absent
            absent |= told
            if results or told:
                data = v1.PushResults(results=results, absent=sorted(told)).SerializeToString()
                await inbox.stream.send(v1.Frame(body=v1.Body(data=data)))
