"""The memory of a shard and the arithmetic on it: parameters and optimizer state."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import cast

import torch

from gradstream.errors import ConfigError
from gradstream.memory import Memory, Span, Vector
from gradstream.model.base import check_updated, length
from gradstream.optim.base import Bounded, Optimizer, Sums
from gradstream.optim.groups import GroupedRule, Piece
from gradstream.optim.merge import Add, Outer, Replace
from gradstream.server.rows import ChangedRows, RowMap
from gradstream.wire.chunks import ChunkMap

# ---- headroom ----------------------------------------------------------------------------
# Whether an update can have made an element NaN or infinite, without a look at the elements.
#
# Looking takes a pass over the parameters and one over each state vector, nearly as long as the update itself.
# Instead each vector of a range has a bound, which no absolute value of its elements exceeds. A rule says how far one
# update can push these bounds, from the length of the gradient, which was measured when the gradient was checked:
#
#     |b| ≤ momentum · |b| + |g|      |w| ≤ |w| + lr · |b|          (`optim.SGD`)
#
# While the bounds are far below what the dtype can hold, no element can have overflowed. Else, and after every
# `LOOK_EVERY` updates, the elements are looked at, and the bounds are measured anew.

LOOK_EVERY = 64
"""Number of updates after which the elements are looked at in any case."""


class Headroom:
    """Bounds the absolute values of the elements in ranges of the vectors, update by update.

    Args:
        optimizer: the update rule.
        grouped: the same rule by groups, where some parameters have other settings; else None.
        dtype: dtype of all vectors.
    """

    def __init__(self, optimizer: Optimizer, grouped: GroupedRule | None, dtype: torch.dtype) -> None:
        pairs = (
            [(optimizer, 1.0)] if grouped is None else [(one.rule, one.lr_scale) for one in grouped.ranges]
        )
        self._rules = [pair for index, pair in enumerate(pairs) if pair not in pairs[:index]]
        self._bounded = all(map(_bounds_itself, (rule for rule, _ in self._rules)))
        # Squares of such numbers are representable, too, and sums of a thousand of these squares.
        self._most = math.sqrt(torch.finfo(dtype).max) / 32
        self._slack = 1 + 4 * torch.finfo(dtype).eps  # more than an update's rounding can add
        self._bounds: dict[int, dict[str, float]] = {}
        self._since: dict[int, int] = {}  # by range: number of updates since its elements were looked at

    def forget(self, place: int) -> None:
        """Takes note that the elements of a range were changed by something else than an update."""
        self._bounds.pop(place, None)

    def updated(
        self,
        place: int,
        vectors: Mapping[str, torch.Tensor],
        gradient: float,
        *,
        where: str,
        lr: float,
        step: int,
    ) -> None:
        """Takes note of an update of a range.

        Args:
            place: which range; any number that stands for it.
            vectors: its parameters under "", and its state vectors by name, after the update.
            gradient: bound of the absolute values of the gradient; infinite if unknown.
            where: the range in words.
            lr: learning rate of the update.
            step: number of the update, from 1.

        Raises:
            NonFiniteError: a parameter or the state is NaN or infinite.
        """
        known, since = self._bounds.get(place), self._since.get(place, 0) + 1
        if known is not None and since < LOOK_EVERY:
            bounds = self._after(known, gradient, lr, step)
            if all(bound <= self._most for bound in bounds.values()):  # False for NaN
                self._bounds[place], self._since[place] = bounds, since
                return
        if not self._bounded:
            check_updated(vectors.values(), where, lr, step)
            return
        measured = {name: length(vector) for name, vector in vectors.items()}
        if not all(map(math.isfinite, measured.values())):  # a square may have overflowed, and no element
            check_updated(vectors.values(), where, lr, step)
        self._bounds[place], self._since[place] = measured, 0

    def _after(self, known: Mapping[str, float], gradient: float, lr: float, step: int) -> dict[str, float]:
        found: dict[str, float] = {}
        for rule, scale in self._rules:
            bounds = cast(Bounded, rule).bounds_after(known, gradient, lr=lr * scale, step=step)
            for name, bound in bounds.items():
                found[name] = max(found.get(name, 0.0), bound * self._slack)
        return found


def _bounds_itself(rule: Optimizer) -> bool:
    """Whether a rule's bounds belong to its own update: a subclass with another `apply` must bring its own bounds."""
    if not isinstance(rule, Bounded):
        return False
    if isinstance(rule, Outer):
        return _bounds_itself(rule.rule)
    owners = [
        next(one for one in type(rule).__mro__ if name in vars(one)) for name in ("apply", "bounds_after")
    ]
    return owners[0] is owners[1]


# ---- store -------------------------------------------------------------------------------


