"""Holds a shard to the order that was recorded, chunk by chunk.

    what comes   a contribution is let in at its moment, behind all those that came to the chunk before it
    what goes    a fetch is given a chunk when so many updates are done as when it was given it before
    an update    waits until everything has come and gone that had, when it was done

What was never recorded never happens: a worker that was killed waits in its replay for ever, at the point
at which it was killed. Chunks do not wait for one another, but through workers: as they did.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable

from gradstream.errors import DivergedError
from gradstream.recording import FetchAsked, LogPart, Pushed
from gradstream.replay.chunk_log import Coming, ShardLog, course_of, moment_of
from gradstream.server.aggregation import FetchTerms, PushHeader
from gradstream.server.quorum import QuorumDecision
from gradstream.server.shard.event_schedule import Change, Chunks, Fetched, Go, Updating
from gradstream.server.shard.recorder import crc_of

__all__ = ["ReplayListener", "ReplaySchedule"]


class ReplayListener:
    """Told of what happens in a replay. Does nothing."""

    def moved(self) -> None:
        """Something that was recorded has happened."""

    def updates(self, updating: Updating) -> None:
        """An update begins."""

    def updated(self, updating: Updating) -> None:
        """It is done."""

    def diverged(self, error: DivergedError) -> None:
        """This is another run."""


class ReplaySchedule:
    """Implements `Order`.

    Args:
        part: what the shard has recorded.
        told: of what happens.
    """

    def __init__(self, part: LogPart, told: ReplayListener) -> None:
        self.node = part.node
        self._told = told
        self._shard: Chunks | None = None  # until the model is registered
        self._chunks, self._entered = course_of(part)

    @property
    def num_left(self) -> int:
        """Contributions that have not come yet."""
        return sum(len(state.ordered) for state in self._chunks.values())

    @property
    def over(self) -> bool:
        """Whether everything that was recorded has happened, but for fetches that no update follows."""
        return not any(
            state.ordered or state.next or self._busy(chunk) for chunk, state in self._chunks.items()
        )

    def _busy(self, chunk: int) -> bool:
        return self._shard is not None and self._shard.busy(chunk)

    def awaited(self) -> Iterable[str]:
        """What each chunk waits for, in words."""
        for chunk, state in self._chunks.items():
            unread = state.unread[state.done] if state.next else set()
            head = state.ordered[0] if state.ordered else None
            if head is not None and not isinstance(head, ShardLog) and not unread:
                what = f"push {head.sequence}" if isinstance(head, Pushed) else f"fetch {head.number}"
                yield f"{self.node}, chunk {chunk}: {what} of worker-{head.rank}"
            for rank, number in sorted(unread):
                yield f"{self.node}, chunk {chunk}: fetch {number} of worker-{rank}"

    def begin(self, chunks: Chunks) -> None:
        """See `Order`."""
        self._shard = chunks

    # ---- what comes ---------------------------------------------------------------------

    def push(self, chunk: int, new: PushHeader, assign: bool, go: Go) -> None:
        """See `Order`."""

        def come(entry: Coming) -> None:
            assert isinstance(entry, Pushed)
            base_version = entry.base_version if new.empty else new.base_version  # of nothing
            if (base_version, new.empty, assign) != (entry.base_version, entry.absent, entry.assign):
                self._diverge(
                    chunk,
                    f"push {new.sequence} of worker-{new.rank} was computed on version {new.base_version}, "
                    f"recorded {entry.base_version}",
                )
            go()

        self._hold(chunk, (Pushed, new.rank, new.sequence), come)

    def ask(self, chunk: int, fetch: Fetched, terms: FetchTerms, go: Callable[[FetchTerms], None]) -> None:
        """See `Order`: it waits for its turn alone."""
        none = FetchTerms(terms.sender, terms.incarnation, flush=terms.flush, beside=terms.beside)
        if fetch.acts and fetch.number:
            self._hold(chunk, (FetchAsked, fetch.rank, fetch.number), lambda entry: go(none))
        else:
            go(none)

    def _hold(self, chunk: int, key: Hashable, come: Callable[[Coming], None]) -> None:
        state = self._chunks[chunk]
        state.held[key] = lambda: come(state.ordered[0])
        self._let_in(chunk)

    def _let_in(self, chunk: int) -> None:
        """Lets in what has come and has its turn; each may begin an update, and so bring about the next."""
        state = self._chunks[chunk]
        if state.letting_in:
            return
        state.letting_in = True
        while state.ordered and moment_of(state.ordered[0], chunk) <= self._moment(chunk):
            head = state.ordered[0]
            if moment_of(head, chunk) < self._moment(chunk):
                self._diverge(chunk, f"update {state.done} should have waited for {head}")
            if isinstance(head, ShardLog):
                if not self._happen(head):
                    break
                continue
            number = head.sequence if isinstance(head, Pushed) else head.number
            if isinstance(head, FetchAsked) and not number:
                assert self._shard is not None
                self._shard.flush_sum(chunk)
                state.ordered.popleft()
                continue
            go = state.held.pop((type(head), head.rank, number), None)
            if go is None:
                break
            go()
            state.ordered.popleft()
            self._told.moved()
        state.letting_in = False
        self._go_on(chunk)

    def _happen(self, event: ShardLog) -> bool:
        """What is for all chunks at once happens when it is its turn on each."""
        for chunk, moment in event.moments.items():
            ordered = self._chunks[chunk].ordered
            if not ordered or ordered[0] is not event or self._moment(chunk) != moment:
                return False
        for chunk in event.moments:
            self._chunks[chunk].ordered.popleft()
        assert self._shard is not None
        if isinstance(event.event, QuorumDecision):
            self._shard.decide(event.event)
        else:
            self._shard.change(event.event)
        self._told.moved()
        for chunk in event.moments:
            self._let_in(chunk)
        return True

    def _moment(self, chunk: int) -> int:
        return 2 * self._chunks[chunk].done + self._busy(chunk)

    # ---- what goes ----------------------------------------------------------------------

    def release(self, chunk: int, fetch: Fetched, go: Go) -> None:
        """See `Order`."""
        state = self._chunks[chunk]
        if not fetch.number:
            go()
            return
        done = state.reads.get((fetch.rank, fetch.number))
        if done == state.done:
            go()
        elif done is not None and done > state.done:
            state.releases[done].append(go)
        elif done is not None:
            self._diverge(chunk, f"fetch {fetch.number} of worker-{fetch.rank} came behind update {done}")

    def read(self, chunk: int, fetch: Fetched, clock: int) -> int:
        """See `Order`."""
        state = self._chunks[chunk]
        state.unread[state.done].discard((fetch.rank, fetch.number))
        self._told.moved()
        self._go_on(chunk)
        return state.clocks.get((fetch.rank, fetch.number), clock)

    def change(self, change: Change, go: Callable[[], int]) -> int:
        """See `Order`: who takes part when is in the recording, and so is what they were told."""
        answers = self._entered[change.ranks[0]] if change.kind == "enter" else None
        return answers.popleft() if answers else change.clock

    def decide(self, verdict: QuorumDecision, go: Go) -> None:
        """See `Order`: what is decided is in the recording."""

    # ---- updates ------------------------------------------------------------------------

    def update(self, updating: Updating, go: Go) -> None:
        """See `Order`."""
        chunk = updating.due.chunk
        self._chunks[chunk].next = (updating, go)
        self._let_in(chunk)

    def _go_on(self, chunk: int) -> None:
        """Lets the update begin that waits, if nothing has to happen before it is done."""
        state = self._chunks[chunk]
        before = bool(state.ordered) and moment_of(state.ordered[0], chunk) // 2 <= state.done
        if state.next is None or before or state.unread[state.done]:
            return
        (updating, go), state.next = state.next, None
        self._told.updates(updating)
        go()

    def updated(self, updating: Updating) -> None:
        """See `Order`."""
        chunk = updating.due.chunk
        state = self._chunks[chunk]
        state.done += 1
        crc = state.sums.get(state.done)
        if crc is not None and crc != crc_of(updating.parameters):
            self._diverge(chunk, "the parameters are not those of the recorded run")
        self._told.updated(updating)
        self._told.moved()
        for go in state.releases.pop(state.done, ()):
            go()
        self._let_in(chunk)

    def _diverge(self, chunk: int, what: str) -> None:
        done = self._chunks[chunk].done
        self._told.diverged(DivergedError(f"{self.node}, chunk {chunk}, after {done} updates: {what}"))
