"""A codec that rounds nothing: what goes wrong with it does so on its way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from gradstream.codec.base import NO_STATE, BuiltIn, State


@dataclass(frozen=True, slots=True)
class Exact(BuiltIn):
    """Each number in its own four bytes. The state counts how often each element was encoded."""

    state_names: ClassVar[tuple[str, ...]] = ("count",)

    dense: bool = True  # type: ignore[misc]  # an option here

    def encoded_bytes(self, elems: int) -> int:
        """See `Codec`."""
        return 4 * elems

    def encode(
        self, tensor: torch.Tensor, into: torch.Tensor, state: State = NO_STATE, *, seed: int = 0
    ) -> None:
        """See `Codec`."""
        del seed
        state["count"].add_(1)
        into.view(torch.float32).copy_(tensor)

    def decode(self, encoded: torch.Tensor, into: torch.Tensor) -> None:
        """See `Codec`."""
        into.copy_(encoded.view(torch.float32))
