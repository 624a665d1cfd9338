"""The node of a part: one process of a replica, besides the worker that leads it."""

from __future__ import annotations

import asyncio
import math
import traceback
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import astuple, dataclass

import torch
from typing_extensions import override

from gradstream.coordinator.client.member import Member, names_of
from gradstream.data.base import BatchRef
from gradstream.errors import ClosedError, InternalError, UserCodeError
from gradstream.runtime.base import Runtime
from gradstream.split.part_model import PartModel
from gradstream.strategies.base import ServerStrategy
from gradstream.telemetry.events import StepEvent
from gradstream.transport.base import Endpoint
from gradstream.wire import v1
from gradstream.wire.chunks import replica_of
from gradstream.worker.assembly import Assembly
from gradstream.worker.batch_gate import BatchGate, Gate
from gradstream.worker.config import WorkerConfig
from gradstream.worker.exchange import Exchange, ExchangeContext
from gradstream.worker.gradient import Clip
from gradstream.worker.node import eviction_of, first_version_of, init_of
from gradstream.worker.parts.agreement import Agreed, Agreement, at_once
from gradstream.worker.parts.channel import PartChannel
from gradstream.worker.parts.gradients import PartMeter, PartPlace
from gradstream.worker.parts.messages import (
    PartDecision,
    PartGradientTurn,
    PartOutcome,
    PartReport,
    PartStandsIn,
    PartTurn,
)
from gradstream.worker.parts.outputs import compute_outputs, send_parameters, test_sizes
from gradstream.worker.parts.sources import begin_predictors, gradients_of
from gradstream.worker.registration import model_spec_of, tensor_specs_of
from gradstream.worker.replica import Replica
from gradstream.worker.schedule import Schedule, ScheduleHooks

# ---- follower ----------------------------------------------------------------------------
# A part's side of a replica of several processes: its minibatches are those that the worker begins.

LEAD = 0
"""The part that leads: the worker."""


class FollowerGate(BatchGate):
    """The gate of a part: open, since its worker has passed its own."""

    def __init__(self, node: str) -> None:
        super().__init__(node, lambda report: None)

    @override
    async def gate(self, flush: Callable[[], Awaitable[None]]) -> Gate:
        del flush
        self.begun += 1
        return "go"


