"""Runs drawn training loops on several workers and by plain torch. Exit status 1 where they differ.

    python tools/try_loops.py --loops 2000
    python tools/try_loops.py --loops 2000 --seed 5000 --into bench/results/loops-property.json

Each loop ends with the parameters, the gradients and the optimizers' state that plain torch has on the
minibatches of all workers together, or gradstream refuses it and says what to do. Anything else is a fault,
which is printed with its seed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

from drawn.trial import Record, try_loops
from gradstream.cluster.machine import describe_machine, git_commit

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Tries as many loops as are asked for; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--loops", type=int, default=2000)
    parser.add_argument("--length", type=int, default=25, help="loops of one run")
    parser.add_argument("--seed", type=int, default=0, help="of the first run of loops")
    parser.add_argument("--into", type=Path, help="JSON file for the record")
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    parts: dict[str, Record] = {}
    for strategy, workers, record in try_loops(given.seed, given.loops, given.length):
        part = parts.setdefault(f"{strategy}, {workers} workers", Record())
        part.add_all(record)
        for loop, fault in record.faults:
            print(f"{strategy}, {workers} workers: {fault}\n  {loop}", flush=True)
    totals = Record()
    for part in parts.values():
        totals.add_all(part)
    print(
        f"{totals.loops} loops: {totals.equal} equal, {sum(totals.refused.values())} refused "
        f"({_text(totals.refused)}), {len(totals.faults)} faults"
    )
    if given.into is not None:
        told = {
            **describe_machine({}),
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "commit": git_commit(Path.cwd()),
            "seed": given.seed,
            **_summary(totals),
            "parts": {name: _summary(part) for name, part in sorted(parts.items())},
        }
        given.into.write_text(json.dumps(told, indent=1) + "\n")
    return 1 if totals.faults else 0


def _summary(record: Record) -> dict[str, object]:
    return {
        "loops": record.loops,
        "equal": record.equal,
        "refused": dict(sorted(record.refused.items())),
        "faults": len(record.faults),
    }


def _text(counts: Counter[str]) -> str:
    return ", ".join(f"{name}: {count}" for name, count in sorted(counts.items())) or "none"


if __name__ == "__main__":
    sys.exit(main())
