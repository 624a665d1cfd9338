"""The shards' half of a pass over the data: portions of a gradient are added up, and no parameter changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch


@dataclass(frozen=True, slots=True)
class PassSum:
    """s ← s + g for each portion g, with what rounding loses of it in a second vector. An `Optimizer`.

    ::

        t ← s + g;  b ← t - s;  l ← l + ((s - (t - b)) + (g - b));  s ← t        (Knuth's TwoSum)

    s + l is the sum in about twice the precision of an element. So the rounded sum hardly depends on the order of
    the portions: it differs, in its last bit, only where the sum lies within about 2^-50 of the middle between two
    neighbouring float64 numbers (2^-22 in float32), relative to their distance.

    Args:
        vectors: names of the other vectors of the method, which only commands change.
        lr: without effect.

    Reference: Knuth, The Art of Computer Programming, volume 2, section 4.2.2; Ogita, Rump, Oishi, "Accurate sum and
    dot product", 2005, algorithm 4.4 (Sum2).
    """

    title: ClassVar[str] = "the method's own"
    """What reports call it."""

    vectors: tuple[str, ...] = ()
    lr: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "vectors", tuple(self.vectors))  # JSON has lists

    @property
    def state_names(self) -> tuple[str, ...]:
        """s, l, and the vectors of the method: all of them are in checkpoints, backups and handovers."""
        return ("sum", "low", *self.vectors)

    @property
    def state_init(self) -> float:
        """0."""
        return 0.0

    def apply(
        self,
        parameters: torch.Tensor,
        gradient: torch.Tensor,
        state: Mapping[str, torch.Tensor],
        *,
        lr: float,
        step: int,
    ) -> None:
        """Adds a portion, in place; leaves the parameters as they are."""
        total, low = state["sum"], state["low"]
        new = total + gradient
        back = new - total
        low.add_((total - (new - back)).add_(gradient - back))
        total.copy_(new)
