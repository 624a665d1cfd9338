"""`LowRankSums`: the sums of matrices in a group as products of two thin matrices: see `codec.low_rank`.

All matrices of a bucket take two messages to each peer together, not two each: what the bucket has besides, biases for
the most part, goes with the P. On a link with a long way that is what counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import torch

from gradstream.codec.low_rank import MatrixPlace, PowerSGD, orthonormal
from gradstream.codec.seeds import seed_of
from gradstream.collectives.group import Group
from gradstream.memory import Span, Vector
from gradstream.model.base import Layout
from gradstream.runtime.base import Runtime, Work
from gradstream.worker.replica.sufficient_factors import outside

Bucket = tuple[int, int]


def name_of(matrix: MatrixPlace) -> str:
    """The name of its Q."""
    return f"q-{matrix.start}"


class LowRankSums:
    """One worker's sums of matrices.

    Args:
        runtime: runtime of the worker's node.
        group: the workers.
        layout: layout of the model.
        buckets: [start, stop) of each bucket.
        codec: the rank.
        seed: of the first Q, the same at all workers.
        left: what was left out of the rounds before; it goes on from one group to the next.
        bases: the Q of each matrix, by "q-<its first element>"; it goes on too. A newcomer's is another one until the
            end of its first exchange, from which all workers have the same.

    Attributes:
        layers: the matrices, in the order of the vector.
    """

    def __init__(
        self,
        runtime: Runtime,
        group: Group,
        layout: Layout,
        buckets: Iterable[Bucket],
        codec: PowerSGD,
        seed: int,
        left: Vector,
        bases: dict[str, torch.Tensor],
    ) -> None:
        self._runtime = runtime
        self._group = group
        self._rank = codec.rank
        self.layers: Sequence[MatrixPlace] = codec.matrices((slot.start, slot.shape) for slot in layout.slots)
        most = max(max(map(sum, self._sizes(bucket))) for bucket in buckets)
        self._thin = group.allocate(most, layout.dtype, "thin")
        self._left = left
        self._bases = bases
        for one in () if runtime.memory.shape_only else self.layers:
            if name_of(one) not in bases:
                bases[name_of(one)] = self._first(one, seed, layout.dtype)

    def _first(self, matrix: MatrixPlace, seed: int, dtype: torch.dtype) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed_of(seed, matrix.start))
        return torch.randn(matrix.columns, self._rank, generator=generator, dtype=dtype)

    def _parts(self, bucket: Bucket) -> tuple[list[MatrixPlace], list[Bucket]]:
        """The matrices that end in a bucket, and [start, stop) of what it has besides matrices."""
        here = [one for one in self.layers if one.start < bucket[1] and bucket[0] < one.stop]
        return [one for one in here if one.stop <= bucket[1]], outside(bucket, here)

    def _sizes(self, bucket: Bucket) -> tuple[list[int], list[int]]:
        """The number of elements of each part of the first sum, and of the second."""
        matrices, besides = self._parts(bucket)
        rows = [one.rows * self._rank for one in matrices]
        return [*rows, *(stop - start for start, stop in besides)], [
            one.columns * self._rank for one in matrices
        ]

    async def exchange(self, bucket: Bucket, vector: Vector, weight: float) -> list[Span]:
        """Puts P·Qᵀ ≈ Σ_r weight_r · M_r into the place of each matrix that ends in a bucket, and sums what is besides.

        Args:
            bucket: one of the buckets.
            vector: this worker's gradient.
            weight: factor of this worker's gradient. NaN for one that is not finite: the result is NaN then, at all
                workers, and what was left out stays as it is.

        Returns:
            What this worker has sent.

        Raises:
            PeerLostError, DeadlineError: names a rank; the group is broken.
        """
        matrices, besides = self._parts(bucket)
        firsts, seconds = self._sizes(bucket)
        work = _Product(matrices, vector, self._left, self._bases, weight)
        others = [vector[start:stop] for start, stop in besides]
        places = [vector[one.start : one.stop] for one in matrices]
        left = [self._left[one.start : one.stop] for one in matrices]
        elems = sum(map(len, [*places, *others]))
        sent = [part for part in (self._thin[: sum(firsts)], self._thin[: sum(seconds)]) if len(part)]

        def first(_: object) -> None:
            parts = _cut(sent[0].tensor, firsts)
            work.multiply(parts[: len(matrices)])
            for other, part in zip(others, parts[len(matrices) :], strict=True):
                torch.mul(other.tensor, weight, out=part)

        def second(_: object) -> None:
            parts = _cut(total.tensor, firsts)
            for other, part in zip(others, parts[len(matrices) :], strict=True):
                other.tensor.copy_(part)
            work.orthogonalize(parts[: len(matrices)])  # all, before the Q take their place
            if matrices:
                work.multiply_back(_cut(sent[1].tensor, seconds))

        if sent:
            await self._compute(first, elems, [*places, sent[0]], [*left, *others])
            total = await self._group.allreduce(sent[0])
            await self._compute(second, elems, [*sent[1:], *left, *others], places)
        if matrices:
            summed = await self._group.allreduce(sent[1])
            await self._compute(
                lambda _: work.put_back(_cut(summed.tensor, seconds)), elems, places, [summed]
            )
        return sent

    async def _compute(
        self, work: Callable[[object], object], elems: int, writes: Sequence[Span], reads: Sequence[Span]
    ) -> None:
        await self._runtime.compute(
            work,
            work=Work("reduce", elems=elems * self._rank),
            writes=writes,
            reads=reads,
            lane="exchange",
        )


def _cut(flat: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Parts of these numbers of elements, one after the other."""
    return [flat[start:stop] for start, stop in pairwise(accumulate(sizes, initial=0))]


