"""Question: does any mixture of faults lose a sample, tear an update, or change a bit?

Small runs on virtual time, each with one to five faults that its seed draws (`tests/kit/faults.py`): killed and
stopped nodes, also the coordinator, cut and bad links, slow machines, clocks that stand still, full disks. Under
strategies without rounds a token model counts each sample in each chunk; under `synchronous` and `allreduce` the final
parameters are compared with those of the run without faults. A run may also end because no worker is left, and must
say so; or because a node was lost before everybody had joined.

    python studies/faults/faults.py 0 10000 --epochs 2  # seeds 0 to 9999

Prints each violation with its seed, and keeps the counts so far in record.json.
"""

from __future__ import annotations

import faulthandler
import gc
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

import gradstream as gs
from gradstream.job.plan import shard_name, worker_name
from gradstream.testing.runs import NUM_SAMPLES, QUICK, UNSTEADY, check_exactly_once, count_tokens

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))
from common import command_line, keep, origin
from kit.faults import DiskFull, FailingStorage, FaultPlan, Scene

EPOCHS, UNTIL_S, HANGS_S = 6, 0.8, 300
WORKERS, SHARDS, KEPT_EVERY = 3, 2, 100
STRATEGIES: tuple[gs.Strategy, ...] = (
    gs.Downpour(),
    gs.Synchronous(),
    gs.SSP(bound=1),
    gs.Downpour(push_every=2, fetch_every=2),
    gs.AllReduce(algorithm="ring"),
    gs.SSP(bound=0),
    gs.strategies.AsySG(gradients=2),
    gs.Synchronous(overlap=False),
    gs.AllReduce(algorithm="butterfly"),
)
"""The strategy of a seed is that of this place, counted round and round."""

IN_GROUPS = replace(QUICK, silence_s=1.5 * QUICK.lease_s)
"""As by default, the coordinator misses a worker before its group does."""

ENDS = ("no worker is left", "needs every worker")
"""Reasons for which a run may end before its time."""


def strategy_of(seed: int) -> gs.Strategy:
    """The strategy of a seed."""
    return STRATEGIES[seed % len(STRATEGIES)]


def shards_of(strategy: gs.Strategy) -> int:
    """Number of shards of its runs."""
    return 0 if isinstance(strategy, gs.AllReduce) else SHARDS


def acknowledge_of(seed: int) -> str:
    """When the shards of a seed's run acknowledge pushes: every other time round the strategies they have backups."""
    if not shards_of(strategy_of(seed)):
        return "applied"
    return ("applied", "replicated", "applied", "logged")[seed // len(STRATEGIES) % 4]


def plan_of(seed: int, epochs: int = EPOCHS) -> FaultPlan:
    """The faults of a seed. In a run of fewer epochs, they begin earlier."""
    shards, backups = shards_of(strategy_of(seed)), acknowledge_of(seed) != "applied"
    scene = Scene(WORKERS, shards, UNTIL_S * epochs / EPOCHS, QUICK.lease_s, backups)
    return FaultPlan.drawn(seed, scene)


def run(
    strategy: gs.Strategy, seed: int, plan: FaultPlan | None, epochs: int = EPOCHS, **options: Any
) -> gs.Run:
    """The run of a seed; None for no faults. Where the disk is full at times, it makes checkpoints."""
    shards = shards_of(strategy)
    if plan is not None:
        names = ["coordinator", *map(shard_name, range(shards)), *map(worker_name, range(WORKERS))]
        options |= {"script": plan, "config": plan.config(UNSTEADY, names)}
        if any(isinstance(one, DiskFull) for one in plan.faults):
            options |= {"storage": FailingStorage(), "checkpoint_every": 4}
    if not shards:
        options["deadlines"] = IN_GROUPS
    return count_tokens(strategy=strategy, servers=shards, epochs=epochs, seed=seed, **options)


@cache
def undisturbed(strategy: gs.Strategy, epochs: int) -> Any:
    """The final parameters of a run in rounds without faults: all rounds are alike, so no seed changes them."""
    return run(strategy, 0, None, epochs).parameters["tokens"]


def violation(
    strategy: gs.Strategy, seed: int, plan: FaultPlan, acknowledge: Any = "applied", epochs: int = EPOCHS
) -> str:
    """What a run with these faults has violated; "" for nothing."""
    events: list[Any] = []
    try:
        found = run(strategy, seed, plan, epochs, on_event=events.append, acknowledge=acknowledge)
    except Exception as error:
        early = not any(
            event["event"] == "started" for event in events
        )  # then the loss of any node ends the run
        allowed = isinstance(error, gs.errors.PeerLostError) and any(reason in str(error) for reason in ENDS)
        allowed |= early and isinstance(error, gs.errors.PeerLostError | gs.errors.DeadlineError)
        return "" if allowed else f"it ended: {type(error).__name__}: {error}"
    if found.summary["samples_accounted"] != NUM_SAMPLES * epochs:
        return f"{found.summary['samples_accounted']} samples are accounted for"
    if strategy.partitioning == "rounds":
        same = np.array_equal(found.parameters["tokens"], undisturbed(strategy, epochs))
        return "" if same else "the parameters differ from those of the run without faults"
    try:
        check_exactly_once(found, NUM_SAMPLES, epochs)
    except AssertionError as error:
        return str(error)
    return ""


def tried(seed: int, epochs: int = EPOCHS) -> tuple[int, str, Counter[str]]:
    """One seed: what was violated, and the faults that did happen by kind."""
    faulthandler.dump_traceback_later(HANGS_S, exit=True)  # a run that never ends
    plan = plan_of(seed, epochs)
    found = violation(strategy_of(seed), seed, plan, acknowledge_of(seed), epochs)
    faulthandler.cancel_dump_traceback_later()
    return seed, found, plan.kinds


def begin() -> None:
    """Begins a process that tries seeds: what is loaded by now stays, so the collector need not look at it."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("first", type=int)
    parser.add_argument("stop", type=int)
    parser.add_argument("--processes", type=int, help="as many as there are cores")
    parser.add_argument(
        "--epochs", type=int, default=EPOCHS, help="length of a run; a seed draws others for another"
    )
    given = parser.parse_args()
    kinds, violations, begun_s = Counter[str](), dict[int, str](), time.monotonic()
    with ProcessPoolExecutor(given.processes, initializer=begin) as pool:
        for seed, found, fired in pool.map(
            partial(tried, epochs=given.epochs), range(given.first, given.stop), chunksize=10
        ):
            kinds += fired
            if found:
                violations[seed] = found
                print(f"seed {seed}, {type(strategy_of(seed)).__name__}: {found}", flush=True)
            if (seed + 1) % KEPT_EVERY == 0 or seed + 1 == given.stop:
                record = {
                    "seeds": [given.first, seed + 1],
                    "epochs": given.epochs,
                    "faults": dict(sorted(kinds.items())),
                    "violations": violations,
                    "seconds": round(time.monotonic() - begun_s, 1),
                    **origin({}),
                }
                keep(Path(__file__).with_name("record.json"), record)
    print(f"{given.stop - given.first} seeds, faults {dict(kinds)}: {len(violations)} violations")


if __name__ == "__main__":
    main()
