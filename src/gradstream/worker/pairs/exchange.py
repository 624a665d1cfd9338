"""A worker's exchange in pairs, where each worker has its own parameters."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError
from typing_extensions import override

from gradstream.checkpoint.own_state import MOST_BYTES, read_own, receive_file, send_file
from gradstream.checkpoint.snapshot import Pieces, load
from gradstream.collectives.group import slice_of
from gradstream.collectives.pairwise import PairwiseExchange
from gradstream.coordinator.client.member import names_of
from gradstream.errors import DataError, DeadlineError, PeerLostError, RefusedError
from gradstream.memory import Span, Vector
from gradstream.runtime.base import Runtime, Work
from gradstream.strategies.base import PeerStrategy
from gradstream.telemetry.events import Event, ExchangeEvent
from gradstream.transport.base import Endpoint, Stream
from gradstream.untrusted import say
from gradstream.wire import v1
from gradstream.wire.chunks import ChunkMap
from gradstream.worker.assembly import Assembly
from gradstream.worker.exchange import Exchange, ExchangeContext, Transfers
from gradstream.worker.pairs.contents import Contents
from gradstream.worker.pairs.replica import PeerReplica
from gradstream.worker.unsent_state import encoder_of

# ---- peer states -------------------------------------------------------------------------
# `PeerStates`: what a worker with parameters of its own gives to others, by the method "replica".
#
#     no request     all that it has, as a file: to the coordinator for a checkpoint, and to a worker that joins
#    a `v1.Tensor`  a range of its parameters: to each worker that makes the mean of all, for a checkpoint or at the end
#
# It answers between two rounds, when everything is consistent.

METHOD = "replica"

SIGNS = 4
"""Heartbeats that a caller waiting for the end of a round gets within its patience."""

COUNTS = "counts"
"""Name of the tensor with the numbers of rounds and of inner steps, and those of `Contents.numbers`."""


class PeerStates:
    """Serves one worker's state.

    Args:
        runtime: runtime of the worker's node.
        replica: the worker.
        silence_s: seconds of silence after which others give up on this worker.

    Attributes:
        ended: the worker makes no more rounds.
    """

    def __init__(self, runtime: Runtime, replica: PeerReplica, silence_s: float) -> None:
        self.ended = False
        self._runtime = runtime
        self._replica = replica
        self._silence_s = silence_s

    def serve(self, endpoint: Endpoint) -> None:
        """Answers from now on."""
        endpoint.serve(METHOD, self._answer, model=False)

    def end(self) -> None:
        """Notes that the worker makes no more rounds."""
        self.ended = True
        self._replica.changed.ring()

    # ---- answers --------------------------------------------------------------------------

    async def _answer(self, stream: Stream) -> None:
        asked = v1.Body.FromString(stream.opened.body).data
        if asked:
            await self._answer_range(stream, v1.Tensor.FromString(asked))
            return
        await self._until(stream, last=False)
        replica = self._replica
        counts = {COUNTS: torch.tensor([replica.version, replica.steps.updates, *replica.contents.numbers()])}

        def copied(_: object) -> bytes:
            return safetensors.torch.save(
                {**{name: one.tensor for name, one in replica.own.items()}, **counts}
            )

        await send_file(stream, await self._copy(copied, safetensors.torch.save(counts)))

    async def _answer_range(self, stream: Stream, asked: v1.Tensor) -> None:
        start, stop = asked.tag, asked.tag + asked.elems
        if stop > len(self._replica.parameters):
            raise RefusedError(
                self._runtime.node, "BAD_REQUEST", f"the model has no elements {start} to {stop}"
            )
        await self._until(stream, last=bool(asked.sequence))
        parameters = self._replica.parameters
        await send_file(stream, await self._copy(lambda _: parameters.tensor[start:stop].numpy().tobytes()))

    async def _until(self, stream: Stream, *, last: bool) -> None:
        """Waits until the worker has begun (or, if `last`, has made its last round) and is between two rounds.

        The worker begins no other round until `_copy` has released it.
        """
        for wait in (partial(self._ready, last), self._replica.still.acquire):
            while True:
                try:
                    await self._runtime.within(self._silence_s / SIGNS, wait())
                    break
                except TimeoutError:
                    await stream.waiting([f"{self._runtime.node}: in the middle of a round"])

    async def _ready(self, last: bool) -> None:
        while self._replica.version < 0 or (last and not self.ended):
            await self._replica.changed.wait()

    async def _copy(self, copy: Callable[[object], bytes], shape_only: bytes = b"") -> bytes:
        replica = self._replica
        try:
            work = Work("copy", elems=sum(map(len, replica.own.values())))
            reads = [one.all for one in replica.own.values()]
            return await self._runtime.compute(copy, work=work, reads=reads, shape_only=shape_only)
        finally:
            replica.still.release()


# ---- the other side -----------------------------------------------------------------------


async def copy_of(endpoint: Endpoint, worker: str, silence_s: float) -> Mapping[str, torch.Tensor]:
    """Another worker's own state, by name.

    Raises:
        PeerLostError, DeadlineError: the worker is lost or silent.
        RefusedError: the worker does not answer with a state.
    """
    data = await receive_file(endpoint, worker, METHOD, b"", MOST_BYTES, silence_s)
    try:
        state: Mapping[str, torch.Tensor] = safetensors.torch.load(data)
    except SafetensorError as error:
        raise RefusedError(worker, "BAD_REQUEST", f"its state cannot be read: {error}") from error
    return state


async def elements_of(
    endpoint: Endpoint, worker: str, start: int, like: torch.Tensor, silence_s: float, *, last: bool
) -> torch.Tensor:
    """Elements of another worker's parameters, from `start` on, as many as `like` has.

    Args:
        endpoint: endpoint of the caller.
        worker: name of the worker.
        start: number of the first.
        like: a tensor of the same shape and dtype.
        silence_s: seconds of silence after which the caller gives up.
        last: asks for the parameters after its last round, which it may still be about to finish.

    Raises:
        PeerLostError, DeadlineError: the worker is lost or silent.
        RefusedError: the worker does not answer with as many elements.
    """
    request = v1.Tensor(tag=start, elems=len(like), sequence=int(last)).SerializeToString()
    size_bytes = like.nbytes
    data = await receive_file(endpoint, worker, METHOD, request, size_bytes, silence_s)
    if len(data) != size_bytes:
        raise RefusedError(
            worker, "BAD_REQUEST", f"{len(data)} bytes of its parameters; expected {size_bytes}"
        )
    return torch.from_numpy(np.frombuffer(bytearray(data), np.uint8)).view(like.dtype)


def take_over(replica: PeerReplica, state: Mapping[str, torch.Tensor], where: str) -> None:
    """Adopts the vectors of a state from `copy_of` or a checkpoint.

    Raises:
        DataError: the state belongs to another model, strategy or update rule.
    """
    own = replica.own
    form = {name: (vector.tensor.shape, vector.tensor.dtype) for name, vector in own.items()}
    counts = state.get(COUNTS)
    if (
        form != {name: (tensor.shape, tensor.dtype) for name, tensor in state.items() if name != COUNTS}
        or counts is None
    ):
        raise DataError(
            f"worker-{replica.rank}: the state in {where} does not fit this model, strategy and update rule: it has "
            f"{', '.join(state)}; resume from another checkpoint, or with the options that the run had"
        )
    for name, vector in own.items():
        vector.tensor.copy_(state[name])


def go_on_after(replica: PeerReplica, state: Mapping[str, torch.Tensor]) -> None:
    """Continues with the round after those of an adopted state."""
    replica.version, replica.steps.updates = (int(count) for count in state[COUNTS][:2])


# ---- peers -------------------------------------------------------------------------------

GONE = (PeerLostError, DeadlineError)
"""Errors of a worker that does not answer."""


async def make(assembly: Assembly) -> PeerExchange:
    """Makes a worker's exchange."""
    config, context, pairwise = assembly.config, assembly.context, assembly.pairwise
    strategy, member, resume = config.plan.strategy, context.member, context.resume
    assert pairwise is not None and isinstance(strategy, PeerStrategy)
    contents = Contents(
        (member.node.name, member.node.incarnation), member.report if config.loop is not None else None
    )
    return PeerExchange(
        context,
        strategy,
        pairwise,
        lambda transfers: PeerReplica(
            assembly.replica_context(),
            pairwise,
            contents,
            config.plan.job.seed,
            strategy,
            lambda: [node.rank for node in member.notice.nodes if node.role == "worker"],
            encoder_of(context, assembly.unsent),
            transfers,
            member.emit,
        ),
        restores=resume is not None and resume.replicas == config.plan.replicas,
        chunk_elems=config.chunk_elems,
    )