class PartFollower(Agreement):
    """Carries out what the worker tells this part to do next, message by message (`PartTurn`).

    Args:
        channel: to the other parts.
        model: of this part.

    Attributes:
        carry_out: carries out a turn that begins no minibatch, and no flush.
        epoch: membership epoch under which this part has voted last.
    """

    def __init__(self, channel: PartChannel, model: PartModel) -> None:
        super().__init__()
        self._channel = channel
        self._model = model
        self.epoch = 0
        self.carry_out: Callable[[PartTurn], Awaitable[None]] = _unserved
        self._num_heard = 0
        self._turns = deque[BatchRef]()  # of gradients, the current one first
        self._turned = asyncio.Event()

    def pushed(self, refs: Sequence[BatchRef]) -> None:
        """Reports that minibatches are in the model, in this part."""
        self.num_pushed += len(refs)
        for ref in refs:
            self._channel.say(LEAD, PartReport("pushed", refs=(astuple(ref),)))

    def done(self) -> None:
        """Reports that this part's turn is done."""
        self._channel.say(LEAD, PartReport("done"))

    @override
    async def share_buffers(self) -> None:
        if self._model.buffer_elems(self._model.part):
            await self._channel.give(LEAD, self._model.packed_buffers(self._model.part))

    async def reach(self, mine: PartReport, clip: Clip, num_summed: int) -> Agreed:
        """See `Agreement`: reports to the worker, and hears what becomes of the gradient."""
        self._channel.say(LEAD, mine)
        verdict = await self._channel.hear(LEAD, PartDecision)
        return Agreed(verdict.scale, verdict.refused)

    @override
    def note(self, mine: PartReport) -> float:
        if mine.loss is not None:
            self._channel.say(LEAD, mine)
        return math.nan

    @property
    @override
    def leads(self) -> bool:
        return False

    def start(self) -> None:
        """Begins to hear for whom this replica stands in, and whose gradients it computes."""
        self._channel.follow(LEAD, PartStandsIn, self._stands_in)
        self._channel.follow(LEAD, PartGradientTurn, self._add_turn)

    def _stands_in(self, asked: PartStandsIn) -> None:
        if self.on_stand_in is None:
            raise InternalError(f"a part was asked to stand in for worker-{asked.rank} before it could")
        self.on_stand_in(asked)

    @property
    @override
    def num_heard(self) -> int:
        return self._num_heard

    def _add_turn(self, turn: PartGradientTurn) -> None:
        self._turns.append(BatchRef(*turn.ref))
        self._turned.set()

    async def _until(self, refs: Sequence[BatchRef]) -> None:
        """Returns when the gradient of one of these minibatches is due."""
        while not self._turns or self._turns[0] not in refs:
            self._turned.clear()
            await self._turned.wait()

    @asynccontextmanager
    async def turn(self, ref: BatchRef | None) -> AsyncIterator[None]:
        """See `Agreement`: waits for the worker's word."""
        if not self.takes_turns or ref is None:
            yield
            return
        await self._until([ref])
        yield
        self._turns.popleft()
        self._turned.set()

    @asynccontextmanager
    async def redo(self, refs: Sequence[BatchRef]) -> AsyncIterator[None]:
        """See `Agreement`: begins with the turn of the first one."""
        await self._until(refs)
        yield

    @override
    async def all_ready(
        self, ready: bool, epoch: int = 0, last: Callable[[], Awaitable[None]] = at_once
    ) -> bool:
        self.in_round, self.epoch = False, epoch
        self._channel.say(
            LEAD, PartReport("vote", refused="" if ready else "it has lost its group", epoch=epoch)
        )
        outcome = await self._channel.hear(LEAD, PartOutcome)
        await last()
        return outcome.ready

    async def give_up(self, epoch: int) -> None:
        """See `Agreement`: the worker gives up the round too, since not all parts are ready."""
        if self.in_round:
            await self.all_ready(False, epoch)

    def let_stand_in(self, rank: int, number: int) -> None:
        """See `Agreement`: the worker has told this part."""

    async def batches(
        self, hooks: ScheduleHooks, size: Callable[[BatchRef], int | None]
    ) -> AsyncGenerator[BatchRef, None]:
        """The minibatches that the worker begins, until it says that there is none any more."""
        window = self.window
        while (turn := await self._channel.hear(LEAD, PartTurn)).kind != "over":
            if turn.kind in ("batch", "drain"):
                if turn.kind == "drain":
                    window.closing = True
                else:
                    self._num_heard = turn.heard
                    hooks.skip()
                    window.admit(turn.batch, size(turn.batch))
                while window.ready:
                    await hooks.gate()
                    self.in_round = True
                    yield window.take()
            elif turn.kind == "again":
                if turn.epoch >= self.epoch:
                    raise ClosedError("the worker of this replica forms its group again")
            elif turn.kind == "flush":
                await hooks.close()
                self.done()
            else:
                await self.carry_out(turn)

    async def rest(self) -> None:
        """Carries out turns after the last minibatch, until it is cancelled."""
        while True:
            turn = await self._channel.hear(LEAD, PartTurn)
            if turn.kind == "flush":
                self.done()
            else:
                await self.carry_out(turn)


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowedSchedule(Schedule):
    """The minibatches of a part that is not the worker: those that its worker begins, in the same order.

    Args:
        follower: hears from the worker which minibatch is next.
    """

    follower: PartFollower

    @override
    async def refs(self, hooks: ScheduleHooks) -> AsyncGenerator[BatchRef, None]:
        async for ref in self.follower.batches(hooks, self.size):
            yield ref


async def _unserved(turn: PartTurn) -> None:
    raise InternalError(f"a part was asked for {turn.kind!r} before it could")


# ---- node --------------------------------------------------------------------------------

REPORT_EVERY_S = 1.0


