"""The arithmetic of commands on tensors: on a chunk of a shard, or on the whole vectors of a worker in a group.

Results have the same bits on any processor. Workers of a group compute them each for itself, and must agree on every
comparison of a line search. So products and sums are rounded one by one, never fused, and a dot product is summed in an
order that no width of a vector register decides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from gradstream.wire import v1

BLOCK = 1 << 16
"""Elements that are computed at once: copies of so many stay in the processor's cache."""
FEW = 32
"""Elements of a block that are added up in Python."""


def reads_of(command: v1.Command) -> list[str]:
    """Names of the vectors that a command reads."""
    kind = v1.Command
    if command.kind == kind.DOT:
        return [command.x, command.y]
    return [command.x] if command.kind in (kind.COPY, kind.ADD, kind.MULTIPLY) else []


def outs_of(commands: Sequence[v1.Command]) -> list[str]:
    """Names of the vectors that commands change."""
    return list(dict.fromkeys(one.out for one in commands if one.kind != v1.Command.DOT))


def names_of(commands: Sequence[v1.Command]) -> list[str]:
    """Names of all vectors that commands read or change."""
    return list(dict.fromkeys([*(name for one in commands for name in reads_of(one)), *outs_of(commands)]))


def dots_of(commands: Sequence[v1.Command]) -> int:
    """Number of scalars that commands give."""
    return sum(one.kind == v1.Command.DOT for one in commands)


def perform(commands: Sequence[v1.Command], tensors: Mapping[str, torch.Tensor]) -> list[float]:
    """Carries commands out, one after the other, in place. Returns the dot products, in order."""
    results = [_compute(one, tensors) for one in commands]
    return [result for result in results if result is not None]


def _compute(command: v1.Command, tensors: Mapping[str, torch.Tensor]) -> float | None:
    """Does the arithmetic of a command. Returns a dot product; None for a command that changes a vector."""
    inputs, kind = [tensors[name] for name in reads_of(command)], v1.Command
    if command.kind == kind.DOT:
        return _dot(*inputs)
    out = tensors[command.out]
    match command.kind:
        case kind.ZERO:
            out.zero_()
        case kind.SCALE:
            out.mul_(command.alpha)
        case kind.COPY:
            out.copy_(inputs[0])
        case kind.MULTIPLY:
            out.mul_(inputs[0])
        case _:
            for i in range(0, len(out), BLOCK):
                out[i : i + BLOCK].add_(inputs[0][i : i + BLOCK] * command.alpha)
    return None


def _dot(x: torch.Tensor, y: torch.Tensor) -> float:
    """x·y in float64: products block by block into one block, whose halves are added, and the last few exactly."""
    sums = torch.zeros(min(BLOCK, len(x)), dtype=torch.float64)
    for i in range(0, len(x), BLOCK):
        products = x[i : i + BLOCK].double() * y[i : i + BLOCK].double()
        sums[: len(products)].add_(products)
    while len(sums) > FEW:
        half = -(-len(sums) // 2)
        sums[: len(sums) - half].add_(sums[half:])
        sums = sums[:half]
    return math.fsum(sums.tolist())
