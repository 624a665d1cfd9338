"""The meeting: how the ranks of a group find each other, each of the lower rank of two calling the higher.

Nobody has to come first: who calls a rank that is not there yet calls again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from gradstream.errors import DeadlineError, RefusedError
from gradstream.runtime.base import Runtime
from gradstream.transport.base import Endpoint, Stream
from gradstream.transport.silence import Broadcast
from gradstream.wire import v1

__all__ = ["Rendezvous"]

WINDOW = 16  # chunks that a rank holds of each other one at most
RETRY_S = 0.02  # after a peer that has not come yet
NOT_YET = {"UNKNOWN_METHOD", "NOT_MEMBER", "STALE_EPOCH"}
"""What a peer answers that is not in the group yet."""


class Rendezvous:
    """One rank's part of it.

    Args:
        runtime: of this node.
        endpoint: see `Communicator`.
        names: of all nodes, by rank.
        rank: of this one.
        epoch: of the group.
        silence_s: how long to wait for each rank.
        on_linked: hears of each stream, with the rank at its other end.

    Attributes:
        streams: by rank, of those who have come.
    """

    def __init__(
        self,
        runtime: Runtime,
        endpoint: Endpoint,
        names: Sequence[str],
        rank: int,
        *,
        epoch: int,
        silence_s: float,
        on_linked: Callable[[int, Stream], object],
    ) -> None:
        self.streams: dict[int, Stream] = {}
        self._runtime = runtime
        self._endpoint = endpoint
        self._names = tuple(names)
        self._rank = rank
        self._me = names[rank]
        self._epoch = epoch
        self._silence_s = silence_s
        self._on_linked = on_linked
        self._served: dict[int, asyncio.Future[None]] = {}  # handlers that wait for the group's end
        self._linked = Broadcast()
        self._is_over = False

    async def hold(self) -> None:
        """Returns once there is a stream with every other rank.

        Raises:
            DeadlineError, PeerLostError: somebody has not come within `silence_s`, or is gone: who.
            RefusedError: ranks do not agree on who they are.
        """
        begun_ns = self._runtime.now()
        higher = range(self._rank + 1, len(self._names))
        await self._runtime.gather(self._lower_ranks(), *(self._call(rank, begun_ns) for rank in higher))

    def over(self) -> None:
        """Nobody is welcome any more."""
        self._is_over = True

    def release(self, rank: int) -> bool:
        """Ends this side of the stream of a lower rank; False where this rank has opened it."""
        over = self._served.get(rank)
        if over is not None and not over.done():
            over.set_result(None)  # its handler returns, which ends it
        return over is not None

    async def _call(self, rank: int, begun_ns: int) -> None:
        """Opens the stream with a higher rank, again and again until that has come."""
        name = self._names[rank]
        request = v1.Exchange(epoch=self._epoch, rank=self._rank, names=self._names)
        while True:
            left_s = self._runtime.left_s(begun_ns, self._silence_s)
            if left_s <= 0:
                raise self._absent(name)
            stream = await self._endpoint.open(name, "exchange", request, window=WINDOW)
            try:
                await stream.credit(left_s)
            except RefusedError as error:
                if error.code not in NOT_YET:
                    raise
                await self._runtime.sleep(RETRY_S)
                continue
            except BaseException:
                stream.cancel("the group was given up")
                raise
            self._link(rank, stream)
            return

    async def _lower_ranks(self) -> None:
        """Waits until all lower ranks have opened their streams."""
        try:
            await self._runtime.within(self._silence_s, self._all_lower())
        except TimeoutError:
            absent = next(rank for rank in range(self._rank) if rank not in self.streams)
            raise self._absent(self._names[absent]) from None

    async def _all_lower(self) -> None:
        while any(rank not in self.streams for rank in range(self._rank)):
            await self._linked.wait()

    def _absent(self, name: str) -> DeadlineError:
        message = f"has not come to the group of epoch {self._epoch} within {self._silence_s:g} s"
        return DeadlineError(name, message)

    async def welcome(self, stream: Stream) -> None:
        """Serves the stream of a lower rank, until either side closes."""
        request = v1.Exchange.FromString(stream.opened.body)
        if request.epoch != self._epoch or self._is_over:
            message = f"{self._me} is in the group of epoch {self._epoch}, not in that of {request.epoch}"
            raise RefusedError(self._me, "NOT_MEMBER", message)
        if tuple(request.names) != self._names or not request.rank < self._rank:
            who = f"{', '.join(request.names)}, of whom it is rank {request.rank}"
            message = f"{stream.peer} has a group of {who}: expected {', '.join(self._names)}"
            raise RefusedError(self._me, "BAD_REQUEST", message)
        if self._names[request.rank] != stream.opened.sender:
            message = f"{stream.opened.sender} says that it is {self._names[request.rank]}"
            raise RefusedError(self._me, "BAD_REQUEST", message)
        if request.rank in self.streams:
            raise RefusedError(self._me, "SUPERSEDED", f"{stream.peer} is in this group already")
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._served[request.rank] = over
        stream.on_release(partial(self.release, request.rank))
        self._link(request.rank, stream)
        await over

    def _link(self, rank: int, stream: Stream) -> None:
        self.streams[rank] = stream
        self._on_linked(rank, stream)
        self._linked.ring()
