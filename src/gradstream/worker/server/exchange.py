"""A worker's exchange through the parameter server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from typing_extensions import override

from gradstream.codec.base import Encoder
from gradstream.coordinator.progress import receipt_of
from gradstream.server.client.client import ServerClient
from gradstream.server.client.links import ShardLinks
from gradstream.server.client.push import SettledPushes
from gradstream.server.rows import RowMap
from gradstream.strategies.base import ServerStrategy
from gradstream.telemetry.events import Event
from gradstream.wire import v1
from gradstream.wire.chunks import Placement
from gradstream.worker.assembly import Assembly
from gradstream.worker.exchange import Exchange, ExchangeContext, Transfers
from gradstream.worker.gradient import GradientSource
from gradstream.worker.parts.agreement import Agreement
from gradstream.worker.parts.gradients import PartSource
from gradstream.worker.parts.joint_gradient import PartStandIn
from gradstream.worker.registration import row_exchange_of, row_spec_for
from gradstream.worker.replica import ReplicaContext
from gradstream.worker.server.redo import Redos
from gradstream.worker.server.replica import ServerReplica
from gradstream.worker.server.rows import RowReplica
from gradstream.worker.server.stand_in import StandIn
from gradstream.worker.unsent_state import encoder_of


async def make(assembly: Assembly) -> ServerExchange:
    """Makes a worker's exchange, with a replica that sends rows if the strategy asks for it."""
    context, config, agreement = assembly.context, assembly.config, assembly.agreement
    parts, changed, strategy = assembly.replica_context(), row_exchange_of(config), config.plan.strategy
    assert isinstance(strategy, ServerStrategy)
    kind = ServerReplica if changed is None else partial(RowReplica, exchange=changed)
    encoder = encoder_of(context, assembly.unsent)
    exchange = ServerExchange(context, strategy, partial(kind, parts), row_spec_for(config), encoder)
    if config.losses.stands_in:
        stand_in = StandIn if agreement is None else partial(PartStandIn, agreement=agreement)
        exchange.let_stand_in(parts, assembly.source_of, stand_in)
    if config.losses.redoes:
        exchange.redo_torn(parts, agreement)
    return exchange


class ServerExchange(Exchange):
    """Implements `Exchange`.

    Args:
        context: the worker's place in the run.
        strategy: strategy of the run.
        replica: makes the replica for a client of all shards.
        rows: rows of the model, where only changed rows are exchanged; else None.
        encoder: encodes what is pushed; None if it is not encoded.
    """

    replica: ServerReplica

    _redos: Redos | None = None

    def __init__(
        self,
        context: ExchangeContext,
        strategy: ServerStrategy,
        replica: Callable[[ServerClient], ServerReplica],
        rows: v1.RowSpec | None = None,
        encoder: Encoder | None = None,
    ) -> None:
        super().__init__(context)
        self._strategy = strategy
        config, layout = context.config, context.config.model.layout
        self._transfers = Transfers(context.config.rank, context.member.emit)

        def placed(notice: v1.Notice) -> Placement:
            return Placement.of(notice.placement).of_part(
                context.config.part, max(1, len(notice.model.parts))
            )

        placement = placed(context.member.notice)
        chunks = placement.chunk_map(layout.elems, config.chunk_elems)
        links = ShardLinks(
            context.runtime,
            context.endpoint,
            placement,
            chunks,
            context.config.plan.job.deadlines,
            self._transfers,
        )
        context.member.listen(lambda notice: links.move(placed(notice)))
        back_buffer = context.runtime.memory.allocate(
            layout.elems if rows is None else 0,
            layout.dtype,
            "spare",
            exchanged=True,
            lead_bytes=layout.lead_bytes,
        )
        self._client = ServerClient(
            links,
            back_buffer,
            None if rows is None else RowMap.of(chunks, rows),
            encoder,
            config.plan.fetch_codec,
        )
        self._layout = layout
        self.replica = replica(self._client)

    def redo_torn(self, parts: ReplicaContext, agreement: Agreement | None) -> None:
        """Lets this worker redo lost workers' pushes, and other workers redo its pushes if it is lost.

        Receipts of a split replica are in the order in which each of its processes pushes.
        """
        member = self._context.member
        if agreement is None:
            counts, one_by_one = (
                (lambda: member.num_receipts, lambda: member.num_heard_receipts),
                asyncio.Lock(),
            )
            self._redos = Redos(self._context, parts, self._client, lambda refs: one_by_one)
        else:
            counts, agreement.takes_turns = (lambda: agreement.num_pushed, lambda: agreement.num_heard), True
            assert isinstance(parts.gradients, PartSource)
            parts = replace(parts, gradients=parts.gradients.redoing)
            self._redos = Redos(self._context, parts, self._client, agreement.redo)
        self._client.settled = SettledPushes(*counts, receipt_of)
        member.listen(self._redos.hear)
        self._redos.hear(member.notice)

    @override
    async def close(self) -> None:
        await super().close()
        if self._redos is not None:
            self._redos.cancel()

    def let_stand_in(
        self,
        parts: ReplicaContext,
        source_of: Callable[[int], GradientSource],
        make: Callable[..., StandIn],
    ) -> None:
        """Lets this worker compute the parts of lost workers, where the coordinator asks for it."""
        context, member = self._context, self._context.member
        allocate = partial(
            context.runtime.memory.allocate, self._layout.elems, self._layout.dtype, exchanged=True
        )
        stand_in = make(
            context.runtime,
            self._client,
            parts.schedule,
            source_of,
            allocate,
            lambda handed: member.report(v1.BeatReport(handed=handed)),
            context.failed,
            parts.refusals,
        )
        self.replica.stand_in = stand_in
        member.listen(stand_in.hear)
        stand_in.hear(member.notice)

    async def begin(self) -> None:
        """See `Exchange`: the worker of the lowest rank sends initial parameters to the shards; the others fetch."""
        context, replica = self._context, self.replica
        self._tell_loop()
        if context.late and context.config.loop is not None:
            await self._enter_loop()
        if context.late and replica.stand_in is not None:
            member = context.member
            await member.heard(lambda: member.first_round is not None)
            await replica.swap_in(replica.server.fetch_soon(min_version=member.first_round or 0))
        elif context.resume is not None or context.late:  # not every strategy begins with a fetch
            await replica.swap_in(replica.server.fetch_soon())
        elif context.is_lowest():
            await context.init(replica.parameters)
            await self._client.assign(replica.parameters)
        else:
            self._task = context.runtime.spawn(self._take_over(), name=f"{context.runtime.node}-substitute")

    async def _take_over(self) -> None:
        """Sends the initial parameters if the worker of the lowest rank died before it did."""
        context = self._context
        await context.member.heard(context.is_lowest)
        if self.replica.version >= 0:
            return
        try:
            memory, layout = context.runtime.memory, self._layout
            vector = memory.allocate(layout.elems, layout.dtype, "initial", exchanged=True)
            await context.init(vector)
            await self._client.assign(vector)
        except Exception as error:
            await context.failed(error)

    @override
    async def train(self) -> None:
        await self._strategy.train(self.replica)

    @override
    async def flush(self) -> None:
        await self._client.flush()

    async def finish(self) -> None:
        """See `Exchange`: fetches again.

        The shards first apply incomplete sums, since no other push will complete them. The fetch goes into the
        gradient's memory, since without overlapping fetches the back buffer was never touched.
        """
        await self._client.reclaim_back_buffer()
        await self.replica.pull(flush=True)

    @override
    def report(self) -> Sequence[Event]:
        self._transfers.accounted()
        return self._client.traffic.report(self._context.config.rank)
