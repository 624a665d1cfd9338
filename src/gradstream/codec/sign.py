"""`Sign`: one bit for each number, and one or two means for each block of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from gradstream.codec.base import NO_STATE, BuiltIn, State, pack, packed_bytes, unpack
from gradstream.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Sign(BuiltIn):
    """The sign of each number, and the mean size of the numbers.

    ::

        x ≈ sign(x) · mean |x|                                    1 bit an element, and 4 bytes a block
        x ≈ mean of the numbers that have the sign of x           1 bit an element, and 8 bytes a block    two_means

    Without `ErrorFeedback` around it, it does not converge where the signs of many small numbers outweigh a few large
    ones.

    Args:
        block: elements that share a mean, a multiple of 8; None: all elements.
        two_means: one mean for positive numbers, another one for negative ones.

    Raises:
        ConfigError: another block.

    Reference:
        Karimireddy, Rebjock, Stich, Jaggi, Error feedback fixes signSGD and other gradient compression schemes, 2019.
        With `two_means`: Seide, Fu, Droppo, Li, Yu, 1-bit stochastic gradient descent, 2014, whose blocks are the
        columns of weight matrices.
    """

    dense: ClassVar[bool] = True

    block: int | None = None
    two_means: bool = False

    def __post_init__(self) -> None:
        if self.block is not None and (self.block < 8 or self.block % 8):
            raise ConfigError(f"Sign: block is {self.block!r}; expected a multiple of 8, or None")

    def encoded_bytes(self, elems: int) -> int:
        """See `Codec`."""
        return self._means_bytes(elems) + packed_bytes(elems, 1)

    def encode(
        self, tensor: torch.Tensor, into: torch.Tensor, state: State = NO_STATE, *, seed: int = 0
    ) -> None:
        """See `Codec`."""
        del state, seed
        if not len(tensor):
            return
        size = self._means_bytes(len(tensor))
        negative = torch.from_numpy(tensor.numpy() < 0)  # ten times as fast as torch's comparison
        means = into[:size].view(torch.float32).view(-1, 2 if self.two_means else 1)
        for elems, blocks in self._blocks(len(tensor)):
            numbers = tensor[elems].view(blocks.stop - blocks.start, -1)
            if self.two_means:
                below, total = numbers.clamp(max=0).sum(1), numbers.sum(1)
                count = negative[elems].view(numbers.shape).view(torch.uint8).sum(1)
                means[blocks, 0] = (total - below) / (numbers.shape[1] - count).clamp_(min=1)
                means[blocks, 1] = -below / count.clamp_(min=1)
            else:
                means[blocks, 0] = numbers.abs().sum(1) / numbers.shape[1]
        pack(negative.view(torch.uint8), 1, into[size:])

    def decode(self, encoded: torch.Tensor, into: torch.Tensor) -> None:
        """See `Codec`."""
        if not len(into):
            return
        size = self._means_bytes(len(into))
        means = encoded[:size].view(torch.float32).view(-1, 2 if self.two_means else 1)
        into.copy_(unpack(encoded[size:], 1, len(into)))
        for elems, blocks in self._blocks(len(into)):
            numbers = into[elems].view(blocks.stop - blocks.start, -1)
            above, below = means[blocks, :1], means[blocks, -1:]
            numbers.mul_(-above - below).add_(above)  # 0 and 1 become the two means

    def _blocks(self, elems: int) -> Iterator[tuple[slice, slice]]:
        """Whole blocks, and then what is left: elements and blocks."""
        block = self.block or elems
        whole = elems // block
        if whole:
            yield slice(0, whole * block), slice(0, whole)
        if whole * block < elems:
            yield slice(whole * block, elems), slice(whole, whole + 1)

    def _means_bytes(self, elems: int) -> int:
        blocks = -(-elems // (self.block or max(1, elems)))
        return blocks * (8 if self.two_means else 4)
