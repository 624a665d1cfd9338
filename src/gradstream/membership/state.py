"""Who is in the run, as a pure state machine: what happened goes in, instructions come out.

GATHERING until all the expected nodes have joined; TRAINING until every batch has a receipt and
every worker that is left has finished: FINISHED; ABORTED when that cannot be reached any more;
STOPPED when somebody asked for it, with a cut (`cut.py`) if there is anything to keep.
The membership epoch is 0 while gathering, 1 when training begins, and one more after each loss.

Nothing here waits, sends or writes: the coordinator carries the instructions out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from gradstream.checkpoint.folder import Place
from gradstream.checkpoint.manifest import Resume
from gradstream.checkpoint.policy import Policy
from gradstream.data.base import BatchRef
from gradstream.data.joined import ids_of
from gradstream.data.ledger import Ledger
from gradstream.data.open_ledger import OpenLedger
from gradstream.data.shares import Speed
from gradstream.events import (
    DriveEvent,
    FailedEvent,
    FinishedEvent,
    JoinedEvent,
    LedgerEvent,
    LeftEvent,
    ResumedEvent,
    RoundEvent,
    StartedEvent,
    StoppedEvent,
)
from gradstream.membership.balance import Balance
from gradstream.membership.cut import Cut, Cuts, Limits
from gradstream.membership.instructions import Emit, Instruction, Notify, Refuse
from gradstream.membership.turns import Turns
from gradstream.wire import v1

__all__ = ["Emit", "Instruction", "Membership", "Notify", "Refuse", "receipt_of", "ref_of"]

ORPHANS_AT_ONCE = 4
"""Batches handed out per request: few, so that all who are idle get a share of a lost partition."""


def ref_of(receipt: v1.Receipt) -> BatchRef:
    """The batch that a receipt names."""
    return BatchRef(receipt.epoch, receipt.partition, receipt.batch)


def receipt_of(ref: BatchRef) -> v1.Receipt:
    """The receipt that names a batch."""
    return v1.Receipt(epoch=ref.epoch, partition=ref.partition, batch=ref.batch)


class Membership:
    """The members of one run.

    Args:
        started: the run as planned; `workers` and `servers` say who is expected. Its
            `num_parameters` is filled in from the registered model.
        ledger: which batches are in the model.
        survives_worker_loss: the strategy goes on without a lost worker, which needs its
            batches to be taken over by others.
        software: version of gradstream that every node must have.
        policy: when checkpoints are made; None makes none, not even when the run is stopped.
        together: workers go through rounds, and stop after the same one.
        resume: where the run goes on, if it does not begin.
        limits: deadlines of a cut.
        quorum: so many contributions make an update, and so many workers are needed; None leaves it to
            `survives_worker_loss`. Verdicts then tell what is in the model, and receipts do not.
        balance: decides the shares of a round by measured speed; None leaves them as they are.
        turns: who takes part, where the strategy says so; None for all, from the begin.
    """

    def __init__(
        self,
        started: StartedEvent,
        ledger: Ledger | OpenLedger,
        *,
        survives_worker_loss: bool,
        software: str,
        policy: Policy | None = None,
        together: bool = False,
        resume: Resume | None = None,
        limits: Limits | None = None,
        balance: Balance | None = None,
        quorum: int | None = None,
        turns: Turns | None = None,
    ) -> None:
        self.phase: v1.Notice.Phase = v1.Notice.GATHERING
        self.epoch = 0
        self.ledger = ledger
        self._started = started
        self._quorum = quorum
        self._needed = quorum or (1 if survives_worker_loss else started.workers)
        self._first_round = resume.rounds if resume is not None else 0
        self._dropped_before = dict(resume.dropped) if resume is not None else {}
        self._software = software
        self._nodes: dict[str, v1.Node] = {}
        self._finished: set[str] = set()
        self._model: v1.ModelSpec | None = None
        self._registrar = ""
        self.tensors: Sequence[v1.TensorSpec] = ()
        self.buffers: Sequence[v1.TensorSpec] = ()
        self.fixed: Sequence[v1.TensorSpec] = ()
        if resume is not None:
            self._model, self._registrar = _spec_of(resume.model), f"the checkpoint {resume.folder}"
        self._rows_open = resume is not None  # what is exchanged of a model is the run's affair
        self._resume = resume
        self.balance = balance
        self.turns = turns
        self.cuts = Cuts(
            ledger,
            policy or Policy(),
            together=together,
            resume=resume,
            limits=limits,
            enabled=policy is not None,
            verdicts=quorum is not None,
        )
        self._reason = ""
        self._culprit = ""
        self._goal_reached = ""
        self._began_s = 0.0
        self._receipt_s = 0.0
        self._num_complete = ledger.num_complete

    @property
    def over(self) -> bool:
        """Whether the run is FINISHED, ABORTED or STOPPED."""
        return self.phase >= v1.Notice.FINISHED

    @property
    def missing(self) -> list[str]:
        """Names of the expected nodes that are not in."""
        shards = [f"shard-{rank}" for rank in range(self._started.servers)]
        workers = [f"worker-{rank}" for rank in range(self._started.workers)]
        return [name for name in shards + workers if name not in self._nodes]

    @property
    def workers(self) -> list[v1.Node]:
        """The workers that are in, by rank."""
        nodes = [node for node in self._nodes.values() if node.role == "worker"]
        return sorted(nodes, key=lambda node: node.rank)

    @property
    def model(self) -> v1.ModelSpec | None:
        """What the workers have registered."""
        return self._model

    @property
    def notice(self) -> v1.Notice:
        """The present state, as every member is told it."""
        nodes: list[v1.Node] = sorted(self._nodes.values(), key=lambda node: (node.role, node.rank))
        return v1.Notice(
            epoch=self.epoch,
            nodes=nodes,
            model=self._model,
            phase=self.phase,
            reason=self._reason,
            culprit=self._culprit,
            cut=None if self.cuts.current is None else self.cuts.current.as_notice(),
            drive=None if self.turns is None else self.turns.as_notice(),
        )

    # ---- what happens -------------------------------------------------------------------

    def join(self, request: v1.Join, at_s: float) -> list[Instruction]:
        """A node asks to be in. Either the only instruction is `Refuse`, or it is in."""
        objection = self._objection(request)
        if objection is not None:
            return [objection]
        node = request.node
        if node.role == "worker" and self._model is None:
            self._model, self._registrar = request.model, node.name
        elif node.role == "worker" and self._model is not None and self._rows_open:
            self._model.CopyFrom(request.model)
            self._rows_open = False
        if node.role == "worker" and not self.tensors:
            self.tensors, self.buffers, self.fixed = request.tensors, request.buffers, request.fixed
        self._nodes[node.name] = node
        out: list[Instruction] = []
        if not self.missing:
            self.phase, self.epoch, self._began_s = v1.Notice.TRAINING, 1, at_s
            elems = self._model.elems if self._model is not None else 0
            rule = self._registered_optimizer() or self._started.optimizer
            out.append(Emit(replace(self._started, num_parameters=elems, optimizer=rule)))
            if self._resume is not None:
                out.append(Emit(self._resumed(self._resume)))
        joined = JoinedEvent(who=node.name, address=node.address, epoch=self.epoch)
        return [Emit(joined), *out, Notify()]

    def beat(self, who: str, beat: v1.Beat, at_s: float) -> list[Instruction]:
        """A member says what it has done: receipts, that its strategy is done, that it failed."""
        node = self._nodes.get(who)
        if node is None or self.over:
            return []
        if beat.HasField("failure"):
            failure = beat.failure
            return self._abort(who, failure.error, failure.message, failure.traceback)
        for receipt in beat.receipts:
            self.ledger.receipt(ref_of(receipt), node.rank)
            self._receipt_s = at_s
        out: list[Instruction] = []
        if beat.stands and self.turns is not None and self.turns.stands(who, beat.stands):
            out.append(Notify())
        for verdict in beat.verdicts:
            out += self._verdict(verdict.round, list(verdict.ranks))
            self._receipt_s = at_s
        if beat.finished and not (beat.relies and who == self.workers[0].name):
            # One that said so before it heard that keeping the parameters is its duty now says so again.
            self._finished.add(who)
        for report in beat.cuts:
            out += self.cuts.report(who, report, at_s)
        if self.phase == v1.Notice.TRAINING:
            out += self.cuts.tick(at_s, *self._names)
        out += self._after_cut()
        if beat.receipts or beat.verdicts or beat.finished:
            out += self._conclude()
        return out

    def _verdict(self, round: int, ranks: Sequence[int]) -> list[Instruction]:  # noqa: A002  protocol's word
        """The first shard says whose contributions make the update of a round."""
        if not isinstance(self.ledger, Ledger):
            return []
        refs = self.ledger.verdict(round - self._first_round, ranks)
        found = [ids_of(self.ledger.plan, refs[rank]) for rank in ranks]
        event = RoundEvent(
            round=round,
            epoch=refs[0].epoch,
            batch=refs[0].batch,
            accepted=list(ranks),
            left_out=[rank for rank in range(len(refs)) if rank not in ranks],
            ids=None if None in found else [number for ids in found if ids for number in ids],
        )
        return [Emit(event)]

    def lost(self, who: str, reason: str, at_s: float) -> list[Instruction]:
        """A member is gone: its stream broke, it was silent for too long, or it left.

        Its receipts stand. Batches without one are orphans from now on, for others to take.
        """
        node = self._nodes.pop(who, None)
        if node is None:
            return []
        had_finished = who in self._finished
        self._finished.discard(who)
        left = LeftEvent(who=who, lost=not self.over, reason="" if self.over else reason, epoch=self.epoch)
        if self.over:
            return [Emit(left)]
        if self.phase == v1.Notice.GATHERING:
            return [Emit(left), Notify()]
        self.epoch += 1
        out: list[Instruction] = [Emit(replace(left, epoch=self.epoch))]
        hopeless = self._why_hopeless(node)
        if hopeless:
            return out + self._abort(who, "PeerLostError", f"{reason}; {hopeless}")
        self.ledger.lost(node.rank)
        replaced = self.turns is not None and self.turns.lost(who)
        if node.role == "worker" and not had_finished and self.workers:
            # The worker of the lowest rank keeps the final parameters. Whoever that is now may have
            # finished when it was not: it says so again once it has done this.
            self._finished.discard(self.workers[0].name)
        out += self._driven() if replaced else [Notify()]
        out += self.cuts.lost(who, at_s, *self._names)
        return out + self._after_cut() + self._rebalance() + self._conclude()

    def stop(self, at_s: float) -> list[Instruction]:
        """Somebody asks the run to stop: with a cut, if it has begun. Asking again changes nothing."""
        if self.over or self.cuts.stopping:
            return []
        if self.phase == v1.Notice.GATHERING:
            return self._stop()
        return self.cuts.stop(at_s, *self._names) + self._after_cut()

    def engage(self, count: int, phase: str) -> list[Instruction]:
        """The strategy says how many workers take part from now on, and what it calls that."""
        if self.turns is None or self.phase != v1.Notice.TRAINING:
            return []
        self.turns.engage(count, phase)
        return self._driven()

    def drive_failed(self, error: str, message: str, traceback: str) -> list[Instruction]:
        """The strategy cannot say who takes part any more."""
        return [] if self.over else self._abort("coordinator", error, message, traceback)

    def finish(self, reason: str, at_s: float) -> list[Instruction]:
        """The run has done enough. It finishes with what workers have begun; asking again changes nothing."""
        if self.phase != v1.Notice.TRAINING or self.cuts.stopping or self.cuts.finishing:
            return []
        self._goal_reached = reason
        return self.cuts.finish(at_s, *self._names)

    def prepared(self, cut: Cut, places: Sequence[Place], at_s: float) -> list[Instruction]:
        """See `Cuts.prepared`."""
        return self.cuts.prepared(cut, places, at_s) + self._after_cut()

    def committed(self, cut: Cut, folder: str, size_bytes: int, at_s: float) -> list[Instruction]:
        """See `Cuts.committed`."""
        return self.cuts.committed(cut, folder, size_bytes, at_s, *self._names) + self._after_cut()

    def cut_failed(self, cut: Cut, who: str, why: str, at_s: float) -> list[Instruction]:
        """The coordinator could not open or commit a draft."""
        if cut is not self.cuts.current:
            return []
        return self.cuts.fail(who, why, at_s) + self._after_cut()

    def overdue(self) -> list[Instruction]:
        """The deadline for joining has passed."""
        if self.phase != v1.Notice.GATHERING:
            return []
        missing = ", ".join(self.missing)
        text = f"did not join in time: {missing} (in: {', '.join(self._nodes) or 'nobody'}); see their logs"
        return self._abort(self.missing[0], "DeadlineError", text)

    def orphans(self, who: str, epoch: int, last: bool) -> v1.OrphanBatches | Refuse | None:
        """Batches of lost workers for `who` to go through; None when the answer has to wait.

        Args:
            epoch: data epoch.
            last: answer only with batches, or once every batch of the run has a receipt.
        """
        node = self._nodes.get(who)
        if node is None:
            return Refuse(v1.NOT_MEMBER, f"{who} is not a member in epoch {self.epoch}")
        if self.cuts.ending:
            return v1.OrphanBatches(complete=True)
        turn = self.turns.turn_of(who) if self.turns is not None else v1.Turn()
        refs = () if turn.held else self.ledger.orphans(epoch, ORPHANS_AT_ONCE, node.rank)
        complete = self.ledger.finished if last else self.ledger.complete(epoch)
        if last and not refs and not complete and not self.over:
            return None
        batches = [receipt_of(ref) for ref in refs]
        return v1.OrphanBatches(batches=batches, complete=complete, turn=turn.number)

    def ending(self, who: str, request: v1.Ending) -> v1.Ended | Refuse | None:
        """A worker of an open-ended run has no minibatches left; None when the answer has to wait."""
        node = self._nodes.get(who)
        if node is None:
            return Refuse(v1.NOT_MEMBER, f"{who} is not a member in epoch {self.epoch}")
        if not isinstance(self.ledger, OpenLedger):
            return Refuse(v1.BAD_REQUEST, f"{who} has run out of data in a run whose minibatches are planned")
        over = self.ledger.ended(node.rank, request.batches, request.samples, request.round)
        return None if over is None and not self.over else v1.Ended(over=bool(over))

    def took(self, who: str, request: v1.Took) -> list[Instruction]:
        """A worker says how long its part of the rounds before took, and asks for the shares of the next."""
        node = self._nodes.get(who)
        if node is None or self.balance is None:
            return []
        stretch = Speed(request.rounds, request.samples, request.seconds, request.squares)
        self.balance.took(node.rank, (request.epoch, request.batch), stretch)
        return self._rebalance()

    def shares(self, who: str, request: v1.Took) -> v1.Shares | Refuse | None:
        """The answer to it; None when it has to wait."""
        if who not in self._nodes:
            return Refuse(v1.NOT_MEMBER, f"{who} is not a member in epoch {self.epoch}")
        if self.balance is None:
            return Refuse(v1.BAD_REQUEST, f"{who} asks for shares in a run that does not measure them")
        sizes = self.balance.decided((request.epoch, request.batch))
        return None if sizes is None else v1.Shares(samples=sizes)

    # ---- decisions ----------------------------------------------------------------------

    @property
    def _names(self) -> tuple[list[str], list[str]]:
        """Workers that are in, by rank, and who holds the vectors: the shards, or else the workers."""
        workers = [node.name for node in self.workers]
        return workers, [f"shard-{rank}" for rank in range(self._started.servers)] or workers

    def _after_cut(self) -> list[Instruction]:
        """Stops the run if that is what the cut was for."""
        return self._stop() if self.cuts.stopped and not self.over else []

    def _driven(self) -> list[Instruction]:
        """Says who takes part now."""
        assert self.turns is not None
        event = DriveEvent(
            phase=self.turns.phase,
            engaged=self.turns.engaged,
            held=self.turns.held,
            samples=self.num_samples,
        )
        return [Emit(event), Notify()]

    def _rebalance(self) -> list[Instruction]:
        """Decides the shares that workers wait for, once all who are in have asked."""
        decided = self.balance.decide([node.rank for node in self.workers]) if self.balance else None
        return [] if decided is None else [Emit(decided)]

    def _stop(self) -> list[Instruction]:
        self.phase = v1.Notice.STOPPED
        return [Emit(StoppedEvent(step=self.cuts.step, folder=self.cuts.kept)), Notify()]

    def _resumed(self, resume: Resume) -> ResumedEvent:
        samples = self.num_samples_before
        steps = dict(resume.steps)
        return ResumedEvent(step=resume.step, folder=resume.folder, steps=steps, samples=samples)

    def _objection(self, request: v1.Join) -> Refuse | None:
        node = request.node
        if request.software != self._software:
            return Refuse(
                v1.BAD_PROTOCOL,
                f"{node.name} runs gradstream {request.software}, expected {self._software}: "
                "install the same version everywhere",
            )
        if node.name not in self.missing or node.name != f"{node.role}-{node.rank}":
            return self._name_objection(node)
        if self.phase != v1.Notice.GATHERING:
            return Refuse(v1.NOT_MEMBER, f"{node.name}: the run is past gathering, nobody can join now")
        return self._model_objection(request) if node.role == "worker" else None

    def _name_objection(self, node: v1.Node) -> Refuse:
        there = self._nodes.get(node.name)
        if there is not None:
            return Refuse(
                v1.NOT_MEMBER,
                f"{node.name} is in already, from {there.address} (incarnation {there.incarnation:x}; "
                f"this one is {node.incarnation:x}): give each node its own rank",
            )
        return Refuse(
            v1.BAD_REQUEST,
            f"{node.name} is not expected: this run has {self._started.workers} workers "
            f"and {self._started.servers} servers, ranks from 0",
        )

    def _model_objection(self, request: v1.Join) -> Refuse | None:
        spec, model = request.model, self._model
        if not spec.elems or not spec.fingerprint:
            return Refuse(v1.BAD_REQUEST, f"{request.node.name} joined without a model")
        if model is not None and self._rows_open:
            spec = v1.ModelSpec()
            spec.CopyFrom(request.model)
            spec.ClearField("rows")
        if model is None or spec == model:
            return None
        return Refuse(
            v1.BAD_FINGERPRINT,
            f"model of {request.node.name}: {_describe(spec)}; expected that of {self._registrar}: "
            f"{_describe(model)}. All workers must build the same model, from the same version of the job",
        )

    def _why_hopeless(self, node: v1.Node) -> str:
        """Why the run cannot go on without this node, or ""."""
        if node.role == "shard":
            return f"its ranges of the parameters are gone with it (shard rank {node.rank})"
        if len(self.workers) >= self._needed:
            return ""
        if not self.workers:
            return "no worker is left"
        needs = "every worker" if self._needed == self._started.workers else f"{self._needed} workers"
        return f"strategy {self._started.strategy!r} needs {needs}"

    def _conclude(self) -> list[Instruction]:
        """Reports data epochs that are complete now, and ends the run if everything is done."""
        out: list[Instruction] = []
        if self.over:
            return out
        while self._num_complete < self.ledger.num_epochs and self.ledger.complete(self._num_complete):
            out.append(Emit(self._ledger_event(self._num_complete)))
            self._num_complete += 1
        if self.ledger.finished and self.turns is not None and self.turns.dismiss():
            out.append(Notify())
        if any(node.name not in self._finished for node in self.workers):
            return out
        early = self.cuts.ending and not self.ledger.finished
        if not self.ledger.finished and not early and self._quorum is not None:
            return out  # the last verdicts are on their way
        if not self.ledger.finished and not early:
            epoch = self._num_complete
            return out + self._abort(
                self.workers[0].name,
                "InternalError",
                f"every worker has finished, but {self.ledger.missing(epoch)} batches of data epoch "
                f"{epoch} have no receipt: a strategy must push the gradient of each of its batches",
            )
        self.phase = v1.Notice.FINISHED
        samples = self.num_samples
        trained_s = self._receipt_s - self._began_s + (self._resume.time_s if self._resume else 0.0)
        done = FinishedEvent(
            samples=samples,
            train_s=max(0.0, trained_s),
            reason=self._goal_reached if early else "",
            dropped=sum(self.dropped.values()),
        )
        return [*out, *self.cuts.drop(), Emit(done), Notify()]

    @property
    def num_samples(self) -> int | None:
        """Samples in the model: those with a receipt; None in a stream that does not count them."""
        samples = self.ledger.num_samples
        return None if samples is None else samples + self.num_samples_before

    @property
    def dropped(self) -> dict[str, int]:
        """By data epoch, samples that updates were made without."""
        found = dict(self._dropped_before)
        if isinstance(self.ledger, Ledger):
            for epoch, count in self.ledger.all_dropped.items():
                found[str(epoch)] = found.get(str(epoch), 0) + count
        return found

    @property
    def num_samples_before(self) -> int:
        """Samples that were in the model when a resumed run went on."""
        return self._samples_before() - sum(self._dropped_before.values())

    def _samples_before(self, epoch: int | None = None) -> int:
        """Samples that were accounted for when a resumed run went on: of all epochs, or of one."""
        if isinstance(self.ledger, OpenLedger):
            return 0 if self._resume is None else sum(self._resume.samples.values())
        num_samples = self._started.num_samples  # None in a stream, which does not count samples
        if num_samples is None:
            return 0
        return self.ledger.plan.done.count(num_samples, epoch)

    def _registered_optimizer(self) -> str:
        """The update rule's name, where the workers bring it."""
        if self._model is None or not self._model.optimizer:
            return ""
        name: str = json.loads(self._model.optimizer)["class"].rpartition(":")[2].lower()
        return name

    def _ledger_event(self, epoch: int) -> LedgerEvent:
        samples = self.ledger.samples(epoch)
        return LedgerEvent(
            epoch=epoch,
            samples=None if samples is None else samples + self._samples_before(epoch),
            batches=self.ledger.batches(epoch),
            reassigned=self.ledger.reassigned(epoch),
            dropped=self.dropped.get(str(epoch), 0),
        )

    def _abort(self, culprit: str, error: str, message: str, traceback: str = "") -> list[Instruction]:
        self.phase, self._culprit = v1.Notice.ABORTED, culprit
        self._reason = f"{error}: {message}"
        failed = FailedEvent(culprit=culprit, error=error, message=message, traceback=traceback)
        return [*self.cuts.drop(), Emit(failed), Notify()]


def _spec_of(model: Mapping[str, Any]) -> v1.ModelSpec:
    """The model that a checkpoint belongs to."""
    return v1.ModelSpec(
        fingerprint=model["fingerprint"],
        elems=model["elems"],
        dtype=v1.DType.Name(model["dtype"]),
        chunk_elems=model["chunk_elems"],
        optimizer=model.get("optimizer", ""),
    )


def _describe(spec: v1.ModelSpec) -> str:
    return (
        f"fingerprint {spec.fingerprint:016x}, {spec.elems:,} parameters of {v1.DType.Name(spec.dtype)}, "
        f"chunks of {spec.chunk_elems:,}" + (f", update rule {spec.optimizer}" if spec.optimizer else "")
    )
