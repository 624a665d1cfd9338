"""`CodedSums`: sums of gradients in a group whose messages are encoded.

Encoded vectors cannot be summed directly. So either each worker gets the encoded parts of all, and adds them up:

    gathered        bucket g_r ──▶ w_r·g_r ──▶ encode ──▶ all-gather ──▶ Σ_r decode, in the order of ranks

or the sum is encoded again, as a reduce-scatter and an all-gather whose messages are encoded both times:

    in two steps    w_r·g_r ──▶ encode slice by slice ──▶ all-to-all ──▶ worker s: Σ_r decode of slice s
                    ──▶ encode ──▶ all-gather ──▶ decode

If a whole encoded bucket has C bytes, a worker sends (W - 1)·C with the first scheme and 2(W - 1)/W·C with the second,
where a ring sends 2(W - 1)/W·4N. Three workers or more use the second with codecs that have a code for each element
(`Codec.dense`); other codecs would drop further elements. All workers get the same bits with either.

Error feedback covers the second encoding too: a worker keeps what its slice s lost in its own residual, and adds it to
the next sum. So nothing is lost in either step (sent + residuals = input), and no further vector is needed.

What a user's loop sends behind its gradients, such as flags, is summed up as it is, without the codec.

A part begins with a status word: NaN means that a worker's gradient is not finite. Nothing of it enters the codec's
state, and the sum is NaN, so that all workers skip the round.

References: first scheme: Seide and others, 1-bit SGD, 2014. Second, with feedback: Tang and others, "1-bit Adam", 2021
(which keeps the error of the sum in a separate vector).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import torch

from gradstream.codec.base import DTYPE, WORD, Encoder, seed_of
from gradstream.codec.feedback import sparse_part
from gradstream.codec.low_rank import MatrixPlace, PowerSGD, orthonormal
from gradstream.collectives.group import Group, SwappingGroup, slice_of
from gradstream.errors import ConfigError, DataError
from gradstream.memory import Span, Vector
from gradstream.model.base import Layout, finite
from gradstream.runtime.base import Runtime, Work
from gradstream.worker.unsent_state import UnsentState

# ---- coded sums --------------------------------------------------------------------------

PART_WORDS = 64
"""Parts are multiples of this many words, so that the group's `slice_of` cuts between them."""
BLOCK_ELEMS = 1 << 20
"""The most elements encoded at once, so that their decoded values stay in the processor's cache."""


