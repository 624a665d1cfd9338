"""Refused gradients: gradients that are not finite, and what happens to their workers. A pure state machine.

    a gradient is refused          the run goes on without it
    `limit` of a worker in a row   the worker is quarantined: it counts as lost from then on
    likewise, and the newest gradient of every other worker was refused, too:
                                   the model has diverged, and the run ends

A worker counts its own refused gradients in a row, since it alone knows their order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from typing_extensions import override

from gradstream.coordinator.lead import WORKERS, Emit, Instruction, Lead, impossible
from gradstream.coordinator.nodes import Nodes
from gradstream.coordinator.progress import MAX_COUNT, SampleProgress, ref_of
from gradstream.errors import NonFiniteError
from gradstream.telemetry.events import GradientRefusedEvent
from gradstream.untrusted import escaped
from gradstream.wire import v1

WHAT_BYTES = 512
"""Most bytes to keep of what is wrong with a gradient."""


class RefusedGradients(Lead):
    """The refused gradients of all workers.

    Args:
        progress: counts their minibatches as dropped.
        nodes: the members, from which it expels quarantined workers.
        limit: number of consecutive refused gradients after which a worker is quarantined, at least 1.
        abort: ends the run; takes the node, the name of the error, and what happened.
        whole_rounds: whether a refused gradient makes all workers skip the round.
    """

    KEPT = ("_in_a_row",)
    """See `durable.state`."""

    REPORTS: ClassVar = {"refused": WORKERS, "sound": WORKERS}

    def __init__(
        self,
        progress: SampleProgress,
        nodes: Nodes,
        limit: int,
        abort: Callable[[str, str, str], Sequence[Instruction]],
        *,
        whole_rounds: bool = False,
    ) -> None:
        self._progress = progress
        self._nodes = nodes
        self._limit = limit
        self._abort = abort
        self._whole_rounds = whole_rounds
        self._in_a_row: dict[str, int] = {}

    @override
    def check(self, node: v1.Node, kind: str, report: v1.Refused | bool) -> None:
        if isinstance(report, bool):
            return
        ref = ref_of(report.batch)
        if not self._progress.ledger.knows(ref, node.rank):
            raise impossible(node.name, f"a gradient of {ref}, which is no minibatch of this run")
        if max(report.samples, report.step) > MAX_COUNT:
            text = f"a gradient of {report.samples} samples in step {report.step}; expected at most 2^53"
            raise impossible(node.name, text)

    def on_report(
        self, node: v1.Node, kind: str, report: v1.Refused | bool, at_s: float
    ) -> list[Instruction]:
        """Handles a refused gradient, or a report that a worker's newest gradient is finite, which resets its count."""
        who = node.name
        if isinstance(report, bool):
            self._in_a_row.pop(who, None)
            return []
        ref, what = ref_of(report.batch), escaped(report.what, WHAT_BYTES)
        self._progress.refused(ref, report.samples, what, whole_round=self._whole_rounds)
        event = GradientRefusedEvent(
            who=who,
            step=report.step,
            epoch=ref.epoch,
            batch=ref.batch,
            samples=report.samples,
            what=what,
            in_a_row=report.in_a_row,
        )
        diverged = self._count(who, report.in_a_row, what)
        return [Emit(event), *(self._abort(who, NonFiniteError.__name__, diverged) if diverged else ())]

    def _count(self, who: str, in_a_row: int, what: str) -> str:
        """Counts a refused gradient. Returns why it ends the run; "" if the run goes on."""
        self._in_a_row[who] = in_a_row
        if in_a_row < self._limit:
            return ""
        gradients = "its last gradient was" if in_a_row == 1 else f"its last {in_a_row} gradients were"
        self._nodes.expelled[who] = f"quarantined, since {gradients} not finite ({what})"
        workers = self._nodes.worker_names
        if not all(self._in_a_row.get(worker) for worker in workers):
            return ""
        whose = "of every worker" if len(workers) > 1 else "of the worker"
        return (
            f"{what}. The newest gradients {whose} are not finite, {in_a_row} in a row: the model has diverged. Lower "
            "the learning rate, scale the inputs, or clip the gradient. None of them is in the parameters"
        )
