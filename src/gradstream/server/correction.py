"""Arithmetic on a contribution before it is used, with what the shard keeps of its sender.

A strategy says that there is some by `Strategy.correction()`; the shard does it, chunk by chunk, on its
arithmetic thread. Delay compensation is of this kind: a gradient is moved from the parameters that it was
computed on to those that it will be applied to, which takes a copy of the former.

Which copy that is, only the contribution knows: its base version. What a sender was given last is something else
where it fetches while it computes, where an answer was lost and asked for again, or where the network brings
a fetch twice. So copies are kept by version: until as many gradients of it have come as its sender was given
it, or one of a later version.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import torch

from gradstream.errors import UserCodeError
from gradstream.memory import Memory, Span, Vector
from gradstream.server.aggregation import PushHeader
from gradstream.server.chunks import ChunkMap

__all__ = ["MOST_COPIES", "Correction", "SenderStates"]

State = Mapping[str, torch.Tensor]
"""By name, what the shard keeps of one sender: (n,) of a chunk of n elements, zeros at first."""

MOST_COPIES = 4
"""Of a chunk for one sender: of what it computes on, and of fetches that it may adopt. The oldest goes."""


class Correction(Protocol):
    """What becomes of a contribution before the rule weighs it. Implementations are frozen dataclasses."""

    @property
    def state_names(self) -> Sequence[str]:
        """The vectors kept of each sender, each as long as the parameters: ("mean_square",), or none."""
        ...

    def correct(
        self, gradient: torch.Tensor, parameters: torch.Tensor, basis: torch.Tensor, state: State
    ) -> torch.Tensor:
        """What is used in the place of a gradient.

        Args:
            gradient: (n,) as it was pushed; read only: it may lie in memory that cannot be written.
            parameters: (n,) as they are now; read only.
            basis: (n,) as they were when the gradient was computed on them; not needed afterwards, so the
                result may lie there.
            state: of its sender; read and written.

        Returns:
            (n,) of the same type; `gradient` itself where there is nothing to correct.
        """
        ...


class SenderStates:
    """What a shard keeps of each sender. Its memory is allocated when that sender first reads.

    Args:
        memory: where vectors come from: for each sender one of each name, and as many for copies as it
            needs at once, each as long as the shard's parameters.
        chunks: the chunk map.
        elems: of this shard's vectors.
        dtype: of all vectors.
        correction: what is done with them.
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
        self._places: dict[tuple[str, int], dict[int, int]] = {}  # by sender, chunk, version: which of these
        self._given: Counter[tuple[str, int, int]] = Counter()  # by sender, chunk, version: gradients to come

    def place(self, sender: str, chunk: int, version: int) -> Span | None:
        """Where a copy of a chunk belongs that a sender is given; None where there is one of this version."""
        places = self._places.setdefault((sender, chunk), {})
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
        """Everything that `corrected` writes.

        Raises:
            UserCodeError: there is no copy of what a contribution was computed on.
        """
        place = self._places.get((one.sender, chunk), {}).get(one.base_version)
        if place is None:
            raise UserCodeError(
                f"chunk {chunk} of {one.sender}: its gradient was computed on version {one.base_version}, of which "
                "the shard has no copy any more for the correction; a strategy with a correction pushes one "
                f"gradient for each fetch that it adopts, and has at most {MOST_COPIES} fetches behind that"
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
        """What is used in the place of a contribution's elements: good until `used`. Raises as `spans`."""
        basis, *state = (span.tensor for span in self.spans(one, chunk))
        if self._given[one.sender, chunk, one.base_version] > 1:  # another gradient of this version may come
            basis = basis.clone()
        named = dict(zip(self._correction.state_names, state, strict=True))
        return self._correction.correct(gradient, parameters, basis, named)

    def used(self, one: PushHeader, chunk: int) -> None:
        """A contribution is done with; no gradient of an older version comes any more."""
        self._given[one.sender, chunk, one.base_version] -= 1
        for version in list(self._places[one.sender, chunk]):
            if version < one.base_version or not self._given[one.sender, chunk, version]:
                self._forget(one.sender, chunk, version)

    def keep_senders(self, names: Collection[str]) -> None:
        """Frees what is kept of all others: they left for good, and nothing of theirs is to be corrected."""
        for sender in [one for one in {**self._states, **self._copies} if one not in names]:
            for vector in (*self._states.pop(sender, {}).values(), *self._copies.pop(sender, ())):
                self._memory.free(vector)
        self._places = {key: places for key, places in self._places.items() if key[0] in names}
        self._given = Counter({key: count for key, count in self._given.items() if key[0] in names})

    def _forget(self, sender: str, chunk: int, version: int) -> None:
        del self._places[sender, chunk][version], self._given[sender, chunk, version]

    def _span(self, vector: Vector, chunk: int) -> Span:
        start, stop = self._chunks.local_bounds(chunk)
        return vector[start:stop]
