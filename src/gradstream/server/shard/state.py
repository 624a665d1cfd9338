"""The shard as a state machine: events in, instructions out, no I/O and no arithmetic.

Each chunk stands alone. It is idle or being updated; an update takes time, so pushes that arrive meanwhile wait in a
queue. A push is exactly-once per (sender, incarnation, sequence, chunk). A second copy is answered DUPLICATE if the
first copy was applied, and takes over its place in the queue if that still waits.

    push ──▶ duplicate? too late? ──▶ parked ──rule.due──▶ Apply ──▶ applied ──▶ Acknowledge, Release
    fetch ─▶ version, own push and clocks reached? ──▶ Release, or the fetch waits (`awaited` names the nodes)

Where the rule says that an update is not complete, the pushes that are due join the chunk's sum, and the version
stays. A fetch with `FetchTerms.flush` has the sum applied although no more pushes will come. With a lockstep rule
the sum belongs to one clock, and is complete once every worker that takes part has pushed for that clock.

Where a quorum makes each update (`agreement.py`), chunks do not decide alone: the rule sees the pushes of a round once
the quorum's decision has named their workers, and the shard drops the other pushes.

Sources: Dean et al. 2012 (Downpour's parameter server); Li et al. 2014 (vector clocks per range; a version and a
window are their special case of one writer per clock entry).
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from gradstream.server.aggregation import AggregationRule, FetchTerms, PushHeader
from gradstream.server.shard.passes import ChunkProcedure, Clocks
from gradstream.wire.frames import SequenceWindow

MAX_COUNT = 1 << 53
"""Largest number of a push, a version or a clock: no run counts further."""


# ---- instructions ------------------------------------------------------------------------
# What the state machine has the executor do.

Token = Hashable

Sender = tuple[str, int]
"""Name and incarnation of a node that pushes."""

Outcome = Literal["applied", "duplicate", "dropped"]


@dataclass(frozen=True, slots=True)
class Parked:
    """One chunk of a push that waits for its update.

    Args:
        header: the chunk's header.
        token: identifies the push, with its elements and the stream that waits for the result.
        assign: whether the push brings initial parameters, for a chunk that has none yet.
    """

    header: PushHeader
    token: Token
    assign: bool = False


@dataclass(frozen=True, slots=True)
class Apply:
    """Compute this update, then call `applied(chunk)`.

    Args:
        chunk: number of the chunk.
        update: pushes to add up; none where only the sum is to be applied.
        step: number of the update on this chunk, from 1.
        lr: learning rate of the update, and of the sum: the first rate above 0 among its pushes, and the weight of each
            push contains the push's own rate divided by this one. Under a robust rule the median of the rates.
        summed: number of pushes in the chunk's sum, which these pushes join.
        completes: whether to apply the sum with these pushes; else they only join it.
        distances: those of the quorum's decision, if it has any.
    """

    chunk: int
    update: tuple[Parked, ...]
    step: int
    lr: float = 0.0
    summed: int = 0
    completes: bool = True
    distances: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """Tell the sender the outcome of its chunk. A push that has joined a sum counts as applied."""

    token: Token
    chunk: int
    sequence: int
    outcome: Outcome
    version: int
    staleness: int


@dataclass(frozen=True, slots=True)
class Release:
    """Send this chunk to the fetch, as it is at that time."""

    token: Token
    chunk: int


@dataclass(frozen=True, slots=True)
class Supersede:
    """End the stream of this push: a retry waits in its place on a chunk, with the header and elements of the first."""

    token: Token
    chunk: int
    retry: Token


Instruction = Apply | Acknowledge | Release | Supersede


# ---- state machine -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class QuorumDecision:
    """The pushes of the workers of these ranks, and no others, make the update of this round.

    Args:
        round: number of the round.
        ranks: ranks of the workers.
        distances: squared distances of their contributions, where their weights depend on them; see
            `server.aggregation.WholeRule`.
    """

    round: int
    ranks: tuple[int, ...]
    distances: tuple[float, ...] = ()


DECISIONS_KEPT = 64
"""Decisions that the shard keeps, for retries of pushes whose answer was lost."""


@dataclass(slots=True)
class ChunkState:
    """One chunk: its version, the pushes and fetches that wait for it, and the pushes that were applied to it."""

    index: int
    version: int = -1  # before the initial parameters were assigned
    applying: Apply | None = None
    committed: bool = False  # `applying` is counted already
    summed: int = 0  # pushes in the sum, without empty ones
    lr: float = 0.0  # learning rate of the sum
    clock: int = 0  # latest clock of all pushes that ever joined a sum
    parked: list[Parked] = field(default_factory=list)
    arrivals: list[Parked] = field(default_factory=list)  # arrived while the chunk was busy
    fetches: list[tuple[FetchTerms, Token]] = field(default_factory=list)
    windows: dict[Sender, SequenceWindow] = field(default_factory=dict)
    gradients: Counter[Sender] = field(default_factory=Counter)  # of each sender, how many are in the chunk
    procedure: ChunkProcedure = field(
        default_factory=ChunkProcedure
    )  # portions are taken where there are passes

    @property
    def busy(self) -> bool:
        """Whether the chunk or its sum is being updated."""
        return self.applying is not None

    @property
    def senders(self) -> set[Sender]:
        """Senders of the pushes that have arrived and are not applied."""
        held = [*self.parked, *self.arrivals, *(self.applying.update if self.applying is not None else ())]
        return {_sender_of(one.header) for one in held}

    @property
    def unapplied(self) -> bool:
        """Whether the chunk's sum has a push, or is getting one, that its parameters do not have yet."""
        return self.summed > 0 or (self.applying is not None and not self.applying.completes)


