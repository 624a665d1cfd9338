"""Criteria that end a run before its last data epoch: a pure state machine of events and counts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from typing_extensions import override

from gradstream.checkpoint.manifest import Evaluated
from gradstream.coordinator.lead import Instruction, Lead
from gradstream.coordinator.lifecycle import Lifecycle
from gradstream.coordinator.progress import SampleProgress
from gradstream.coordinator.snapshot_rounds import SnapshotRounds
from gradstream.errors import ConfigError

MEMORY = 0.95
"""Weight of the earlier losses in the moving mean, for each minibatch."""

_MODES = {"accuracy": "max", "test_loss": "min"}

FEWEST = 20
"""Minibatches before the training loss counts: a single low loss is no progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Until:
    """The criteria that end a run, whichever is reached first. Made by `until`.

    Args:
        accuracy: smallest accuracy on held-out samples, in (0, 1]. Needs `evaluate_every`.
        loss: largest training loss, as the moving mean over about 20 minibatches of all workers.
        test_loss: largest loss on held-out samples. Needs `evaluate_every`.
        seconds: training time.
        samples: number of samples in the model.
        monitor: figure of the evaluations to which `reaches` and `patience` apply: "accuracy", "test_loss", or the name
            of a metric. None is "test_loss". Needs `evaluate_every`.
        mode: whether its largest value is the best, "max", or its smallest, "min". None is right for the first two.
        reaches: value of `monitor` that is good enough.
        patience: number of consecutive evaluations without a new best after which the run ends.

    Raises:
        ConfigError: no criterion, or one out of its range.
    """

    accuracy: float | None = None
    loss: float | None = None
    test_loss: float | None = None
    seconds: float | None = None
    samples: int | None = None
    monitor: str | None = None
    mode: Literal["min", "max"] | None = None
    reaches: float | None = None
    patience: int | None = None

    def __post_init__(self) -> None:
        goals = {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
        figure, mode = goals.pop("monitor", None), goals.pop("mode", None)
        if (figure or mode) and not self.monitors:
            raise ConfigError(f"until: monitor={figure!r} needs reaches or patience")
        if not goals:
            raise ConfigError(
                "until: no criterion; expected accuracy, loss, test_loss, seconds, samples, reaches or patience"
            )
        if self.monitors and mode not in ("min", "max") and (mode or figure not in (None, *_MODES)):
            raise ConfigError(
                f"until: mode is {mode!r}; expected 'max' if the largest {self.monitors} is the best, or 'min'"
            )
        for name, value in goals.items():
            number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            of_loss = name in ("loss", "test_loss", "reaches")
            if not number or (value <= 0 and not of_loss) or (name == "accuracy" and value > 1):
                expected = "a finite number" if of_loss else "a number > 0"
                expected = "a number in (0, 1]" if name == "accuracy" else expected
                raise ConfigError(f"until: {name} is {value!r}; expected {expected}")

    @property
    def monitors(self) -> str:
        """The figure to which `reaches` and `patience` apply; "" without either."""
        return "" if self.reaches is None and self.patience is None else self.monitor or "test_loss"

    def score(
        self, accuracy: float | None, test_loss: float | None, metrics: Mapping[str, float | None]
    ) -> float | None:
        """The monitored figure of an evaluation, with the sign for which larger is better; None if it has none."""
        value = {**metrics, "accuracy": accuracy, "test_loss": test_loss}.get(self.monitors)
        return None if value is None else self.sign * value

    @property
    def sign(self) -> int:
        """-1 if the smallest value of the monitored figure is the best, else 1."""
        return -1 if (self.mode or _MODES.get(self.monitors)) == "min" else 1

    @property
    def evaluated(self) -> dict[str, float]:
        """The criteria that only evaluations can reach."""
        names = ("accuracy", "test_loss", "reaches", "patience")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    @property
    def goals(self) -> set[str]:
        """The figures of evaluations that these criteria use."""
        both = {"accuracy": self.accuracy, "test_loss": self.test_loss}
        return {name for name, value in both.items() if value is not None} | {self.monitors} - {""}


def until(
    *,
    accuracy: float | None = None,
    loss: float | None = None,
    test_loss: float | None = None,
    seconds: float | None = None,
    samples: int | None = None,
    monitor: str | None = None,
    mode: Literal["min", "max"] | None = None,
    reaches: float | None = None,
    patience: int | None = None,
) -> Until:
    """Ends a run before its epochs or steps do, by whichever criterion is reached first: see `Until`.

    Example:
        >>> until(accuracy=0.9, seconds=3600).accuracy
        0.9
        >>> until(monitor="f1", mode="max", reaches=0.8, patience=5).monitors
        'f1'
    """
    return Until(
        accuracy=accuracy,
        loss=loss,
        test_loss=test_loss,
        seconds=seconds,
        samples=samples,
        monitor=monitor,
        mode=mode,
        reaches=reaches,
        patience=patience,
    )


def score_of(event: Mapping[str, Any], until: Until) -> float | None:
    """`Until.score` of an event "evaluated"."""
    return until.score(event["accuracy"], event["loss"], event.get("metrics", {}))


class StoppingCriterion:
    """Follows a run, and says when a criterion is reached.

    Each method returns the criterion that was reached, or "".

    Args:
        until: the criteria.
    """

    KEPT = ("_loss", "_num_losses", "_best", "_worse")
    """See `durable.state`."""

    def __init__(self, until: Until) -> None:
        self.until = until
        self._loss = 0.0
        self._num_losses = 0
        self._best: float | None = None
        self._worse = 0  # evaluations since the best one

    @property
    def needs_events(self) -> bool:
        """Whether `event` must be called with all events."""
        return bool(self.until.evaluated) or self.until.loss is not None

    def event(self, event: Mapping[str, Any]) -> str:
        """Takes an event of any node, as it is in `events.jsonl`."""
        match event["event"]:
            case "step" if event["loss"] is not None and event["samples"]:
                return self._stepped(event["loss"])
            case "evaluated":
                return self._evaluated(event)
            case _:
                return ""

    def _stepped(self, loss: float) -> str:
        self._num_losses += 1
        weight = (1 - MEMORY) / (1 - MEMORY**self._num_losses)  # unbiased from the first value on
        self._loss += weight * (loss - self._loss)
        if self.until.loss is None or self._num_losses < FEWEST or self._loss > self.until.loss:
            return ""
        return f"training loss {self._loss:.4g} <= {self.until.loss:g}"

    def _evaluated(self, event: Mapping[str, Any]) -> str:
        accuracy, wanted = event["accuracy"], self.until.accuracy
        if accuracy is not None and wanted is not None and accuracy >= wanted:
            return f"accuracy {accuracy:.4g} >= {wanted:g} after step {event['step']}"
        loss, largest = event["loss"], self.until.test_loss
        if loss is not None and largest is not None and loss <= largest:
            return f"test loss {loss:.4g} <= {largest:g} after step {event['step']}"
        return self._monitored(event) if self.until.monitors else ""

    def _monitored(self, event: Mapping[str, Any]) -> str:
        until, name = self.until, self.until.monitors
        score, sign = score_of(event, until), until.sign
        if score is None:
            return ""
        value = sign * score
        if until.reaches is not None and score >= sign * until.reaches:
            return f"{name} {value:.4g} {'<=' if sign < 0 else '>='} {until.reaches:g} after step {event['step']}"
        if self._best is None or score > sign * self._best:
            self._best, self._worse = value, 0
        else:
            self._worse += 1
        if until.patience is None or self._worse < until.patience:
            return ""
        return (
            f"{name} {value:.4g} after step {event['step']}, {self._worse} evaluations after its best, "
            f"{self._best:.4g}"
        )

    def counted(self, samples: int | None) -> str:
        """Takes the number of samples in the model; None in a stream that does not count them."""
        wanted = self.until.samples
        return f"{samples:,} samples >= {wanted:,}" if samples and wanted and samples >= wanted else ""

    def timed(self) -> str:
        """Returns the reason for the end after `until.seconds`."""
        return f"{self.until.seconds:g} s of training"


# ---- early ends --------------------------------------------------------------------------
# `EarlyEnds`: what ends a run, or one of its plans, before its epochs or steps do.
#
# events of all nodes, samples in the model, time ──▶ EarlyEnds ──▶ `Lifecycle.finish`, `finish_plan`

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
