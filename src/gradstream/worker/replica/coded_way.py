"""`CodedWay`: the way that a worker has come, encoded for its partner of a round."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from gradstream.codec.base import Codec
from gradstream.codec.seeds import seed_of
from gradstream.codec.words import WORD, check_dtype, words_of
from gradstream.errors import DataError
from gradstream.memory import Vector
from gradstream.runtime.base import Runtime, Work


class CodedWay:
    """Encodes a vector of this worker, and decodes its partner's.

    Both use what is decoded, of their own vector too. So what the codec leaves out is left out of both halves of the
    mean, and what it keeps for the next round counts once.

    Args:
        runtime: runtime of the worker's node.
        codec: the codec.
        elems, dtype: of the vectors.
        seed: of the codec's random numbers, other for each worker.
        state: what the codec keeps, by name.

    Raises:
        ConfigError: as `check_dtype`.

    Attributes:
        given, taken: encoded vectors, this worker's and the partner's.
    """

    def __init__(
        self,
        runtime: Runtime,
        codec: Codec,
        elems: int,
        dtype: torch.dtype,
        seed: str,
        state: Mapping[str, Vector],
    ) -> None:
        check_dtype(codec, dtype)
        self._runtime = runtime
        self._codec = codec
        self._seed = seed
        self._state = state
        self._size_bytes = codec.encoded_bytes(elems)
        words = words_of(codec, elems)
        self.given = runtime.memory.allocate(words, WORD, "encoded", exchanged=True)
        self.taken = runtime.memory.allocate(words, WORD, "partner's encoded", exchanged=True)

    def _bytes_of(self, words: Vector) -> torch.Tensor:
        return words.tensor.view(torch.uint8)[: self._size_bytes]

    async def encode(self, vector: Vector, number: int) -> None:
        """Encodes into `given`, and overwrites the vector with what the partner decodes.

        Args:
            vector: (elems,).
            number: number of the round.
        """

        def encode(_: object) -> None:
            kept = {name: one.tensor for name, one in self._state.items()}
            encoded = self._bytes_of(self.given)
            self._codec.encode(vector.tensor, encoded, kept, seed=seed_of(self._seed, number, 0))
            self._codec.decode(encoded, vector.tensor)

        writes = [vector.all, self.given.all, *(one.all for one in self._state.values())]
        await self._runtime.compute(encode, work=Work("copy", elems=len(vector)), writes=writes)

    async def decode(self, into: Vector, partner: str) -> str:
        """Decodes `taken`. Returns "", or why these are no bytes of the codec."""

        def decode(_: object) -> str:
            try:
                self._codec.decode(self._bytes_of(self.taken), into.tensor)
            except DataError as error:
                return f"{partner} has given bytes that the codec does not make: {error}"
            return ""

        work = Work("copy", elems=len(into))
        return await self._runtime.compute(
            decode, work=work, reads=[self.taken.all], writes=[into.all], shape_only=""
        )
