"""`LowRankSums`: the sums of matrices in a group as products of two thin matrices: see `codec.low_rank`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from gradstream.codec.low_rank import MatrixPlace, PowerSGD, orthonormal
from gradstream.codec.seeds import seed_of
from gradstream.collectives.group import Group
from gradstream.memory import Span, Vector
from gradstream.model.base import Layout
from gradstream.runtime.base import Runtime, Work


def name_of(matrix: MatrixPlace) -> str:
    """The name of its Q."""
    return f"q-{matrix.start}"


class LowRankSums:
    """One worker's sums of matrices.

    Args:
        runtime: runtime of the worker's node.
        group: the workers.
        layout: layout of the model.
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
        codec: PowerSGD,
        seed: int,
        left: Vector,
        bases: dict[str, torch.Tensor],
    ) -> None:
        self._runtime = runtime
        self._group = group
        self._rank = codec.rank
        self.layers: Sequence[MatrixPlace] = codec.matrices((slot.start, slot.shape) for slot in layout.slots)
        most = codec.rank * max((max(one.rows, one.columns) for one in self.layers), default=0)
        self._thin = group.allocate(most, layout.dtype, "thin")
        self._left = left
        self._bases = bases
        for one in () if runtime.memory.shape_only else self.layers:
            if name_of(one) not in bases:
                bases[name_of(one)] = self._first(one, seed, layout.dtype)

    def _first(self, matrix: MatrixPlace, seed: int, dtype: torch.dtype) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed_of(seed, matrix.start))
        return torch.randn(matrix.columns, self._rank, generator=generator, dtype=dtype)

    async def exchange(self, matrix: MatrixPlace, vector: Vector, weight: float) -> list[Span]:
        """Puts P·Qᵀ ≈ Σ_r weight_r · M_r into the matrix's place in the vector.

        Args:
            matrix: one of `layers`.
            vector: this worker's gradient.
            weight: factor of this worker's gradient. NaN for one that is not finite: the result is NaN then, at all
                workers, and what was left out stays as it is.

        Returns:
            What this worker has sent.

        Raises:
            PeerLostError, DeadlineError: names a rank; the group is broken.
        """
        name, rank = name_of(matrix), self._rank
        place, left = vector[matrix.start : matrix.stop], self._left[matrix.start : matrix.stop]
        p, q = self._thin[: matrix.rows * rank], self._thin[: matrix.columns * rank]

        def first(_: object) -> None:
            if math.isnan(weight):
                p.tensor.fill_(math.nan)
                return
            own = matrix.of(vector.tensor)
            own.mul_(weight).add_(matrix.of(self._left.tensor))
            torch.mm(own, self._bases[name], out=p.tensor.view(matrix.rows, rank))

        await self._compute(first, len(place), [place, p], [left])
        total = await self._group.allreduce(p)
        basis: list[torch.Tensor] = []

        def second(_: object) -> None:
            found = total.tensor.view(matrix.rows, rank)
            if not torch.isfinite(found).all():
                q.tensor.fill_(math.nan)
                return
            basis.append(orthonormal(found))
            mine = torch.mm(matrix.of(vector.tensor).T, basis[0], out=q.tensor.view(matrix.columns, rank))
            torch.addmm(
                matrix.of(vector.tensor), basis[0], mine.T, alpha=-1, out=matrix.of(self._left.tensor)
            )

        await self._compute(second, len(place), [q, left], [place])
        total = await self._group.allreduce(q)

        def last(_: object) -> None:
            into = matrix.of(vector.tensor)
            if not basis:
                into.fill_(math.nan)
                return
            self._bases[name] = total.tensor.view(matrix.columns, rank).clone()
            torch.mm(basis[0], self._bases[name].T, out=into)

        await self._compute(last, len(place), [place], [])
        return [p, q]

    async def _compute(
        self, work: Callable[[object], None], elems: int, writes: Sequence[Span], reads: Sequence[Span]
    ) -> None:
        await self._runtime.compute(
            work,
            work=Work("reduce", elems=elems * self._rank),
            writes=writes,
            reads=reads,
            lane="exchange",
        )
