"""`Mailbox`: matches streams of tagged tensors with the receives that wait for them, by (sender, tag)."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection

from gradstream.transport.base import Caller
from gradstream.transport.stream import StreamCore
from gradstream.wire import v1

__all__ = ["Mailbox", "ReceivedTensor", "Seen"]

Key = tuple[str, int]


class Seen:
    """The numbers that have come: all below a low-water mark, and some above it.

    A number that never comes (its stream was lost) would keep the mark low for ever, so at most
    `SPAN` numbers above it are kept; a number that comes later than that counts as one that has come.
    """

    SPAN = 4096

    def __init__(self) -> None:
        self._below = 1  # every number below has come, or was given up
        self._above: set[int] = set()

    def add(self, number: int) -> bool:
        """Adds a number; False if it has come before."""
        if number < self._below or number in self._above:
            return False
        self._above.add(number)
        if len(self._above) > self.SPAN:
            self._below = min(self._above)
        while self._below in self._above:
            self._above.remove(self._below)
            self._below += 1
        return True


class ReceivedTensor:
    """A stream of method "tensor", held until a receive has taken it and is done with it."""

    def __init__(self, stream: StreamCore, request: v1.Tensor) -> None:
        self.stream = stream
        self.request = request
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def finish(self) -> None:
        """Releases the stream: the receive is over, for any reason."""
        if not self.done.done():
            self.done.set_result(None)


class Mailbox:
    """Matches arrivals with receives, both in order of their arrival."""

    def __init__(self) -> None:
        self._arrivals: dict[Key, deque[ReceivedTensor]] = {}
        self._receives: dict[Key, deque[asyncio.Future[ReceivedTensor]]] = {}
        self._seen: dict[Caller, Seen] = {}
        self._members: frozenset[Caller] | None = None

    def keep_senders(self, members: Collection[Caller]) -> None:
        """Sets the members of the run, and frees what is kept for other senders."""
        self._members = frozenset(members)
        self._seen = {sender: seen for sender, seen in self._seen.items() if sender in self._members}

    def knows(self, sender: str, incarnation: int) -> bool:
        """Whether a sender is a member; before the members are known, every sender is."""
        return self._members is None or Caller(sender, incarnation) in self._members

    def first_time(self, sender: str, incarnation: int, sequence: int) -> bool:
        """Notes a transfer; whether it was not delivered before."""
        return self._seen.setdefault(Caller(sender, incarnation), Seen()).add(sequence)

    def offer(self, key: Key, arrival: ReceivedTensor) -> bool:
        """Hands a stream to the oldest receive; keeps it and returns False where none waits yet."""
        receives = self._receives.get(key)
        while receives:
            future = receives.popleft()
            if not future.done():
                future.set_result(arrival)
                return True
        self._arrivals.setdefault(key, deque()).append(arrival)
        return False

    def withdraw(self, key: Key, arrival: ReceivedTensor) -> None:
        """Removes a stream that is kept."""
        parked = self._arrivals.get(key)
        if parked and arrival in parked:
            parked.remove(arrival)
        if not parked:
            self._arrivals.pop(key, None)

    async def take(self, key: Key) -> ReceivedTensor:
        """The oldest stream that its sender has not given up, as soon as there is one."""
        parked = self._arrivals.get(key)
        while parked:
            arrival = parked.popleft()
            if not arrival.stream.failed and not arrival.done.done():
                return arrival
        future: asyncio.Future[ReceivedTensor] = asyncio.get_running_loop().create_future()
        waiting = self._receives.setdefault(key, deque())
        waiting.append(future)
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():  # it came at the moment of the cancellation
                self.offer(key, future.result())
            raise
        finally:
            if future in waiting:
                waiting.remove(future)
            if not waiting and self._receives.get(key) is waiting:
                del self._receives[key]