class CodedSums:
    """One worker's encoded sums.

    Args:
        runtime: runtime of the worker's node.
        group: the workers.
        bounds: [start, stop) of the buckets.
        encoder: this worker's encoder, whose codec state is kept from one group to the next.
        unsent: has that state.
        elems: number of elements that are encoded; those behind are not.

    Raises:
        ConfigError: encoding would take more bytes than it saves.
    """

    def __init__(
        self,
        runtime: Runtime,
        group: Group,
        bounds: Sequence[tuple[int, int]],
        encoder: Encoder,
        unsent: UnsentState,
        elems: int,
    ) -> None:
        codec = encoder.codec
        self._runtime = runtime
        self._group = group
        self._swaps: SwappingGroup | None = None
        if isinstance(group, SwappingGroup) and group.size > 2 and getattr(codec, "dense", False):
            self._swaps = group
        self._encoder = encoder
        self._sparse = sparse_part(codec)
        self._unsent = unsent
        self._elems = elems
        self._check_bytes(elems)
        most = max(stop - start for start, stop in bounds)
        self._parts = group.allocate(self._part_words(most) * group.size, WORD, "encoded")
        self._decoded: Vector = runtime.memory.allocate(min(most, BLOCK_ELEMS), DTYPE, "decoded")

    def _check_bytes(self, elems: int) -> None:
        codec, size, whole = self._encoder.codec, self._group.size, elems * DTYPE.itemsize
        coded = codec.encoded_bytes(elems)
        sent = 2 * (size - 1) * coded // size if self._swaps is not None else (size - 1) * coded
        if size > 1 and sent >= 2 * (size - 1) * whole // size:
            raise ConfigError(
                f"codec={codec} in a group of {size} workers would send {sent:,} bytes a step, where a ring "
                f"sends {2 * (size - 1) * whole // size:,}; take a smaller codec, or leave codec out"
            )

    # ---- parts ----------------------------------------------------------------------------

    def _slices(self, elems: int) -> list[tuple[int, int]]:
        """[start, stop) of the elements of a bucket that each rank's part covers."""
        size = self._group.size
        if self._swaps is None:
            return [(0, elems)] * size
        return [slice_of(elems, rank, size) for rank in range(size)]

    def _part_words(self, elems: int) -> int:
        longest = max(stop - start for start, stop in self._slices(elems))
        words = 1 + sum(self._encoder.words(stop - start) for start, stop in _blocks(longest))
        return -(-words // PART_WORDS) * PART_WORDS

    # ---- sums -----------------------------------------------------------------------------

    async def allreduce(self, span: Span, *, weight: float, step: int) -> list[Span]:
        """Sums up Σ_r weight_r · span_r into `span`, within the codec's precision.

        Args:
            span: a bucket of this worker's gradient.
            weight: factor of this worker's gradient.
            step: number of the round.

        Returns:
            The data that this worker has sent.

        Raises:
            PeerLostError, DeadlineError: names a rank; the group is broken.
            DataError: names a rank whose part cannot be decoded. If only this worker received that part, the
                others learn that this worker has left.
        """
        cut, sent = min(max(span.start, self._elems), span.stop), list[Span]()
        coded, exact = span.vector[span.start : cut], span.vector[cut : span.stop]
        if len(coded):
            sent.append(await self._allreduce_coded(coded, weight, step))
        if len(exact):
            sent.append(exact)
            total = await self._group.allreduce(exact, weight=weight)
            if total != exact:
                exact.tensor.copy_(total.tensor)
        return sent

    async def _allreduce_coded(self, span: Span, weight: float, step: int) -> Span:
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
        return parts[rank] if self._swaps is None else everything

    def _encode_own(self, bucket: _Bucket, weight: float) -> None:
        """Encodes what other workers need: with the second scheme, all but the slice that this worker sums."""
        values, rank = bucket.span.tensor, self._group.rank
        self._unsent.encodes(bucket.step, bucket.span.start, bucket.span.stop)
        sound = finite(values)
        values.mul_(weight) if sound else values.fill_(math.nan)
        for one, (start, stop) in enumerate(bucket.slices):
            if (one == rank) is (self._swaps is None):
                self._encode(values[start:stop], bucket, one, sound)

    def _encode_sum(self, bucket: _Bucket) -> None:
        """Adds the other workers' parts to this worker's slice, and encodes the sum."""
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
            end = at + self._encoder.words(stop - start)
            self._encoder.encode(values[start:stop], into[at:end], start=first + start, number=bucket.step)
            at = end

    def _decode(self, bucket: _Bucket, number: int, into: torch.Tensor, *, add: bool) -> None:
        """Overwrites elements with a decoded part, or adds it to them. NaN if the sender's were not finite."""
        part, at = bucket.parts[number], 1
        if math.isnan(part[0].item()):
            into.fill_(math.nan)
            return
        for start, stop in _blocks(len(into)):
            end = at + self._encoder.words(stop - start)
            try:
                self._decode_block(part[at:end], into[start:stop], add=add)
            except DataError as error:
                sender = self._group.names[number]
                raise DataError(f"the part of {sender} in step {bucket.step}: {error}") from error
            at = end

    def _decode_block(self, words: torch.Tensor, into: torch.Tensor, *, add: bool) -> None:
        if not add:
            self._encoder.decode(words, into)
        elif self._sparse is not None:
            places, values = self._sparse.entries(self._encoder.coded(words, len(into)), len(into))
            into[places] += values
        else:
            decoded = self._decoded.tensor[: len(into)]
            self._encoder.decode(words, decoded)
            into.add_(decoded)

    async def _compute(self, work: Callable[[object], None], bucket: _Bucket, parts: Span) -> None:
        span = bucket.span
        await self._runtime.compute(
            work,
            work=Work("reduce", elems=len(span)),
            writes=[span, parts, self._decoded.all, *self._encoder.kept(span.start, span.stop)],
            lane="exchange",
        )


@dataclass(frozen=True, slots=True)
class _Bucket:
    """A sum in progress.

    Args:
        span: this worker's values, overwritten with the sum; its start is their place in the flat vector.
        parts: by rank, (words,): what that rank has sent, or what is to be sent to it.
        slices: by rank, [start, stop) of the elements of the span that its part covers.
        step: number of the round.
    """

    span: Span
    parts: Sequence[torch.Tensor]
    slices: Sequence[tuple[int, int]]
    step: int


def _blocks(elems: int) -> Iterator[tuple[int, int]]:
    """[start, stop) of each piece that is encoded at once."""
    for start in range(0, elems, BLOCK_ELEMS):
        yield start, min(start + BLOCK_ELEMS, elems)


# ---- low rank sums -----------------------------------------------------------------------
# `LowRankSums`: sums of matrices in a group as products of two thin matrices; see `codec.low_rank`.
#
# All matrices of a bucket take two messages to each peer together, not two each: what the bucket has besides, biases
# for the most part, goes with the P. On a link of high latency, the number of messages is what counts.

Bucket = tuple[int, int]


def name_of(matrix: MatrixPlace) -> str:
    """The name of its Q."""
    return f"q-{matrix.start}"


class LowRankSums:
    """One worker's sums of matrices.

    Args:
        runtime: runtime of the worker's node.
        group: the workers.
        layout: layout of the model.
        buckets: [start, stop) of each bucket.
        codec: has the rank.
        seed: seed of the first Q, the same on all workers.
        unsent: what was dropped from the rounds before, and the Q of each matrix, by "q-<its first element>"; both
            continue from one group to the next. A newcomer's Q is another one until the end of its first exchange,
            from which all workers have the same.

    Attributes:
        layers: the matrices, in the order of the vector.
    """

    def __init__(
        self,
        runtime: Runtime,
        group: Group,
        layout: Layout,
        buckets: Iterable[Bucket],
        codec: PowerSGD,
        seed: int,
        unsent: UnsentState,
    ) -> None:
        self._runtime = runtime
        self._group = group
        self._rank = codec.rank
        self.layers: Sequence[MatrixPlace] = codec.matrices((slot.start, slot.shape) for slot in layout.slots)
        most = max(max(map(sum, self._sizes(bucket))) for bucket in buckets)
        self._thin = group.allocate(most, layout.dtype, "thin")
        self._unsent = unsent
        self._left, self._bases = unsent.vectors["residual"], unsent.bases
        for one in () if runtime.memory.shape_only else self.layers:
            if name_of(one) not in self._bases:
                self._bases[name_of(one)] = self._first(one, seed, layout.dtype)

    def _first(self, matrix: MatrixPlace, seed: int, dtype: torch.dtype) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed_of(seed, matrix.start))
        return torch.randn(matrix.columns, self._rank, generator=generator, dtype=dtype)

    def _parts(self, bucket: Bucket) -> tuple[list[MatrixPlace], list[Bucket]]:
        """The matrices that end in a bucket, and [start, stop) of its other elements."""
        here = [layer for layer in self.layers if layer.start < bucket[1] and bucket[0] < layer.stop]
        starts, ends = (
            [bucket[0], *(layer.stop for layer in here)],
            [*(layer.start for layer in here), bucket[1]],
        )
        besides = [(start, end) for start, end in zip(starts, ends, strict=True) if start < end]
        return [layer for layer in here if layer.stop <= bucket[1]], besides

    def _sizes(self, bucket: Bucket) -> tuple[list[int], list[int]]:
        """The number of elements of each part of the first sum, and of the second."""
        matrices, besides = self._parts(bucket)
        rows = [matrix.rows * self._rank for matrix in matrices]
        return [*rows, *(stop - start for start, stop in besides)], [
            matrix.columns * self._rank for matrix in matrices
        ]

    async def exchange(self, bucket: Bucket, vector: Vector, weight: float, *, step: int) -> list[Span]:
        """Puts P·Qᵀ ≈ Σ_r weight_r · M_r into the place of each matrix that ends in a bucket, and sums what is besides.

        Args:
            bucket: one of the buckets.
            vector: this worker's gradient.
            weight: factor of this worker's gradient. NaN for one that is not finite: the result is NaN then, at all
                workers, and what was skipped stays as it is.

            step: number of the round.

        Returns:
            What this worker has sent.

        Raises:
            PeerLostError, DeadlineError: names a rank; the group is broken.
        """
        matrices, besides = self._parts(bucket)
        firsts, seconds = self._sizes(bucket)
        work = _Product(matrices, vector, self._left, self._bases, weight)
        others = [vector[start:stop] for start, stop in besides]
        places = [vector[matrix.start : matrix.stop] for matrix in matrices]
        left = [self._left[matrix.start : matrix.stop] for matrix in matrices]
        elems = sum(map(len, [*places, *others]))
        sent = [part for part in (self._thin[: sum(firsts)], self._thin[: sum(seconds)]) if len(part)]

        def first(_: object) -> None:
            parts = _cut(sent[0].tensor, firsts)
            for one in matrices:
                self._unsent.encodes(step, one.start, one.stop, name_of(one))
            work.multiply(parts[: len(matrices)])
            for other, part in zip(others, parts[len(matrices) :], strict=True):
                torch.mul(other.tensor, weight, out=part)

        def second(_: object) -> None:
            parts = _cut(total.tensor, firsts)
            for other, part in zip(others, parts[len(matrices) :], strict=True):
                other.tensor.copy_(part)
            work.orthogonalize(parts[: len(matrices)])  # all, before the Q take their place
            if matrices:
                work.multiply_back(_cut(sent[1].tensor, seconds))

        if sent:
            await self._compute(first, elems, [*places, sent[0]], [*left, *others])
            total = await self._group.allreduce(sent[0])
            await self._compute(second, elems, [*sent[1:], *left, *others], places)
        if matrices:
            summed = await self._group.allreduce(sent[1])
            await self._compute(
                lambda _: work.put_back(_cut(summed.tensor, seconds)), elems, places, [summed]
            )
        return sent

    async def _compute(
        self, work: Callable[[object], object], elems: int, writes: Sequence[Span], reads: Sequence[Span]
    ) -> None:
        await self._runtime.compute(
            work,
            work=Work("reduce", elems=elems * self._rank),
            writes=writes,
            reads=reads,
            lane="exchange",
        )


