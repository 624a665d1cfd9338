"""The shard as a state machine: events in, instructions out, no I/O and no arithmetic.

Each chunk stands alone. It is idle or being updated; an update takes time, so pushes that arrive
meanwhile queue. A push is exactly-once per (sender, incarnation, sequence, chunk): a second copy
is answered DUPLICATE if the first was applied, and takes its place if that one still waits.

    push ──▶ duplicate? drop? ──▶ parked ──rule.due──▶ Apply ──▶ applied ──▶ Acknowledge, Release
    fetch ─▶ version, own push and clocks reached? ──▶ Release, or the fetch waits (`awaited` says for whom)

Where the rule says that an update is not complete, the pushes that are due join the chunk's sum, and the version
stays. A fetch with `FetchTerms.flush` has the sum applied when nothing more will come. With a lockstep rule the sum
is that of one clock, and complete once every worker that takes part has pushed its own.

Where a quorum makes each update (`quorum.py`), chunks do not decide each for itself: the rule sees the pushes of a
round once the quorum's decision has named their workers, and the others are dropped.

Sources: Dean et al. 2012 (Downpour's parameter server); Li et al. 2014 (vector clocks per range,
of which version + window is the special case of one writer per clock entry).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from gradstream.server.aggregation import AggregationRule, FetchTerms, PushHeader
from gradstream.server.quorum import QuorumDecision
from gradstream.server.shard.clocks import Clocks
from gradstream.wire.window import SequenceWindow

__all__ = [
    "Acknowledge",
    "Apply",
    "ChunkState",
    "Instruction",
    "Parked",
    "Release",
    "Sender",
    "ShardState",
    "Supersede",
    "Token",
]

DECISIONS_KEPT = 64
"""Decisions are kept for retries of pushes whose answer was lost."""

Token = Hashable

Sender = tuple[str, int]
"""Name and incarnation of a node that pushes."""

Outcome = Literal["applied", "duplicate", "dropped"]


@dataclass(frozen=True, slots=True)
class Parked:
    """One chunk of a push that waits for its update.

    Args:
        header: the chunk's header.
        token: stands for the push: its elements, and the stream that waits for the result.
        assign: the push brings initial parameters, for a chunk that has none yet.
    """

    header: PushHeader
    token: Token
    assign: bool = False


@dataclass(frozen=True, slots=True)
class Apply:
    """Compute this update, then call `applied(chunk)`.

    Args:
        chunk: number of the chunk.
        update: pushes that are added up; none where only the sum is left to be applied.
        step: number of the update on this chunk, from 1.
        lr: learning rate of the update, and of the sum: the first one above 0 among its pushes. Each
            push is weighed by its own rate over it.
        summed: number of pushes in the chunk's sum, to which these are added.
        completes: the sum is applied with these; else these only join it.
    """

    chunk: int
    update: tuple[Parked, ...]
    step: int
    lr: float = 0.0
    summed: int = 0
    completes: bool = True


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """Tell the sender what became of its chunk. A push that has joined a sum counts as applied: it will be."""

    token: Token
    chunk: int
    sequence: int
    outcome: Outcome
    version: int
    staleness: int


@dataclass(frozen=True, slots=True)
class Release:
    """Let the fetch have this chunk, as it is when it can be sent."""

    token: Token
    chunk: int


@dataclass(frozen=True, slots=True)
class Supersede:
    """End the stream of this push: a retry has taken its place on a chunk."""

    token: Token
    chunk: int


Instruction = Apply | Acknowledge | Release | Supersede


@dataclass(slots=True)
class ChunkState:
    """One chunk: its version, the pushes that wait for it and those that were applied to it."""

    version: int = -1  # before the initial parameters were assigned
    applying: Apply | None = None
    summed: int = 0  # contributions in the sum; none are those without elements
    lr: float = 0.0  # that it is to be applied with
    clock: int = 0  # the latest of any that came into a sum
    parked: list[Parked] = field(default_factory=list)
    arrivals: list[Parked] = field(default_factory=list)  # came while busy
    fetches: list[tuple[FetchTerms, Token]] = field(default_factory=list)
    windows: dict[Sender, SequenceWindow] = field(default_factory=dict)

    @property
    def busy(self) -> bool:
        """Whether it is being updated, or its sum is."""
        return self.applying is not None

    @property
    def senders(self) -> set[Sender]:
        """Senders of the pushes that are here and not applied."""
        held = [*self.parked, *self.arrivals, *(self.applying.update if self.applying is not None else ())]
        return {_sender_of(one.header) for one in held}

    @property
    def unapplied(self) -> bool:
        """Whether a push was acknowledged, or will be next, that is in no version yet."""
        return self.summed > 0 or (self.applying is not None and not self.applying.completes)


class ShardState:
    """All chunks of a shard.

    Args:
        chunks: numbers of the chunks.
        rule: the strategy's server half.
        window: makes the set of applied sequence numbers of one sender.
        quorum: updates wait for decisions of a quorum.
        workers: number of workers whose clocks are kept.
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
        self._decisions: dict[int, frozenset[int]] = {}  # ranks, by round
        self._members: frozenset[Sender] = frozenset()
        self._lingering: dict[int, set[Sender]] = {}  # by chunk: gone, with pushes to be applied
        self.chunks = {chunk: ChunkState() for chunk in chunks}
        self.clocks = Clocks(self.chunks, workers)

    def versions(self) -> list[int]:
        """The version of each chunk, in order; -1 before it has initial parameters."""
        return [state.version for state in self.chunks.values()]

    def version(self, chunk: int) -> int:
        """Number of updates applied to a chunk; -1 before it has initial parameters."""
        return self.chunks[chunk].version

    def push(self, chunk: int, new: Parked) -> list[Instruction]:
        """Takes in a push of a chunk."""
        state = self.chunks[chunk]
        if state.busy:
            state.arrivals.append(new)
            return []
        out = self._admit(chunk, state, new)
        # A fetch that waited for this push waits for nothing if it was dropped.
        return [*out, *self._release(chunk, state), *self._start(chunk, state)]

    def decide(self, decision: QuorumDecision) -> list[Instruction]:
        """Takes in which workers' pushes make the update of a round."""
        self._decisions[decision.round] = frozenset(decision.ranks)
        if len(self._decisions) > DECISIONS_KEPT:
            del self._decisions[next(iter(self._decisions))]
        out: list[Instruction] = []
        for chunk, state in self.chunks.items():
            if not state.busy:
                out += self._drop_late(chunk, state)
                out += [*self._release(chunk, state), *self._start(chunk, state)]
        return out

    def applied(self, chunk: int) -> list[Instruction]:
        """Takes note that the update asked for last is in the parameters, or in the sum."""
        state = self.chunks[chunk]
        due, before = state.applying, state.version
        assert due is not None
        if due.completes:
            state.version, state.summed = before + 1, 0
        else:
            state.summed += sum(not held.header.empty for held in due.update)
            state.clock = max([state.clock, *(held.header.clock for held in due.update)])
            state.lr = due.lr
        state.applying = None
        out: list[Instruction] = []
        for parked in due.update:
            done = parked.header
            self._window_of(state, done).add(done.sequence)
            if done.clock:
                self.clocks.advance(chunk, done.rank, done.clock)
            staleness = 0 if parked.assign or done.empty else before - done.base_version
            out.append(Acknowledge(parked.token, chunk, done.sequence, "applied", state.version, staleness))
        arrivals, state.arrivals = state.arrivals, []
        for new in arrivals:
            out += self._admit(chunk, state, new)
        out += self._drop_late(chunk, state)
        out += self._release(chunk, state)
        out += self._start(chunk, state)
        if chunk in self._lingering:
            self._free(chunk, state)
        return out

    def commanded(self, chunk: int) -> list[Instruction]:
        """Counts a command that has changed a chunk's parameters as an update, unless versions are rounds."""
        state = self.chunks[chunk]
        if state.version < 0 or self._rule.by_round:
            return []
        state.version += 1
        return self._release(chunk, state)

    # ---- senders that are gone ----------------------------------------------------------

    def keep_senders(self, members: Collection[Sender]) -> None:
        """Frees what is kept of all other senders, which have left and do not come back.

        Their pushes that are here are still used, and their windows stay until then. The caller refuses new ones.
        """
        self._members = frozenset(members)
        for chunk, state in self.chunks.items():
            self._free(chunk, state)

    @property
    def lingering(self) -> set[str]:
        """Names of senders that have left, and whose pushes are not all applied."""
        return {name for senders in self._lingering.values() for name, _ in senders}

    def _free(self, chunk: int, state: ChunkState) -> None:
        lingering = state.senders - self._members
        for gone in [one for one in state.windows if one not in self._members and one not in lingering]:
            del state.windows[gone]
        if lingering:
            self._lingering[chunk] = lingering
        else:
            self._lingering.pop(chunk, None)

    # ---- reading ------------------------------------------------------------------------

    def fetch(self, chunk: int, terms: FetchTerms, token: Token) -> list[Instruction]:
        """Takes in a fetch of a chunk."""
        state = self.chunks[chunk]
        if self._satisfied(chunk, state, terms):
            return [Release(token, chunk)]
        state.fetches.append((terms, token))
        return self._start(chunk, state) if terms.flush and not state.busy else []

    def clocks_changed(self) -> list[Instruction]:
        """Takes note that workers have begun or ceased to take part: see `clocks`."""
        out: list[Instruction] = []
        for chunk, state in self.chunks.items():
            out += self._release(chunk, state)
            if not state.busy:
                out += self._start(chunk, state)
        return out

    def forget(self, token: Token) -> None:
        """Forgets the fetches of a stream that has ended; its pushes stand."""
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

    def _window_of(self, state: ChunkState, who: PushHeader) -> SequenceWindow:
        key = _sender_of(who)
        if key not in state.windows:
            state.windows[key] = self._window()
        return state.windows[key]

    def _admit(self, chunk: int, state: ChunkState, new: Parked) -> list[Instruction]:
        """Parks a push of an idle chunk, unless it is a duplicate or too late."""
        coming = new.header
        if coming.sequence in self._window_of(state, coming):
            outcome: Outcome = "dropped" if self._left_out(coming) else "duplicate"
            return [Acknowledge(new.token, chunk, coming.sequence, outcome, state.version, 0)]
        late = state.version >= 0 if new.assign else self._late(state, coming)
        if late:
            return [self._dropped(chunk, state, new)]
        for index, held in enumerate(state.parked):
            if (_sender_of(held.header), held.header.sequence) == (_sender_of(coming), coming.sequence):
                state.parked[index] = new
                return [Supersede(held.token, chunk)]
        state.parked.append(new)
        return []

    def _late(self, state: ChunkState, header: PushHeader) -> bool:
        return self._rule.drops(state.version, header) or self._left_out(header)

    def _left_out(self, header: PushHeader) -> bool:
        """Whether a quorum's decision has left a push out."""
        ranks = self._decisions.get(header.round)
        return ranks is not None and header.rank not in ranks

    def _dropped(self, chunk: int, state: ChunkState, held: Parked) -> Acknowledge:
        sequence = held.header.sequence
        self._window_of(state, held.header).add(sequence)
        return Acknowledge(held.token, chunk, sequence, "dropped", state.version, 0)

    def _drop_late(self, chunk: int, state: ChunkState) -> list[Instruction]:
        """Drops pushes that were parked in time and are late by now: their round is over."""
        late = [held for held in state.parked if not held.assign and self._late(state, held.header)]
        if late:
            state.parked = [held for held in state.parked if held not in late]
        return [self._dropped(chunk, state, held) for held in late]

    def _candidates(self, state: ChunkState) -> list[PushHeader]:
        """The pushes that the rule may choose from."""
        parked = [held.header for held in state.parked]
        if not self._quorum:
            return parked
        ranks = self._decisions.get(state.version, frozenset())
        return [one for one in parked if one.round == state.version and one.rank in ranks]

    def _start(self, chunk: int, state: ChunkState) -> list[Instruction]:
        """Begins the next update of an idle chunk, if one is due."""
        update: tuple[Parked, ...] = tuple(held for held in state.parked if held.assign)[:1]
        if not update and state.version >= 0:
            by_header = {held.header: held for held in state.parked}
            due = self._rule.among(self.clocks.present).due(state.version, self._candidates(state))
            update = tuple(by_header[header] for header in due)
        flushes = any(terms.flush for terms, _ in state.fetches) or self._all_brought(chunk, state.clock)
        if not update and not (state.summed and flushes):
            return []
        taken = set(map(id, update))
        state.parked = [held for held in state.parked if id(held) not in taken]
        state.applying = self._planned(chunk, state, update)
        return [state.applying]

    def _planned(self, chunk: int, state: ChunkState, update: tuple[Parked, ...]) -> Apply:
        """The instruction for this update: it is applied, with the sum if there is one, or joins the sum."""
        headers = [held.header for held in update]
        at_once = not update or update[0].assign
        before = state.lr if state.summed else 0.0
        rates = [before, *(one.lr for one in headers if not one.empty)]
        rate = next(filter(None, rates), 0.0)
        return Apply(
            chunk,
            update,
            state.version + 1,
            rate,
            state.summed
            if before == rate
            else 0,  # a sum of rate 0 adds nothing to an update of another rate
            at_once or self._is_complete(chunk, state, headers),
        )

    def _is_complete(self, chunk: int, state: ChunkState, new: Sequence[PushHeader]) -> bool:
        """Whether the sum is applied once these pushes are in it."""
        if self._rule.lockstep and not self._all_brought(chunk, max(one.clock for one in new), new):
            return False
        return self._rule.completes(state.version, state.summed, new)

    def _all_brought(self, chunk: int, clock: int, new: Sequence[PushHeader] = ()) -> bool:
        """Whether a clock is complete with these pushes, under a lockstep rule."""
        return self._rule.lockstep and not {*self.clocks.behind(chunk, clock)} - {one.rank for one in new}

    def _satisfied(self, chunk: int, state: ChunkState, terms: FetchTerms) -> bool:
        if state.version < max(terms.min_version, 0) or (terms.flush and state.unapplied):
            return False
        if terms.min_clock and self.clocks.slowest(chunk) < terms.min_clock:
            return False
        if self._rule.lockstep and state.unapplied and state.clock <= terms.min_clock:
            return False  # the worker that it waited for has left
        if terms.after_sequence == 0:
            return True
        window = state.windows.get(_sender_of(terms))
        return window is not None and terms.after_sequence in window

    def _release(self, chunk: int, state: ChunkState) -> list[Instruction]:
        ready = [token for terms, token in state.fetches if self._satisfied(chunk, state, terms)]
        if ready:
            state.fetches = [
                (terms, token) for terms, token in state.fetches if not self._satisfied(chunk, state, terms)
            ]
        return [Release(token, chunk) for token in ready]


def _sender_of(who: PushHeader | FetchTerms) -> Sender:
    return who.sender, who.incarnation
