"""A worker's node: joins the run, trains by the strategy, and keeps the final parameters."""

from __future__ import annotations

import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from gradstream.checkpoint.folder import MODEL, read_own, read_tensors
from gradstream.checkpoint.manifest import Resume
from gradstream.checkpoint.own_state import EXTRA_FILE, FIRST, read_loop, serve_loop, without
from gradstream.checkpoint.snapshot import Carried
from gradstream.collectives.pairwise import PairwiseExchange
from gradstream.coordinator.client.member import BoundaryError, Member, names_of
from gradstream.coordinator.client.presence import EvictedError
from gradstream.coordinator.client.requests import Assigned
from gradstream.coordinator.nodes import COORDINATOR
from gradstream.data.base import BatchRef
from gradstream.data.plan import JoinedPlan, RoundPlan
from gradstream.data.shares import WorkerSpeed
from gradstream.errors import GradstreamError, RefusedError, UserCodeError
from gradstream.memory import Vector, trim
from gradstream.model.buffers import buffers_of, load_buffers
from gradstream.model.built_module import fixed_of, load_fixed
from gradstream.recording import BatchesAssigned, Log, SnapshotReached
from gradstream.runtime.base import Runtime, Work
from gradstream.strategies.base import PeerStrategy, ServerStrategy
from gradstream.telemetry.events import StepEvent
from gradstream.transport.base import Endpoint
from gradstream.wire import v1
from gradstream.worker.assembly import Assembly
from gradstream.worker.batch_gate import BatchGate
from gradstream.worker.buffer_averager import BufferAverager
from gradstream.worker.config import WorkerConfig
from gradstream.worker.evaluator import Evaluator
from gradstream.worker.exchange import Exchange, ExchangeContext
from gradstream.worker.final_model import write_final_model
from gradstream.worker.loop import Loop, LoopContext, LoopSource
from gradstream.worker.parts.lead import LedSchedule
from gradstream.worker.parts.worker import ReplicaLead
from gradstream.worker.registration import model_spec_of, tensor_specs_of
from gradstream.worker.replica import Replica
from gradstream.worker.schedule import BatchQueue, BatchSource, Schedule, ShareReporter

# ---- recorder ----------------------------------------------------------------------------
# Records everything that a worker is told and a replay could not reconstruct.


class WorkerRecorder:
    """Records the minibatches that a worker is assigned, and where it is stopped.

    Each entry is written at once, so that none is lost if the worker is killed.

    Args:
        source: assigns minibatches.
        log: the recording; None records nothing.
    """

    def __init__(self, source: BatchSource, log: Log | None) -> None:
        self._source = source
        self._log = log

    async def assign(self, wait: bool, in_hand: int, measured: WorkerSpeed) -> Assigned:
        """See `WorkerRequests.assign`."""
        answer = await self._source.assign(wait, in_hand, measured)
        if self._log is not None:
            self._log.add(BatchesAssigned(tuple(answer.refs), answer.complete))
            self._log.flush()
        return answer

    def stood(self, begun: int, ends: bool) -> None:
        """See `BatchGate`."""
        if self._log is not None:
            self._log.add(SnapshotReached(begun, ends))
            self._log.flush()


# ---- beginning ---------------------------------------------------------------------------
# A worker's state at the beginning: the model's first parameters, or its own part of a checkpoint.


async def fill_parameters(config: WorkerConfig, runtime: Runtime, parameters: Vector) -> None:
    """Writes the model's initial parameters, which depend only on the seed.

    Args:
        config: configuration of the worker.
        runtime: runtime of the worker's node.
        parameters: (E,), overwritten; undefined after an error.

    Raises:
        UserCodeError: the model's `init` raised.
    """

    def init(_: object) -> None:
        try:
            config.model.init(config.plan.job.seed, parameters.tensor)
        except GradstreamError:
            raise
        except (Exception, SystemExit) as error:
            message = f"{runtime.node}: the model's init raised {type(error).__name__}: {error}"
            raise UserCodeError(message, traceback.format_exc()) from error
        trim(parameters.tensor.nbytes)

    await runtime.compute(init, work=Work("init", elems=len(parameters)), writes=[parameters.all])


