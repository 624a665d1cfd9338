"""Question: what does it win to let ranks own parts of a sum by their bandwidth, where one card is ten times slower?

On virtual time: 4 and 8 ranks with cards of 100 Mbit/s, of which one has 10 Mbit/s, sum 20 MB. Whatever the algorithm,
the slow rank's own 20 MB must leave it, and the sum must come to it: 16 s is the bound. Figures go to
bench/results/slow-card.json, in less than a minute.

    python bench/slow_card.py
"""

from __future__ import annotations

from unittest.mock import patch

import torch

from common import RESULTS, command_line, keep, origin
from gradstream.collectives import message_group
from gradstream.collectives.group import Group
from gradstream.memory import Vector
from gradstream.runtime.simulation import Network, SimulationConfig
from kit.group_runs import VirtualRanks

ELEMS, FAST, SLOW = 5_000_000, 1.25e7, 1.25e6
ROWS = (  # algorithm, the slow rank from the end, its part of the sum beside an equal part of the others
    ("ring", 1, 1.0),
    ("ring", 1, 0.1),
    ("ring", 1, 1e9),
    ("direct", 1, 1.0),
    ("direct", 1, 0.1),
    ("direct", 1, 0.0),
    ("complete-tree", 1, 1.0),  # at the root
    ("complete-tree", 0, 1.0),  # at a leaf
)


def main() -> None:
    command_line(__doc__).parse_args()
    rows = []
    for size in (4, 8):
        for how, from_end, part in ROWS:
            slow = size - 1 if from_end else 0
            took_s = measured(size, how, slow, part)
            rows.append(
                {"ranks": size, "algorithm": how, "slow_rank": slow, "part": part, "s": round(took_s, 2)}
            )
            print(f"{size} ranks, {how:14s} slow rank {slow}, its part x {part:g}: {took_s:6.2f} s")
    record = {"elems": ELEMS, "bound_s": 4 * ELEMS / SLOW, "rows": rows, **origin()}
    keep(RESULTS / "slow-card.json", record)


def measured(size: int, how: str, slow: int, part: float) -> float:
    """Seconds of the sum on virtual time."""
    weights = [part if rank == slow else 1.0 for rank in range(size)]

    def cuts_of(elems: int, parts: int) -> list[int]:
        return [round(elems * sum(weights[:rank]) / sum(weights)) for rank in range(parts + 1)]

    async def work(group: Group) -> None:
        await group.allreduce(Vector("v", torch.zeros(ELEMS)).all)

    message_group._plan.cache_clear()
    network = Network(bandwidth_bytes_s=FAST, cards={f"worker-{slow}": SLOW})
    ranks = VirtualRanks(size, config=SimulationConfig(network=network))
    with (
        patch("gradstream.collectives.algorithms.ring.cuts_of", cuts_of),
        patch("gradstream.collectives.algorithms.direct.cuts_of", cuts_of),
    ):
        ranks.run(work, how=how, silence_s=600.0)
    return max(ranks.ended_s)


if __name__ == "__main__":
    main()
