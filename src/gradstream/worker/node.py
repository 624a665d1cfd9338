"""The worker's node: joins, runs the strategy to its end, and leaves the final parameters behind."""

from __future__ import annotations

import traceback
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol, cast

import numpy as np
import safetensors.numpy

from gradstream.checkpoint.folder import MODEL, read_own, read_tensors
from gradstream.checkpoint.format import spec_of, to_spec
from gradstream.checkpoint.manifest import Resume
from gradstream.collectives.buckets import Buckets
from gradstream.collectives.group import Group
from gradstream.data.base import BatchRef, Dataset, Plan
from gradstream.data.feed import feed_of
from gradstream.data.joined import JoinedPlan, unjoined
from gradstream.data.plan import RoundPlan
from gradstream.errors import ConfigError, GradstreamError, UserCodeError
from gradstream.events import EvaluatedEvent, Event, StepEvent
from gradstream.membership.member import Member
from gradstream.memory import Vector, trim
from gradstream.model.base import Model
from gradstream.model.buffers import buffers_of, load_buffers, with_buffers
from gradstream.model.factors import outer_layers_of
from gradstream.model.fixed import fixed_of, load_fixed
from gradstream.optim.schedules import Rate
from gradstream.recording import Log
from gradstream.runtime.base import Runtime, Work
from gradstream.server.chunks import ChunkMap
from gradstream.server.client import names_of
from gradstream.server.rows import row_spec_of
from gradstream.strategies.base import RowExchange, Strategy, Worker
from gradstream.transport.base import Endpoint
from gradstream.wire import v1
from gradstream.wire.dtypes import to_wire
from gradstream.worker.balance import Balance
from gradstream.worker.evaluation import Evaluation, EvaluationPlan, evaluate
from gradstream.worker.exchange import Exchange, Surroundings, Transfers
from gradstream.worker.gradient import Clip, Differentiator
from gradstream.worker.group_exchange import GroupExchange
from gradstream.worker.group_replica import GroupReplica
from gradstream.worker.loop import Loop, LoopGroupReplica, LoopServerReplica, nothing
from gradstream.worker.notes import Notes
from gradstream.worker.outer import OuterProducts
from gradstream.worker.pace import Pace
from gradstream.worker.row_replica import RowReplica
from gradstream.worker.schedule import OpenSchedule, Schedule
from gradstream.worker.server_exchange import ServerExchange
from gradstream.worker.server_replica import ServerReplica
from gradstream.worker.shared_exchange import form_shared
from gradstream.worker.siblings import Siblings
from gradstream.worker.updater import Updater, UpdateRule
from gradstream.worker.worker import Replica, ReplicaParts, Watch

__all__ = ["FINAL_MODEL", "FormGroup", "WorkerConfig", "WorkerNode"]

FINAL_MODEL = "checkpoints/final/model.safetensors"
VITALS_EVERY_S = 1.0


