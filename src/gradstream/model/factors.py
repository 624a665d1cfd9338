"""Factors: the gradient of a linear layer as the two thin matrices whose product it is.

    y = x Wᵀ + b on a batch of K rows:   ∇W = δᵀ x,   δ = ∂ℓ/∂y (K×M),   x (K×Q)

K(M+Q) numbers instead of M·Q. A model that offers them has an attribute `factored_layers` and takes
`kept` in its `gradient`; which layers are kept as factors is for others to decide.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

__all__ = ["FactorPair", "FactorPairs", "FactoredLayer", "factored_layers_of"]


@dataclass(frozen=True, slots=True)
class FactoredLayer:
    """A weight (M, Q) whose gradient may be the product of two factors.

    Args:
        name: of the weight.
        start: its first element in the flat vector.
        outputs, inputs: M and Q.
    """

    name: str
    start: int
    outputs: int
    inputs: int

    @property
    def elems(self) -> int:
        """M·Q."""
        return self.outputs * self.inputs

    @property
    def stop(self) -> int:
        """The end of its range in the flat vector."""
        return self.start + self.elems

    def factor_elems(self, rows: int) -> int:
        """K(M+Q)."""
        return rows * (self.outputs + self.inputs)

    def place(self, flat: torch.Tensor) -> torch.Tensor:
        """Its (M, Q) of a flat vector."""
        return flat[self.start : self.stop].view(self.outputs, self.inputs)


class FactorPair:
    """Where the factors of one layer's gradient land, of one minibatch.

    Args:
        layer: which.
        delta: (K, M).
        x: (K, Q).

    Attributes:
        state: "empty" until the backward pass gets there, and where the loss does not depend on the
            layer; "refused" where its gradient is not one product of a row per sample, and was formed.
    """

    __slots__ = ("delta", "layer", "state", "x")

    def __init__(self, layer: FactoredLayer, delta: torch.Tensor, x: torch.Tensor) -> None:
        self.layer = layer
        self.delta = delta
        self.x = x
        self.state: Literal["empty", "kept", "refused"] = "empty"

    def take(self, left: torch.Tensor, right: torch.Tensor) -> bool:
        """Keeps left @ right = δᵀ x, if it can.

        Args:
            left: (M, rows).
            right: (rows, Q).
        """
        if self.state != "empty" or len(right) != len(self.x):
            return False
        self.delta.copy_(left.t())
        self.x.copy_(right)
        self.state = "kept"
        return True

    def refuse(self, view: torch.Tensor) -> None:
        """There is more than one product: what was kept is formed in its place (M, Q) after all."""
        if self.state == "kept":
            torch.mm(self.delta.t(), self.x, out=view)
        self.state = "refused"

    def clear(self) -> None:
        """No gradient: the product is zero."""
        self.delta.zero_()
        self.x.zero_()


FactorPairs = Mapping[str, FactorPair]
"""By name of the weight."""


def factored_layers_of(model: object) -> Sequence[FactoredLayer]:
    """The layers whose factors a model can keep, in the order of the flat vector."""
    found: Sequence[FactoredLayer] = getattr(model, "factored_layers", ())
    return found
