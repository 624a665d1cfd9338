"""Measures how long each operation of a model takes, one after the other: the whole model is never there."""

from __future__ import annotations

import copy
import time
from typing import Any

import torch
from torch import fx, nn

from gradstream.split.graph import Graph, form_of
from gradstream.split.trace import run_node

_TIMES = 3


def seconds_of(graph: Graph, samples: int) -> dict[fx.Node, float]:
    """Seconds of each operation, forward and backward: the least of three, on small random numbers."""
    return {node: _seconds(graph, node, samples) for node in graph.nodes}


def _seconds(graph: Graph, node: fx.Node, samples: int) -> float:
    root = nn.Module()
    if node.op == "call_module":
        root = copy.deepcopy(graph.blueprint.module.get_submodule(str(node.target))).to_empty(device="cpu")
        for tensor in (*root.parameters(), *root.buffers()):
            tensor.detach().copy_(_filled(tensor))
    best = float("inf")
    for _ in range(_TIMES):
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda used: _value(used, samples))
        begin = time.perf_counter()  # noqa: TID251  # arithmetic itself is timed, before a run
        result = root(*args, **kwargs) if node.op == "call_module" else run_node(node, root, args, kwargs)
        if isinstance(result, torch.Tensor) and result.requires_grad:
            torch.autograd.backward(result, torch.ones_like(result))
        best = min(best, time.perf_counter() - begin)  # noqa: TID251
    return best


def _value(node: fx.Node, samples: int) -> Any:
    first = node.meta["values"][0]
    if not isinstance(first, torch.Tensor):
        return first
    form = form_of(node)
    shape = list(first.shape)
    if form is not None and form.axis is not None:
        shape[form.axis] = form.shape[form.axis] * samples
    value = _filled(torch.empty(shape, dtype=first.dtype, device="meta"))
    return value.requires_grad_() * 1 if value.is_floating_point() else value


def _filled(like: torch.Tensor) -> torch.Tensor:
    """Small random numbers, or zeros where they have to be whole."""
    if like.is_floating_point():
        return torch.randn(like.shape, dtype=like.dtype) * 0.1
    return torch.zeros(like.shape, dtype=like.dtype)
