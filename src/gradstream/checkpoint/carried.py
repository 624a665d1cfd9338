"""`Carried`: what a worker of a group keeps in memory from one phase of its job to the next.

A phase goes on from the checkpoint with which the one before has ended. All workers of a group have all that is in it,
so none has to read over a link what the others have written: 86 MB took two minutes at 10 Mbit/s.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from gradstream.checkpoint.snapshot import Pieces


class Carried:
    """The vectors of the checkpoint with which a phase has ended, in this process; nothing before, and after others.

    Attributes:
        stretch: number of the boundary at which they were kept (`JobPhase.stretch`): nothing else goes on from them.
    """

    def __init__(self) -> None:
        self.stretch = -1
        self._version = -1
        self._vectors: dict[str, torch.Tensor] = {}

    def keep(self, version: int, vectors: Mapping[str, Pieces]) -> None:
        """Copies whole vectors, of one piece each, as the checkpoint of this version has them."""
        self._version = version
        self._vectors = {name: piece.clone() for name, ((_, piece),) in vectors.items()}

    def fill(self, version: int, vectors: Mapping[str, Pieces]) -> Mapping[str, Pieces]:
        """Fills pieces of vectors that it has of this version. Returns the others, which are still to be read."""
        left = dict(vectors)
        if version == self._version:
            for name in [name for name in vectors if name in self._vectors]:
                for start, piece in left.pop(name):
                    piece.copy_(self._vectors[name][start : start + len(piece)])
        return left

    def forget(self) -> None:
        """Frees the vectors."""
        self._version, self._vectors = -1, {}
