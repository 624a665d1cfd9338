"""What a module keeps between calls beside its parameters and buffers: a graph would have it as it was at the trace."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import fx, nn

from gradstream.errors import ConfigError

_MOST_MARKS = 1 << 16
"""Marks of one attribute that are compared."""

_MOST_ELEMS = 1 << 22
"""Elements of an array or tensor that are compared: of a larger one as many, at equal distances."""

_DEEPEST = 8
_NUMBERS = (bool, int, float, complex, str, bytes, np.generic)
_REGISTERED = ("_parameters", "_buffers", "_modules")
_IN_PLACE = "a buffer (register_buffer) that is changed in place, such as self.{}.mul_(0.9).add_(...)"


@dataclass(frozen=True, slots=True)
class Kept:
    """The state of one attribute.

    Args:
        owner: the module that has it.
        value: the attribute; it stays alive, so that no other object gets its id.
        marks: one for each value in it; equal as long as the state is.
    """

    owner: nn.Module
    value: Any
    marks: tuple[object, ...]

    def remedy(self, key: str) -> str:
        """What to write instead."""
        if isinstance(self.value, np.random.Generator | np.random.RandomState | random.Random):
            return "random numbers of torch: torch.randn_like(x) or nn.Dropout"
        return _IN_PLACE.format(key)


def state_of(module: nn.Module, is_whole: Callable[[nn.Module, str], bool]) -> dict[str, Kept]:
    """The state of each attribute by qualified name.

    Of modules that are one operation of the graph (`is_whole`) only numbers count: what else they keep, they keep in
    the process that calls them.
    """
    found = {}
    for path, part in module.named_modules():
        whole = is_whole(part, path)
        buffers = {key: tensor for key, tensor in part._buffers.items() if tensor is not None}
        own = {key: value for key, value in part.__dict__.items() if key not in _REGISTERED}
        for key, value in (own if whole else {**own, **buffers}).items():
            if key.startswith("_tensor_con") or (whole and not isinstance(value, _NUMBERS)):
                continue
            marks = (id(value),) if key in buffers else tuple(islice(marks_of(value), _MOST_MARKS))
            found[f"{path}.{key}" if path else key] = Kept(part, value, marks)
    return found


def marks_of(value: Any, depth: int = 0) -> Iterator[object]:
    """Marks of a value and of all that is in it. Objects of other classes than those below have only their class."""
    yield type(
        None if isinstance(value, fx.Proxy) else value
    ).__name__  # kept to be looked at, as None before
    if isinstance(value, float | complex):
        yield repr(value)  # of NaN too it is the same
    elif isinstance(value, _NUMBERS):
        yield value
    elif isinstance(value, torch.Tensor):
        yield from (value._version, value.shape, value.dtype)
        step = max(1, value.numel() // _MOST_ELEMS)
        dense = value.layout == torch.strided and value.device.type != "meta"
        yield hash(_bytes_of(value.detach().reshape(-1)[::step])) if dense else id(value)
    elif isinstance(value, np.ndarray):
        step = max(1, value.size // _MOST_ELEMS)
        yield from (value.shape, value.dtype.str, hash(value.flat[::step].tobytes()))
    elif depth < _DEEPEST:
        inside, length = _inside(value)
        yield length
        for one in inside:
            yield from marks_of(one, depth + 1)


def _bytes_of(tensor: torch.Tensor) -> bytes:
    """The elements of a tensor of one axis."""
    return tensor.resolve_conj().resolve_neg().contiguous().view(torch.uint8).numpy().tobytes()


def _inside(value: Any) -> tuple[Any, int]:
    """(what is in a container or the state of a generator, its length)."""
    if isinstance(value, dict):
        return (one for pair in value.items() for one in pair), len(value)
    if isinstance(value, list | tuple | set | frozenset | deque):
        return value, len(value)
    if isinstance(value, np.random.Generator):
        return [value.bit_generator.state], 1
    if isinstance(value, np.random.RandomState):
        return [value.get_state(legacy=False)], 1
    if isinstance(value, random.Random):
        return [value.getstate()], 1
    if isinstance(value, torch.Generator):
        return [value.get_state().numpy()], 1
    return (), 0


def drawn_state() -> tuple[object, ...]:
    """Marks of the generators of Python and NumPy that a process has."""
    return tuple(marks_of((random.getstate(), np.random.get_state())))  # noqa: NPY002


def refuse_gradient_hooks(module: nn.Module) -> None:
    """Raises ConfigError if a trained parameter has a hook: it belongs to that tensor, and a part makes its own."""
    for name, parameter in module.named_parameters():
        hooks = [
            hook
            for kept in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks)
            for hook in (kept or {}).values()
        ]
        if hooks and parameter.requires_grad:
            raise ConfigError(
                f"split: {line_of(hooks[0], module)}: got a gradient hook on parameter {name!r}, which its part would "
                "not call; expected parameters without hooks: scale what the layer computes, or hook the module "
                "(register_full_backward_hook)"
            )


def line_of(function: Any, module: nn.Module) -> str:
    """file:line of a function; of the module's forward() where it has none."""
    code = getattr(function, "__code__", None) or type(module).forward.__code__
    return f"{code.co_filename}:{code.co_firstlineno}"