@dataclass(frozen=True, slots=True)
class _Product:
    """The steps of `codec.low_rank` for some matrices.

    Args:
        matrices: the matrices.
        vector: this worker's gradient.
        left: what was left out of the rounds before.
        bases: see `LowRankSums`.
        weight: see `LowRankSums.exchange`.
        found: the orthonormal P of each matrix whose sum is finite.
    """

    matrices: Sequence[MatrixPlace]
    vector: Vector
    left: Vector
    bases: dict[str, torch.Tensor]
    weight: float
    found: dict[MatrixPlace, torch.Tensor] = field(default_factory=dict)

    def multiply(self, out: Sequence[torch.Tensor]) -> None:
        """X ← weight·M + e;  P ← X·Q."""
        for matrix, p in zip(self.matrices, out, strict=True):
            if math.isnan(self.weight):
                p.fill_(math.nan)
                continue
            own = matrix.of(self.vector.tensor)
            own.mul_(self.weight).add_(matrix.of(self.left.tensor))
            torch.mm(own, self.bases[name_of(matrix)], out=p.view(matrix.rows, -1))

    def orthogonalize(self, sums: Sequence[torch.Tensor]) -> None:
        """P ← orthonormal(P)."""
        for matrix, p in zip(self.matrices, sums, strict=True):
            if torch.isfinite(p).all():
                self.found[matrix] = orthonormal(p.view(matrix.rows, -1))

    def multiply_back(self, out: Sequence[torch.Tensor]) -> None:
        """Q ← Xᵀ·P;  e ← X - P·Qᵀ."""
        for matrix, q in zip(self.matrices, out, strict=True):
            if matrix not in self.found:
                q.fill_(math.nan)
                continue
            own, basis = matrix.of(self.vector.tensor), self.found[matrix]
            mine = torch.mm(own.T, basis, out=q.view(matrix.columns, -1))
            torch.addmm(own, basis, mine.T, alpha=-1, out=matrix.of(self.left.tensor))

    def put_back(self, sums: Sequence[torch.Tensor]) -> None:
        """M ← P·Qᵀ, of the summed Q, which is kept for the next round."""
        for matrix, q in zip(self.matrices, sums, strict=True):
            into = matrix.of(self.vector.tensor)
            if matrix not in self.found:
                into.fill_(math.nan)
                continue
            kept = self.bases[name_of(matrix)] = q.view(matrix.columns, -1).clone()
            torch.mm(self.found[matrix], kept.T, out=into)
