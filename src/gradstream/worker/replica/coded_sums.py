"""`CodedSums`: sums of gradients in a group that travel encoded.

A sum of encoded vectors is no encoded vector. So either each worker gets the encoded parts of all, and adds them up:

    gathered        bucket g_r ──▶ w_r·g_r ──▶ encode ──▶ all-gather ──▶ Σ_r decode, in the order of ranks

or the sum is encoded again, as a reduce-scatter and an all-gather whose messages are encoded both times:

    in two steps    w_r·g_r ──▶ encode slice by slice ──▶ all-to-all ──▶ worker s: Σ_r decode of slice s
                    ──▶ encode ──▶ all-gather ──▶ decode

A worker sends (W - 1)·C bytes in the first way, with C those of a whole encoded bucket, and 2(W - 1)/W·C in the second,
where a ring sends 2(W - 1)/W·4N. The second one is taken by three workers or more with codecs that have a code for each
element (`Codec.dense`); the others would leave out again what they have let through. All get the same bits both ways.

With error feedback the second encoding has it too: a worker has what it left out of its slice s in its own remainder,
and adds that to the sum. So in both steps nothing is lost, sent + remainders = given, and there is no further vector.

A part begins with a word of its own: NaN says that a worker's gradient is not finite. Nothing of it enters what the
codec keeps, and the sum is NaN, so that all workers leave the round out.

References: all parts to all: Seide and others, 1-bit SGD, 2014. Both steps with feedback: Tang and others, "1-bit
Adam", 2021 (there the error of the sum is a vector of its own).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from gradstream.codec.base import Codec
from gradstream.codec.feedback import sparse_part
from gradstream.codec.seeds import seed_of
from gradstream.codec.words import WORD, check_dtype, words_of
from gradstream.collectives.group import Group, SwappingGroup, slice_of
from gradstream.errors import ConfigError, DataError
from gradstream.memory import Span, Vector
from gradstream.model.check import finite
from gradstream.runtime.base import Runtime, Work

PART_WORDS = 64
"""Parts are multiples of so many words, so that the group's `slice_of` cuts between them."""
BLOCK_ELEMS = 1 << 20
"""The most elements that are encoded at once: what is decoded of them stays near the processor."""


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
        self._runtime = runtime
        self._group = group
        self._swaps: SwappingGroup | None = None
        if isinstance(group, SwappingGroup) and group.size > 2 and getattr(codec, "dense", False):
            self._swaps = group
        self._codec = codec
        self._sparse = sparse_part(codec)
        self._seed = seed
        self._state = state
        self._check_bytes(bounds[-1][1], dtype.itemsize)
        most = max(stop - start for start, stop in bounds)
        self._parts = group.allocate(self._part_words(most) * group.size, WORD, "encoded")
        self._decoded: Vector = runtime.memory.allocate(min(most, BLOCK_ELEMS), dtype, "decoded")

    def _check_bytes(self, elems: int, itemsize_bytes: int) -> None:
        size, coded, whole = self._group.size, self._codec.encoded_bytes(elems), elems * itemsize_bytes
        sent = 2 * (size - 1) * coded // size if self._swaps is not None else (size - 1) * coded
        if size > 1 and sent >= 2 * (size - 1) * whole // size:
            raise ConfigError(
                f"codec={self._codec} in a group of {size} workers would send {sent:,} bytes a step, where a ring "
                f"sends {2 * (size - 1) * whole // size:,}; take a smaller codec, or leave codec out"
            )

    # ---- parts ----------------------------------------------------------------------------

    def _slices(self, elems: int) -> list[tuple[int, int]]:
        """By rank, [start, stop) of the elements of a bucket that its part is of."""
        size = self._group.size
        if self._swaps is None:
            return [(0, elems)] * size
        return [slice_of(elems, rank, size) for rank in range(size)]

    def _part_words(self, elems: int) -> int:
        longest = max(stop - start for start, stop in self._slices(elems))
        words = 1 + sum(words_of(self._codec, stop - start) for start, stop in _blocks(longest))
        return -(-words // PART_WORDS) * PART_WORDS

    # ---- sums -----------------------------------------------------------------------------

    async def allreduce(self, span: Span, *, weight: float, step: int) -> tuple[Span, Span]:
        """Sums up Σ_r weight_r · span_r into `span`, as far as the codec goes.

        Args:
            span: a bucket of this worker's gradient.
            weight: factor of this worker's gradient.
            step: number of the round.

        Returns:
            The span, and what this worker has sent.

        Raises:
            PeerLostError, DeadlineError: names a rank; the group is broken.
            DataError: names a rank, whose part is none that the codec makes. Where that part was for this worker
                alone, the others learn that this one has left.
        """
        words, rank, size = self._part_words(len(span)), self._group.rank, self._group.size
        everything = self._parts[: words * size]
        parts = [self._parts[words * one : words * (one + 1)] for one in range(size)]
        bucket = _Bucket(span, [part.tensor for part in parts], self._slices(len(span)), step)
        await self._compute(lambda _: self._encode_own(bucket, weight), bucket, everything)
        if self._swaps is not None:
            await self._swaps.all_to_all(everything)
            await self._compute(lambda _: self._encode_sum(bucket), bucket, everything)
        await self._group.all_gather(everything)
        await self._compute(lambda _: self._take(bucket), bucket, everything)
        return span, parts[rank] if self._swaps is None else everything

    def _encode_own(self, bucket: _Bucket, weight: float) -> None:
        """Encodes what others need of this worker. In two steps that is not the slice that it sums itself."""
        values, rank = bucket.span.tensor, self._group.rank
        sound = finite(values)
        values.mul_(weight) if sound else values.fill_(math.nan)
        for one, (start, stop) in enumerate(bucket.slices):
            if (one == rank) is (self._swaps is None):
                self._encode(values[start:stop], bucket, one, sound)

    def _encode_sum(self, bucket: _Bucket) -> None:
        """Adds the others' parts to this worker's slice, and encodes that."""
        rank = self._group.rank
        total = bucket.span.tensor[slice(*bucket.slices[rank])]
        for one in range(self._group.size):
            if one != rank:
                self._decode(bucket, one, total, add=True)
        self._encode(total, bucket, rank, finite(total))

    def _take(self, bucket: _Bucket) -> None:
        """Decodes the sum of each slice, or adds up the parts of all."""
        total = bucket.span.tensor
        for one, (start, stop) in enumerate(bucket.slices):
            self._decode(bucket, one, total[start:stop], add=self._swaps is None and one > 0)

    def _encode(self, values: torch.Tensor, bucket: _Bucket, number: int, sound: bool) -> None:
        """Encodes the values of a slice into the part of this number, if they are finite."""
        into, at, first = bucket.parts[number], 1, bucket.span.start + bucket.slices[number][0]
        into[0] = 0.0 if sound else math.nan
        for start, stop in _blocks(len(values)) if sound else ():
            here = slice(first + start, first + stop)
            state = {name: kept.tensor[here] for name, kept in self._state.items()}
            encoded = into[at:].view(torch.uint8)[: self._codec.encoded_bytes(stop - start)]
            seed = seed_of(self._seed, bucket.step, here.start)
            self._codec.encode(values[start:stop], encoded, state, seed=seed)
            at += words_of(self._codec, stop - start)

    def _decode(self, bucket: _Bucket, number: int, into: torch.Tensor, *, add: bool) -> None:
        """Overwrites elements by what a part has, or adds that to them. NaN where its sender's were not finite."""
        part, at = bucket.parts[number], 1
        if math.isnan(part[0].item()):
            into.fill_(math.nan)
            return
        for start, stop in _blocks(len(into)):
            encoded = part[at:].view(torch.uint8)[: self._codec.encoded_bytes(stop - start)]
            try:
                self._decode_block(encoded, into[start:stop], add=add)
            except DataError as error:
                sender = self._group.names[number]
                raise DataError(f"the part of {sender} in step {bucket.step}: {error}") from error
            at += words_of(self._codec, stop - start)

    def _decode_block(self, encoded: torch.Tensor, into: torch.Tensor, *, add: bool) -> None:
        if not add:
            self._codec.decode(encoded, into)
        elif self._sparse is not None:
            places, values = self._sparse.entries(encoded, len(into))
            into[places] += values
        else:
            decoded = self._decoded.tensor[: len(into)]
            self._codec.decode(encoded, decoded)
            into.add_(decoded)

    async def _compute(self, work: Callable[[object], None], bucket: _Bucket, parts: Span) -> None:
        span = bucket.span
        kept = [one[span.start : span.stop] for one in self._state.values()]
        await self._runtime.compute(
            work,
            work=Work("reduce", elems=len(span)),
            writes=[span, parts, self._decoded.all, *kept],
            lane="exchange",
        )


@dataclass(frozen=True, slots=True)
class _Bucket:
    """A sum under way.

    Args:
        span: this worker's values; its start is their place in the flat vector. The sum takes their place.
        parts: by rank, (words,): what it has sent, or what is to be sent to it.
        slices: by rank, [start, stop) of the elements of the span that its part is of.
        step: number of the round.
    """

    span: Span
    parts: Sequence[torch.Tensor]
    slices: Sequence[tuple[int, int]]
    step: int


def _blocks(elems: int) -> Iterator[tuple[int, int]]:
    """[start, stop) of what is encoded at once."""
    for start in range(0, elems, BLOCK_ELEMS):
        yield start, min(start + BLOCK_ELEMS, elems)
