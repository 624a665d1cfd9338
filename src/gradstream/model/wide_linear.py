"""Computes the weight gradients of wide linear layers directly in the flat vector.

torch makes the gradient of a weight as a new tensor, which is then copied into the flat vector. For a layer of
49152 x 1500 that takes 295 MB of new memory and two more passes over it in each step. Here the same kernel
writes the product of the same operands into the flat vector: the bits are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from gradstream.model.backprop import RowSink, Sink

WIDE_ELEMS = 1 << 20
"""Elements from which a weight is wide. For smaller ones a copy costs less than the detour."""


class WideLinear(TorchFunctionMode):
    """A context in which `linear` with one of the given weights writes the weight's gradient directly.

    Forward and backward pass must both run inside it. Contributions of other uses of the weight (an embedding
    that is tied to it) take the ordinary path, and are added.

    Args:
        weights: the weights of the wide layers.
        sinks: the collectors of their gradients, in the same order.
    """

    def __init__(self, weights: Iterable[nn.Parameter], sinks: Iterable[Sink | RowSink]) -> None:
        super().__init__()
        self._sinks = {id(weight): sink for weight, sink in zip(weights, sinks, strict=True)}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Sends calls of `linear` with one of the weights through `_Linear`; leaves others unchanged."""
        if func is torch.nn.functional.linear:
            return self._linear(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _linear(
        self,
        input: torch.Tensor,  # noqa: A002  the name callers of torch's own function may use
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        sink = self._sinks.get(id(weight))
        if sink is None or input.dim() < 2 or _is_hooked(weight) or not _plain(input, weight, bias):
            return torch.nn.functional.linear(input, weight, bias)
        output: torch.Tensor = _Linear.apply(input, weight, bias, sink)  # type: ignore[no-untyped-call]
        return output


def _is_hooked(weight: torch.Tensor) -> bool:
    """Whether the user's hooks are to see, or to change, the gradient of the weight: torch has to make it then."""
    return bool(weight._backward_hooks or weight._post_accumulate_grad_hooks)


def _plain(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether all have one dtype and gradients are wanted: not under autocast, no_grad or torch.func."""
    return (
        torch.is_grad_enabled()
        and weight.requires_grad
        and inputs.dtype == weight.dtype
        and (bias is None or bias.dtype == weight.dtype)
        and not torch.is_autocast_enabled("cpu")
        and not torch._C._are_functorch_transforms_active()
    )


class _Linear(torch.autograd.Function):
    """y = x Wᵀ + b, whose backward adds dL/dW = (dL/dy)ᵀ x to a sink instead of returning it.

    In a backward pass other than the sink's, which a loss runs for its own purposes, it returns dL/dW.
    """

    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,  # (..., I)
        weight: torch.Tensor,  # (O, I)
        bias: torch.Tensor | None,  # (O,)
        sink: Sink,
    ) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.sink = sink
        return torch.nn.functional.linear(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        rows = grad_output.reshape(-1, grad_output.shape[-1])  # (N, O)
        factors = rows.t(), inputs.reshape(-1, inputs.shape[-1])
        grad_weight = None
        if ctx.sink.of.under_way:
            ctx.sink.add_product(*factors)
        else:
            grad_weight = torch.mm(*factors)
        grad_input = rows.mm(weight).view(inputs.shape) if ctx.needs_input_grad[0] else None
        grad_bias = rows.sum(0) if ctx.needs_input_grad[2] else None
        return grad_input, grad_weight, grad_bias, None
