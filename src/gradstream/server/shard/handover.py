"""A new shard gets its chunks from the shards that have them: `HandoverSource` gives, `take_over` takes.

    notice: holds ──▶ hold ──▶ updates under way end ──▶ copies of chunks ──▶ the new shard
    notice: switched ──▶ leave              notice: failed ──▶ thaw, and all that has come meanwhile happens

A held shard keeps every event for later: it acknowledges nothing, and drops nothing. So a copy that it gives has all
that anybody knows of, and a push that comes meanwhile is either in nothing, or, after a thaw, in the parameters.
"""

from __future__ import annotations

from collections.abc import Iterable

from gradstream.errors import RefusedError
from gradstream.runtime.base import Runtime
from gradstream.server.shard.backup_peer import load_copies
from gradstream.server.shard.commands import Commands
from gradstream.server.shard.config import ShardConfig
from gradstream.server.shard.copies import ChunkCopies, Destination
from gradstream.server.shard.executor import ShardExecutor
from gradstream.transport.base import Endpoint, Stream
from gradstream.wire import v1
from gradstream.wire.chunks import Placement
from gradstream.wire.frames import to_wire


class HandoverSource:
    """Serves "handover".

    Args:
        node: name of this shard.
        executor: is held meanwhile.
        commands: steps of a procedure, none of which is under way in a handover.
        copies: makes the copies.
        silence_s: a handover ends with DeadlineError if the new shard takes nothing for this long, in seconds.
    """

    def __init__(
        self,
        node: str,
        executor: ShardExecutor,
        commands: Commands,
        copies: ChunkCopies,
        silence_s: float,
    ) -> None:
        self._node = node
        self._executor = executor
        self._commands = commands
        self._copies = copies
        self._silence_s = silence_s
        self._to: Placement | None = None

    def hold(self, to: Placement) -> None:
        """Holds the shard until it has handed over to the shards of another placement."""
        self._to = to
        self._executor.hold()

    def thaw(self) -> None:
        """Lets the shard go on."""
        if self._to is not None:
            self._to = None
            self._executor.thaw()

    async def serve(self, stream: Stream) -> None:
        """Sends copies of the chunks that a new shard asks for.

        Raises:
            RefusedError: STALE_EPOCH where this shard does not hand over to the caller, as far as it knows; other codes
                where it cannot.
        """
        request = v1.Handover.FromString(stream.opened.body)
        self._check(stream.opened, request)
        store, chunks = self._executor.store, list(request.chunks)
        if not set(chunks) <= set(store.here) or len(set(chunks)) < len(chunks):
            text = f"{stream.peer} asks for chunks {chunks[:8]}...; expected some of {store.here}, each once"
            raise RefusedError(self._node, "BAD_REQUEST", text)
        await self._executor.still()
        async with self._commands.turn:
            pass  # a step of a procedure that was under way is over, and no other begins
        described = False
        for chunk in chunks:
            self._check(stream.opened, request)
            copy = self._copies.of_chunk(chunk)
            if copy is None:
                continue
            backup, spans = copy
            if described:
                backup.chunk.ClearField("estates")  # they are those of the shard, not of the chunk
            described = True
            await stream.send(v1.Frame(body=v1.Body(data=backup.SerializeToString())))
            for span in spans:
                await stream.credit(self._silence_s)
                async with self._executor.leases.turn(chunk):
                    self._check(stream.opened, request)
                    header = v1.Chunk(index=chunk, elems=len(span), dtype=to_wire(store.dtype))
                    await stream.send(v1.Frame(chunk=header), span)
        self._check(stream.opened, request)
        data = self._copies.of_clocks().SerializeToString()
        await stream.send(v1.Frame(body=v1.Body(data=data)))

    def _check(self, opened: v1.Open, request: v1.Handover) -> None:
        """Refuses a shard to which this one does not hand over, or not any more."""
        to = self._to
        if to is None or to.first != request.first or opened.sender not in to.names:
            expected = "nobody" if to is None else ", ".join(to.names[:8])
            text = f"{opened.sender} asks for chunks; this shard hands over to {expected}"
            raise RefusedError(self._node, "STALE_EPOCH", text)


async def take_over(
    runtime: Runtime,
    endpoint: Endpoint,
    config: ShardConfig,
    before: Placement,
    here: Iterable[int],
    destination: Destination,
) -> None:
    """Reads the chunks of a new shard from the shards that have them, from all at once.

    Args:
        runtime, endpoint: of the new shard.
        config: of the new shard.
        before: the shards that have the parameters.
        here: numbers of the new shard's chunks.
        destination: names the memory for each copy.

    Raises:
        What `load_copies` raises.
    """

    async def take(name: str, chunks: Iterable[int]) -> None:
        request = v1.Handover(first=config.first, chunks=chunks)
        await load_copies(
            runtime,
            endpoint,
            name,
            ("handover", request),
            destination,
            silence_s=config.silence_s,
            retry_s=config.retry_s,
        )

    await runtime.gather(*(take(name, chunks) for name, chunks in before.divided(here).items()))
