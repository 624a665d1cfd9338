"""Tells after which minibatches of a worker an evaluation is due."""

from __future__ import annotations

from collections.abc import Sequence

from gradstream.data.base import BatchRef
from gradstream.worker.evaluation import EvaluationPlan
from gradstream.worker.schedule import Schedule


class DueEvaluations:
    """Counts the evaluations of a run, as its minibatches come.

    Args:
        plan: when the run evaluates.
        schedule: tells the place of each minibatch in the run.

    Attributes:
        late: this worker has joined after training had begun: the evaluations before that are not its own.
    """

    def __init__(self, plan: EvaluationPlan, schedule: Schedule) -> None:
        self.late = False
        self._plan = plan
        self._schedule = schedule
        self._num_due: int | None = None  # number of evaluations up to the last minibatch

    def newly_due(self, refs: Sequence[BatchRef]) -> int | None:
        """The step after which an evaluation has become due with these minibatches; None for none.

        A worker that takes minibatches from a queue may get none of that step: then its first one of a later step
        counts. No evaluation is due after the very last step, since the final parameters are evaluated anyway.
        """
        last = self._schedule.position(refs[-1])
        period = self._plan.period(last)
        if period is None:
            return None
        if self._num_due is None:
            begin = self._schedule.position(refs[0]) if self.late else self._schedule.first
            self._num_due = begin.step // period
        before = self._num_due
        self._num_due = max(before, (last.step + 1) // period)
        over = last.step + 1 >= last.num_steps
        return self._num_due * period if self._num_due > before and not over else None