async def restore_own(config: WorkerConfig, runtime: Runtime, replica: Replica, resume: Resume) -> bool:
    """Restores this worker's own state: buffers, sample count, and the state of a user's loop.

    Returns:
        Whether the buffers come from the checkpoint. False: the checkpoint is not on this worker's disk.

    Raises:
        DataError, OSError: the checkpoint cannot be read.
    """
    model, storage = config.model, runtime.storage
    found = True
    if buffers_of(model):
        kept = await runtime.beside(
            lambda: read_own(storage, resume.folder, runtime.node), work=Work("restore")
        )
        found = kept is not None
        if kept is not None:
            load_buffers(model, kept.buffers)
            replica.samples = kept.samples
    if config.loop is not None:
        replica.samples = resume.samples.get(runtime.node, 0)
        fixed = [*fixed_of(model).frozen]  # the script may have frozen different parameters this time
        first = [slot.name for slot in model.layout.slots] if config.plan.follows_gradients else []
        if fixed or first:
            read = partial(read_tensors, storage, f"{resume.folder}/{MODEL}", [*fixed, *first])
            found_there = await runtime.beside(read, work=Work("restore"))
            load_fixed(model, {FIRST * (name in first) + name: one for name, one in found_there.items()})
        of_loop = partial(read_loop, storage, resume.folder, runtime.node, resume.steps)
        state = await runtime.beside(of_loop, work=Work("restore"))
        config.loop.restore(state, own=runtime.node in resume.steps)
    if config.plan.averages_gradients or config.plan.follows_gradients:
        extra = await runtime.beside(
            lambda: read_own(storage, resume.folder, EXTRA_FILE), work=Work("restore")
        )
        if extra is not None:
            load_fixed(model, extra.buffers)
    return found


# ---- node --------------------------------------------------------------------------------

VITALS_EVERY_S = 1.0

GONE = ("NOT_MEMBER", "BAD_CERTIFICATE")
"""Codes with which other nodes refuse a node that is no longer a member."""


