"""Criteria that end a run before its last data epoch: a pure state machine of events and counts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gradstream.errors import ConfigError

MEMORY = 0.95
"""Weight of the earlier losses in the moving mean, for each minibatch."""

FEWEST = 20
"""Minibatches before the training loss counts: one low loss is no progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Until:
    """The criteria that end a run; the first that is reached does. Made by `until`.

    Args:
        accuracy: smallest accuracy on held-out samples, in (0, 1]. Needs `evaluate_every`.
        loss: largest training loss, as the moving mean over about 20 minibatches of all workers.
        test_loss: largest loss on held-out samples. Needs `evaluate_every`.
        seconds: training time.
        samples: number of samples in the model.

    Raises:
        ConfigError: no criterion, or one out of its range.
    """

    accuracy: float | None = None
    loss: float | None = None
    test_loss: float | None = None
    seconds: float | None = None
    samples: int | None = None

    def __post_init__(self) -> None:
        given = {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
        if not given:
            raise ConfigError("until: no criterion; expected accuracy, loss, test_loss, seconds or samples")
        for name, value in given.items():
            number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            of_loss = name in ("loss", "test_loss")
            if not number or (value <= 0 and not of_loss) or (name == "accuracy" and value > 1):
                expected = "a finite number" if of_loss else "a number > 0"
                expected = "a number in (0, 1]" if name == "accuracy" else expected
                raise ConfigError(f"until: {name} is {value!r}; expected {expected}")

    @property
    def evaluated(self) -> dict[str, float]:
        """The criteria that only evaluations can reach."""
        both = {"accuracy": self.accuracy, "test_loss": self.test_loss}
        return {name: value for name, value in both.items() if value is not None}


def until(
    *,
    accuracy: float | None = None,
    loss: float | None = None,
    test_loss: float | None = None,
    seconds: float | None = None,
    samples: int | None = None,
) -> Until:
    """Ends a run before its epochs or steps do, with the first criterion that is reached: see `Until`.

    Example:
        >>> until(accuracy=0.9, seconds=3600)
        Until(accuracy=0.9, loss=None, test_loss=None, seconds=3600, samples=None)
    """
    return Until(accuracy=accuracy, loss=loss, test_loss=test_loss, seconds=seconds, samples=samples)


class StoppingCriterion:
    """Follows a run, and says when a criterion is reached.

    Each method returns the criterion that was reached, or "".

    Args:
        until: the criteria.
    """

    KEPT = ("_loss", "_num_losses")
    """See `durable.state`."""

    def __init__(self, until: Until) -> None:
        self.until = until
        self._loss = 0.0
        self._num_losses = 0

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
        return ""

    def counted(self, samples: int | None) -> str:
        """Takes the number of samples in the model; None in a stream that does not count them."""
        wanted = self.until.samples
        return f"{samples:,} samples >= {wanted:,}" if samples and wanted and samples >= wanted else ""

    def timed(self) -> str:
        """Returns the reason for the end after `until.seconds`."""
        return f"{self.until.seconds:g} s of training"
