"""The shard as a state machine: events in, instructions out, no I/O and no arithmetic.

Each chunk stands alone. It is idle or being updated; applying is an interval, so what arrives
meanwhile queues. A push is exactly-once per (sender, incarnation, sequence, chunk): a second copy
is answered DUPLICATE if the first was applied, and takes its place if that one still waits.

    push ──▶ duplicate? drop? ──▶ parked ──rule.due──▶ Apply ──▶ applied ──▶ Acknowledge, Release
    fetch ─▶ version, own push and clocks there? ──▶ Release, or waits (and says for whom)

Where the rule says that an update is not complete, what is due only joins the chunk's sum: that is done with
it, and the version stays. What a sum holds when nothing more will come is applied by a fetch that asks for it
(`FetchTerms.flush`). Where updates are made in step, the sum is that of one clock, and complete once every
worker that takes part has brought its own.

Where a quorum makes each update (`quorum.py`), chunks do not decide each for itself: the rule sees the
contributions of a round only once a verdict has said which they are, and the others are dropped.

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

VERDICTS_KEPT = 64
"""For retries of pushes whose answer was lost."""

Token = Hashable

Sender = tuple[str, int]
"""Who pushes: name of the node, and its incarnation."""

Outcome = Literal["applied", "duplicate", "dropped"]


@dataclass(frozen=True, slots=True)
class Parked:
    """A contribution and who waits for the answer. `token` also identifies its elements."""

    contribution: PushHeader
    token: Token
    assign: bool = False  # initial parameters: sets the elements of a chunk that has none yet


@dataclass(frozen=True, slots=True)
class Apply:
    """Compute this update, then call `applied(chunk)`.

    Args:
        chunk: which.
        update: what is added up; nothing where only the sum is left to be applied.
        step: the update is, or will be, the chunk's step-th, from 1.
        learning_rate: of the update, and of the sum: that of its first contribution with one above 0. Each
            contribution is weighed by its own rate over it.
        summed: contributions that the chunk's sum holds already, to which these are added.
        completes: they are applied; else they make the sum, or join it.
    """

    chunk: int
    update: tuple[Parked, ...]
    step: int
    learning_rate: float = 0.0
    summed: int = 0
    completes: bool = True


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """Tell the sender what became of its chunk. What has joined a sum counts as applied: it will be."""

    token: Token
    chunk: int
    sequence: int
    outcome: Outcome
    version: int
    staleness: int


@dataclass(frozen=True, slots=True)
class Release:
    """The fetch may have this chunk, as it is when it can be sent."""

    token: Token
    chunk: int


@dataclass(frozen=True, slots=True)
class Supersede:
    """A retry has taken the place of this push of a chunk: its stream is of no use any more."""

    token: Token
    chunk: int


Instruction = Apply | Acknowledge | Release | Supersede


@dataclass(slots=True)
class ChunkState:
    """One chunk: its version, what is parked on it and what was applied to it."""

    version: int = -1  # before the initial parameters were assigned
    applying: Apply | None = None
    summed: int = 0  # contributions in the sum; none are those without elements
    learning_rate: float = 0.0  # that it is to be applied with
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
        """Whose contributions are here and not applied."""
        held = [*self.parked, *self.arrivals, *(self.applying.update if self.applying is not None else ())]
        return {_sender_of(one.contribution) for one in held}

    @property
    def unapplied(self) -> bool:
        """Whether anything was acknowledged, or will be next, that is in no version yet."""
        return self.summed > 0 or (self.applying is not None and not self.applying.completes)


class ShardState:
    """All chunks of a shard.

    Args:
        chunks: their numbers in the chunk map.
        rule: the strategy's server half.
        quorum: wait for verdicts.
        window: makes the set of applied sequence numbers of one sender.
        workers: how many there are, whose clocks are kept.
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
        self._verdicts: dict[int, frozenset[int]] = {}  # ranks by round, the newest ones
        self._members: frozenset[Sender] = frozenset()
        self._lingering: dict[int, set[Sender]] = {}  # by chunk: gone, with contributions to be applied
        self.chunks = {chunk: ChunkState() for chunk in chunks}
        self.clocks = Clocks(self.chunks, workers)

    def versions(self) -> list[int]:
        """The version of each chunk, in their order; -1 before its initial parameters are there."""
        return [state.version for state in self.chunks.values()]

    def version(self, chunk: int) -> int:
        """Updates applied to a chunk; -1 before its initial parameters are there."""
        return self.chunks[chunk].version

    def push(self, chunk: int, new: Parked) -> list[Instruction]:
        """A contribution has arrived."""
        state = self.chunks[chunk]
        if state.busy:
            state.arrivals.append(new)
            return []
        out = self._admit(chunk, state, new)
        # A fetch behind a push that was dropped waits for nothing any more.
        return [*out, *self._release(chunk, state), *self._start(chunk, state)]

    def decide(self, verdict: QuorumDecision) -> list[Instruction]:
        """It is known whose contributions make the update of a round."""
        self._verdicts[verdict.round] = frozenset(verdict.ranks)
        if len(self._verdicts) > VERDICTS_KEPT:
            del self._verdicts[next(iter(self._verdicts))]
        out: list[Instruction] = []
        for chunk, state in self.chunks.items():
            if not state.busy:
                out += self._drop_late(chunk, state)
                out += [*self._release(chunk, state), *self._start(chunk, state)]
        return out

    def applied(self, chunk: int) -> list[Instruction]:
        """The update asked for last is in the parameters, or in the sum."""
        state = self.chunks[chunk]
        due, before = state.applying, state.version
        assert due is not None
        if due.completes:
            state.version, state.summed = before + 1, 0
        else:
            state.summed += sum(not held.contribution.empty for held in due.update)
            state.clock = max([state.clock, *(held.contribution.clock for held in due.update)])
            state.learning_rate = due.learning_rate
        state.applying = None
        out: list[Instruction] = []
        for parked in due.update:
            done = parked.contribution
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
        """A command has changed a chunk's parameters: that makes a version, unless versions are rounds."""
        state = self.chunks[chunk]
        if state.version < 0 or self._rule.by_round:
            return []
        state.version += 1
        return self._release(chunk, state)

    # ---- senders that are gone ----------------------------------------------------------

    def keep_senders(self, members: Collection[Sender]) -> None:
        """Only these are members: frees what is kept of others, who left for good.

        What they have brought is used all the same, and their windows stay until it is. Whoever hands over
        pushes refuses theirs from now on.
        """
        self._members = frozenset(members)
        for chunk, state in self.chunks.items():
            self._free(chunk, state)

    @property
    def lingering(self) -> set[str]:
        """Names of senders that are gone, and have brought what is not applied yet."""
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
        """A reader asks for a chunk."""
        state = self.chunks[chunk]
        if self._satisfied(chunk, state, terms):
            return [Release(token, chunk)]
        state.fetches.append((terms, token))
        return self._start(chunk, state) if terms.flush and not state.busy else []

    def clocks_changed(self) -> list[Instruction]:
        """Somebody takes part that did not, or no longer does: see `clocks`."""
        out: list[Instruction] = []
        for chunk, state in self.chunks.items():
            out += self._release(chunk, state)
            if not state.busy:
                out += self._start(chunk, state)
        return out

    def forget(self, token: Token) -> None:
        """The stream behind a token is gone: nobody waits for its fetches. Its pushes stand."""
        for state in self.chunks.values():
            if state.fetches:
                state.fetches = [(terms, held) for terms, held in state.fetches if held != token]

    def awaited(self, chunks: Iterable[int], min_clock: int = 0) -> Sequence[str]:
        """For whom readers of, or contributors to, these chunks have to wait: names, sorted.

        Args:
            chunks: which.
            min_clock: that a reader asks for.
        """
        names: dict[str, None] = {}
        for chunk in chunks:
            state = self.chunks[chunk]
            if state.version < 0:
                names["the worker of the lowest rank (initial parameters)"] = None
            parked = [held.contribution for held in state.parked]
            names.update(dict.fromkeys(self._rule.among(self.clocks.present).awaited(state.version, parked)))
            names.update((f"worker-{rank}", None) for rank in self.clocks.behind(chunk, min_clock))
        return sorted(names)

    def _window_of(self, state: ChunkState, who: PushHeader) -> SequenceWindow:
        key = _sender_of(who)
        if key not in state.windows:
            state.windows[key] = self._window()
        return state.windows[key]

    def _admit(self, chunk: int, state: ChunkState, new: Parked) -> list[Instruction]:
        """Parks an idle chunk's new contribution, unless it is a duplicate or too late."""
        coming = new.contribution
        if coming.sequence in self._window_of(state, coming):
            outcome: Outcome = "dropped" if self._left_out(coming) else "duplicate"
            return [Acknowledge(new.token, chunk, coming.sequence, outcome, state.version, 0)]
        late = state.version >= 0 if new.assign else self._late(state, coming)
        if late:
            return [self._dropped(chunk, state, new)]
        for index, held in enumerate(state.parked):
            there = held.contribution
            if (there.sender, there.incarnation, there.sequence) == (
                coming.sender,
                coming.incarnation,
                coming.sequence,
            ):
                state.parked[index] = new
                return [Supersede(held.token, chunk)]
        state.parked.append(new)
        return []

    def _late(self, state: ChunkState, contribution: PushHeader) -> bool:
        return self._rule.drops(state.version, contribution) or self._left_out(contribution)

    def _left_out(self, contribution: PushHeader) -> bool:
        """Whether a verdict has left it out."""
        ranks = self._verdicts.get(contribution.round)
        return ranks is not None and contribution.rank not in ranks

    def _dropped(self, chunk: int, state: ChunkState, held: Parked) -> Acknowledge:
        sequence = held.contribution.sequence
        self._window_of(state, held.contribution).add(sequence)
        return Acknowledge(held.token, chunk, sequence, "dropped", state.version, 0)

    def _drop_late(self, chunk: int, state: ChunkState) -> list[Instruction]:
        """What was parked in time may be late by now: a round can be over without it."""
        late = [held for held in state.parked if not held.assign and self._late(state, held.contribution)]
        if late:
            state.parked = [held for held in state.parked if held not in late]
        return [self._dropped(chunk, state, held) for held in late]

    def _candidates(self, state: ChunkState) -> list[PushHeader]:
        """What the rule may choose from."""
        parked = [held.contribution for held in state.parked]
        if not self._quorum:
            return parked
        ranks = self._verdicts.get(state.version, frozenset())
        return [one for one in parked if one.round == state.version and one.rank in ranks]

    def _start(self, chunk: int, state: ChunkState) -> list[Instruction]:
        """Begins the next update of an idle chunk, if one is due."""
        update: tuple[Parked, ...] = tuple(held for held in state.parked if held.assign)[:1]
        if not update and state.version >= 0:
            by_contribution = {held.contribution: held for held in state.parked}
            due = self._rule.among(self.clocks.present).due(state.version, self._candidates(state))
            update = tuple(by_contribution[contribution] for contribution in due)
        flushes = any(terms.flush for terms, _ in state.fetches) or self._all_brought(chunk, state.clock)
        if not update and not (state.summed and flushes):
            return []
        taken = set(map(id, update))
        state.parked = [held for held in state.parked if id(held) not in taken]
        state.applying = self._planned(chunk, state, update)
        return [state.applying]

    def _planned(self, chunk: int, state: ChunkState, update: tuple[Parked, ...]) -> Apply:
        """What is done with this update: it is applied, with the sum if there is one, or joins that."""
        contributions = [held.contribution for held in update]
        at_once = not update or update[0].assign
        before = state.learning_rate if state.summed else 0.0
        rates = [before, *(one.learning_rate for one in contributions if not one.empty)]
        rate = next(filter(None, rates), 0.0)
        return Apply(
            chunk,
            update,
            state.version + 1,
            rate,
            state.summed if before == rate else 0,  # a sum of rate 0 counts for nothing beside another one
            at_once or self._is_complete(chunk, state, contributions),
        )

    def _is_complete(self, chunk: int, state: ChunkState, new: Sequence[PushHeader]) -> bool:
        """Whether the sum is applied once these are in it."""
        if self._rule.lockstep and not self._all_brought(chunk, max(one.clock for one in new), new):
            return False
        return self._rule.completes(state.version, state.summed, new)

    def _all_brought(self, chunk: int, clock: int, new: Sequence[PushHeader] = ()) -> bool:
        """Whether a clock is complete with these contributions, where updates are made in step."""
        return self._rule.lockstep and not {*self.clocks.behind(chunk, clock)} - {one.rank for one in new}

    def _satisfied(self, chunk: int, state: ChunkState, terms: FetchTerms) -> bool:
        if state.version < max(terms.min_version, 0) or (terms.flush and state.unapplied):
            return False
        if terms.min_clock and self.clocks.slowest(chunk) < terms.min_clock:
            return False
        if self._rule.lockstep and state.unapplied and state.clock <= terms.min_clock:
            return False  # who was waited for has left
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
