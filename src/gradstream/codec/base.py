"""`Codec`: how flat tensors are made smaller for their way between two processes, and nearly whole again behind it.

The encoded size follows from the number of elements alone, so that both sides have the memory beforehand.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import torch

DTYPE = torch.float32
"""The dtype of all tensors that are encoded."""

NO_STATE: Mapping[str, torch.Tensor] = {}
"""The state of a codec that keeps nothing from one tensor to the next."""


class Codec(Protocol):
    """Encodes flat float32 tensors. A codec is a frozen dataclass of its options.

    Attributes:
        linear: encoded tensors of equal seed have the same elements in the same scale, so that an allreduce may sum
            them as they are. Those of other codecs are gathered, and each is decoded by itself.
        unbiased: the mean over all seeds of what is decoded is the tensor itself.
        dense: it has a code for each element, so that a sum of what is decoded can be encoded again. Codecs of your own
            that do not say so count as others.
        state_names: vectors that the sender keeps from one tensor to the next, zero at the start, each as long as the
            tensor. `encode` changes them.
    """

    @property
    def linear(self) -> bool:
        """See above."""
        ...

    @property
    def unbiased(self) -> bool:
        """See above."""
        ...

    @property
    def state_names(self) -> tuple[str, ...]:
        """See above."""
        ...

    def encoded_bytes(self, elems: int) -> int:
        """The size in bytes of so many encoded elements."""
        ...

    def encode(
        self,
        tensor: torch.Tensor,
        into: torch.Tensor,
        state: Mapping[str, torch.Tensor] = NO_STATE,
        *,
        seed: int = 0,
    ) -> None:
        """Encodes elements.

        Args:
            tensor: (elems,) float32, finite.
            into: (`encoded_bytes(elems)`,) uint8, overwritten. It begins at a multiple of 4 bytes.
            state: by name, (elems,) float32 each, changed.
            seed: of the random numbers, where the codec needs some, in [0, 2^63).
        """
        ...

    def decode(self, encoded: torch.Tensor, into: torch.Tensor) -> None:
        """Overwrites `into`, (elems,) float32, with what `encode` has been given, or nearly that.

        Raises:
            DataError: the bytes are none that `encode` makes. They may have come from anywhere. Whether numbers are
                finite is left to the caller.
        """
        ...


@runtime_checkable
class SparseCodec(Protocol):
    """What a codec has that sends few of the elements, so that nobody goes through the zeros between them."""

    def entries(self, encoded: torch.Tensor, elems: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What `decode` would write: places (n,) int64 in [0, elems), each once, and values (n,) float32.

        Raises:
            DataError: as `decode`.
        """
        ...
