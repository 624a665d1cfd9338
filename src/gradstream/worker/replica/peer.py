"""A replica that exchanges with one other worker at a time, and has parameters of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from gradstream.codec.base import WORD, Codec, check_dtype, seed_of, words_of
from gradstream.collectives.meetings import Meetings
from gradstream.errors import DataError
from gradstream.memory import Span, Vector
from gradstream.model.base import finite
from gradstream.runtime.base import Runtime, Work
from gradstream.strategies import api
from gradstream.strategies.base import PeerStrategy
from gradstream.telemetry.events import AloneEvent
from gradstream.telemetry.wait_attribution import Kind, Transfer, WaitAttribution
from gradstream.transport.silence import Broadcast
from gradstream.worker.computed import ComputedGradient
from gradstream.worker.local_steps import LocalParameters
from gradstream.worker.loop import LoopSource
from gradstream.worker.replica.base import Replica, ReplicaContext, vector_of

# ---- coded way ---------------------------------------------------------------------------
# `CodedWay`: the way that a worker has come, encoded for its partner of a round.


class CodedWay:
    """Encodes a vector of this worker, and decodes its partner's.

    Both use what is decoded, of their own vector too. So what the codec leaves out is left out of both halves of the
    mean, and what it keeps for the next round counts once.

    Args:
        runtime: runtime of the worker's node.
        codec: the codec.
        elems, dtype: of the vectors.
        seed: of the codec's random numbers, other for each worker.
        state: what the codec keeps, by name.

    Raises:
        ConfigError: as `check_dtype`.

    Attributes:
        given, taken: encoded vectors, this worker's and the partner's.
    """

    def __init__(
        self,
        runtime: Runtime,
        codec: Codec,
        elems: int,
        dtype: torch.dtype,
        seed: str,
        state: Mapping[str, Vector],
    ) -> None:
        check_dtype(codec, dtype)
        self._runtime = runtime
        self._codec = codec
        self._seed = seed
        self._state = state
        self._size_bytes = codec.encoded_bytes(elems)
        words = words_of(codec, elems)
        self.given = runtime.memory.allocate(words, WORD, "encoded", exchanged=True)
        self.taken = runtime.memory.allocate(words, WORD, "partner's encoded", exchanged=True)

    def _bytes_of(self, words: Vector) -> torch.Tensor:
        return words.tensor.view(torch.uint8)[: self._size_bytes]

    async def encode(self, vector: Vector, number: int) -> None:
        """Encodes into `given`, and overwrites the vector with what the partner decodes.

        Args:
            vector: (elems,).
            number: number of the round.
        """

        def encode(_: object) -> None:
            kept = {name: one.tensor for name, one in self._state.items()}
            encoded = self._bytes_of(self.given)
            self._codec.encode(vector.tensor, encoded, kept, seed=seed_of(self._seed, number, 0))
            self._codec.decode(encoded, vector.tensor)

        writes = [vector.all, self.given.all, *(one.all for one in self._state.values())]
        await self._runtime.compute(encode, work=Work("copy", elems=len(vector)), writes=writes)

    async def decode(self, into: Vector, partner: str) -> str:
        """Decodes `taken`. Returns "", or why these are no bytes of the codec."""

        def decode(_: object) -> str:
            try:
                self._codec.decode(self._bytes_of(self.taken), into.tensor)
            except DataError as error:
                return f"{partner} has given bytes that the codec does not make: {error}"
            return ""

        work = Work("copy", elems=len(into))
        return await self._runtime.compute(
            decode, work=work, reads=[self.taken.all], writes=[into.all], shape_only=""
        )


# ---- peer --------------------------------------------------------------------------------


class PeerReplica(Replica):
    """Implements `strategies.api.PeerWorker`.

    Args:
        context: parts of every replica; its `gradients` are local steps.
        meetings: the exchanges of this worker's node.
        seed: seed of the run.
        strategy: strategy of the run.
        live: see `api.PeerWorker`.
        coded: encodes the first of the vectors that are given; None where all go as they are.
        on_transfer: called with each exchange that is done.
        on_alone: called with each that is not, though there was a partner.

    Attributes:
        meetings, seed, state, numbers: see `api.PeerWorker`.
        meetings_done: number of exchanges that are done.
        whole_bytes: bytes that they would have given, had nothing been encoded.
        changed: rings when the worker has begun, and when it has ended.
        still: held in a round. Whoever else holds it has parameters and state of the same moment.
    """

    def __init__(
        self,
        context: ReplicaContext,
        meetings: Meetings,
        seed: int,
        strategy: PeerStrategy,
        live: Callable[[], Sequence[int]],
        coded: CodedWay | None,
        on_transfer: Callable[[Transfer], None],
        on_alone: Callable[[AloneEvent], None],
    ) -> None:
        self._allocate = partial(context.runtime.memory.allocate, exchanged=True)
        self._attribution = WaitAttribution()
        super().__init__(context, self._allocate, self._attribution)
        self.meetings = meetings
        self.seed = seed
        self.state: Mapping[str, Vector] = {name: self._vector(name) for name in strategy.state_names}
        self.numbers: Mapping[str, Vector] = {
            name: self._allocate(1, self._layout.dtype, name) for name in strategy.numbers
        }
        for name, first in strategy.numbers.items():
            self.numbers[name].tensor.fill_(first)
        self.meetings_done = self.whole_bytes = 0
        self.changed = Broadcast()
        self._live = live
        self._coded = coded
        self._on_transfer = on_transfer
        self._on_alone = on_alone
        self._taken: list[Vector] = []  # where the partner's vectors land
        self._round: ComputedGradient | None = None  # the present one
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
        """All that this worker has of its own, by name: parameters, what the strategy keeps, and the inner state."""
        inner = {f"inner.{name}": vector for name, vector in self.steps.state.items()}
        return {"parameters": self.parameters, **self.state, **self.numbers, **inner}

    def retire(self) -> None:
        """See `Replica.retire`."""
        super().retire()
        self.state, self._taken = {}, []

    async def newest(self) -> torch.Tensor:
        """See `Replica.newest`: this worker's own, since nobody has those of all."""
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
        self, to: int | None, giver: int | None, given: Sequence[Vector]
    ) -> tuple[bool, Sequence[Vector] | None]:
        """See `strategies.api.PeerWorker`."""
        taken, begun_ns = self._landing_for(given), self._runtime.now()
        names = _name(to), _name(giver)
        gives, takes = [one.all for one in given], [one.all for one in taken]
        why = await self.meetings.pass_on(self.version, names[0], names[1], gives, takes)
        self._attribution.note(Kind.WORKER, names[1] or self._runtime.node, begun_ns, self._runtime.now())
        if not why[1] and not await self._sound(taken):
            why = why[0], f"{names[1]} has given numbers that are not finite"
        for name, reason in zip(names, why, strict=True):
            if name and reason:
                self._on_alone(AloneEvent(rank=self.rank, round=self.version, partner=name, reason=reason))
        if not why[0]:
            self._count(gives, given, begun_ns)
        return not why[0], None if why[1] else taken

    async def meet(self, partner: int | None, given: Sequence[Vector]) -> Sequence[Vector] | None:
        """See `strategies.api.PeerWorker`."""
        taken, name = self._landing_for(given), _name(partner)
        gives, takes = [one.all for one in given], [one.all for one in taken]
        if self._coded is not None and name:
            await self._coded.encode(given[0], self.version)
            gives[0], takes[0] = self._coded.given.all, self._coded.taken.all
        begun_ns = self._runtime.now()
        why = await self.meetings.meet(self.version, name, gives, takes)
        self._attribution.note(Kind.WORKER, name or self._runtime.node, begun_ns, self._runtime.now())
        if not why and self._coded is not None:
            why = await self._coded.decode(taken[0], name)
        if not why and not await self._sound(taken):
            why = f"{name} has given numbers that are not finite"
        if why:
            if name:
                self._on_alone(AloneEvent(rank=self.rank, round=self.version, partner=name, reason=why))
            return None
        self._count(gives, given, begun_ns)
        return taken

    def _landing_for(self, given: Sequence[Vector]) -> list[Vector]:
        """Vectors for what the partner gives: as long as what it gets."""
        for number, one in enumerate(given[len(self._taken) :], len(self._taken)):
            self._taken.append(
                self._allocate(
                    len(one), one.tensor.dtype, f"partner's {number}", lead_bytes=self._layout.lead_bytes
                )
            )
        return self._taken[: len(given)]

    def _count(self, gives: Sequence[Span], given: Sequence[Vector], begun_ns: int) -> None:
        """Counts an exchange that is done, with what was sent, and what that stands for."""
        self.meetings_done += 1
        self.whole_bytes += sum(one.tensor.nbytes for one in given)
        sent_bytes = sum(one.tensor.nbytes for one in gives)
        self._on_transfer(Transfer("push", (self._runtime.now() - begun_ns) / 1e9, sent_bytes))

    async def _sound(self, taken: Sequence[Vector]) -> bool:
        return await self._runtime.compute(
            lambda _: all(finite(one.tensor) for one in taken),
            work=Work("copy", elems=sum(map(len, taken))),
            reads=[one.all for one in taken],
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
