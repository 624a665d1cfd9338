"""`Estates`: the minibatches that lost workers had without a receipt, until it is known what the model has of them.

    lost ──▶ fence ──every shard's report──▶ applied by all chunks: a receipt
                                         ──▶ by none: handed out again
                                         ──▶ by some: an errand ──redone──▶ a receipt

A push is applied chunk by chunk, so a worker that dies may leave one that is torn: some chunks have it, and others
do not. A living worker, the heir, then computes its minibatches again, and pushes their sum in the lost worker's name,
under the same sequence number. Chunks that have it already leave it out, so each chunk takes it once. If the heir dies,
another one does all of it again.

A shard that does not report is lost itself after its lease, which ends the run. Pure: no I/O.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from gradstream.coordinator.instructions import Emit, Instruction, Notify
from gradstream.coordinator.nodes import Nodes
from gradstream.coordinator.receipts import receipt_of, ref_of
from gradstream.data.base import BatchRef
from gradstream.data.ledger import Ledger
from gradstream.telemetry.events import SettledEvent
from gradstream.wire import v1

__all__ = ["Errand", "Estate", "Estates"]


@dataclass(slots=True)
class Errand:
    """A torn push of a lost worker, which the worker `heir` redoes."""

    heir: str
    batches: tuple[BatchRef, ...]


@dataclass(slots=True)
class Estate:
    """The minibatches that one lost worker had without a receipt.

    Args:
        rank: rank of the worker.
        held: its minibatches of which nothing is known yet, or that belong to an errand.
        awaited: names of the shards that have not reported.
        chunks: number of chunks of those that have.
        pushes: by sequence number, the minibatches of a push, and how many chunks have applied it.
        errands: by sequence number.
    """

    rank: int
    held: set[BatchRef]
    awaited: set[str]
    chunks: int = 0
    pushes: dict[int, tuple[tuple[BatchRef, ...], int]] = field(default_factory=dict)
    errands: dict[int, Errand] = field(default_factory=dict)


class Estates:
    """The estates of all lost workers that are not settled.

    Args:
        ledger: which minibatches are in the model.
        nodes: the members.
    """

    KEPT = ("_open",)
    """See `durable.state`."""

    def __init__(self, ledger: Ledger, nodes: Nodes) -> None:
        self._ledger = ledger
        self._nodes = nodes
        self._open: dict[tuple[str, int], Estate] = {}  # by name and incarnation

    @property
    def settled(self) -> bool:
        """Whether the model has every push whole, or nothing of it, as far as lost workers are concerned."""
        return not self._open

    @property
    def awaited(self) -> list[str]:
        """Names of the nodes that have to report, or to redo a push."""
        shards = {name for estate in self._open.values() for name in estate.awaited}
        return sorted(
            shards | {one.heir for estate in self._open.values() for one in estate.errands.values()}
        )

    def lost(self, node: v1.Node) -> None:
        """Fences a lost worker, and gives the errands that it had to others. It is no member any more."""
        held = set(self._ledger.fence(node.rank))
        if held:
            self._open[node.name, node.incarnation] = Estate(node.rank, held, set(self._nodes.holders))
        for estate in self._open.values():
            for errand in estate.errands.values():
                if errand.heir == node.name:
                    errand.heir = self._heir()

    def report(self, shard: str, report: v1.Estate) -> list[Instruction]:
        """Takes in what the chunks of a shard have applied. A repeated report changes nothing."""
        estate = self._open.get((report.sender, report.incarnation))
        if estate is None or shard not in estate.awaited:
            return []
        estate.awaited.remove(shard)
        estate.chunks += report.chunks
        for push in report.pushes:
            batches, applied = estate.pushes.get(push.sequence, (tuple(map(ref_of, push.batches)), 0))
            estate.pushes[push.sequence] = batches, applied + push.applied
        return [] if estate.awaited else self._decide(report.sender, report.incarnation, estate)

    def _decide(self, who: str, incarnation: int, estate: Estate) -> list[Instruction]:
        counts: defaultdict[str, int] = defaultdict(int)
        for sequence, (batches, applied) in sorted(estate.pushes.items()):
            known = [ref for ref in batches if ref in estate.held]  # the others have their receipt
            if not known or not applied:
                continue
            if applied == estate.chunks:
                counts["in_model"] += len(known)
                self._receipt(estate, known)
            else:
                counts["torn"] += len(known)
                estate.errands[sequence] = Errand(self._heir(), batches)
        torn = {ref for errand in estate.errands.values() for ref in errand.batches}
        for ref in sorted(estate.held - torn):
            counts["again"] += 1
            estate.held.remove(ref)
            self._ledger.give_back(ref)
        event = SettledEvent(who=who, in_model=counts["in_model"], torn=counts["torn"], again=counts["again"])
        self._close(who, incarnation, estate)
        return [Emit(event), Notify()]

    def redone(self, heir: str, done: v1.Redone) -> list[Instruction]:
        """Takes in that every chunk has a torn push now. From a worker that is not its heir it changes nothing."""
        estate = self._open.get((done.sender, done.incarnation))
        errand = None if estate is None else estate.errands.get(done.sequence)
        if estate is None or errand is None or errand.heir != heir:
            return []
        del estate.errands[done.sequence]
        self._receipt(estate, [ref for ref in errand.batches if ref in estate.held])
        self._close(done.sender, done.incarnation, estate)
        return [Notify()]

    def as_notice(self) -> list[v1.Fenced]:
        """Returns the open estates as notices list them."""
        return [
            v1.Fenced(
                sender=who,
                incarnation=incarnation,
                errands=[
                    v1.Errand(sequence=sequence, heir=one.heir, batches=map(receipt_of, one.batches))
                    for sequence, one in estate.errands.items()
                ],
            )
            for (who, incarnation), estate in self._open.items()
        ]

    def _receipt(self, estate: Estate, refs: list[BatchRef]) -> None:
        for ref in refs:
            estate.held.remove(ref)
            self._ledger.receipt(ref, estate.rank)

    def _close(self, who: str, incarnation: int, estate: Estate) -> None:
        if not estate.errands:
            del self._open[who, incarnation]

    def _heir(self) -> str:
        """The worker with the fewest errands, of the lowest rank."""
        heirs = [one.heir for estate in self._open.values() for one in estate.errands.values()]
        return min(self._nodes.worker_names, key=heirs.count)
