"""Admits the minibatches of a replica before their gradients are asked for, on its worker.

The gate of the worker stops what enters the pipeline. Where it closes, for a snapshot or at the end, everything that
was admitted is computed first: the stream ends, and the next one begins when the gate opens. So a snapshot never has
a minibatch of which some parts have made the update.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

from gradstream.data.base import BatchRef
from gradstream.runtime.base import Runtime, awaited_later
from gradstream.worker.parts.window import Window


class BatchAdmission:
    """Fills a window with minibatches, and hands them out in order.

    Args:
        runtime: of the worker.
        window: admitted minibatches.
        size: number of samples of a minibatch.
        begin: tells the other parts that a minibatch is admitted.
        ends_stream: whether the stream ends with a minibatch, since the parameters are looked at after it.
    """

    def __init__(
        self,
        runtime: Runtime,
        window: Window,
        size: Callable[[BatchRef], int | None],
        begin: Callable[[BatchRef], Awaitable[None]],
        ends_stream: Callable[[BatchRef], bool],
    ) -> None:
        self._runtime = runtime
        self._window = window
        self._size = size
        self._begin = begin
        self._ends_stream = ends_stream
        self._news = asyncio.Queue[BatchRef | Exception | None]()  # None: the stream ends
        self._wanted = asyncio.Semaphore(0)
        self._drained = asyncio.Event()
        self._over = False

    async def drain(self) -> None:
        """Ends the stream. Returns when all of its minibatches are done."""
        self._drained.clear()
        self._news.put_nowait(None)
        await self._drained.wait()

    async def through(
        self, refs: AsyncGenerator[BatchRef, None], drain: Callable[[], Awaitable[None]]
    ) -> AsyncGenerator[BatchRef, None]:
        """The same minibatches, each when enough after it are admitted.

        Args:
            refs: the worker's minibatches. It may call `drain` before the next one.
            drain: ends the stream in all parts.
        """
        window = self._window
        name = f"{self._runtime.node}-admits"
        admitting = awaited_later(self._runtime.spawn(self._admit(refs, drain), name=name))
        wanted = False
        try:
            while not self._over:
                if not wanted:
                    self._wanted.release()
                wanted, news = True, await self._news.get()
                if isinstance(news, Exception):
                    raise news
                if news is None:
                    window.closing = True
                else:
                    wanted = False
                    window.admit(news, self._size(news))
                while window.ready:
                    yield window.take()
                if news is None:
                    self._drained.set()
        finally:
            admitting.cancel()

    async def _admit(
        self, refs: AsyncGenerator[BatchRef, None], drain: Callable[[], Awaitable[None]]
    ) -> None:
        try:
            async with aclosing(refs):
                while await self._wanted.acquire():
                    ref = await anext(refs, None)
                    if ref is None:
                        break
                    await self._begin(ref)
                    self._news.put_nowait(ref)
                    if self._ends_stream(ref):
                        await drain()
            self._over = True
            self._news.put_nowait(None)
        except Exception as error:
            self._news.put_nowait(error)
