"""Builds a worker's exchange. Has the registry of exchange topologies.

strategy                topology           its exchange        its replica
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
from gradstream.worker.replica import Replica, ReplicaContext
from gradstream.worker.schedule import Schedule
from gradstream.worker.unsent_state import UnsentState, codec_state
from gradstream.worker.updater import LocalRule

EXCHANGES: Mapping[type, str] = {
    ServerStrategy: "gradstream.worker.server.exchange",
    GroupStrategy: "gradstream.worker.group.exchange",
    PeerStrategy: "gradstream.worker.pairs.exchange",
    SharedMemoryStrategy: "gradstream.worker.shared.exchange",
}
"""The module whose `make` builds the exchange, by base class of the strategy. A run imports only its own."""


class Assembly:
    """The parts from which each topology builds a worker's exchange.

    Args:
        context: the worker's place in the run.
        source: the worker's minibatches; a user's loop also computes their gradients.
        batch_gate, on_step, on_boundary: see `ReplicaContext`.
        place: the place of this process in a replica of several processes; None if the replica is one process.
        pairwise: exchanges with single partners, for strategies in pairs.

    Attributes:
        context, config, source, batch_gate, place, pairwise: see above.
        unsent: the updates that a codec or a delay holds back; None if neither does.
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
        self.unsent: UnsentState | None = None
        self._local: dict[int, LocalSteps] = {}  # by rank, for strategies with local steps

    async def exchange(self) -> Exchange:
        """Builds the exchange. In a group or in shared memory, waits for all other workers.

        Raises:
            ConfigError: this model or these machines do not allow what the job asks for.
            PeerLostError, DeadlineError: another worker was lost meanwhile.
        """
        config, context = self.config, self.context
        strategy = config.plan.strategy
        refuse({**config.plan.traits, **_traits_of(config)})
        delay = isinstance(strategy, GroupStrategy) and strategy.delay
        names = [*codec_state(config.plan.codec), *([UNSENT] if delay else ())]
        if config.plan.codec is not None or delay:
            self.unsent = UnsentState(context.runtime, config.model.layout, names)
            averages = config.plan.averages_gradients
            self.unsent.serve(context.endpoint, config.loop if averages else None)
            if averages or (config.losses.regroups_after_loss and config.plan.workers > 1):
                self.unsent.survive(codec_state(config.plan.codec))
            resume = config.plan.resume
            if resume is not None and resume.remainders == config.plan.remainders != "" and not context.late:
                await self.unsent.restore(resume)
        module = next((module for base, module in EXCHANGES.items() if isinstance(strategy, base)), None)
        if module is None:
            raise InternalError(f"{type(strategy).__name__} derives from none of the bases of topologies")
        make: Callable[[Assembly], Awaitable[Exchange]] = import_module(module).make
        return await make(self)

    def replica_context(self) -> ReplicaContext:
        """Everything that the worker's replica needs."""
        config, context = self.config, self.context
        served = config.plan.strategy if isinstance(config.plan.strategy, ServerStrategy) else None
        quorum = None if served is None else served.quorum(config.plan.workers)
        decays = not config.plan.workers_optimize and served is not None and served.decays_gradients
        return ReplicaContext(
            runtime=context.runtime,
            model=config.model,
            schedule=self.source,
            gradients=self._gradients(),
            rank=config.rank,
            num_workers=config.plan.workers,
            rule=LocalRule.of(
                config.plan.optimizer.lr,
                config.update_rule,
                config.model.layout.elems,
                own=config.plan.workers_optimize,
                decays=decays,
            ),
            joins=isinstance(config.batch_plan, JoinedPlan) and config.inner_rule is None,
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
        if self.config.plan.job.non_finite != "skip":
            return Refusals()
        member = self.context.member
        return Refusals(self._refused, lambda: member.report(v1.BeatReport(sound=True), soon=False))

    @property
    def _on_receipt(self) -> Callable[[Sequence[BatchRef]], None]:
        member, strategy = self.context.member, self.config.plan.strategy
        if self.place is not None:
            return self.place.pushed
        return (
            member.receipt_soon
            if isinstance(strategy, ServerStrategy) and strategy.in_passes
            else member.receipt
        )

    def _refused(self, gradient: RefusedGradient) -> None:
        refused = v1.Refused(
            batch=receipt_of(gradient.ref),
            samples=max(0, gradient.samples),
            step=gradient.step,
            what=gradient.what,
            in_a_row=gradient.in_a_row,
        )
        self.context.member.report(v1.BeatReport(refused=refused))

    @property
    def agreement(self) -> Agreement | None:
        """Agreement between the processes of this replica, if other workers may die and come back meanwhile."""
        survives = (
            self.config.losses.stands_in or self.config.losses.redoes
        ) and self.config.plan.workers > 1
        return self.place.agreement if self.place is not None and survives else None

    def source_of(self, rank: int) -> GradientSource:
        """Computes another worker's gradients on this worker's model."""
        if self.place is not None:
            return self.place.source_of(rank)
        assert isinstance(self.source, Schedule)
        return self._differentiator(self.source, rank)

    def _differentiator(self, schedule: Schedule, rank: int | None = None) -> Differentiator:
        config = self.config
        rank = config.rank if rank is None else rank
        make: Callable[..., Differentiator] = Differentiator
        if config.inner_rule is not None:
            if rank in self._local:  # it has the state of its inner optimizer
                return self._local[rank]
            steps = LocalParameters if isinstance(config.plan.strategy, PeerStrategy) else LocalSteps
            make = partial(steps, memory=self.context.runtime.memory, rule=config.inner_rule)
            if rank == config.rank and self.unsent is not None:
                make = partial(make, unsent=self.unsent.vectors.get(UNSENT))
        made = make(
            config.model,
            feed_of(config.plan.job.data, unjoined(schedule.plan), rank, config.plan.job.seed),
            schedule.plan,
            rank=rank,
            seed=config.plan.job.seed,
            now=self.context.runtime.now,
            clip=config.clip,
            measures=config.plan.variance_test is not None,
        )
        if isinstance(made, LocalSteps):
            self._local[rank] = made
        return made


def _traits_of(config: WorkerConfig) -> dict[str, str]:
    """The traits of the model, which is first known here."""
    model, traits = config.model, {}
    if model.layout.tables:
        traits["tables"] = "a model with row-sparse tensors"
    if config.plan.variance_test is not None:
        traits["growth"] = "variance_test"
    if isinstance(model, SparseModel):
        traits["sparse model"] = "a sparse model"
    return traits