def _cut(flat: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Parts of these numbers of elements, one after the other."""
    return [flat[start:stop] for start, stop in pairwise(accumulate(sizes, initial=0))]


@dataclass(frozen=True, slots=True)
class _Product:
    """The steps of `codec.low_rank` for some matrices.

    Args:
        matrices: the matrices.
        vector: this worker's gradient.
        left: what was dropped from the rounds before.
        bases: see `LowRankSums`.
        weight: see `LowRankSums.exchange`.
        found: the orthonormal P of each matrix whose sum is finite.
    """

    matrices: Sequence[MatrixPlace]
    vector: Vector
    left: Vector
    bases: dict[str, torch.Tensor]
    weight: float
    found: dict[MatrixPlace, torch.Tensor] = field(default_factory=dict)

    def multiply(self, out: Sequence[torch.Tensor]) -> None:
        """X ← weight·M + e;  P ← X·Q."""
        for matrix, p in zip(self.matrices, out, strict=True):
            if math.isnan(self.weight):
                p.fill_(math.nan)
                continue
            own = matrix.of(self.vector.tensor)
            own.mul_(self.weight).add_(matrix.of(self.left.tensor))
            torch.mm(own, self.bases[name_of(matrix)], out=p.view(matrix.rows, -1))

    def orthogonalize(self, sums: Sequence[torch.Tensor]) -> None:
        """P ← orthonormal(P)."""
        for matrix, p in zip(self.matrices, sums, strict=True):
            if torch.isfinite(p).all():
                self.found[matrix] = orthonormal(p.view(matrix.rows, -1))

    def multiply_back(self, out: Sequence[torch.Tensor]) -> None:
        """Q ← Xᵀ·P;  e ← X - P·Qᵀ."""
        for matrix, q in zip(self.matrices, out, strict=True):
            if matrix not in self.found:
                q.fill_(math.nan)
                continue
            own, basis = matrix.of(self.vector.tensor), self.found[matrix]
            mine = torch.mm(own.T, basis, out=q.view(matrix.columns, -1))
            torch.addmm(own, basis, mine.T, alpha=-1, out=matrix.of(self.left.tensor))

    def put_back(self, sums: Sequence[torch.Tensor]) -> None:
        """M ← P·Qᵀ, of the summed Q, which is kept for the next round."""
        for matrix, q in zip(self.matrices, sums, strict=True):
            into = matrix.of(self.vector.tensor)
            if matrix not in self.found:
                into.fill_(math.nan)
                continue
            kept = self.bases[name_of(matrix)] = q.view(matrix.columns, -1).clone()
            torch.mm(self.found[matrix], kept.T, out=into)
