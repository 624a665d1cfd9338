"""Divides a chain of convolutions over parts by rows of their images; neighbours exchange the rows at the border.

Part k of K computes rows [k H / K, (k + 1) H / K) of each result in the chain. For that it needs some rows of its
neighbours, the halo: those that its first and last windows reach. They travel, and their gradients come back, as
every value that crosses a cut; nothing is computed twice. Each part uses all of each weight, so that travels too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F  # noqa: N812  its usual name

from gradstream.errors import ConfigError
from gradstream.split.divide import Maker
from gradstream.split.graph import Graph, form_of
from gradstream.split.refusals import where

_ELEMENTWISE = (
    nn.ReLU,
    nn.ReLU6,
    nn.LeakyReLU,
    nn.ELU,
    nn.GELU,
    nn.SiLU,
    nn.Tanh,
    nn.Sigmoid,
    nn.Dropout,
    nn.Identity,
)


def divide_space(graph: Graph, chain: Sequence[fx.Node], parts: Sequence[int]) -> Graph:
    """The graph with a chain of operations divided over parts, by rows of images (N, C, H, W).

    Args:
        graph: the recorded model.
        chain: the operations: Conv2d, MaxPool2d, AvgPool2d, and such of each element alone. Each has only the
            result of the one before, which nothing else uses.
        parts: the parts, in the order of the rows.

    Raises:
        ConfigError: an operation is of another kind, or has fewer rows than parts.
    """
    make = Maker(chain[-1])
    given = chain[0].all_input_nodes[0]
    whole = _bounds(chain[0], given, 1)
    held = [(*whole[0], given, None)]  # (first row, end, operation, its stage) of what there is of the input
    for place, node in enumerate(chain):
        _check(graph, node, chain[place - 1] if place else None)
        module: Any = graph.blueprint.module.get_submodule(str(node.target))
        window = _Window(module)
        stages: list[Any] = (
            [object() for _ in parts] if window.reaches or not place else [s for *_, s in held]
        )
        bounds = _bounds(node, node, len(parts))
        height = given.meta["values"][0].shape[-2]
        needed = [window.rows(start, stop) for start, stop in bounds]
        cuts = [_rows(make, held, max(low, 0), min(high, height)) for low, high in needed]
        pieces = []
        for (start, stop), (low, high), rows, part, stage in zip(
            bounds, needed, cuts, parts, stages, strict=True
        ):
            at = {"part": part, "stage": stage}
            x = rows[0] if len(rows) == 1 else make(torch.cat, rows, -2, **at)
            if low < 0 or high > height:
                padding = (0, 0, max(0, -low), max(0, high - height))
                x = make(F.pad, x, padding, "constant", window.fill, **at)
            pieces.append((start, stop, window.apply(make, graph, node, x, at), stage))
        held, given = pieces, node
    return make.replaced(graph, make(torch.cat, [piece for _, _, piece, _ in held], -2), chain)


def _rows(
    make: Maker, held: Sequence[tuple[int, int, fx.Node, object]], low: int, high: int
) -> list[fx.Node]:
    """Rows [low, high) of an image, cut out where they are, so that only these travel."""
    found = []
    for first, end, source, home in held:
        start, stop = max(low, first), min(high, end)
        if start >= stop:
            continue
        at = {} if home is None else {"part": source.meta["part"], "stage": home}
        whole = (start, stop) == (first, end)
        found.append(source if whole else make(torch.narrow, source, -2, start - first, stop - start, **at))
    return found


class _Window:
    """Which rows of the input an operation needs, and how it is done on some of them."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self.reaches = not isinstance(module, _ELEMENTWISE)
        self.fill = -torch.inf if isinstance(module, nn.MaxPool2d) else 0.0
        if self.reaches:
            self._kernel, self._stride, self._padding, self._dilation = (
                _pair(getattr(module, key, 1)) for key in ("kernel_size", "stride", "padding", "dilation")
            )

    def rows(self, start: int, stop: int) -> tuple[int, int]:
        """[low, high) of the input for rows [start, stop) of the result; outside of the image is padding."""
        if not self.reaches:
            return start, stop
        (stride, _), (padding, _) = self._stride, self._padding
        reach = self._dilation[0] * (self._kernel[0] - 1) + 1
        return start * stride - padding, (stop - 1) * stride - padding + reach

    def apply(self, make: Maker, graph: Graph, node: fx.Node, x: fx.Node, at: Any) -> fx.Node:
        """The operation on some rows, which are padded above and below."""
        if not self.reaches:
            return make(node, x, **at)
        padding = (0, self._padding[1])
        module = self._module
        if isinstance(module, nn.Conv2d):
            weight, bias = (
                None if getattr(module, key) is None else make.tensor(graph, key, target=node.target)
                for key in ("weight", "bias")
            )
            return make(F.conv2d, x, weight, bias, self._stride, padding, self._dilation, module.groups, **at)
        if isinstance(module, nn.MaxPool2d):
            return make(F.max_pool2d, x, self._kernel, self._stride, padding, self._dilation, **at)
        return make(F.avg_pool2d, x, self._kernel, self._stride, padding, **at)


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else tuple(value)


def _bounds(at: fx.Node, image: fx.Node, parts: int) -> list[tuple[int, int]]:
    """The rows of an image for each part."""
    form = form_of(image)
    if form is None or len(form.shape) != 4 or form.axis != 0 or form.shape[2] < parts:
        raise ConfigError(
            f"plan_split: {where(at)}: split by rows of the image over {parts} parts, and its tensor is {form}; "
            "expected images (N, C, H, W) with at least as many rows as parts"
        )
    rows = form.shape[2]
    return [(part * rows // parts, (part + 1) * rows // parts) for part in range(parts)]


def _check(graph: Graph, node: fx.Node, before: fx.Node | None) -> None:
    """Raises ConfigError for an operation that cannot be divided by space."""
    module: Any = graph.blueprint.module.get_submodule(str(node.target)) if node.op == "call_module" else None
    known = isinstance(module, (nn.Conv2d, nn.MaxPool2d, nn.AvgPool2d, *_ELEMENTWISE))
    plain = not getattr(module, "ceil_mode", False) and not getattr(module, "return_indices", False)
    plain = (
        plain
        and getattr(module, "padding_mode", "zeros") == "zeros"
        and getattr(module, "padding", 0) != "same"
    )
    if isinstance(module, nn.AvgPool2d):
        plain = plain and _pair(module.padding)[0] == 0 and module.divisor_override is None
    chained = (
        not node.meta["writes"]
        if before is None
        else (node.all_input_nodes == [before] and list(before.users) == [node])
    )
    if not (known and plain and chained):
        raise ConfigError(
            f"plan_split: {where(node)}: {node.name} cannot be split by rows of the image; this takes a chain of "
            "Conv2d, MaxPool2d, AvgPool2d and elementwise operations, each used by the next one alone, with padding "
            "given in numbers and padding_mode='zeros'; in map=, give several parts to such layers only"
        )
