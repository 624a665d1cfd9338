"""Sums over each whole tensor, whose chunks lie on several shards: for update rules that are `PerTensor`.

    each shard     chunk due ─▶ its sums ─▶ sums of all its chunks there? ─▶ to the first shard
    first shard    sums of all shards there? ─▶ sums of each tensor, to all shards ─▶ every chunk is updated

Update t of a chunk waits for the sums of update t of all chunks. So it is for rules alone under which update t of every
chunk has the same contributions (`AggregationRule.by_round`). While a chunk waits, it can be read as it was before: a
worker that takes a lost one's place reads all chunks, and then pushes what the others wait for.

The sums of a chunk do not depend on the shard that has it, and the order in which they are added up changes no bit. So
neither does the number of shards.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import ClassVar

import torch
from google.protobuf.message import Message

from gradstream.optim.base import Sums
from gradstream.optim.groups import Piece, add_up
from gradstream.runtime.base import Runtime
from gradstream.server.robust import WholeRule
from gradstream.server.shard.config import ShardConfig
from gradstream.server.shard.first_shard import FirstShardLink
from gradstream.transport.base import Endpoint
from gradstream.wire import v1

# ---- tensor sums -------------------------------------------------------------------------


class SumLeader:
    """Adds up the sums of all shards. Pure.

    Args:
        num_shards: number of shards that have chunks.
    """

    def __init__(self, num_shards: int) -> None:
        self._num_shards = num_shards
        self._said: dict[int, dict[int, Sequence[Piece]]] = {}  # by step and shard

    def said(self, shard: int, step: int, pieces: Sequence[Piece]) -> dict[int, Sums] | None:
        """Takes the sums of a shard, once. Returns the total if they were the last."""
        of_step = self._said.setdefault(step, {})
        of_step[shard] = pieces
        if len(of_step) < self._num_shards:
            return None
        del self._said[step]
        return add_up(piece for pieces in of_step.values() for piece in pieces)


class TensorSums:
    """One shard's part.

    Args:
        runtime: runtime of this shard's node.
        endpoint: endpoint of this shard's node.
        config: this shard's part of the run.
        num_chunks: number of chunks on this shard, at least 1.
        num_tensors: number of tensors of the unsplit model.
        shards: ranks of all shards that have chunks, of any part of the model.
    """

    METHOD: ClassVar[str] = "tensor-sums"
    OPENING: ClassVar[Message] = v1.TensorSums()

    def __init__(
        self,
        runtime: Runtime,
        endpoint: Endpoint,
        config: ShardConfig,
        num_chunks: int,
        num_tensors: int,
        shards: Collection[int],
    ) -> None:
        self._num_chunks = num_chunks
        self._num_tensors = num_tensors
        self._rank = config.rank
        self._pieces: dict[int, dict[int, Sequence[Piece]]] = {}  # by step and chunk
        self._totals: dict[
            int, asyncio.Future[Mapping[int, Sums]]
        ] = {}  # by step, while chunks wait for them
        self._waiting: dict[int, int] = {}  # by step: number of chunks that have not taken the total
        self._said: v1.TensorSums | None = None
        self._last = 0  # step of the last total
        self._leader = SumLeader(len(shards))
        self._link = FirstShardLink(runtime, endpoint, config, shards, self)
        self.run = self._link.run

    async def total(self, chunk: int, step: int, pieces: Sequence[Piece]) -> Mapping[int, Sums]:
        """The sums over each whole tensor in an update, once all chunks of all shards are due for it.

        Args:
            chunk: number of a chunk of this shard.
            step: number of the update, from 1.
            pieces: sums over the chunk.
        """
        if step not in self._totals:
            self._totals[step] = asyncio.get_running_loop().create_future()
            self._waiting[step] = self._num_chunks
        total = self._totals[step]
        of_step = self._pieces.setdefault(step, {})
        of_step[chunk] = pieces
        if len(of_step) == self._num_chunks:
            del self._pieces[step]
            self._complete(step, [piece for one in sorted(of_step) for piece in of_step[one]])
        found = await asyncio.shield(total)
        self._waiting[step] -= 1
        if not self._waiting[step]:
            del self._totals[step], self._waiting[step]
        return found

    def _complete(self, step: int, pieces: Sequence[Piece]) -> None:
        """All chunks of this shard are due."""
        if self._link.leads:
            self._take(self._rank, step, pieces)
            return
        self._said = _message(step, pieces)
        self._link.say(self._said)

    def _take(self, shard: int, step: int, pieces: Sequence[Piece]) -> None:
        """On the first shard: takes the sums of a shard."""
        total = self._leader.said(shard, step, pieces) if step > self._last else None
        if total is not None:
            self._link.tell(_message(step, total.items()))
            self._publish(step, total)

    def _publish(self, step: int, total: Mapping[int, Sums]) -> None:
        if step > self._last and step in self._totals:  # a new stream brings the last total again
            self._last = step
            self._totals[step].set_result(total)

    # ---- messages -----------------------------------------------------------------------

    def hear(self, shard: int, data: bytes) -> None:
        """See `Speaker`."""
        said = v1.TensorSums.FromString(data)
        fits = len(said.sums) == 2 * len(said.tensors)
        if not fits or max(said.tensors, default=0) >= self._num_tensors:
            got = f"{len(said.sums)} sums of {len(said.tensors)} tensors"
            raise self._link.bad(
                f"shard-{shard}", f"{got}; expected two of each, of {self._num_tensors} at most"
            )
        if said.step:  # the first message has none
            self._take(shard, said.step, _pieces(said))

    def follow(self, data: bytes) -> None:
        """See `Speaker`."""
        said = v1.TensorSums.FromString(data)
        self._publish(said.step, dict(_pieces(said)))

    def unanswered(self) -> Iterable[v1.TensorSums]:
        """See `Speaker`."""
        return [self._said] if self._said is not None and self._said.step > self._last else []


def _message(step: int, pieces: Iterable[Piece]) -> v1.TensorSums:
    pieces = list(pieces)
    tensors, sums = [tensor for tensor, _ in pieces], [one for _, pair in pieces for one in pair]
    return v1.TensorSums(step=step, tensors=tensors, sums=sums)


def _pieces(said: v1.TensorSums) -> list[Piece]:
    return list(zip(said.tensors, zip(said.sums[::2], said.sums[1::2], strict=True), strict=True))


# ---- distances ---------------------------------------------------------------------------
# Distances between the contributions of a round, over the chunks of a shard. The sums over all shards are the whole.
#
# A table has one row and column for the centre, then one for each worker by rank. Where a worker has left out a
# chunk, its row is NaN, and so it is in the sum over the shards: all of them leave the worker out of the round alike.


class DistanceTable:
    """Squared distances, added up chunk by chunk.

    Args:
        num_workers: W; the table has (1 + W)² numbers.
    """

    def __init__(self, num_workers: int) -> None:
        self._size = 1 + num_workers
        self._squares = torch.zeros(self._size, self._size, dtype=torch.float64)

    def add(
        self, contributions: Sequence[torch.Tensor | None], centre: torch.Tensor | None, *, pairs: bool
    ) -> None:
        """Adds one chunk.

        Args:
            contributions: elements by rank; None for a worker that has left the chunk out.
            centre: elements of the centre; None for zeros.
            pairs: whether to add the distances between contributions.
        """
        for rank, one in enumerate(contributions, start=1):
            if one is None:
                self._squares[rank] = self._squares[:, rank] = math.nan
                continue
            self._put(0, rank, one if centre is None else one - centre)
            for other_rank, other in enumerate(contributions[: rank - 1] if pairs else (), start=1):
                if other is not None:
                    self._put(other_rank, rank, one - other)

    def _put(self, row: int, column: int, difference: torch.Tensor) -> None:
        square = torch.linalg.vector_norm(difference, dtype=torch.float64) ** 2
        self._squares[row, column] += square
        self._squares[column, row] = self._squares[row, column]

    @property
    def flat(self) -> list[float]:
        """All numbers, row by row."""
        return [float(one) for one in self._squares.flatten().tolist()]


def weights_of(rule: WholeRule, distances: Sequence[float], ranks: Iterable[int]) -> dict[int, float]:
    """The weight of each worker's contribution, by rank; 0 for one that is left out.

    Args:
        rule: the rule.
        distances: sums of the shards' tables.
        ranks: the workers whose contributions this chunk has.
    """
    size = math.isqrt(len(distances))
    there = [rank for rank in range(1, size) if not math.isnan(distances[rank])]
    from_centre = [distances[rank] for rank in there]
    between = [[distances[size * row + column] for column in there] for row in there] if rule.pairs else []
    weights = rule.weights(from_centre, between) if there else []
    found = {rank - 1: weight for rank, weight in zip(there, weights, strict=True)}
    return {rank: found.get(rank, 0.0) for rank in ranks}
