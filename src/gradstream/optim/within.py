"""`Within`: a schedule in one phase of a run, whose positions count from the beginning of the phase or of the run."""

from __future__ import annotations

from dataclasses import dataclass

from gradstream.optim.schedules import Position, Rate, nominal_rate, rate_at


@dataclass(frozen=True, slots=True)
class Within:
    """The rate of `then` at a position of a phase: step t of the plan becomes step t - origin + before.

    Args:
        then: the schedule.
        origin: step of the phase's first minibatch, as its plan counts.
        before: steps that lie before the phase, for `then`.
        steps: number of steps that `then` has; None: as many as `epochs` have.
        epochs: number of data epochs that `then` has; None: from `origin` to the end of the phase.
    """

    then: Rate
    origin: int
    before: int = 0
    steps: int | None = None
    epochs: int | None = None

    @property
    def lr(self) -> float:
        """The `lr` of the schedule."""
        return nominal_rate(self.then)

    def __call__(self, position: Position) -> float:
        """The rate at a position."""
        total = self.steps
        if total is None and self.epochs is not None:
            total = self.epochs * position.steps_per_epoch
        if total is None:
            total = position.num_steps - self.origin
        step = position.step - self.origin + self.before
        return rate_at(self.then, Position(step, max(1, total), position.steps_per_epoch))
