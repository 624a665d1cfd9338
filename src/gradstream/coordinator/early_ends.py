"""`EarlyEnds`: what ends a run, or a phase of its job, before its epochs do, or says how it goes on.

events of all nodes, samples in the model, time ──▶ EarlyEnds ──▶ `Membership.finish`, `cross`, `grow`
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from gradstream.coordinator.instructions import Instruction
from gradstream.coordinator.link_choice import LinkChoice
from gradstream.coordinator.membership import Membership
from gradstream.coordinator.run_clock import RunClock
from gradstream.coordinator.stopping import StoppingCriterion
from gradstream.coordinator.variance_test import VarianceTest
from gradstream.runtime.base import Runtime
from gradstream.wire.dtypes import itemsize_bytes


class EarlyEnds:
    """Looks whether a criterion is reached. What then has to happen comes as instructions.

    Args:
        membership: the state machine of the run.
        run: ends the run early; None lets it run to its last data epoch.
        phase: ends this phase of the job early; None lets it run to its last epoch or step.
        variance_test: makes the batches of this phase grow; None if nothing does.
        links: chooses how the next phase exchanges; None if the job says that.
    """

    def __init__(
        self,
        membership: Membership,
        run: StoppingCriterion | None = None,
        phase: StoppingCriterion | None = None,
        variance_test: VarianceTest | None = None,
        links: LinkChoice | None = None,
    ) -> None:
        self._membership = membership
        self._run = run
        self._phase = phase
        self._variance_test = variance_test
        self._links = links

    @property
    def parts(self) -> dict[str, object]:
        """What is kept for a new process of the coordinator, by name: see `durable.state`."""
        parts = {
            "criterion": self._run,
            "phase_criterion": self._phase,
            "variance_test": self._variance_test,
            "links": self._links,
        }
        return {name: part for name, part in parts.items() if part is not None}

    @property
    def _each(self) -> Iterator[tuple[StoppingCriterion, Callable[[str, float], list[Instruction]]]]:
        """Each criterion, with what happens when it is reached."""
        if self._run is not None:
            yield self._run, self._membership.finish
        if self._phase is not None:
            yield self._phase, self._membership.cross

    def begin(
        self,
        runtime: Runtime,
        clock: RunClock,
        reached: Callable[[Callable[[float], list[Instruction]]], None],
    ) -> None:
        """Sets the timers of criteria that go by time; `reached` gets what has to be asked for its instructions."""
        for criterion, end in self._each:
            if criterion.until.seconds is not None:
                left_s = max(0.0, criterion.until.seconds - clock.time_s())
                runtime.call_later(left_s, partial(reached, partial(end, criterion.timed())))

    def event(self, event: Mapping[str, Any], at_s: float) -> list[Instruction]:
        """Takes an event of any node, as it is in `events.jsonl`."""
        out: list[Instruction] = []
        if event["event"] == "converged":
            out += self._membership.cross(event["reason"], at_s)
        if self._links is not None and (model := self._membership.admission.model) is not None:
            self._links.event(event)
            size = (model.elems, itemsize_bytes(model.dtype))
            if event["event"] in ("step", "rehearsed"):
                reason = self._links.ends(*size)
                if reason or event["rank"] == 0:
                    self._membership.phases.chosen = self._links.chosen(*size).as_json()
                out += self._membership.cross(reason, at_s) if reason else []
        if self._variance_test is not None and (grown := self._variance_test.event(event)):
            out += self._membership.grow(grown, at_s)
        for criterion, end in self._each:
            if criterion.needs_events and (reason := criterion.event(event)):
                out += end(reason, at_s)
        return out

    def counted(self, at_s: float) -> list[Instruction]:
        """Looks at the number of samples in the model."""
        samples = self._membership.progress.num_samples
        reached = [(end, criterion.counted(samples)) for criterion, end in self._each]
        return [one for end, reason in reached if reason for one in end(reason, at_s)]
