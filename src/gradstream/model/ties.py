"""Finds tensors of a module that share memory: weights that a script has tied by `b.weight.data = a.weight.data`.

torch's usual tie is one Parameter under two names. Memory that two Parameters share is seen by neither: where their
memory is replaced by views of a flat vector, each gets a place of its own, and the tie is gone without a word.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import combinations

import torch
from torch import nn

from gradstream.errors import ConfigError

Named = tuple[str, torch.Tensor]


def shared(tensors: Iterable[Named]) -> Iterator[tuple[Named, Named]]:
    """The pairs of tensors that have an element in common in memory. One object under several names is no pair."""
    storages: dict[int, list[Named]] = defaultdict(list)
    seen: set[int] = set()
    for name, tensor in tensors:
        if id(tensor) in seen or tensor.layout is not torch.strided or not tensor.numel():
            continue
        seen.add(id(tensor))
        storages[tensor.untyped_storage()._cdata].append((name, tensor))
    for several in storages.values():
        for one, other in combinations(several, 2):
            if _overlap(one[1], other[1]):
                yield one, other


def tie(module: nn.Module) -> None:
    """Makes trained parameters that are the same memory one Parameter, under all of their names.

    Raises:
        ConfigError: trained parameters share memory in another way: transposed, in part, or with a tensor that is
            not trained.
    """
    for (name, one), (other_name, other) in shared((*module.named_parameters(), *module.named_buffers())):
        if not (one.requires_grad or other.requires_grad):
            continue
        same = (one.shape, one.stride(), one.storage_offset(), one.dtype, one.requires_grad)
        if same != (other.shape, other.stride(), other.storage_offset(), other.dtype, other.requires_grad):
            raise ConfigError(f"from_torch: {_told(name, one, other_name, other)}")
        for part in module.modules():
            for key, parameter in part._parameters.items():
                if parameter is other:
                    part._parameters[key] = one  # type: ignore[assignment]  # its kind is that of the other


def check_untied(module: nn.Module, trained: Iterable[nn.Parameter]) -> None:
    """Raises ConfigError if one of these parameters shares memory with another tensor of the module or among them."""
    moved = list(trained)
    ids = set(map(id, moved))
    known = (*module.named_parameters(), *module.named_buffers())
    others = [(f"other.{index}", parameter) for index, parameter in enumerate(moved)]
    for (name, one), (other_name, other) in shared((*known, *others)):
        if id(one) in ids or id(other) in ids:
            raise ConfigError(
                f'session.wrap: {_told(name, one, other_name, other)}. Or use the strategy "synchronous" or '
                '"allreduce", which move no parameter'
            )


def _told(name: str, one: torch.Tensor, other_name: str, other: torch.Tensor) -> str:
    last, other_last = (text.rpartition(".")[2] for text in (name, other_name))
    return (
        f"{name!r}, {tuple(one.shape)}, and {other_name!r}, {tuple(other.shape)}, share memory (`.data = ...`, or a "
        "view), and each would get memory of its own: training would separate them. Tie them as one Parameter "
        f"(b.{other_last} = a.{last}); where one is the transpose or a part of the other, compute with it in forward()"
    )


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one storage have a byte in common."""
    begin, ends = zip(_range(one), _range(other), strict=True)
    if max(begin) >= min(ends):
        return False
    if one.is_contiguous() or other.is_contiguous() or one.element_size() != other.element_size():
        return True
    there = torch.zeros(max(ends) // one.element_size(), dtype=torch.bool)
    there.as_strided(one.shape, one.stride(), one.storage_offset())[...] = True
    return bool(there.as_strided(other.shape, other.stride(), other.storage_offset()).any())


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    """First and last byte of a tensor in its storage; the last one excluded."""
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin, size = int(tensor.storage_offset()), tensor.element_size()
    return begin * size, (begin + int(last) + 1) * size
