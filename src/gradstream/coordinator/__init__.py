"""The coordinator: which nodes are in the run, and which minibatches are in the model."""

from gradstream.coordinator.client.member import (
    DrainedError,
    Member,
    PhaseOverError,
    RunAbortedError,
    RunStoppedError,
)
from gradstream.coordinator.client.presence import EvictedError
from gradstream.coordinator.coordinator import Coordinator, RunOutcome
from gradstream.coordinator.membership import Membership

__all__ = [
    "Coordinator",
    "DrainedError",
    "EvictedError",
    "Member",
    "Membership",
    "PhaseOverError",
    "RunAbortedError",
    "RunOutcome",
    "RunStoppedError",
]
