"""`StandIns`: which workers compute the parts of lost workers in each round. A pure state machine.

    worker r is lost ──▶ a worker that is in computes r's part of each round besides its own, from its present round on
    a new process joins as r ──▶ it waits ──▶ the stand-in hands over at its next round m ──▶ the newcomer begins with m

A stand-in has the parameters of the present round, which the round of a dead worker may need: a shard may have made
the update of one chunk with the dead worker's gradient, and wait for it on another. So the round ends as it would have
ended, to the bit. Round m cannot end without a part r, so a newcomer that fetches version m gets it whole. For that, m
is a round that the dead worker cannot have begun: not the first one that the stand-in begins after it has heard.
"""

from __future__ import annotations

from collections import Counter

from gradstream.coordinator.nodes import Nodes
from gradstream.data.ledger import Ledger
from gradstream.data.open_ledger import OpenLedger
from gradstream.wire import v1


class StandIns:
    """Knows which workers compute the minibatches of lost workers.

    Args:
        nodes: the members of the run.
        hands_over: True, with servers: a newcomer begins when its stand-in hands over. False, in a group: all workers
            meet again when a newcomer joins, and begin the next round together; it counts as active from its first
            receipt on.

    Attributes:
        ever_lost: ranks of the workers that were ever lost. Receipts of theirs may have been on their way.
    """

    KEPT = ("_by_rank", "ever_lost")
    """See `durable.state`."""

    def __init__(self, nodes: Nodes, *, hands_over: bool = True) -> None:
        self._nodes = nodes
        self._hands_over = hands_over
        self._by_rank: dict[int, str] = {}  # by rank of a lost worker, the name of the worker that stands in
        self.ever_lost: set[int] = set()

    def lost(self, rank: int) -> None:
        """Finds a stand-in for a lost worker, and for all that it stood in for: whoever has least to do."""
        self.ever_lost.add(rank)
        active = self._nodes.active_workers
        vacant = {rank, *(other for other, name in self._by_rank.items() if name not in active)}
        for one in sorted(vacant):
            self._by_rank.pop(one, None)
            load = Counter(self._by_rank.values())
            self._by_rank[one] = min(active, key=lambda name: load[name])

    def settle(self, ledger: Ledger | OpenLedger) -> None:
        """Accounts for the parts of lost workers in rounds that are in the model."""
        if isinstance(ledger, Ledger):
            for rank in self.ever_lost:
                ledger.settle_rounds(rank)

    def joined(self, node: v1.Node) -> None:
        """Notes that a new process has taken the place of a lost worker."""
        self._nodes.entering.add(node.name)
        if not self._hands_over:
            self._by_rank.pop(node.rank, None)

    def heard(self, name: str) -> None:
        """Notes that a receipt of a worker has come. A newcomer of a group has parameters by then."""
        if not self._hands_over:
            self._nodes.entering.discard(name)

    def handed_over(self, who: str, handed: v1.HandOver) -> bool:
        """Notes that a stand-in has handed over to a newcomer. Returns whether the newcomer begins.

        It does not if it was lost meanwhile: the stand-in hears that, and goes on.
        """
        if self._by_rank.get(handed.rank) != who or self._newcomer(handed.rank) != handed.newcomer:
            return False
        del self._by_rank[handed.rank]
        self._nodes.enter(f"worker-{handed.rank}", handed.round)
        return True

    def at_end(self, number: int) -> bool:
        """Lets newcomers begin after the last round, where none is left to be handed over. Returns whether any waited.

        Args:
            number: version of the final parameters.
        """
        waiting = sorted(self._nodes.entering) if self._hands_over else []
        for name in waiting:
            self._nodes.enter(name, number)
        return bool(waiting)

    def _newcomer(self, rank: int) -> int:
        """Incarnation of the worker that waits to begin as this rank; 0 for none."""
        name = f"worker-{rank}"
        return self._nodes.incarnations[name] if name in self._nodes.entering else 0

    def as_notice(self) -> list[v1.StandIn]:
        """Returns them as notices contain them."""
        return [
            v1.StandIn(rank=rank, worker=name, newcomer=self._newcomer(rank))
            for rank, name in sorted(self._by_rank.items())
        ]
