"""`Agreement`: what all parts of a replica decide together: what becomes of a gradient, and whether a round counts.

    part ── report: finite? its length? ──▶ worker ── scaled, or refused ──▶ every part
    part ── vote: ready, or lost its group ──▶ worker ── goes on, or not ──▶ every part
    worker ── the gradient of which minibatch comes next ──▶ every part

An update of a round is made in all parts of a replica, or in none. So its parts have parameters of one version, and
whoever of another replica dies, the round can be done again.

Without rounds, a replica also computes gradients of lost workers (`worker.exchange.errands`), at any time. The worker
then tells before each gradient whose turn it is, so that all parts compute the same one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from gradstream.data.base import BatchRef
from gradstream.worker.gradient import Clip
from gradstream.worker.parts.messages import PartReport, PartStandsIn
from gradstream.worker.parts.window import Window


async def at_once() -> None:
    """Nothing has to be done before the parts go on."""


@dataclass(frozen=True, slots=True)
class Agreed:
    """What becomes of a gradient.

    Args:
        scale: factor of each element.
        refused: why the gradient is left out; "" if it is not.
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
    def errand(self, refs: Sequence[BatchRef]) -> AbstractAsyncContextManager[None]:
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
        """Passes on a report, and waits for nobody. Returns the newest loss that is known here; NaN where none is."""

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
            last: awaited before this part goes on: on the worker after all votes, on others after its answer.
        """

    @abstractmethod
    async def give_up(self, epoch: int) -> None:
        """Lets all parts give up the round, if they are in one, and form their groups again."""

    @abstractmethod
    def let_stand_in(self, rank: int, number: int) -> None:
        """On the worker: lets the other parts compute the minibatch of a lost worker with it, in this round."""
