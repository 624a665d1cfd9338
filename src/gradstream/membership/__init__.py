"""Who is in the run, under which epoch, and which batches are in the model."""

from gradstream.membership.coordinator import Coordinator, Outcome
from gradstream.membership.lifeline import EvictedError
from gradstream.membership.member import Member, RunAbortedError, RunStoppedError
from gradstream.membership.state import Membership

__all__ = [
    "Coordinator",
    "EvictedError",
    "Member",
    "Membership",
    "Outcome",
    "RunAbortedError",
    "RunStoppedError",
]
