"""`DGC`: the largest numbers of a momentum that each worker keeps for itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from gradstream.codec.base import NO_STATE
from gradstream.codec.sparse import TopK, check_density, largest, num_kept
from gradstream.errors import ConfigError


@dataclass(frozen=True, slots=True)
class DGC:
    """Deep gradient compression: the momentum of SGD on the worker's side, and `TopK` of its sum.

    ::

        u ← momentum · u + g;   v ← v + u;   send the k largest of v;   there, u ← 0 and v ← 0

    Momentum correction: what waits in v has gone through the momentum, so it arrives as it would have without
    compression. Factor masking, u ← 0: a number that was sent does not go on in the direction of long ago. The run's
    optimizer must have no momentum of its own. A density of 0.001 needs a beginning with larger ones: phases of the
    job with 0.25, 0.0625, 0.015625 and 0.004 (`gs.Phase`).

    Args:
        density: k = ⌈density · elements⌉.
        momentum: memory of u, in [0, 1).

    Raises:
        ConfigError: a value is out of its range.

    Reference:
        Lin, Han, Mao, Wang, Dally, Deep gradient compression: reducing the communication bandwidth for distributed
        training, 2018.
    """

    linear: ClassVar[bool] = False
    unbiased: ClassVar[bool] = False

    density: float = 0.001
    momentum: float = 0.9

    def __post_init__(self) -> None:
        check_density("DGC", self.density)
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"DGC: momentum is {self.momentum!r}; expected a number in [0, 1)")

    @property
    def state_names(self) -> tuple[str, ...]:
        """The momentum u, and the sum v of what was not sent."""
        return ("velocity", "residual")

    def encoded_bytes(self, elems: int) -> int:
        """See `Codec`."""
        return TopK(self.density).encoded_bytes(elems)

    def encode(
        self,
        tensor: torch.Tensor,
        into: torch.Tensor,
        state: Mapping[str, torch.Tensor] = NO_STATE,
        *,
        seed: int = 0,
    ) -> None:
        """See `Codec`."""
        del seed
        velocity, residual = state["velocity"], state["residual"]
        residual.add_(velocity.mul_(self.momentum).add_(tensor))
        places = largest(residual, num_kept(self.density, len(tensor)))
        TopK.put(residual, places, into)
        residual[places] = 0.0
        velocity[places] = 0.0

    def decode(self, encoded: torch.Tensor, into: torch.Tensor) -> None:
        """See `Codec`."""
        TopK(self.density).decode(encoded, into)

    def entries(self, encoded: torch.Tensor, elems: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See `SparseCodec`."""
        return TopK(self.density).entries(encoded, elems)
