"""The communicator: one open stream between every two ranks of a group, and which rank is lost.

Ranks meet once. In each pair, the lower rank opens a stream, which stays open as long as the group. So an
operation sends nothing but its chunks, and all ranks see the death of another one at once. A rank gives signs of
life also while it computes: a rank that is stopped, or behind a broken cable, is silent.

A rank that learns of a loss breaks the group and tells all others. Only then does its own caller get the error.
A caller that got it earlier could leave the group, and the others would take its leaving for the cause.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import torch
from typing_extensions import override

from gradstream.collectives.group import Group, GroupMembers
from gradstream.collectives.rendezvous import Rendezvous
from gradstream.errors import (
    ClosedError,
    DeadlineError,
    GradstreamError,
    PeerCancelledError,
    PeerLostError,
    RefusedError,
)
from gradstream.memory import Vector
from gradstream.runtime.base import Runtime
from gradstream.runtime.deadlines import STILL, to_wait_longer
from gradstream.runtime.tasks import Broadcast, interrupt_on_cancel
from gradstream.transport.base import Endpoint, PeerSocket, Stream
from gradstream.untrusted import escaped
from gradstream.wire import v1

# ---- data sockets ------------------------------------------------------------------------
# Data sockets between two ranks that send each other messages, and the thread that uses them.
#
# The streams of the communicator carry everything else: heartbeats, and reports of lost ranks. When a rank is
# lost, its sockets break, or ranks that hear of the loss shut them down. Either ends what the thread does.


class DataSocket:
    """A socket to a rank, and memory for a piece that is to be added.

    That memory is kept, since new memory costs page faults.

    Args:
        connected: a non-blocking socket that nobody else uses.
        on_damage: called in any thread with a number of bytes that were damaged on their way.
        leads: the first piece of each operation goes over this one of the sockets to the rank.

    Attributes:
        checked: what goes over the socket has checksums.
        head: bytes of the next piece's header that have come; an operation may end before it takes them.
    """

    def __init__(
        self, connected: PeerSocket, name: str, on_damage: Callable[[int], object], *, leads: bool = True
    ) -> None:
        self.socket, self.checked = connected
        self.leads = leads
        self.name = name
        self.on_damage = on_damage
        self.head = bytearray()
        self._memory = np.empty(0, dtype=np.uint8)

    def part(self, num_bytes: int, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        """Memory of `num_bytes`, as elements of `dtype`; valid until the next call."""
        if self._memory.nbytes < num_bytes:
            self._memory = np.empty(num_bytes, dtype=np.uint8)
        return self._memory[:num_bytes].view(dtype)


class GroupDataSockets:
    """The data sockets of one rank.

    Args:
        node: name of this rank; its thread is named after it.
        sockets: those to each rank, by rank; this object closes them.
    """

    def __init__(self, node: str, sockets: Mapping[int, Sequence[DataSocket]]) -> None:
        self._by_rank = dict(sockets)
        self._sockets = [one for several in sockets.values() for one in several]
        self._is_closed = False
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"{node}-data")

    def reach(self, ranks: Iterable[int]) -> bool:
        """Whether there are data sockets to each of `ranks`."""
        return all(rank in self._by_rank for rank in ranks)

    def to(self, rank: int) -> Sequence[DataSocket]:
        """The data sockets to a rank."""
        return self._by_rank[rank]

    async def in_thread(self, work: Callable[[], object]) -> None:
        """Runs a blocking function on the thread. If the caller is cancelled, the sockets are shut down first."""
        running = asyncio.get_running_loop().run_in_executor(self._thread, work)
        await interrupt_on_cancel(running, self.shut_down)

    def shut_down(self) -> None:
        """Ends what the thread does, here and at the other ends. Idempotent."""
        for data_socket in self._sockets:
            try:
                data_socket.socket.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # the other end was faster

    async def close(self) -> None:
        """Shuts the sockets down, and closes them once the thread no longer uses them. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self.shut_down()
        await self.in_thread(self._close)
        self._thread.shutdown(wait=False)

    def _close(self) -> None:
        for data_socket in self._sockets:
            data_socket.socket.close()


# ---- communicator ------------------------------------------------------------------------

T = TypeVar("T")

BEATS = 8  # heartbeats within `silence_s`
MESSAGE_BYTES = 1024  # longest text that is taken from a rank that reports a loss
LINGER_S = 5.0  # longest time that a leaving rank waits for the others to have received everything it sent


