"""What a stage keeps from a forward pass until its backward: its graph, or only what computes it again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import Node, get_gradient_edge

from gradstream.model.backprop import Pass, Sink
from gradstream.runtime.base import Report
from gradstream.split.graph import Piece
from gradstream.split.operations import LateWeights, Use


@dataclass(eq=False)
class DroppedPass:
    """A forward pass of which only the inputs are kept.

    Args:
        compute: computes the same pass again.
        state: the stage's buffers as that pass has found them.
        again: its graph, from the time at which it is computed again.
        newest: the stage's buffers at that time, which are those of a later pass.
    """

    compute: Callable[[], SavedPass]
    state: Sequence[torch.Tensor]
    again: SavedPass | None = None
    newest: Sequence[torch.Tensor] = ()


class StageSink(Sink):
    """Collects weight × one parameter's gradient."""

    __slots__ = ("weight",)

    def into(self, view: torch.Tensor, weight: float, add: bool) -> None:
        """Sets where it goes, before a backward pass."""
        self.view, self.weight, self.written = view, weight, add

    def add(self, gradient: torch.Tensor) -> None:
        """Adds a contribution that exists as a tensor."""
        super().add(gradient if self.weight == 1 else gradient * self.weight)

    def add_product(self, left: torch.Tensor, right: torch.Tensor) -> None:
        """Adds the contribution left @ right, without a temporary tensor."""
        if self.weight == 1:
            super().add_product(left, right)
        else:
            self.view.addmm_(left, right, beta=float(self.written), alpha=self.weight)  # β = 0 reads nothing
            self.written = True


class SavedPass:
    """Keeps the autograd graph of one forward pass of a stage, and runs the backward pass through it."""

    def __init__(self, pieces: tuple[Piece, ...], views: Any, halves: bool) -> None:
        self._pass = Pass()
        self.uses: list[Use] | None = [] if halves else None
        self.late: LateWeights | None = None
        self.inputs: dict[str, torch.Tensor] = {}
        self.outputs: dict[str, torch.Tensor] = {}
        # .data: an update of the parameters in place is nobody's error, if the caller wants it between the passes.
        self.leaves = {
            piece: view.data.requires_grad_() for piece, (_, view) in zip(pieces, views, strict=True)
        }
        self.sinks = {piece: StageSink(leaf, self._pass) for piece, leaf in self.leaves.items()}
        for leaf, sink in zip(self.leaves.values(), self.sinks.values(), strict=True):
            leaf.register_post_accumulate_grad_hook(_moved(sink))

    def roots(self, gradients: Mapping[str, torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """(outputs that have gradients, the gradients)."""
        roots = {name: output for name, output in self.outputs.items() if output.requires_grad}
        given = [
            torch.ones_like(output) if name == "loss" else gradients[name].view(output.shape)
            for name, output in roots.items()
        ]
        return list(roots.values()), given

    def clear(self) -> list[str]:
        """Zeroes the gradients of parameters on which the outputs do not depend. Returns their names."""
        unused = [piece for piece, sink in self.sinks.items() if not sink.written]
        for piece in unused:
            self.sinks[piece].clear()
        return [piece.name for piece in unused]

    def run(
        self,
        roots: list[torch.Tensor],
        gradients: list[torch.Tensor],
        ends: Sequence[int] = (),
        report: Report | None = None,
    ) -> None:
        """Runs the backward pass. The engine itself does not suspend an active function mode.

        Args:
            roots, gradients: the outputs that have gradients, and these.
            ends: where each parameter ends in the flat gradient.
            report: called with the end of the parameters from the front whose gradients are whole, as it grows.
        """
        nodes = (
            () if report is None else self._follow(ends, report)
        )  # leaves hold their nodes by weak references
        for root in roots:
            root.register_hook(self._pass.begin)  # type: ignore[no-untyped-call]
        if roots:
            torch.autograd.Variable._execution_engine.run_backward(
                tuple(roots), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True
            )
        del nodes

    def _follow(self, ends: Sequence[int], report: Report) -> Sequence[Node]:
        """Reports as parameters get their gradients. A parameter that gets none is reported by nobody."""
        waiting = list(enumerate(ends))[::-1]
        whole = set[int]()

        def hook(index: int) -> Callable[..., None]:
            def gathered(*gradients: object) -> None:
                del gradients
                whole.add(index)
                end = 0
                while waiting and waiting[-1][0] in whole:
                    end = waiting.pop()[1]
                if end:
                    report(end)

            return gathered

        nodes = [get_gradient_edge(leaf).node for leaf in self.leaves.values()]
        for index, node in enumerate(nodes):
            node.register_hook(hook(index))
        return nodes


def _moved(sink: StageSink) -> Callable[[torch.Tensor], None]:
    def hook(leaf: torch.Tensor) -> None:
        if leaf.grad is not None:  # None if a wide layer has written it already
            sink.add(leaf.grad)
            leaf.grad = None

    return hook
