"""What a member may claim, before anything of it is believed: a pure check of its messages.

A message that parses may still say what cannot be: a batch that the run does not have, a shard's receipts, a
rank that does not exist, seconds that are no number. Such a message is refused as a whole and changes
nothing.
"""

from __future__ import annotations

import math

from gradstream.coordinator.receipts import ref_of
from gradstream.data.ledger import Ledger
from gradstream.data.open_ledger import OpenLedger
from gradstream.errors import RefusedError
from gradstream.wire import v1

__all__ = ["MAX_COUNT", "Claims"]

MAX_COUNT = 1 << 53
"""No run counts further."""

MOST_EPOCHS_BACK = 1 << 10
"""Of which a worker still knows all minibatches."""

MOST_PER_S = 1e12
"""Samples: no worker is faster."""


class Claims:
    """Holds messages against the plan of the run.

    Args:
        ledger: which batches there are.
        num_workers: ranks are below.
        first_round: of the run, where it is resumed.
        quorum: verdicts tell what is in the model.
    """

    def __init__(
        self, ledger: Ledger | OpenLedger, num_workers: int, *, first_round: int = 0, quorum: bool = False
    ) -> None:
        self._ledger = ledger
        self._num_workers = num_workers
        self._first_round = first_round
        self._quorum = quorum

    def check_beat(self, node: v1.Node, beat: v1.Beat) -> None:
        """Raises RefusedError for a beat that its member cannot have to say."""
        is_worker = node.role == "worker"
        if not is_worker and (beat.receipts or beat.finished or beat.quiesced or beat.begun):
            raise self._bad(node.name, "only workers have receipts, finish, stand, or begin epochs")
        for one in beat.begun:
            self._check_begun(node.name, one)
        for receipt in beat.receipts:
            ref = ref_of(receipt)
            if not self._ledger.knows(ref, node.rank):
                raise self._bad(node.name, f"a receipt for {ref}, which is no minibatch of this run")
        if beat.verdicts and (not self._quorum or node.name != "shard-0"):
            raise self._bad(node.name, "a verdict; expected them from shard-0 alone, where there is a quorum")
        for verdict in beat.verdicts:
            self._check_verdict(node.name, verdict)
        for report in beat.snapshots:
            if report.kind not in v1.SnapshotReport.Kind.values():
                raise self._bad(node.name, f"a report of unknown kind {report.kind}")
            if report.count > self._ledger.most_begun:
                raise self._bad(node.name, f"{report.count} minibatches begun, of {self._ledger.most_begun}")

    def _check_verdict(self, who: str, verdict: v1.Verdict) -> None:
        ranks = list(verdict.ranks)
        if not ranks or len(set(ranks)) < len(ranks) or max(ranks) >= self._num_workers:
            raise self._bad(
                who, f"a verdict of ranks {ranks[:8]}; expected each once, of {self._num_workers}"
            )
        round_ = verdict.round - self._first_round
        if isinstance(self._ledger, Ledger) and not self._ledger.has_round(round_):
            raise self._bad(who, f"a verdict on round {verdict.round}, which this run does not have")

    def check_ending(self, who: str, request: v1.Ending) -> None:
        """Raises RefusedError for counts that no worker has got to."""
        if max(request.batches, request.samples, request.round) > MAX_COUNT:
            raise self._bad(who, f"an end after {request.batches} minibatches of {request.samples} samples")

    def check_take_over(self, who: str, request: v1.TakeOver) -> None:
        """Raises RefusedError for parts of a division among other workers, or that no worker has got to."""
        parts = list(request.parts)
        self._check_begun(who, request.epoch)
        if (parts or request.per_step) and (len(parts) != self._num_workers or max(parts) > MAX_COUNT):
            raise self._bad(who, f"parts of {parts[:8]} minibatches; expected one of each worker")
        if not request.epoch.step <= request.step <= MAX_COUNT:
            raise self._bad(who, f"an epoch from step {request.epoch.step} to {request.step}")
        if request.oldest > request.epoch.epoch or request.epoch.epoch - request.oldest > MOST_EPOCHS_BACK:
            raise self._bad(who, f"knowledge of epochs {request.oldest} to {request.epoch.epoch}")

    def _check_begun(self, who: str, begun: v1.Begun) -> None:
        if abs(begun.step) > MAX_COUNT:
            raise self._bad(who, f"an epoch from step {begun.step}")

    def check_took(self, who: str, rank: int, request: v1.Took) -> None:
        """Raises RefusedError for a round that is not planned, or a measurement that is none."""
        self._check_measured(who, request)
        ledger = self._ledger
        if not isinstance(ledger, Ledger) or not (
            request.epoch < ledger.num_epochs and request.batch < ledger.plan.batches_in(rank, request.epoch)
        ):
            raise self._bad(who, f"shares of round {request.batch} of epoch {request.epoch}: not planned")

    def check_ask(self, who: str, request: v1.Ask) -> None:
        """Raises RefusedError for a measurement that is none."""
        self._check_measured(who, request)

    def _check_measured(self, who: str, request: v1.Took | v1.Ask) -> None:
        measured = (request.rounds, request.samples, request.seconds, request.squares)
        if not all(math.isfinite(value) and 0 <= value <= MAX_COUNT for value in measured):
            raise self._bad(who, f"a measurement of {measured}; expected finite numbers from 0 on")
        if 0 < request.samples < 1 or request.samples > MOST_PER_S * request.seconds:
            raise self._bad(who, f"{request.samples:g} samples in {request.seconds:g} s")

    @staticmethod
    def _bad(who: str, message: str) -> RefusedError:
        return RefusedError("coordinator", "BAD_REQUEST", f"{who} says what cannot be: {message}")