class WorkerNode:
    """One worker. `run` returns when the run is over, and raises the error that ended it early."""

    def __init__(
        self,
        runtime: Runtime,
        endpoint: Endpoint,
        member: Member,
        config: WorkerConfig,
        carried: Carried | None = None,
    ) -> None:
        self._carried = carried or Carried()
        self._runtime = runtime
        self._endpoint = endpoint
        self._member = member
        self._config = config
        self._exchange: Exchange | None = None  # once the run has begun
        self._recorder = WorkerRecorder(member.requests, config.log)
        self._batch_gate = BatchGate(runtime.node, member.report, self._recorder.stood)
        member.listen(self._batch_gate.hear)
        self._averager = BufferAverager(
            runtime,
            endpoint,
            config.model,
            workers=lambda: names_of(member.notice.nodes, "worker"),
            silence_s=config.plan.job.deadlines.silence_s,
        )
        self._pairwise: PairwiseExchange | None = None
        if isinstance(config.plan.strategy, PeerStrategy):
            self._pairwise = PairwiseExchange(runtime, endpoint, config.plan.job.deadlines.silence_s)
        self._balance: ShareReporter | None = None
        if config.plan.balanced and config.plan.workers > 1 and config.plan.strategy.partitioning == "rounds":
            assert isinstance(config.batch_plan, RoundPlan | JoinedPlan)
            self._balance = ShareReporter(config.batch_plan, member.requests)
        self._queue: BatchQueue | None = None
        if config.loop is None and config.plan.strategy.partitioning != "rounds" and config.plan.workers > 1:
            self._queue = BatchQueue(self._recorder, runtime)
        self._lead: ReplicaLead | None = None  # of a replica of several processes
        if config.plan.parts > 1:
            self._lead = ReplicaLead(runtime, endpoint, member, config, self._batch_gate, self._failed)
        self._source = self._make_source()
        self._evaluator: Evaluator | None = None  # none for a user's loop, which evaluates itself
        if isinstance(self._source, Schedule):
            self._evaluator = Evaluator(
                runtime, member, config, self._source, self._averager, self._is_lowest, self._lead
            )

    def _make_source(self) -> Schedule | LoopSource:
        """The source of this worker's minibatches."""
        config = self._config
        if config.loop is not None:
            requests, begun = self._member.requests, config.first_version
            return LoopSource(config.loop, config.rank, config.first_step, requests, begun)
        assert config.batch_plan is not None
        kind: Callable[..., Schedule] = Schedule
        if self._lead is not None:
            lead, runtime = self._lead.parts, self._runtime
            kind = partial(LedSchedule, lead=lead, runtime=runtime, evaluation=config.plan.evaluation)
        return kind(
            plan=config.batch_plan,
            rank=config.rank,
            epochs=config.plan.job.epochs,
            steps=config.plan.steps_left,
            lr=config.plan.optimizer.lr,
            queue=self._queue,
            num_steps=config.plan.job.steps,
            balance=self._balance,
            first_version=first_version_of(config),
        )

    async def run(self) -> None:
        """Joins the run, trains, and leaves.

        Raises:
            UserCodeError, GradientError: this worker's model or data failed; the coordinator was told.
            RunAbortedError: another node ended the run.
            PeerLostError, DeadlineError: a shard, another worker of a group, or the coordinator was lost.
            DrainedError: see `drain`.
            BoundaryError: the run continues with the next plan.
            EvictedError: the coordinator has counted this worker as lost.
        """
        config = self._config
        try:
            spec = await model_spec_of(config, self._runtime)
            if config.loop is not None:
                serve_loop(self._endpoint, partial(self._state_of, config.loop))
            self._averager.serve()  # another worker may begin earlier than this one
            if self._pairwise is not None:
                self._pairwise.serve()
            await self._member.join(spec, *tensor_specs_of(config.model))
            await self._runtime.gather(self._train(), self._member.over())
        except BoundaryError as over:
            self._carried.forget()
            if self._exchange is not None:
                self._report(self._exchange)
                self._carried.boundary = over.next_boundary
                if not self._config.plan.averages_gradients and self._exchange.replica.version >= 0:
                    self._exchange.carry()
            raise
        except Exception as error:
            await self._failed(error)
            if (evicted := eviction_of(error, self._member)) is not None:
                raise evicted from error
            raise
        finally:
            if self._exchange is not None:
                await self._exchange.close()
            if self._lead is not None:
                self._lead.close()
            await self._member.leave()

    def drain(self) -> None:
        """Lets this worker finish its minibatch, flush all its results into the model, and leave the run.

        For strategies that continue without a lost worker. `run` then raises DrainedError. Other workers get the
        minibatches that this worker has not begun, so each sample still counts once.
        """
        self._batch_gate.leave(self._member.depart)

    async def _failed(self, error: Exception) -> None:
        await self._member.failed(error, _traceback_of(error))

    # ---- training -----------------------------------------------------------------------

    async def _train(self) -> None:
        config, runtime = self._config, self._runtime
        await self._member.training()
        late = self._member.since > 0
        if late and self._balance is not None:
            self._balance.join_late()
        if self._lead is not None:
            await self._lead.begin()
        exchange = self._exchange = await self._assembly(late).exchange()
        replica = exchange.replica
        if config.loop is not None:
            requests, failed = self._member.requests, self._failed
            first = config.first_step
            context = LoopContext(replica, requests, runtime, self._endpoint, failed, late, first)
            config.loop.begin(context)
        self._averager.follow(lambda: self._source.progress(replica.seen_samples, replica.step))
        reporting = runtime.spawn(self._keep_reporting(exchange), name=f"{runtime.node}-vitals")
        try:
            has_own_buffers = False
            goes_on = config.loop is not None and config.loop.goes_on and config.plan.resume is not None
            if late:
                await self._averager.adopt()
            elif config.plan.resume is not None and goes_on:
                replica.samples = config.plan.resume.samples.get(runtime.node, 0)
            elif config.plan.resume is not None:
                has_own_buffers = await restore_own(config, runtime, replica, config.plan.resume)
            self._averager.restored.set()
            if config.plan.optimizer_in_loop and not (
                late or goes_on
            ):  # a newcomer copies a loop's state when its group is formed
                await self._averager.begin_as_first(buffers=not has_own_buffers)
            await exchange.begin()
            if self._evaluator is not None:
                await self._evaluator.at_begin(replica, late=late)
            await exchange.train()
            await exchange.flush()
            self._batch_gate.stand()
            is_last = config.loop is not None and not config.plan.follows
            if is_last:
                await exchange.finish()
            await self._averager.freeze()  # others may still ask when this worker has its average
            if config.loop is not None and is_last:  # every worker's loop continues with the final parameters
                buffers = await self._averager.average(last=True, catch_up=config.plan.averages_gradients)
                config.loop.finish(replica.parameters.tensor, buffers)
            await self._conclude(exchange)
        finally:
            reporting.cancel()

    def _assembly(self, late: bool) -> Assembly:
        config = self._config
        context = ExchangeContext(
            runtime=self._runtime,
            endpoint=self._endpoint,
            member=self._member,
            config=config,
            late=late,
            init=init_of(config, self._runtime),
            is_lowest=self._is_lowest,
            failed=self._failed,
            enter_loop=self._averager.enter,
            carried=self._carried,
        )
        return Assembly(
            context,
            self._source,
            self._batch_gate,
            on_step=self._stepped,
            on_boundary=_nothing if self._evaluator is None else self._evaluator.at_boundary,
            place=None if self._lead is None else self._lead.place,
            pairwise=self._pairwise,
        )

    async def _state_of(self, loop: Loop, known: Mapping[str, str]) -> Mapping[str, np.ndarray[Any, Any]]:
        """What the loop has besides its model, read between two of its turns."""
        return await self._runtime.compute(
            lambda _: without(loop.state(), known), work=Work("copy"), shape_only={}
        )

    def _is_lowest(self) -> bool:
        """Whether this is the present worker of the lowest rank."""
        # Uses that a notice lists workers by rank: a thousand workers ask this at each of a thousand notices.
        nodes = self._member.notice.nodes
        return next((node.name for node in nodes if node.role == "worker"), None) == self._runtime.node

    # ---- the end ------------------------------------------------------------------------

    async def _conclude(self, exchange: Exchange) -> None:
        """Reports that this worker has finished. The worker of the lowest rank first saves the parameters.

        If that worker dies, even now, the next one saves them. If another plan follows, nobody does.
        """
        if self._config.plan.follows:
            await self._member.heard(lambda: self._batch_gate.ending or self._is_over())
        if not self._is_lowest():
            self._report(exchange)
            self._member.finished(relies=True)
            await self._member.heard(lambda: self._is_lowest() or self._is_over())
        await self._member.heard(lambda: self._batch_gate.settled or self._is_over())
        if not self._is_over():
            await self._keep(exchange)
            self._report(exchange)
            self._member.finished()

    def _is_over(self) -> bool:
        return self._member.notice.status == v1.Notice.FINISHED

    async def _keep(self, exchange: Exchange) -> None:
        """Evaluates and writes the final model."""
        replica, config = exchange.replica, self._config
        if self._lead is not None:
            await self._runtime.gather(exchange.finish(), self._lead.parts.finish())
        elif config.loop is None:
            await exchange.finish()
        if self._evaluator is not None:
            await self._evaluator.at_end(replica, early=self._batch_gate.ending)
        buffers = await self._averager.average(last=True)
        if self._lead is not None:
            replica.retire()
            await self._lead.write_final(replica.parameters, buffers)
        else:
            await write_final_model(self._runtime, config.model, replica, buffers, self._member.emit)

    # ---- reports ------------------------------------------------------------------------

    async def _keep_reporting(self, exchange: Exchange) -> None:
        while True:
            await self._runtime.sleep(VITALS_EVERY_S)
            self._report(exchange)

    def _stepped(self, step: StepEvent) -> None:
        self._member.emit(step)
        self._report_logged()
        if self._balance is not None:
            self._balance.took(step.samples, step.compute_s)
        if self._queue is not None:
            self._queue.took(step)

    def _report(self, exchange: Exchange) -> None:
        """Reports traffic since the last report, and the metrics of this process."""
        parts = () if self._lead is None else self._lead.place.gradients.meter.report()
        for event in (*exchange.report(), *parts, *self._runtime.process_metrics("worker")):
            self._member.emit(event)
        self._report_logged()

    def _report_logged(self) -> None:
        for event in () if self._config.loop is None else self._config.loop.logged():
            self._member.emit(event)


