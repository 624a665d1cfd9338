"""A shard on the network: makes its parts once a model is registered, and serves streams then.

Serves "push", "fetch" and "command" (see wire/v1.proto), by a `PushHandler`, a `FetchHandler` and `VectorCommands`.
Updates run on the node's arithmetic thread. A chunk is read only between two updates, so a fetch gets one version
of it.
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
from gradstream.wire.chunks import ChunkMap
from gradstream.wire.dtypes import from_wire

__all__ = ["ShardService"]

_WRITING = (v1.Command.COPY, v1.Command.SCALE, v1.Command.ADD)


class ShardService:
    """Serves one shard, once `register` has told it the model.

    Bad requests are refused. `failed` raises the error of an update that could not be computed.

    Args:
        runtime: runtime of the shard's node.
        endpoint: endpoint of the shard's node.
        config: the shard's part of the run.

    Attributes:
        on_decision: called with each decision of a quorum.
        counters: number of chunks that were pushed, by outcome.
        leases: which chunks are being read.
        chunks, store, state, executor, commands: exist once a model is registered.
        changed: then, where only changed rows are exchanged.
        quorum: then, where there is a quorum.
    """

    def __init__(self, runtime: Runtime, endpoint: Endpoint, config: ShardConfig) -> None:
        self._runtime = runtime
        self._endpoint = endpoint
        self._config = config
        self._opened = asyncio.Event()
        self.changed: ChangedRows | None = None
        self.quorum: QuorumProtocol | None = None
        self.on_decision: Callable[[QuorumDecision], None] = lambda decision: None
        self.counters: Counter[str] = Counter()
        self.leases = ChunkLeases()
        self._known_members = KnownMembers(endpoint.identity)
        endpoint.serve("push", self._push)
        endpoint.serve("fetch", self._fetch)
        endpoint.serve("command", self._command)

    def register(self, model: v1.ModelSpec, *, opens: bool = True) -> None:
        """Allocates for the registered model, and begins to serve.

        Args:
            model: the registered model; every size comes from it.
            opens: whether to serve at once; else `open` does, once something was restored.

        Raises:
            ConfigError: the shard cannot hold this model; nothing is served.
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
        self.executor = ShardExecutor(
            self._runtime,
            config.schedule,
            self.state,
            self.store,
            updates,
            self.leases,
            self.counters,
        )
        if config.quorum is not None:
            self.quorum = self._protocol(config.quorum, len(here))
        self._make_handlers(updates)
        self._endpoint.identity.fingerprint = model.fingerprint
        if opens:
            self.open()

    def _update_rule(self, model: v1.ModelSpec) -> tuple[Optimizer, GroupedRule | None]:
        """The update rule of the run, or the one that the workers bring."""
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

    def _protocol(self, needed: int, num_chunks: int) -> QuorumProtocol:
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

    def _decide(self, decision: QuorumDecision) -> None:
        self.on_decision(decision)
        self.executor.handle(decision)

    def _make_handlers(self, updates: Updates) -> None:
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
        notifier = WaitNotifier(runtime, config.waiting_every_s, self.state.awaited)
        self._pushes = PushHandler(
            runtime,
            self.executor,
            self.state,
            inspection,
            notifier,
            self.quorum,
            self._known_members,
            paced=config.rule.paced,
        )
        self._fetches = FetchHandler(
            runtime,
            self.executor,
            self.state,
            inspection,
            notifier,
            self.store,
            updates,
            self.leases,
            self.changed,
            self._known_members,
            silence_s=config.silence_s,
        )
        self.commands = VectorCommands(runtime, self.executor, self.state, self.store, self.leases)

    def keep_senders(self, members: Collection[Sender]) -> None:
        """Refuses all other nodes from now on, and frees what the shard keeps of them."""
        self._known_members.keep(members)
        self.executor.keep_senders(members)
        self.commands.keep_senders(members)

    def open(self) -> None:
        """Begins to serve."""
        self._opened.set()

    async def failed(self) -> None:
        """Waits for an update that cannot be computed, and raises its error: the parameters are undefined then."""
        try:
            await asyncio.shield(self.executor.failure)
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
        """Holds a stream back until the model is registered, and checks that its sender has the same model."""
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
