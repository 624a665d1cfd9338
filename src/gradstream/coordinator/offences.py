"""Which workers' gradients are not finite, and what becomes of the workers, as a pure state machine.

    a gradient is refused          the run goes on without it
    `limit` of a worker in a row   the worker is quarantined: it counts as lost from then on
    likewise, and the newest gradient of every other worker was refused, too:
                                   the model has diverged, and the run ends

A worker counts its own refused gradients in a row, since it alone knows their order.
"""

from __future__ import annotations

from collections.abc import Collection

from gradstream.coordinator.instructions import Emit
from gradstream.coordinator.progress import SampleProgress
from gradstream.coordinator.receipts import ref_of
from gradstream.telemetry.events import GradientRefusedEvent
from gradstream.untrusted import escaped
from gradstream.wire import v1

WHAT_BYTES = 512
"""The most bytes that are kept of what is wrong with a gradient."""


class Offences:
    """The refused gradients of all workers.

    Args:
        progress: counts their minibatches as dropped.
        limit: number of refused gradients in a row for which a worker is quarantined, at least 1.
        whole_rounds: whether those of all workers in the round are left out with a refused gradient.
    """

    KEPT = ("_in_a_row", "_reasons")
    """See `durable.state`."""

    def __init__(self, progress: SampleProgress, limit: int, *, whole_rounds: bool = False) -> None:
        self._progress = progress
        self._limit = limit
        self._whole_rounds = whole_rounds
        self._in_a_row: dict[str, int] = {}
        self._reasons: dict[str, str] = {}

    def heard(self, who: str, beat: v1.Beat, workers: Collection[str]) -> tuple[list[Emit], str]:
        """Takes in what a worker reports of its gradients, up to the one with which the run ends.

        Args:
            who: the worker.
            beat: its report.
            workers: names of the workers that are in.

        Returns:
            The events of its refused gradients, and why the run ends with the last of them; "" if it goes on.
        """
        out, diverged = [], ""
        for refused in beat.refused:
            ref, what = ref_of(refused.batch), escaped(refused.what, WHAT_BYTES)
            self._progress.refused(ref, refused.samples, what, whole_round=self._whole_rounds)
            event = GradientRefusedEvent(
                who=who,
                step=refused.step,
                epoch=ref.epoch,
                batch=ref.batch,
                samples=refused.samples,
                what=what,
                in_a_row=refused.in_a_row,
            )
            out.append(Emit(event))
            if diverged := self._refused(who, refused.in_a_row, what, workers):
                break
        if beat.sound:  # its newest gradient is finite: the row ends
            self._in_a_row.pop(who, None)
        return out, diverged

    def _refused(self, who: str, in_a_row: int, what: str, workers: Collection[str]) -> str:
        """Counts a refused gradient. Returns why the run ends with it; "" if it goes on."""
        self._in_a_row[who] = in_a_row
        if in_a_row < self._limit:
            return ""
        gradients = "its last gradient was" if in_a_row == 1 else f"its last {in_a_row} gradients were"
        self._reasons[who] = f"quarantined, since {gradients} not finite ({what})"
        if not all(self._in_a_row.get(one) for one in workers):
            return ""
        whose = "of every worker" if len(workers) > 1 else "of the worker"
        return (
            f"{what}. The newest gradients {whose} are not finite, {in_a_row} in a row: the model has diverged. Lower "
            "the learning rate, scale the inputs, or clip the gradient. None of them is in the parameters"
        )

    def reason(self, who: str) -> str:
        """Why a worker is quarantined; "" if it is not."""
        return self._reasons.get(who, "")
