"""Wide linear layers whose weight gradient is computed where it is wanted.

The ordinary path makes the gradient of a weight as a new tensor and then copies it into the
flat vector. For a 49152 x 1500 layer that is 295 MB of fresh memory and two more passes over it
in each step. Here the product is written straight into the flat vector: the same kernel on the
same operands, so the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from gradstream.model.backprop import RowSink, Sink

__all__ = ["WIDE_ELEMS", "WideLinear"]

WIDE_ELEMS = 1 << 20
"""From so many elements on a weight is wide: below, a copy costs less than the detour."""


class WideLinear(TorchFunctionMode):
    """While active, `linear` with one of the given weights writes that weight's gradient directly.

    Forward and backward pass must both run inside it. A weight that is used in other ways too
    (tied to an embedding, say) gets those contributions on the ordinary path, and they add up.

    Args:
        weights: the parameters to watch for.
        sinks: where the gradient of each lands.
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
        """Sends a fitting call of `linear` through `_Linear`, anything else on its way."""
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
        if sink is None or input.dim() < 2 or not _plain(input, weight, bias):
            return torch.nn.functional.linear(input, weight, bias)
        output: torch.Tensor = _Linear.apply(input, weight, bias, sink)  # type: ignore[no-untyped-call]
        return output


def _plain(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether all is of one dtype and gradients are wanted: not under autocast, no_grad or torch.func."""
    return (
        torch.is_grad_enabled()
        and weight.requires_grad
        and inputs.dtype == weight.dtype
        and (bias is None or bias.dtype == weight.dtype)
        and not torch.is_autocast_enabled("cpu")
        and not torch._C._are_functorch_transforms_active()
    )


class _Linear(torch.autograd.Function):
    """y = x Wᵀ + b, with dL/dW = (dL/dy)ᵀ x going into a sink instead of being returned.

    In other passes than the sink's, which a loss makes for gradients of its own, it is an ordinary layer.
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
