"""`TopK` and `RandomK`: a few of the numbers, and no others."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from gradstream.codec.base import NO_STATE, BuiltIn, State
from gradstream.errors import ConfigError, DataError

# ---- sparse ------------------------------------------------------------------------------

SAMPLE = 1 << 12
"""Elements from which the size of the k-th largest is guessed."""


def check_density(codec: str, density: float) -> None:
    """Raises ConfigError unless a share of elements is in (0, 1]."""
    if not 0 < density <= 1:
        raise ConfigError(f"{codec}: density is {density!r}; expected a share of the elements in (0, 1]")


def num_kept(density: float, elems: int) -> int:
    """k: the number of elements that are sent."""
    return min(elems, max(1, math.ceil(density * elems))) if elems else 0


def largest(tensor: torch.Tensor, k: int) -> torch.Tensor:
    """Places of the k elements of largest absolute value, (k,) int64, in order.

    A threshold that a sample gives leaves a few candidates, and these are sorted: one pass over the memory, and not
    the search through all of it. Which of several equal elements are among them is not said.
    """
    size = tensor.abs()
    step = len(tensor) // SAMPLE
    if step >= 2 and k * step < len(tensor):
        sample = size[::step]
        wanted = min(len(sample), max(8, math.ceil(1.25 * k / step)))
        threshold = float(torch.topk(sample, wanted).values[-1])
        # NumPy's comparison and search are five times as fast as torch's.
        candidates = torch.from_numpy(np.flatnonzero(size.numpy() >= np.float32(threshold)))
        if k <= len(candidates) <= 4 * k + 4 * SAMPLE:
            chosen = torch.topk(size[candidates], k, sorted=False).indices
            return candidates[chosen].sort().values
    return torch.topk(size, k, sorted=False).indices.sort().values


@dataclass(frozen=True, slots=True)
class TopK(BuiltIn):
    """The k numbers of largest absolute value, with their places: 8k bytes.

    What is not sent is lost, and the sum over all steps with it, unless `ErrorFeedback` is around it, or it is `DGC`.

    Args:
        density: k = ⌈density · elements⌉.

    Raises:
        ConfigError: not in (0, 1].

    Reference:
        Aji, Heafield, Sparse communication for distributed gradient descent, 2017.

    Example:
        >>> codec = gs.codecs.TopK(density=0.5)
        >>> into, decoded = torch.empty(codec.encoded_bytes(4), dtype=torch.uint8), torch.empty(4)
        >>> codec.encode(torch.tensor([1.0, -3.0, 0.5, 2.0]), into)
        >>> codec.decode(into, decoded)
        >>> decoded
        tensor([ 0., -3.,  0.,  2.])
    """

    density: float = 0.01

    def __post_init__(self) -> None:
        check_density("TopK", self.density)

    def encoded_bytes(self, elems: int) -> int:
        """See `Codec`."""
        return 8 * num_kept(self.density, elems)

    def encode(
        self, tensor: torch.Tensor, into: torch.Tensor, state: State = NO_STATE, *, seed: int = 0
    ) -> None:
        """See `Codec`."""
        del state, seed
        self.put(tensor, largest(tensor, num_kept(self.density, len(tensor))), into)

    @staticmethod
    def put(tensor: torch.Tensor, places: torch.Tensor, into: torch.Tensor) -> None:
        """Writes some elements, with their places."""
        numbers, values = into.view(2, -1).unbind() if len(into) else (into, into)
        numbers.view(torch.int32).copy_(places)
        torch.index_select(tensor, 0, places, out=values.view(torch.float32))

    def decode(self, encoded: torch.Tensor, into: torch.Tensor) -> None:
        """See `Codec`."""
        places, values = self.entries(encoded, len(into))
        into.zero_()
        into[places] = values

    def entries(self, encoded: torch.Tensor, elems: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See `SparseCodec`."""
        if not len(encoded):
            return torch.empty(0, dtype=torch.int64), torch.empty(0)
        numbers, values = encoded.view(2, -1).unbind()
        places = numbers.view(torch.int32).long()
        if int(places.min()) < 0 or int(places.max()) >= elems:
            raise DataError(
                f"an element at {int(places.max()) if int(places.min()) >= 0 else int(places.min())}; expected "
                f"places from 0 to {elems - 1}"
            )
        return places, values.view(torch.float32)