@dataclass(frozen=True, slots=True)
class LostRank:
    """Why a group is broken.

    Args:
        culprit: name of the lost rank.
        silent: whether it was silent for too long; otherwise it is gone.
        message: what happened to it.
    """

    culprit: str
    silent: bool
    message: str

    @classmethod
    def of(cls, name: str, error: GradstreamError) -> LostRank:
        """Describes the loss of the rank at the other end of a stream that has failed with `error`."""
        text = str(error).removeprefix(f"{name}: ")
        return cls(name, isinstance(error, DeadlineError), text)

    def error(self) -> PeerLostError | DeadlineError:
        """A new exception that names the lost rank."""
        return (DeadlineError if self.silent else PeerLostError)(self.culprit, self.message)


class Communicator:
    """Connects this rank with all others. Call `meet` first and `close` at the end.

    Args:
        endpoint: a started endpoint that knows the addresses of all ranks. It serves one communicator at a
            time.
        members: the ranks, and which of them this node is. A later group of the same nodes has a higher epoch.

    Attributes:
        loss: why the group is broken; None while it is whole.
        data_sockets: what `connect_data_sockets` has connected; None if there are none.
    """

    def __init__(self, runtime: Runtime, endpoint: Endpoint, members: GroupMembers) -> None:
        self.runtime = runtime
        self.members = members
        self.rank, self.size = members.rank, len(members.names)
        self.loss: LostRank | None = None
        self.data_sockets: GroupDataSockets | None = None
        self._endpoint = endpoint
        self._me = members.me
        self._rendezvous = Rendezvous(runtime, endpoint, members, self._opened)
        self._released = Broadcast()
        self._working: dict[asyncio.Task[Any], None] = {}
        self._ended_ranks: set[int] = set()  # their streams have ended
        self._heartbeat: asyncio.Task[None] | None = None
        self._announcing: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def names(self) -> Sequence[str]:
        """Names of all ranks, by rank."""
        return self.members.names

    # ---- connecting ---------------------------------------------------------------------

    async def meet(self) -> None:
        """Returns once there is a stream with every other rank.

        Raises:
            DeadlineError, PeerLostError: names a rank that has not come within `silence_s`, or is gone.
            RefusedError: the ranks do not agree on the members of the group.
        """
        self._endpoint.serve("exchange", self._rendezvous.accept)
        self._endpoint.serve("broken", self._receive_loss)
        # Connected ranks hear from this one while it still waits for others.
        self._heartbeat = self.runtime.spawn(self._keep_alive(), name=f"{self._me}/group: signs of life")
        try:
            await self.guarded(self._rendezvous.meet())
        except BaseException:
            await self.close()
            raise

    # ---- what ranks send each other -----------------------------------------------------

    def stream(self, rank: int) -> Stream:
        """The stream with another rank."""
        return self._streams[rank]

    @property
    def _streams(self) -> dict[int, Stream]:
        return self._rendezvous.streams

    async def all_gather_bytes(self, own: bytes) -> list[bytes]:
        """Sends a few bytes to every rank, and returns those of each, by rank. All ranks call it at once.

        Raises:
            PeerLostError, DeadlineError: names a rank; the group is broken.
        """
        return await self.guarded(self._all_gather_bytes(own))

    async def _all_gather_bytes(self, own: bytes) -> list[bytes]:
        others = [rank for rank in range(self.size) if rank != self.rank]
        received = await self.runtime.gather(*(self._swap_with(rank, own) for rank in others))
        by_rank = dict(zip(others, received, strict=True))
        return [by_rank.get(rank, own) for rank in range(self.size)]

    async def _swap_with(self, rank: int, own: bytes) -> bytes:
        stream = self._streams[rank]
        try:
            await stream.send(v1.Frame(body=v1.Body(data=own)))
            received = await stream.recv()
        except (ClosedError, RefusedError):
            received = None
        if received is None or not received.frame.HasField("body"):
            raise PeerLostError(self.names[rank], "left the group instead of its turn in an exchange")
        return received.frame.body.data

    async def connect_data_sockets(self, ranks: Collection[int], count: int = 1) -> None:
        """Connects `count` data sockets to each of `ranks`, if every rank of the group gets all that it asks for.

        All ranks call it at once, and two ranks ask for each other or not at all, with the same `count`. Without
        data sockets, messages go over the streams.

        Raises:
            PeerLostError, DeadlineError: names a rank; the group is broken.
        """
        others = [rank for rank in ranks if rank != self.rank]
        await self.guarded(self._connect_data_sockets({rank: [] for rank in others}, count))

    async def _connect_data_sockets(self, connected: dict[int, list[DataSocket]], count: int) -> None:
        try:
            dials = (
                self._connect_data_socket(rank, n, connected) for rank in connected for n in range(count)
            )
            await self.runtime.gather(*dials)
            complete = all(len(sockets) == count for sockets in connected.values())
            everybody = await self._all_gather_bytes(bytes([complete]))
            if all(word == b"\1" for word in everybody):
                self.data_sockets = GroupDataSockets(self._me, connected)
        finally:
            if self.data_sockets is None:
                for data_socket in chain.from_iterable(connected.values()):
                    data_socket.socket.close()

    async def _connect_data_socket(
        self, rank: int, number: int, connected: dict[int, list[DataSocket]]
    ) -> None:
        name = self.names[rank]
        connected_socket = await self._endpoint.data_socket(
            name, f"exchange/{self.members.epoch}/{number}", dial=self.rank < rank
        )
        if connected_socket is not None:
            in_loop = asyncio.get_running_loop().call_soon_threadsafe
            report = partial(self._endpoint.on_damage, name)
            made = DataSocket(connected_socket, name, partial(in_loop, report), leads=number == 0)
            connected[rank].append(made)

    # ---- losing a rank ------------------------------------------------------------------

    async def guarded(self, work: Coroutine[Any, Any, T], *, streams_only: bool = False) -> T:
        """Carries out `work`, which needs all ranks. If a rank is lost meanwhile, `work` is cancelled.

        A caller that gives up (by a cancellation or an error) breaks the group, since the others cannot continue
        without this rank.

        Args:
            work: what to do.
            streams_only: `work` waits for nothing but the communicator's streams. They end when a rank is
                lost, so that `work` needs no task of its own.

        Raises:
            PeerLostError, DeadlineError: names a rank. By then all others that can be reached know.
            BaseException: any other error that `work` raises.
        """
        if self.loss is not None or self._closed:
            work.close()
            raise self._error()
        task: asyncio.Task[T] | None = None
        try:
            if streams_only:
                return await work
            task = self.runtime.spawn(work, name=f"{self._me}/group")
            self._working[task] = None
            return await task
        except asyncio.CancelledError:
            if self.loss is None:
                self._break(LostRank(self._me, False, "has given up an operation of the group"))
            own = asyncio.current_task()
            if own is not None and own.cancelling():
                self._cancel_links()
                raise
        except (PeerLostError, DeadlineError) as error:
            self._break(LostRank.of(error.peer, error))
        except BaseException as error:
            self._break(LostRank(self._me, False, f"has given up an operation of the group: {error}"))
            await self._announced()
            raise
        finally:
            if task is not None:
                self._working.pop(task, None)
        await self._announced()
        raise self._error()

    def abandon(self, error: PeerLostError) -> None:
        """Breaks the group because another component has detected that `error.peer` is lost."""
        self._break(LostRank.of(error.peer, error))

    def _error(self) -> GradstreamError:
        if self.loss is not None:
            return self.loss.error()
        return ClosedError(
            f"{self._me} has left its group, which carries out no more operations: form another"
        )

    def _break(self, loss: LostRank) -> None:
        """Breaks the group. The first reason stands; later ones change nothing."""
        if self.loss is not None or self._closed:
            return
        self.loss = loss
        name = f"{self._me}/group: {loss.culprit} is lost"
        self._announcing = self.runtime.spawn(self._announce(loss), name=name)

    def _opened(self, rank: int, stream: Stream) -> None:
        stream.on_release(partial(self._stream_ended, rank))

    def _stream_ended(self, rank: int) -> None:
        """Breaks the group if the stream ended by a loss. A rank that left in order harms only operations."""
        error = self._streams[rank].failure
        if isinstance(error, PeerCancelledError) and error.cause == v1.Cancel.LOST:  # it wakes up now
            text = f"lost by its group: {error.reason}; it was stopped or cut off"
            self._break(LostRank(self._me, True, text))
        elif isinstance(error, PeerLostError | DeadlineError):
            self._break(LostRank.of(self.names[rank], error))
        self._ended_ranks.add(rank)
        self._released.ring()

    async def _keep_alive(self) -> None:
        """Gives heartbeats to all ranks, and looks for one that gives none."""
        period_s = self.members.silence_s / BEATS
        lost_s = self.members.silence_s + period_s  # its last heartbeat is older than what has silenced it
        while self.loss is None:
            next_s = period_s
            for rank, stream in list(self._streams.items()):
                if stream.failure is not None:
                    continue
                left_s = self.runtime.left_s(stream.heard_ns, lost_s)
                if left_s <= 0:
                    text = f"silent for {lost_s:g} s in a group: {STILL}; {to_wait_longer('silence_s')}"
                    self._break(LostRank(self.names[rank], True, text))
                    return
                next_s = min(next_s, left_s)
                try:
                    await stream.waiting([f"{self._me}: its next step in the group"])
                except GradstreamError:
                    continue  # the stream itself reports how it ended
            await self.runtime.sleep(next_s)

    async def _announce(self, loss: LostRank) -> None:
        others = [name for name in self.names if name not in (self._me, loss.culprit)]
        await self.runtime.gather(*(self._announce_to(name, loss) for name in others))
        for task in list(self._working):
            task.cancel()
        self._cancel_links()

    async def _announce_to(self, name: str, loss: LostRank) -> None:
        broken = v1.Broken(
            epoch=self.members.epoch, culprit=loss.culprit, silent=loss.silent, message=loss.message
        )
        try:
            silence_s = self.members.silence_s / BEATS
            await self._endpoint.call(name, "broken", broken, v1.Broken, silence_s=silence_s)
        except GradstreamError:
            pass  # it is gone too, or has left

    async def _announced(self) -> None:
        if self._announcing is not None:
            await asyncio.shield(self._announcing)  # which cancels operations that wait for it here

    def _cancel_links(self) -> None:
        """After this nothing writes the memory that streams and data sockets were to receive into."""
        for rank, stream in self._streams.items():
            if self.loss is not None and self.loss.culprit == self.names[rank]:
                stream.cancel(self.loss.message, v1.Cancel.LOST)
            else:
                stream.cancel(f"{self._me} has left the group")
        if self.data_sockets is not None:
            self.data_sockets.shut_down()

    async def _receive_loss(self, stream: Stream) -> None:
        """Serves the call by which another rank reports a loss."""
        broken = v1.Broken.FromString(stream.opened.body)
        if broken.epoch == self.members.epoch:
            if broken.culprit not in self.names:
                message = f"{broken.culprit[:64]!r} is in no group of {self._me}: it cannot be to blame"
                raise RefusedError(self._me, "BAD_REQUEST", message)
            self._break(LostRank(broken.culprit, broken.silent, escaped(broken.message, MESSAGE_BYTES)))
        await stream.send(v1.Frame(body=v1.Body(data=v1.Broken().SerializeToString())))

    # ---- leaving ------------------------------------------------------------------------

    async def close(self) -> None:
        """Leaves the group. What was sent before still arrives, unless the group is broken. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._rendezvous.close()
        if self._heartbeat is not None:
            self._heartbeat.cancel()
        if self.loss is None:
            for rank, stream in self._streams.items():
                await self._end(rank, stream)
            try:
                await self.runtime.within(min(LINGER_S, self.members.silence_s), self._all_released())
            except TimeoutError:
                pass  # another rank stays longer
        await self._announced()
        self._cancel_links()
        if self.data_sockets is not None:
            await self.data_sockets.close()

    async def _end(self, rank: int, stream: Stream) -> None:
        if self._rendezvous.release(rank):
            return
        try:
            await stream.end()
        except GradstreamError:
            pass  # it has ended already

    async def _all_released(self) -> None:
        while len(self._ended_ranks) < len(self._streams):
            await self._released.wait()


# ---- groups over a communicator ----------------------------------------------------------


class CommunicatorGroup(Group):
    """What the groups have in common whose ranks a communicator connects.

    Args:
        communicator: its ranks have met. The group closes it.
    """

    shares_memory = False

    def __init__(self, communicator: Communicator) -> None:
        self.rank, self.size = communicator.rank, communicator.size
        self.names: Sequence[str] = communicator.names
        self._communicator = communicator
        self._runtime = communicator.runtime

    async def common(self, elems: int, dtype: torch.dtype, name: str) -> Vector:
        """See `Group.common`: each rank has its own."""
        return self.allocate(elems, dtype, name)

    @override
    def abandon(self, error: PeerLostError) -> None:
        self._communicator.abandon(error)

    @override
    async def close(self) -> None:
        await self._communicator.close()
