"""Makes a worker's exchange and its replica from the worker's configuration.

strategy                exchange            replica
ServerStrategy          ServerExchange      ServerReplica, RowReplica
GroupStrategy           GroupExchange       GroupReplica
PeerStrategy            PeerExchange        PeerReplica
SharedMemoryStrategy    SharedExchange      SharedReplica
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import torch

from gradstream.codec.low_rank import PowerSGD
from gradstream.collectives.group import Buckets, Group, GroupMembers
from gradstream.collectives.meetings import Meetings
from gradstream.coordinator.progress import receipt_of
from gradstream.data.base import BatchRef
from gradstream.data.feed import feed_of
from gradstream.data.joined import JoinedPlan, unjoined
from gradstream.errors import InternalError
from gradstream.memory import Vector
from gradstream.model.factors import factored_layers_of
from gradstream.sparse.model import SparseModel
from gradstream.strategies.base import GroupStrategy, PeerStrategy, ServerStrategy, SharedMemoryStrategy
from gradstream.telemetry.events import StepEvent
from gradstream.telemetry.noise_meter import NoiseMeter
from gradstream.traits import refuse
from gradstream.wire import v1
from gradstream.wire.chunks import member_name, part_map_of
from gradstream.worker.batch_gate import BatchGate
from gradstream.worker.computed import Refusals, RefusedGradient
from gradstream.worker.config import WorkerConfig
from gradstream.worker.exchange.base import Exchange, ExchangeContext
from gradstream.worker.exchange.forming import GroupForming
from gradstream.worker.exchange.group import FirstLook, GroupExchange
from gradstream.worker.exchange.peers import PeerExchange
from gradstream.worker.exchange.server import Remainders, codec_state, encoder_of
from gradstream.worker.exchange.shared import form_shared
from gradstream.worker.gradient import Differentiator, GradientSource
from gradstream.worker.joint_gradient import JointGradient
from gradstream.worker.local_steps import UNSENT, LocalParameters, LocalSteps
from gradstream.worker.loop import LoopSource
from gradstream.worker.parts.agreement import Agreement
from gradstream.worker.parts.gradients import PartPlace
from gradstream.worker.parts.joint_gradient import PartJointGradient
from gradstream.worker.replica.base import Replica, ReplicaContext
from gradstream.worker.replica.coded_sums import CodedSums, LowRankSums
from gradstream.worker.replica.group import GroupReplica
from gradstream.worker.replica.group_setup import GroupSetup
from gradstream.worker.replica.peer import PeerReplica
from gradstream.worker.replica.sufficient_factors import SufficientFactors
from gradstream.worker.replica.updater import LocalRule, Updater
from gradstream.worker.schedule import Schedule


class Assembly:
    """Makes the exchange of one worker, and the replica in it, by the strategy of the run.

    Args:
        context: the worker's place in the run.
        source: the worker's minibatches; a user's loop computes their gradients too.
        batch_gate: see `ReplicaContext`.
        on_step, on_boundary: see `ReplicaContext`.
        place: the place of this process in a replica of several; None if the replica is one process.
        meetings: its exchanges with single partners, where the strategy has such.
    """

    def __init__(
        self,
        context: ExchangeContext,
        source: Schedule | LoopSource,
        batch_gate: BatchGate,
        *,
        on_step: Callable[[StepEvent], None],
        on_boundary: Callable[[Replica, Sequence[BatchRef]], Awaitable[None]],
        place: PartPlace | None = None,
        meetings: Meetings | None = None,
    ) -> None:
        self._config = context.config
        self._context = context
        self._source = source
        self._batch_gate = batch_gate
        self._on_step = on_step
        self._on_boundary = on_boundary
        self._place = place
        self._meetings = meetings
        self._remainders: Remainders | None = None  # of a codec
        self._look: FirstLook | None = None
        self._local: dict[int, LocalSteps] = {}  # by rank, where workers train alone in between

    async def exchange(self) -> Exchange:
        """Makes the exchange. In a group or in shared memory, this waits for all other workers.

        Raises:
            ConfigError: this model or these machines do not allow what the job asks for.
            PeerLostError, DeadlineError: another worker was lost meanwhile.
        """
        config, context = self._config, self._context
        refuse({**config.run.traits, **_traits_of(config)})
        delay = isinstance(config.run.strategy, GroupStrategy) and config.run.strategy.delay
        names = [*codec_state(config.run.codec), *([UNSENT] if delay else ())]
        if config.run.codec is not None or delay:
            self._remainders = Remainders(context.runtime, config.model.layout, names)
            self._remainders.serve(context.endpoint)
            resume = context.resume
            if resume is not None and resume.remainders == config.run.remainders != "" and not context.late:
                await self._remainders.restore(resume)
        match config.run.strategy:
            case ServerStrategy() as strategy:
                from gradstream.worker.exchange.server import (
                    server_exchange,  # only runs with servers import it
                )

                replica, agreement = self._replica_context(), self._agreement
                kept = self._remainders
                return server_exchange(context, strategy, replica, self._source_of, agreement, kept)
            case GroupStrategy() as strategy:
                return await self._group_exchange(strategy)
            case PeerStrategy() as strategy:
                return self._peer_exchange(strategy)
            case SharedMemoryStrategy() as strategy:
                return await form_shared(context, self._replica_context(), strategy)
            case other:
                raise InternalError(f"{type(other).__name__} has no way of exchange")

    # ---- in pairs -------------------------------------------------------------------------

    def _peer_exchange(self, strategy: PeerStrategy) -> PeerExchange:
        config, context, meetings = self._config, self._context, self._meetings
        assert meetings is not None
        member, resume = context.member, context.resume
        return PeerExchange(
            context,
            strategy,
            meetings,
            lambda transfers: PeerReplica(
                self._replica_context(),
                meetings,
                config.run.job.seed,
                strategy,
                lambda: [node.rank for node in member.notice.nodes if node.role == "worker"],
                encoder_of(context, self._remainders),
                transfers,
                member.emit,
            ),
            restores=resume is not None and resume.replicas == config.run.replicas,
            chunk_elems=config.chunk_elems,
        )

    # ---- through a group ----------------------------------------------------------------

    async def _group_exchange(self, strategy: GroupStrategy) -> GroupExchange:
        config, context = self._config, self._context
        layout = config.model.layout
        if config.run.looks_first:
            size_bytes, answer_s = (
                layout.elems * layout.dtype.itemsize,
                context.config.run.job.deadlines.silence_s,
            )
            self._look = FirstLook(context.runtime, size_bytes, context.member.emit, answer_s)
        forming = GroupForming(
            context.runtime,
            context.member,
            self._form_group,
            survives=config.losses.stands_in and not context.runtime.memory.shape_only,
            interrupt=self._batch_gate.interrupt,
            agreement=self._agreement,
            alone=config.run.workers == 1,
        )
        first = await forming.through(lambda group: self._group_setup(strategy, group, forming.notice))
        return GroupExchange(
            context,
            strategy,
            forming,
            partial(self._group_setup, strategy),
            partial(GroupReplica, self._replica_context(), first, whole=forming.whole, delay=strategy.delay),
            (layout.elems, config.chunk_elems),
            None if config.run.parts == 1 else part_map_of(context.member.notice.model, config.part),
            self._look,
        )

    async def _form_group(self, notice: v1.Notice) -> Group:
        """Forms the group of the workers that are in."""
        config, context = self._config, self._context
        assert config.form_group is not None
        part = config.part  # a worker that is in has all its parts
        names = [member_name(part, node.rank) for node in notice.nodes if node.role == "worker"]
        rank = names.index(context.runtime.node)
        members = GroupMembers(names, rank, notice.epoch, config.run.job.deadlines.silence_s)
        return await config.form_group(
            context.runtime,
            context.endpoint,
            members,
            on_event=context.member.emit if self._look is None else self._look.heard,
        )

    async def _group_setup(
        self, strategy: GroupStrategy, group: Group, notice: v1.Notice, before: GroupSetup | None = None
    ) -> GroupSetup:
        config, layout = self._config, self._config.model.layout
        sharded = strategy.sharded
        if sharded is None:  # a user's loop may look at all parameters after another worker's death
            alone = config.loop is None and config.run.parts == 1
            grouped = config.update_rule[1]
            alone = (
                alone and not (grouped is not None and grouped.whole_matrices) and config.run.codec is None
            )
            sharded = group.shares_memory and alone and not strategy.factors
        bucket_elems = strategy.bucket_elems(layout.dtype.itemsize, config.chunk_elems)
        buckets = Buckets(layout.elems, bucket_elems, group.size)
        spare: Sequence[Vector] = ()
        if before is not None and not (sharded or before.sharded):
            parameters, updater = before.parameters, before.updater
        elif sharded:
            parameters, updater, spare = await self._common(group, buckets)
        else:
            parameters = group.allocate(
                layout.elems, layout.dtype, "parameters", lead_bytes=layout.lead_bytes
            )
            updater = self._updater(self._context.runtime.memory.allocate, [(0, layout.elems)])
        stand_ins = {one.rank: int(one.worker.rpartition("-")[2]) for one in notice.stand_ins}
        return GroupSetup(
            group=group,
            buckets=buckets,
            updater=updater,
            sharded=sharded,
            parameters=parameters,
            spare=spare,
            factors=None
            if sharded or stand_ins or config.run.job.noise_scale or config.run.codec is not None
            else self._sufficient_factors(strategy, group),
            stand_ins=stand_ins,
            joint=self._joint([lost for lost, rank in stand_ins.items() if rank == config.rank]),
            noise=self._noise(group) if config.run.job.noise_scale else None,
            coded=self._coded(group, buckets),
            low_rank=self._low_rank(group, buckets),
        )

    def _low_rank(self, group: Group, buckets: Buckets) -> LowRankSums | None:
        config, kept, runtime = self._config, self._remainders, self._context.runtime
        if kept is None or not isinstance(config.run.codec, PowerSGD):
            return None
        layout, left = config.model.layout, kept.vectors["residual"]
        return LowRankSums(
            runtime, group, layout, buckets.bounds, config.run.codec, config.run.job.seed, left, kept.bases
        )

    def _coded(self, group: Group, buckets: Buckets) -> CodedSums | None:
        context = self._context
        encoder = encoder_of(context, self._remainders)
        return None if encoder is None else CodedSums(context.runtime, group, buckets.bounds, encoder)

    def _noise(self, group: Group) -> NoiseMeter:
        parts = self._config.run.parts
        return NoiseMeter(self._config.rank, group.size * parts, pieces=1, emit=self._context.member.emit)

    async def _common(self, group: Group, buckets: Buckets) -> tuple[Vector, Updater, Sequence[Vector]]:
        """Parameters that all workers share, the rule for this worker's slices of them, and vectors to spare.

        Where the loss of a worker is survived, the workers share the rule's state as well, and have all of it twice.
        """
        config, layout = self._config, self._config.model.layout
        common = partial(group.common, layout.elems, layout.dtype)
        parameters = await common("parameters")
        if not config.losses.stands_in or group.size == 1:
            owned = buckets.owned(group.rank)
            return parameters, self._updater(self._context.runtime.memory.allocate, owned), ()
        names = config.update_rule[0].state_names
        states = {name: await common(name) for name in names}
        spare = [await common(name) for name in ("parameters", *names)]
        return parameters, self._updater(lambda elems, dtype, name: states[name], [(0, layout.elems)]), spare

    def _updater(
        self, allocate: Callable[[int, torch.dtype, str], Vector], ranges: Sequence[tuple[int, int]]
    ) -> Updater:
        return Updater(allocate, *self._config.update_rule, ranges, self._config.model.layout.dtype)

    def _joint(self, lost: Sequence[int]) -> JointGradient | None:
        """The gradients of this worker and of the lost ones for which it stands in."""
        if not lost:
            return None
        config, model = self._config, self._config.model
        assert isinstance(self._source, Schedule)
        part = self._context.runtime.memory.allocate(model.layout.elems, model.layout.dtype, "part")
        sources = {rank: self._source_of(rank) for rank in (config.rank, *lost)}
        if self._place is not None:
            return PartJointGradient(self._context.runtime, sources, self._source, model.reduction, part)
        return JointGradient(sources, self._source, model.reduction, part)

    def _sufficient_factors(self, strategy: GroupStrategy, group: Group) -> SufficientFactors | None:
        """The layers that may be exchanged as factors; None if there are none."""
        config, context = self._config, self._context
        layers = factored_layers_of(config.model)
        alone = config.loop is None and config.run.parts == 1
        several = isinstance(config.plan, JoinedPlan) or not alone or bool(config.clip)
        guessed = strategy.factors is None and context.runtime.memory.shape_only
        if several or not layers or config.run.workers == 1 or guessed:  # only a backward pass knows
            return None
        hosts = {_host_of(node.address) for node in context.member.notice.nodes if node.role == config.role}
        near = group.shares_memory or len(hosts) == 1
        num_workers = config.run.workers
        return SufficientFactors(
            context.runtime,
            group,
            layers,
            lambda layer, rows: strategy.as_factors(layer, rows, num_workers, near),
            config.model.layout.dtype,
            lambda event: context.member.emit(event) if config.rank == 0 else None,
        )

    # ---- the replica --------------------------------------------------------------------

    def _replica_context(self) -> ReplicaContext:
        config, context = self._config, self._context
        served = config.run.strategy if isinstance(config.run.strategy, ServerStrategy) else None
        quorum = None if served is None else served.quorum(config.run.workers)
        decays = not config.run.workers_optimize and served is not None and served.decays_gradients
        return ReplicaContext(
            runtime=context.runtime,
            model=config.model,
            schedule=self._source,
            gradients=self._gradients(),
            rank=config.rank,
            num_workers=config.run.workers,
            rule=LocalRule.of(
                config.run.optimizer.lr,
                config.update_rule,
                config.model.layout.elems,
                own=config.run.workers_optimize,
                decays=decays,
            ),
            joins=isinstance(config.plan, JoinedPlan) and config.inner_rule is None,
            batch_gate=self._batch_gate,
            first_step=config.first_step,
            # With a quorum, the first shard reports what is in the model: unlike this worker, it cannot be lost.
            on_receipt=self._on_receipt if quorum is None else lambda refs: None,
            on_step=self._on_step,
            on_boundary=self._on_boundary,
            refusals=self._refusals(),
            watch=config.watch,
            late=context.late,
            on_converged=context.member.emit,
        )

    def _gradients(self) -> GradientSource:
        if self._place is not None:
            return self._place.gradients
        return self._source if isinstance(self._source, LoopSource) else self._differentiator(self._source)

    def _refusals(self) -> Refusals:
        if self._config.role != "worker":
            return Refusals(lambda refused: None)  # its worker reports
        if self._config.run.job.non_finite != "skip":
            return Refusals()
        member = self._context.member
        return Refusals(self._refused, lambda: member.report(v1.BeatReport(sound=True), soon=False))

    @property
    def _on_receipt(self) -> Callable[[Sequence[BatchRef]], None]:
        member, strategy = self._context.member, self._config.run.strategy
        if self._place is not None:
            return self._place.pushed
        return (
            member.receipt_soon
            if isinstance(strategy, ServerStrategy) and strategy.in_passes
            else member.receipt
        )

    def _refused(self, one: RefusedGradient) -> None:
        refused = v1.Refused(
            batch=receipt_of(one.ref),
            samples=max(0, one.samples),
            step=one.step,
            what=one.what,
            in_a_row=one.in_a_row,
        )
        self._context.member.report(v1.BeatReport(refused=refused))

    @property
    def _agreement(self) -> Agreement | None:
        """With the other processes of this replica, where others may die and come back meanwhile."""
        survives = (
            self._config.losses.stands_in or self._config.losses.redoes
        ) and self._config.run.workers > 1
        return self._place.agreement if self._place is not None and survives else None

    def _source_of(self, rank: int) -> GradientSource:
        """The source of another worker's gradients, on this worker's model."""
        if self._place is not None:
            return self._place.source_of(rank)
        assert isinstance(self._source, Schedule)
        return self._differentiator(self._source, rank)

    def _differentiator(self, schedule: Schedule, rank: int | None = None) -> Differentiator:
        config = self._config
        rank = config.rank if rank is None else rank
        make: Callable[..., Differentiator] = Differentiator
        if config.inner_rule is not None:
            if rank in self._local:  # with what its inner optimizer has kept
                return self._local[rank]
            steps = LocalParameters if isinstance(config.run.strategy, PeerStrategy) else LocalSteps
            make = partial(steps, memory=self._context.runtime.memory, rule=config.inner_rule)
            if rank == config.rank and self._remainders is not None:
                make = partial(make, unsent=self._remainders.vectors.get(UNSENT))
        made = make(
            config.model,
            feed_of(config.run.job.data, unjoined(schedule.plan), rank, config.run.job.seed),
            schedule.plan,
            rank=rank,
            seed=config.run.job.seed,
            now=self._context.runtime.now,
            clip=config.clip,
            measures=config.run.variance_test is not None,
        )
        if isinstance(made, LocalSteps):
            self._local[rank] = made
        return made


def _traits_of(config: WorkerConfig) -> dict[str, str]:
    """What the model has; the job's rules about it are first known here, where the model is."""
    model, strategy, found = config.model, config.run.strategy, {}
    if model.layout.tables:
        found["tables"] = "a model with row-sparse tensors"
    if config.run.variance_test is not None:
        found["growth"] = "variance_test"
    if isinstance(model, SparseModel):
        found["sparse model"] = "a sparse model"
    if isinstance(strategy, GroupStrategy) and strategy.factors and not factored_layers_of(model):
        found["no factors"] = "this model"
    return found


def _host_of(address: str) -> str:
    """The host of an address host:port; any other address whole."""
    first = address.split(" ")[0]
    host, _, port = first.rpartition(":")
    return host if port.isdigit() else first
