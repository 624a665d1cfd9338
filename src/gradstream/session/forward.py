"""What a wrapped module calls before each forward pass. A copy of the module calls nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

__all__ = ["BeforeForward"]


class BeforeForward:
    """A forward pre-hook, with keyword arguments.

    Modules are copied and saved with their hooks: for a running average, or by `torch.save(model)`. What is
    copied in this one's place does nothing.

    Args:
        called: with the module, its arguments and its keyword arguments.
    """

    def __init__(self, *called: Callable[[nn.Module, tuple[Any, ...], Mapping[str, Any]], None]) -> None:
        self._called = called

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Calls them all."""
        for called in self._called:
            called(module, args, kwargs)

    def __deepcopy__(self, memo: object) -> Callable[..., None]:
        return nothing

    def __reduce__(self) -> str:
        return "nothing"


def nothing(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """In the place of a hook that was copied."""