class FormGroup(Protocol):
    """Makes a group; see `gradstream.collectives.forming.form_group`."""

    def __call__(
        self,
        runtime: Runtime,
        endpoint: Endpoint,
        names: Sequence[str],
        rank: int,
        epoch: int,
        *,
        on_event: Callable[[Event], None],
    ) -> Awaitable[Group]:
        """`on_event` hears how it sums."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """What a worker is told.

    Args:
        rank: of this worker.
        num_workers: W.
        strategy: what to run.
        model: this replica's own instance.
        data: the data set.
        plan: who goes through which sample.
        lr: learning rate of the update rule, or its schedule.
        clip: bounds of each gradient.
        evaluation: when held-out samples are looked at.
        seed: of the run.
        chunk_elems: of the chunk map.
        epochs, steps: when the run ends; one may be None. `steps` are those from here on.
        num_steps: the same of the whole run, where it is resumed.
        silence_s, retry_s: see `ServerClient`.
        loop: computes the gradients, where the user's own loop does; there is no plan then.
        optimizer: the update rule that this worker brings; "" where the shards know it.
        resume: where the run goes on, if it does not begin.
        balanced: shares of a round follow the measured speed of the workers.
        form_group: where the strategy goes through a group: makes it.
        log: what this worker is told, and cannot know again, is noted there; None notes nothing.
        watch: see `ReplicaParts`.
        update_rule: what this worker updates its parameters by; None where the shards have the rule.
    """

    rank: int
    num_workers: int
    strategy: Strategy
    model: Model
    data: Dataset
    plan: Plan | None
    lr: Rate
    clip: Clip
    evaluation: EvaluationPlan
    seed: int
    chunk_elems: int
    epochs: int | None
    steps: int | None
    silence_s: float
    retry_s: float
    loop: Loop | None = None
    optimizer: str = ""
    num_steps: int | None = None
    resume: Resume | None = None
    balanced: bool = False
    form_group: FormGroup | None = None
    update_rule: UpdateRule | None = None
    log: Log | None = None
    watch: Watch = field(default_factory=Watch)


class WorkerNode:
    """One worker. `run` returns when the run is over, and raises what ended it early."""

    def __init__(self, runtime: Runtime, endpoint: Endpoint, member: Member, config: WorkerConfig) -> None:
        self._runtime = runtime
        self._endpoint = endpoint
        self._member = member
        self._config = config
        self._exchange: Exchange | None = None  # once the run has begun
        self._last_ref: BatchRef | None = None
        self._notes = Notes(member, config.log)
        self._pace = Pace(runtime.node, member.report, member.stands, self._notes.stood, self._notes.turned)
        member.listen(self._pace.hear)
        self._siblings = Siblings(
            runtime,
            endpoint,
            config.model,
            workers=lambda: names_of(member.notice.nodes, "worker"),
            silence_s=config.silence_s,
        )
        self._balance: Balance | None = None
        if config.balanced and config.num_workers > 1:
            assert isinstance(config.plan, RoundPlan | JoinedPlan)
            self._balance = Balance(config.plan, member)

    async def run(self) -> None:
        """Joins, trains, and leaves.

        Raises:
            UserCodeError, GradientError: this worker's model or data failed; the others were told.
            RunAbortedError: another node ended the run.
            PeerLostError, DeadlineError: a shard, another worker of a group, or the coordinator is gone.
        """
        try:
            await self._member.join(await self._spec(), *self._tensors())
            await self._runtime.gather(self._train(), self._over())
        except Exception as error:
            await self._failed(error)
            raise
        finally:
            if self._exchange is not None:
                await self._exchange.close()
            await self._member.leave()

    async def _failed(self, error: Exception) -> None:
        await self._member.failed(error, _traceback_of(error))

    async def _spec(self) -> v1.ModelSpec:
        model, built = self._config.model, Work("build")
        # Looking at the layout may build the model; a phantom run looks at it below.
        await self._runtime.compute(lambda _: _built(model), work=built)
        layout = model.layout
        return v1.ModelSpec(
            fingerprint=layout.fingerprint,
            elems=layout.elems,
            dtype=to_wire(layout.dtype),
            chunk_elems=self._config.chunk_elems,
            optimizer=self._config.optimizer,
            rows=self._rows(),
        )

    @property
    def _row_exchange(self) -> RowExchange | None:
        """What is significant, where only what has changed is exchanged; a loop of the user's gives all."""
        config = self._config
        if config.loop is not None or config.strategy.through != "servers":
            return None
        return config.strategy.rows(bool(config.model.layout.tables))

    def _rows(self) -> v1.RowSpec | None:
        exchange = self._row_exchange
        return None if exchange is None else row_spec_of(self._config.model.layout, exchange.block_elems)

    def _tensors(self) -> tuple[list[v1.TensorSpec], ...]:
        """What a checkpoint's files need to know: the flat vector's tensors, buffers, and what is fixed."""
        model = self._config.model
        layout, own, fixed = model.layout, buffers_of(model), fixed_of(model)
        tensors = [spec_of(slot.name, slot.shape, layout.dtype) for slot in layout.slots]
        buffers = [spec_of(name, array.shape, array.dtype) for name, array in own.items()]
        frozen = [spec_of(name, array.shape, array.dtype) for name, array in fixed.frozen.items()]
        by_name = {tensor.name: tensor for tensor in tensors}
        second = [replace(by_name[first], name=name, same_as=first) for name, first in fixed.second.items()]
        return tuple(list(map(to_spec, specs)) for specs in (tensors, buffers, frozen + second))

    async def _over(self) -> None:
        await self._member.over()

    async def _train(self) -> None:
        config, runtime = self._config, self._runtime
        await self._member.training()
        exchange = self._exchange = await self._make_exchange()
        replica = exchange.replica
        self._siblings.serve(lambda: replica.progress)
        vitals = runtime.spawn(self._keep_reporting(exchange), name=f"{runtime.node}-vitals")
        try:
            if config.resume is not None:
                await self._restore_own(replica, config.resume)
            await exchange.begin()
            await config.strategy.train(cast(Worker, replica))  # with the verbs of the exchange it asks for
            await exchange.settle()
            self._pace.stand()
            if config.loop is not None:  # every worker's loop goes on with the final parameters
                await exchange.finish()
                await self._siblings.freeze()  # others may ask when this one has the average already
                config.loop.finish(replica.parameters.tensor, await self._siblings.average())
            await self._conclude(exchange)
        finally:
            vitals.cancel()

    async def _restore_own(self, replica: Replica, resume: Resume) -> None:
        """Takes what this worker had of its own."""
        model, storage = self._config.model, self._runtime.storage
        if buffers_of(model):
            kept = await self._runtime.beside(
                lambda: read_own(storage, resume.folder, self._runtime.node), work=Work("restore")
            )
            if kept is not None:
                load_buffers(model, kept.buffers)
                replica.samples = kept.samples
        if self._config.loop is not None:
            replica.samples = resume.samples.get(self._runtime.node, 0)
            frozen = list(fixed_of(model).frozen)  # the script may have made others than those of before
            if frozen:
                read = partial(read_tensors, storage, f"{resume.folder}/{MODEL}", frozen)
                load_fixed(model, await self._runtime.beside(read, work=Work("restore")))

    async def _conclude(self, exchange: Exchange) -> None:
        """Says that this worker has finished; that of the lowest rank keeps the parameters first.

        Ranks move up when a worker dies, even now.
        """
        if not self._is_lowest():
            self._report(exchange)
            self._member.finished(relies=True)
            await self._member.heard(lambda: self._is_lowest() or self._is_over())
        await self._member.heard(lambda: self._pace.settled or self._is_over())
        if not self._is_over():
            await self._save(exchange)
            self._report(exchange)
            self._member.finished()

    def _is_over(self) -> bool:
        return self._member.notice.phase == v1.Notice.FINISHED

    def _schedule(self) -> Schedule:
        config = self._config
        assert config.plan is not None
        return Schedule(
            config.plan,
            config.strategy.cut,
            config.rank,
            config.epochs,
            config.steps,
            self._notes if config.num_workers > 1 else None,
            config.num_steps,
            self._balance,
        )

    # ---- exchange -----------------------------------------------------------------------

    async def _make_exchange(self) -> Exchange:
        config, layout = self._config, self._config.model.layout
        around = Surroundings(
            runtime=self._runtime,
            endpoint=self._endpoint,
            member=self._member,
            rank=config.rank,
            resume=config.resume,
            silence_s=config.silence_s,
            retry_s=config.retry_s,
            init=self._init,
            is_lowest=self._is_lowest,
            failed=self._failed,
        )
        loop = config.loop
        server_replica: Callable[..., ServerReplica] = ServerReplica
        group_replica: Callable[..., GroupReplica] = GroupReplica
        if loop is not None:
            server_replica = partial(LoopServerReplica, loop=loop)
            group_replica = partial(LoopGroupReplica, loop=loop)
        if self._row_exchange is not None:
            server_replica = partial(RowReplica, exchange=self._row_exchange)
        if config.strategy.through == "servers":
            make, rows = partial(server_replica, self._parts()), self._rows()
            return ServerExchange(around, layout, config.chunk_elems, make, rows)
        if config.strategy.through == "shared":
            return await form_shared(
                around, self._parts(), config.model, config.data, config.clip, config.chunk_elems
            )
        notice = self._member.notice
        assert config.form_group is not None
        workers = names_of(notice.nodes, "worker")
        group = await config.form_group(
            self._runtime,
            self._endpoint,
            workers,
            config.rank,
            notice.epoch,
            on_event=self._member.emit,
        )
        replica = await self._group_replica(group, group_replica)
        chunks = ChunkMap(layout.elems, config.chunk_elems, config.num_workers)
        return GroupExchange(around, group, replica, chunks)

    async def _group_replica(
        self, group: Group, make: Callable[..., GroupReplica]
    ) -> Callable[[Transfers], GroupReplica]:
        config, layout = self._config, self._config.model.layout
        strategy, sharded = config.strategy, config.strategy.sharded
        if sharded is None:  # a loop of the user's may look at its parameters after another worker's death
            sharded = group.shares_memory and config.loop is None and not strategy.factors
        buckets = Buckets(layout.elems, strategy.bucket_elems(layout.dtype.itemsize), config.num_workers)
        owned = buckets.owned(config.rank) if sharded else [(0, layout.elems)]
        assert config.update_rule is not None
        updater = Updater(self._runtime.memory, *config.update_rule, owned, layout.dtype)
        if sharded:
            parameters = await group.common(layout.elems, layout.dtype, "parameters")
        else:
            parameters = group.allocate(
                layout.elems, layout.dtype, "parameters", lead_bytes=layout.lead_bytes
            )
        outer = None if sharded else self._outer_products(group)
        return partial(make, self._parts(), group, buckets, updater, sharded, parameters, outer)

    def _outer_products(self, group: Group) -> OuterProducts | None:
        """The layers that may be exchanged as factors; None where there are none."""
        config, layers = self._config, outer_layers_of(self._config.model)
        several = isinstance(config.plan, JoinedPlan) or config.loop is not None or bool(config.clip)
        if config.strategy.factors and (several or not layers):
            why = "gradients are clipped, summed up from parts, or a loop's" if several else "it has none"
            raise ConfigError(f"factors=True: no layer of this model can be exchanged as factors: {why}")
        guessed = config.strategy.factors is None and self._runtime.memory.phantom
        if several or not layers or config.num_workers == 1 or guessed:  # only a backward pass knows
            return None
        hosts = {_host_of(node.address) for node in self._member.notice.nodes if node.role == "worker"}
        near = group.shares_memory or len(hosts) == 1
        strategy, num_workers = config.strategy, config.num_workers
        return OuterProducts(
            self._runtime,
            group,
            layers,
            lambda layer, rows: strategy.as_factors(layer, rows, num_workers, near),
            config.model.layout.dtype,
            lambda event: self._member.emit(event) if config.rank == 0 else None,
        )

    def _parts(self) -> ReplicaParts:
        config = self._config
        if config.loop is not None:
            schedule: Schedule | OpenSchedule = OpenSchedule(config.loop, config.rank, self._member)
        else:
            schedule = self._schedule()
        quorum = config.strategy.quorum(config.num_workers)
        return ReplicaParts(
            runtime=self._runtime,
            layout=config.model.layout,
            reduction=config.model.reduction,
            differentiator=self._differentiator(schedule),
            schedule=schedule,
            rank=config.rank,
            num_workers=config.num_workers,
            lr=config.lr,
            joins=isinstance(config.plan, JoinedPlan),
            pace=self._pace,
            first_step=0 if config.resume is None else config.resume.step_of(self._runtime.node),
            # With a quorum, the first shard says what is in the model: it lives to tell.
            on_receipt=self._member.receipt if quorum is None else lambda refs: None,
            on_step=self._stepped,
            on_boundary=partial(self._at_boundary, schedule) if isinstance(schedule, Schedule) else nothing,
            first_version=None if quorum is None else (config.resume.rounds if config.resume else 0),
            watch=config.watch,
            update_rule=config.update_rule,
        )

    def _differentiator(self, schedule: Schedule | OpenSchedule) -> Differentiator | None:
        """What computes gradients; None where a loop of the user's does."""
        config = self._config
        if not isinstance(schedule, Schedule):
            return None
        return Differentiator(
            config.model,
            feed_of(config.data, unjoined(schedule.plan), config.rank, config.seed),
            schedule.plan,
            rank=config.rank,
            seed=config.seed,
            clip=config.clip,
        )

    # ---- evaluation ---------------------------------------------------------------------

    async def _at_boundary(self, schedule: Schedule, replica: Replica, refs: Sequence[BatchRef]) -> None:
        """Evaluates where that is due: the worker of the lowest rank does, whoever that is now.

        Its parameters are, synchronous, those of the round just done; asynchronous, what it has
        adopted last and its own steps since. Where each worker has parameters of its own, those of the
        shards are fetched. Buffers are those of all workers, averaged.
        """
        self._last_ref = ref = refs[-1]
        position = schedule.position(ref)
        over = position.step + 1 == position.num_steps  # the final parameters are evaluated then
        if over or not any(self._config.evaluation.due(schedule, passed) for passed in refs):
            return
        if self._is_lowest():
            await self._evaluate(replica, schedule, ref)
        else:
            await self._siblings.keep(schedule.position(ref).after().step)

    async def _evaluate(
        self, replica: Replica, schedule: Schedule, ref: BatchRef, *, final: bool = False
    ) -> None:
        config, data, begun_ns = self._config, self._config.data, self._runtime.now()
        done = schedule.position(ref).after()
        buffers = await self._siblings.average(None if final else done.step)
        own = config.strategy.pushes != "gradients" and not final
        parameters = await replica.newest() if own else replica.parameters.tensor

        def look(_: object) -> Evaluation:
            with with_buffers(config.model, buffers):
                return evaluate(config.model, parameters, data, config.evaluation.metrics)

        found = await self._runtime.compute(
            look,
            work=Work("evaluate", samples=data.num_test_samples),
            reads=[replica.parameters.all],
            phantom=Evaluation(None, None, data.num_test_samples),
        )
        num_samples = data.num_samples
        self._member.emit(
            EvaluatedEvent(
                step=done.step,
                epoch=ref.epoch,
                samples=round(done.epoch * num_samples) if num_samples else 0,
                accuracy=found.accuracy,
                loss=found.loss,
                metrics=found.metrics,
                held_out=found.num_samples,
                seconds=(self._runtime.now() - begun_ns) / 1e9,
                final=final,
            )
        )
        self._member.hurry()  # it may be what the run was to reach

    # ---- parameters ---------------------------------------------------------------------

    async def _init(self, parameters: Vector) -> None:
        def init(_: object) -> None:
            try:
                self._config.model.init(self._config.seed, parameters.tensor)
            except GradstreamError:
                raise
            except Exception as error:
                message = f"{self._runtime.node}: the model's init raised {type(error).__name__}: {error}"
                raise UserCodeError(message, traceback.format_exc()) from error
            trim()

        await self._runtime.compute(init, work=Work("init", elems=len(parameters)), writes=[parameters.all])

    def _is_lowest(self) -> bool:
        """Whether this is the worker of the lowest rank that is still there."""
        workers = names_of(self._member.notice.nodes, "worker")
        return bool(workers) and workers[0] == self._runtime.node

    async def _save(self, exchange: Exchange) -> None:
        """Writes the final parameters under the user's own names."""
        replica = exchange.replica
        if self._config.loop is None:
            await exchange.finish()
        if self._config.evaluation.every is not None:
            schedule = self._schedule()
            last = self._last_ref if self._pace.ending and self._last_ref else schedule.last
            await self._evaluate(replica, schedule, last, final=True)
        buffers = await self._siblings.average()
        replica.retire()  # makes room for the copy that is written

        def write(_: object) -> None:
            trim()
            tree = {**self._config.model.tree(replica.parameters.tensor), **buffers}
            arrays = {name: np.asarray(array, order="C") for name, array in tree.items()}
            self._runtime.storage.write(FINAL_MODEL, safetensors.numpy.save(arrays))

        work = Work("checkpoint", elems=len(replica.parameters))
        await self._runtime.compute(write, work=work, reads=[replica.parameters.all])

    # ---- reports ------------------------------------------------------------------------

    async def _keep_reporting(self, exchange: Exchange) -> None:
        while True:
            await self._runtime.sleep(VITALS_EVERY_S)
            self._report(exchange)

    def _stepped(self, step: StepEvent) -> None:
        self._member.emit(step)
        if self._balance is not None:
            self._balance.took(step.samples, step.compute_s)

    def _report(self, exchange: Exchange) -> None:
        """Records of traffic since the report before, and of this node's vitals."""
        for event in (*exchange.report(), *self._runtime.vitals("worker")):
            self._member.emit(event)


def _built(model: Model) -> None:
    """Makes the model look at its layout, and lets go of what that took."""
    if model.layout.elems:
        trim()


def _host_of(address: str) -> str:
    """The host of host:port, or all of an address that is none."""
    first = address.split(" ")[0]
    host, _, port = first.rpartition(":")
    return host if port.isdigit() else first


def _traceback_of(error: BaseException) -> str:
    """The user's own traceback where there is one, else this error's."""
    if isinstance(error, UserCodeError) and error.traceback_text:
        return error.traceback_text
    return "".join(traceback.format_exception(error))
