"""Checks the requests of workers before anything in them is believed. Pure. Reports are checked by their `Lead`.

A message that parses may still be impossible: a minibatch that the run does not have, receipts of a shard, a
rank that does not exist, seconds that are not a number. Such a message is refused as a whole and changes
nothing.
"""

from __future__ import annotations

import math

from gradstream.coordinator.lead import impossible
from gradstream.coordinator.progress import MAX_COUNT, check_begun
from gradstream.data.ledger import Ledger
from gradstream.data.open_ledger import OpenLedger
from gradstream.wire import v1

MOST_EPOCHS_BACK = 1 << 10
"""For so many epochs a worker still knows all minibatches."""

MOST_PER_S = 1e12
"""Samples per second: no worker is faster."""


class RequestChecks:
    """Compares requests with the plan of the run. All methods raise RefusedError for an impossible one.

    Args:
        ledger: the minibatches of the run.
        num_workers: number of workers; ranks are smaller.
    """

    def __init__(self, ledger: Ledger | OpenLedger, num_workers: int) -> None:
        self._ledger = ledger
        self._num_workers = num_workers

    def ending(self, who: str, request: v1.Ending) -> None:
        """Checks the counts of a worker that has no minibatches left."""
        if max(request.batches, request.samples, request.round) > MAX_COUNT:
            raise impossible(
                who,
                f"an end in round {request.round}, after {request.batches} minibatches of {request.samples} samples; "
                "expected at most 2^53",
            )

    def take_over(self, who: str, request: v1.TakeOver) -> None:
        """Checks how a worker says that an epoch is divided among the workers, and how far it has come."""
        parts = list(request.parts)
        check_begun(who, request.epoch)
        if (parts or request.per_step) and (len(parts) != self._num_workers or max(parts) > MAX_COUNT):
            raise impossible(
                who, f"parts of {parts[:8]} minibatches; expected {self._num_workers}, one a worker"
            )
        if not request.epoch.step <= request.step <= MAX_COUNT:
            raise impossible(
                who,
                f"an epoch from step {request.epoch.step} to {request.step}; expected an end from there on, up to 2^53",
            )
        if request.oldest > request.epoch.epoch or request.epoch.epoch - request.oldest > MOST_EPOCHS_BACK:
            raise impossible(
                who,
                f"knowledge of epochs {request.oldest} to {request.epoch.epoch}; expected at most "
                f"{MOST_EPOCHS_BACK} epochs back",
            )

    def took(self, who: str, rank: int, request: v1.Took) -> None:
        """Checks a request for the shares of a round."""
        self.measured(who, request)
        ledger = self._ledger
        if not isinstance(ledger, Ledger) or not (
            request.epoch < ledger.num_epochs and request.batch < ledger.plan.batches_in(rank, request.epoch)
        ):
            raise impossible(who, f"shares of round {request.batch} of epoch {request.epoch}: not planned")

    def measured(self, who: str, request: v1.Took | v1.Ask) -> None:
        """Checks the measured speed in a request."""
        measured = (request.rounds, request.samples, request.seconds, request.squares)
        if not all(math.isfinite(value) and 0 <= value <= MAX_COUNT for value in measured):
            raise impossible(who, f"a measurement of {measured}; expected finite numbers from 0 on")
        if 0 < request.samples < 1 or request.samples > MOST_PER_S * request.seconds:
            raise impossible(
                who,
                f"{request.samples:g} samples in {request.seconds:g} s; expected none, or 1 to "
                f"{MOST_PER_S:g} a second",
            )
