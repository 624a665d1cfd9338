"""The coordinator: which nodes are in the run, and which minibatches are in the model."""

from gradstream.coordinator.client.member import (
    BoundaryError,
    DrainedError,
    Member,
    RunAbortedError,
    RunStoppedError,
)
from gradstream.coordinator.client.presence import EvictedError
from gradstream.coordinator.coordinator import Coordinator, RunOutcome
from gradstream.coordinator.membership import Membership

__all__ = [
    "BoundaryError",
    "Coordinator",
    "DrainedError",
    "EvictedError",
    "Member",
    "Membership",
    "RunAbortedError",
    "RunOutcome",
    "RunStoppedError",
]