class PeerExchange(Exchange):
    """Implements `Exchange`.

    Args:
        context: the worker's place in the run.
        strategy: strategy of the run.
        pairwise: the exchanges of this worker's node, which already serve partners.
        replica: makes the replica, which reports its transfers.
        restores: the checkpoint that the run continues from, if any, has the state of this strategy's workers.
        chunk_elems: elements of a chunk. A checkpoint has a version for each.
    """

    replica: PeerReplica

    def __init__(
        self,
        context: ExchangeContext,
        strategy: PeerStrategy,
        pairwise: PairwiseExchange,
        replica: Callable[[Transfers], PeerReplica],
        *,
        restores: bool,
        chunk_elems: int,
    ) -> None:
        super().__init__(context)
        self._strategy = strategy
        self._pairwise = pairwise
        self._restores = restores
        self._transfers = Transfers(context.config.rank, context.member.emit)
        self._accounted = (0, 0, 0, 0)  # exchanges, bytes both ways, and those of whole vectors
        self.replica = replica(self._transfers)
        self._states = PeerStates(context.runtime, self.replica, context.config.plan.job.deadlines.silence_s)
        self._states.serve(context.endpoint)
        self._source = _PeerSnapshot(self, chunk_elems)
        self._members: Mapping[str, int] = {}
        pairwise.absent(context.late)
        context.member.listen(self._hear)
        self._hear(context.member.notice)

    def _hear(self, notice: v1.Notice) -> None:
        """Gives up the exchange with a worker that is lost or was restarted."""
        before, self._members = self._members, {node.name: node.incarnation for node in notice.nodes}
        for name, incarnation in before.items():
            if self._members.get(name) != incarnation:
                self._pairwise.lost(name, "was lost, as the coordinator says")
        self.replica.contents.hear(notice)

    @property
    def context(self) -> ExchangeContext:
        """The worker's place in the run."""
        return self._context

    # ---- the beginning --------------------------------------------------------------------

    async def begin(self) -> None:
        """See `Exchange`: all make or read the same parameters; a late worker copies another's."""
        context, replica, loop = self._context, self.replica, self._context.config.loop
        self._tell_loop()
        if context.late:
            if loop is not None:
                await self._enter_loop()
            await self._copy_another()
            if loop is not None:
                loop.missed(replica.skip_missed())
            self._pairwise.absent(False)
        elif context.resume is not None:
            await self._restore()
        else:
            await context.init(replica.parameters)
            replica.version = 0
        replica.changed.ring()
        self._keep_snapshots(self._source)

    async def _copy_another(self) -> None:
        """Continues from the state and round of the first worker that answers, of those that were there before."""
        context = self._context
        for name in self.elders:
            try:
                state = await copy_of(context.endpoint, name, context.config.plan.job.deadlines.silence_s)
            except GONE:
                continue
            take = partial(take_over, self.replica, state, name)
            await context.runtime.beside(take, work=Work("copy", elems=sum(map(torch.numel, state.values()))))
            go_on_after(self.replica, state)
            self.replica.contents.copied(state[COUNTS][2:].tolist())
            return
        raise PeerLostError(
            context.runtime.node,
            "has joined a run of which no worker is left that has parameters; go on from its newest checkpoint",
        )

    async def _restore(self) -> None:
        """Continues from this worker's own state or, without one, from the mean of all."""
        context, replica, resume = self._context, self.replica, self._context.resume
        assert resume is not None
        storage, folder, node = context.runtime.storage, resume.folder, context.runtime.node
        elems = len(replica.parameters)

        def restore() -> bool:
            state = read_own(storage, folder, "replica", node) if self._restores else None
            if state is None:
                load(storage, folder, {"": [(0, replica.parameters.tensor)]})
                replica.version = resume.rounds
            else:
                take_over(replica, state, folder)
                go_on_after(replica, state)
            return state is not None

        if not await context.runtime.beside(restore, work=Work("restore", elems=elems)) and self._restores:
            say(
                f"{node}: begins with the mean of all workers; {folder} on this machine has no state of its own"
            )

    # ---- training, and the end ------------------------------------------------------------

    @override
    async def train(self) -> None:
        await self._strategy.train(self.replica)
        self._pairwise.end()
        self._states.end()

    async def finish(self) -> None:
        """See `Exchange`: the mean over all present workers, each after its last round."""
        replica, runtime = self.replica, self._context.runtime
        mean = runtime.memory.allocate(len(replica.parameters), replica.parameters.tensor.dtype, "mean")
        for name in await self.mean(mean.all, 0, last=True):
            say(f"{runtime.node}: the final model is without the parameters of {name}, which does not answer")
        replica.parameters = mean

    async def mean(self, into: Span, start: int, *, last: bool) -> list[str]:
        """Writes the mean of all workers' parameters from element `start` on, summed in the order of ranks.

        Args:
            into: overwritten.
            start: number of the first element.
            last: see `elements_of`.

        Returns:
            Names of the workers that do not answer. The mean is over the others.
        """
        context, runtime = self._context, self._context.runtime
        own, me, gone = self.replica.parameters, runtime.node, list[str]()
        if runtime.memory.shape_only:
            return gone
        count = 0
        for name in names_of(context.member.notice.nodes, "worker"):
            part = own.tensor[start : start + len(into)]
            if name != me:
                try:
                    part = await elements_of(
                        context.endpoint,
                        name,
                        start,
                        part,
                        context.config.plan.job.deadlines.silence_s,
                        last=last,
                    )
                except GONE:
                    gone.append(name)
                    continue
            await self._add(into, part, first=count == 0)
            count += 1
        await runtime.compute(
            lambda _: into.tensor.div_(count), work=Work("copy", elems=len(into)), writes=[into]
        )
        return gone

    async def _add(self, total: Span, part: torch.Tensor, *, first: bool) -> None:
        def add(_: object) -> None:
            total.tensor.copy_(part) if first else total.tensor.add_(part)

        await self._context.runtime.compute(add, work=Work("copy", elems=len(part)), writes=[total])

    def report(self) -> Sequence[Event]:
        """See `Exchange`: an exchange counts as a push and a fetch."""
        self._transfers.accounted()
        replica, pairwise = self.replica, self._pairwise
        now = (replica.exchanges_done, pairwise.given_bytes, pairwise.taken_bytes, replica.whole_bytes)
        done, given, taken, whole = (new - old for new, old in zip(now, self._accounted, strict=True))
        self._accounted = now
        return [
            ExchangeEvent(
                rank=self._context.config.rank,
                pushed_bytes=given,
                fetched_bytes=taken,
                whole_pushed_bytes=whole,
                whole_fetched_bytes=whole,
                pushes=done,
                fetches=done,
                retries=0,
            )
        ]

    @override
    async def close(self) -> None:
        await super().close()
        self._pairwise.end()


