"""Typed commands on a shard's named vectors: what a strategy needs of a server besides push and fetch.

The same command goes to all shards; each carries it out on its own ranges. A command is
exactly-once per (sender, incarnation, sequence): a retry gets the first result again.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Sequence

import torch

from gradstream.errors import ConfigError
from gradstream.runtime.base import Runtime, Work
from gradstream.server.store import Store
from gradstream.wire import v1

__all__ = ["Commands"]

MAX_NAMED = 64  # vectors, each as long as the shard's parameters
KEPT_RESULTS = 64  # per sender; a client has a few commands in flight


class Commands:
    """Carries out commands.

    Args:
        runtime: of the shard's node.
        store: its vectors.
        versions: gives the versions of its chunks.
        unread: waits until no peer reads any of them where they lie.
        take_part: told which worker is at which clock, or has nothing to do (None); returns its clock.
    """

    def __init__(
        self,
        runtime: Runtime,
        store: Store,
        versions: Callable[[], Sequence[int]],
        unread: Callable[[], Awaitable[None]],
        take_part: Callable[[str, int | None], int],
    ) -> None:
        self._runtime = runtime
        self._store = store
        self._versions = versions
        self._unread = unread
        self._take_part = take_part
        self._results: dict[tuple[str, int], OrderedDict[int, asyncio.Task[v1.CommandResult]]] = {}

    async def carry_out(
        self, sender: str, incarnation: int, command: v1.Command, counters: Counter[str]
    ) -> v1.CommandResult:
        """Does it, unless it was done before. Raises ConfigError for vectors that do not exist."""
        if command.kind == v1.Command.STATUS:
            versions = self._versions()
            return v1.CommandResult(
                min_version=max(0, min(versions, default=0)),
                max_version=max(0, *versions, 0),
                counters=counters,
            )
        results = self._results.setdefault((sender, incarnation), OrderedDict())
        if command.sequence not in results:
            name = f"command-{sender}-{command.sequence}"
            results[command.sequence] = self._runtime.spawn(self._do(sender, command), name=name)
            while len(results) > KEPT_RESULTS:
                results.popitem(last=False)
        return await asyncio.shield(results[command.sequence])

    async def _do(self, sender: str, command: v1.Command) -> v1.CommandResult:
        kind = v1.Command
        if command.kind in (kind.LEAVE, kind.ENTER):
            own = command.clock if command.kind == kind.ENTER else None
            return v1.CommandResult(clock=self._take_part(sender, own))
        return v1.CommandResult(scalar=await self._do_on_vectors(command))

    async def _do_on_vectors(self, command: v1.Command) -> float:
        store, kind = self._store, v1.Command
        if command.kind in (kind.CREATE, kind.DROP) and not command.out:
            raise ConfigError("CREATE and DROP need the name of a vector other than the parameters")
        if command.kind == kind.DROP:
            store.drop(command.out)
            return 0.0
        await self._unread()
        if command.kind == kind.CREATE:
            if store.num_named >= MAX_NAMED:
                raise ConfigError(
                    f"{command.out[:64]!r} would be the {MAX_NAMED + 1}th named vector: DROP one"
                )
            store.create(command.out)
            return 0.0
        x = store.vector(command.x) if command.kind != kind.SCALE else store.vector(command.out)
        if command.kind == kind.DOT:
            y = store.vector(command.y)
            return await self._runtime.compute(
                lambda _: _dot(x.tensor, y.tensor),
                work=Work("apply", elems=len(x)),
                reads=[x.all, y.all],
                phantom=0.0,
            )
        out = store.vector(command.out)

        def change(_: object) -> float:
            if command.kind == kind.COPY:
                out.tensor.copy_(x.tensor)
            elif command.kind == kind.SCALE:
                out.tensor.mul_(command.alpha)
            else:
                out.tensor.add_(x.tensor, alpha=command.alpha)
            return 0.0

        reads = [] if x is out else [x.all]
        work = Work("apply", elems=len(out))
        return await self._runtime.compute(change, work=work, reads=reads, writes=[out.all], phantom=0.0)


def _dot(x: torch.Tensor, y: torch.Tensor) -> float:
    """x·y, accumulated in float64 block by block, so that no second vector is made."""
    block = 1 << 18
    return sum(
        float(torch.dot(x[i : i + block].double(), y[i : i + block].double()))
        for i in range(0, len(x), block)
    )
