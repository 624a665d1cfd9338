"""`BatchDistribution`: how the minibatches of a run reach its workers."""

from __future__ import annotations

from dataclasses import dataclass

from gradstream.coordinator.assignment import BatchAssignment
from gradstream.coordinator.balance import ShareBalance
from gradstream.coordinator.participation import ParticipationSchedule
from gradstream.data.ledger import Ledger
from gradstream.data.open_ledger import OpenLedger

__all__ = ["BatchDistribution"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchDistribution:
    """The account of all minibatches, and what decides which worker gets which.

    Args:
        ledger: records which minibatches are in the model.
        balance: decides the shares of a round by measured speed; None leaves them as planned.
        assignment: hands out minibatches to workers that ask; None where workers go through rounds, or bring
            data of their own.
        participation: which workers take part, where the strategy decides that; None where all do.
    """

    ledger: Ledger | OpenLedger
    balance: ShareBalance | None = None
    assignment: BatchAssignment | None = None
    participation: ParticipationSchedule | None = None
