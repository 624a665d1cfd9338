"""What a worker's exchange is made of, and the registry of the ways of exchange.

strategy                way of exchange    its exchange        its replica
ServerStrategy          worker/server      ServerExchange      ServerReplica, RowReplica
GroupStrategy           worker/group       GroupExchange       GroupReplica
PeerStrategy            worker/pairs       PeerExchange        PeerReplica
SharedMemoryStrategy    worker/shared      SharedExchange      SharedReplica
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from importlib import import_module

from gradstream.collectives.pairwise import PairwiseExchange
from gradstream.coordinator.progress import receipt_of
from gradstream.data.base import BatchRef
from gradstream.data.feed import feed_of
from gradstream.data.plan import JoinedPlan, unjoined
from gradstream.errors import InternalError
from gradstream.model.factors import factored_layers_of
from gradstream.sparse.model import SparseModel
from gradstream.strategies.base import (
    GroupStrategy,
    PeerStrategy,
    ServerStrategy,
    SharedMemoryStrategy,
)
from gradstream.telemetry.events import StepEvent
from gradstream.traits import refuse
from gradstream.wire import v1
from gradstream.worker.batch_gate import BatchGate
from gradstream.worker.computed import Refusals, RefusedGradient
from gradstream.worker.config import WorkerConfig
from gradstream.worker.exchange import Exchange, ExchangeContext
from gradstream.worker.gradient import Differentiator, GradientSource
from gradstream.worker.local_steps import UNSENT, LocalParameters, LocalSteps
from gradstream.worker.loop import LoopSource
from gradstream.worker.parts.agreement import Agreement
from gradstream.worker.parts.gradients import PartPlace
from gradstream.worker.remainders import Remainders, codec_state
from gradstream.worker.replica import Replica, ReplicaContext
from gradstream.worker.schedule import Schedule
from gradstream.worker.updater import LocalRule

WAYS: Mapping[type, str] = {
    ServerStrategy: "gradstream.worker.server.exchange",
    GroupStrategy: "gradstream.worker.group.exchange",
    PeerStrategy: "gradstream.worker.pairs.exchange",
    SharedMemoryStrategy: "gradstream.worker.shared.exchange",
}
"""By base of a strategy, the module whose `make` makes its exchange. A run imports that of its own way alone."""


class Assembly:
    """What every way of exchange makes one worker's exchange of.

    Args:
        context: the worker's place in the run.
        source: the worker's minibatches; a user's loop computes their gradients too.
        batch_gate: see `ReplicaContext`.
        on_step, on_boundary: see `ReplicaContext`.
        place: the place of this process in a replica of several; None if the replica is one process.
        pairwise: its exchanges with single partners, where the strategy has such.

    Attributes:
        context, config, source, batch_gate, place, pairwise: see above.
        remainders: what the worker has not sent yet, where a codec or a delay keeps something; else None.
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
        pairwise: PairwiseExchange | None = None,
    ) -> None:
        self.config = context.config
        self.context = context
        self.source = source
        self.batch_gate = batch_gate
        self._on_step = on_step
        self._on_boundary = on_boundary
        self.place = place
        self.pairwise = pairwise
        self.remainders: Remainders | None = None
        self._local: dict[int, LocalSteps] = {}  # by rank, where workers train alone in between

    async def exchange(self) -> Exchange:
        """Makes the exchange. In a group or in shared memory, this waits for all other workers.

        Raises:
            ConfigError: this model or these machines do not allow what the job asks for.
            PeerLostError, DeadlineError: another worker was lost meanwhile.
        """
        config, context = self.config, self.context
        refuse({**config.run.traits, **_traits_of(config)})
        delay = isinstance(config.run.strategy, GroupStrategy) and config.run.strategy.delay
        names = [*codec_state(config.run.codec), *([UNSENT] if delay else ())]
        if config.run.codec is not None or delay:
            self.remainders = Remainders(context.runtime, config.model.layout, names)
            self.remainders.serve(context.endpoint)
            resume = context.resume
            if resume is not None and resume.remainders == config.run.remainders != "" and not context.late:
                await self.remainders.restore(resume)
        way = next((module for kind, module in WAYS.items() if isinstance(config.run.strategy, kind)), None)
        if way is None:
            raise InternalError(f"{type(config.run.strategy).__name__} has no way of exchange")
        make: Callable[[Assembly], Awaitable[Exchange]] = import_module(way).make
        return await make(self)

    def replica_context(self) -> ReplicaContext:
        """The parts of the worker's replica."""
        config, context = self.config, self.context
        served = config.run.strategy if isinstance(config.run.strategy, ServerStrategy) else None
        quorum = None if served is None else served.quorum(config.run.workers)
        decays = not config.run.workers_optimize and served is not None and served.decays_gradients
        return ReplicaContext(
            runtime=context.runtime,
            model=config.model,
            schedule=self.source,
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
            batch_gate=self.batch_gate,
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
        if self.place is not None:
            return self.place.gradients
        return self.source if isinstance(self.source, LoopSource) else self._differentiator(self.source)

    def _refusals(self) -> Refusals:
        if self.config.role != "worker":
            return Refusals(lambda refused: None)  # its worker reports
        if self.config.run.job.non_finite != "skip":
            return Refusals()
        member = self.context.member
        return Refusals(self._refused, lambda: member.report(v1.BeatReport(sound=True), soon=False))

    @property
    def _on_receipt(self) -> Callable[[Sequence[BatchRef]], None]:
        member, strategy = self.context.member, self.config.run.strategy
        if self.place is not None:
            return self.place.pushed
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
        self.context.member.report(v1.BeatReport(refused=refused))

    @property
    def agreement(self) -> Agreement | None:
        """With the other processes of this replica, where others may die and come back meanwhile."""
        survives = (self.config.losses.stands_in or self.config.losses.redoes) and self.config.run.workers > 1
        return self.place.agreement if self.place is not None and survives else None

    def source_of(self, rank: int) -> GradientSource:
        """The source of another worker's gradients, on this worker's model."""
        if self.place is not None:
            return self.place.source_of(rank)
        assert isinstance(self.source, Schedule)
        return self._differentiator(self.source, rank)

    def _differentiator(self, schedule: Schedule, rank: int | None = None) -> Differentiator:
        config = self.config
        rank = config.rank if rank is None else rank
        make: Callable[..., Differentiator] = Differentiator
        if config.inner_rule is not None:
            if rank in self._local:  # with what its inner optimizer has kept
                return self._local[rank]
            steps = LocalParameters if isinstance(config.run.strategy, PeerStrategy) else LocalSteps
            make = partial(steps, memory=self.context.runtime.memory, rule=config.inner_rule)
            if rank == config.rank and self.remainders is not None:
                make = partial(make, unsent=self.remainders.vectors.get(UNSENT))
        made = make(
            config.model,
            feed_of(config.run.job.data, unjoined(schedule.plan), rank, config.run.job.seed),
            schedule.plan,
            rank=rank,
            seed=config.run.job.seed,
            now=self.context.runtime.now,
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
