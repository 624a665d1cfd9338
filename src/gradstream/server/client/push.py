"""A push: chunks are sent as soon as they are ready, and resent until their shard answers."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import accumulate

from gradstream.codec.base import WORD, Encoder
from gradstream.data.base import BatchRef
from gradstream.errors import PeerLostError
from gradstream.memory import Span, Vector
from gradstream.runtime.base import ComputeProgress, Runtime, Work
from gradstream.server.client.fetch import Arrival
from gradstream.server.client.links import ShardLinks
from gradstream.telemetry.meters import LinkTraffic
from gradstream.transport.base import Lent, Stream
from gradstream.wire import v1
from gradstream.wire.chunks import ChunkMap
from gradstream.wire.frames import ABSENT, CODED, to_wire

# ---- update -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class UpdatePiece:
    """The part of a chunk that a push contains, if it does not contain whole chunks.

    Args:
        num_rows: number of rows; 0 for the whole chunk.
        payload: the rows as `rows.pack` makes them, or all elements of the chunk.
    """

    num_rows: int
    payload: Span


@dataclass(slots=True)
class Update:
    """One push of a worker, to all shards.

    Args:
        vector: the elements, which must not change until the push is done. None pushes no elements, to tell the
            server of a synchronous round that there are none.
        samples: number of training samples that the gradients were computed on. This, `lr` and `vector` may be set
            until the first elements are `ready`.
        lr: learning rate to apply the update with.
        base_version: by chunk, the version that the gradient was computed on.
        num_gradients: number of minibatch gradients that are summed in the vector.
        round: version that the update is meant for; only synchronous strategies set it.
        ready: number of elements that are final so far; chunks leave as it grows. None: all elements are final.
        on_done: called once all shards have acknowledged the push.
        assign: whether the vector has initial parameters.
        late: whether a shard has dropped the push because it came after the update it was meant for; not an error.
        loss: mean loss over the samples, for rules that weigh by it; NaN if unknown.
        target: vector that the shards change: "" for the parameters, else a state vector of the update rule.
        sequence: number of the push, once it has begun.
        refs: minibatches that the gradients were computed on.
        names: the same in the form that shards keep in case this worker dies; none if nobody would redo the push.
        settled: number of the last push whose receipts the coordinator has.
        behalf: the lost worker in whose name this one pushes; None for an own push.
        stands_for: rank of a lost worker, whose part of a round the update is; None for the worker's own.
        clock: clock of this worker once the update is applied; 0 if workers have none. `push_soon` sets it.
        chunks: the chunks that are pushed; None for all. The server applies nothing to the others.
        pieces: makes the parts to push, by chunk; a missing chunk is not pushed. None pushes all of `vector`.
        sound: number of leading elements that are pushed if the gradient turned out not to be finite while it was being
            sent; later chunks are pushed as absent. None: all of them.
        portion: number of the portion of a pass (`round`) that the vector has; 0 if there are no passes.
        prompt: whether `pieces` depends on the current parameters, and so must run before the worker continues.
    """

    vector: Vector | None
    samples: int
    lr: float
    base_version: Sequence[int]
    num_gradients: int = 1
    round: int = 0
    ready: ComputeProgress | None = None
    on_done: Callable[[], None] | None = None
    assign: bool = False
    late: bool = False
    loss: float = math.nan
    target: str = ""
    sequence: int = 0
    refs: Sequence[BatchRef] = ()
    names: Sequence[v1.Receipt] = ()
    settled: int = 0
    behalf: v1.Behalf | None = None
    stands_for: int | None = None
    clock: int = 0
    chunks: Sequence[int] | None = None
    pieces: Callable[[], Awaitable[Mapping[int, UpdatePiece]]] | None = None
    sound: int | None = None
    portion: int = 0
    prompt: bool = False


# ---- coded push --------------------------------------------------------------------------


class PushCodec:
    """Encodes each chunk of a push once, however often it is sent.

    Pushes follow one another, so a single vector is enough for the encoded elements.

    Args:
        runtime: runtime of the worker's node.
        encoder: encodes this worker's pushes in order.
        chunks: the chunk map.
    """

    def __init__(self, runtime: Runtime, encoder: Encoder, chunks: ChunkMap) -> None:
        self._runtime = runtime
        self._encoder = encoder
        self._bounds = [chunks.bounds(chunk) for chunk in range(chunks.num_chunks)]
        sizes = (encoder.words(stop - start) for start, stop in self._bounds)
        self._places = list(accumulate(sizes, initial=0))
        self._sent = runtime.memory.allocate(self._places[-1], WORD, "encoded", exchanged=True)
        self._sequence = 0
        self._encoded = set[int]()

    def begin(self, sequence: int) -> None:
        """Begins the push of this number; the one before is done."""
        self._sequence = sequence
        self._encoded.clear()

    async def encode(self, update: Update, chunk: int) -> Span:
        """The encoded chunk of the current push, whose elements are final."""
        sent, vector = self._sent[self._places[chunk] : self._places[chunk + 1]], update.vector
        if chunk in self._encoded:  # it is sent again
            return sent
        assert vector is not None
        start, stop = self._bounds[chunk]
        part, number = vector[start:stop], self._sequence

        def encode(_: object) -> None:
            self._encoder.encode(part.tensor, sent.tensor, start=start, number=number, part=chunk)
            self._encoded.add(chunk)  # here, since the task that waits for this may be cancelled meanwhile

        await self._runtime.compute(
            encode,
            work=Work("copy", elems=stop - start),
            reads=[part],
            writes=[sent, *self._encoder.kept(start, stop)],
            lane="exchange",
        )
        return sent


# ---- push --------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class PendingPushRequest:
    """One push to all shards.

    Args:
        links: links to the shards.
        update: the update to push.
        sequence: number of the push.
        before: each chunk leaves after it has landed in this fetch; None for no such fetch.
        pieces: by chunk, the parts to push, where they were made already; else `update.pieces` makes them.
        codec: encodes each chunk; None sends chunks as they are.
        lent: the parts of the vector that carriers read.
    """

    links: ShardLinks
    update: Update
    sequence: int
    before: Arrival | None
    pieces: Mapping[int, UpdatePiece] | None = None
    codec: PushCodec | None = None
    lent: list[Lent] = field(default_factory=list)

    @property
    def chunks(self) -> Sequence[int]:
        """Numbers of the chunks that are pushed."""
        update = self.update
        return range(self.links.chunks.num_chunks) if update.chunks is None else update.chunks

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
            await links.with_chunks(
                lambda name, left: links.retrying(_ToShard(self, name, left).attempt), self.chunks
            )
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
            stands_for=update.stands_for,
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


@dataclass(slots=True, eq=False)
class _ToShard:
    """The part of a push that concerns one shard.

    Args:
        push: the push.
        name: node name of the shard.
        left: its chunks without a result.
    """

    push: PendingPushRequest
    name: str
    left: dict[int, None]

    @property
    def _links(self) -> ShardLinks:
        return self.push.links

    @property
    def _traffic(self) -> LinkTraffic:
        return self._links.traffic.links[self.name]

    async def attempt(self, progressed: Callable[[], None]) -> None:
        """Sends all that has no result."""
        if not self.left:
            return  # the last result came just before the stream broke
        await self.push.ready(next(iter(self.left)))
        # Made only now, since a user's loop reports the number of samples together with the gradient.
        request = self.push.request()
        opened_ns = self._links.runtime.now()
        stream = await self._links.endpoint.open(self.name, "push", request)
        sent = ComputeProgress()
        try:
            await self._links.runtime.gather(
                self._send_chunks(stream, list(self.left), sent),
                self._take_results(stream, sent, progressed, opened_ns),
            )
        finally:
            stream.cancel("done")

    async def _send_chunks(self, stream: Stream, chunks: Sequence[int], sent: ComputeProgress) -> None:
        for count, chunk in enumerate(chunks, start=1):
            await self.push.ready(chunk)
            if self.push.before is not None:
                await self.push.before.landed(chunk)
            if await self._send(stream, chunk):
                sent.advance(count)
        await stream.end()
        sent.advance(len(chunks))

    async def _send(self, stream: Stream, chunk: int) -> bool:
        """Sends a chunk, or a header that marks it as absent. Returns False if nothing needs to be sent."""
        update, pieces = self.push.update, self.push.pieces
        start, stop = self._links.chunks.bounds(chunk)
        header = v1.Chunk(
            index=chunk,
            sequence=self.push.sequence,
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
        if self.push.codec is not None:
            span, header.flags = await self.push.codec.encode(update, chunk), CODED
        else:
            span = update.vector[start:stop] if pieces is None else pieces[chunk].payload
        header.rows = 0 if pieces is None else pieces[chunk].num_rows
        header.elems = len(span)
        header.dtype = to_wire(update.vector.tensor.dtype)
        self._traffic.pushed_bytes += len(span) * itemsize_bytes
        self.push.lent.append(await stream.lend(v1.Frame(chunk=header), span, self._links.silence_s))
        return True

    async def _take_results(
        self, stream: Stream, sent: ComputeProgress, progressed: Callable[[], None], opened_ns: int
    ) -> None:
        taken, update, left = 0, self.push.update, self.left
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
    """Writes into each push up to which push the coordinator has the receipts of all minibatches.

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
