"""`Agreement`: what all parts of a replica decide together: what becomes of a gradient, and whether a round counts.

    part ── report: finite? its length? ──▶ worker ── scaled, or refused ──▶ every part
    part ── vote: ready, or lost its group ──▶ worker ── continues, or not ──▶ every part
    worker ── the gradient of which minibatch comes next ──▶ every part

An update of a round is made in all parts of a replica, or in none. So its parts have parameters of one version, and
whoever of another replica dies, the round can be done again.

Without rounds, a replica also computes gradients of lost workers (`worker.server.redo`), at any time. The worker
then tells before each gradient whose turn it is, so that all parts compute the same one.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass

from gradstream.data.base import BatchRef
from gradstream.runtime.base import Runtime, awaited_later
from gradstream.worker.gradient import Clip
from gradstream.worker.parts.messages import PartReport, PartStandsIn

# ---- window ------------------------------------------------------------------------------
# The minibatches that a replica has admitted to its pipeline, beside the one whose gradient is computed.


class Window:
    """Admits minibatches in order. A part takes the oldest when it knows all that its gradient's passes read.

    A stream is the minibatches that are admitted until `closing` is set: the next one comes after their updates.

    Args:
        ahead: number of minibatches after the current one that the passes of its gradient may read. 0 if the
            pipeline is empty between two minibatches.

    Attributes:
        stream: (minibatch, number of samples) of those that have samples, and whose gradients are not computed yet.
        number: number of the stream.
        closing: whether the stream gets no further minibatch; the next one that is admitted begins another stream.
    """

    def __init__(self, ahead: int = 0) -> None:
        self.ahead = ahead
        self.stream = deque[tuple[BatchRef, int]]()
        self.number = 0
        self.closing = False
        self._left = deque[BatchRef]()

    def admit(self, ref: BatchRef, samples: int | None) -> None:
        """Adds a minibatch. One without samples is taken in its turn, but is not in `stream`: it has no gradient."""
        if self.closing:
            self.number, self.closing = self.number + 1, False
        if samples:
            self.stream.append((ref, samples))
        self._left.append(ref)

    @property
    def ready(self) -> bool:
        """Whether the oldest minibatch may be taken."""
        return len(self._left) > (0 if self.closing else self.ahead)

    @property
    def last(self) -> bool:
        """Whether the minibatch that was taken last is the last one of its stream."""
        return self.closing and not self._left

    def take(self) -> BatchRef:
        """The oldest minibatch."""
        return self._left.popleft()


# ---- agreement ---------------------------------------------------------------------------


async def at_once() -> None:
    """Nothing has to be done before the parts continue."""


@dataclass(frozen=True, slots=True)
class Agreed:
    """What becomes of a gradient.

    Args:
        scale: factor of each element.
        refused: why the gradient is skipped; "" if it is not.
        loss: of the minibatch. Known to part 0 alone; 0 in others.
        norm: length of the mean gradient before it was clipped, on part 0; None if nobody needs it.
    """

    scale: float
    refused: str
    loss: float = 0.0
    norm: float | None = None


class Agreement(ABC):
    """The side of one process, which holds one part.

    Attributes:
        window: the minibatches that this part may compute.
        in_round: a minibatch has begun, and the parts have not voted on its round.
        on_stand_in: called where the worker lets this part compute the minibatch of a lost worker.
        takes_turns: gradients of lost workers come between those of the replica.
        num_pushed: number of minibatches that are in the model, in this part.
    """

    def __init__(self) -> None:
        self.window = Window()
        self.in_round = False
        self.on_stand_in: Callable[[PartStandsIn], None] | None = None
        self.takes_turns = False
        self.num_pushed = 0

    @property
    @abstractmethod
    def leads(self) -> bool:
        """Whether this is the worker."""

    @property
    @abstractmethod
    def num_heard(self) -> int:
        """Number of the replica's receipts that the coordinator has, as far as this part knows."""

    @abstractmethod
    def turn(self, ref: BatchRef | None) -> AbstractAsyncContextManager[None]:
        """The turn of one gradient, in the order of the worker. Does nothing unless the replica `takes_turns`.

        Args:
            ref: its minibatch. None, on the worker alone: no gradient may be computed meanwhile.
        """

    @abstractmethod
    def redo(self, refs: Sequence[BatchRef]) -> AbstractAsyncContextManager[None]:
        """The time in which all parts redo a lost worker's push of these minibatches; the worker chooses it."""

    @abstractmethod
    async def share_buffers(self) -> None:
        """Gives the worker what computing the gradient has made of this part's buffers."""

    @abstractmethod
    async def reach(self, mine: PartReport, clip: Clip, num_summed: int) -> Agreed:
        """Agrees on a gradient with all other parts.

        Args:
            mine: this part's report.
            clip: bounds of the gradient.
            num_summed: number of samples that the gradient is the sum over; 1 for a mean.
        """

    @abstractmethod
    def note(self, mine: PartReport) -> float:
        """Passes on a report, and waits for nobody. Returns the newest loss that is known here; NaN if none is."""

    async def loss(self, mine: PartReport) -> float:
        """As `note`, but the worker waits for the loss of the same minibatch."""
        return self.note(mine)

    @abstractmethod
    async def all_ready(
        self, ready: bool, epoch: int = 0, last: Callable[[], Awaitable[None]] = at_once
    ) -> bool:
        """Votes, and returns whether all parts are ready, the same in all of them.

        Args:
            ready: whether this part is.
            epoch: membership epoch of its group. Parts that vote under different ones are not ready.
            last: awaited before this part continues: on the worker after all votes, on others after its answer.
        """

    @abstractmethod
    async def give_up(self, epoch: int) -> None:
        """Lets all parts give up the round, if they are in one, and form their groups again."""

    @abstractmethod
    def let_stand_in(self, rank: int, number: int) -> None:
        """On the worker: lets the other parts compute the minibatch of a lost worker with it, in this round."""


# ---- admission ---------------------------------------------------------------------------
# Admits the minibatches of a replica before their gradients are asked for, on its worker.
#
# The gate of the worker stops what enters the pipeline. Where it closes, for a snapshot or at the end, everything
# that was admitted is computed first: the stream ends, and the next one begins when the gate opens. So a snapshot
# never has a minibatch of which some parts have made the update.


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
