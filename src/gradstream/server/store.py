"""The memory of a shard and the arithmetic on it: parameters, optimizer state, named vectors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gradstream.errors import ConfigError
from gradstream.memory import Memory, Span, Vector
from gradstream.optim.base import Optimizer
from gradstream.optim.groups import GroupedRule
from gradstream.server.chunks import ChunkMap

__all__ = ["Store"]


class Store:
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
        self._named: dict[str, Vector] = {}

    def vector(self, name: str) -> Vector:
        """A vector by name; "" is the parameters. Raises ConfigError for one that was not created."""
        if not name:
            return self.parameters
        if name not in self._named:
            known = ", ".join(sorted(self._named)) or "none"
            raise ConfigError(f"no vector {name!r} on this shard; created: {known}")
        return self._named[name]

    def create(self, name: str) -> Vector:
        """A vector of zeros; one that exists is zeroed."""
        if name in self._named:
            self._named[name].tensor.zero_()
        else:
            self._named[name] = self._memory.allocate(self._elems, self.dtype, name, exchanged=True)
        return self._named[name]

    def drop(self, name: str) -> None:
        """Forgets a vector; unknown names change nothing."""
        self._named.pop(name, None)

    def span(self, vector: Vector, chunk: int) -> Span:
        """A chunk's range of a vector."""
        start, stop = self._chunks.local_bounds(chunk)
        return vector[start:stop]

    def update_spans(self, chunk: int) -> list[Span]:
        """Everything that `update` writes."""
        spans = [self.span(vector, chunk) for vector in (self.parameters, *self.state.values())]
        return [*spans, self._scratch.all]

    def assign(self, chunk: int, elements: torch.Tensor) -> None:
        """parameters[chunk] = elements."""
        self.span(self.parameters, chunk).tensor.copy_(elements)

    def update(
        self,
        chunk: int,
        parts: Sequence[torch.Tensor],
        weights: Sequence[float],
        *,
        lr: float,
        step: int,
    ) -> None:
        """One optimizer update of a chunk by Σ weight·part, summed in the order given.

        A single part of weight 1 goes in as it is: one worker has the bits of plain SGD.
        """
        total = parts[0]
        if len(parts) > 1 or weights[0] != 1.0:
            total = torch.mul(parts[0], weights[0], out=self._scratch.tensor[: len(parts[0])])
            for part, weight in zip(parts[1:], weights[1:], strict=True):
                total.add_(part, alpha=weight)
        parameters, *state = (span.tensor for span in self.update_spans(chunk)[:-1])
        named = dict(zip(self.state, state, strict=True))
        if self._grouped is None:
            self._optimizer.apply(parameters, total, named, lr=lr, step=step)
        else:
            offset = self._chunks.bounds(chunk)[0]
            self._grouped.apply(offset, parameters, total, named, lr=lr, step=step)
