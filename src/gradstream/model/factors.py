"""Sufficient factors: the gradient of a linear layer as two thin matrices, whose product it is.

    y = x Wᵀ + b on a batch of K rows:   ∇W = δᵀ x,   δ = ∂ℓ/∂y (K×M),   x (K×Q)

These are K(M+Q) numbers instead of M·Q. A model that offers them has an attribute `factored_layers`, and its
`gradient` takes `factors`. The strategy decides which layers are exchanged as factors.

Reference:
    Zhang and others, Poseidon: an efficient communication architecture for distributed deep learning on GPU
    clusters, 2017.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True, slots=True)
class FactoredLayer:
    """A weight (M, Q) whose gradient may be the product of two factors.

    Args:
        name: name of the weight.
        start: first element of the weight in the flat vector.
        outputs, inputs: M and Q.
    """

    name: str
    start: int
    outputs: int
    inputs: int

    @property
    def elems(self) -> int:
        """Elements of the weight, M·Q."""
        return self.outputs * self.inputs

    @property
    def stop(self) -> int:
        """End of the weight in the flat vector."""
        return self.start + self.elems

    def factor_elems(self, rows: int) -> int:
        """Elements of both factors for K rows, K(M+Q)."""
        return rows * (self.outputs + self.inputs)

    def place(self, flat: torch.Tensor) -> torch.Tensor:
        """The view (M, Q) of the weight in a flat vector."""
        return flat[self.start : self.stop].view(self.outputs, self.inputs)


class FactorPair:
    """Holds the factors of one layer's gradient, for one minibatch.

    Args:
        layer: the layer.
        delta: (K, M), δ of the formula above.
        x: (K, Q).

    Attributes:
        state: "empty" before the backward pass reaches the layer, or if the loss does not depend on it;
            "kept" with factors; "refused" where the gradient is not one product with a row per sample, and
            was computed instead.
    """

    __slots__ = ("delta", "layer", "state", "x")

    def __init__(self, layer: FactoredLayer, delta: torch.Tensor, x: torch.Tensor) -> None:
        self.layer = layer
        self.delta = delta
        self.x = x
        self.state: Literal["empty", "kept", "refused"] = "empty"

    def take(self, left: torch.Tensor, right: torch.Tensor) -> bool:
        """Keeps the factors of left @ right = δᵀ x. Returns False if it cannot.

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
        """Computes the kept product into `view` (M, Q), since another contribution follows."""
        if self.state == "kept":
            torch.mm(self.delta.t(), self.x, out=view)
        self.state = "refused"

    def clear(self) -> None:
        """Sets both factors to zero. Called where the loss does not depend on the layer."""
        self.delta.zero_()
        self.x.zero_()


FactorPairs = Mapping[str, FactorPair]
"""The factors of several layers, by the name of the weight."""


def factored_layers_of(model: object) -> Sequence[FactoredLayer]:
    """The layers whose factors a model offers, in the order of the flat vector."""
    found: Sequence[FactoredLayer] = getattr(model, "factored_layers", ())
    return found
