"""A mesh's lines: a socket between two ranks that send each other messages, and the thread that uses them.

The streams of a mesh stay for everything else: signs of life, and who is lost. A rank that is lost breaks its
lines, or those who hear of it shut them down, which ends what the thread is at.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

from gradstream.collectives.socket_executor import SocketExecutor
from gradstream.collectives.socket_io import DataSocket
from gradstream.runtime.tasks import finish_despite_cancel

__all__ = ["GroupDataSockets"]

PATIENCE_MS = 2
"""What is done after so long never leaves the event loop: waking a thread, and the loop by it, would take as
long as the allreduce of a short vector."""


class GroupDataSockets:
    """Those of one rank.

    Args:
        node: name of this rank, for its thread.
        lines: by rank; owned from here on.
    """

    def __init__(self, node: str, lines: Mapping[int, DataSocket]) -> None:
        self._lines = dict(lines)
        self._is_closed = False
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"{node}-lines")

    def join(self, ranks: Iterable[int]) -> bool:
        """Whether there is one to each of these."""
        return all(rank in self._lines for rank in ranks)

    def line(self, rank: int) -> DataSocket:
        """The line with a rank."""
        return self._lines[rank]

    async def play(self, player: SocketExecutor) -> None:
        """Carries out an operation. However that has ended, nothing touches its memory any more.

        Raises:
            PeerLostError, ConfigError: see `SocketExecutor.play`. The lines are of no more use.
        """
        if not player.play(PATIENCE_MS):
            await self._run(player.play)

    async def _run(self, work: Callable[[], object]) -> None:
        running = asyncio.get_running_loop().run_in_executor(self._thread, work)
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError:
            self.cut()
            await _settled(running)
            raise

    def cut(self) -> None:
        """Ends what the thread is at, here and at the other ends. Idempotent."""
        for line in self._lines.values():
            try:
                line.socket.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # the other end was faster

    async def close(self) -> None:
        """Cuts, and closes once the thread has let go. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self.cut()
        await self._run(self._close)
        self._thread.shutdown(wait=False)

    def _close(self) -> None:
        for line in self._lines.values():
            line.socket.close()


async def _settled(running: asyncio.Future[object]) -> None:
    """Waits for it whatever comes; how it ended is of no interest any more."""
    try:
        await finish_despite_cancel(running)
    except BaseException:
        pass
