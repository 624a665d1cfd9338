"""`PushCodec`: the encoded chunks of a worker's pushes, and what the codec keeps from one push to the next."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from gradstream.codec.base import Codec
from gradstream.codec.seeds import seed_of
from gradstream.codec.words import WORD, check_dtype, words_of
from gradstream.memory import Span, Vector
from gradstream.runtime.base import Runtime, Work
from gradstream.server.update import Update
from gradstream.wire.chunks import ChunkMap


class PushCodec:
    """Encodes each chunk of a push once, however often it is sent.

    Pushes come one after the other, so one vector is enough for what is sent.

    Args:
        runtime: runtime of the worker's node.
        chunks: the chunk map.
        codec: the codec.
        dtype: dtype of the model.
        seed: of the codec's random numbers, other for each worker.
        state: what the codec keeps, by name.

    Raises:
        ConfigError: as `check_dtype`.
    """

    def __init__(
        self,
        runtime: Runtime,
        chunks: ChunkMap,
        codec: Codec,
        dtype: torch.dtype,
        seed: str,
        state: Mapping[str, Vector],
    ) -> None:
        check_dtype(codec, dtype)
        bounds = [chunks.bounds(chunk) for chunk in range(chunks.num_chunks)]
        memory = runtime.memory
        self._runtime = runtime
        self._codec = codec
        self._seed = seed
        self._bounds = bounds
        self._places = [0]
        for start, stop in bounds:
            self._places.append(self._places[-1] + words_of(codec, stop - start))
        self._sent = memory.allocate(self._places[-1], WORD, "encoded", exchanged=True)
        self._state = state
        self._sequence = 0
        self._encoded = set[int]()

    def begin(self, sequence: int) -> None:
        """Begins the push of this number; the one before is done."""
        self._sequence = sequence
        self._encoded.clear()

    async def encode(self, update: Update, chunk: int) -> Span:
        """What is sent for a chunk of the present push, whose elements are final."""
        sent, vector = self._sent[self._places[chunk] : self._places[chunk + 1]], update.vector
        if chunk in self._encoded:  # a shard gets it again
            return sent
        assert vector is not None
        start, stop = self._bounds[chunk]
        size, part = self._codec.encoded_bytes(stop - start), vector[start:stop]
        state = {name: kept[start:stop] for name, kept in self._state.items()}

        def encode(_: object) -> None:
            into = sent.tensor.view(torch.uint8)
            into[size:].zero_()
            kept = {name: span.tensor for name, span in state.items()}
            self._codec.encode(part.tensor, into[:size], kept, seed=self._seed_of(chunk))
            self._encoded.add(chunk)  # here: who waits for this may be cancelled meanwhile

        await self._runtime.compute(
            encode,
            work=Work("copy", elems=stop - start),
            reads=[part],
            writes=[sent, *state.values()],
            lane="exchange",
        )
        return sent

    def _seed_of(self, chunk: int) -> int:
        return seed_of(self._seed, self._sequence, chunk)
