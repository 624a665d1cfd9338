"""Question: what do backups of shards cost while nothing dies?

    python studies/backup_cost/backup_cost.py  # 3 rounds of 12 runs: some 8 minutes on two cores
    python studies/backup_cost/backup_cost.py --rounds 5 --models bytes

Downpour with 2 workers and 2 shards trains with each level of `acknowledge` by turns, over the carrier that a run on
one machine takes:

small   20,010 parameters; a minibatch takes 6 ms, which the worker sleeps: a small job
bytes   3,000,000 parameters (12 MB), gradients that cost nothing: only exchange, the worst case

"speed" is minibatches a second, "cpu" CPU seconds of all nodes, both relative to `applied` in the same round: median,
least and largest of the rounds. Keeps them in record.json. All nodes share the cores of one machine,
so a machine of its own for each shard would hide part of the work.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np

import gradstream as gs
from gradstream._train import launch
from gradstream.job.files import load_job
from gradstream.machine.description import describe_machine, git_commit
from gradstream.run.local import LocalCluster
from gradstream.run.local.environment import node_environment
from gradstream.run.planning import plan_run
from gradstream.run.result import Run
from gradstream.server.shard.config import Acknowledge

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))
from common import ROOT, command_line, keep, kept, now

SCRIPT = Path(__file__).resolve()
RESULT = SCRIPT.with_name("record.json")
LEVELS: tuple[Acknowledge, ...] = ("applied", "replicated", "logged")
MODELS = {"small": (20_010, 0.006, 1500), "bytes": (3_000_000, 0.0, 300)}  # elements, seconds, steps
RULES = {"sgd": gs.optim.SGD(lr=1e-3), "adagrad": gs.optim.Adagrad(lr=1e-3)}


def job() -> gs.Job:
    """The run that `sys.argv` names: a model, a rule, a level. Its gradients cost no arithmetic."""
    model, rule, level = sys.argv[1:]
    elems, pause_s, steps = MODELS[model]
    gradient = np.full(elems, 1e-3, np.float32)

    def gradients(
        parameters: Mapping[str, Any], inputs: Any, targets: Any
    ) -> tuple[float, dict[str, np.ndarray[Any, Any]]]:
        time.sleep(pause_s)
        return 1.0, {"w": gradient}

    return gs.Job(
        gs.from_functions(
            init=lambda seed: {"w": np.zeros(elems, np.float32)},
            outputs=lambda parameters, inputs: inputs,
            gradients=gradients,
        ),
        gs.from_arrays(np.zeros((4096, 1), np.float32), np.zeros(4096, np.float32)),
        strategy=gs.Downpour(), optimizer=RULES[rule], workers=2, servers=2, batch_size=1, steps=steps,
        checkpoint_every=None, acknowledge=cast(Acknowledge, level),
    )  # fmt: skip


def figures(run: Run) -> dict[str, float]:
    """Minibatches a second of training, and CPU seconds of all nodes from the begin of their processes."""
    spent = {e["node"]: e["user_s"] + e["system_s"] for e in run.events if e["event"] == "cpu"}
    return {"speed": run.summary["steps"] / run.summary["train_s"], "cpu": sum(spent.values())}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--rules", default=",".join(RULES))
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    commit, load = git_commit(ROOT), os.getloadavg()[0]
    record = {"cases": {}} | kept(RESULT)
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalCluster(Path(folder) / "logs", node_environment(2)) as cluster,
    ):
        for case in (
            f"{model}/{rule}" for model in given.models.split(",") for rule in given.rules.split(",")
        ):
            ratios: dict[str, list[float]] = defaultdict(list)
            for number in range(given.rounds):
                seen = {}
                for level in LEVELS[:: 1 if number % 2 else -1]:
                    run_dir = Path(folder) / f"{case.replace('/', '-')}-{number}-{level}"
                    run_dir.mkdir()
                    chosen = load_job(f"{SCRIPT}:job", argv=[str(SCRIPT), *case.split("/"), level])
                    seen[level] = figures(launch(plan_run(chosen, "cost"), run_dir, cluster=cluster))
                for level in LEVELS[1:]:
                    for figure, value in seen[level].items():
                        ratios[f"{level} {figure}"].append(value / seen["applied"][figure])
            record["cases"][case] = {
                name: {"median": statistics.median(of), "least": min(of), "largest": max(of)}
                for name, of in ratios.items()
            } | {"rounds": given.rounds}
            print(case, json.dumps(record["cases"][case]), flush=True)
    record |= {"date": now(), "commit": commit}
    record |= {"machine": describe_machine({})["machine"], "load": [load, os.getloadavg()[0]]}
    keep(RESULT, record)


if __name__ == "__main__":
    main()
