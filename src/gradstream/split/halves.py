"""A stage's backward pass in two halves: gradients of its inputs, and later those of its weights.

    y = f(x, w):   first half  ∂L/∂x, and ∂L/∂y of each operation with weights      second half  ∂L/∂w = ∂L/∂y · ∂y/∂w

Other parts wait for the first half alone (Qi, Wan, Huang and Lin, "Zero bubble pipeline parallelism", 2023). The second
half begins at each operation's own result, so it computes nothing again. The weights of several operations of the stage
have their gradients in the first half: from the last operation to the first the same path would be gone twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradstream.model.backprop import Sink
from gradstream.split.graph import Piece


@dataclass(frozen=True, slots=True)
class Use:
    """An operation that reads weights.

    Args:
        results: its results.
        pieces: the weights.
        inputs: (..., I) x of a wide linear layer y = x Wᵀ + b, whose pieces are W and b; None for others.
        version: of `inputs`. If something has written to them since, autograd is asked, and raises its error.
    """

    results: Sequence[Tensor]
    pieces: Sequence[Piece]
    inputs: Tensor | None = None
    version: int = 0

    @property
    def is_product(self) -> bool:
        """Whether the weight's gradient is (dL/dy)ᵀ x, with x as the operation has read it."""
        return self.inputs is not None and self.inputs._version == self.version


@dataclass(frozen=True, slots=True)
class LateWeights:
    """The second half.

    Args:
        leaves: the weights.
        known: gradients of weights that the first half has given.
        uses: operations whose weights come now, each with the gradients of its results.
    """

    leaves: Mapping[Piece, Tensor]
    known: Mapping[Piece, Tensor]
    uses: Sequence[tuple[Use, Sequence[Tensor]]]

    def add_to(self, sinks: Mapping[Piece, Sink]) -> None:
        """Adds the gradient of each weight on which the outputs depend to its sink. To be called once.

        That of a wide linear layer has no tensor of its own, as in `model.wide_linear`.
        """
        for piece, one in self.known.items():
            sinks[piece].add(one)
        for use, gradients in self.uses:
            if use.is_product:
                assert use.inputs is not None
                (gradient,), (weight, *biases) = gradients, use.pieces
                rows = gradient.reshape(-1, gradient.shape[-1])  # (N, O)
                sinks[weight].add_product(rows.t(), use.inputs.detach().reshape(-1, use.inputs.shape[-1]))
                for bias in biases:
                    sinks[bias].add(rows.sum(0))
                continue
            weights = [self.leaves[piece] for piece in use.pieces]
            found: Sequence[Tensor | None] = torch.autograd.grad(
                use.results, weights, gradients, retain_graph=True, allow_unused=True
            )
            for piece, late in zip(use.pieces, found, strict=True):
                if late is not None:
                    sinks[piece].add(late)


def first_half(
    roots: Sequence[Tensor],
    gradients: Sequence[Tensor],
    inputs: Mapping[str, Tensor],
    leaves: Mapping[Piece, Tensor],
    uses: Sequence[Use],
) -> tuple[dict[str, Tensor], LateWeights]:
    """Computes the gradients of the inputs.

    Args:
        roots: outputs of the stage.
        gradients: their gradients.
        inputs: inputs that have gradients, by name.
        leaves: the stage's weights.
        uses: its operations with weights.

    Returns:
        (gradients by name of those inputs on which the outputs depend, the second half).
    """
    times = Counter(piece for use in uses for piece in use.pieces)
    sent = {id(root) for root in roots}
    several = [piece for piece, leaf in leaves.items() if times[piece] > 1 or id(leaf) in sent]
    single = [
        replace(
            use,
            results=[one for one in use.results if one.requires_grad],
            pieces=[piece for piece in use.pieces if piece not in several],
            inputs=None if any(piece in several for piece in use.pieces) else use.inputs,
        )
        for use in uses
    ]
    results = [one for use in single for one in use.results]
    wanted = [*inputs.values(), *(leaves[piece] for piece in several), *results]
    found: Sequence[Tensor | None] = (
        torch.autograd.grad(roots, wanted, gradients, retain_graph=True, allow_unused=True) if roots else ()
    )
    by_id = {id(one): gradient for one, gradient in zip(wanted, found, strict=False) if gradient is not None}
    late = []
    for use in single:
        reached = [one for one in use.results if id(one) in by_id]
        if reached and use.pieces:
            late.append((replace(use, results=reached), [by_id[id(one)] for one in reached]))
    known = {piece: by_id[id(leaves[piece])] for piece in several if id(leaves[piece]) in by_id}
    returned = {name: by_id[id(leaf)] for name, leaf in inputs.items() if id(leaf) in by_id}
    return returned, LateWeights(leaves, known, late)
