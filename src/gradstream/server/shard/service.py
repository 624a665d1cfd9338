"""A shard on the network: what it is made of once a model is registered, and what it serves then.

Serves "push", "fetch" and "command" (see wire/v1.proto), by a `PushHandler`, a `FetchHandler` and `VectorCommands`.
Updates run on the node's arithmetic thread; a chunk is read only between two of them, so what a fetch gets of
a chunk is one version.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection

from gradstream.errors import ConfigError, GradstreamError, RefusedError
from gradstream.optim.base import Optimizer, skips_zeros
from gradstream.optim.decay import without_l2
from gradstream.optim.groups import GroupedRule
from gradstream.runtime.base import Runtime
from gradstream.server.aggregation import rank_of
from gradstream.server.chunks import ChunkMap
from gradstream.server.correction import SenderStates
from gradstream.server.quorum import QuorumDecision
from gradstream.server.rows import RowMap
from gradstream.server.shard.chunk_leases import ChunkLeases
from gradstream.server.shard.commands import VectorCommands
from gradstream.server.shard.config import ShardConfig
from gradstream.server.shard.executor import ShardExecutor
from gradstream.server.shard.fetch_handler import FetchHandler
from gradstream.server.shard.inspection import Inspection
from gradstream.server.shard.known_members import KnownMembers
from gradstream.server.shard.push_handler import PushHandler
from gradstream.server.shard.quorum_agreement import QuorumProtocol
from gradstream.server.shard.row_store import ChangedRows
from gradstream.server.shard.state import Sender, ShardState
from gradstream.server.shard.store import ShardStore
from gradstream.server.shard.updates import Updates
from gradstream.server.shard.wait_notifier import WaitNotifier
from gradstream.transport.base import Endpoint, Stream
from gradstream.wire import v1
from gradstream.wire.dtypes import from_wire

__all__ = ["ShardService"]

_WRITING = (v1.Command.COPY, v1.Command.SCALE, v1.Command.ADD)


class ShardService:
    """One shard. `register` it with the model, then it serves.

    Raises nothing itself: bad requests are refused; `failed` ends when an update could not be computed, which
    leaves the parameters undefined and must end the node.

    Attributes:
        on_verdict: called with each verdict of a quorum.
        counters: chunks that were pushed, by what became of them.
        readers: who is at a chunk.
        chunks, store, state, conductor, commands: once a model is registered.
        changed: then, where only what has changed is exchanged.
        agreement: then, where there is a quorum.
    """

    def __init__(self, runtime: Runtime, endpoint: Endpoint, config: ShardConfig) -> None:
        self._runtime = runtime
        self._endpoint = endpoint
        self._config = config
        self._opened = asyncio.Event()
        self.changed: ChangedRows | None = None
        self.agreement: QuorumProtocol | None = None
        self.on_verdict: Callable[[QuorumDecision], None] = lambda verdict: None
        self.counters: Counter[str] = Counter()
        self.readers = ChunkLeases()
        self._known_members = KnownMembers(endpoint.identity)
        endpoint.serve("push", self._push)
        endpoint.serve("fetch", self._fetch)
        endpoint.serve("command", self._command)

    def register(self, model: v1.ModelSpec, *, opens: bool = True) -> None:
        """Allocates for the registered model. From here on every size is known.

        Args:
            opens: begin to serve; else `open` does, once something was restored.

        Raises:
            ConfigError: the model cannot be had here, as its message says. Nothing is served then.
        """
        config, memory = self._config, self._runtime.memory
        dtype = from_wire(model.dtype)
        if dtype is None:
            raise ConfigError(f"the registered model has elements of unknown type {model.dtype}")
        optimizer, grouped = self._update_rule(model)
        self.chunks = ChunkMap(model.elems, model.chunk_elems, config.num_shards)
        here = self.chunks.chunks_of(config.rank)
        self.store = ShardStore(memory, self.chunks, config.rank, dtype, optimizer, grouped)
        if model.HasField("rows"):
            self.changed = ChangedRows(RowMap.of(self.chunks, model.rows), dtype)
        senders = None
        if config.correction is not None:
            senders = SenderStates(memory, self.chunks, self.store.elems, dtype, config.correction)
        updates = Updates(self._runtime, self.store, config.rule, senders, self.changed)
        self.state = ShardState(here, config.rule, quorum=config.quorum is not None, workers=config.workers)
        self.conductor = ShardExecutor(
            self._runtime,
            config.rank,
            config.order,
            self.state,
            self.store,
            updates,
            self.readers,
            self.counters,
        )
        if config.quorum is not None:
            self.agreement = self._agreement(config.quorum, len(here))
        self._furnish(updates)
        self._endpoint.identity.fingerprint = model.fingerprint
        if opens:
            self.open()

    def _update_rule(self, model: v1.ModelSpec) -> tuple[Optimizer, GroupedRule | None]:
        """That of the run, or the one that the workers bring."""
        optimizer, grouped = self._config.optimizer, self._config.grouped
        if model.optimizer:
            if self._config.find_optimizer is None:
                raise ConfigError("the workers bring an update rule, and this shard has no way to find it")
            optimizer, grouped = self._config.find_optimizer(model.optimizer)
        if model.HasField("rows") and not skips_zeros(grouped or optimizer):
            raise ConfigError(
                f"{optimizer} moves every parameter at every update, so it cannot be applied to the rows "
                "alone that have a gradient: use SGD without momentum or Adagrad, without weight decay; or "
                "exchange all of them (no row-sparse tensors, no significance)"
            )
        if self._config.decayed:
            return without_l2(optimizer), None if grouped is None else grouped.without_l2()
        return optimizer, grouped

    def _agreement(self, needed: int, num_chunks: int) -> QuorumProtocol:
        return QuorumProtocol(
            self._runtime,
            self._endpoint,
            rank=self._config.rank,
            needed=needed,
            num_chunks=num_chunks,
            num_shards=min(self._config.num_shards, self.chunks.num_chunks),
            waiting_every_s=self._config.waiting_every_s,
            workers=self._config.workers,
            decided=self._decide,
        )

    def _decide(self, verdict: QuorumDecision) -> None:
        self.on_verdict(verdict)
        self.conductor.judge(verdict)

    def _furnish(self, updates: Updates) -> None:
        """Makes what serves each method."""
        runtime, config, name = self._runtime, self._config, self._endpoint.identity.name
        inspection = Inspection(
            name,
            self.chunks,
            self.state.chunks,
            self.store.dtype,
            self.changed,
            self.counters,
            workers=config.workers,
            states=self.store.state,
        )
        self._inspection = inspection
        news = WaitNotifier(runtime, config.waiting_every_s, self.state.awaited)
        self._pushes = PushHandler(
            runtime, self.conductor, inspection, news, self.agreement, self._known_members
        )
        self._fetches = FetchHandler(
            runtime,
            self.conductor,
            inspection,
            news,
            self.store,
            updates,
            self.readers,
            self.changed,
            self._known_members,
            silence_s=config.silence_s,
        )
        self.commands = VectorCommands(
            runtime,
            self.store,
            self.state.chunks,
            self.state.versions,
            self.readers,
            self.conductor.commanded,
            lambda sender, clock: self.conductor.take_part(rank_of(sender), clock),
        )

    def keep_senders(self, members: Collection[Sender]) -> None:
        """Only these are members of the run: all others are refused, and what is kept of them is freed."""
        self._known_members.keep(members)
        self.conductor.keep_senders(members)
        self.commands.keep_senders(members)

    def open(self) -> None:
        """Serves from here on."""
        self._opened.set()

    async def failed(self) -> None:
        """Waits for an update that cannot be computed, and raises its error."""
        try:
            await asyncio.shield(self.conductor.failure)
        except GradstreamError:
            raise
        except Exception as error:
            raise GradstreamError(f"{self._endpoint.identity.name}: an update failed: {error}") from error

    # ---- what is served -----------------------------------------------------------------

    async def _push(self, stream: Stream) -> None:
        await self._admitted(stream)
        await self._pushes.serve(stream)

    async def _fetch(self, stream: Stream) -> None:
        await self._admitted(stream)
        await self._fetches.serve(stream)

    async def _command(self, stream: Stream) -> None:
        await self._admitted(stream)
        request = v1.Command.FromString(stream.opened.body)
        self._inspection.command(stream.opened.sender, request)
        if self.changed is not None and not request.out and request.kind in _WRITING:
            raise ConfigError(
                "a command on the parameters, of which only the rows that pushes change are sent"
            )
        result = await self.commands.carry_out(
            stream.opened.sender, stream.opened.incarnation, request, self.counters
        )
        data = result.SerializeToString()
        await stream.send(v1.Frame(body=v1.Body(data=data)))

    async def _admitted(self, stream: Stream) -> None:
        """Holds a stream that came before the model was registered; checks the model again."""
        await self._opened.wait()
        theirs, ours = stream.opened.fingerprint, self._endpoint.identity.fingerprint
        if theirs != ours:
            raise RefusedError(
                self._endpoint.identity.name,
                "BAD_FINGERPRINT",
                f"{stream.opened.sender} has model {theirs:016x}, this shard holds {ours:016x}; "
                "every node must run the same job file",
            )
        self._known_members.check(stream.opened)
