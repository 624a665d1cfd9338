"""Who is in the run, under which epoch, and which batches are in the model."""

from gradstream.membership.coordinator import Coordinator, Leases, Outcome
from gradstream.membership.member import Member, RunAbortedError, RunStoppedError
from gradstream.membership.state import Membership

__all__ = ["Coordinator", "Leases", "Member", "Membership", "Outcome", "RunAbortedError", "RunStoppedError"]
