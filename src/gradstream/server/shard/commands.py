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
from collections.abc import Collection, Mapping, Sequence

import torch

from gradstream.errors import ConfigError
from gradstream.memory import Vector
from gradstream.runtime.base import Runtime, Work
from gradstream.server.aggregation import rank_of
from gradstream.server.shard.event_schedule import ParticipationChange
from gradstream.server.shard.executor import ShardExecutor
from gradstream.server.shard.state import Sender
from gradstream.server.shard.updates import BRIEF_ELEMS
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
            return await self._step(command)
        return v1.CommandResult(scalar=await self._do_on_vectors(command))

    async def _step(self, command: v1.Command) -> v1.CommandResult:
        """Carries a step of a procedure out on each chunk that has not got so far, and reports where all chunks are.

        A chunk that has a step and one that has not may be mixed when a sender died: the next one completes it.
        """
        while True:
            await self._executor.thawed.wait()
            async with self.turn:
                if self._executor.thawed.is_set():
                    return await self._step_in_turn(command)

    async def _step_in_turn(self, command: v1.Command) -> v1.CommandResult:
        note, latest, chunks = b"", 0, []
        reads = {name: self._store.vector(name) for one in command.commands for name in _reads(one)}
        outs = {one.out: self._store.vector(one.out) for one in command.commands if one.kind != one.DOT}
        for chunk in self._store.here:
            async with self._executor.leases.turn(chunk):
                procedure = self._executor.state.chunks[chunk].procedure
                if procedure.number < command.step.number:
                    scalars = await self._step_on_chunk(command, {**reads, **outs}, list(outs), chunk)
                    procedure.number, procedure.note = command.step.number, command.step.note
                    procedure.scalars = scalars
                    if command.step.pass_number:
                        procedure.begin(command.step.pass_number)
                    if self._executor.keep is not None:
                        await self._executor.keep(chunk)
                    if "" in outs:
                        self._executor.commanded(chunk)
                chunks.append(procedure.summary(chunk))
                if procedure.number > latest:
                    latest, note = procedure.number, procedure.note
        return v1.CommandResult(chunks=chunks, note=note)

    async def _step_on_chunk(
        self, command: v1.Command, vectors: Mapping[str, Vector], outs: Sequence[str], chunk: int
    ) -> Sequence[float]:
        """Carries the commands of a step out on one chunk, whose turn the caller has. Returns its scalars."""
        store, commands = self._store, list(command.commands)
        spans = {name: store.span(vector, chunk) for name, vector in vectors.items()}
        if not spans:
            return ()
        if outs:
            await self._executor.leases.gone(chunk)
        elems = len(next(iter(spans.values())))

        def arithmetic(_: object) -> list[float]:
            tensors = {name: span.tensor for name, span in spans.items()}
            results = [
                _carry_out(
                    one,
                    [tensors[name] for name in _reads(one)],
                    None if one.kind == one.DOT else tensors[one.out],
                )
                for one in commands
            ]
            return [result for one, result in zip(commands, results, strict=True) if one.kind == one.DOT]

        scalars = await self._runtime.compute(
            arithmetic,
            work=Work("apply", elems=elems * len(commands), brief=elems * len(commands) <= BRIEF_ELEMS),
            reads=[span for name, span in spans.items() if name not in outs],
            writes=[spans[name] for name in outs],
            shape_only=[0.0 for one in commands if one.kind == one.DOT],
        )
        store.headroom.forget(chunk)
        return scalars

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
            reads = [store.vector(name) for name in _reads(command)]
            out = None if command.kind == kind.DOT else store.vector(command.out)
            return sum([await self._do_on_chunk(command, reads, out, chunk) for chunk in store.here])

    async def _do_on_chunk(
        self, command: v1.Command, reads: Sequence[Vector], out: Vector | None, chunk: int
    ) -> float:
        """Carries a command out on one chunk, in turn with its readers and updates.

        Args:
            command: the command.
            reads: vectors that the command reads.
            out: vector that the command changes; None if it changes none.
            chunk: number of the chunk.

        Returns:
            The chunk's part of the result.
        """
        store = self._store
        spans = [store.span(vector, chunk) for vector in reads if vector is not out]
        written = [] if out is None else [store.span(out, chunk)]
        inputs = [store.span(vector, chunk).tensor for vector in reads]
        elems = len((spans + written)[0])
        async with self._executor.leases.turn(chunk):
            if out is not None:
                await self._executor.leases.gone(chunk)
            result = await self._runtime.compute(
                lambda _: _carry_out(command, inputs, written[0].tensor if written else None),
                work=Work("apply", elems=elems, brief=elems <= BRIEF_ELEMS),
                reads=spans,
                writes=written,
                shape_only=0.0,
            )
            store.headroom.forget(chunk)
            if out is store.parameters:
                self._executor.commanded(chunk)
        return result


def _reads(command: v1.Command) -> list[str]:
    """Names of the vectors that a command reads."""
    kind = v1.Command
    if command.kind == kind.DOT:
        return [command.x, command.y]
    return [command.x] if command.kind in (kind.COPY, kind.ADD, kind.MULTIPLY) else []


def _carry_out(command: v1.Command, inputs: Sequence[torch.Tensor], out: torch.Tensor | None) -> float:
    """Does the arithmetic of a command on one chunk, and returns the chunk's part of the result."""
    if out is None:
        return _dot(*inputs)
    match command.kind:
        case v1.Command.CREATE:
            out.zero_()
        case v1.Command.SCALE:
            out.mul_(command.alpha)
        case v1.Command.COPY:
            out.copy_(inputs[0])
        case v1.Command.MULTIPLY:
            out.mul_(inputs[0])
        case _:
            out.add_(inputs[0], alpha=command.alpha)
    return 0.0


def _dot(x: torch.Tensor, y: torch.Tensor) -> float:
    """x·y, accumulated in float64 block by block: a float64 copy of a whole vector would take too much memory."""
    block = 1 << 18
    return sum(
        float(torch.dot(x[i : i + block].double(), y[i : i + block].double()))
        for i in range(0, len(x), block)
    )
