"""Which workers' gradients are not finite, and what becomes of the workers, as a pure state machine.

    a gradient is refused          the run goes on without it
    `limit` of a worker in a row   the worker is quarantined: it counts as lost from then on
    likewise, and the newest gradient of every other worker was refused, too:
                                   the model has diverged, and the run ends

A worker counts its own refused gradients in a row, since it alone knows their order.
"""

from __future__ import annotations

from collections.abc import Collection


class Offences:
    """The refused gradients of all workers.

    Args:
        limit: number of refused gradients in a row for which a worker is quarantined, at least 1.
    """

    KEPT = ("_in_a_row", "_reasons")
    """See `durable.state`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._in_a_row: dict[str, int] = {}
        self._reasons: dict[str, str] = {}

    def refused(self, who: str, in_a_row: int, what: str, workers: Collection[str]) -> str:
        """Takes note of a refused gradient. Returns why the run ends with it; "" if it goes on.

        Args:
            who: the worker.
            in_a_row: number of its refused gradients in a row, with this one.
            what: what is wrong with it.
            workers: names of the workers that are in.
        """
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

    def sound(self, who: str) -> None:
        """Takes note that a worker's newest gradient is finite: the row ends."""
        self._in_a_row.pop(who, None)

    def reason(self, who: str) -> str:
        """Why a worker is quarantined; "" if it is not."""
        return self._reasons.get(who, "")