@dataclass(frozen=True, slots=True)
class RandomK:
    """One number of each of k ranges of equal length, at a place that the seed decides: 4k + 8 bytes.

    Senders with the same seed send the same places, so that their sum is that of k numbers.

    Args:
        density: k = ⌈density · elements⌉.
        scaled: sends each number times the length of its range, so that the mean over all seeds is the tensor.
            Leave it False within `ErrorFeedback`, which needs numbers as they are.

    Raises:
        ConfigError: not in (0, 1].

    Reference:
        Stich, Cordonnier, Jaggi, Sparsified SGD with memory, 2018. There, the k places are drawn from all.
    """

    state_names: ClassVar[tuple[str, ...]] = ()

    density: float = 0.01
    scaled: bool = False

    def __post_init__(self) -> None:
        check_density("RandomK", self.density)

    @property
    def unbiased(self) -> bool:
        """See `Codec`."""
        return self.scaled

    def encoded_bytes(self, elems: int) -> int:
        """See `Codec`."""
        return 8 + 4 * num_kept(self.density, elems)

    def encode(
        self, tensor: torch.Tensor, into: torch.Tensor, state: State = NO_STATE, *, seed: int = 0
    ) -> None:
        """See `Codec`."""
        del state
        places, lengths = self._places(len(tensor), seed)
        into[:4].view(torch.int32)[0] = seed & 0x7FFFFFFF
        into[4:8].view(torch.int32)[0] = seed >> 31 & 0x7FFFFFFF
        values = into[8:].view(torch.float32)
        torch.index_select(tensor, 0, places, out=values)
        if self.scaled:
            values.mul_(lengths)

    def decode(self, encoded: torch.Tensor, into: torch.Tensor) -> None:
        """See `Codec`."""
        places, values = self.entries(encoded, len(into))
        into.zero_()
        into[places] = values

    def entries(self, encoded: torch.Tensor, elems: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See `SparseCodec`."""
        low, high = encoded[:4].view(torch.int32).item(), encoded[4:8].view(torch.int32).item()
        if low < 0 or high < 0:
            raise DataError(f"a seed of halves {low} and {high}; expected no negative ones")
        places, _ = self._places(elems, int(low) | int(high) << 31)
        return places, encoded[8:].view(torch.float32)

    def _places(self, elems: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Places, and the lengths of their ranges."""
        k = num_kept(self.density, elems)
        bounds = torch.arange(k + 1, dtype=torch.int64).mul_(elems).div_(max(k, 1), rounding_mode="floor")
        lengths = bounds[1:] - bounds[:-1]
        draws = torch.rand(k, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        return bounds[:-1] + (draws * lengths).long(), lengths


# ---- dgc ---------------------------------------------------------------------------------
# `DGC`: the largest numbers of a momentum that each worker keeps for itself.


@dataclass(frozen=True, slots=True)
class DGC(BuiltIn):
    """Deep gradient compression: the momentum of SGD on the worker's side, and `TopK` of its sum.

    ::

        u ← momentum · u + g;   v ← v + u;   send the k largest of v;   there, u ← 0 and v ← 0

    Momentum correction: what waits in v has gone through the momentum, so it arrives as it would have without
    compression. Factor masking, u ← 0: a number that was sent does not continue in the direction of long ago. The run's
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

    state_names: ClassVar[tuple[str, ...]] = ("velocity", "residual")  # u, and the sum v of what was not sent

    density: float = 0.001
    momentum: float = 0.9

    def __post_init__(self) -> None:
        check_density("DGC", self.density)
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"DGC: momentum is {self.momentum!r}; expected a number in [0, 1)")

    def encoded_bytes(self, elems: int) -> int:
        """See `Codec`."""
        return TopK(self.density).encoded_bytes(elems)

    def encode(
        self, tensor: torch.Tensor, into: torch.Tensor, state: State = NO_STATE, *, seed: int = 0
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
