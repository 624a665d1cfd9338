"""A minibatch and the gradient computed from it, which a replica passes to its strategy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gradstream.data.base import BatchRef
from gradstream.errors import NonFiniteError
from gradstream.memory import Vector
from gradstream.model.base import Batch
from gradstream.model.rows import RowGradient
from gradstream.runtime.base import ComputeProgress

if TYPE_CHECKING:
    from gradstream.server.client.push import Update


# ---- computed ----------------------------------------------------------------------------

UNKNOWN = -1
"""Number of samples of a minibatch that a user's loop has not seen yet."""


@dataclass(frozen=True, slots=True)
class Result:
    """Figures of a gradient, besides its elements.

    Args:
        loss: mean or sum over samples, as the model's `reduction` says; NaN if unknown.
        norm: norm of the mean gradient before clipping; None if it is not clipped by norm.
        read_s: seconds spent on reading samples, as part of computing the gradient.
        squares: |g|² of each part's mean gradient and of their mean, if measured; else ().
        refused: why the gradient cannot be used (worker, step, minibatch and what is not finite), or "".
    """

    loss: float
    norm: float | None = None
    read_s: float = 0.0
    refused: str = ""
    squares: tuple[float, ...] = ()


@dataclass(slots=True)
class SampleBatch:
    """A minibatch by name and size.

    Args:
        num_samples: its size; `UNKNOWN` until the gradient is done if a user's loop computes it.
        samples: the samples, part by part, if their number is unknown until they are read, as in a stream. None:
            they are read when the gradient is computed.
        read_s: seconds that reading `samples` took.
    """

    ref: BatchRef
    num_samples: int
    samples: tuple[Batch, ...] | None = None
    read_s: float = 0.0

    @property
    def epoch(self) -> int:
        """Number of its data epoch."""
        return self.ref.epoch


@dataclass(slots=True)
class ComputedGradient:
    """A gradient that is being computed into `vector`, or has been.

    Args:
        vector: memory of the replica, (E,).
        batch: the minibatch that it is computed from.
        lr: learning rate of the minibatch.
        step: number of the worker's step: for messages, and for the seed of dropout.
        mean: it is the mean over samples, even if the model computes sums.
        sums: (E,) memory to sum up parts of the minibatch, if there are several.
        ready: number of leading elements that are final.
        task: computes it; None if there are no samples.
        later: number of the batch's last parts that are not in this gradient: the worker trains on them while the
            gradient is exchanged; see `LocalSteps`.
        later_samples: number of samples in those parts.
        rest: trains on those parts once this gradient is complete; None if there are none.
        on_known: called by `know` and by `refuse`.
        rows: receives the gradients of row-sparse tensors, empty at first; `vector` and `sums` then have the
            layout `Layout.rest`.
        sound: number of leading elements that were finite and reported before one that is not finite.
        exact: what a user's loop sends is no gradient, and no codec may round it.
    """

    vector: Vector
    batch: SampleBatch
    lr: float
    step: int = 0
    mean: bool = False
    sums: Vector | None = None
    ready: ComputeProgress = field(default_factory=ComputeProgress)
    task: asyncio.Task[Result] | None = None
    later: int = 0
    later_samples: int = 0
    rest: asyncio.Task[None] | None = None
    on_known: Callable[[], None] | None = None
    rows: RowGradient | None = None
    sound: int = 0
    exact: bool = False

    @property
    def samples(self) -> int:
        """Number of training samples in it; may be `UNKNOWN` until it is done."""
        return self.batch.num_samples

    async def done(self) -> None:
        """See `strategies.api.Gradient`."""
        if self.task is not None:
            await asyncio.shield(self.task)

    async def over(self) -> None:
        """Returns when nothing of its batch is being computed any more; raises the error of that computation."""
        await self.done()
        if self.rest is not None:
            await asyncio.shield(self.rest)

    def know(self, samples: int, lr: float) -> None:
        """Fills in size and rate, unknown when the gradient was requested. Nothing of it is ready yet."""
        self.batch.num_samples, self.lr = samples, lr
        if self.on_known is not None:
            self.on_known()

    def refuse(self) -> None:
        """Sets the samples to 0, since the gradient cannot be used. Only `sound` elements already sent take effect."""
        self.know(0, self.lr)
        self.ready.advance(len(self.vector))


# ---- refusals ----------------------------------------------------------------------------
# Gradients that are not finite are not used, and each is reported.
#
# Such a gradient gets 0 samples, so the exchange treats the worker as one without samples. The coordinator counts the
# minibatch as dropped, and decides whether the worker may continue (`coordinator/nodes.py`).


@dataclass(frozen=True, slots=True)
class RefusedGradient:
    """A gradient that is not in the model.

    Args:
        what: what is wrong with it, in words.
        in_a_row: number of consecutive refused gradients of the worker, including this one.
    """

    ref: BatchRef
    samples: int
    step: int
    what: str
    in_a_row: int


class Refusals:
    """Refuses gradients of one worker.

    Args:
        report: tells the coordinator; None ends the run at the first gradient that is not finite.
        sound: tells the coordinator of the first finite gradient after refused ones.
    """

    def __init__(
        self,
        report: Callable[[RefusedGradient], None] | None = None,
        sound: Callable[[], None] = lambda: None,
    ) -> None:
        self._report = report
        self._sound = sound
        self._in_a_row = 0

    def refuse(self, gradient: ComputedGradient, what: str) -> None:
        """Refuses a gradient that has just been computed, so that it is not used.

        With `overlap`, chunks that were sent during backprop, before the first number that is not finite, are used.

        Args:
            gradient: the gradient.
            what: what is wrong with it, in words.

        Raises:
            NonFiniteError: the run shall end.
        """
        if self._report is None:
            raise NonFiniteError(
                f"{what}; lower the learning rate, scale the inputs, or clip the gradient. Nothing of this gradient "
                "was applied, except for chunks that were pushed during its computation (overlap)"
            )
        self._in_a_row += 1
        ref, samples = gradient.batch.ref, gradient.samples
        self._report(RefusedGradient(ref, samples, gradient.step, what, self._in_a_row))
        gradient.refuse()

    def passed(self) -> None:
        """Notes that a gradient is finite."""
        if self._in_a_row:
            self._in_a_row = 0
            self._sound()


# ---- observer ----------------------------------------------------------------------------
# Watches a worker's gradients and updates: a replay does, to tell which samples are in an update.


class Observer:
    """Is told of every gradient and update of a worker, and does nothing."""

    def computed(self, rank: int, ref: BatchRef, step: int, loss: float) -> None:
        """The gradient of a minibatch is computed."""

    def handed_over(self, rank: int, update: Update) -> None:
        """Gradients were added to this update, which will be pushed."""
