"""The worker's side of a replica of several processes: it tells the parts whose turn it is, and hears their reports."""

from __future__ import annotations

import asyncio
import math
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import astuple, dataclass
from functools import partial

import torch
from typing_extensions import override

from gradstream.coordinator.client.member import Member
from gradstream.data.base import BatchRef
from gradstream.job.plan import EvaluationPlan
from gradstream.runtime.base import Runtime
from gradstream.split.part_model import PartModel
from gradstream.worker.batch_gate import BatchGate
from gradstream.worker.evaluation import DueEvaluations
from gradstream.worker.gradient import Clip
from gradstream.worker.parts.agreement import Agreed, Agreement, BatchAdmission, at_once
from gradstream.worker.parts.channel import PartChannel
from gradstream.worker.parts.messages import (
    Message,
    PartDecision,
    PartGradientTurn,
    PartOutcome,
    PartReport,
    PartStandsIn,
    PartTurn,
)
from gradstream.worker.schedule import Schedule, ScheduleHooks

_Reports = asyncio.Queue[PartReport]


class PartLead(Agreement):
    """Leads the parts of one replica.

    Args:
        channel: to the parts.
        model: the worker's part of the model, which also knows the buffers of the others.
        parts: number of parts, with the worker.
        gate: of the worker, which flushes the parts, too.
        member: gets the receipts of minibatches that are in the model, in all of its parts.

    Attributes:
        admission: admits minibatches to a pipeline that is not empty between them; None if it is.
    """

    def __init__(
        self,
        channel: PartChannel,
        model: PartModel,
        parts: int,
        gate: BatchGate,
        member: Member,
    ) -> None:
        super().__init__()
        self.admission: BatchAdmission | None = None
        self._channel = channel
        self._model = model
        self._others = range(1, parts)
        self._gate = gate
        self._member = member
        self._pushed = Counter[BatchRef]()  # in how many parts a minibatch is in the model
        self._reports = defaultdict[tuple[str, int], _Reports](_Reports)  # by kind and part
        self._loss: float | None = None  # the newest, where no part waits for it
        self._votes: dict[int, PartReport] = {}
        self._agreed = True  # the last vote has come to that all are ready
        self._voted = asyncio.Event()
        self._gradient_turn, self._errand_turn = asyncio.Lock(), asyncio.Lock()

    def start(self) -> None:
        """Begins to hear the reports of the parts, which are in."""
        self._gate.flush_others = self.flush
        for part in self._others:
            self._channel.follow(part, PartReport, partial(self._heard, part))

    def _heard(self, part: int, report: PartReport) -> None:
        if report.kind == "pushed":
            self._pushed_by_one([BatchRef(*ref) for ref in report.refs])
        elif report.kind == "vote":
            self._votes[part] = report
            self._voted.set()
        else:
            self._reports[report.kind, part].put_nowait(report)

    def pushed(self, refs: Sequence[BatchRef]) -> None:
        """Notes that minibatches are in the model, in the worker's part."""
        self.num_pushed += len(refs)
        self._pushed_by_one(refs)

    def _pushed_by_one(self, refs: Sequence[BatchRef]) -> None:
        self._pushed.update(refs)
        whole = [ref for ref in refs if self._pushed[ref] > len(self._others)]
        for ref in whole:
            del self._pushed[ref]
        if whole:
            self._member.receipt(whole)

    # ---- turns ----------------------------------------------------------------------------

    def admit(
        self,
        runtime: Runtime,
        refs: AsyncGenerator[BatchRef, None],
        size: Callable[[BatchRef], int | None],
        ends_stream: Callable[[BatchRef], bool],
    ) -> AsyncGenerator[BatchRef, None]:
        """The same minibatches, which enter the pipeline earlier; see `BatchAdmission`."""
        self.admission = BatchAdmission(runtime, self.window, size, self.begin, ends_stream)
        return self.admission.through(refs, self.drain)

    async def begin(self, ref: BatchRef) -> None:
        """Lets the parts begin a minibatch."""
        await self.spread_buffers()
        self.in_round = True
        self._say(PartTurn("batch", ref=astuple(ref), heard=self.num_heard))

    async def flush(self) -> None:
        """Returns when everything that was begun is computed, and what the parts have of it is in the model."""
        await self.drain()
        await self._ask(PartTurn("flush"))

    async def drain(self) -> None:
        """Returns when all minibatches that were admitted to the pipeline are done."""
        if self.admission is not None:
            self._say(PartTurn("drain"))
            await self.admission.drain()

    def over(self) -> None:
        """Tells the parts that there is no minibatch any more."""
        self._say(PartTurn("over"))

    async def finish(self) -> None:
        """Returns when the parts have the final parameters."""
        await self._ask(PartTurn("finish"))

    def begin_outputs(self, *, newest: bool) -> None:
        """Lets the parts compute outputs of all held-out samples."""
        self._say(PartTurn("outputs", newest=newest))

    async def done(self) -> None:
        """Returns when every part has done its last turn."""
        for part in self._others:
            await self._reports["done", part].get()

    def send(self) -> None:
        """Lets the parts send their parameters, which `PartChannel.take` receives."""
        self._say(PartTurn("send"))

    async def _ask(self, turn: PartTurn) -> None:
        self._say(turn)
        await self.done()

    def _say(self, message: Message) -> None:
        for part in self._others:
            self._channel.say(part, message)

    async def spread_buffers(self) -> None:
        """Gives the parts their buffers, where the worker has loaded others."""
        if self._model.changed:
            self._model.changed = False
            self._say(PartTurn("buffers"))
            for part in self._others:
                await self._channel.give(part, self._model.packed_buffers(part))

    async def share_buffers(self) -> None:
        """See `Agreement`: hears what the parts have made of theirs."""
        for part in self._others:
            if elems := self._model.buffer_elems(part):
                self._model.unpack_buffers(part, await self._channel.take(part, elems, torch.float64))

    # ---- gradients ------------------------------------------------------------------------

    @property
    @override
    def num_heard(self) -> int:
        return self._member.num_heard_receipts

    @asynccontextmanager
    async def turn(self, ref: BatchRef | None) -> AsyncIterator[None]:
        """See `Agreement`: tells the parts."""
        if not self.takes_turns:
            yield
            return
        async with self._gradient_turn:
            if ref is not None:
                self._say(PartGradientTurn(astuple(ref)))
            yield

    def redo(self, refs: Sequence[BatchRef]) -> AbstractAsyncContextManager[None]:
        """See `Agreement`: one after the other."""
        return self._errand_turn

    async def reach(self, mine: PartReport, clip: Clip, num_summed: int) -> Agreed:
        """See `Agreement`: adds up what the parts report, and tells them what becomes of the gradient."""
        reports = [mine, *[await self._reports[mine.kind, part].get() for part in self._others]]
        last = reports[self._model.plan.stages[-1].part]  # computes the loss, from which all NaNs may come
        refused = next((report.refused for report in (last, *reports) if report.refused), "")
        losses = [report.loss for report in reports if report.loss is not None]
        loss = math.fsum(losses) if losses else math.nan
        scale, norm = 1.0, None
        if clip.norm is not None and not refused:
            norm = math.sqrt(math.fsum(report.squares for report in reports)) / num_summed
            if not math.isfinite(norm):
                refused = "the norm of the gradient overflows, so it cannot be clipped"
            elif norm > clip.norm:
                scale = clip.norm / norm
        self._say(PartDecision(scale=scale, refused=refused))
        return Agreed(scale, refused, loss, norm)

    def note(self, mine: PartReport) -> float:
        """See `Agreement`: the newest loss that the others have reported, of this minibatch or an earlier one."""
        for part in self._others:
            while not (reports := self._reports["gradient", part]).empty():
                self._loss = reports.get_nowait().loss
        return math.nan if self._loss is None else self._loss

    async def loss(self, mine: PartReport) -> float:
        """See `Agreement`: the part of the last stage knows it."""
        if mine.loss is None:
            mine = await self._reports["gradient", self._model.plan.stages[-1].part].get()
        return math.nan if mine.loss is None else mine.loss

    # ---- rounds ---------------------------------------------------------------------------

    @property
    @override
    def leads(self) -> bool:
        return True

    async def all_ready(
        self, ready: bool, epoch: int = 0, last: Callable[[], Awaitable[None]] = at_once
    ) -> bool:
        """See `Agreement`. A part of an older group is told so; one of a newer group waits for this worker."""
        votes, self.in_round = self._votes, False
        while True:
            for part, vote in list(votes.items()):
                if vote.epoch < epoch:
                    del votes[part]
                    self._channel.say(part, PartOutcome(ready=False))
            if any(vote.epoch > epoch for vote in votes.values()):
                self._agreed = False
                return False
            if len(votes) == len(self._others):
                break
            self._voted.clear()
            await self._voted.wait()
        ready = ready and not any(vote.refused for vote in votes.values())
        votes.clear()
        self._agreed = ready
        await last()
        self._say(PartOutcome(ready=ready))
        return ready

    @override
    async def give_up(self, epoch: int) -> None:
        if self.in_round:
            await self.all_ready(False, epoch)
        elif self._agreed:  # the parts know of no failure, and wait for their next turn
            self._say(PartTurn("again", epoch=epoch))

    @override
    def let_stand_in(self, rank: int, number: int) -> None:
        self._say(PartStandsIn(rank, number))


@dataclass(frozen=True, slots=True, kw_only=True)
class LedSchedule(Schedule):
    """The minibatches of a worker whose parts follow it.

    Args:
        lead: leads the parts.
        runtime: of the worker.
        evaluation: says when the run evaluates: then the pipeline is empty.
    """

    lead: PartLead
    runtime: Runtime
    evaluation: EvaluationPlan

    async def refs(self, hooks: ScheduleHooks) -> AsyncGenerator[BatchRef, None]:
        """See `BatchSchedule`: the parts begin each minibatch with the worker."""
        lead, source = self.lead, Schedule.refs(self, hooks)
        if lead.window.ahead:
            due = DueEvaluations(self.evaluation, self)
            source = lead.admit(self.runtime, source, self.size, lambda ref: due.newly_due([ref]) is not None)
        async with aclosing(source) as refs:
            async for ref in refs:
                if lead.admission is None:
                    await lead.begin(ref)
                yield ref
        lead.over()
