"""Commands on a shard's named vectors, for strategies that need more of a server than push and fetch.

A worker sends the same command to all shards, and each shard carries it out on its own ranges, exactly once per
(sender, incarnation, sequence): a retry gets the first result again.

A command on vectors goes from chunk to chunk, and takes its turn at each as an update does. Fetches and updates of
the other chunks go on meanwhile. A fetch gets each chunk either before the command or after it. The shard carries
out one command at a time.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Collection, Mapping

from gradstream.errors import ConfigError
from gradstream.memory import Vector
from gradstream.runtime.base import Runtime
from gradstream.server.aggregation import rank_of
from gradstream.server.arithmetic import outs_of
from gradstream.server.shard.event_schedule import ParticipationChange
from gradstream.server.shard.executor import ShardExecutor
from gradstream.server.shard.instructions import Sender
from gradstream.server.shard.procedures import ProcedureSteps
from gradstream.server.shard.vector_arithmetic import carry_out, vectors_of
from gradstream.wire import v1

KEPT_RESULTS = 64  # per sender; a client has a few commands in flight


class VectorCommands:
    """Carries out commands.

    Args:
        runtime: runtime of the shard's node.
        executor: has the vectors, and is told which chunks a command has changed, and which workers take part.

    Attributes:
        on_vectors: whether there was a command on vectors.
        turn: lock that each command on vectors holds; no command is half done while another task holds it.
    """

    def __init__(self, runtime: Runtime, executor: ShardExecutor) -> None:
        self._runtime = runtime
        self._executor = executor
        self._store = executor.store
        self.turn = asyncio.Lock()
        self._steps = ProcedureSteps(runtime, executor, self.turn)
        self.on_vectors = False
        self._results: dict[Sender, OrderedDict[int, asyncio.Task[v1.CommandResult]]] = {}

    async def carry_out(self, sender: str, incarnation: int, command: v1.Command) -> v1.CommandResult:
        """Carries a command out unless that was done before, and returns its result.

        Args:
            sender: node name of the worker.
            incarnation: incarnation of the worker.
            command: the command.

        Raises:
            ConfigError: the command names a vector that does not exist.
        """
        if command.kind == v1.Command.STATUS:
            versions = self._executor.state.versions()
            return v1.CommandResult(
                min_version=max(0, min(versions, default=0)),
                max_version=max(0, *versions, 0),
                counters=self._executor.counters,
            )
        results = self._results.setdefault((sender, incarnation), OrderedDict())
        if command.sequence not in results:
            name = f"command-{sender}-{command.sequence}"
            results[command.sequence] = self._runtime.spawn(self._do(sender, command), name=name)
            while len(results) > KEPT_RESULTS:
                results.popitem(last=False)
        return await asyncio.shield(results[command.sequence])

    def keep_senders(self, members: Collection[Sender]) -> None:
        """Frees the results of all other senders: they have left and never ask again."""
        self._results = {sender: kept for sender, kept in self._results.items() if sender in members}

    async def _do(self, sender: str, command: v1.Command) -> v1.CommandResult:
        kind = v1.Command
        await self._executor.thawed.wait()
        if command.kind in (kind.LEAVE, kind.ENTER):
            enters = command.kind == kind.ENTER
            change = ParticipationChange(
                "enter" if enters else "leave", (rank_of(sender),), command.clock if enters else 0
            )
            self._executor.handle(change)
            return v1.CommandResult(clock=change.new_clock)
        if command.kind == kind.STEP:
            return await self._steps.carry_out(command)
        return v1.CommandResult(scalar=await self._do_on_vectors(command))

    async def _do_on_vectors(self, command: v1.Command) -> float:
        store, kind = self._store, v1.Command
        self.on_vectors = True
        if command.kind in (kind.CREATE, kind.DROP) and not command.out:
            raise ConfigError(
                f"{kind.Kind.Name(command.kind)}: got '', the name of the parameters; expected that of another vector"
            )
        async with self.turn:
            if command.kind == kind.DROP:
                store.drop(command.out)
                return 0.0
            if command.kind == kind.CREATE and store.create(command.out):
                return 0.0
            vectors = vectors_of(store, [command])
            return sum([await self._do_on_chunk(command, vectors, chunk) for chunk in store.here])

    async def _do_on_chunk(self, command: v1.Command, vectors: Mapping[str, Vector], chunk: int) -> float:
        """Carries a command out on one chunk, in turn with its readers and updates. Returns its part of the result."""
        async with self._executor.leases.turn(chunk):
            scalars = await carry_out(self._runtime, self._executor, [command], vectors, chunk)
            if "" in outs_of([command]):
                self._executor.commanded(chunk)
        return sum(scalars)
