"""A push under way: chunks leave as soon as they are ready; the client sends a chunk again until its shard answers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext

import torch

from gradstream.codec.base import WORD, Codec, check_dtype, seed_of, words_of
from gradstream.data.base import BatchRef
from gradstream.errors import PeerLostError
from gradstream.memory import Span, Vector
from gradstream.runtime.base import ComputeProgress, Runtime, Work
from gradstream.server.client.fetch import Arrival
from gradstream.server.client.links import ShardLinks
from gradstream.server.update import Update, UpdatePiece
from gradstream.transport.base import Lent, Stream
from gradstream.wire import v1
from gradstream.wire.chunks import ChunkMap
from gradstream.wire.frames import ABSENT, CODED, to_wire

# ---- coded push --------------------------------------------------------------------------
# `PushCodec`: the encoded chunks of a worker's pushes, and what the codec keeps from one push to the next.


class PushCodec:
    """Encodes each chunk of a push once, however often it is sent.

    Pushes come one after the other, so one vector is enough for what is sent.

    Args:
        runtime: runtime of the worker's node.
        chunks: the chunk map.
        codec: the codec.
        dtype: dtype of the model.
        seed: of the codec's random numbers, other for each worker.
        state: what the codec keeps, by name.

    Raises:
        ConfigError: as `check_dtype`.
    """

    def __init__(
        self,
        runtime: Runtime,
        chunks: ChunkMap,
        codec: Codec,
        dtype: torch.dtype,
        seed: str,
        state: Mapping[str, Vector],
    ) -> None:
        check_dtype(codec, dtype)
        bounds = [chunks.bounds(chunk) for chunk in range(chunks.num_chunks)]
        memory = runtime.memory
        self._runtime = runtime
        self._codec = codec
        self._seed = seed
        self._bounds = bounds
        self._places = [0]
        for start, stop in bounds:
            self._places.append(self._places[-1] + words_of(codec, stop - start))
        self._sent = memory.allocate(self._places[-1], WORD, "encoded", exchanged=True)
        self._state = state
        self._sequence = 0
        self._encoded = set[int]()

    def begin(self, sequence: int) -> None:
        """Begins the push of this number; the one before is done."""
        self._sequence = sequence
        self._encoded.clear()

    async def encode(self, update: Update, chunk: int) -> Span:
        """What is sent for a chunk of the present push, whose elements are final."""
        sent, vector = self._sent[self._places[chunk] : self._places[chunk + 1]], update.vector
        if chunk in self._encoded:  # a shard gets it again
            return sent
        assert vector is not None
        start, stop = self._bounds[chunk]
        size, part = self._codec.encoded_bytes(stop - start), vector[start:stop]
        state = {name: kept[start:stop] for name, kept in self._state.items()}

        def encode(_: object) -> None:
            into = sent.tensor.view(torch.uint8)
            into[size:].zero_()
            kept = {name: span.tensor for name, span in state.items()}
            self._codec.encode(part.tensor, into[:size], kept, seed=self._seed_of(chunk))
            self._encoded.add(chunk)  # here: who waits for this may be cancelled meanwhile

        await self._runtime.compute(
            encode,
            work=Work("copy", elems=stop - start),
            reads=[part],
            writes=[sent, *state.values()],
            lane="exchange",
        )
        return sent

    def _seed_of(self, chunk: int) -> int:
        return seed_of(self._seed, self._sequence, chunk)


# ---- push --------------------------------------------------------------------------------


class PendingPushRequest:
    """One push to all shards.

    Args:
        links: links to the shards.
        update: the update to push.
        sequence: number of the push.
        before: each chunk leaves after it has landed in this fetch; None for no such fetch.
        pieces: by chunk, the parts to push, where they were made already; else `update.pieces` makes them.
        codec: encodes each chunk; None sends chunks as they are.
    """

    def __init__(
        self,
        links: ShardLinks,
        update: Update,
        sequence: int,
        before: Arrival | None,
        pieces: Mapping[int, UpdatePiece] | None = None,
        codec: PushCodec | None = None,
    ) -> None:
        self.links = links
        self.update = update
        self.sequence = sequence
        self.before = before
        self.pieces = pieces
        self.codec = codec
        self.chunks = range(links.chunks.num_chunks) if update.chunks is None else update.chunks
        self.lent: list[Lent] = []

    async def run(self) -> None:
        """Returns once every shard has answered for every chunk, and no carrier reads the vector any more.

        Raises:
            The error of `ShardLinks.retrying`: some shards may have applied their chunks.
        """
        links, update = self.links, self.update
        vector, begun_ns = update.vector, links.runtime.now()
        if self.pieces is None and update.pieces is not None:
            self.pieces = await update.pieces()
        # A vector that is still being computed is lent chunk by chunk, as the chunks leave.
        whole = update.ready is None and vector is not None
        to = f"{links.runtime.node}: push {self.sequence}"
        with vector.all.borrowed(write=False, to=to) if whole and vector else nullcontext():
            await links.with_chunks(lambda name, left: _ToShard(self, name, left).run(), self.chunks)
            for one in self.lent:  # shards have read these chunks, but what returns them may be on its way
                await one.back(links.silence_s)
        links.traffic.pushes += 1
        links.report("push", begun_ns, self._size_bytes())
        if update.on_done is not None:
            update.on_done()

    def request(self) -> v1.Push:
        """The request, which goes to every shard. The update's header may change until its first chunk is ready."""
        update, partial = self.update, self.pieces is not None
        return v1.Push(
            command=v1.Push.ASSIGN if update.assign else v1.Push.APPLY,
            sequence=self.sequence,
            samples=update.samples,
            lr=update.lr,
            round=update.round,
            num_gradients=update.num_gradients,
            clock=update.clock,
            loss=update.loss,
            vector=update.target,
            rows=partial,
            stands_for=0 if update.stands_for is None else update.stands_for + 1,
            base_version=max(0, min(update.base_version)) if partial else 0,
            batches=update.names,
            settled=update.settled,
            behalf=update.behalf,
            portion=update.portion,
        )

    def _size_bytes(self) -> int:
        vector, bounds = self.update.vector, self.links.chunks.bounds
        if vector is None:
            return 0
        if self.pieces is None:
            elems = sum(stop - start for start, stop in map(bounds, self.chunks))
        else:
            elems = sum(len(piece.payload) for piece in self.pieces.values())
        return elems * vector.tensor.element_size()

    async def ready(self, chunk: int) -> None:
        """Returns once all elements of a chunk are final."""
        if self.update.ready is not None:
            await self.update.ready.reached(self.links.chunks.bounds(chunk)[1])


