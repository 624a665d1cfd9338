"""`EarlyEnds`: what ends a run, or one of its plans, before its epochs or steps do.

events of all nodes, samples in the model, time ──▶ EarlyEnds ──▶ `Lifecycle.finish`, `finish_plan`
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from typing_extensions import override

from gradstream.checkpoint.manifest import Evaluated
from gradstream.coordinator.lead import Instruction, Lead
from gradstream.coordinator.lifecycle import Lifecycle
from gradstream.coordinator.progress import SampleProgress
from gradstream.coordinator.snapshot_rounds import SnapshotRounds
from gradstream.coordinator.stopping import StoppingCriterion, Until, score_of

Ending = tuple[StoppingCriterion, Callable[[str, float], list[Instruction]]]
"""A criterion, and what happens when it is reached."""


class EarlyEnds(Lead):
    """Looks whether a criterion is reached. What then has to happen comes as instructions.

    Args:
        run: ends the run early; None lets it run to its last data epoch.
        plan: ends this plan early; None lets it run to its last epoch or step.
        life: ends the run, or this plan.
        progress: counts the samples in the model.
        snapshots: checkpoints say how good the latest evaluation was.
    """

    def __init__(
        self,
        run: Until | None,
        plan: Until | None,
        life: Lifecycle,
        progress: SampleProgress,
        snapshots: SnapshotRounds,
    ) -> None:
        named = {"criterion": (run, life.finish), "plan_criterion": (plan, life.finish_plan)}
        self._named: dict[str, Ending] = {
            name: (StoppingCriterion(until), end) for name, (until, end) in named.items() if until is not None
        }
        self._life = life
        self._progress = progress
        self._snapshots = snapshots

    @override
    def durable(self) -> dict[str, object]:
        return {name: criterion for name, (criterion, _) in self._named.items()}

    @property
    def _each(self) -> Sequence[Ending]:
        return list(self._named.values())

    def timers(self) -> list[tuple[float, Callable[[float], list[Instruction]]]]:
        """When the criteria are reached that go by time."""
        return [
            (criterion.until.seconds, partial(end, criterion.timed()))
            for criterion, end in self._each
            if criterion.until.seconds is not None
        ]

    def on_event(self, event: Mapping[str, Any], at_s: float) -> list[Instruction]:
        """Looks at an event of any node."""
        out: list[Instruction] = []
        if event["event"] == "evaluated":
            score = self._score(event)
            self._snapshots.evaluated = Evaluated(event["step"], event["accuracy"], event["loss"], score)
        if event["event"] == "converged":
            out += self._life.finish_plan(event["reason"], at_s)
        for criterion, end in self._each:
            if criterion.needs_events and (reason := criterion.event(event)):
                out += end(reason, at_s)
        return out

    def _score(self, event: Mapping[str, Any]) -> float | None:
        """What the first criterion that monitors a figure says of an event "evaluated": see `Until.score`."""
        watched = [criterion.until for criterion, _ in self._each if criterion.until.monitors]
        return score_of(event, watched[0]) if watched else None

    def on_progress(self, at_s: float) -> list[Instruction]:
        """Looks at the number of samples in the model."""
        samples = self._progress.num_samples
        reached = [(end, criterion.counted(samples)) for criterion, end in self._each]
        return [one for end, reason in reached if reason for one in end(reason, at_s)]