class PartNode:
    """One part of a replica. `run` returns when the run is over, and raises the error that ended it early.

    It joins the run, exchanges its part by the strategy as a worker does, and takes its turns from its worker.
    """

    def __init__(self, runtime: Runtime, endpoint: Endpoint, member: Member, config: WorkerConfig) -> None:
        assert config.batch_plan is not None and isinstance(config.model, PartModel)
        self._runtime = runtime
        self._endpoint = endpoint
        self._member = member
        self._config = config
        self._model = config.model
        self._names = replica_of(config.rank, config.plan.parts)
        limits = config.plan.job.deadlines.silence_s, config.micro_batch_samples
        self._channel = PartChannel(runtime, endpoint, self._names, config.model, self._failed, *limits)
        self._gate = FollowerGate(runtime.node)
        self._follower = PartFollower(self._channel, self._model)
        self._follower.carry_out = self._carry_out
        self._source = FollowedSchedule(
            plan=config.batch_plan,
            rank=config.rank,
            epochs=config.plan.job.epochs,
            steps=config.plan.steps_left,
            lr=config.plan.optimizer.lr,
            num_steps=config.plan.job.steps,
            first_version=first_version_of(config),
            follower=self._follower,
        )
        self._exchange: Exchange | None = None

    async def run(self) -> None:
        """Joins the run, trains, and leaves. Raises as `WorkerNode.run` does."""
        member = self._member
        try:
            spec = await model_spec_of(self._config, self._runtime)
            await member.join(spec, *tensor_specs_of(self._model))
            await self._runtime.gather(self._train(), member.over())
        except Exception as error:
            await self._failed(error)
            if (evicted := eviction_of(error, member)) is not None:
                raise evicted from error
            raise
        finally:
            self._channel.close()
            if self._exchange is not None:
                await self._exchange.close()
            await member.leave()

    def drain(self) -> None:
        """Does nothing: a part leaves with its worker."""

    async def _failed(self, error: Exception) -> None:
        text = error.traceback_text if isinstance(error, UserCodeError) else ""
        await self._member.failed(error, text or "".join(traceback.format_exception(error)))

    async def _train(self) -> None:
        config, member, runtime = self._config, self._member, self._runtime
        await member.training()
        await member.heard(lambda: self._is_whole() or member.notice.status == v1.Notice.FINISHED)
        if not self._is_whole():
            return  # the run was over before the worker of this replica came back
        self._follower.start()
        gradients = gradients_of(config, runtime, self._model, self._channel, self._follower, None)
        await begin_predictors(gradients, config, runtime, self._endpoint, late=member.since > 0)
        context = ExchangeContext(
            runtime=runtime,
            endpoint=self._endpoint,
            member=member,
            config=config,
            late=member.since > 0,
            init=init_of(config, runtime),
            is_lowest=self._is_lowest,
            failed=self._failed,
        )
        assembly = Assembly(
            context,
            self._source,
            self._gate,
            on_step=_unreported,
            on_boundary=_nothing,
            place=PartPlace(gradients, self._follower.pushed, self._follower, lambda rank: None),
        )
        exchange = self._exchange = await assembly.exchange()
        reporting = runtime.spawn(
            self._keep_reporting(exchange, gradients.meter), name=f"{runtime.node}-vitals"
        )
        try:
            await exchange.begin()
            await exchange.train()
            await exchange.flush()
            self._report(exchange, gradients.meter)
            await runtime.gather(self._follower.rest(), self._leave_when_over())
        except _Over:
            pass
        finally:
            reporting.cancel()

    async def _leave_when_over(self) -> None:
        await self._member.over()
        raise _Over

    def _is_whole(self) -> bool:
        """Whether all processes of this replica are in."""
        return {*self._names} <= {node.name for node in self._member.notice.nodes}

    def _is_lowest(self) -> bool:
        """Whether this is the part of the replica of the lowest rank that is still there."""
        return names_of(self._member.notice.nodes, self._config.role)[:1] == [self._runtime.node]

    async def _carry_out(self, turn: PartTurn) -> None:
        """Carries out a turn of the worker that is no minibatch."""
        exchange = self._exchange
        if exchange is None:
            raise InternalError(f"{self._runtime.node} was asked for {turn.kind!r} before it has parameters")
        replica = exchange.replica
        if turn.kind == "finish":
            await exchange.finish()
            self._follower.done()
        elif turn.kind == "buffers":
            if elems := self._model.buffer_elems(self._model.part):
                self._model.unpack_buffers(
                    self._model.part, await self._channel.take(0, elems, torch.float64)
                )
        elif turn.kind == "send":
            await send_parameters(self._channel, replica.parameters.tensor)
        else:
            own = isinstance(self._config.plan.strategy, ServerStrategy) and turn.newest
            parameters = await replica.newest() if own else replica.parameters.tensor
            for size in test_sizes(self._config.plan.job.data):
                result = await compute_outputs(
                    self._runtime, self._model, self._channel, parameters, size, None
                )
                if result is not None:
                    await self._channel.give_outputs(result)

    async def _keep_reporting(self, exchange: Exchange, meter: PartMeter) -> None:
        while True:
            await self._runtime.sleep(REPORT_EVERY_S)
            self._report(exchange, meter)

    def _report(self, exchange: Exchange, meter: PartMeter) -> None:
        for event in (*exchange.report(), *meter.report(), *self._runtime.process_metrics("worker")):
            self._member.emit(event)


class _Over(Exception):
    """The run is over: nobody gives this part another turn."""


async def _nothing(replica: Replica, refs: Sequence[BatchRef]) -> None:
    """Its worker evaluates between two minibatches."""


def _unreported(step: StepEvent) -> None:
    """Its worker reports the steps of the replica."""
