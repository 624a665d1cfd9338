"""Carries commands out on one chunk of a shard's vectors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gradstream.memory import Vector
from gradstream.runtime.base import Runtime, Work
from gradstream.server.arithmetic import dots_of, names_of, outs_of, perform
from gradstream.server.shard.executor import ShardExecutor
from gradstream.server.shard.store import ShardStore
from gradstream.server.shard.updates import BRIEF_ELEMS
from gradstream.wire import v1


def vectors_of(store: ShardStore, commands: Sequence[v1.Command]) -> dict[str, Vector]:
    """By name, the vectors that commands read and change. Raises ConfigError for one that does not exist."""
    return {name: store.vector(name) for name in names_of(commands)}


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
        return perform(commands, {name: span.tensor for name, span in spans.items()})

    scalars = await runtime.compute(
        arithmetic,
        work=Work("apply", elems=elems, brief=elems <= BRIEF_ELEMS),
        reads=[span for name, span in spans.items() if name not in outs],
        writes=[spans[name] for name in outs],
        shape_only=[0.0] * dots_of(commands),
    )
    store.headroom.forget(chunk)
    return scalars