class _PeerSnapshot:
    """Implements `checkpoint.snapshot.SnapshotSource`: a slice of the mean of all workers' parameters.

    All workers stop after the same round, and each computes the mean of its own slice. A worker's own state is in a
    separate file: see `PeerStates`.

    Args:
        exchange: the exchange of this worker.
        chunk_elems: elements of a chunk.
    """

    def __init__(self, exchange: PeerExchange, chunk_elems: int) -> None:
        self._exchange = exchange
        self._chunk_elems = chunk_elems
        self._mean: Vector | None = None

    @property
    def _place(self) -> tuple[int, int]:
        """Rank among the present workers, and their number."""
        context = self._exchange.context
        names = names_of(context.member.notice.nodes, "worker")
        return names.index(context.runtime.node), len(names)

    @property
    def _slice(self) -> tuple[int, int]:
        return slice_of(len(self._exchange.replica.parameters), *self._place)

    def pieces(self, holders: Sequence[str]) -> Mapping[str, Pieces]:
        """See `SnapshotSource`; filled in within `still`."""
        start, stop = self._slice
        memory, dtype = self._exchange.context.runtime.memory, self._exchange.replica.parameters.tensor.dtype
        if self._mean is None or len(self._mean) != stop - start:
            self._mean = memory.allocate(stop - start, dtype, "mean")
        return {"": [(start, self._mean.tensor)] if start < stop else []}

    def versions(self, holders: Sequence[str]) -> Sequence[int]:
        """See `SnapshotSource`: the number of rounds."""
        rank, size = self._place
        chunks = ChunkMap(len(self._exchange.replica.parameters), self._chunk_elems, size)
        return [self._exchange.replica.version] * len(chunks.chunks_of(rank))

    def procedures(self, holders: Sequence[str]) -> Sequence[v1.Procedure]:
        """See `SnapshotSource`: without servers there are none."""
        return ()

    def still(self) -> AbstractAsyncContextManager[object]:
        """See `SnapshotSource`: all workers stand still. Fills in the pieces first.

        Raises:
            DataError: a worker does not answer.
        """
        return self._filled()

    @asynccontextmanager
    async def _filled(self) -> AsyncIterator[None]:
        assert self._mean is not None
        start, stop = self._slice
        try:
            gone = [] if start == stop else await self._exchange.mean(self._mean.all, start, last=False)
        except RefusedError as error:
            raise DataError(str(error)) from error
        if gone:
            raise DataError(f"the mean of all workers is without {', '.join(gone)}, which do not answer")
        yield
