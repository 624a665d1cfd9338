"""Runs one backward pass that fills the flat gradient vector, and reports how far it has come.

Autograd delivers each parameter's gradient when its last contribution is complete. It is moved into the flat
vector and dropped, so there is never a second whole gradient. The length of the finished *prefix* is reported:
a tensor that is ready out of order waits for those before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from gradstream.errors import GradientError
from gradstream.model.base import Layout, Slot
from gradstream.model.rows import RowGradient
from gradstream.runtime.base import Report


class Pass:
    """Recognises the backward pass from the loss: computing a loss may run others (`autograd.grad`)."""

    __slots__ = ("_number",)

    def __init__(self) -> None:
        self._number: int | None = None

    def begin(self, gradient: torch.Tensor) -> None:
        """A hook of the loss: the pass that calls it is the one from the loss."""
        del gradient
        self._number = torch._C._current_graph_task_id()

    @property
    def under_way(self) -> bool:
        """Whether the calling node runs in that pass."""
        return torch._C._current_graph_task_id() == self._number


class Sink:
    """Collects one parameter's gradient: the first contribution replaces the old content, later ones are added.

    Args:
        view: the parameter's place in the flat gradient vector, in its own shape.
        of: only the contributions of this backward pass are collected.
    """

    __slots__ = ("of", "ready", "view", "written")

    def __init__(self, view: torch.Tensor, of: Pass) -> None:
        self.view = view
        self.of = of
        self.written = False
        self.ready = False

    def add(self, gradient: torch.Tensor) -> None:
        """Adds a contribution that exists as a tensor."""
        if self.written:
            self.view.add_(gradient)
        elif gradient.is_sparse:  # of a row-sparse tensor whose whole gradient is wanted
            self.view.zero_().add_(gradient.coalesce())
        else:
            self.view.copy_(gradient)
        self.written = True

    def add_product(self, left: torch.Tensor, right: torch.Tensor) -> None:
        """Adds the contribution left @ right, without a temporary tensor."""
        if self.written:
            self.view.addmm_(left, right)
        else:
            torch.mm(left, right, out=self.view)
        self.written = True

    def clear(self) -> None:
        """Sets the gradient to zero. Called where the loss does not depend on the parameter."""
        self.view.zero_()


class RowSink:
    """Collects the gradient of one row-sparse parameter, as rows.

    Args:
        rows: gradients of all row-sparse parameters.
        table: place of this parameter.
        of: only the contributions of this backward pass are collected.
    """

    __slots__ = ("_rows", "_table", "of", "ready", "written")

    def __init__(self, rows: RowGradient, table: Slot, of: Pass) -> None:
        self._rows = rows
        self._table = table
        self.of = of
        self.written = False
        self.ready = False

    def add(self, gradient: torch.Tensor) -> None:
        """Adds a contribution, which must be sparse in its first dimension."""
        if not gradient.is_sparse or gradient.sparse_dim() != 1:
            raise self._dense()
        self._rows.add(self._table, gradient._indices()[0].cpu(), gradient._values().cpu())

    def add_product(self, left: torch.Tensor, right: torch.Tensor) -> None:
        """Raises GradientError: a linear layer uses the table as its weight."""
        raise self._dense()

    def clear(self) -> None:
        """Called where the loss does not depend on the parameter. Does nothing: a gradient without rows is zero."""

    def _dense(self) -> GradientError:
        return GradientError(
            f"gradient of {self._table.name!r}: got a dense one, expected rows, since an embedding with "
            "sparse=True has this weight; another layer uses all of it: build the embedding with sparse=False"
        )


class Backprop:
    """A context in which one backward pass from a loss fills the flat gradient.

    On exit it removes its hooks, and sets `.grad` of all parameters to None.

    Args:
        layout: places of the parameters.
        parameters: the leaves, one per slot of the layout, in its order.
        gradient: (E,) the flat vector to fill.
        report: called with the length of the finished prefix as it grows.
        rows: takes the gradients of row-sparse parameters; `gradient` then has the layout `layout.rest`.
    """

    def __init__(
        self,
        layout: Layout,
        parameters: Sequence[nn.Parameter],
        gradient: torch.Tensor,
        report: Report,
        rows: RowGradient | None = None,
    ) -> None:
        landing = layout if rows is None else layout.rest
        self._layout = layout
        self._ends = {slot.name: slot.stop for slot in landing.slots}
        self._elems = landing.elems
        self._parameters = parameters
        self._report = report
        self._prefix = 0  # how many sinks from the front are ready
        self._hooked: list[
            tuple[Node, RemovableHandle]
        ] = []  # leaves hold their nodes by weak references only
        self._pass = Pass()
        views = dict(landing.views(gradient))
        self.sinks: list[Sink | RowSink] = [
            RowSink(rows, slot, self._pass)
            if rows is not None and slot.row_sparse
            else Sink(views[slot.name], self._pass)
            for slot in layout.slots
        ]

    def __enter__(self) -> Backprop:
        for index, parameter in enumerate(self._parameters):
            parameter.grad = None
            # The node that accumulates a leaf's gradient runs after all contributions, even if each went
            # into the sink directly. A hook on the tensor would not run then.
            node = get_gradient_edge(parameter).node
            self._hooked.append((node, node.register_hook(self._hook(index))))
        return self

    def __exit__(self, *exception: object) -> None:
        for _, handle in self._hooked:
            handle.remove()
        self._hooked.clear()
        for parameter in self._parameters:
            parameter.grad = None

    def run(self, loss: torch.Tensor) -> None:
        """Runs the backward pass from a scalar loss.

        `loss.backward()` suspends an active function mode, so a checkpointed part would be recomputed on
        another path than its forward pass took. The engine itself does not suspend it.
        """
        loss.register_hook(self._pass.begin)  # type: ignore[no-untyped-call]
        torch.autograd.Variable._execution_engine.run_backward(
            (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True
        )

    def finish(self) -> None:
        """Sets gradients to zero where none came (the loss does not depend on the parameter), and reports all."""
        for sink in self.sinks:
            if not sink.written:
                sink.clear()
        if self._prefix < len(self.sinks):
            self._report(self._elems)

    def _hook(self, index: int) -> Any:
        def gathered(grad_inputs: Any, grad_outputs: Any) -> None:
            self._gathered(index)

        return gathered

    def _gathered(self, index: int) -> None:
        sink, parameter = self.sinks[index], self._parameters[index]
        if sink.ready:
            raise GradientError(
                f"{self._layout.slots[index].name!r}: its gradient arrived twice in one backward pass, after it "
                "was sent. Activation checkpointing causes this: call torch.utils.checkpoint with "
                "use_reentrant=False"
            )
        if parameter.grad is not None:
            sink.add(parameter.grad)
            parameter.grad = None
        if not sink.written:
            sink.clear()
        sink.written = sink.ready = True
        self._advance()

    def _advance(self) -> None:
        end = 0
        while self._prefix < len(self.sinks) and self.sinks[self._prefix].ready:
            end = self._ends.get(self._layout.slots[self._prefix].name, end)
            self._prefix += 1
        if end:
            self._report(end)
