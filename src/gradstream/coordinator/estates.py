"""`Estates`: the minibatches that lost workers had without a receipt, until it is known what the model has of them.

    lost ──▶ fence ──every shard's report──▶ applied by all chunks: a receipt
                                         ──▶ by none: handed out again
                                         ──▶ by some: an errand ──redone──▶ a receipt

A push is applied chunk by chunk, so a worker that dies may leave one that is torn: some chunks have it, and others
do not. A living worker, the heir, then computes its minibatches again, and pushes their sum in the lost worker's name,
under the same sequence number. Chunks that have it already leave it out, so each chunk takes it once. If the heir dies,
another one does all of it again.

The replica of a worker may be several processes, which push their parts of the same gradients to shards of their own
(`wire.parts`). They are the senders of one estate: whole is a push that all chunks of all parts have. Each process of
the heir's replica then redoes the push of one sender.

A shard that does not report is lost itself after its lease, which ends the run. Pure: no I/O.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from gradstream.coordinator.nodes import Emit, Instruction, Nodes, Notify
from gradstream.coordinator.progress import receipt_of, ref_of
from gradstream.data.base import BatchRef
from gradstream.data.ledger import Ledger
from gradstream.telemetry.events import SettledEvent
from gradstream.wire import v1
from gradstream.wire.chunks import member_name, part_of


@dataclass(slots=True)
class LostPush:
    """What shards have reported of a push of a lost worker.

    Args:
        sequences: the push's sequence number, by sender: each process of the replica numbers its own pushes.
        applied: number of chunks that have applied it.
    """

    sequences: dict[str, int] = field(default_factory=dict)
    applied: int = 0


@dataclass(slots=True)
class Errand:
    """A torn push of a lost worker, which a living worker redoes.

    Args:
        heir: rank of the living worker.
        batches: minibatches of the push.
        sequences: see `LostPush`.
        left: senders whose push is not redone yet.
    """

    heir: int
    batches: tuple[BatchRef, ...]
    sequences: dict[str, int]
    left: set[str]


@dataclass(slots=True)
class Estate:
    """The minibatches that one lost worker had without a receipt.

    Args:
        rank: rank of the worker.
        senders: by name, the incarnation of each process of its replica.
        held: its minibatches of which nothing is known yet, or that belong to an errand.
        awaited: names of the shards that have not reported.
        chunks: number of chunks of those that have.
        pushes: what is known of its pushes, by their minibatches.
        errands: pushes that are to be redone.
    """

    rank: int
    senders: dict[str, int]
    held: set[BatchRef]
    awaited: set[str]
    chunks: int = 0
    pushes: dict[tuple[BatchRef, ...], LostPush] = field(default_factory=dict)
    errands: list[Errand] = field(default_factory=list)


class Estates:
    """Settles the estate of each lost worker: has its minibatches receipted, handed out again, or redone.

    Args:
        ledger: which minibatches are in the model.
        nodes: the members.
    """

    KEPT = ("_open",)
    """See `durable.state`."""

    def __init__(self, ledger: Ledger, nodes: Nodes) -> None:
        self._ledger = ledger
        self._nodes = nodes
        self._open: list[Estate] = []

    @property
    def settled(self) -> bool:
        """Whether the model has every push whole, or nothing of it, as far as lost workers are concerned."""
        return not self._open

    @property
    def errands(self) -> list[Errand]:
        """All pushes that are to be redone."""
        return [errand for estate in self._open for errand in estate.errands]

    @property
    def awaited(self) -> list[str]:
        """Names of the nodes that have to report, or to redo a push."""
        shards = {name for estate in self._open for name in estate.awaited}
        return sorted(shards | {_heir_of(one, sender) for one in self.errands for sender in one.left})

    def lost(self, rank: int, senders: Mapping[str, int]) -> None:
        """Fences a lost worker, and gives the errands that it had to others. It is no member any more.

        Args:
            rank: its rank.
            senders: by name, the incarnation of each process of its replica.
        """
        held = set(self._ledger.hands.fence(rank))
        if held:
            self._open.append(Estate(rank, dict(senders), held, set(self._nodes.holders)))
        for errand in self.errands:
            if errand.heir == rank:
                errand.heir, errand.left = self._heir(), set(errand.sequences)

    def report(self, shard: str, report: v1.Estate) -> list[Instruction]:
        """Takes in what the chunks of a shard have applied. A repeated report changes nothing."""
        estate = self._of(report.sender, report.incarnation)
        if estate is None or shard not in estate.awaited:
            return []
        estate.awaited.remove(shard)
        estate.chunks += report.chunks
        for push in report.pushes:
            found = estate.pushes.setdefault(tuple(map(ref_of, push.batches)), LostPush())
            found.sequences[report.sender] = push.sequence
            found.applied += push.applied
        return [] if estate.awaited else self._decide(estate)

    def _decide(self, estate: Estate) -> list[Instruction]:
        counts: defaultdict[str, int] = defaultdict(int)
        for batches, push in sorted(estate.pushes.items(), key=lambda item: min(item[1].sequences.values())):
            known = [ref for ref in batches if ref in estate.held]  # the others have their receipt
            if not known or not push.applied:
                continue
            if push.applied == estate.chunks:
                counts["in_model"] += len(known)
                self._receipt(estate, known)
            else:
                counts["torn"] += len(known)
                sequences = {**_unused(estate), **push.sequences}
                estate.errands.append(Errand(self._heir(), batches, sequences, set(estate.senders)))
        torn = {ref for errand in estate.errands for ref in errand.batches}
        for ref in sorted(estate.held - torn):
            counts["again"] += 1
            estate.held.remove(ref)
            self._ledger.hands.give_back(ref)
        who = member_name(0, estate.rank)
        event = SettledEvent(who=who, in_model=counts["in_model"], torn=counts["torn"], again=counts["again"])
        self._close(estate)
        return [Emit(event), Notify()]

    def redone(self, heir: str, done: v1.Redone) -> list[Instruction]:
        """Takes in that every chunk of a part has a torn push now. From no heir it changes nothing."""
        estate = self._of(done.sender, done.incarnation)
        if estate is None:
            return []
        for errand in estate.errands:
            if errand.sequences[done.sender] == done.sequence and _heir_of(errand, done.sender) == heir:
                errand.left.discard(done.sender)
        done_errands = [one for one in estate.errands if not one.left]
        for errand in done_errands:
            estate.errands.remove(errand)
            self._receipt(estate, [ref for ref in errand.batches if ref in estate.held])
            self._close(estate)
        return [Notify()] if done_errands else []

    def as_notice(self) -> list[v1.Fenced]:
        """Returns the open estates as notices list them: sender by sender."""
        return [
            v1.Fenced(
                sender=who,
                incarnation=incarnation,
                errands=[
                    v1.Errand(
                        sequence=one.sequences[who],
                        heir=_heir_of(one, who),
                        batches=map(receipt_of, one.batches),
                    )
                    for one in estate.errands
                ],
            )
            for estate in self._open
            for who, incarnation in estate.senders.items()
        ]

    def _of(self, sender: str, incarnation: int) -> Estate | None:
        return next((one for one in self._open if one.senders.get(sender) == incarnation), None)

    def _receipt(self, estate: Estate, refs: Iterable[BatchRef]) -> None:
        for ref in refs:
            estate.held.remove(ref)
            self._ledger.receipt(ref, estate.rank)

    def _close(self, estate: Estate) -> None:
        if not estate.errands:
            self._open.remove(estate)

    def _heir(self) -> int:
        """Rank of the worker with the fewest errands, the lowest of several."""
        heirs = [one.heir for one in self.errands]
        return min((node.rank for node in self._nodes.workers), key=heirs.count)


def _heir_of(errand: Errand, sender: str) -> str:
    """Name of the process that redoes a sender's push: the one that holds the same part."""
    return member_name(part_of(sender), errand.heir)


def _unused(estate: Estate) -> dict[str, int]:
    """By sender, a number that no push of the replica has had: for a sender that had not begun a push which is torn."""
    used = [number for push in estate.pushes.values() for number in push.sequences.values()]
    used += [number for errand in estate.errands for number in errand.sequences.values()]
    return dict.fromkeys(estate.senders, max(used) + 1)
