"""Arithmetic on a contribution before it is used, with what the shard keeps of its sender.

A strategy says that there is some by `Strategy.correction()`; the shard does it, chunk by chunk, on its
arithmetic thread. Delay compensation is of this kind: a gradient is moved from the parameters that its
sender has read to those that it will be applied to, which takes a copy of the former.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from gradstream.errors import UserCodeError
from gradstream.memory import Memory, Span, Vector
from gradstream.server.chunks import ChunkMap
from gradstream.server.rule import Contribution

__all__ = ["Correction", "SenderStates"]

State = Mapping[str, torch.Tensor]
"""By name, what the shard keeps of one sender: (n,) of a chunk of n elements, zeros at first."""


class Correction(Protocol):
    """What becomes of a contribution before the rule weighs it. Implementations are frozen dataclasses."""

    @property
    def state_names(self) -> Sequence[str]:
        """The vectors kept of each sender, each as long as the parameters: ("backup",)."""
        ...

    def on_read(self, parameters: torch.Tensor, state: State) -> None:
        """A sender is given a chunk, to compute its next gradient on.

        Args:
            parameters: (n,) as it gets them; read only.
            state: of this sender; read and written.
        """
        ...

    def correct(self, gradient: torch.Tensor, parameters: torch.Tensor, state: State) -> torch.Tensor:
        """What is used in the place of a gradient.

        Args:
            gradient: (n,) as it was pushed; read only: it may lie in memory that cannot be written.
            parameters: (n,) as they are now; read only.
            state: of its sender; read and written.

        Returns:
            (n,) of the same type; `gradient` itself where there is nothing to correct.
        """
        ...


class SenderStates:
    """What a shard keeps of each sender. Its memory is allocated when that sender first reads.

    Args:
        memory: where vectors come from: one for each sender and name, as long as the shard's parameters.
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
        self._vectors: dict[str, dict[str, Vector]] = {}  # by sender and name
        self._read: dict[tuple[str, int], int] = {}  # by sender and chunk, the version read last

    def spans(self, sender: str, chunk: int) -> list[Span]:
        """Everything that `read` and `corrected` write of a sender; allocates what is not there yet."""
        if sender not in self._vectors:
            self._vectors[sender] = made = {}
            for name in self._correction.state_names:
                made[name] = self._memory.allocate(self._elems, self._dtype, f"{name} of {sender}")
        start, stop = self._chunks.local_bounds(chunk)
        return [vector[start:stop] for vector in self._vectors[sender].values()]

    def read(self, sender: str, chunk: int, version: int, parameters: torch.Tensor) -> None:
        """A sender is given a chunk."""
        self._correction.on_read(parameters, self._state(sender, chunk))
        self._read[sender, chunk] = version

    def corrected(
        self, one: Contribution, chunk: int, gradient: torch.Tensor, parameters: torch.Tensor
    ) -> torch.Tensor:
        """What is used in the place of a contribution's elements.

        Raises:
            UserCodeError: what is kept of its sender is not of the parameters that it was computed on.
        """
        read = self._read.get((one.sender, chunk))
        if read != one.basis:
            raise UserCodeError(
                f"chunk {chunk} of {one.sender}: its gradient was computed on version {one.basis}, but it "
                f"has read {'none' if read is None else read} last, which is what the shard keeps for the "
                "correction; a strategy with a correction must push a gradient before it fetches again"
            )
        return self._correction.correct(gradient, parameters, self._state(one.sender, chunk))

    def _state(self, sender: str, chunk: int) -> State:
        return dict(
            zip(self._correction.state_names, (s.tensor for s in self.spans(sender, chunk)), strict=True)
        )
