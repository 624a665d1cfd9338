"""The mesh: one open stream between every two ranks of a group, and who of them is lost.

Ranks meet once. The lower rank of two opens their stream, which stays open as long as the group, so that an
operation sends nothing but its chunks, and the death of a rank is seen by all others at once. Ranks give
signs of life also while they compute, so that one which is stopped, or behind a broken cable, is
noticed by its silence.

Who sees that a rank is lost, or hears of it, breaks the group and tells all others, before its own
caller gets to know and leaves: otherwise its leaving could be taken for the cause.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from gradstream.collectives.data_sockets import GroupDataSockets
from gradstream.collectives.rendezvous import Rendezvous
from gradstream.collectives.socket_io import DataSocket
from gradstream.errors import (
    ClosedError,
    ConfigError,
    DeadlineError,
    GradstreamError,
    PeerLostError,
    RefusedError,
)
from gradstream.runtime.base import Runtime
from gradstream.transport.base import Endpoint, Stream
from gradstream.transport.silence import Broadcast
from gradstream.untrusted import escaped
from gradstream.wire import v1

__all__ = ["Communicator", "LostRank"]

T = TypeVar("T")

BEATS = 8  # signs of life within `silence_s`
MESSAGE_BYTES = 1024  # of what another rank says about a loss
LOST = "lost by its group: "
"""How the reason begins that a rank is told whose group goes on without it, or breaks because of it."""
LINGER_S = 5.0  # how long a rank that leaves waits for the others to have heard all it said


@dataclass(frozen=True, slots=True)
class LostRank:
    """Why a group is broken.

    Args:
        culprit: name of the rank.
        silent: it was silent for too long; otherwise it is gone.
        message: what happened to it.
    """

    culprit: str
    silent: bool
    message: str

    @classmethod
    def of(cls, name: str, error: GradstreamError) -> LostRank:
        """What an error says of a rank at the other end of a stream."""
        text = str(error).removeprefix(f"{name}: ")
        return cls(name, isinstance(error, DeadlineError), text)

    def error(self) -> PeerLostError | DeadlineError:
        """The exception, made anew for each who meets it."""
        return (DeadlineError if self.silent else PeerLostError)(self.culprit, self.message)


class Communicator:
    """This rank's links with all others. `meet` first, `close` at the end.

    Args:
        runtime: of this node.
        endpoint: started, and knows the addresses of all of `names`. It belongs to one mesh at a time.
        names: of all nodes, by rank.
        rank: of this one.
        epoch: of the group; a later group of the same nodes has a higher one.
        silence_s: a rank that has not been heard for this long is lost, and everybody told.

    Attributes:
        lines: those that `string` has strung, if any.

    Raises:
        ConfigError: a rank or a time that cannot be.
    """

    def __init__(
        self,
        runtime: Runtime,
        endpoint: Endpoint,
        names: Sequence[str],
        rank: int,
        *,
        epoch: int,
        silence_s: float = 30.0,
    ) -> None:
        if not 0 <= rank < len(names) or len(set(names)) < len(names):
            raise ConfigError(f"rank {rank} of {', '.join(names)}: expected different names, and one of them")
        if not silence_s > 0:
            raise ConfigError(f"silence_s = {silence_s}: expected a positive number")
        self.runtime = runtime
        self.names = tuple(names)
        self.rank = rank
        self.silence_s = silence_s
        self.loss: LostRank | None = None
        self._endpoint = endpoint
        self._epoch = epoch
        self._meeting = Rendezvous(
            runtime, endpoint, names, rank, epoch=epoch, silence_s=silence_s, on_linked=self._linked
        )
        self._streams = self._meeting.streams
        self._released = Broadcast()
        self._working: dict[asyncio.Task[Any], None] = {}
        self._gone: set[int] = set()  # ranks whose streams are over
        self._keeper: asyncio.Task[None] | None = None
        self._telling: asyncio.Task[None] | None = None
        self._closed = False
        self.lines: GroupDataSockets | None = None

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self.names)

    # ---- meeting ------------------------------------------------------------------------

    async def meet(self) -> None:
        """Returns once there is a stream with every other rank.

        Raises:
            DeadlineError, PeerLostError: somebody has not come within `silence_s`, or is gone: who.
            RefusedError: ranks do not agree on who they are.
        """
        self._endpoint.serve("exchange", self._meeting.welcome)
        self._endpoint.serve("broken", self._hear)
        # Who is there already hears from this rank while it still waits for others.
        self._keeper = self.runtime.spawn(self._keep_alive(), name=f"{self._me}/group: signs of life")
        try:
            await self.guarded(self._meeting.hold())
        except BaseException:
            await self.close()
            raise

    @property
    def _me(self) -> str:
        return self.names[self.rank]

    # ---- the links ----------------------------------------------------------------------

    def stream(self, rank: int) -> Stream:
        """The stream with another rank."""
        return self._streams[rank]

    async def swap(self, word: bytes) -> list[bytes]:
        """Gives a few bytes to every rank, and returns those of each, by rank. All ranks do it at once.

        Raises:
            PeerLostError, DeadlineError: naming a rank; the group is broken.
        """
        return await self.guarded(self._swap(word))

    async def _swap(self, word: bytes) -> list[bytes]:
        others = [rank for rank in range(self.size) if rank != self.rank]
        words = dict(
            zip(others, await self.runtime.gather(*(self._swap_with(r, word) for r in others)), strict=True)
        )
        return [words.get(rank, word) for rank in range(self.size)]

    async def _swap_with(self, rank: int, word: bytes) -> bytes:
        stream = self._streams[rank]
        try:
            await stream.send(v1.Frame(body=v1.Body(data=word)))
            received = await stream.recv()
        except (ClosedError, RefusedError):
            received = None
        if received is None or not received.frame.HasField("body"):
            raise PeerLostError(self.names[rank], "left the group where it was to speak")
        return received.frame.body.data

    async def string(self, ranks: Collection[int]) -> None:
        """Strings a line to each of `ranks`, where all ranks of the mesh can have those that they want.

        All ranks do it at once, and want a line to each rank that wants one to them. Without lines, messages
        go by the streams.

        Raises:
            PeerLostError, DeadlineError: naming a rank; the group is broken.
        """
        await self.guarded(self._string([rank for rank in ranks if rank != self.rank]))

    async def _string(self, ranks: Sequence[int]) -> None:
        strung: dict[int, DataSocket] = {}
        try:
            await self.runtime.gather(*(self._string_one(rank, strung) for rank in ranks))
            everybody = await self._swap(bytes([len(strung) == len(ranks)]))
            if all(word == b"\1" for word in everybody):
                self.lines = GroupDataSockets(self._me, strung)
        finally:
            if self.lines is None:
                for line in strung.values():
                    line.socket.close()

    async def _string_one(self, rank: int, strung: dict[int, DataSocket]) -> None:
        name = self.names[rank]
        connected = await self._endpoint.data_socket(name, f"exchange/{self._epoch}", dial=self.rank < rank)
        if connected is not None:
            strung[rank] = DataSocket(connected, name)

    # ---- losing a rank ------------------------------------------------------------------

    async def guarded(self, work: Coroutine[Any, Any, T], *, streams_alone: bool = False) -> T:
        """Carries out what needs all ranks; if one is lost meanwhile, `work` is cancelled.

        Args:
            work: what to do.
            streams_alone: it waits for nothing but the mesh's streams, which end then: no task is needed.

        Whoever gives it up (a cancellation, an error) breaks the group: the others cannot go on
        without this rank.

        Raises:
            PeerLostError, DeadlineError: naming a rank. By then all others that can be reached know.
            BaseException: what `work` raises otherwise.
        """
        if self.loss is not None or self._closed:
            work.close()
            raise self._over()
        task: asyncio.Task[T] | None = None
        try:
            if streams_alone:
                return await work
            task = self.runtime.spawn(work, name=f"{self._me}/group")
            self._working[task] = None
            return await task
        except asyncio.CancelledError:
            if self.loss is None:
                self.lose(LostRank(self._me, False, "has given up an operation of the group"))
            own = asyncio.current_task()
            if own is not None and own.cancelling():
                self._cut()
                raise
        except (PeerLostError, DeadlineError) as error:
            self.lose(LostRank.of(error.peer, error))
        except BaseException as error:
            self.lose(LostRank(self._me, False, f"has given up an operation of the group: {error}"))
            await self._told()
            raise
        finally:
            if task is not None:
                self._working.pop(task, None)
        await self._told()
        raise self._over()

    def _over(self) -> GradstreamError:
        if self.loss is not None:
            return self.loss.error()
        return ClosedError(f"{self._me} has left its group")

    def lose(self, loss: LostRank) -> None:
        """Breaks the group, for the first reason given; later ones change nothing."""
        if self.loss is not None or self._closed:
            return
        self.loss = loss
        name = f"{self._me}/group: {loss.culprit} is lost"
        self._telling = self.runtime.spawn(self._tell(loss), name=name)

    def _linked(self, rank: int, stream: Stream) -> None:
        stream.on_release(partial(self._ended, rank))

    def _ended(self, rank: int) -> None:
        """A stream is over. Who has left in order is missed only by those who still need it."""
        error = self._streams[rank].failure
        if isinstance(error, ClosedError) and LOST in str(error):  # this rank was, and wakes up now
            self.lose(
                LostRank(self._me, True, f"{LOST}{str(error).partition(LOST)[2]}; it was stopped or cut off")
            )
        elif isinstance(error, PeerLostError | DeadlineError):
            self.lose(LostRank.of(self.names[rank], error))
        self._gone.add(rank)
        self._released.ring()

    async def _keep_alive(self) -> None:
        """Gives signs of life to all, and looks who gives none."""
        period_s = self.silence_s / BEATS
        lost_s = self.silence_s + period_s  # its last sign of life is older than what has silenced it
        while self.loss is None:
            next_s = period_s
            for rank, stream in list(self._streams.items()):
                if stream.failure is not None:
                    continue
                left_s = self.runtime.left_s(stream.heard_ns, lost_s)
                if left_s <= 0:
                    self.lose(LostRank(self.names[rank], True, f"silent for {lost_s:g} s in a group"))
                    return
                next_s = min(next_s, left_s)
                try:
                    await stream.waiting([f"{self._me}: its next step in the group"])
                except GradstreamError:
                    continue  # it has left, or is lost: the stream itself says so
            await self.runtime.sleep(next_s)

    async def _tell(self, loss: LostRank) -> None:
        others = [name for name in self.names if name not in (self._me, loss.culprit)]
        await self.runtime.gather(*(self._tell_one(name, loss) for name in others))
        for task in list(self._working):
            task.cancel()
        self._cut()

    async def _tell_one(self, name: str, loss: LostRank) -> None:
        broken = v1.Broken(epoch=self._epoch, culprit=loss.culprit, silent=loss.silent, message=loss.message)
        try:
            silence_s = self.silence_s / BEATS
            await self._endpoint.call(name, "broken", broken, v1.Broken, silence_s=silence_s)
        except GradstreamError:
            pass  # it is gone too, or has left

    async def _told(self) -> None:
        if self._telling is not None:
            await self._telling

    def _cut(self) -> None:
        """From here on nothing writes the memory that streams were to receive into."""
        for rank, stream in self._streams.items():
            lost = self.loss is not None and self.loss.culprit == self.names[rank]
            why = f"{LOST}{self.loss.message}" if lost and self.loss else f"{self._me} has left the group"
            stream.cancel(why)
        if self.lines is not None:
            self.lines.cut()

    async def _hear(self, stream: Stream) -> None:
        """Somebody has lost a rank."""
        broken = v1.Broken.FromString(stream.opened.body)
        if broken.epoch == self._epoch:
            if broken.culprit not in self.names:
                message = f"{broken.culprit[:64]!r} is in no group of {self._me}: it cannot be to blame"
                raise RefusedError(self._me, "BAD_REQUEST", message)
            self.lose(LostRank(broken.culprit, broken.silent, escaped(broken.message, MESSAGE_BYTES)))
        await stream.send(v1.Frame(body=v1.Body(data=v1.Broken().SerializeToString())))

    # ---- leaving ------------------------------------------------------------------------

    async def close(self) -> None:
        """Leaves. What was sent before still arrives, unless the group is broken. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._meeting.over()
        if self._keeper is not None:
            self._keeper.cancel()
        if self.loss is None:
            for rank, stream in self._streams.items():
                await self._end(rank, stream)
            try:
                await self.runtime.within(min(LINGER_S, self.silence_s), self._all_released())
            except TimeoutError:
                pass  # somebody stays longer
        elif self._telling is not None:
            await self._telling
        self._cut()
        if self.lines is not None:
            await self.lines.close()

    async def _end(self, rank: int, stream: Stream) -> None:
        if self._meeting.release(rank):
            return
        try:
            await stream.end()
        except GradstreamError:
            pass  # over already

    async def _all_released(self) -> None:
        while len(self._gone) < len(self._streams):
            await self._released.wait()