class ShardState:
    """All chunks of a shard.

    Args:
        chunks: numbers of the chunks.
        rule: the strategy's server half.
        window: makes the set of applied sequence numbers of one sender.
        quorum: whether updates wait for decisions of a quorum.
        workers: number of workers whose clocks the shard keeps.
    """

    def __init__(
        self,
        chunks: Iterable[int],
        rule: AggregationRule,
        window: Callable[[], SequenceWindow] = SequenceWindow,
        *,
        quorum: bool = False,
        workers: int = 0,
    ) -> None:
        self._rule = rule
        self._window = window
        self._quorum = quorum
        self._decisions: dict[int, QuorumDecision] = {}  # by round
        self._members: frozenset[Sender] = frozenset()
        self._fenced: frozenset[Sender] = frozenset()
        self._lingering: dict[
            int, set[Sender]
        ] = {}  # by chunk: senders that left before their pushes were applied
        self.chunks = {chunk: ChunkState(chunk) for chunk in chunks}
        self.clocks = Clocks(self.chunks, workers)

    def versions(self) -> list[int]:
        """The version of each chunk, in order; -1 before it has initial parameters."""
        return [state.version for state in self.chunks.values()]

    def version(self, chunk: int) -> int:
        """Number of updates applied to a chunk; -1 before it has initial parameters."""
        return self.chunks[chunk].version

    # ---- pushes and updates -------------------------------------------------------------

    def push(self, chunk: int, new: Parked) -> list[Instruction]:
        """Takes in a push of a chunk."""
        state = self.chunks[chunk]
        if state.busy:
            return _queue(state.arrivals, state, new)
        out = self._admit(state, new)
        # A fetch that waited for this push waits for nothing if the push was dropped.
        return [*out, *self._release(state), *self._start(state)]

    def decide(self, decision: QuorumDecision) -> list[Instruction]:
        """Takes in whose pushes make the update of a round."""
        self._decisions[decision.round] = decision
        if len(self._decisions) > DECISIONS_KEPT:
            del self._decisions[next(iter(self._decisions))]
        out: list[Instruction] = []
        for state in self.chunks.values():
            if not state.busy:
                out += self._drop_late(state)
                out += [*self._release(state), *self._start(state)]
        return out

    def commit(self, chunk: int) -> ChunkState:
        """Counts the last `Apply`, which is in the parameters or in the sum. The chunk stays busy until `applied`.

        Returns:
            The chunk's state, as a backup keeps it.
        """
        state = self.chunks[chunk]
        due = state.applying
        assert due is not None
        if due.completes:
            state.version, state.summed = state.version + 1, 0
        else:
            state.summed += sum(not held.header.empty for held in due.update)
            state.clock = max([state.clock, *(held.header.clock for held in due.update)])
            state.lr = due.lr
        for parked in due.update:
            done = parked.header
            self._window_of(state, done).add(done.sequence)
            state.procedure.take(done)
            if not (parked.assign or done.redone or done.vector):
                state.gradients[_sender_of(done)] += done.num_gradients
            if done.clock and (not self._members or _sender_of(done) in self._members):
                self.clocks.advance(chunk, done.rank, done.clock)
        state.committed = True
        return state

    def applied(self, chunk: int) -> list[Instruction]:
        """Ends the last `Apply`, which is in the parameters, or in the sum. Calls `commit` where nobody has."""
        state = self.chunks[chunk]
        due = state.applying
        assert due is not None
        if not state.committed:
            self.commit(chunk)
        state.applying, state.committed = None, False
        before = state.version - due.completes
        out: list[Instruction] = []
        for parked in due.update:
            done = parked.header
            staleness = 0 if parked.assign or done.empty else before - done.base_version
            out.append(Acknowledge(parked.token, chunk, done.sequence, "applied", state.version, staleness))
        arrivals, state.arrivals = state.arrivals, []
        for new in arrivals:
            out += self._admit(state, new)
        out += self._drop_late(state)
        out += self._release(state)
        out += self._start(state)
        if chunk in self._lingering:
            self._free(state)
        return out

    def hold(self, chunk: int) -> None:
        """Keeps an idle chunk busy, with nothing to update, until the next call of `applied`."""
        state = self.chunks[chunk]
        state.applying, state.committed = Apply(chunk, (), state.version), True

    @property
    def joins_updates(self) -> bool:
        """Whether nobody can tell several updates, one right after the other, from a reader who comes later.

        Not where the version that a reader gets is the one of its round or clock.
        """
        return not (self._rule.by_round or self._rule.lockstep)

    def commanded(self, chunk: int) -> list[Instruction]:
        """Counts a command that has changed a chunk's parameters as an update, unless versions are rounds."""
        state = self.chunks[chunk]
        if state.version < 0 or self._rule.by_round:
            return []
        state.version += 1
        return self._release(state)

    # ---- senders that have left ---------------------------------------------------------

    def keep_senders(self, members: Collection[Sender], fenced: Collection[Sender] = ()) -> None:
        """Frees the state of all other senders, which have left and do not come back.

        The shard still uses their pushes that have arrived, and keeps their windows until then. The caller refuses
        new ones.

        Args:
            members: the senders that take part.
            fenced: senders that have left, and whose windows are kept all the same.
        """
        self._members, self._fenced = frozenset(members), frozenset(fenced)
        for state in self.chunks.values():
            self._free(state)

    @property
    def lingering(self) -> set[str]:
        """Names of senders that have left, and whose pushes are not all applied."""
        return {name for senders in self._lingering.values() for name, _ in senders}

    def withdraw(self, sender: Sender) -> bool:
        """Drops pushes of a sender that has left which the rule does not take without others.

        Returns:
            Whether nothing of this sender is going to be applied any more. Else call it again after an update.
        """
        for state in self.chunks.values():
            if not state.busy:
                state.parked = [held for held in state.parked if _sender_of(held.header) != sender]
        return not any(sender in state.senders for state in self.chunks.values())

    def num_applied(self, sender: Sender, sequence: int) -> int:
        """Number of chunks that have applied a push of a sender, whose windows are kept."""
        windows = (state.windows.get(sender, ()) for state in self.chunks.values())
        return sum(sequence in window for window in windows)

    def num_gradients(self, sender: Sender) -> int:
        """Number of gradients of a sender that every chunk has, while its windows are kept; without chunks the most."""
        return min((state.gradients.get(sender, 0) for state in self.chunks.values()), default=MAX_COUNT)

    def _free(self, state: ChunkState) -> None:
        lingering = state.senders - self._members
        kept = lingering | self._members | self._fenced
        for gone in [window for window in state.windows if window not in kept]:
            del state.windows[gone]
            state.gradients.pop(gone, None)
        if lingering:
            self._lingering[state.index] = lingering
        else:
            self._lingering.pop(state.index, None)

    # ---- fetches ------------------------------------------------------------------------

    def fetch(self, chunk: int, terms: FetchTerms, token: Token) -> list[Instruction]:
        """Takes in a fetch of a chunk."""
        state = self.chunks[chunk]
        if self._satisfied(state, terms):
            return [Release(token, chunk)]
        state.fetches.append((terms, token))
        return self._start(state) if terms.flush and not state.busy else []

    def clocks_changed(self) -> list[Instruction]:
        """Takes note that workers were paused or resumed, or are lost: see `clocks`."""
        out: list[Instruction] = []
        for state in self.chunks.values():
            out += self._release(state)
            if not state.busy:
                out += self._start(state)
        return out

    def forget(self, token: Token) -> None:
        """Forgets the fetches of a stream that has ended. Its pushes stay in effect."""
        for state in self.chunks.values():
            if state.fetches:
                state.fetches = [(terms, held) for terms, held in state.fetches if held != token]

    def awaited(self, chunks: Iterable[int], min_clock: int = 0) -> Sequence[str]:
        """Names of the nodes that these chunks wait for, sorted.

        Args:
            chunks: numbers of the chunks.
            min_clock: clock that a reader asks for.
        """
        names: dict[str, None] = {}
        for chunk in chunks:
            state = self.chunks[chunk]
            if state.version < 0:
                names["the worker of the lowest rank (initial parameters)"] = None
            parked = [held.header for held in state.parked]
            names.update(dict.fromkeys(self._rule.among(self.clocks.present).awaited(state.version, parked)))
            names.update((f"worker-{rank}", None) for rank in self.clocks.behind(chunk, min_clock))
        return sorted(names)

    # ---- one chunk ----------------------------------------------------------------------

    def _window_of(self, state: ChunkState, header: PushHeader) -> SequenceWindow:
        key = _sender_of(header)
        if key not in state.windows:
            state.windows[key] = self._window()
        return state.windows[key]

    def _admit(self, state: ChunkState, new: Parked) -> list[Instruction]:
        """Parks a push of an idle chunk, unless it is a duplicate or too late."""
        coming = new.header
        if coming.sequence in self._window_of(state, coming):
            outcome: Outcome = "dropped" if self._left_out(coming) else "duplicate"
            return [Acknowledge(new.token, state.index, coming.sequence, outcome, state.version, 0)]
        late = state.version >= 0 if new.assign else self._late(state, coming)
        if late:
            return [self._dropped(state, new)]
        return _queue(state.parked, state, new)

    def _late(self, state: ChunkState, header: PushHeader) -> bool:
        if state.procedure.refuses(header):
            return True
        return self._rule.drops(state.version, header) or self._left_out(header)

    def _left_out(self, header: PushHeader) -> bool:
        """Whether a quorum's decision has left a push out."""
        decision = self._decisions.get(header.round)
        return decision is not None and header.rank not in decision.ranks

    def _dropped(self, state: ChunkState, held: Parked) -> Acknowledge:
        sequence = held.header.sequence
        self._window_of(state, held.header).add(sequence)
        return Acknowledge(held.token, state.index, sequence, "dropped", state.version, 0)

    def _drop_late(self, state: ChunkState) -> list[Instruction]:
        """Drops pushes that were in time when they were parked, and whose round is over now."""
        late = [held for held in state.parked if not held.assign and self._late(state, held.header)]
        if late:
            state.parked = [held for held in state.parked if held not in late]
        return [self._dropped(state, held) for held in late]

    def _candidates(self, state: ChunkState) -> list[PushHeader]:
        """The pushes that the rule may choose from."""
        parked = [held.header for held in state.parked]
        if not self._quorum:
            return parked
        decision = self._decisions.get(state.version)
        ranks = () if decision is None else decision.ranks
        return [one for one in parked if one.round == state.version and one.rank in ranks]

    def _start(self, state: ChunkState) -> list[Instruction]:
        """Begins the next update of an idle chunk, if one is due."""
        update: tuple[Parked, ...] = tuple(held for held in state.parked if held.assign)[:1]
        if not update and state.version >= 0:
            by_header = {held.header: held for held in state.parked}
            due = self._rule.among(self.clocks.present).due(state.version, self._candidates(state))
            update = tuple(by_header[header] for header in due)
        flushes = any(terms.flush for terms, _ in state.fetches) or self._all_pushed(state, state.clock)
        if not update and not (state.summed and flushes):
            return []
        taken = set(map(id, update))
        state.parked = [held for held in state.parked if id(held) not in taken]
        state.applying = self._planned(state, update)
        return [state.applying]

    def _planned(self, state: ChunkState, update: tuple[Parked, ...]) -> Apply:
        """The instruction to apply these pushes, with the sum if there is one; or to add them to the sum."""
        headers = [held.header for held in update]
        before = state.lr if state.summed else 0.0
        rates = [before, *(header.lr for header in headers if not header.empty)]
        rate = next(filter(None, rates), 0.0)
        if self._rule.robust is not None and len(rates) > 1:  # no sum; a minority cannot move the median
            rate = statistics.median_low(rates[1:])
        decision = self._decisions.get(state.version)
        return Apply(
            state.index,
            update,
            step=state.version + 1,
            lr=rate,
            summed=state.summed if before == rate else 0,  # a sum of rate 0 adds nothing at another rate
            completes=not update or update[0].assign or self._is_complete(state, headers),
            distances=() if decision is None else decision.distances,
        )

    def _is_complete(self, state: ChunkState, new: Sequence[PushHeader]) -> bool:
        """Whether the shard applies the sum once these pushes are in it."""
        if self._rule.lockstep:
            own = [one for one in new if not one.redone]
            clocks = [state.clock if state.summed else 0, *(one.clock for one in own)]
            if not self._all_pushed(state, max(clocks), own):
                return False
        return self._rule.completes(state.version, state.summed, new)

    def _all_pushed(self, state: ChunkState, clock: int, new: Sequence[PushHeader] = ()) -> bool:
        """Whether a clock is complete with these pushes, under a lockstep rule."""
        if not self._rule.lockstep:
            return False
        return set(self.clocks.behind(state.index, clock)) <= {one.rank for one in new}

    def _satisfied(self, state: ChunkState, terms: FetchTerms) -> bool:
        if state.version < max(terms.min_version, 0) or (terms.flush and state.unapplied):
            return False
        if terms.min_clock and self.clocks.slowest(state.index) < terms.min_clock:
            return False
        if self._rule.lockstep and state.unapplied and state.clock <= terms.min_clock:
            return False  # a worker has left, so the clock is complete, but its sum is not applied yet
        if terms.after_sequence == 0:
            return True
        window = state.windows.get(_sender_of(terms))
        return window is not None and terms.after_sequence in window

    def _release(self, state: ChunkState) -> list[Instruction]:
        """Releases the chunk to the fetches whose terms hold."""
        out: list[Instruction] = []
        fetches, state.fetches = state.fetches, []
        for terms, token in fetches:
            if self._satisfied(state, terms):
                out.append(Release(token, state.index))
            else:
                state.fetches.append((terms, token))
        return out


def _queue(waiting: list[Parked], state: ChunkState, new: Parked) -> list[Instruction]:
    """Appends a push, or has it take over the place of the first copy of it."""
    coming = new.header
    for index, held in enumerate(waiting):
        if (_sender_of(held.header), held.header.sequence) == (_sender_of(coming), coming.sequence):
            waiting[index] = replace(held, token=new.token)
            return [Supersede(held.token, state.index, new.token)]
    waiting.append(new)
    return []


def _sender_of(header: PushHeader | FetchTerms) -> Sender:
    return header.sender, header.incarnation
