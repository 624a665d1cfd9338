"""Corrects a gradient before a shard applies it, with vectors that the shard keeps for each sender.

A strategy requests a correction by `ServerStrategy.correction()`. The shard computes it, chunk by chunk, on its
arithmetic thread. One example is delay compensation: a gradient was computed on older parameters, and the correction
estimates the gradient at the current ones, so the shard needs a copy of the older parameters.

The base version of a push identifies that copy. The sender may have read a later version since, because it fetches
while it computes, repeats a fetch whose answer was lost, or the network delivers a fetch twice. So the shard keeps a
copy of each version until it has received as many gradients of that version as the sender has read copies of it, or a
gradient of a later version.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import torch

from gradstream.errors import UserCodeError
from gradstream.memory import Memory, Span, Vector
from gradstream.server.aggregation import PushHeader
from gradstream.wire.chunks import ChunkMap

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
