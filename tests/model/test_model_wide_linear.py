"""Wide layers write their weight's gradient in place, with the bits of plain autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  its usual name
from torch.utils.checkpoint import checkpoint

from gradstream.model.backprop import Backprop
from gradstream.model.base import Layout
from gradstream.model.built_module import WideLinear

Forward = Callable[[list[nn.Parameter], torch.Tensor], torch.Tensor]


def parameters_of(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    torch.manual_seed(1)
    return [nn.Parameter(torch.randn(shape)) for shape in shapes]


def both(
    forward: Forward, shapes: list[tuple[int, ...]], inputs: torch.Tensor
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[int]]:
    """Gradients with the direct path, gradients by autograd alone, and the reports."""
    plain = parameters_of(*shapes)
    forward(plain, inputs.clone()).square().sum().backward()  # type: ignore[no-untyped-call]
    expected = [torch.zeros_like(p) if p.grad is None else p.grad for p in plain]

    wide = parameters_of(*shapes)
    layout = Layout.of([(f"p{i}", shape) for i, shape in enumerate(shapes)], torch.float32)
    flat, reports = torch.full((layout.elems,), torch.nan), list[int]()
    backprop = Backprop(layout, wide, flat, reports.append)
    with backprop, WideLinear(wide, backprop.sinks):
        backprop.run(forward(wide, inputs.clone()).square().sum())
    backprop.finish()
    assert all(p.grad is None for p in wide)
    return [view for _, view in layout.views(flat)], expected, reports


@pytest.mark.parametrize("batch", [(1,), (5,), (64,), (2, 3), (1, 1), (4, 1, 2)])
@pytest.mark.parametrize("bias", [True, False])
def test_bits_of_autograd(batch: tuple[int, ...], bias: bool) -> None:
    def forward(p: list[nn.Parameter], x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(F.linear(x, p[2], p[3] if bias else None))
        return F.linear(hidden, p[0], p[1] if bias else None)

    got, expected, reports = both(forward, [(17, 33), (17,), (33, 129), (33,)], torch.randn(*batch, 129))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert reports[-1] == 17 * 33 + 17 + 33 * 129 + 33


def test_a_gradient_reaches_inputs_that_want_one() -> None:
    def forward(p: list[nn.Parameter], x: torch.Tensor) -> torch.Tensor:
        return F.linear(F.embedding(torch.tensor([0, 2]), p[1]), weight=p[0], bias=None)

    got, expected, _ = both(forward, [(8, 4), (3, 4)], torch.zeros(1))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_transposed_and_expanded_operands() -> None:
    def forward(p: list[nn.Parameter], x: torch.Tensor) -> torch.Tensor:
        return F.linear(x.t(), p[0]).sum(1, keepdim=True).expand(-1, 7)

    got, expected, _ = both(forward, [(5, 6)], torch.randn(6, 9))
    torch.testing.assert_close(got, expected)


def many(p: list[nn.Parameter], x: torch.Tensor) -> torch.Tensor:
    return F.linear(F.linear(F.linear(x, p[0]), p[0]), p[0])


def mixed(p: list[nn.Parameter], x: torch.Tensor) -> torch.Tensor:
    """Used by linear and in two other ways: before, between."""
    return F.linear(torch.tanh(F.linear(x @ p[0], p[0])) * p[0].sum(), p[0])


def one_dimensional(p: list[nn.Parameter], x: torch.Tensor) -> torch.Tensor:
    return F.linear(x[0], p[0])


@pytest.mark.parametrize("forward", [many, mixed, one_dimensional])
def test_all_uses_of_a_weight_add_up(forward: Forward) -> None:
    got, expected, reports = both(forward, [(6, 6)], torch.randn(4, 6))
    torch.testing.assert_close(got, expected)
    assert reports == [36]  # once, when the last contribution was in


def test_under_checkpoint() -> None:
    def forward(p: list[nn.Parameter], x: torch.Tensor) -> torch.Tensor:
        def block(y: torch.Tensor) -> torch.Tensor:
            return torch.tanh(F.linear(y, p[0], p[1]))

        for _ in range(2):
            x = checkpoint(block, x, use_reentrant=False)
        return x

    got, expected, _ = both(forward, [(6, 6), (6,)], torch.randn(4, 6))
    torch.testing.assert_close(got, expected)


def test_autocast_takes_the_ordinary_path() -> None:
    def forward(p: list[nn.Parameter], x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.linear(x, p[0]).float()

    got, expected, _ = both(forward, [(6, 6)], torch.randn(4, 6))
    assert torch.equal(got[0], expected[0])


def test_no_second_gradient_is_allocated() -> None:
    """The weight's gradient exists in the flat vector alone: no temporary of its size."""
    shape = (512, 2048)
    weight = nn.Parameter(torch.randn(shape))
    layout = Layout.of([("w", shape)], torch.float32)
    flat = torch.empty(layout.elems)
    backprop = Backprop(layout, [weight], flat, lambda n: None)
    with (
        torch.profiler.profile(profile_memory=True) as profile,
        backprop,
        WideLinear([weight], backprop.sinks),
    ):
        backprop.run(F.linear(torch.randn(2, 2048), weight).sum())
    sizes: list[Any] = [event.cpu_memory_usage for event in profile.events()]
    assert max(sizes) < weight.numel() * 4


def test_a_hook_of_the_weight_changes_its_gradient() -> None:
    def forward(p: list[nn.Parameter], x: torch.Tensor) -> torch.Tensor:
        if not p[0]._backward_hooks:
            p[0].register_hook(lambda gradient: 0.5 * gradient)  # type: ignore[no-untyped-call]
        return F.linear(x, p[0])

    hooked, expected, _ = both(forward, [(5, 7)], torch.randn(4, 7))
    torch.testing.assert_close(hooked, expected)
