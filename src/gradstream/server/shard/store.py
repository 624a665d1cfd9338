"""The memory of a shard and the arithmetic on it: parameters, optimizer state, named vectors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gradstream.errors import ConfigError
from gradstream.memory import Memory, Span, Vector
from gradstream.optim.base import Optimizer
from gradstream.optim.groups import GroupedRule
from gradstream.optim.merge import Add, Replace
from gradstream.wire.chunks import ChunkMap

__all__ = ["ShardStore"]


class ShardStore:
    """A shard's ranges of every vector.

    Args:
        memory: where vectors come from.
        chunks: the chunk map; sizes come from here and never from the wire.
        shard: which shard this is.
        dtype: of all vectors.
        optimizer: update rule of the parameters.
        grouped: the same, where some parameters have settings of their own.
    """

    def __init__(
        self,
        memory: Memory,
        chunks: ChunkMap,
        shard: int,
        dtype: torch.dtype,
        optimizer: Optimizer,
        grouped: GroupedRule | None = None,
    ) -> None:
        self._memory = memory
        self._chunks = chunks
        self._optimizer = optimizer
        self._grouped = grouped
        self._elems = chunks.shard_elems(shard)
        self.dtype = dtype
        self.parameters = memory.allocate(self._elems, dtype, "parameters", exchanged=True)
        self.state = {name: memory.allocate(self._elems, dtype, name) for name in optimizer.state_names}
        for vector in self.state.values():
            if optimizer.state_init:
                vector.tensor.fill_(optimizer.state_init)
        self._scratch = memory.allocate(min(chunks.chunk_elems, self._elems), dtype, "scratch")
        self._sums: Vector | None = None  # allocated by the first contribution that joins one
        self._named: dict[str, Vector] = {}

    def vector(self, name: str) -> Vector:
        """A vector by name: "" the parameters, else a state of the update rule, or one that was created.

        Raises:
            ConfigError: there is none of that name.
        """
        vectors = {"": self.parameters, **self.state, **self._named}
        if name not in vectors:
            known = ", ".join(sorted(vectors)[1:]) or "none"
            raise ConfigError(f"no vector {name!r} on this shard; besides the parameters: {known}")
        return vectors[name]

    def create(self, name: str) -> bool:
        """Makes a vector of zeros; False where there is one of that name, which stays as it is."""
        if name in self._named:
            return False
        self._named[name] = self._memory.allocate(self._elems, self.dtype, name, exchanged=True)
        return True

    @property
    def num_named(self) -> int:
        """How many vectors were created, and not dropped."""
        return len(self._named)

    def has(self, name: str) -> bool:
        """Whether a vector of that name was created, and not dropped."""
        return name in self._named

    def drop(self, name: str) -> None:
        """Forgets a vector; unknown names change nothing."""
        self._named.pop(name, None)

    def span(self, vector: Vector, chunk: int) -> Span:
        """A chunk's range of a vector."""
        start, stop = self._chunks.local_bounds(chunk)
        return vector[start:stop]

    def parameters_of(self, chunk: int) -> torch.Tensor:
        """A chunk's parameters, as they lie here: they change under who keeps them."""
        return self.span(self.parameters, chunk).tensor

    def update_spans(self, chunk: int) -> list[Span]:
        """Everything that `update` writes."""
        spans = [self.span(vector, chunk) for vector in (self.parameters, *self.state.values())]
        return [*spans, self._scratch.all]

    @property
    def has_rate(self) -> bool:
        """Whether the update rule has a learning rate; what only adds or replaces has none."""
        return not isinstance(self._optimizer, Add | Replace)

    @property
    def elems(self) -> int:
        """Length of each of its vectors."""
        return self._elems

    def sum_spans(self, chunk: int) -> list[Span]:
        """Everything that `gather` writes, and that an update of a sum reads."""
        if self._sums is None:
            self._sums = self._memory.allocate(self._elems, self.dtype, "sums")
        return [self.span(self._sums, chunk)]

    def assign(self, chunk: int, elements: torch.Tensor) -> None:
        """parameters[chunk] = elements."""
        self.span(self.parameters, chunk).tensor.copy_(elements)

    def gather(
        self, chunk: int, parts: Sequence[torch.Tensor], weights: Sequence[float], *, summed: bool
    ) -> torch.Tensor:
        """sum[chunk] += Σ weight·part, in the order given (= where it holds nothing). Returns the sum.

        So a sum that is applied has the bits of an update of all its parts at once.
        """
        (span,) = self.sum_spans(chunk)
        return self._add_up(span.tensor, parts, weights, summed=summed)

    @staticmethod
    def _add_up(
        total: torch.Tensor, parts: Sequence[torch.Tensor], weights: Sequence[float], *, summed: bool
    ) -> torch.Tensor:
        pairs = list(zip(parts, weights, strict=True))
        if not summed:
            part, weight = pairs.pop(0)
            torch.mul(part, weight, out=total)
        for part, weight in pairs:
            total.add_(part, alpha=weight)
        return total

    def update_some(
        self, chunk: int, elements: torch.Tensor, gradient: torch.Tensor, *, lr: float, step: int
    ) -> None:
        """One optimizer update of some elements of a chunk; the others are not looked at.

        Args:
            elements: (n,) int64, growing: which elements of the chunk.
            gradient: (n,).
        """
        vectors = [span.tensor for span in self.update_spans(chunk)[:-1]]
        parameters, *state = some = [vector[elements] for vector in vectors]
        named = dict(zip(self.state, state, strict=True))
        if self._grouped is None:
            self._optimizer.apply(parameters, gradient, named, lr=lr, step=step)
        else:
            places = elements + self._chunks.bounds(chunk)[0]
            self._grouped.apply_some(places, parameters, gradient, named, lr=lr, step=step)
        for vector, changed in zip(vectors, some, strict=True):
            vector[elements] = changed

    def update(
        self,
        chunk: int,
        parts: Sequence[torch.Tensor],
        weights: Sequence[float],
        *,
        lr: float,
        step: int,
        summed: bool = False,
        vector: str = "",
    ) -> None:
        """One optimizer update of a chunk by Σ weight·part, summed in the order given.

        A single part of weight 1 goes in as it is: one worker has the bits of plain SGD.

        Args:
            summed: these are added to the chunk's sum, which is what is applied.
            vector: a state of the rule, whose elements the sum takes the place of, where workers carry the
                rule out; "" for an update.
        """
        if summed:
            total = self.gather(chunk, parts, weights, summed=True)
        elif len(parts) > 1 or weights[0] != 1.0:
            scratch = self._scratch.tensor[: len(parts[0])]
            total = self._add_up(scratch, parts, weights, summed=False)
        else:
            total = parts[0]
        if vector:
            self.span(self.state[vector], chunk).tensor.copy_(total)
            return
        parameters, *state = (span.tensor for span in self.update_spans(chunk)[:-1])
        named = dict(zip(self.state, state, strict=True))
        if self._grouped is None:
            self._optimizer.apply(parameters, total, named, lr=lr, step=step)
        else:
            offset = self._chunks.bounds(chunk)[0]
            self._grouped.apply(offset, parameters, total, named, lr=lr, step=step)
