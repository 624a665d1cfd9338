"""`Codec`: compresses flat tensors for sending, and restores them approximately at the receiver.

The encoded size depends only on the number of elements, so that both sides can allocate memory beforehand.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import ClassVar, Protocol, runtime_checkable

import numpy as np
import torch

from gradstream.errors import ConfigError
from gradstream.memory import Span, Vector

# ---- base --------------------------------------------------------------------------------

DTYPE = torch.float32
"""The dtype of all tensors that are encoded."""

State = Mapping[str, torch.Tensor]
"""A codec's state vectors, kept from one tensor to the next, by name."""

NO_STATE: State = {}
"""The state of a codec that keeps nothing from one tensor to the next."""


class Codec(Protocol):
    """Encodes flat float32 tensors. A codec is a frozen dataclass of its options.

    Attributes:
        unbiased: the decoded tensor equals the original in the mean over all seeds.
        dense: it has a code for each element, so that a sum of decoded tensors can be encoded again. This decides how
            sums of three workers or more travel in a group: see `worker.group.coded_sums`. False for codecs that do
            not define it.
        state_names: vectors that the sender keeps from one tensor to the next, zero at the start, each as long as the
            tensor. `encode` changes them.
    """

    @property
    def unbiased(self) -> bool:
        """See above."""
        ...

    @property
    def state_names(self) -> tuple[str, ...]:
        """See above."""
        ...

    def encoded_bytes(self, elems: int) -> int:
        """The size in bytes of this many encoded elements."""
        ...

    def encode(
        self, tensor: torch.Tensor, into: torch.Tensor, state: State = NO_STATE, *, seed: int = 0
    ) -> None:
        """Encodes elements.

        Args:
            tensor: (elems,) float32, finite.
            into: (`encoded_bytes(elems)`,) uint8, overwritten. It begins at a multiple of 4 bytes.
            state: by name, (elems,) float32 each, changed.
            seed: seed of the codec's random numbers, in [0, 2^63).
        """
        ...

    def decode(self, encoded: torch.Tensor, into: torch.Tensor) -> None:
        """Overwrites `into`, (elems,) float32, with the tensor that was encoded, or nearly that.

        Raises:
            DataError: `encode` cannot have made these bytes, which come from the network. Whether numbers are finite
                is left to the caller.
        """
        ...


class BuiltIn:
    """Defaults of most codecs of this package; see `Codec`."""

    __slots__ = ()

    unbiased: ClassVar[bool] = False
    dense: ClassVar[bool] = False
    state_names: ClassVar[tuple[str, ...]] = ()


