"""Attributes the waiting time of a worker to the nodes for which it waited.

The client notes a claim when an answer arrives: of a shard, for the time since the request; or of another worker, for
the time until its contribution arrived. Claims overlap one another and the worker's computing. `shared_out` gives each
part of the waiting to one claim: to the worker itself if it waited for its own arithmetic, else to another worker, else
to a shard; among equals to the claim that ended last, since it alone decided how long the worker waited.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal, TypedDict

from gradstream.telemetry.events import Event, ExchangeEvent, LinkEvent, NoiseEvent

# ---- wait attribution --------------------------------------------------------------------

Interval = tuple[int, int]
"""Begin and end, in nanoseconds."""


class Kind(IntEnum):
    """The node of a claim; lower values come first."""

    OWN = 0
    WORKER = 1
    SHARD = 2


class WaitAttribution:
    """Collects claims until `take` divides the waiting time among them."""

    def __init__(self) -> None:
        self._ends: dict[tuple[Kind, str, int], int] = {}  # (kind, who, begin) -> end

    def note(self, kind: Kind, who: str, begin_ns: int, end_ns: int) -> None:
        """Notes a claim of node `who`. Claims with the same begin become one."""
        key = (kind, who, begin_ns)
        self._ends[key] = max(end_ns, self._ends.get(key, end_ns))

    def take(self, waiting: Iterable[Interval]) -> dict[str, int]:
        """The nanoseconds of `waiting` by node. Forgets the claims."""
        claims = [(kind, who, (begin, end)) for (kind, who, begin), end in self._ends.items()]
        self._ends.clear()
        return shared_out(waiting, claims)


def shared_out(waiting: Iterable[Interval], claims: Sequence[tuple[Kind, str, Interval]]) -> dict[str, int]:
    """The nanoseconds of `waiting` by node: each part goes to the first claim that covers it, in the order above."""
    left = list(waiting)
    shares: dict[str, int] = {}
    for _, who, (begin, end) in sorted(claims, key=lambda claim: (claim[0], -claim[2][1], claim[1])):
        taken = sum(max(0, min(end, stop) - max(begin, start)) for start, stop in left)
        if taken:
            shares[who] = shares.get(who, 0) + taken
            left = [piece for interval in left for piece in _without(interval, (begin, end))]
    return shares


def _without(whole: Interval, hole: Interval) -> list[Interval]:
    """The parts of an interval outside of a hole."""
    pieces = [(whole[0], min(whole[1], hole[0])), (max(whole[0], hole[1]), whole[1])]
    return [(begin, end) for begin, end in pieces if begin < end]


# ---- stopwatch ---------------------------------------------------------------------------
# Divides the time of a worker's step into computing, and waiting for each node.


class StepTimes(TypedDict):
    """The time fields of `StepEvent`."""

    compute_s: float
    wait_s: float
    compute_at_s: float
    waited_for: dict[str, float]


class Stopwatch:
    """Times the steps of one worker. It reads no clock: callers pass the times.

    Args:
        claims: waits that the client notes when answers arrive.
        now_ns: begin of the first step.
    """

    def __init__(self, me: str, claims: WaitAttribution, now_ns: int) -> None:
        self._me = me
        self._claims = claims
        self._begun_ns = now_ns
        self._computed: list[Interval] = []

    def begin(self, now_ns: int) -> None:
        """Begins a step."""
        self._begun_ns = now_ns
        self._computed.clear()

    def computed(self, begin_ns: int, end_ns: int) -> None:
        """Notes a gradient. The gradients of one worker do not overlap.

        The part of a gradient that lies before the step, because the previous step asked for it, is skipped.
        """
        self._computed.append((max(begin_ns, self._begun_ns), end_ns))

    def worked(self, begin_ns: int, end_ns: int) -> None:
        """Notes other arithmetic of the worker for which it waited: a sum, a local step."""
        self._claims.note(Kind.OWN, self._me, begin_ns, end_ns)

    def times(self, now_ns: int) -> StepTimes:
        """The times of the step that ends now."""
        edges = [self._begun_ns, *(edge for interval in self._computed for edge in interval), now_ns]
        waiting = [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]
        compute_ns = sum(end - begin for begin, end in self._computed)
        return StepTimes(
            compute_s=compute_ns / 1e9,
            wait_s=(now_ns - self._begun_ns - compute_ns) / 1e9,
            compute_at_s=(self._computed[0][0] - self._begun_ns) / 1e9 if self._computed else 0.0,
            waited_for={who: ns / 1e9 for who, ns in sorted(self._claims.take(waiting).items())},
        )


# ---- traffic -----------------------------------------------------------------------------
# Counts the bytes and the staleness between a worker and the shards, and reports them as events.


@dataclass(slots=True)
class LinkTraffic:
    """The traffic between a client and one shard since the latest report. `staleness` counts chunks of gradients.

    `whole_pushed_bytes` and `whole_fetched_bytes` are the bytes that it would take to send every chunk whole.
    """

    pushed_bytes: int = 0
    fetched_bytes: int = 0
    whole_pushed_bytes: int = 0
    whole_fetched_bytes: int = 0
    staleness: Counter[int] = field(default_factory=Counter)


@dataclass(slots=True)
class Traffic:
    """The traffic of a client since its latest report, by shard. Bytes of a retried exchange count again.

    `retries` counts those of the whole run.
    """

    links: dict[str, LinkTraffic] = field(default_factory=dict)
    pushes: int = 0
    fetches: int = 0
    retries: int = 0
    _reported_retries: int = 0

    def report(self, rank: int) -> list[Event]:
        """One `exchange` record, and a `link` record for each shard with traffic; counts from 0 again."""
        links = self.links.values()
        exchange = ExchangeEvent(
            rank=rank,
            pushed_bytes=sum(link.pushed_bytes for link in links),
            fetched_bytes=sum(link.fetched_bytes for link in links),
            pushes=self.pushes,
            fetches=self.fetches,
            retries=self.retries - self._reported_retries,
            whole_pushed_bytes=sum(link.whole_pushed_bytes for link in links),
            whole_fetched_bytes=sum(link.whole_fetched_bytes for link in links),
            staleness=_histogram(sum((link.staleness for link in links), Counter[int]())),
        )
        by_shard = [
            LinkEvent(
                rank=rank,
                shard=shard,
                pushed_bytes=link.pushed_bytes,
                fetched_bytes=link.fetched_bytes,
                staleness=_histogram(link.staleness),
            )
            for shard, link in self.links.items()
            if link.pushed_bytes or link.fetched_bytes or link.staleness
        ]
        self.links.update({shard: LinkTraffic() for shard in self.links})
        self.pushes, self.fetches, self._reported_retries = 0, 0, self.retries
        return [exchange, *by_shard]


def _histogram(staleness: Counter[int]) -> dict[str, int]:
    """The staleness for an event: by ascending staleness, with text as keys."""
    return {str(tau): count for tau, count in sorted(staleness.items())}


@dataclass(frozen=True, slots=True)
class Transfer:
    """A push or a fetch that is done."""

    kind: Literal["push", "fetch"]
    seconds: float
    size_bytes: int


# ---- noise meter -------------------------------------------------------------------------
# What a node measures for the gradient noise scale: squares of gradients, in one of `EVERY` rounds.
#
#     s = 1/W·Σᵢ |gᵢ|²,   gᵢ the mean gradient of contribution i, over its bᵢ samples
#     J = |g|²,           g = Σᵢ bᵢ·gᵢ / Σᵢ bᵢ, the joined gradient
#
# Both are sums over elements, so each node adds up those that it has, and `report.summary` adds up the nodes. All
# contributions of a round are computed on the same parameters: else s and J say nothing about noise.

EVERY = 16
"""Rounds from one measured round to the next: measuring takes a sixteenth of one or two passes over the gradient."""


@dataclass(frozen=True, slots=True)
class Contribution:
    """A worker's part of a joined gradient.

    Args:
        samples: b, number of samples, at least 1.
        weight: weight in the sum that is the joined gradient.
        square: sum of the squares of its elements on this node, before they are weighed.
    """

    samples: int
    weight: float
    square: float


@dataclass(slots=True)
class NoiseMeter:
    """Adds up the squares of the pieces of a gradient that a node has, and reports a round when it has all.

    Args:
        nodes: number of nodes that have a part of the squares.
        pieces: number of calls of `add` for each round, at least 1.
        emit: gets the event of each measured round.
    """

    rank: int
    nodes: int
    pieces: int
    emit: Callable[[Event], None]
    _step: int = 0
    _samples: Sequence[int] = ()
    _squares: list[tuple[float, float]] = field(default_factory=list)

    def due(self, step: int) -> bool:
        """Whether the update of this number, from 1, is measured."""
        return step % EVERY == 1

    def add(self, step: int, samples: Sequence[int], here: Sequence[Contribution], joined: float) -> None:
        """Takes a piece of a round. Rounds come one after the other; one that lacks a piece is not reported.

        Args:
            step: number of the update, from 1.
            samples: bᵢ of all contributions with samples, in the order of ranks.
            here: the contributions of which this node has elements.
            joined: sum of the squares of the joined gradient's elements in this piece.
        """
        if step != self._step:
            self._step, self._samples, self._squares = step, tuple(samples), []
        if tuple(samples) != self._samples or not samples:  # one came to some pieces alone
            self._samples = ()
            return
        total = sum(samples)
        squares = [(part.weight * total / part.samples) ** 2 * part.square for part in here]
        self._squares.append((math.fsum(squares) / len(samples), joined))
        square, joined_square = (math.fsum(column) for column in zip(*self._squares, strict=True))
        if len(self._squares) < self.pieces or not math.isfinite(square + joined_square):
            return
        self.emit(
            NoiseEvent(
                rank=self.rank,
                round=step,
                nodes=self.nodes,
                contributions=len(samples),
                samples=total,
                inverse_samples=math.fsum(1 / size for size in samples) / len(samples),
                contribution_square=square,
                joined_square=joined_square,
            )
        )
