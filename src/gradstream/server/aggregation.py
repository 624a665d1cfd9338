"""`AggregationRule`: decides which pushes make an update of a chunk, and with which weights.

A rule is the server half of a strategy, and it is pure: given a chunk's version and its waiting pushes, it chooses the
pushes of the next update, their order and their weights. The shard does the arithmetic, waiting and messages.

By default the shard applies an update as soon as it is due. Under a rule that overrides `completes`, the shard adds
pushes to a sum as they arrive. It acknowledges each push once the sum contains it, so the sender need not keep it; the
chunk's version increases when the shard applies the sum.

A rule that waits for every worker overrides `among`, by which the shard tells it which workers take part.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from typing_extensions import override

from gradstream.errors import ConfigError, UserCodeError
from gradstream.memory import Memory, Span, Vector
from gradstream.wire.chunks import ChunkMap

_NAME = re.compile(r"[a-z]+[0-9]{0,4}-([0-9]{1,7})", re.ASCII)


@dataclass(frozen=True, slots=True)
class PushHeader:
    """One chunk of one push, without its elements.

    Args:
        sender: node name of the worker.
        rank: rank of the worker.
        incarnation: incarnation of the worker.
        sequence: number of the push; each incarnation of a worker counts from 1.
        samples: number of training samples that the gradients were computed on.
        num_gradients: number of minibatch gradients that the push sums.
        lr: learning rate to apply the push with.
        round: version that the push is meant for; only synchronous strategies set it.
        base_version: version of the chunk that the gradient was computed on.
        empty: whether the push has no elements for this chunk: the worker contributes nothing this time.
        clock: clock of the worker once this push is applied; 0 if workers have none (see `server/shard/passes.py`).
        loss: mean loss over the samples; NaN if unknown.
        vector: vector that the push changes: "" for the parameters, else a state vector of the update rule.
        redone: whether another worker pushes in the name of this lost worker. It belongs to no clock.
        length: Euclidean length of the elements; infinite if unknown.
        portion: number of the portion of a pass (`round`) that the push contains; 0 if there are no passes.
    """

    sender: str
    rank: int
    incarnation: int
    sequence: int
    samples: int
    num_gradients: int = 1
    lr: float = 0.0
    round: int = 0
    base_version: int = 0
    empty: bool = False
    clock: int = 0
    loss: float = math.nan
    vector: str = ""
    redone: bool = False
    length: float = math.inf
    portion: int = 0


def rank_of(sender: str) -> int:
    """The rank in a node's name, which consists of a role and a rank: 3 for "worker-3".

    Raises:
        ConfigError: the name has another form.
    """
    found = _NAME.fullmatch(sender)
    if found is None:
        raise ConfigError(
            f"{sender[:64]!r} is no name of a node: expected a role and a rank, as in 'worker-3'"
        )
    return int(found[1])


@dataclass(frozen=True, slots=True)
class FetchTerms:
    """The conditions under which a shard may answer a fetch of a chunk.

    Args:
        sender: node name of the reader.
        incarnation: incarnation of the reader.
        min_version: the chunk must have this version or a later one.
        after_sequence: the reader's push of this number must be applied, or be in the chunk's sum; 0 for none.
        flush: whether the chunk's sum must be empty: the shard applies it now, though no update is due.
        min_clock: every worker that takes part must have reached this clock.
    """

    sender: str
    incarnation: int
    min_version: int = 0
    after_sequence: int = 0
    flush: bool = False
    min_clock: int = 0


class AggregationRule(ABC):
    """The server half of a strategy. Derive from it; only `due` and `weights` have no default."""

    __slots__ = ()

    @property
    def lockstep(self) -> bool:
        """Whether an update is the sum of the pushes of one clock.

        The shard applies the sum once every worker that takes part has pushed for that clock: see
        `server/shard/passes.py`.
        """
        return False

    @property
    def clocked(self) -> bool:
        """Whether workers have clocks: they count updates (`advance_clock`), or updates wait for participating workers.

        Shards refuse clocks, and requests to take part or not, under any other rule.
        """
        return self.lockstep or type(self).among is not AggregationRule.among

    @property
    def by_round(self) -> bool:
        """Whether a chunk's version is the number of its round.

        Then a command that changes parameters does not change the version. Otherwise it counts as an update.
        """
        return False

    @property
    def paced(self) -> bool:
        """Whether the shard reads the pushes of a round side by side; see `server/shard/requests.py`.

        True only if each update needs a push of every worker.
        """
        return False

    @property
    def robust(self) -> RobustRule | None:
        """How contributions are combined if not by a weighted sum; `weights` then scales each of them.

        With a `WholeRule` the strategy has a quorum of all workers.
        """
        return None

    def drops(self, version: int, new: PushHeader) -> bool:
        """Whether the shard drops a push that comes too late. The worker is told; it is not an error."""
        return False

    @abstractmethod
    def due(self, version: int, parked: Sequence[PushHeader]) -> Sequence[PushHeader]:
        """The pushes of the next update, in the order of summation; none while no update is due."""

    @abstractmethod
    def weights(self, version: int, update: Sequence[PushHeader]) -> Sequence[float]:
        """The weight of each push in the sum Σ weight·elements that the optimizer gets.

        Args:
            version: version of the chunk before this update. The staleness of a push is this minus its
                `base_version`.
            update: the pushes that `due` chose.
        """

    def completes(self, version: int, summed: int, update: Sequence[PushHeader]) -> bool:
        """Whether the shard applies the chunk's sum once it contains these pushes, instead of waiting for more.

        Args:
            version: version of the chunk, as for `weights`.
            summed: number of pushes in the sum so far; a push without elements joins no sum.
            update: the pushes that `due` chose.
        """
        return True

    def awaited(self, version: int, parked: Sequence[PushHeader]) -> Sequence[str]:
        """Names of the nodes whose pushes the next update waits for."""
        return ()

    def among(self, present: frozenset[int]) -> AggregationRule:
        """The same rule for workers of these ranks, when others are lost or have nothing to do."""
        return self


@dataclass(frozen=True, slots=True)
class EveryPush(AggregationRule):
    """Makes every push an update, which the shard applies at once: asynchronous SGD."""

    def due(self, version: int, parked: Sequence[PushHeader]) -> Sequence[PushHeader]:
        """The oldest push."""
        return parked[:1]

    def weights(self, version: int, update: Sequence[PushHeader]) -> Sequence[float]:
        """1 for each push."""
        return (1.0,)


@dataclass(frozen=True, slots=True)
class EveryN(EveryPush):
    """Sums pushes as they arrive, and makes every `count` of them an update.

    Args:
        count: number of pushes to an update, at least 1; 1 is `EveryPush`.
    """

    count: int

    def completes(self, version: int, summed: int, update: Sequence[PushHeader]) -> bool:
        """Whether the sum has `count` pushes."""
        return summed + len(update) >= self.count


# ---- robust ------------------------------------------------------------------------------
# Robust aggregation: updates of a round that a few wrong contributions cannot move far. Pure arithmetic.
#
#     n contributions g_1 … g_n, of which up to f are anything at all
#
#     median              the median, coordinate by coordinate                            f < n/2
#     trimmed-mean        the mean without the f smallest and the f largest, likewise     f < n/2
#     krum                the mean of the m contributions of the lowest score; the score of g_i is the sum of the
#                         n - f - 2 smallest |g_i - g_j|²                                 n ≥ 2f + 3
#     clipped-mean        Σ g_i·min(1, τ/|g_i|) / n
#     centered-clipping   v ← v + Σ (g_i - v)·min(1, τ/|g_i - v|) / n, v the update before
#
# The first two look at one chunk at a time. The others need distances over the whole gradient: each shard adds up those
# of its chunks, the first shard adds up those of the shards, and all take the same weights (`shard/agreement.py`).
#
# Each contribution is a mean over its samples, and counts equally whatever their number. A worker that contributes
# nothing in a round reduces n, and f is at most what n allows.
#
# References: Yin, Chen, Ramchandran, Bartlett, "Byzantine-robust distributed learning", ICML 2018 (median, trimmed
# mean); Blanchard, El Mhamdi, Guerraoui, Stainer, "Machine learning with adversaries", NIPS 2017 (Krum, multi-Krum);
# Karimireddy, He, Jaggi, "Learning from history for Byzantine robust optimization", ICML 2021 (centred clipping, one
# iteration, with momentum on the workers).

BLOCK_ELEMS = 1 << 16
"""Coordinates that are sorted at once: those of 16 workers take 4 MiB."""


class RobustRule:
    """How the contributions of a round become one vector."""

    def check(self, num_workers: int) -> None:
        """Raises ConfigError if the rule promises nothing with this many workers."""
        del num_workers


class CoordinateRule(RobustRule, ABC):
    """A rule that looks at each coordinate separately."""

    @abstractmethod
    def of_sorted(self, values: torch.Tensor) -> torch.Tensor:
        """The result, (b,), of the values of all contributions, (n, b), sorted in each column."""

    def combine(self, parts: Sequence[torch.Tensor], scales: Sequence[float]) -> torch.Tensor:
        """The result of the contributions scale·part, each (e,)."""
        out = torch.empty_like(parts[0])
        for start in range(0, len(out), BLOCK_ELEMS):
            block = slice(start, start + BLOCK_ELEMS)
            scaled = [part[block] * scale for part, scale in zip(parts, scales, strict=True)]
            out[block] = self.of_sorted(torch.stack(scaled).sort(dim=0).values)
        return out


class WholeRule(RobustRule, ABC):
    """A rule whose weights depend on distances over the whole gradient."""

    pairs: ClassVar[bool] = False
    """Whether it needs the distances between contributions, and not only from the centre."""

    centred: ClassVar[bool] = False
    """Whether the centre is the update before; else it is 0."""

    @abstractmethod
    def weights(self, from_centre: Sequence[float], between: Sequence[Sequence[float]]) -> list[float]:
        """The weight of each contribution. The centre gets the rest to 1, or none if it is 0.

        Args:
            from_centre: |g_i - v|² of each contribution.
            between: |g_i - g_j|²; empty unless `pairs`.
        """


@dataclass(frozen=True, slots=True)
class Median(CoordinateRule):
    """The coordinate-wise median; of an even number, the mean of the middle two."""

    @override
    def of_sorted(self, values: torch.Tensor) -> torch.Tensor:
        middle, odd = divmod(len(values), 2)
        return values[middle].clone() if odd else values[middle - 1 : middle + 1].mean(dim=0)


@dataclass(frozen=True, slots=True)
class TrimmedMean(CoordinateRule):
    """The coordinate-wise mean without the f smallest and the f largest values.

    Args:
        faulty: f.
    """

    faulty: int

    def check(self, num_workers: int) -> None:
        """See `RobustRule`: f < W/2."""
        if 2 * self.faulty >= num_workers:
            raise _too_many("trimmed-mean", self.faulty, num_workers, "less than half of them")

    @override
    def of_sorted(self, values: torch.Tensor) -> torch.Tensor:
        cut = min(self.faulty, (len(values) - 1) // 2)
        return values[cut : len(values) - cut].mean(dim=0)


@dataclass(frozen=True, slots=True)
class Krum(WholeRule):
    """The mean of the m contributions that have their n - f - 2 nearest others nearest.

    Args:
        faulty: f.
        keep: m.
    """

    pairs: ClassVar[bool] = True

    faulty: int
    keep: int = 1

    def check(self, num_workers: int) -> None:
        """See `RobustRule`: W ≥ 2f + 3, m ≤ W - f."""
        if num_workers < 2 * self.faulty + 3:
            most = f"at most {(num_workers - 3) // 2}" if num_workers >= 3 else "at least 3 workers"
            raise _too_many("krum", self.faulty, num_workers, f"{most}, since W ≥ 2·faulty + 3")
        if self.keep > num_workers - self.faulty:
            raise ConfigError(
                f"aggregate='krum', keep={self.keep}, faulty={self.faulty} with {num_workers} workers: expected "
                f"keep={num_workers - self.faulty} at most, or a wrong contribution is among those kept"
            )

    def weights(self, from_centre: Sequence[float], between: Sequence[Sequence[float]]) -> list[float]:
        """See `WholeRule`. Of equal scores the lower ranks are kept."""
        count = len(from_centre)
        faulty = max(0, min(self.faulty, (count - 3) // 2))
        nearest = max(1, count - faulty - 2)
        scores = [
            math.fsum(sorted(others[:rank] + others[rank + 1 :])[:nearest])
            for rank, others in enumerate(map(list, between))
        ]
        kept = sorted(range(count), key=lambda rank: (scores[rank], rank))[: self.keep]
        return [1 / len(kept) if rank in kept else 0.0 for rank in range(count)]


@dataclass(frozen=True, slots=True)
class ClippedMean(WholeRule):
    """The mean of the contributions, each clipped on the server to a norm of at most τ.

    Args:
        radius: τ.
    """

    radius: float

    @override
    def weights(self, from_centre: Sequence[float], between: Sequence[Sequence[float]]) -> list[float]:
        del between
        shares = (min(1.0, self.radius / math.sqrt(square)) if square else 1.0 for square in from_centre)
        return [share / len(from_centre) for share in shares]


@dataclass(frozen=True, slots=True)
class CenteredClipping(ClippedMean):
    """As `ClippedMean`, about the update before. It begins at 0, also where a run is resumed."""

    centred: ClassVar[bool] = True


def _too_many(name: str, faulty: int, num_workers: int, expected: str) -> ConfigError:
    return ConfigError(
        f"aggregate={name!r}, faulty={faulty} with {num_workers} workers: expected {expected}; take more workers, "
        "or a smaller number of faulty ones"
    )


# ---- distances ---------------------------------------------------------------------------
# Squared distances between the contributions of a round, over the chunks of a shard: those of all shards add up to the
# whole. A table has one row and column for the centre, then one for each worker by rank. If a worker has not sent a
# chunk, its row is NaN, and so it is in the sum over the shards: all of them exclude the worker from the round.


def add_distances(
    squares: torch.Tensor,
    contributions: Sequence[torch.Tensor | None],
    centre: torch.Tensor | None,
    *,
    pairs: bool,
) -> None:
    """Adds one chunk to a table.

    Args:
        squares: (1 + W, 1 + W) float64, the table.
        contributions: elements by rank; None for a worker that has left the chunk out.
        centre: elements of the centre; None for zeros.
        pairs: whether to add the distances between contributions.
    """

    def put(row: int, column: int, difference: torch.Tensor) -> None:
        squares[row, column] += torch.linalg.vector_norm(difference, dtype=torch.float64) ** 2
        squares[column, row] = squares[row, column]

    for rank, contribution in enumerate(contributions, start=1):
        if contribution is None:
            squares[rank] = squares[:, rank] = math.nan
            continue
        put(0, rank, contribution if centre is None else contribution - centre)
        for other_rank, other in enumerate(contributions[: rank - 1] if pairs else (), start=1):
            if other is not None:
                put(other_rank, rank, contribution - other)


def weights_of(rule: WholeRule, distances: Sequence[float], ranks: Iterable[int]) -> dict[int, float]:
    """The weight of each worker's contribution, by rank; 0 for one that is skipped.

    Args:
        rule: the rule.
        distances: sums of the shards' tables, row by row.
        ranks: the workers whose contributions this chunk has.
    """
    size = math.isqrt(len(distances))
    there = [rank for rank in range(1, size) if not math.isnan(distances[rank])]
    from_centre = [distances[rank] for rank in there]
    between = [[distances[size * row + column] for column in there] for row in there] if rule.pairs else []
    weights = rule.weights(from_centre, between) if there else []
    found = {rank - 1: weight for rank, weight in zip(there, weights, strict=True)}
    return {rank: found.get(rank, 0.0) for rank in ranks}


# ---- correction --------------------------------------------------------------------------
# Corrects a gradient before a shard applies it, with vectors that the shard keeps for each sender.
#
# A strategy requests a correction by `ServerStrategy.correction()`. The shard computes it, chunk by chunk, on its
# arithmetic thread. One example is delay compensation: a gradient was computed on older parameters, and the correction
# estimates the gradient at the current ones, so the shard needs a copy of the older parameters.
#
# The base version of a push identifies that copy. The sender may have read a later version since, because it fetches
# while it computes, repeats a fetch whose answer was lost, or the network delivers a fetch twice. So the shard keeps a
# copy of each version until it has received as many gradients of that version as the sender has read copies of it, or a
# gradient of a later version.

State = Mapping[str, torch.Tensor]
"""Vectors that the shard keeps for one sender, by name: (n,) for a chunk of n elements, zeros at first."""

MOST_COPIES = 4
"""Copies of a chunk for one sender: of the version that it computes on, and of those that it may swap in next.