class _ToShard:
    """The part of a push that concerns one shard.

    Args:
        push: the push.
        name: node name of the shard.
        left: its chunks without a result.
    """

    def __init__(self, push: PendingPushRequest, name: str, left: dict[int, None]) -> None:
        self._push = push
        self._links = push.links
        self._name = name
        self._traffic = push.links.traffic.links[name]
        self._left = left

    async def run(self) -> None:
        await self._links.retrying(self._attempt)

    async def _attempt(self, progressed: Callable[[], None]) -> None:
        if not self._left:
            return  # the last result came just before the stream broke
        await self._push.ready(next(iter(self._left)))
        # Made only now: a user's own loop tells the number of samples when the gradient is there.
        request = self._push.request()
        opened_ns = self._links.runtime.now()
        stream = await self._links.endpoint.open(self._name, "push", request)
        sent = ComputeProgress()
        try:
            await self._links.runtime.gather(
                self._send_chunks(stream, list(self._left), sent),
                self._take_results(stream, sent, progressed, opened_ns),
            )
        finally:
            stream.cancel("done")

    async def _send_chunks(self, stream: Stream, chunks: Sequence[int], sent: ComputeProgress) -> None:
        for count, chunk in enumerate(chunks, start=1):
            await self._push.ready(chunk)
            if self._push.before is not None:
                await self._push.before.landed(chunk)
            if await self._send(stream, chunk):
                sent.advance(count)
        await stream.end()
        sent.advance(len(chunks))

    async def _send(self, stream: Stream, chunk: int) -> bool:
        """Sends a chunk, or a header that says it is absent. Returns False if it sends nothing: absent, too."""
        update, pieces = self._push.update, self._push.pieces
        start, stop = self._links.chunks.bounds(chunk)
        header = v1.Chunk(
            index=chunk,
            sequence=self._push.sequence,
            elems=stop - start,
            version=max(0, update.base_version[chunk]),
        )
        if update.vector is None or (update.sound is not None and stop > update.sound):
            header.flags = ABSENT
            await stream.send(
                v1.Frame(chunk=header), None, self._links.silence_s
            )  # the stream's Open may be lost
            return True
        itemsize_bytes = update.vector.tensor.element_size()
        self._traffic.whole_pushed_bytes += (stop - start) * itemsize_bytes
        if pieces is not None and chunk not in pieces:
            return False
        span: Span
        if self._push.codec is not None:
            span, header.flags = await self._push.codec.encode(update, chunk), CODED
        else:
            span = update.vector[start:stop] if pieces is None else pieces[chunk].payload
        header.rows = 0 if pieces is None else pieces[chunk].num_rows
        header.elems = len(span)
        header.dtype = to_wire(update.vector.tensor.dtype)
        self._traffic.pushed_bytes += len(span) * itemsize_bytes
        self._push.lent.append(await stream.lend(v1.Frame(chunk=header), span, self._links.silence_s))
        return True

    async def _take_results(
        self, stream: Stream, sent: ComputeProgress, progressed: Callable[[], None], opened_ns: int
    ) -> None:
        taken, update, left = 0, self._push.update, self._left
        is_gradient = update.vector is not None and not update.assign
        while left:
            await sent.reached(taken + 1)  # the shard's silence counts only while it owes an answer
            received = await stream.recv(self._links.silence_s)
            if received is None:
                raise PeerLostError(stream.peer, f"ended a push with {len(left)} chunks unanswered")
            results = v1.PushResults.FromString(received.frame.body.data)
            for chunk in results.absent:
                taken += 1
                left.pop(chunk, None)
            for result in results.results:
                taken += 1
                left.pop(result.chunk, None)
                if result.outcome == v1.PushResult.APPLIED and is_gradient:
                    self._traffic.staleness[result.staleness] += 1
                update.late = update.late or result.outcome == v1.PushResult.DROPPED
                self._links.claim(result, opened_ns)
            self._links.heard(stream.peer, opened_ns)
            progressed()


