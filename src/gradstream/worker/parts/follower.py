"""A part's side of a replica of several processes: its minibatches are those that the worker begins."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import astuple, dataclass

from gradstream.data.base import BatchRef
from gradstream.errors import ClosedError, InternalError
from gradstream.split.part_model import PartModel
from gradstream.worker.batch_gate import BatchGate, Gate
from gradstream.worker.gradient import Clip
from gradstream.worker.parts.agreement import Agreed, Agreement, at_once
from gradstream.worker.parts.channel import PartChannel
from gradstream.worker.parts.messages import (
    PartGradientTurn,
    PartOutcome,
    PartReport,
    PartStandsIn,
    PartTurn,
    PartVerdict,
)
from gradstream.worker.schedule import Schedule, ScheduleHooks

LEAD = 0
"""The part that leads: the worker."""


class FollowerGate(BatchGate):
    """The gate of a part: open, since its worker has passed its own."""

    def __init__(self, node: str) -> None:
        super().__init__(node, lambda report: None, lambda number: None)

    async def gate(self, flush: Callable[[], Awaitable[None]]) -> Gate:
        """See `BatchGate`."""
        del flush
        self.begun += 1
        return "go"


class PartFollower(Agreement):
    """Carries out what the worker tells this part to do next, message by message (`PartTurn`).

    Args:
        channel: to the other parts.
        model: of this part.
        gate: of this part, which takes the worker's phase.

    Attributes:
        carry_out: carries out a turn that begins no minibatch, and no flush.
        epoch: membership epoch under which this part has voted last.
    """

    def __init__(self, channel: PartChannel, model: PartModel, gate: BatchGate) -> None:
        super().__init__()
        self._channel = channel
        self._model = model
        self._gate = gate
        self.epoch = 0
        self.carry_out: Callable[[PartTurn], Awaitable[None]] = _unserved
        self._num_heard = 0
        self._turns = deque[BatchRef]()  # of gradients, the present one first
        self._turned = asyncio.Event()

    def pushed(self, refs: Sequence[BatchRef]) -> None:
        """Reports that minibatches are in the model, in this part."""
        self.num_pushed += len(refs)
        for ref in refs:
            self._channel.say(LEAD, PartReport("pushed", refs=(astuple(ref),)))

    def done(self) -> None:
        """Reports that this part's turn is done."""
        self._channel.say(LEAD, PartReport("done"))

    async def share_buffers(self) -> None:
        """See `Agreement`."""
        if self._model.buffer_elems(self._model.part):
            await self._channel.give(LEAD, self._model.packed_buffers(self._model.part))

    async def reach(self, mine: PartReport, clip: Clip, num_summed: int) -> Agreed:
        """See `Agreement`: reports to the worker, and hears what becomes of the gradient."""
        self._channel.say(LEAD, mine)
        verdict = await self._channel.hear(LEAD, PartVerdict)
        return Agreed(verdict.scale, verdict.refused)

    def note(self, mine: PartReport) -> float:
        """See `Agreement`."""
        if mine.loss is not None:
            self._channel.say(LEAD, mine)
        return math.nan

    @property
    def leads(self) -> bool:
        """See `Agreement`."""
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
    def num_heard(self) -> int:
        """See `Agreement`."""
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
    async def errand(self, refs: Sequence[BatchRef]) -> AsyncIterator[None]:
        """See `Agreement`: begins with the turn of the first one."""
        await self._until(refs)
        yield

    async def all_ready(
        self, ready: bool, epoch: int = 0, last: Callable[[], Awaitable[None]] = at_once
    ) -> bool:
        """See `Agreement`."""
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
                    self._gate.phase, self._gate.begun_before = turn.phase, turn.begun_before
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

    async def refs(self, hooks: ScheduleHooks) -> AsyncGenerator[BatchRef, None]:
        """See `BatchSchedule`."""
        async for ref in self.follower.batches(hooks, self.size):
            yield ref


async def _unserved(turn: PartTurn) -> None:
    raise InternalError(f"a part was asked for {turn.kind!r} before it could")
