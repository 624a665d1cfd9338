"""Checks the messages of members before anything in them is believed. Pure.

A message that parses may still be impossible: a minibatch that the run does not have, receipts of a shard, a
rank that does not exist, seconds that are not a number. Such a message is refused as a whole and changes
nothing.
"""

from __future__ import annotations

import math

from gradstream.coordinator.progress import ref_of
from gradstream.data.ledger import Ledger
from gradstream.data.open_ledger import OpenLedger
from gradstream.errors import RefusedError
from gradstream.transport.methods import worker_rank
from gradstream.wire import v1

MAX_COUNT = 1 << 53
"""The largest count that is accepted."""

MOST_EPOCHS_BACK = 1 << 10
"""For so many epochs a worker still knows all minibatches."""

MOST_PER_S = 1e12
"""Samples per second: no worker is faster."""


class MessageChecks:
    """Compares messages with the plan of the run. All methods raise RefusedError for an impossible message.

    Args:
        ledger: the minibatches of the run.
        num_workers: number of workers; ranks are smaller.
        first_round: number of the run's first round; not 0 in a resumed run.
        quorum: whether the run has a quorum, so that the first shard sends verdicts.
    """

    def __init__(
        self, ledger: Ledger | OpenLedger, num_workers: int, *, first_round: int = 0, quorum: bool = False
    ) -> None:
        self._ledger = ledger
        self._num_workers = num_workers
        self._first_round = first_round
        self._quorum = quorum

    def beat(self, node: v1.Node, beat: v1.Beat) -> None:
        """Checks a beat of a member."""
        is_worker = node.role == "worker"
        of_workers = (
            beat.receipts,
            beat.finished,
            beat.quiesced,
            beat.begun,
            beat.leaves,
            beat.refused,
            beat.sound,
            beat.handed,
            beat.broken,
        )
        if not is_worker and any(of_workers):
            raise _impossible(
                node.name,
                "only workers have receipts, gradients and groups, finish, are paused, or begin epochs",
            )
        if any(one.rank >= self._num_workers or one.round > MAX_COUNT for one in beat.handed):
            raise _impossible(
                node.name,
                f"it hands over (worker, round) {[(one.rank, one.round) for one in beat.handed][:4]}; expected workers "
                f"below {self._num_workers} and rounds up to 2^53",
            )
        for one in beat.begun:
            _check_begun(node.name, one)
        for receipt in beat.receipts:
            ref = ref_of(receipt)
            if not self._ledger.knows(ref, node.rank):
                raise _impossible(node.name, f"a receipt for {ref}, which is no minibatch of this run")
        for refused in beat.refused:
            self._check_refused(node, refused)
        self._check_of_shards(node, beat)
        if beat.verdicts and (not self._quorum or node.name != "shard-0"):
            raise _impossible(
                node.name, "a verdict; expected them from shard-0 alone, where there is a quorum"
            )
        for verdict in beat.verdicts:
            self._check_verdict(node.name, verdict)
        for report in beat.snapshots:
            if report.kind not in v1.SnapshotReport.Kind.values():
                raise _impossible(node.name, f"a report of unknown kind {report.kind}")
            if report.count > self._ledger.most_begun:
                raise _impossible(
                    node.name, f"{report.count} minibatches begun; expected at most {self._ledger.most_begun}"
                )

    def _check_refused(self, node: v1.Node, refused: v1.Refused) -> None:
        ref = ref_of(refused.batch)
        if not self._ledger.knows(ref, node.rank):
            raise _impossible(node.name, f"a gradient of {ref}, which is no minibatch of this run")
        if max(refused.samples, refused.step) > MAX_COUNT:
            raise _impossible(
                node.name,
                f"a gradient of {refused.samples} samples in step {refused.step}; expected at most 2^53",
            )

    def _check_of_shards(self, node: v1.Node, beat: v1.Beat) -> None:
        culprit = beat.failure.culprit
        if culprit and (node.role != "shard" or worker_rank(culprit) is None):
            raise _impossible(node.name, "only shards blame others for a failure, and they blame workers")
        if (beat.estates and node.role != "shard") or (beat.redone and node.role == "shard"):
            raise _impossible(node.name, "only shards report estates, and only workers redo pushes")
        if (beat.backed_up or beat.HasField("resharded")) and node.role != "shard":
            raise _impossible(node.name, "only shards have backups, or get chunks of others")
        ranks = [worker_rank(one.sender) for one in beat.estates]
        if any(rank is None or rank >= self._num_workers for rank in ranks) or any(
            one.gradients > MAX_COUNT for one in beat.estates
        ):
            raise _impossible(node.name, "an estate; expected those of workers, with up to 2^53 gradients")
        names = (name for estate in beat.estates for push in estate.pushes for name in push.batches)
        for ref in map(ref_of, names):
            if not self._ledger.knows(ref, node.rank):
                raise _impossible(
                    node.name, f"a lost worker's push of {ref}, which is no minibatch of this run"
                )

    def _check_verdict(self, who: str, verdict: v1.Verdict) -> None:
        ranks = list(verdict.ranks)
        if not ranks or len(set(ranks)) < len(ranks) or max(ranks) >= self._num_workers:
            raise _impossible(
                who, f"a verdict of ranks {ranks[:8]}; expected each once, of {self._num_workers}"
            )
        round_ = verdict.round - self._first_round
        if isinstance(self._ledger, Ledger) and not self._ledger.has_round(round_):
            raise _impossible(who, f"a verdict on round {verdict.round}, which this run does not have")

    def ending(self, who: str, request: v1.Ending) -> None:
        """Checks the counts of a worker that has no minibatches left."""
        if max(request.batches, request.samples, request.round) > MAX_COUNT:
            raise _impossible(
                who,
                f"an end in round {request.round}, after {request.batches} minibatches of {request.samples} samples; "
                "expected at most 2^53",
            )

    def take_over(self, who: str, request: v1.TakeOver) -> None:
        """Checks how a worker says that an epoch is divided among the workers, and how far it has come."""
        parts = list(request.parts)
        _check_begun(who, request.epoch)
        if (parts or request.per_step) and (len(parts) != self._num_workers or max(parts) > MAX_COUNT):
            raise _impossible(
                who, f"parts of {parts[:8]} minibatches; expected {self._num_workers}, one a worker"
            )
        if not request.epoch.step <= request.step <= MAX_COUNT:
            raise _impossible(
                who,
                f"an epoch from step {request.epoch.step} to {request.step}; expected an end from there on, up to 2^53",
            )
        if request.oldest > request.epoch.epoch or request.epoch.epoch - request.oldest > MOST_EPOCHS_BACK:
            raise _impossible(
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
            raise _impossible(who, f"shares of round {request.batch} of epoch {request.epoch}: not planned")

    def measured(self, who: str, request: v1.Took | v1.Ask) -> None:
        """Checks the measured speed in a request."""
        measured = (request.rounds, request.samples, request.seconds, request.squares)
        if not all(math.isfinite(value) and 0 <= value <= MAX_COUNT for value in measured):
            raise _impossible(who, f"a measurement of {measured}; expected finite numbers from 0 on")
        if 0 < request.samples < 1 or request.samples > MOST_PER_S * request.seconds:
            raise _impossible(
                who,
                f"{request.samples:g} samples in {request.seconds:g} s; expected none, or 1 to "
                f"{MOST_PER_S:g} a second",
            )


def _check_begun(who: str, begun: v1.Begun) -> None:
    if abs(begun.step) > MAX_COUNT:
        raise _impossible(who, f"an epoch from step {begun.step}; expected at most 2^53")


def _impossible(who: str, message: str) -> RefusedError:
    return RefusedError("coordinator", "BAD_REQUEST", f"{who} sent an impossible message: {message}")
