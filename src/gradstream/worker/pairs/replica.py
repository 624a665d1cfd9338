"""A replica that exchanges with one other worker at a time, and has its own parameters."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from typing_extensions import override

from gradstream.codec.base import WORD, Encoder
from gradstream.collectives.pairwise import PairwiseExchange
from gradstream.errors import DataError
from gradstream.memory import Span, Vector
from gradstream.model.base import finite
from gradstream.runtime.base import Work
from gradstream.runtime.tasks import Broadcast
from gradstream.strategies import api
from gradstream.strategies.base import PeerStrategy
from gradstream.telemetry.events import AloneEvent
from gradstream.telemetry.meters import Kind, Transfer, WaitAttribution
from gradstream.worker.computed import ComputedGradient
from gradstream.worker.local_steps import LocalParameters
from gradstream.worker.loop import LoopSource
from gradstream.worker.pairs.contents import Contents
from gradstream.worker.replica import Replica, ReplicaContext, vector_of


class PeerReplica(Replica):
    """Implements `strategies.api.PeerWorker`.

    Args:
        context: parts of every replica; its `gradients` are local steps.
        pairwise: the exchanges of this worker's node.
        contents: whose steps the parameters contain.
        seed: seed of the run.
        strategy: strategy of the run.
        live: see `api.PeerWorker`.
        encoder: encodes the first of the vectors that are given; None if all go as they are. Both partners use what
            is decoded, of their own vector too. So what the codec leaves out is dropped from both halves of the mean,
            and what it keeps for the next round counts once.
        on_transfer: called with each exchange that is done.
        on_alone: called with each exchange that failed although there was a partner.

    Attributes:
        pairwise, seed, state, numbers: see `api.PeerWorker`.
        exchanges_done: number of completed exchanges.
        whole_bytes: bytes that they would have sent without encoding.
        changed: notified when the worker has begun, and when it has ended.
        still: held during a round. Another holder sees consistent parameters and state.
    """

    def __init__(
        self,
        context: ReplicaContext,
        pairwise: PairwiseExchange,
        contents: Contents,
        seed: int,
        strategy: PeerStrategy,
        live: Callable[[], Sequence[int]],
        encoder: Encoder | None,
        on_transfer: Callable[[Transfer], None],
        on_alone: Callable[[AloneEvent], None],
    ) -> None:
        self._allocate = partial(context.runtime.memory.allocate, exchanged=True)
        self._attribution = WaitAttribution()
        super().__init__(context, self._allocate, self._attribution)
        self.pairwise = pairwise
        self.contents = contents
        self.seed = seed
        self.state: Mapping[str, Vector] = {name: self._vector(name) for name in strategy.state_names}
        self.numbers: Mapping[str, Vector] = {
            name: self._allocate(1, self._layout.dtype, name) for name in strategy.numbers
        }
        for name, first in strategy.numbers.items():
            self.numbers[name].tensor.fill_(first)
        self.exchanges_done = self.whole_bytes = 0
        self.changed = Broadcast()
        self._live = live
        self._encoder = encoder
        if encoder is not None:
            words = encoder.words(self._layout.elems)
            self._coded, self._coded_taken = (
                self._allocate(words, WORD, name) for name in ("encoded", "partner's encoded")
            )
        self._on_transfer = on_transfer
        self._on_alone = on_alone
        self._taken: list[Vector] = []  # memory for the partner's vectors
        self._round: ComputedGradient | None = None  # the current round
        self.still = asyncio.Lock()
        assert isinstance(context.gradients, LocalParameters | LoopSource)
        self.steps = context.gradients

    def _vector(self, name: str) -> Vector:
        return vector_of(self._layout, self._allocate, name)

    @property
    def live(self) -> Sequence[int]:
        """See `strategies.api.PeerWorker`."""
        return self._live()

    @property
    def own(self) -> Mapping[str, Vector]:
        """This worker's own state by name: parameters, the strategy's vectors, and the inner optimizer's state."""
        inner = {f"inner.{name}": vector for name, vector in self.steps.state.items()}
        return {"parameters": self.parameters, **self.state, **self.numbers, **inner}

    @override
    def retire(self) -> None:
        super().retire()
        self.state, self._taken = {}, []

    async def newest(self) -> torch.Tensor:
        """See `Replica.newest`: this worker's own, since there are no common parameters."""
        return self.parameters.tensor

    async def _flush(self) -> None:
        """Does nothing: a round is in the model when the strategy continues after it."""

    # ---- see `strategies.api.PeerWorker` --------------------------------------------------

    async def local_steps(self, batch: api.Minibatch) -> Vector:
        """See `strategies.api.PeerWorker`."""
        await self.still.acquire()  # the inner state changes from here on
        gradient = self._round = await self.gradient(batch)
        if not gradient.samples:
            own, parameters = gradient.vector, self.parameters
            await self.work(lambda: own.tensor.copy_(parameters.tensor), [parameters], [own])
        return gradient.vector

    async def pass_on(
        self, to: int | None, giver: int | None, vectors: Sequence[Vector]
    ) -> tuple[bool, Sequence[Vector] | None]:
        """See `strategies.api.PeerWorker`."""
        taken, begun_ns = self._landing_for(vectors), self._runtime.now()
        names = _name(to), _name(giver)
        gives, takes = [vector.all for vector in vectors], [vector.all for vector in taken]
        with self._meeting(names[1]):
            why = await self.pairwise.pass_on(self.version, names[0], names[1], gives, takes)
            self._attribution.note(Kind.WORKER, names[1] or self._runtime.node, begun_ns, self._runtime.now())
            if not why[1] and not await self._sound(taken):
                why = why[0], f"{names[1]} has given numbers that are not finite"
            self._met(gave=not why[0], took=not why[1])
        for name, reason in zip(names, why, strict=True):
            if name and reason:
                self._on_alone(AloneEvent(rank=self.rank, round=self.version, partner=name, reason=reason))
        if not why[0]:
            self._count(gives, vectors, begun_ns)
        return not why[0], None if why[1] else taken

    async def exchange_with(self, partner: int | None, vectors: Sequence[Vector]) -> Sequence[Vector] | None:
        """See `strategies.api.PeerWorker`."""
        taken, name = self._landing_for(vectors), _name(partner)
        gives, takes = [vector.all for vector in vectors], [vector.all for vector in taken]
        with self._meeting(name):
            if self._encoder is not None and name:
                await self._encode(self._encoder, vectors[0])
                gives[0], takes[0] = self._coded.all, self._coded_taken.all
            begun_ns = self._runtime.now()
            why = await self.pairwise.swap(self.version, name, gives, takes)
            self._attribution.note(Kind.WORKER, name or self._runtime.node, begun_ns, self._runtime.now())
            if not why and self._encoder is not None:
                why = await self._decode(self._encoder, taken[0], name)
            if not why and not await self._sound(taken):
                why = f"{name} has given numbers that are not finite"
            self._met(gave=not why, took=not why)
        if why:
            if name:
                self._on_alone(AloneEvent(rank=self.rank, round=self.version, partner=name, reason=why))
            return None
        self._count(gives, vectors, begun_ns)
        return taken

    @contextmanager
    def _meeting(self, giver: str) -> Iterator[None]:
        """An exchange of this round, in which the giver's vectors are taken."""
        assert self._round is not None
        self.pairwise.contains = self.contents.given(self._round.batch.ref.batch + 1)
        with self.contents.meeting(giver):
            yield

    def _met(self, *, gave: bool, took: bool) -> None:
        if took:
            self.contents.taken(self.pairwise.taken_contain)
        if gave or len(self.live) < 2:  # else it is lost with this worker
            self.contents.shared()

    @contextmanager
    def away(self) -> Iterator[None]:
        """See `Replica.away`."""
        self.pairwise.absent(True)
        try:
            yield
        finally:
            self.pairwise.absent(False)

    async def _encode(self, encoder: Encoder, vector: Vector) -> None:
        """Encodes a vector for the partner, and overwrites it with what the partner decodes."""

        def encode(_: object) -> None:
            encoder.encode(vector.tensor, self._coded.tensor, number=self.version)
            encoder.decode(self._coded.tensor, vector.tensor)

        writes = [vector.all, self._coded.all, *encoder.kept(0, len(vector))]
        await self._runtime.compute(encode, work=Work("copy", elems=len(vector)), writes=writes)

    async def _decode(self, encoder: Encoder, into: Vector, partner: str) -> str:
        """Decodes the partner's vector. Returns "", or why its bytes cannot be decoded."""

        def decode(_: object) -> str:
            try:
                encoder.decode(self._coded_taken.tensor, into.tensor)
            except DataError as error:
                return f"{partner} has given bytes that the codec does not make: {error}"
            return ""

        reads, work = [self._coded_taken.all], Work("copy", elems=len(into))
        return await self._runtime.compute(decode, work=work, reads=reads, writes=[into.all], shape_only="")

    def _landing_for(self, vectors: Sequence[Vector]) -> list[Vector]:
        """Memory for the partner's vectors, as long as the ones it gets."""
        for number, vector in enumerate(vectors[len(self._taken) :], len(self._taken)):
            self._taken.append(
                self._allocate(
                    len(vector),
                    vector.tensor.dtype,
                    f"partner's {number}",
                    lead_bytes=self._layout.lead_bytes,
                )
            )
        return self._taken[: len(vectors)]

    def _count(self, gives: Sequence[Span], vectors: Sequence[Vector], begun_ns: int) -> None:
        """Counts a completed exchange, with the bytes sent and the bytes without encoding."""
        self.exchanges_done += 1
        self.whole_bytes += sum(vector.tensor.nbytes for vector in vectors)
        sent_bytes = sum(span.tensor.nbytes for span in gives)
        self._on_transfer(Transfer("push", (self._runtime.now() - begun_ns) / 1e9, sent_bytes))

    async def _sound(self, taken: Sequence[Vector]) -> bool:
        return await self._runtime.compute(
            lambda _: all(finite(vector.tensor) for vector in taken),
            work=Work("copy", elems=sum(map(len, taken))),
            reads=[vector.all for vector in taken],
            shape_only=True,
        )

    async def work(
        self, arithmetic: Callable[[], object], reads: Sequence[Vector], writes: Sequence[Vector]
    ) -> None:
        """See `strategies.api.PeerWorker`."""
        begun_ns = self._runtime.now()
        await self._runtime.compute(
            lambda _: arithmetic(),
            work=Work("copy", elems=len(writes[0])),
            reads=[vector.all for vector in reads],
            writes=[vector.all for vector in writes],
        )
        self._meter.worked(begun_ns)

    def go_on_from(self, vector: Vector) -> None:
        """See `strategies.api.PeerWorker`."""
        done = self._round
        assert done is not None and vector in (self.parameters, self._gradient)
        if vector is not self.parameters:
            self.parameters, self._gradient = self._gradient, self.parameters
            self.parameters.name, self._gradient.name = "parameters", "gradient"
        self.version, self._round = self.version + 1, None
        self.still.release()
        self._handed_out((done.batch.ref,))()


def _name(rank: int | None) -> str:
    return "" if rank is None else f"worker-{rank}"
