"""A worker's exchange through the parameter server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from gradstream.checkpoint.manifest import Resume
from gradstream.checkpoint.own_tensors import answering, read_own
from gradstream.codec.base import Codec, Encoder
from gradstream.codec.low_rank import PowerSGD
from gradstream.coordinator.progress import receipt_of
from gradstream.errors import DataError
from gradstream.memory import Vector
from gradstream.model.base import Layout
from gradstream.runtime.base import Runtime, Work
from gradstream.server.client.client import ServerClient
from gradstream.server.client.links import ShardLinks
from gradstream.server.client.push import SettledPushes
from gradstream.server.rows import RowMap
from gradstream.strategies.base import ServerStrategy
from gradstream.telemetry.events import Event
from gradstream.telemetry.wait_attribution import TrafficReports
from gradstream.transport.base import Endpoint
from gradstream.untrusted import say
from gradstream.wire import v1
from gradstream.wire.chunks import Placement
from gradstream.worker.exchange.base import Exchange, ExchangeContext, Transfers
from gradstream.worker.exchange.redo import Redos
from gradstream.worker.gradient import GradientSource
from gradstream.worker.parts.agreement import Agreement
from gradstream.worker.parts.gradients import PartSource
from gradstream.worker.parts.joint_gradient import PartStandIn
from gradstream.worker.registration import row_exchange_of, row_spec_for
from gradstream.worker.replica.base import ReplicaContext
from gradstream.worker.replica.rows import RowReplica
from gradstream.worker.replica.server import ServerReplica
from gradstream.worker.replica.stand_in import StandIn

# ---- remainders --------------------------------------------------------------------------
# `Remainders`: what a worker has not sent yet, in memory and in checkpoints.
#
# What its codec keeps between two pushes or rounds; and how far it has come since the exchange of its round began,
# where it computes meanwhile (`GroupStrategy.delay`).


def codec_state(codec: Codec | PowerSGD | None) -> Sequence[str]:
    """Names of the vectors that a codec keeps."""
    if codec is None:
        return ()
    return ("residual",) if isinstance(codec, PowerSGD) else codec.state_names


class Remainders:
    """Holds vectors of one worker. They are zero at first.

    Args:
        runtime: of the worker's node.
        layout: of the parameters that the worker exchanges.
        names: of the vectors.

    Attributes:
        vectors: by name, each as long as the parameters.
        bases: further tensors, by name: see `LowRankSums`.
    """

    def __init__(self, runtime: Runtime, layout: Layout, names: Sequence[str]) -> None:
        self._runtime = runtime
        allocate = partial(runtime.memory.allocate, layout.elems, layout.dtype)
        self.vectors: Mapping[str, Vector] = {name: allocate(name) for name in names}
        self.bases: dict[str, torch.Tensor] = {}

    def serve(self, endpoint: Endpoint) -> None:
        """Gives the coordinator a copy for each checkpoint."""
        endpoint.serve("remainders", answering(self._state), model=False)

    async def _state(self) -> Mapping[str, torch.Tensor]:
        if self._runtime.memory.shape_only:
            return {}
        return {**{name: vector.tensor for name, vector in self.vectors.items()}, **self.bases}

    async def restore(self, resume: Resume) -> None:
        """Takes over what the checkpoint has of this worker. A worker that was not in it begins at zero.

        Raises:
            DataError: the file is of another model, or another codec.
        """
        runtime, node = self._runtime, self._runtime.node
        read = partial(read_own, runtime.storage, resume.folder, "remainders", node)
        found = await runtime.beside(read, work=Work("restore"))
        if found is None:
            say(
                f"{node} begins with nothing left to send; {resume.folder} on this machine has no file of that"
            )
            return
        expected = {name: vector.tensor for name, vector in self.vectors.items()}
        form = {name: (tensor.shape, tensor.dtype) for name, tensor in expected.items()}
        if form != {name: (found[name].shape, found[name].dtype) for name in form if name in found}:
            raise DataError(
                f"{node}: the remainders in {resume.folder} do not fit this model, codec and strategy; resume from "
                "another checkpoint, or leave codec and delay out"
            )
        for name, tensor in found.items():
            if name in expected:
                expected[name].copy_(tensor)
            else:
                self.bases[name] = tensor


# ---- server ------------------------------------------------------------------------------


def server_exchange(
    context: ExchangeContext,
    strategy: ServerStrategy,
    parts: ReplicaContext,
    source_of: Callable[[int], GradientSource],
    agreement: Agreement | None = None,
    remainders: Remainders | None = None,
) -> ServerExchange:
    """Makes the exchange of a worker, with a replica that sends rows where the strategy asks for it.

    Args:
        context: the worker's place in the run.
        strategy: strategy of the run.
        parts: parts of its replica.
        source_of: makes the source of another rank's gradients, for which the worker may stand in.
        agreement: with the other processes of its replica; None if there are none.
        remainders: what the codec keeps; None without one.
    """
    config = context.config
    changed = row_exchange_of(config)
    kind = ServerReplica if changed is None else partial(RowReplica, exchange=changed)
    make, rows = partial(kind, parts), row_spec_for(config)
    exchange = ServerExchange(
        context,
        strategy,
        make,
        rows,
        encoder_of(context, remainders),
    )
    if config.losses.stands_in:
        kind_of = StandIn if agreement is None else partial(PartStandIn, agreement=agreement)
        exchange.let_stand_in(parts, source_of, kind_of)
    if config.losses.redoes:
        exchange.redo_torn(parts, agreement)
    return exchange


def encoder_of(context: ExchangeContext, kept: Remainders | None) -> Encoder | None:
    """Encodes what this worker exchanges; None where its codec encodes nothing by itself."""
    config, codec = context.config, context.config.run.codec
    if kept is None or codec is None or isinstance(codec, PowerSGD):
        return None
    state = {name: kept.vectors[name] for name in codec.state_names}
    seed = f"{config.run.job.seed}/{context.runtime.node}"
    return Encoder(codec, config.model.layout.dtype, seed, state)


class ServerExchange(Exchange):
    """Implements `Exchange`.

    Args:
        context: the worker's place in the run.
        strategy: strategy of the run.
        replica: makes the replica for a client of all shards.
        rows: rows of the model, where only changed rows are exchanged; else None.
        encoder: encodes what is pushed; None where it is not encoded.
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
        self._accounts = TrafficReports(context.config.rank)
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
            context.config.run.job.deadlines,
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
            config.run.fetch_codec,
        )
        self._layout = layout
        self.replica = replica(self._client)

    def redo_torn(self, parts: ReplicaContext, agreement: Agreement | None) -> None:
        """Lets this worker redo pushes of lost workers, and others redo its own if it is lost.

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

    async def close(self) -> None:
        """See `Exchange`."""
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
        """See `Exchange`: the worker of the lowest rank sends the first parameters to the shards; the others fetch."""
        context, replica = self._context, self.replica
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
            self._task = context.runtime.spawn(self._take_over(), name=f"{context.runtime.node}-heir")

    async def _take_over(self) -> None:
        """Assigns the first parameters if the worker of the lowest rank died before it did."""
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

    async def train(self) -> None:
        """See `Exchange`."""
        await self._strategy.train(self.replica)

    async def flush(self) -> None:
        """See `Exchange`."""
        await self._client.flush()

    async def finish(self) -> None:
        """See `Exchange`: fetches once more.

        The shards first apply sums that are still incomplete, since no other push will complete them. The fetch
        lands in the gradient's memory: where fetches never overlap compute, the back buffer was never touched.
        """
        await self._client.reclaim_back_buffer()
        await self.replica.pull(flush=True)

    def report(self) -> Sequence[Event]:
        """See `Exchange`."""
        self._transfers.accounted()
        return self._accounts.since_last(self._client.traffic)
