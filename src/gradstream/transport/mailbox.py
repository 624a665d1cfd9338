"""`Mailbox`: matches streams of tagged tensors with the receives that wait for them, by (sender, tag)."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection

from gradstream.transport.base import Caller
from gradstream.transport.stream import StreamCore
from gradstream.wire import v1
from gradstream.wire.window import SequenceWindow

__all__ = ["Mailbox", "ReceivedTensor"]

Key = tuple[str, int]


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
        self._seen: dict[Caller, SequenceWindow] = {}
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
        return self._seen.setdefault(Caller(sender, incarnation), SequenceWindow()).add(sequence)

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
