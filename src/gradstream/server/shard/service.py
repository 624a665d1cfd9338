"""A shard on the network: it builds its parts once a model is registered, and then serves streams.

It serves "push", "fetch" and "command" (see wire/v1.proto), by a `PushHandler`, a `FetchHandler` and
`Commands`; for another shard it keeps backups (`BackupHolder`), and to new ones it hands its chunks over
(`ChunkCopies`). Updates run on the node's arithmetic thread.
The shard sends a chunk only between two updates of it, so a fetch gets one version of each chunk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from functools import partial

from gradstream.codec.base import Encoder
from gradstream.errors import ConfigError, GradstreamError
from gradstream.optim.base import Optimizer, skips_zeros
from gradstream.optim.groups import GroupedRule, without_l2
from gradstream.runtime.base import Runtime
from gradstream.server.aggregation import SenderStates, WholeRule
from gradstream.server.rows import RowMap
from gradstream.server.shard.agreement import Quorum, TensorSums
from gradstream.server.shard.backup import BackupHolder, BackupLog, BackupOnPeer
from gradstream.server.shard.config import ShardConfig
from gradstream.server.shard.copies import BackupPlace, ChunkCopies, OtherShard
from gradstream.server.shard.executor import Commands, ShardExecutor
from gradstream.server.shard.inspection import Inspection
from gradstream.server.shard.pushes import KeptPushes, WaitNotifier
from gradstream.server.shard.requests import FetchHandler, PushHandler, PushPacer
from gradstream.server.shard.state import QuorumDecision, Sender, ShardState
from gradstream.server.shard.store import ShardStore
from gradstream.server.shard.updates import Updates
from gradstream.telemetry.events import Event
from gradstream.telemetry.meters import NoiseMeter
from gradstream.transport.base import Endpoint, Stream
from gradstream.wire import v1
from gradstream.wire.chunks import ChunkMap, Placement, shards_of
from gradstream.wire.frames import from_wire

# ---- service -----------------------------------------------------------------------------


class ShardService:
    """Serves one shard, from the time that `register` gives it the model.

    It refuses bad requests. `failed` raises the error of an update that could not be computed.

    Args:
        runtime: runtime of the shard's node.
        endpoint: endpoint of the shard's node.
        config: the shard's part of the run.

    Attributes:
        on_decision: called with each decision of a quorum.
        on_event: called with each event of the shard's arithmetic.
        executor, commands, kept_pushes, copies, inspection: exist once a model is registered.
        quorum: agrees with the other shards on each update; None before a model is registered, and without a quorum.
        tensor_sums: adds up sums over whole tensors with the other shards; None if the update rule needs none.
    """

    def __init__(self, runtime: Runtime, endpoint: Endpoint, config: ShardConfig) -> None:
        self._runtime = runtime
        self._endpoint = endpoint
        self._config = config
        self._opened = asyncio.Event()
        self._holder: asyncio.Future[BackupHolder] = asyncio.get_running_loop().create_future()
        self.quorum: Quorum | None = None
        self.tensor_sums: TensorSums | None = None
        self.on_decision: Callable[[QuorumDecision], None] = lambda decision: None
        self.on_event: Callable[[Event], None] = lambda event: None
        endpoint.serve("push", self._push)
        endpoint.serve("fetch", self._fetch)
        endpoint.serve("command", self._command)
        endpoint.serve("handover", self._hand_over)
        if config.acknowledge == "replicated":
            endpoint.serve("backup", self._keep_backup)
            endpoint.serve("backups", self._give_backups)

    @property
    def store(self) -> ShardStore:
        """The memory of the shard, once a model is registered."""
        return self.executor.store

    @property
    def state(self) -> ShardState:
        """The state machine of the shard, once a model is registered."""
        return self.executor.state

    def place(self, placement: Placement) -> None:
        """Sets the placement of this shard, before `register`."""
        self._config = replace(self._config, first=placement.first, num_shards=placement.shards)

    def register(self, model: v1.ModelSpec, *, opens: bool = True) -> None:
        """Allocates the shard's vectors for the registered model, and begins to serve.

        Args:
            model: the registered model, which determines every size.
            opens: whether to serve at once; else `open` does, after a checkpoint was loaded.

        Raises:
            ConfigError: the shard cannot hold this model; it serves nothing then.
        """
        runtime, endpoint, config = self._runtime, self._endpoint, self._config
        dtype = from_wire(model.dtype)
        if dtype is None:
            raise ConfigError(
                f"the registered model has elements of unknown type {model.dtype}; expected FLOAT32 or FLOAT64 of "
                "wire/v1.proto"
            )
        optimizer, grouped = self._update_rule(model)
        chunks, memory = ChunkMap(model.elems, model.chunk_elems, config.num_shards), runtime.memory
        rows = RowMap.of(chunks, model.rows) if model.HasField("rows") else None
        store = ShardStore(memory, chunks, config.index, dtype, optimizer, grouped, rows)
        senders = None
        if config.correction is not None:
            senders = SenderStates(memory, chunks, len(store.parameters), dtype, config.correction)
        state = ShardState(store.here, config.rule, quorum=config.quorum is not None, workers=config.workers)
        holders = shards_of(model, config.num_shards)
        if grouped is not None and grouped.per_tensor and store.here:
            self.tensor_sums = TensorSums(
                runtime, endpoint, config, len(store.here), grouped.num_tensors, holders
            )
        noise = None
        if config.noise_scale:
            noise = NoiseMeter(
                config.rank, len(holders), len(store.here), emit=lambda event: self.on_event(event)
            )
        updates = Updates(runtime, store, config.rule, senders, self.tensor_sums, noise)
        self.executor = ShardExecutor(runtime, config.schedule, state, store, updates)
        if config.quorum is not None and store.here:  # who has no chunks has nothing to agree on
            whole = isinstance(config.rule.robust, WholeRule)
            measure = partial(self._measure, updates, config.quorum) if whole else None
            self.quorum = Quorum(runtime, endpoint, config, chunks, self._decide, measure)
        self.inspection = inspection = Inspection(endpoint.identity, store, self.executor.counters, config)
        notifier = WaitNotifier(runtime, config.waiting_every_s, state)
        pacer = PushPacer() if config.rule.paced else None
        self.kept_pushes = KeptPushes(state)
        self.executor.on_freed = self.kept_pushes.report
        self._pushes = PushHandler(
            runtime, self.executor, inspection, notifier, self.quorum, pacer, self.kept_pushes
        )
        encoder = None if config.fetch_codec is None else Encoder(config.fetch_codec, dtype)
        self._fetches = FetchHandler(runtime, self.executor, inspection, notifier, config.silence_s, encoder)
        self.commands = Commands(runtime, self.executor)
        place = self._backup_place(optimizer)
        self.copies = ChunkCopies(runtime, config, self.executor, self.commands, self.kept_pushes, place)
        endpoint.identity.fingerprint = model.fingerprint
        if opens:
            self.open()

    def _backup_place(self, optimizer: Optimizer) -> BackupPlace | None:
        """What keeps the backups of this shard, and, where this one keeps those of another, memory for them."""
        config, runtime, owner = self._config, self._runtime, self._config.backed_up_here
        if config.acknowledge == "logged":
            return BackupLog(runtime, config.retry_s)
        if config.acknowledge != "replicated":
            return None
        name, chunks = config.placement.names[owner], self.store.chunks
        states = optimizer.state_names
        self._holder.set_result(BackupHolder(runtime, chunks, name, owner, self.store.dtype, states))
        return BackupOnPeer(OtherShard(runtime, self._endpoint, config.backup_holder, config))

    def _update_rule(self, model: v1.ModelSpec) -> tuple[Optimizer, GroupedRule | None]:
        """The update rule of the run, or the rule that the workers bring."""
        optimizer, grouped = self._config.optimizer, self._config.grouped
        if model.optimizer:
            if self._config.find_optimizer is None:
                raise ConfigError(
                    "the first worker registered an update rule, but this shard's configuration has no find_optimizer "
                    "to make it with"
                )
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

    async def _measure(self, updates: Updates, num_workers: int, round: int) -> list[float]:  # noqa: A002
        return await updates.measure(self.executor.contributions(round), num_workers)

    def _decide(self, decision: QuorumDecision) -> None:
        self.on_decision(decision)
        self.executor.handle(decision)

    def keep_senders(self, members: Collection[Sender], fenced: Iterable[v1.Fenced] = ()) -> None:
        """Refuses all other nodes from now on, and frees their state.

        Args:
            members: the members of the run.
            fenced: lost workers of which the shard keeps what it knows, and reports it.
        """
        self.inspection.members = frozenset(members)
        self.kept_pushes.keep(members, fenced)
        self.executor.keep_senders(members, self.kept_pushes.fenced)
        self.commands.keep_senders(members)
        self._pushes.keep_senders(members)
        self.kept_pushes.report()

    def open(self) -> None:
        """Begins to serve."""
        self._opened.set()

    async def failed(self) -> None:
        """Waits until an update cannot be computed, and raises its error: the parameters are undefined then."""
        try:
            await asyncio.shield(self.executor.failure)
        except GradstreamError:
            raise
        except Exception as error:
            raise GradstreamError(f"{self._endpoint.identity.name}: an update failed: {error}") from error

    # ---- requests -----------------------------------------------------------------------

    async def _push(self, stream: Stream) -> None:
        await self._admitted(stream)
        await self._pushes.serve(stream)

    async def _fetch(self, stream: Stream) -> None:
        await self._admitted(stream)
        await self._fetches.serve(stream)

    async def _command(self, stream: Stream) -> None:
        await self._admitted(stream)
        request = v1.Command.FromString(stream.opened.body)
        self.inspection.check_command(stream.opened.sender, request)
        result = await self.commands.carry_out(stream.opened.sender, stream.opened.incarnation, request)
        if request.kind != v1.Command.STEP:
            await self.copies.keep_clocks()
        data = result.SerializeToString()
        await stream.send(v1.Frame(body=v1.Body(data=data)))

    async def _hand_over(self, stream: Stream) -> None:
        await self._opened.wait()
        await self.copies.hand_over(stream)

    async def _keep_backup(self, stream: Stream) -> None:
        holder = await asyncio.shield(self._holder)
        await holder.serve_backup(stream)

    async def _give_backups(self, stream: Stream) -> None:
        holder = await asyncio.shield(self._holder)
        await holder.serve_backups(stream)

    async def _admitted(self, stream: Stream) -> None:
        """Holds a stream back until the model is registered, and then checks its sender."""
        await self._opened.wait()
        self.inspection.check_model(stream.opened)
        self.inspection.check_member(stream.opened)
