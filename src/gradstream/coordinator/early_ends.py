"""`EarlyEnds`: what ends a run, or a phase of its job, before its epochs do, or says how it goes on.

events of all nodes, samples in the model, time ──▶ EarlyEnds ──▶ `Lifecycle.finish`, `finish_phase`, `grow`
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from gradstream.checkpoint.manifest import Evaluated
from gradstream.coordinator.admission import Admission
from gradstream.coordinator.lead import Instruction, Lead
from gradstream.coordinator.lifecycle import Lifecycle
from gradstream.coordinator.link_choice import LinkChoice
from gradstream.coordinator.progress import SampleProgress
from gradstream.coordinator.snapshot_rounds import SnapshotRounds
from gradstream.coordinator.stopping import StoppingCriterion, score_of
from gradstream.wire.frames import itemsize_bytes

# ---- variance test -----------------------------------------------------------------------
# `VarianceTest`: says when the gradients of a run vary so much that its batches have to grow.
#
# A step of W workers, each with k minibatches of b samples, has n = Wkb samples. With V the sum of the variances of
# all elements of one sample's gradient, and G the mean gradient:
#
#     grow if        V · (1/n - 1/N) > θ²·|G|²
#     to             n' = 1 / (θ²·|G|²/V + 1/N)        that is k' = ⌈n' / (W·b)⌉ minibatches, at least k + 1
#
# N is the number of training samples, of which an epoch has each once: so much do means of n of them vary.
#
# V and G come from lengths that each worker has anyway: |gⱼ|² of its k minibatches, and |ḡ|² of their mean. Unbiased
# are
#
#     V    ≈ (mean |gⱼ|² - |ḡ|²) / (1/b - 1/(kb))
#     |G|² ≈ |ḡ|² - V · (1/(kb) - 1/N)
#
# so k is 2 or more. Both are averaged over steps and workers, each by itself, before they are compared: the mean of a
# quotient is not the quotient of the means. Nothing is computed at other samples, and nothing is exchanged.
#
# References: Byrd, Chin, Nocedal and Wu, "Sample size selection in optimization methods for machine learning",
# Mathematical Programming 134, 2012, whose test takes the sample variance of one step; the estimates over small and
# large batches are those of McCandlish and others, "An Empirical Model of Large-Batch Training", 2018, appendix A.

MEMORY = 0.95
"""Weight of the earlier steps in the moving means, for each step of a worker."""

FEWEST = 20
"""Steps, of all workers, before the means count."""


class VarianceTest:
    """Follows the steps of a phase while these have k minibatches.

    Args:
        theta: θ, in (0, 1) for the test of the paper; 1/√c keeps n at c times the gradient noise scale V/|G|².
        workers: W.
        accumulate: k, at least 2.
        largest: the most minibatches of a step.
        population: N; infinite in a stream.
    """

    KEPT = ("_variance", "_square", "_count")
    """See `durable.state`."""

    def __init__(
        self, theta: float, workers: int, accumulate: int, largest: int, population: float = math.inf
    ) -> None:
        self._theta = theta
        self._workers = workers
        self._accumulate = accumulate
        self._largest = largest
        self._population = population
        self._variance = 0.0
        self._square = 0.0
        self._count = 0

    def event(self, event: Mapping[str, Any]) -> int:
        """Takes an event of any node. Returns k', or 0 while batches are large enough, or as large as they get."""
        parts, whole = event.get("part_squares"), event.get("square")
        samples, k = event.get("samples", 0), self._accumulate
        if event["event"] != "step" or parts is None or whole is None or samples < k:
            return 0
        each = samples / k
        variance = (parts - whole) / (1 / each - 1 / samples)
        square = whole - variance * (1 / samples - 1 / self._population)
        self._count += 1
        weight = (1 - MEMORY) / (1 - MEMORY**self._count)  # unbiased from the first value on
        self._variance += weight * (variance - self._variance)
        self._square += weight * (square - self._square)
        return self._grown(each) if self._count >= FEWEST and k < self._largest else 0

    def _grown(self, each: float) -> int:
        enough, left = self._theta**2 * self._square, 1 / self._population
        if self._variance * (1 / (self._workers * self._accumulate * each) - left) <= enough:
            return 0
        share = max(0.0, enough) / self._variance + left  # 1/n'
        wanted = 1 / share / (self._workers * each) if share else math.inf
        return min(self._largest, max(self._accumulate + 1, math.ceil(min(wanted, self._largest))))


# ---- early ends --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EndCriteria:
    """What may end a run, or a phase of its job, early.

    Args:
        run: ends the run early; None lets it run to its last data epoch.
        phase: ends this phase of the job early; None lets it run to its last epoch or step.
        variance_test: makes the batches of this phase grow; None if nothing does.
        links: chooses how the next phase exchanges; None if the job says that.
    """

    run: StoppingCriterion | None = None
    phase: StoppingCriterion | None = None
    variance_test: VarianceTest | None = None
    links: LinkChoice | None = None


class EarlyEnds(Lead):
    """Looks whether a criterion is reached. What then has to happen comes as instructions.

    Args:
        criteria: what to look at.
        life: ends the run, or this phase.
        progress: counts the samples in the model.
        admission: has the model whose exchange the links are chosen for.
        snapshots: checkpoints say how good the latest evaluation was.
    """

    def __init__(
        self,
        criteria: EndCriteria,
        life: Lifecycle,
        progress: SampleProgress,
        admission: Admission,
        snapshots: SnapshotRounds,
    ) -> None:
        self._criteria = criteria
        self._life = life
        self._progress = progress
        self._admission = admission
        self._snapshots = snapshots

    def durable(self) -> dict[str, object]:
        """See `Lead`."""
        criteria = self._criteria
        parts = {
            "criterion": criteria.run,
            "phase_criterion": criteria.phase,
            "variance_test": criteria.variance_test,
            "links": criteria.links,
        }
        return {name: part for name, part in parts.items() if part is not None}

    @property
    def _each(self) -> Iterator[tuple[StoppingCriterion, Callable[[str, float], list[Instruction]]]]:
        """Each criterion, with what happens when it is reached."""
        if self._criteria.run is not None:
            yield self._criteria.run, self._life.finish
        if self._criteria.phase is not None:
            yield self._criteria.phase, self._life.finish_phase

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
            out += self._life.finish_phase(event["reason"], at_s)
        links, model = self._criteria.links, self._admission.model
        if links is not None and model is not None:
            links.event(event)
            size = (model.elems, itemsize_bytes(model.dtype))
            if event["event"] in ("step", "rehearsed"):
                reason = links.ends(*size)
                if reason or event["rank"] == 0:
                    self._life.chosen = links.chosen(*size).as_json()
                out += self._life.finish_phase(reason, at_s) if reason else []
        test = self._criteria.variance_test
        if test is not None and (grown := test.event(event)):
            out += self._life.grow(grown, at_s)
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
