"""Steps of a procedure on a shard: each chunk carries a step out for the first worker that brings it."""

from __future__ import annotations

import asyncio

from gradstream.runtime.base import Runtime
from gradstream.server.arithmetic import outs_of
from gradstream.server.procedure import ACCEPTED
from gradstream.server.shard.executor import ShardExecutor
from gradstream.server.shard.vector_arithmetic import carry_out, vectors_of
from gradstream.wire import v1


class ProcedureSteps:
    """Carries out steps.

    Args:
        runtime: runtime of the shard's node.
        executor: has the vectors and the chunks' records, and is told which chunks a step has changed.
        turn: lock that each step holds; see `VectorCommands`.
    """

    def __init__(self, runtime: Runtime, executor: ShardExecutor, turn: asyncio.Lock) -> None:
        self._runtime = runtime
        self._executor = executor
        self._turn = turn

    async def carry_out(self, command: v1.Command) -> v1.CommandResult:
        """Carries a step out on each chunk that has not got so far, and reports where all chunks are.

        A chunk that has a step and one that has not may be mixed when a sender died: the next one completes it.

        Raises:
            ConfigError: the step names a vector that does not exist.
        """
        while True:
            await self._executor.thawed.wait()
            async with self._turn:
                if self._executor.thawed.is_set():
                    return await self._in_turn(command)

    async def _in_turn(self, command: v1.Command) -> v1.CommandResult:
        executor, step = self._executor, command.step
        vectors = vectors_of(executor.store, command.commands)
        note, latest, chunks = b"", 0, []
        for chunk in executor.store.here:
            async with executor.leases.turn(chunk):
                procedure = executor.state.chunks[chunk].procedure
                if procedure.number < step.number:
                    scalars = await carry_out(self._runtime, executor, command.commands, vectors, chunk)
                    procedure.number, procedure.note, procedure.scalars = step.number, step.note, scalars
                    procedure.accepted = procedure.accepted or ACCEPTED in outs_of(command.commands)
                    if step.pass_number:
                        procedure.begin(step.pass_number)
                    if "" in outs_of(command.commands):
                        executor.commanded(
                            chunk
                        )  # readers wait for this turn: the backup has the new version first
                    if executor.keep is not None:
                        await executor.keep(chunk)
                chunks.append(procedure.summary(chunk))
                if procedure.number > latest:
                    latest, note = procedure.number, procedure.note
        return v1.CommandResult(chunks=chunks, note=note)