@runtime_checkable
class SparseCodec(Protocol):
    """A codec that sends few of the elements, so that readers can skip the zeros between them."""

    def entries(self, encoded: torch.Tensor, elems: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What `decode` would write: places (n,) int64 in [0, elems), each once, and values (n,) float32.

        Raises:
            DataError: as `decode`.
        """
        ...


# ---- encoder -----------------------------------------------------------------------------

WORD = torch.float32
"""The dtype of encoded tensors for carriers: opaque words of 4 bytes."""


class Encoder:
    """The encoder of one sender, or decoder of one receiver: a codec with its random numbers and state.

    Args:
        codec: the codec.
        dtype: dtype of the model.
        seed: seed of the codec's random numbers, different for each sender.
        state: the codec's state for a flat vector, by name.

    Raises:
        ConfigError: codecs do not support the model's dtype.
    """

    def __init__(
        self, codec: Codec, dtype: torch.dtype, seed: str = "", state: Mapping[str, Vector] | None = None
    ) -> None:
        if dtype != DTYPE:
            raise ConfigError(
                f"codec={codec}: the model has elements of {dtype}; expected {DTYPE}, the only ones that are encoded: "
                "leave codec out"
            )
        self.codec = codec
        self._seed = seed
        self._state = state or {}

    def words(self, elems: int) -> int:
        """The number of words that this many encoded elements fill."""
        return -(-self.codec.encoded_bytes(elems) // WORD.itemsize)

    def kept(self, start: int, stop: int) -> list[Span]:
        """The state that `encode` changes for elements [start, stop) of the flat vector."""
        return [vector[start:stop] for vector in self._state.values()]

    def encode(
        self,
        elements: torch.Tensor,
        into: torch.Tensor,
        *,
        start: int = 0,
        number: int = 0,
        part: int | None = None,
    ) -> None:
        """Encodes a part of the flat vector.

        Args:
            elements: (n,), finite.
            into: (`words(n)`,), overwritten.
            start: place of the first element in the flat vector.
            number: number of the push or round.
            part: number of the part, for its random numbers; by default `start`.
        """
        size, coded = self.codec.encoded_bytes(len(elements)), into.view(torch.uint8)
        coded[size:].zero_()
        state = {name: one.tensor[start : start + len(elements)] for name, one in self._state.items()}
        seed = self.seed(number, start if part is None else part)
        self.codec.encode(elements, coded[:size], state, seed=seed)

    def seed(self, number: int, part: int) -> int:
        """The seed of a part."""
        return seed_of(self._seed, number, part)

    def coded(self, words: torch.Tensor, elems: int) -> torch.Tensor:
        """The bytes of this many encoded elements in words."""
        return words.view(torch.uint8)[: self.codec.encoded_bytes(elems)]

    def decode(self, words: torch.Tensor, into: torch.Tensor) -> None:
        """Decodes words that have the right number. Does nothing where memory has no elements.

        Raises:
            DataError: the codec cannot have made them.
        """
        if not words.is_meta:
            self.codec.decode(self.coded(words, len(into)), into)

    def misfit(self, words: torch.Tensor | None, elems: int) -> str:
        """Why received words do not encode this many elements; "" if they do."""
        expected = self.words(elems)
        if words is not None and (words.dtype, len(words)) == (WORD, expected):
            return ""
        return f"{got_words(words)}, expected {expected} words of {WORD}"


def got_words(words: torch.Tensor | None) -> str:
    """Describes what was received instead of encoded elements."""
    return "nothing" if words is None else f"{len(words)} words of {words.dtype}"


def seed_of(*parts: object) -> int:
    """A number in [0, 2^63) that depends only on these parts, on every machine."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


# ---- bits --------------------------------------------------------------------------------
# Small whole numbers in few bits each.

TILE_ELEMS = 1 << 16
"""Codecs go through a tensor in pieces of this many elements, which stay in the cache from one pass to the next."""


def tiles(elems: int, block: int, bits: int) -> Iterator[tuple[slice, slice, slice]]:
    """Slices of elements, blocks, and bytes of codes of `bits`: some whole blocks at a time, and then the rest."""
    whole, size = elems // block * block, max(1, TILE_ELEMS // block) * block
    for start in [*range(0, whole, size), *([whole] if whole < elems else [])]:
        stop = min(start + size, whole) if start < whole else elems
        yield (
            slice(start, stop),
            slice(start // block, -(-stop // block)),
            slice(start * bits // 8, packed_bytes(stop, bits)),
        )


def packed_bytes(elems: int, bits: int) -> int:
    """The size in bytes of this many numbers of 1, 2, 4 or 8 bits."""
    return -(-elems * bits // 8)


def as_codes(numbers: torch.Tensor) -> torch.Tensor:
    """Whole numbers from 0 to 127 as flat uint8, via int8, to which torch converts floats six times as fast."""
    return numbers.to(torch.int8).view(torch.uint8).view(-1)


def pack(codes: torch.Tensor, bits: int, into: torch.Tensor) -> None:
    """Writes numbers. Byte j has those at j, j + m, j + 2m, ... of m bytes, the first in its lowest bits.

    Numbers at a distance go into one byte, so that each step goes through contiguous memory. Of one bit, those of a
    byte are neighbours.

    Args:
        codes: (n,) uint8, each below 2^bits.
        bits: 1, 2, 4 or 8.
        into: (`packed_bytes(n, bits)`,) uint8, overwritten.
    """
    if bits == 1:
        into.numpy()[:] = np.packbits(codes.numpy(), bitorder="little")
        return
    pieces = _pieces(codes, len(into))
    if pieces:
        into.copy_(pieces[0])
    for place, piece in enumerate(pieces[1:], start=1):
        into[: len(piece)].bitwise_or_(piece.bitwise_left_shift(bits * place))


def unpack(packed: torch.Tensor, bits: int, elems: int) -> torch.Tensor:
    """The numbers that `pack` has written, (elems,) uint8; of 8 bits the memory itself."""
    if bits == 8:
        return packed
    if bits == 1:
        return torch.from_numpy(np.unpackbits(packed.numpy(), count=elems, bitorder="little"))
    mask, codes = (1 << bits) - 1, torch.empty(elems, dtype=torch.uint8)
    for place, piece in enumerate(_pieces(codes, len(packed))):
        torch.bitwise_right_shift(packed[: len(piece)], bits * place, out=piece).bitwise_and_(mask)
    return codes


def _pieces(codes: torch.Tensor, length: int) -> tuple[torch.Tensor, ...]:
    return torch.split(codes, length) if length else ()
