"""`LastAttempt`: how far the run was when a checkpoint was tried last, so that it is known when the next one is due."""

from __future__ import annotations

from gradstream.checkpoint.policy import Policy
from gradstream.coordinator.progress import SampleProgress


class LastAttempt:
    """The latest attempt to make a checkpoint; before the first, the begin of the run.

    Args:
        progress: the steps and data epochs in the model.
    """

    KEPT = ("_latest", "_since_s", "_begun_s")
    """See `durable.state`."""

    def __init__(self, progress: SampleProgress) -> None:
        self._progress = progress
        self._latest = self._reached
        self._since_s: float | None = None  # since when no snapshot was tried
        self._begun_s = 0.0

    @property
    def _reached(self) -> tuple[int, int]:
        """Steps and data epochs in the model."""
        return self._progress.step, self._progress.ledger.num_complete

    def begin(self, at_s: float) -> None:
        """Begins the time of a run that has made no attempt yet."""
        if self._since_s is None:
            self._since_s = self._begun_s = at_s

    def begun(self, at_s: float) -> None:
        """Notes that an attempt begins."""
        self._latest, self._since_s = self._reached, at_s

    def failed(self, at_s: float) -> None:
        """Notes that the attempt has failed. The time until the next one begins anew."""
        self._since_s = at_s

    def is_due(self, policy: Policy, at_s: float) -> bool:
        """Whether the next checkpoint is due."""
        (steps, epochs), (step, epoch) = self._reached, self._latest
        since_s = at_s if self._since_s is None else self._since_s
        seconds, before_s = at_s - since_s, since_s - self._begun_s
        return policy.due(steps=steps - step, epochs=epochs - epoch, seconds=seconds, before_s=before_s)
