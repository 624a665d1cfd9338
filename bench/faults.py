"""Question: does any mixture of faults of workers and links lose a sample, tear an update, or change a bit?

Small runs on virtual time, each with one to five faults that its seed draws (`gradstream.testing.faults`). Under
strategies without rounds a token model counts each sample in each chunk; under `synchronous` the final parameters are
compared with those of the run without faults. A run may also end because no worker is left, and must say so.

    python bench/faults.py 0 10000            # seeds 0 to 9999, on as many processes as there are cores

Prints each violation with its seed, and keeps the counts in bench/results/faults.json.
"""

from __future__ import annotations

import argparse
import datetime
import faulthandler
import json
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

import gradstream as gs
from gradstream.run.local.machine import describe_machine, git_commit
from gradstream.testing.faults import FaultPlan
from gradstream.testing.runs import NUM_SAMPLES, QUICK, UNSTEADY, check_exactly_once, count_tokens

ROOT = Path(__file__).resolve().parents[1]
EPOCHS, UNTIL_S, HANGS_S = 6, 0.8, 300
NAMES = ["coordinator", "shard-0", "shard-1", "worker-0", "worker-1", "worker-2"]
STRATEGIES: tuple[gs.Strategy, ...] = (
    gs.Downpour(),
    gs.Synchronous(),
    gs.SSP(bound=1),
    gs.Downpour(push_every=2, fetch_every=2),
    gs.SSP(bound=0),
    gs.AsySG(gradients=2),
    gs.Synchronous(overlap=False),
)
"""The strategy of a seed is that of this place, counted round and round."""

ENDS = ("no worker is left", "needs every worker")
"""Reasons for which a run may end before its time."""


def plan_of(seed: int) -> FaultPlan:
    """The faults of a seed."""
    return FaultPlan.drawn(seed, workers=3, shards=2, until_s=UNTIL_S, lease_s=QUICK.lease_s)


def run(seed: int, plan: FaultPlan | None) -> gs.Run:
    """The run of a seed; None for no faults."""
    options: dict[str, Any] = {}
    if plan is not None:
        options = {"script": plan.script, "config": plan.config(UNSTEADY, NAMES)}
    return count_tokens(strategy=STRATEGIES[seed % len(STRATEGIES)], epochs=EPOCHS, seed=seed, **options)


def violation(seed: int, plan: FaultPlan) -> str:
    """What a run with these faults has violated; "" for nothing."""
    try:
        found = run(seed, plan)
    except gs.errors.PeerLostError as error:
        return "" if any(reason in str(error) for reason in ENDS) else f"it ended: {error}"
    except Exception as error:
        return f"it ended: {type(error).__name__}: {error}"
    if found.summary["samples_accounted"] != NUM_SAMPLES * EPOCHS:
        return f"{found.summary['samples_accounted']} samples are accounted for"
    if STRATEGIES[seed % len(STRATEGIES)].partitioning == "rounds":
        same = np.array_equal(found.parameters["tokens"], run(seed, None).parameters["tokens"])
        return "" if same else "the parameters differ from those of the run without faults"
    try:
        check_exactly_once(found, NUM_SAMPLES, EPOCHS)
    except AssertionError as error:
        return str(error)
    return ""


def tried(seed: int) -> tuple[int, str, Counter[str]]:
    """One seed: what was violated, and the faults that did happen by kind."""
    faulthandler.dump_traceback_later(HANGS_S, exit=True)  # a run that never ends
    plan = plan_of(seed)
    found = violation(seed, plan)
    faulthandler.cancel_dump_traceback_later()
    return seed, found, plan.kinds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("first", type=int)
    parser.add_argument("stop", type=int)
    given = parser.parse_args()
    kinds, violations, begun_s = Counter[str](), {}, time.monotonic()
    with ProcessPoolExecutor() as pool:
        for seed, found, fired in pool.map(tried, range(given.first, given.stop), chunksize=10):
            kinds += fired
            if found:
                violations[seed] = found
                print(
                    f"seed {seed}, {type(STRATEGIES[seed % len(STRATEGIES)]).__name__}: {found}", flush=True
                )
    record = {
        "seeds": [given.first, given.stop],
        "faults": dict(kinds),
        "violations": violations,
        "seconds": round(time.monotonic() - begun_s, 1),
        "machine": describe_machine({}),
        "commit": git_commit(ROOT),
        "date": datetime.date.today().isoformat(),
    }
    (ROOT / "bench/results/faults.json").write_text(json.dumps(record, indent=1) + "\n")
    print(
        f"{given.stop - given.first} seeds, {sum(kinds.values())} faults {dict(kinds)}: {len(violations)} violations"
    )


if __name__ == "__main__":
    main()
