"""`CodedSums`: sums of gradients in a group, of which each worker sends its own part encoded.

    bucket g_r ──▶ weight_r · g_r ──▶ encode ──▶ all-gather ──▶ Σ_r decode, in the order of ranks

A sum of encoded vectors is no encoded vector, so each worker gets all parts, and adds them up itself. All get the same
bits. A worker sends (W - 1)·C bytes, with C those of its own part, where a ring sends 2(W - 1)/W · 4N: it pays where
C < 8N/W.

A part begins with a word of its own: NaN says that the worker's gradient is not finite. Nothing of it enters what the
codec keeps, and the sum is NaN, so that all workers leave the round out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from gradstream.codec.base import Codec
from gradstream.codec.seeds import seed_of
from gradstream.codec.words import WORD, check_dtype, words_of
from gradstream.collectives.group import Group
from gradstream.errors import ConfigError, DataError
from gradstream.memory import Span, Vector
from gradstream.model.check import finite
from gradstream.runtime.base import Runtime, Work

BLOCK_WORDS = 64
"""Parts are whole blocks, so that the group's `slice_of` cuts between them."""


class CodedSums:
    """One worker's encoded sums.

    Args:
        runtime: runtime of the worker's node.
        group: the workers.
        bounds: [start, stop) of the buckets.
        codec: the codec.
        dtype: dtype of the model.
        seed: of the codec's random numbers, other for each worker.
        state: what the codec keeps, by name, from one group to the next.

    Raises:
        ConfigError: as `check_dtype`; or encoding would take more bytes than it saves.
    """

    def __init__(
        self,
        runtime: Runtime,
        group: Group,
        bounds: Sequence[tuple[int, int]],
        codec: Codec,
        dtype: torch.dtype,
        seed: str,
        state: Mapping[str, Vector],
    ) -> None:
        check_dtype(codec, dtype)
        elems, size = bounds[-1][1], group.size
        coded, whole = codec.encoded_bytes(elems), elems * dtype.itemsize
        if size > 1 and coded * size >= 2 * whole:
            raise ConfigError(
                f"codec={codec} in a group of {size} workers, each of which sends its part to all others: "
                f"{(size - 1) * coded:,} bytes a step, where a ring sends {2 * (size - 1) * whole // size:,}; take a "
                "smaller codec, or leave codec out"
            )
        self._runtime = runtime
        self._group = group
        self._codec = codec
        self._seed = seed
        self._state = state
        self._most = max(stop - start for start, stop in bounds)
        self._parts = group.allocate(self._part_words(self._most) * size, WORD, "encoded")
        self._decoded: Vector = runtime.memory.allocate(self._most, dtype, "decoded")

    def _part_words(self, elems: int) -> int:
        return -(-(1 + words_of(self._codec, elems)) // BLOCK_WORDS) * BLOCK_WORDS

    async def allreduce(self, span: Span, *, weight: float, step: int) -> tuple[Span, Span]:
        """Sums up Σ_r decode(encode(weight_r · span_r)) into `span`.

        Args:
            span: a bucket of this worker's gradient.
            weight: factor of this worker's gradient.
            step: number of the round.

        Returns:
            The span, and what this worker has sent.

        Raises:
            PeerLostError, DeadlineError: names a rank; the group is broken.
            DataError: names a rank, whose part is none that the codec makes. All workers raise it.
        """
        words, rank = self._part_words(len(span)), self._group.rank
        own, all_parts = (
            self._parts[words * rank : words * (rank + 1)],
            self._parts[: words * self._group.size],
        )
        state = {name: kept[span.start : span.stop] for name, kept in self._state.items()}
        size = self._codec.encoded_bytes(len(span))

        def encode(_: object) -> None:
            part = own.tensor.zero_()
            if not finite(span.tensor):
                part[0] = math.nan
                return
            if weight != 1.0:
                span.tensor.mul_(weight)
            kept = {name: one.tensor for name, one in state.items()}
            self._codec.encode(
                span.tensor, _bytes_of(part, size), kept, seed=seed_of(self._seed, step, span.start)
            )

        await self._runtime.compute(
            encode,
            work=Work("copy", elems=len(span)),
            writes=[span, own, *state.values()],
            lane="exchange",
        )
        await self._group.all_gather(all_parts)

        def add_up(_: object) -> None:
            total, decoded = span.tensor, self._decoded.tensor[: len(span)]
            for number in range(self._group.size):
                part = all_parts.tensor[words * number : words * (number + 1)]
                if math.isnan(part[0].item()):
                    total.fill_(math.nan)
                    return
                try:
                    self._codec.decode(_bytes_of(part, size), decoded if number else total)
                except DataError as error:
                    raise DataError(
                        f"the part of {self._group.names[number]} in step {step}: {error}"
                    ) from error
                if number:
                    total.add_(decoded)

        await self._runtime.compute(
            add_up,
            work=Work("reduce", elems=len(span) * self._group.size),
            reads=[all_parts],
            writes=[span, self._decoded.all],
            lane="exchange",
        )
        return span, own


def _bytes_of(part: torch.Tensor, size: int) -> torch.Tensor:
    return part[1:].view(torch.uint8)[:size]
