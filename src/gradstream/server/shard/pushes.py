"""A push that a shard receives: the chunks that wait for their update, and the results to be sent."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from gradstream.errors import RefusedError
from gradstream.runtime.base import Runtime
from gradstream.server.aggregation import rank_of
from gradstream.server.rows import Part
from gradstream.server.shard.state import Acknowledge, Sender, ShardState
from gradstream.transport.base import Stream
from gradstream.wire import v1

# ---- pending push ------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class PendingPush:
    """One push of a worker to this shard. The shard's state machine refers to it while one of its chunks is parked.

    Args:
        stream: stream to the sender.
        opened_ns: time at which the sender began to wait, in ns.
        waiting: number of chunks of each sender's pushes without a result; this push counts its own there.

    Attributes:
        parts: content of each chunk; empty chunks have none.
        pending: chunks that wait for a result.
        results: results that wait to be sent.
        empty: chunks that the push skipped, unless they were dropped.
        ended: whether the sender has sent everything.
        wake: set when any of these changes.
    """

    stream: Stream
    opened_ns: int
    waiting: Counter[Sender] = field(default_factory=Counter)
    parts: dict[int, Part] = field(default_factory=dict)
    pending: set[int] = field(default_factory=set)
    results: list[v1.PushResult] = field(default_factory=list)
    empty: set[int] = field(default_factory=set)
    ended: bool = False
    wake: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def sender(self) -> str:
        """Node name of the worker that pushes."""
        return self.stream.opened.sender

    @property
    def key(self) -> Sender:
        """Name and incarnation of that worker."""
        return self.stream.opened.sender, self.stream.opened.incarnation

    def took(self, chunk: int, part: Part | None) -> None:
        """Adds a chunk that was received; the part of an empty chunk is None."""
        if part is not None:
            self.parts[chunk] = part
        self.pending.add(chunk)
        self.waiting[self.key] += 1

    def _free(self, chunk: int) -> None:
        """Frees a chunk that waits no more."""
        self.parts.pop(chunk, None)
        if chunk in self.pending:
            self.pending.discard(chunk)
            self.waiting[self.key] -= 1

    def acknowledge(self, done: Acknowledge, waited: v1.Waited | None) -> None:
        """Frees a chunk's elements and queues its result. Empty chunks share one result, unless they were dropped.

        Args:
            done: the outcome of the chunk.
            waited: the worker that the chunk's update waited for; None if it waited for no worker.
        """
        self._free(done.chunk)
        self.wake.set()
        if done.chunk in self.empty and done.outcome != "dropped":
            return
        self.empty.discard(done.chunk)
        self.results.append(
            v1.PushResult(
                chunk=done.chunk,
                sequence=done.sequence,
                outcome=done.outcome.upper(),
                version=done.version,
                staleness=max(0, done.staleness),
                waited=waited,
            )
        )

    def supersede(self, chunk: int, retry: PendingPush) -> None:
        """Ends this push after the sender has sent a chunk again in a retry, whose stream replaces this one.

        The elements stay those of the first copy: what was measured is what is applied.
        """
        retry.parts.pop(chunk, None)
        if chunk in self.parts:
            retry.parts[chunk] = self.parts[chunk]
        self._free(chunk)
        self.stream.refuse(v1.SUPERSEDED, "a retry of this push has taken its place")


# ---- pending fetch -----------------------------------------------------------------------
# A fetch on the shard's side: the chunks that are ready, and those that wait.


@dataclass(slots=True, eq=False)
class PendingFetch:
    """A fetch stream. In the state machine it is the token of its chunks.

    Args:
        reader: name of the node that fetches: a worker, or the shard itself.
        number: number of the fetch, from 1; 0 for a fetch of the shard itself, or out of the worker's order.
        attempt: number of earlier attempts.
        flushes: whether the fetch has sums applied, and so changes the state of chunks.
        opened_ns: time at which the reader began to wait, in ns.
        waiting: chunks that the shard cannot send yet.

    Attributes:
        ready: chunks that the shard can send, in this order, with the worker that each had to wait for.
        over: whether the stream has ended.
        wake: set when a chunk becomes ready.
    """

    reader: str
    number: int
    attempt: int
    flushes: bool
    opened_ns: int
    waiting: set[int]
    ready: deque[tuple[int, v1.Waited | None]] = field(default_factory=deque)
    over: bool = False
    wake: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def rank(self) -> int:
        """Rank of the reader."""
        return rank_of(self.reader)

    def release(self, chunk: int, waited: v1.Waited | None) -> None:
        """Marks a chunk as ready."""
        self.waiting.discard(chunk)
        self.ready.append((chunk, waited))
        self.wake.set()

    async def emptied(self) -> None:
        """Returns once no chunk waits."""
        while self.waiting:
            await self.wake.wait()
            self.wake.clear()


# ---- wait notifier -----------------------------------------------------------------------
# Tells a peer that waits at a shard which nodes it waits for, so that the peer does not give up.


@dataclass(eq=False)
class WaitNotifier:
    """Waits until chunks are ready, and meanwhile tells the peer, over and over, which nodes they wait for.

    Args:
        runtime: runtime of the shard's node.
        every_s: seconds between two messages to a peer that waits.
        state: knows which nodes a chunk waits for.
    """

    runtime: Runtime
    every_s: float
    state: ShardState

    async def wait(
        self, stream: Stream, wake: asyncio.Event, chunks: Iterable[int], min_clock: int = 0
    ) -> bool:
        """Waits for `wake` and clears it. If it is not set in time, tells the peer and returns False.

        A peer that waits for no chunk is told nothing: the shard waits for the peer then. What the peer has sent may be
        lost, and it sends it again only if the shard is silent.

        Args:
            stream: stream to the peer.
            wake: set when one of the chunks is ready.
            chunks: the chunks that the peer waits for.
            min_clock: clock that the peer asks for.
        """
        try:
            await self.runtime.within(self.every_s, wake.wait())
        except TimeoutError:
            if waited := sorted(chunks):
                await stream.waiting(self.state.awaited(waited, min_clock))
            return False
        wake.clear()
        return True


# ---- kept pushes -------------------------------------------------------------------------
# The minibatches of recent pushes, in case their sender dies before the coordinator has their receipts.
#
# A push of a lost worker may be torn: applied by some chunks and not by others. Once the shard refuses the worker, and
# the pushes that had arrived are applied, it reports for each push whether its chunks have it. The coordinator then
# lets a living worker redo what is torn (`coordinator/lost_work.py`), for which the shard keeps the lost worker's
# windows of sequence numbers.

MOST_KEPT = 4096
"""The most minibatches that a shard keeps of one sender. The oldest beyond that are forgotten; should the sender die,
others compute them again."""


@dataclass(slots=True)
class _Kept:
    pushes: dict[int, tuple[v1.Receipt, ...]] = field(default_factory=dict)  # by sequence number, in order
    count: int = 0

    def forget(self, sequence: int) -> None:
        self.count -= len(self.pushes.pop(sequence))


class KeptPushes:
    """What a shard keeps of each sender's pushes, and reports of lost ones. No I/O.

    Args:
        state: the state machine of the chunks.

    Attributes:
        on_report: called with the pushes of each lost worker, once.
    """

    def __init__(self, state: ShardState) -> None:
        self.on_report: Callable[[v1.SenderPushes], None] = lambda pushes: None
        self._state = state
        self._kept: dict[Sender, _Kept] = {}
        self._substitutes: dict[Sender, dict[int, str]] = {}  # of lost workers, by number of a torn push
        self._reported: set[Sender] = set()

    @property
    def fenced(self) -> Collection[Sender]:
        """Lost workers whose pushes are not settled."""
        return self._substitutes.keys()

    def note(self, sender: Sender, push: v1.Push) -> None:
        """Keeps the minibatches of a push that begins, and frees those that the coordinator has receipts of."""
        if not push.batches:
            return
        kept = self._kept.get(sender, _Kept())
        while kept.pushes and (oldest := next(iter(kept.pushes))) <= push.settled:
            kept.forget(oldest)
        self._add(sender, push.sequence, tuple(push.batches))

    def _add(self, sender: Sender, sequence: int, batches: tuple[v1.Receipt, ...]) -> None:
        kept = self._kept.setdefault(sender, _Kept())
        if sequence in kept.pushes:  # a retry
            return
        kept.pushes[sequence] = batches
        kept.count += len(batches)
        while kept.count > MOST_KEPT:
            kept.forget(next(iter(kept.pushes)))

    def backup(self) -> list[v1.SenderPushes]:
        """What the shard keeps of each sender, for `restore`."""
        return [
            v1.SenderPushes(
                sender=name,
                incarnation=incarnation,
                pushes=[v1.KeptPush(sequence=number, batches=names) for number, names in kept.pushes.items()],
            )
            for (name, incarnation), kept in self._kept.items()
        ]

    def restore(self, kept: Iterable[v1.SenderPushes]) -> None:
        """Adds what an earlier process of the shard has kept."""
        for one in kept:
            for push in one.pushes:
                self._add((one.sender, one.incarnation), push.sequence, tuple(push.batches))

    def keep(self, members: Collection[Sender], fenced: Iterable[v1.Fenced]) -> None:
        """Frees what belongs to nobody in the run, and to no lost worker that the coordinator names."""
        self._substitutes = {
            (one.sender, one.incarnation): {redo.sequence: redo.substitute for redo in one.redos}
            for one in fenced
        }
        self._reported &= self._substitutes.keys()
        stay = {*members, *self._substitutes}
        self._kept = {sender: kept for sender, kept in self._kept.items() if sender in stay}

    def report(self) -> None:
        """Reports the lost workers of which no push is on its way into a chunk any more."""
        for sender in self._substitutes:
            if sender not in self._reported and self._state.withdraw(sender):
                self._reported.add(sender)
                self.on_report(self._pushes_of(sender))

    def _pushes_of(self, sender: Sender) -> v1.SenderPushes:
        kept, state = self._kept.pop(sender, _Kept()), self._state
        pushes = [
            v1.KeptPush(sequence=sequence, batches=names, applied=state.num_applied(sender, sequence))
            for sequence, names in kept.pushes.items()
        ]
        name, incarnation = sender
        return v1.SenderPushes(
            sender=name,
            incarnation=incarnation,
            chunks=len(state.chunks),
            pushes=pushes,
            gradients=state.num_gradients(sender),
        )

    def check_substitute(self, opened: v1.Open, push: v1.Push) -> None:
        """Refuses a push for a lost worker which the coordinator has not asked its sender for, as far as is known here.

        Raises:
            RefusedError: STALE_EPOCH, so that the sender tries again: it may have been told before this shard.
        """
        name, incarnation = push.behalf.sender, push.behalf.incarnation
        substitute = self._substitutes.get((name, incarnation), {}).get(push.sequence)
        if substitute != opened.sender:
            text = f"{opened.sender} pushes number {push.sequence} for {name[:64]}"
            expected = f"from {substitute}" if substitute else "no such push"
            raise RefusedError("shard", "STALE_EPOCH", f"{text}; expected {expected}")
