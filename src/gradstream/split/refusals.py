"""What a recorded module may not do, beside what torch.fx refuses itself: a graph would silently do something else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_flatten

from gradstream.split.module_state import Kept, line_of

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
