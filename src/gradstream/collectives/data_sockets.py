"""Data sockets between two ranks that send each other messages, and the thread that uses them.

The streams of the communicator carry everything else: signs of life, and reports of lost ranks. When a rank is
lost, its sockets break, or ranks that hear of the loss shut them down. Either ends what the thread does.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from gradstream.runtime.tasks import interrupt_on_cancel
from gradstream.transport.base import PeerSocket


class DataSocket:
    """A socket to a rank, and memory for a piece that is to be added.

    That memory is kept, since new memory costs page faults.

    Args:
        connected: a non-blocking socket that nobody else uses.
        name: name of the rank.
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