def first_version_of(config: WorkerConfig) -> int | None:
    """Version that a worker's first minibatch is for, if rounds may continue without it; see `Schedule`."""
    quorum = None
    if isinstance(config.plan.strategy, ServerStrategy):
        quorum = config.plan.strategy.quorum(config.plan.workers)
    if quorum is None and not config.losses.stands_in and not config.losses.skips_lost:
        return None
    return config.plan.resume.rounds if config.plan.resume else 0


def init_of(config: WorkerConfig, runtime: Runtime) -> Callable[[Vector], Awaitable[None]]:
    """Returns a function that fills a vector with the initial parameters of a worker's model."""
    return partial(fill_parameters, config, runtime)


async def _nothing(replica: Replica, refs: Sequence[BatchRef]) -> None:
    """A user's loop evaluates by itself between two minibatches."""


def eviction_of(error: Exception, member: Member) -> EvictedError | None:
    """The error to raise instead if the run has counted this node as lost; None if it has not.

    Either the coordinator reports it, or another node does that learned of it earlier: the caller is no longer a
    member, or its certificate was revoked. The worker of a split replica is lost with any of its parts.
    """
    if member.evicted is not None:
        return member.evicted
    if isinstance(error, RefusedError) and error.peer != COORDINATOR:
        return EvictedError(member.node.name, str(error)) if error.code in GONE else None
    return None


def _traceback_of(error: BaseException) -> str:
    """The traceback of the user's code if there is one, else that of the error."""
    if isinstance(error, UserCodeError) and error.traceback_text:
        return error.traceback_text
    return "".join(traceback.format_exception(error))
