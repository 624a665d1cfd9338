"""Commands of workers to a shard: to be waited for or not, and the steps of a procedure.

A worker sends the same command to all shards. Each shard carries it out exactly once per (sender, incarnation,
sequence): a retry gets the first result again.

A step goes from chunk to chunk, and takes its turn at each as an update does. Fetches and updates of the other chunks
continue meanwhile. A fetch gets each chunk either before the step or after it. Each chunk carries a step out for the
first worker that brings it, and the shard carries out one step at a time.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Collection, Mapping

from gradstream.errors import NonFiniteError
from gradstream.memory import Vector
from gradstream.model.base import finite
from gradstream.runtime.base import Runtime, Work
from gradstream.server.aggregation import rank_of
from gradstream.server.procedure import ACCEPTED, dots_of, names_of, outs_of, perform
from gradstream.server.shard.event_schedule import ParticipationChange
from gradstream.server.shard.executor import ShardExecutor
from gradstream.server.shard.state import Sender
from gradstream.server.shard.updates import BRIEF_ELEMS
from gradstream.wire import v1

KEPT_RESULTS = 8
"""Results that are kept of each sender; a client has a few commands in flight."""


class Commands:
    """Carries out commands.

    Args:
        runtime: runtime of the shard's node.
        executor: has the vectors, and is told which chunks a step has changed, and which workers take part.

    Attributes:
        turn: lock that each step holds; no step is half done while another task holds it.
    """

    def __init__(self, runtime: Runtime, executor: ShardExecutor) -> None:
        self._runtime = runtime
        self._executor = executor
        self.turn = asyncio.Lock()
        self._results: dict[Sender, OrderedDict[int, asyncio.Task[v1.CommandResult]]] = {}

    async def carry_out(self, sender: str, incarnation: int, command: v1.Command) -> v1.CommandResult:
        """Carries a command out unless that was done before, and returns its result.

        Args:
            sender: node name of the worker.
            incarnation: incarnation of the worker.
            command: the command: LEAVE, ENTER or STEP.

        Raises:
            NonFiniteError: a step has made an element NaN or infinite. The shard cannot continue.
        """
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
        await self._executor.thawed.wait()
        if command.kind == v1.Command.STEP:
            return await self._step(sender, command)
        enters = command.kind == v1.Command.ENTER
        change = ParticipationChange(
            "enter" if enters else "leave", (rank_of(sender),), command.clock if enters else 0
        )
        self._executor.handle(change)
        return v1.CommandResult(clock=change.new_clock)

    # ---- steps of a procedure -----------------------------------------------------------

    async def _step(self, sender: str, command: v1.Command) -> v1.CommandResult:
        """Carries a step out on each chunk that has not got so far, and reports where all chunks are.

        A chunk that has a step and one that has not may be mixed when a sender died: the next one completes it.
        """
        while True:
            await self._executor.thawed.wait()
            async with self.turn:
                if self._executor.thawed.is_set():
                    return await self._step_in_turn(sender, command)

    async def _step_in_turn(self, sender: str, command: v1.Command) -> v1.CommandResult:
        executor, step = self._executor, command.step
        vectors = {name: executor.store.vector(name) for name in names_of(command.commands)}
        note, by, latest, chunks = b"", "", 0, []
        for chunk in executor.store.here:
            async with executor.leases.turn(chunk):
                procedure = executor.state.chunks[chunk].procedure
                if procedure.number < step.number:
                    scalars = await self._compute(sender, command, vectors, chunk)
                    procedure.number, procedure.scalars = step.number, scalars
                    procedure.note, procedure.by = step.note, sender
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
                    latest, note, by = procedure.number, procedure.note, procedure.by
        return v1.CommandResult(chunks=chunks, note=note, by=by)

    async def _compute(
        self, sender: str, step: v1.Command, vectors: Mapping[str, Vector], chunk: int
    ) -> list[float]:
        """Carries the commands of a step out on a chunk, one after the other. The caller has the chunk's turn.

        Returns:
            The chunk's part of each dot product, in the order of the commands.
        """
        store, commands = self._executor.store, step.commands
        outs = outs_of(commands)
        spans = {name: store.span(vector, chunk) for name, vector in vectors.items()}
        if not spans:
            return []
        if outs:
            await self._executor.leases.gone(chunk)
        elems = len(next(iter(spans.values()))) * len(commands)

        def arithmetic(_: object) -> list[float]:
            scalars = perform(commands, {name: span.tensor for name, span in spans.items()})
            if wrong := [name or "the parameters" for name in outs if not finite(spans[name].tensor)]:
                where = f"chunk {chunk}, step {step.step.number} of the procedure, sent by {sender}"
                raise NonFiniteError(
                    f"{where}: it has made elements of {', '.join(wrong)} NaN or infinite", culprit=sender
                )
            return scalars

        try:
            scalars = await self._runtime.compute(
                arithmetic,
                work=Work("apply", elems=elems, brief=elems <= BRIEF_ELEMS),
                reads=[span for name, span in spans.items() if name not in outs],
                writes=[spans[name] for name in outs],
                shape_only=[0.0] * dots_of(commands),
            )
        except NonFiniteError as error:
            self._executor.fail(error)
            raise
        store.headroom.forget(chunk)
        return scalars
