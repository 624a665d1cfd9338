"""What a wrapped module calls before each forward pass. A copy of the module calls nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

__all__ = ["BeforeForward"]


class BeforeForward:
    """A forward pre-hook, with keyword arguments.

    Modules are copied and saved with their hooks: for a running average, or by `torch.save(model)`. What is
    copied in this one's place does nothing.

    Modules are compiled with their hooks too; what a hook counts would be held to be constant, and every
    other number compiled anew. So this one stays outside of what `torch.compile` makes.

    Args:
        called: with the module, its arguments and its keyword arguments.
    """

    def __init__(self, *called: Callable[[nn.Module, tuple[Any, ...], Mapping[str, Any]], None]) -> None:
        self._called = [torch.compiler.disable(each) for each in called]  # type: ignore[no-untyped-call]

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Calls them all."""
        for called in self._called:
            called(module, args, kwargs)

    def __deepcopy__(self, memo: object) -> Callable[..., None]:
        return nothing

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _copied, ()


def nothing(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """In the place of a hook that was copied."""


def _copied() -> Callable[..., None]:
    return nothing