The shard drops the oldest copy to make room for another."""


class Correction(Protocol):
    """Changes a gradient before the rule weighs it. Implementations are frozen dataclasses."""

    @property
    def state_names(self) -> Sequence[str]:
        """Names of the vectors for each sender, each as long as the parameters: ("mean_square",), or none."""
        ...

    def correct(
        self, gradient: torch.Tensor, parameters: torch.Tensor, base: torch.Tensor, state: State
    ) -> torch.Tensor:
        """The corrected gradient.

        Args:
            gradient: (n,) as the sender pushed it. Do not write it: it may lie in read-only memory.
            parameters: (n,) present parameters. Do not write them.
            base: (n,) the parameters that the gradient was computed on. The shard does not need them afterwards, so
                the result may be written there.
            state: vectors of the sender, to be read and written.

        Returns:
            (n,) of the same type; `gradient` itself where no correction is needed.
        """
        ...


class SenderStates:
    """The vectors that a shard keeps for each sender, from the sender's first fetch or push on.

    Args:
        memory: allocates the vectors: for each sender one of each name, and as many copies of the parameters as it
            needs at the same time.
        chunks: the chunk map.
        elems: length of this shard's vectors.
        dtype: element type of all vectors.
        correction: the strategy's correction.
    """

    def __init__(
        self, memory: Memory, chunks: ChunkMap, elems: int, dtype: torch.dtype, correction: Correction
    ) -> None:
        self._memory = memory
        self._chunks = chunks
        self._elems = elems
        self._dtype = dtype
        self._correction = correction
        self._states: dict[str, dict[str, Vector]] = {}  # by sender and name
        self._copies: dict[str, list[Vector]] = {}  # by sender
        self._places: dict[
            tuple[str, int], dict[int, int]
        ] = {}  # by sender and chunk: by version, the number of the copy
        self._last_read: dict[tuple[str, int], tuple[tuple[int, int], int]] = {}  # by sender and chunk
        self._given: Counter[tuple[str, int, int]] = Counter()  # gradients to come, by sender, chunk, version

    def place(self, sender: str, chunk: int, version: int, fetch: tuple[int, int]) -> Span | None:
        """Memory for a copy of a chunk that a sender reads; None if the shard has a copy of this version.

        If a fetch is retried, the answer to the earlier attempt was lost, and that copy is not needed. A duplicate
        message reads nothing, since nobody receives its answer.

        Args:
            sender, chunk: the reader and the chunk.
            version: version of the chunk.
            fetch: number of the sender's fetch, and of the attempt.
        """
        places = self._places.setdefault((sender, chunk), {})
        last, lost = self._last_read.get((sender, chunk), ((0, -1), -1))
        if fetch <= last:
            return None
        if fetch[0] == last[0] and lost in places:
            self._given[sender, chunk, lost] -= 1
            if not self._given[sender, chunk, lost]:
                self._forget(sender, chunk, lost)
        self._last_read[sender, chunk] = fetch, version
        self._given[sender, chunk, version] += 1
        if version in places:
            return None
        if len(places) == MOST_COPIES:
            self._forget(sender, chunk, min(places))
        copies = self._copies.setdefault(sender, [])
        free = next(index for index in range(len(places) + 1) if index not in places.values())
        if free == len(copies):
            copies.append(self._memory.allocate(self._elems, self._dtype, f"read by {sender}, {free}"))
        places[version] = free
        return self._span(copies[free], chunk)

    def spans(self, one: PushHeader, chunk: int) -> list[Span]:
        """All memory that `corrected` writes.

        Raises:
            UserCodeError: there is no copy of the parameters that the push was computed on.
        """
        place = self._places.get((one.sender, chunk), {}).get(one.base_version)
        if place is None:
            raise UserCodeError(
                f"chunk {chunk} of {one.sender}: its gradient was computed on version {one.base_version}, of which "
                "the shard has no copy any more for the correction; a strategy with a correction pushes one "
                f"gradient for each fetch that it swaps in, and starts at most {MOST_COPIES - 1} fetches between "
                "that fetch and the push",
                culprit=one.sender,
            )
        if one.sender not in self._states:
            self._states[one.sender] = {
                name: self._memory.allocate(self._elems, self._dtype, f"{name} of {one.sender}")
                for name in self._correction.state_names
            }
        vectors = [self._copies[one.sender][place], *self._states[one.sender].values()]
        return [self._span(vector, chunk) for vector in vectors]

    def corrected(
        self, one: PushHeader, chunk: int, gradient: torch.Tensor, parameters: torch.Tensor
    ) -> torch.Tensor:
        """The corrected elements of a push, valid until `used`. Raises what `spans` raises."""
        base, *state = (span.tensor for span in self.spans(one, chunk))
        if self._given[one.sender, chunk, one.base_version] > 1:  # another gradient of this version may come
            base = base.clone()
        named = dict(zip(self._correction.state_names, state, strict=True))
        return self._correction.correct(gradient, parameters, base, named)

    def used(self, one: PushHeader, chunk: int) -> None:
        """Frees the copies that no gradient needs after this push, which includes all older versions."""
        self._given[one.sender, chunk, one.base_version] -= 1
        for version in list(self._places[one.sender, chunk]):
            if version < one.base_version or not self._given[one.sender, chunk, version]:
                self._forget(one.sender, chunk, version)

    def keep_senders(self, names: Collection[str]) -> None:
        """Frees the vectors of all other senders: they have left, and all their pushes are corrected."""
        for sender in [one for one in {**self._states, **self._copies} if one not in names]:
            for vector in (*self._states.pop(sender, {}).values(), *self._copies.pop(sender, ())):
                self._memory.free(vector)
        self._places = {key: places for key, places in self._places.items() if key[0] in names}
        self._given = Counter({key: count for key, count in self._given.items() if key[0] in names})
        self._last_read = {key: last for key, last in self._last_read.items() if key[0] in names}

    def _forget(self, sender: str, chunk: int, version: int) -> None:
        del self._places[sender, chunk][version], self._given[sender, chunk, version]

    def _span(self, vector: Vector, chunk: int) -> Span:
        start, stop = self._chunks.local_bounds(chunk)
        return vector[start:stop]
