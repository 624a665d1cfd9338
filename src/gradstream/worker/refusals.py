"""The gradients of a worker that are not finite: nothing of them is used, and each is reported.

No samples are behind such a gradient any more: to the exchange it is that of a worker without samples. The
coordinator counts the minibatch as dropped, and decides what becomes of the worker (`coordinator/offences.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gradstream.data.base import BatchRef
from gradstream.errors import NonFiniteError
from gradstream.worker.computed import ComputedGradient


@dataclass(frozen=True, slots=True)
class RefusedGradient:
    """A gradient that is not in the model.

    Args:
        ref: its minibatch.
        samples: number of samples behind it.
        step: number of the worker's step.
        what: what is wrong with it, in words.
        in_a_row: number of the worker's refused gradients in a row, with this one.
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
        sound: tells it of the first finite gradient after others.
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
        """Takes the samples away from a gradient that has just been computed, so that it is not used.

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
