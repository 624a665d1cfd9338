"""Question: what does each clock of lead win under stale synchronous parallel, and what does it fetch?

On virtual time, without arithmetic: workers whose gradients take log-normal times (σ = 0.5), once all alike
and once with one of half the speed; a model of 3 M parameters on 4 shards over 10 Gbit/s cards. Seconds of
a step, fetches of a step and staleness for growing bounds, beside Downpour, which waits for nobody.

    python studies/ssp_bound/ssp_bound.py

Prints a table, and keeps it with machine, commit and date in record.json. The same on
every machine: figures are of the simulation.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import gradstream as gs
from gradstream._simulate import simulate
from gradstream.machine.description import describe_machine, git_commit
from gradstream.runtime.simulation import Cost, LogNormal, Network, SimulationConfig
from gradstream.testing.runs import Sized, numbered

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))
from common import ROOT, command_line, keep, now

WORKERS, STEPS, SEEDS = 16, 25, 3
COSTS = {
    "gradient": Cost(base_s=0.1, jitter=LogNormal(0.5)),
    "apply": Cost(per_elem_s=4e-10),
    "copy": Cost(per_elem_s=4e-10),
}
SPEEDS: dict[str, dict[str, float]] = {"alike": {}, "one of half the speed": {"worker-0": 0.5}}
STRATEGIES: dict[str, gs.Strategy] = {
    **{f"ssp, s = {bound}": gs.SSP(bound) for bound in (0, 1, 3, 10)},
    "downpour": gs.Downpour(overlap=False),
}


def measured(strategy: gs.Strategy, speeds: dict[str, float]) -> dict[str, float]:
    """Means over seeds; per step of one worker."""
    config = SimulationConfig(
        costs=COSTS, speeds=speeds, network=Network(bandwidth_bytes_s=1.25e9), shape_only=True
    )
    rows: list[Any] = [
        simulate(
            Sized([500_000] * 6), numbered(WORKERS * STEPS), strategy=strategy, optimizer=gs.optim.SGD(lr=0.1),
            workers=WORKERS, servers=4, batch_size=1, epochs=1, config=config, seed=seed,
        )
        for seed in range(SEEDS)
    ]  # fmt: skip
    steps = WORKERS * STEPS
    return {
        "step_s": sum(run.info["virtual_s"] for run in rows) / SEEDS / STEPS,
        "fetches": sum(run.summary["fetches"] - 1 for run in rows) / SEEDS / steps,
        "staleness": sum(run.summary["staleness_mean"] for run in rows) / SEEDS,
    }


def main() -> None:
    """Measures all."""
    command_line(__doc__).parse_args()
    found = {
        world: {name: measured(strategy, speeds) for name, strategy in STRATEGIES.items()}
        for world, speeds in SPEEDS.items()
    }
    for world, rows in found.items():
        print(f"{WORKERS} workers, {world}")
        for name, row in rows.items():
            ratio = row["step_s"] / rows["ssp, s = 0"]["step_s"]
            print(
                f"  {name:<12}  {1000 * row['step_s']:6.1f} ms a step ({ratio:.2f} of s = 0)  "
                f"{row['fetches']:.2f} fetches  staleness {row['staleness']:.1f}"
            )
    record = {
        "question": (__doc__ or "").splitlines()[0],
        "date": now(),
        "commit": git_commit(ROOT),
        **describe_machine({}),
        "workers": WORKERS,
        "steps": STEPS,
        "seeds": SEEDS,
        "found": found,
    }
    keep(Path(__file__).with_name("record.json"), record)


if __name__ == "__main__":
    main()
