"""How the ranks of a group find each other: in each pair, the lower rank opens a stream to the higher one.

Ranks may come in any order: a rank tries again while the one that it calls is not there yet. The caller confirms a
stream that was accepted. Until then it does not count: a network may deliver a request that was refused again,
later, when it would be accepted.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from functools import partial

from gradstream.collectives.group import GroupMembers
from gradstream.errors import DeadlineError, RefusedError
from gradstream.runtime.base import Runtime
from gradstream.runtime.deadlines import STILL, to_wait_longer
from gradstream.runtime.tasks import Broadcast
from gradstream.transport.base import Endpoint, Stream
from gradstream.wire import v1

WINDOW = 16  # most chunks that a rank holds for each other one
RETRY_S, LONGEST_RETRY_S = (
    0.02,
    0.25,
)  # between two calls of a rank that has not come yet; each wait is half as long again
NOT_YET = {"UNKNOWN_METHOD", "NOT_MEMBER", "STALE_EPOCH"}
"""Codes with which a rank refuses a stream while it is not in the group yet."""


class Rendezvous:
    """Opens and accepts the streams of one rank.

    Args:
        endpoint: see `Communicator`.
        members: the ranks, and which of them this node is.
        on_stream: called with each new stream and the rank at its other end.

    Attributes:
        streams: the streams that are open so far, by rank.
    """

    def __init__(
        self,
        runtime: Runtime,
        endpoint: Endpoint,
        members: GroupMembers,
        on_stream: Callable[[int, Stream], object],
    ) -> None:
        self.streams: dict[int, Stream] = {}
        self._runtime = runtime
        self._endpoint = endpoint
        self._members = members
        self._names = members.names
        self._digest = digest(members.names)
        self._rank = members.rank
        self._me = members.me
        self._on_stream = on_stream
        self._served: dict[int, asyncio.Future[None]] = {}  # each ends the handler of an accepted stream
        self._new_stream = Broadcast()
        self._is_closed = False

    async def meet(self) -> None:
        """Returns once there is a stream with every other rank.

        Raises:
            DeadlineError, PeerLostError: names a rank that has not come within `silence_s`, or is gone.
            RefusedError: the ranks do not agree on the members of the group.
        """
        begun_ns = self._runtime.now()
        higher = range(self._rank + 1, len(self._names))
        await self._runtime.gather(self._await_lower(), *(self._open(rank, begun_ns) for rank in higher))

    def close(self) -> None:
        """Accepts no further stream."""
        self._is_closed = True

    def release(self, rank: int) -> bool:
        """Ends this side of the stream of a lower rank. Returns False if this rank has opened the stream."""
        served = self._served.get(rank)
        if served is not None and not served.done():
            served.set_result(None)  # the handler returns, which ends the stream
        return served is not None

    async def _open(self, rank: int, begun_ns: int) -> None:
        """Opens the stream to a higher rank; tries again until that rank has come."""
        name = self._names[rank]
        request = v1.Exchange(epoch=self._members.epoch, rank=self._rank, members=self._digest)
        retry_s = RETRY_S
        while True:
            left_s = self._runtime.left_s(begun_ns, self._members.silence_s)
            if left_s <= 0:
                raise self._absent(name)
            stream = await self._endpoint.open(name, "exchange", request, window=WINDOW)
            try:
                await stream.credit(left_s)
                await stream.send(v1.Frame(body=v1.Body()), silence_s=left_s)
            except RefusedError as error:
                if error.code not in NOT_YET:
                    raise
                await self._runtime.sleep(retry_s)
                retry_s = min(1.5 * retry_s, LONGEST_RETRY_S)
                continue
            except BaseException:
                stream.cancel("the group was given up")
                raise
            self._add(rank, stream)
            return

    async def _await_lower(self) -> None:
        """Waits until all lower ranks have opened their streams."""
        try:
            await self._runtime.within(self._members.silence_s, self._all_lower())
        except TimeoutError:
            absent = next(rank for rank in range(self._rank) if rank not in self.streams)
            raise self._absent(self._names[absent]) from None

    async def _all_lower(self) -> None:
        while any(rank not in self.streams for rank in range(self._rank)):
            await self._new_stream.wait()

    def _absent(self, name: str) -> DeadlineError:
        message = (
            f"has not come to the group of epoch {self._members.epoch} within {self._members.silence_s:g} s: "
            f"{STILL}; {to_wait_longer('silence_s')}"
        )
        return DeadlineError(name, message)

    async def accept(self, stream: Stream) -> None:
        """Serves the stream of a lower rank until either side closes it."""
        request = v1.Exchange.FromString(stream.opened.body)
        if request.epoch != self._members.epoch or self._is_closed:
            message = (
                f"{self._me} is in the group of epoch {self._members.epoch}, not in that of {request.epoch}"
            )
            raise RefusedError(self._me, "STALE_EPOCH", message)  # which is counted against nobody
        if request.members != self._digest or not request.rank < self._rank:
            raise RefusedError(
                self._me,
                "BAD_REQUEST",
                f"{stream.peer} is rank {request.rank} of a group of other ranks, or of this one: expected a rank "
                f"below {self._rank} of {', '.join(self._names)}",
            )
        if self._names[request.rank] != stream.opened.sender:
            message = f"{stream.opened.sender} says that it is {self._names[request.rank]}"
            raise RefusedError(self._me, "BAD_REQUEST", message)
        confirmed = await stream.recv(self._members.silence_s)
        if confirmed is None or request.rank in self.streams or self._is_closed:
            raise RefusedError(
                self._me, "SUPERSEDED", f"{stream.peer} is in this group already, or has left it"
            )
        served: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._served[request.rank] = served
        stream.on_release(partial(self.release, request.rank))
        self._add(request.rank, stream)
        await served

    def _add(self, rank: int, stream: Stream) -> None:
        self.streams[rank] = stream
        self._on_stream(rank, stream)
        self._new_stream.ring()


def digest(names: Sequence[str]) -> bytes:
    """What stands for the members of a group: a thousand ranks would each send a thousand names to a thousand."""
    return hashlib.sha256("".join(f"{name}\0" for name in names).encode()).digest()