# ---- settled -----------------------------------------------------------------------------
# The settled pushes of a worker: shards may forget which minibatches they had.
#
# If the worker dies, the coordinator asks the shards which pushes they have applied. That matters only for
# minibatches whose receipts it has not heard: so each push says up to which push the coordinator has all receipts.


class SettledPushes:
    """Writes into each push which earlier pushes are settled: the coordinator has the receipts of their minibatches.

    Args:
        num_receipts: returns the number of receipts that this worker has reported.
        num_heard: returns how many of those the coordinator has.
        name_of: returns the name of a minibatch as messages contain it.
    """

    def __init__(
        self,
        num_receipts: Callable[[], int],
        num_heard: Callable[[], int],
        name_of: Callable[[BatchRef], v1.Receipt],
    ) -> None:
        self._num_receipts = num_receipts
        self._num_heard = num_heard
        self._name_of = name_of
        self._open: deque[tuple[int, int]] = deque()  # number of a push, and of all receipts with its own
        self._newest = 0

    def begin(self, update: Update) -> None:
        """Sets `names` and `settled` of an update that has its `sequence`, and follows its receipts once it is done."""
        heard = self._num_heard()
        while self._open and self._open[0][1] <= heard:
            self._newest, _ = self._open.popleft()
        update.settled = self._newest
        update.names = [self._name_of(ref) for ref in update.refs]
        done = update.on_done

        def on_done() -> None:
            if done is not None:
                done()
            self._open.append((update.sequence, self._num_receipts()))

        update.on_done = on_done