class ShardStore:
    """A shard's ranges of every vector.

    Args:
        memory: allocates the vectors.
        chunks: the chunk map. It alone determines sizes; a message of a peer never does.
        shard: rank of the shard.
        dtype: element type of all vectors.
        optimizer: update rule of the parameters.
        grouped: the update rule, where some parameters have settings of their own.
        rows: the rows of every chunk, where workers exchange changed rows; None if they exchange whole chunks.

    Attributes:
        parameters: the parameters of the shard's chunks, one chunk after the other.
        state: state vectors of the update rule, by name, each as long as `parameters`.
        here: numbers of the shard's chunks.
        changed: which rows have changed; None if workers exchange whole chunks.
        headroom: how large the elements of each chunk can be. Whoever changes them but for `update` tells it.
    """

    def __init__(
        self,
        memory: Memory,
        chunks: ChunkMap,
        shard: int,
        dtype: torch.dtype,
        optimizer: Optimizer,
        grouped: GroupedRule | None = None,
        rows: RowMap | None = None,
    ) -> None:
        self._memory = memory
        self._optimizer = optimizer
        self._grouped = grouped
        self._elems = chunks.shard_elems(shard)
        self.chunks = chunks
        self.here = chunks.chunks_of(shard)
        self.dtype = dtype
        self.parameters = memory.allocate(self._elems, dtype, "parameters", exchanged=True)
        self.state = {name: memory.allocate(self._elems, dtype, name) for name in optimizer.state_names}
        for vector in self.state.values():
            if optimizer.state_init:
                vector.tensor.fill_(optimizer.state_init)
        self._scratch = memory.allocate(min(chunks.chunk_elems, self._elems), dtype, "scratch")
        self._sums: Vector | None = None  # allocated for the first push that is summed
        self._sum_bounds: dict[int, float] = {}  # by chunk: a bound of the absolute values in its sum
        self._centre: Vector | None = None  # allocated for the first update that has one
        self.changed = None if rows is None else ChangedRows(rows, dtype)
        self.headroom = Headroom(optimizer, grouped, dtype)

    # ---- vectors ------------------------------------------------------------------------

    def vector(self, name: str) -> Vector:
        """A vector by name: "" for the parameters, else a state vector of the update rule.

        Raises:
            ConfigError: no vector has this name.
        """
        vectors = {"": self.parameters, **self.state}
        if name not in vectors:
            known = ", ".join(sorted(vectors)[1:]) or "none"
            raise ConfigError(f"no vector {name!r} on this shard; besides the parameters: {known}")
        return vectors[name]

    def span(self, vector: Vector, chunk: int) -> Span:
        """A chunk's range of a vector."""
        start, stop = self.chunks.local_bounds(chunk)
        return vector[start:stop]

    def parameters_of(self, chunk: int) -> torch.Tensor:
        """A chunk's parameters in the shard's own memory: every update changes them."""
        return self.span(self.parameters, chunk).tensor

    def update_spans(self, chunk: int) -> list[Span]:
        """All memory that `update` writes."""
        spans = [self.span(vector, chunk) for vector in (self.parameters, *self.state.values())]
        return [*spans, self._scratch.all]

    def _tensors(self, chunk: int) -> dict[str, torch.Tensor]:
        """A chunk of every vector, by name: "" for the parameters."""
        vectors = {"": self.parameters, **self.state}
        return {name: self.span(vector, chunk).tensor for name, vector in vectors.items()}

    def sum_spans(self, chunk: int) -> list[Span]:
        """All memory that `gather` writes, and that an update with a sum reads."""
        if self._sums is None:
            self._sums = self._memory.allocate(self._elems, self.dtype, "sums")
        return [self.span(self._sums, chunk)]

    def centre_span(self, chunk: int) -> Span:
        """A chunk of the newest update of all parameters, from which contributions are measured; 0 before the first."""
        if self._centre is None:
            self._centre = self._memory.allocate(self._elems, self.dtype, "centre")
            self._centre.tensor.zero_()
        return self.span(self._centre, chunk)

    # ---- arithmetic ---------------------------------------------------------------------

    @property
    def pushed_state(self) -> tuple[str, ...]:
        """Names of the state vectors that workers push: those of `Replace`. Other rules change their state alone."""
        rule = self._optimizer.rule if isinstance(self._optimizer, Outer) else self._optimizer
        return rule.states if isinstance(rule, Replace) else ()

    @property
    def has_rate(self) -> bool:
        """Whether the update rule has a learning rate; `Add` and `Replace` have none."""
        return not isinstance(self._optimizer, Add | Replace)

    def gather(
        self,
        chunk: int,
        parts: Sequence[torch.Tensor],
        weights: Sequence[float],
        *,
        summed: bool,
        bound: float = math.inf,
    ) -> torch.Tensor:
        """sum[chunk] += Σ weight·part, in the order given, and returns the sum. Where not `summed`, = and not +=.

        The sum is formed in one order, so an update with it has the bits of an update of all its parts at once.
        `bound` is as in `update`.
        """
        (span,) = self.sum_spans(chunk)
        self._sum_bounds[chunk] = bound + (self._sum_bounds.get(chunk, math.inf) if summed else 0.0)
        return _add_up(span.tensor, parts, weights, summed=summed)

    def partial_sums(self, chunk: int, step: int) -> list[Piece]:
        """The sums that the update rule needs for an update with a chunk's sum, over the chunk."""
        assert self._grouped is not None
        state, gradient = self._tensors(chunk), self.sum_spans(chunk)[0].tensor
        offset = self.chunks.bounds(chunk)[0]
        return self._grouped.partial_sums(offset, state.pop(""), gradient, state, step=step)

    def update(
        self,
        chunk: int,
        parts: Sequence[torch.Tensor],
        weights: Sequence[float],
        *,
        lr: float,
        step: int,
        bound: float = math.inf,
        summed: bool = False,
        tensor_sums: Mapping[int, Sums] | None = None,
    ) -> torch.Tensor:
        """Applies the optimizer to a chunk once, with Σ weight·part, summed in the order given.

        A single part of weight 1 is used as it is: one worker has the bits of plain SGD.

        Args:
            chunk: number of the chunk.
            parts: elements of each push, (n,).
            weights: weight of each part.
            lr: learning rate.
            step: number of the update, from 1.
            bound: no absolute value in Σ weight·part exceeds it; infinite if unknown.
            summed: whether to add the parts to the chunk's sum, and to apply that.
            tensor_sums: `partial_sums`, added up over all chunks of all shards, where the update rule needs them.

        Returns:
            The sum that the optimizer has got, until the next update.

        Raises:
            NonFiniteError: the update has made a parameter, or the state, NaN or infinite.
        """
        total, bound = self._total(chunk, parts, weights, bound=bound, summed=summed)
        vectors = self._tensors(chunk)
        state = dict(vectors)
        parameters = state.pop("")
        if self._grouped is None:
            self._optimizer.apply(parameters, total, state, lr=lr, step=step)
        else:
            offset = self.chunks.bounds(chunk)[0]
            self._grouped.apply(offset, parameters, total, state, tensor_sums, lr=lr, step=step)
        self.headroom.updated(chunk, vectors, bound, where=f"chunk {chunk}", lr=lr, step=step)
        return total

    def replace(
        self,
        vector: str,
        chunk: int,
        parts: Sequence[torch.Tensor],
        weights: Sequence[float],
        *,
        summed: bool = False,
    ) -> torch.Tensor:
        """vector[chunk] = Σ weight·part, where workers carry the update rule out. See `update`.

        Args:
            vector: name of a state vector.
            chunk, parts, weights, summed: as in `update`.
        """
        total, _ = self._total(chunk, parts, weights, bound=math.inf, summed=summed)
        self.span(self.state[vector], chunk).tensor.copy_(total)
        self.headroom.forget(chunk)
        return total

    def _total(
        self,
        chunk: int,
        parts: Sequence[torch.Tensor],
        weights: Sequence[float],
        *,
        bound: float,
        summed: bool,
    ) -> tuple[torch.Tensor, float]:
        """Σ weight·part, with the chunk's sum where `summed`, and the bound of its absolute values."""
        if summed:
            total = self.gather(chunk, parts, weights, summed=True, bound=bound)
            return total, self._sum_bounds[chunk]
        if len(parts) > 1 or weights[0] != 1.0:
            return _add_up(self._scratch.tensor[: len(parts[0])], parts, weights, summed=False), bound
        return parts[0], bound

    def update_some(
        self, chunk: int, elements: torch.Tensor, gradient: torch.Tensor, *, lr: float, step: int
    ) -> None:
        """Applies the optimizer to some elements of a chunk once, and does not read the others.

        Args:
            chunk: number of the chunk.
            elements: (n,) int64, increasing: positions of the elements in the chunk.
            gradient: (n,).
            lr: learning rate.
            step: number of the update, from 1.

        Raises:
            NonFiniteError: as in `update`.
        """
        vectors = self._tensors(chunk)
        some = {name: vector[elements] for name, vector in vectors.items()}
        state = dict(some)
        parameters = state.pop("")
        if self._grouped is None:
            self._optimizer.apply(parameters, gradient, state, lr=lr, step=step)
        else:
            places = elements + self.chunks.bounds(chunk)[0]
            self._grouped.apply_some(places, parameters, gradient, state, lr=lr, step=step)
        check_updated(some.values(), f"chunk {chunk}", lr, step)
        self.headroom.forget(chunk)
        for name, vector in vectors.items():
            vector[elements] = some[name]


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
