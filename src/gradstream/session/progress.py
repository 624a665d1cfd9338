"""Counts of a training loop: steps and samples, now and before its run was resumed."""

from __future__ import annotations

from gradstream.errors import ConfigError


class LoopCounts:
    """Counts what a loop has handed to its worker since it began or was resumed.

    Args:
        gradients_only: whether only gradients are exchanged. Then the loop hands over one for each backward, and says
            itself when it has made a step; otherwise each hand-over is a step.

    Attributes:
        batches: gradients that were handed over.
        samples: samples behind them.
        iterations: iterations of a loop that calls `Session.skip`; 0 for other loops.
    """

    def __init__(self, *, gradients_only: bool) -> None:
        self.batches = self.samples = self.iterations = 0
        self._gradients_only = gradients_only
        self._steps = 0
        self._pending_samples = 0  # handed over since the last step

    def hand_over(self, samples: int, *, silent: bool = False) -> None:
        """Counts a gradient; a silent one belongs to no step of the loop."""
        self.batches += 1
        if not silent:
            self.samples += samples
            self._pending_samples += samples

    def step(self) -> None:
        """Counts a step that was made of all that was handed over."""
        self._steps = self.iterations or self._steps + 1
        self._pending_samples = 0

    @property
    def steps(self) -> int:
        """Steps of the loop. Where it calls `Session.skip`: iterations up to its last step."""
        return self._steps if self._gradients_only else self.batches

    @property
    def behind(self) -> tuple[int, int] | None:
        """See `Loop.behind`."""
        return (self._pending_samples, self._steps) if self._gradients_only else None


class ResumePoint:
    """Where a resumed loop goes on, and how far the script has skipped what it did before.

    Args:
        steps: steps that this worker made before the run was resumed; None if the run begins.

    Attributes:
        skipped: iterations that the script has skipped.
        asked: whether the script has asked where the run goes on.
    """

    def __init__(self, steps: int | None) -> None:
        self.skipped = 0
        self.asked = False
        self._steps = steps

    @property
    def is_resumed(self) -> bool:
        """Whether the run goes on from a checkpoint."""
        return self._steps is not None

    @property
    def steps(self) -> int:
        """Steps before the run was resumed."""
        return self._steps or 0

    def skip(self) -> bool:
        """Counts an iteration; True if it was done before the run was resumed."""
        self.asked = True
        if self.skipped == self.steps:
            return False
        self.skipped += 1
        return True

    def next_step(self, batches: int) -> int | None:
        """The number of the next step since the run was resumed: below 0 while the script skips.

        Args:
            batches: gradients that were handed over since.

        Returns:
            None while it cannot be known whether the script skips.
        """
        if self.steps and not batches and not self.skipped:
            return None
        return batches + (self.skipped - self.steps if self.skipped else 0)

    def check_asked(self) -> None:
        """Raises ConfigError if a resumed script makes steps without having asked where to go on."""
        if self.steps and not self.asked:
            raise ConfigError(
                f"this run was resumed at step {self.steps}, but the script begins its loop at the first step: "
                "skip the iterations that are done (`if session.skip(): continue` at the top of the loop), or "
                "begin the loop at session.step"
            )
