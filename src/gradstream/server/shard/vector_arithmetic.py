"""The arithmetic of commands on one chunk of a shard's vectors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from gradstream.memory import Vector
from gradstream.runtime.base import Runtime, Work
from gradstream.server.shard.executor import ShardExecutor
from gradstream.server.shard.store import ShardStore
from gradstream.server.shard.updates import BRIEF_ELEMS
from gradstream.wire import v1


def reads_of(command: v1.Command) -> list[str]:
    """Names of the vectors that a command reads."""
    kind = v1.Command
    if command.kind == kind.DOT:
        return [command.x, command.y]
    return [command.x] if command.kind in (kind.COPY, kind.ADD, kind.MULTIPLY) else []


def outs_of(commands: Sequence[v1.Command]) -> list[str]:
    """Names of the vectors that commands change."""
    return list(dict.fromkeys(one.out for one in commands if one.kind != v1.Command.DOT))


def vectors_of(store: ShardStore, commands: Sequence[v1.Command]) -> dict[str, Vector]:
    """By name, the vectors that commands read and change. Raises ConfigError for one that does not exist."""
    reads = [name for one in commands for name in reads_of(one)]
    return {name: store.vector(name) for name in (*reads, *outs_of(commands))}


async def carry_out(
    runtime: Runtime,
    executor: ShardExecutor,
    commands: Sequence[v1.Command],
    vectors: Mapping[str, Vector],
    chunk: int,
) -> list[float]:
    """Carries commands out on a chunk, one after the other. The caller has the chunk's turn.

    Args:
        runtime: computes.
        executor: of the shard.
        commands: the commands.
        vectors: result of `vectors_of`.
        chunk: number of the chunk.

    Returns:
        The chunk's part of each dot product, in the order of the commands.
    """
    store, outs = executor.store, outs_of(commands)
    spans = {name: store.span(vector, chunk) for name, vector in vectors.items()}
    if not spans:
        return []
    if outs:
        await executor.leases.gone(chunk)
    elems = len(next(iter(spans.values()))) * len(commands)

    def arithmetic(_: object) -> list[float]:
        tensors = {name: span.tensor for name, span in spans.items()}
        results = [_compute(one, tensors) for one in commands]
        return [result for result in results if result is not None]

    scalars = await runtime.compute(
        arithmetic,
        work=Work("apply", elems=elems, brief=elems <= BRIEF_ELEMS),
        reads=[span for name, span in spans.items() if name not in outs],
        writes=[spans[name] for name in outs],
        shape_only=[0.0 for one in commands if one.kind == v1.Command.DOT],
    )
    store.headroom.forget(chunk)
    return scalars


def _compute(command: v1.Command, tensors: Mapping[str, torch.Tensor]) -> float | None:
    """Does the arithmetic of a command. Returns a dot product; None for a command that changes a vector."""
    inputs, kind = [tensors[name] for name in reads_of(command)], v1.Command
    if command.kind == kind.DOT:
        return _dot(*inputs)
    out = tensors[command.out]
    match command.kind:
        case kind.CREATE:
            out.zero_()
        case kind.SCALE:
            out.mul_(command.alpha)
        case kind.COPY:
            out.copy_(inputs[0])
        case kind.MULTIPLY:
            out.mul_(inputs[0])
        case _:
            out.add_(inputs[0], alpha=command.alpha)
    return None


def _dot(x: torch.Tensor, y: torch.Tensor) -> float:
    """x·y, accumulated in float64 block by block: a float64 copy of a whole vector would take too much memory."""
    block = 1 << 18
    return sum(
        float(torch.dot(x[i : i + block].double(), y[i : i + block].double()))
        for i in range(0, len(x), block)
    )
