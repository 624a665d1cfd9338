"""What a recorded module may not do, beside what torch.fx refuses itself: a graph would silently do something else."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch.utils._pytree import tree_flatten

from gradstream.errors import ConfigError

# ---- module state ------------------------------------------------------------------------
# What a module keeps between calls beside its parameters and buffers: a graph would have it as it was at the trace.

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
    """file:line of a function; of the module's forward() if it has none."""
    code = getattr(function, "__code__", None) or type(module).forward.__code__
    return f"{code.co_filename}:{code.co_firstlineno}"


# ---- refusals ----------------------------------------------------------------------------

BY_VALUE = (
    "operations on tensors that do not depend on their values or on the number of samples: change this line, or keep "
    "the model whole"
)


class Untraceable(Exception):
    """What a module does that cannot be recorded, and what it is expected to do instead."""

    def __init__(self, got: str, expected: str, where: str | None = None) -> None:
        super().__init__(got)
        self.expected, self.where = expected, where


def storage(tensor: torch.Tensor) -> int:
    """A number that tensors have in common if they share memory."""
    number: int = tensor.untyped_storage()._cdata
    return number


def where(node: fx.Node) -> str:
    """The place in the user's code that computes a node."""
    place: str = node.meta["where"]
    return place


def refuse_state(before: Mapping[str, Kept], after: Mapping[str, Kept], *, fills: bool) -> None:
    """Refuses a call that changes attributes; one that `fills` may make what it keeps, such as a mask."""
    for name, kept in after.items():
        old, key = before.get(name), name.rpartition(".")[2]
        place = line_of(None, kept.owner)
        if old is None or old.marks == kept.marks:
            continue
        if isinstance(old.value, torch.Tensor) and isinstance(kept.value, fx.Proxy):
            raise Untraceable(
                f"it assigns a computed tensor to its attribute {name}, which would stay as it is in the graph",
                old.remedy(key),
                place,
            )
        if not fills:
            raise Untraceable(
                f"it changes its attribute {name}, which would stay as it is in the graph",
                old.remedy(key),
                place,
            )


def refuse_written_constants(graph: fx.Graph, module: nn.Module) -> None:
    """Refuses operations that write into a tensor of the module's own that is neither parameter nor buffer."""
    registered = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    registered |= {name for name, _ in module.named_buffers(remove_duplicate=False)}
    own = {
        storage(node.meta["values"][0]): str(node.target)
        for node in graph.nodes
        if node.op == "get_attr" and node.target not in registered
    }
    for node in graph.nodes:
        for written in node.meta.get("writes", ()):
            if written in own:
                made = own[written].startswith("_tensor_con")
                raise Untraceable(
                    f"it writes into {'a tensor' if made else f'its attribute {own[written]}'}, which is neither a "
                    "buffer nor computed from the minibatch",
                    "x.new_zeros(...) where it begins anew in each step, register_buffer where it stays",
                    where(node),
                )


def refuse_augmented(graph: fx.Graph) -> None:
    """Refuses an augmented assignment to a tensor that is used afterwards by another name, or by a view of it."""
    order = {node: number for number, node in enumerate(graph.nodes)}
    assigned = [node for node in graph.nodes if "augments" in node.meta]
    for node in assigned:
        changed = node.meta["augments"].meta["values"][0]
        later = {used for user in graph.nodes if order[user] > order[node] for used in user.all_input_nodes}
        for used in later:
            if order[used] < order[node] and _overlap(changed, used.meta["values"][0]):
                raise Untraceable(
                    "an augmented assignment (such as h += 1) changes a tensor that is used later by another name, "
                    "or by a view",
                    "h = h + 1 for a new tensor, h.add_(1) to change this one",
                    where(node),
                )


def _overlap(tensor: torch.Tensor, other: Any) -> bool:
    """Whether two tensors without values share elements."""
    if not isinstance(other, torch.Tensor) or storage(tensor) != storage(other) or not other.numel():
        return False
    if tensor.dtype != other.dtype:
        return True
    seen = torch.zeros(tensor.untyped_storage().nbytes() // tensor.itemsize, dtype=torch.bool)
    for view, value in ((other, True), (tensor, False)):
        seen.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(value)
    rest = seen.as_strided(other.shape, other.stride(), other.storage_offset())
    return not bool(rest.all())


def refuse_changed(first: tuple[object, ...], again: tuple[object, ...]) -> None:
    """Refuses an operation of a second call that is another one than in the first."""
    if first == again:
        return
    kept = first[0] == "get_attr" and str(first[2]).startswith("_tensor_con")
    raise Untraceable(
        "it computes something else in a second call than in the first, which a graph cannot follow",
        "a tensor that stays to be made in __init__"
        if kept
        else "state in a buffer (register_buffer) that is changed in place",
    )


def described(node: fx.Node) -> tuple[object, ...]:
    """Kind, name, target and arguments of an operation. Of these, all but numbers, words and results are classes."""
    leaves, structure = tree_flatten((node.args, node.kwargs))
    known = (bool, int, float, complex, str)
    words = [
        repr(leaf) if isinstance(leaf, known) else str(leaf) if isinstance(leaf, fx.Node) else type(leaf)
        for leaf in leaves
    ]
    return (node.op, node.name, node.target, words, structure)
