"""Does it pay to leave the locks out? HOGWILD! by one process and by two, each way to update.

Logistic regression on samples of 64 features out of 2²⁰, whose vector lies in the processors' caches, out of
2²⁴, whose vector does not ("sparser"), and on dense ones of 128 features. HOGWILD! is `plain` and `atomic`;
beside them are a lock of the whole vector (`lock`), the same held as briefly as can be (`short_lock`),
writing in turn (`round_robin`) and a lock of each component (`component_locks`).

Processes share data and vector as the workers of a run do, and run the very code of these. All ways take
their turns, round after round. A round is three epochs at rates η, 0.9 η, 0.81 η from a vector of zeros; its
time is that from the begin of all to the end of the last. scikit-learn's `SGDClassifier.partial_fit` goes
through the same matrix as often, at the same rates, alone. Whole runs (`train`) of one worker and of two show
what the house around costs.

    pip install -e '.[bench]'
    python bench/hogwild.py                     # prints ratios, writes bench/results/hogwild.json
    python bench/hogwild.py --samples 20000 --rounds 3 --no-record
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import numpy as np
import torch

import gradstream as gs
from common import RESULTS, ROOT, command_line, keep, kept, now
from gradstream import sparse
from gradstream.job.files import load_job
from gradstream.machine.description import describe_machine, git_commit
from gradstream.memory.segments import Segment
from gradstream.run.local.environment import node_environment
from gradstream.sparse.data import SparseDataset
from gradstream.sparse.model import SparseModel, SweepState
from gradstream.sparse.updates import LOOKS, UPDATES, num_locks

RATES = (0.5, 0.45, 0.405)
WAITING = ("lock", "short_lock", "round_robin")  # of `UPDATES`: what HOGWILD! does without
AT_ONCE = 10_000  # samples between two looks at the world outside, as in a run
FEATURES, TOUCHED, DENSE = 1 << 20, 64, 128
SKLEARN = "SGDClassifier"
GOALS = {  # of the sparse problems
    "plain, 2 processes / 1": 1.8,
    "atomic, 2 processes / 1": 1.6,
    "plain / lock, 2 processes each": 1.8,
}


@dataclass(frozen=True)
class Problem:
    """Data in memory that children share, and what is done with them."""

    name: str
    data: SparseDataset
    model: SparseModel


def shared(elems: int, dtype: torch.dtype) -> torch.Tensor:
    return Segment.create(max(1, elems * dtype.itemsize), "bench").tensor(0, elems, dtype)


def problems(num_samples: int) -> list[Problem]:
    found = []
    for name, samples, d, touched in (
        ("sparse", num_samples, FEATURES, TOUCHED),
        ("sparser", num_samples, 16 * FEATURES, TOUCHED),
        ("dense", num_samples // 2, DENSE, DENSE),
    ):
        data = sparse.synthetic(samples, d, touched, noise=0.05)
        kinds = {np.dtype(np.int32): torch.int32, np.dtype(np.int64): torch.int64}
        data.fill({n: shared(e, kinds.get(t, torch.float32)).numpy() for n, e, t in data.shared()})
        found.append(Problem(name, data, sparse.linear(d, loss="logistic")))
    return found


# ---- one way ----------------------------------------------------------------------------------


def work(problem: Problem, update: str, at: SweepState, orders: list[Any], part: slice) -> None:
    """One worker's three epochs."""
    for rate, order in zip(RATES, orders, strict=True):
        mine = np.ascontiguousarray(order[part])
        for start in range(0, len(mine), AT_ONCE):
            rows = problem.data.batch(mine[start : start + AT_ONCE]).inputs
            at.state[:] = 0
            while True:
                problem.model.sweep(rows, rate, update, LOOKS, at)
                if not at.blocked(len(rows)):
                    break


def measured(problem: Problem, update: str, workers: int, seed: int) -> dict[str, float]:
    """Seconds, CPU seconds of all workers, and the objective in the end."""
    rng = np.random.default_rng(seed)
    orders = [rng.permutation(problem.data.num_samples) for _ in RATES]
    elems = problem.model.layout.elems
    parameters = shared(elems, torch.float32)
    parameters.zero_()  # pages are there
    locks = shared(num_locks(elems, workers), torch.int32)
    locks.zero_()
    times = shared(3 * workers, torch.float64)
    start = multiprocessing.get_context("fork").Barrier(workers)
    rows = problem.data.batch(orders[0][:2]).inputs  # compiles before the fork, and changes nothing
    problem.model.sweep(rows, 0.0, update, LOOKS, SweepState(parameters, locks.numpy(), 1))
    children = [
        child(problem, update, rank, workers, orders, parameters, locks, times, start)
        for rank in range(workers)
    ]
    if any(os.waitpid(pid, 0)[1] for pid in children):
        sys.exit(f"a worker of {problem.name}, {update} failed")
    begins, ends, cpu = times.view(workers, 3).T.tolist()
    return {
        "seconds": max(ends) - min(begins),
        "cpu_s": sum(cpu),
        "objective": problem.model.objective(parameters.numpy(), problem.data),
    }


def child(
    problem: Problem,
    update: str,
    rank: int,
    workers: int,
    orders: list[Any],
    parameters: torch.Tensor,
    locks: torch.Tensor,
    times: torch.Tensor,
    start: Barrier,
) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        at = SweepState(parameters, locks.numpy(), rank + 1)
        start.wait(60)
        begin, cpu = time.perf_counter(), time.process_time()
        work(problem, update, at, orders, slice(rank, None, workers))
        times[3 * rank] = begin
        times[3 * rank + 1] = time.perf_counter()
        times[3 * rank + 2] = time.process_time() - cpu
        os._exit(0)
    finally:
        os._exit(1)


def by_sklearn(problem: Problem, seed: int) -> dict[str, float]:
    from scipy.sparse import csr_matrix
    from sklearn.linear_model import SGDClassifier

    table = problem.data.tables[0]
    x = csr_matrix(
        (table.values, table.indices, table.indptr), shape=(len(table.targets), problem.data.num_features)
    )
    fit = SGDClassifier(
        loss="log_loss",
        penalty=None,
        learning_rate="constant",
        eta0=RATES[0],
        fit_intercept=False,
        random_state=seed,
    )
    y = table.targets.astype(np.int64)
    fit.partial_fit(x[:10], y[:10], classes=[0, 1])
    fit.coef_[:] = 0
    begin, cpu = time.perf_counter(), time.process_time()
    for rate in RATES:
        fit.eta0 = rate
        fit.partial_fit(x, y)
    seconds, cpu_s = time.perf_counter() - begin, time.process_time() - cpu
    objective = problem.model.objective(fit.coef_.ravel().astype(np.float32), problem.data)
    return {"seconds": seconds, "cpu_s": cpu_s, "objective": objective}


# ---- whole runs ---------------------------------------------------------------------------------

JOB = """
import gradstream as gs
from gradstream import sparse

def job(num_samples, update, workers):
    return gs.Job(
        sparse.linear({d}, loss="logistic"), sparse.synthetic(num_samples, {d}, {touched}, noise=0.05),
        strategy=gs.Hogwild(update=update), optimizer=gs.optim.SGD(gs.schedules.StepDecay(0.5, every=1, factor=0.9)),
        workers=workers, batch_size={at_once}, epochs=40, checkpoint_every=None,
    )
"""


def whole_run(num_samples: int, update: str, workers: int) -> float:
    """Updates a second of a run, while all workers are at it; the first minibatch compiles."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"hogwild_{update}_{workers}.py"
        made = JOB.format(d=FEATURES, touched=TOUCHED, at_once=AT_ONCE)
        path.write_text(f"{made}\ndef asked():\n    return job({num_samples}, {update!r}, {workers})\n")
        run = gs.train(load_job(f"{path}:asked"), run_dir=Path(folder) / "run")
    steps = [event for event in run.events if event["event"] == "step"]
    times = [[step["time_s"] for step in steps if step["rank"] == rank] for rank in range(workers)]
    begin, end = max(map(min, times)), min(map(max, times))
    if begin >= end:
        sys.exit("a whole run was over before all workers had begun: take more --samples")
    return sum(step["samples"] for step in steps if begin < step["time_s"] <= end) / (end - begin)


# ---- all of it ----------------------------------------------------------------------------------


def compare(problem: Problem, rounds: int) -> dict[str, Any]:
    ways = [(update, workers) for update in UPDATES for workers in (1, 2)]
    found: dict[str, list[dict[str, float]]] = {}
    for round_ in range(rounds + 1):
        kept = {
            f"{update}, {workers}": measured(problem, update, workers, round_) for update, workers in ways
        }
        kept[SKLEARN] = by_sklearn(problem, round_)
        for name, figures in kept.items() if round_ else ():  # the first one warms up
            found.setdefault(name, []).append(figures)
    updates = len(RATES) * problem.data.num_samples
    rows = {
        name: {
            "updates_per_s": updates / statistics.median(one["seconds"] for one in all_),
            "updates_per_cpu_s": updates / statistics.median(one["cpu_s"] for one in all_),
            "objective": statistics.median(one["objective"] for one in all_),
            "seconds": [one["seconds"] for one in all_],
        }
        for name, all_ in found.items()
    }
    rate = {name: row["updates_per_s"] for name, row in rows.items()}
    ratios = {f"{update}, 2 processes / 1": rate[f"{update}, 2"] / rate[f"{update}, 1"] for update in UPDATES}
    for update in ("plain", "atomic"):
        for other in WAITING:
            ratios[f"{update} / {other}, 2 processes each"] = rate[f"{update}, 2"] / rate[f"{other}, 2"]
        ratios[f"{update}, 2 processes / plain, 1"] = rate[f"{update}, 2"] / rate["plain, 1"]
        ratios[f"{update}, 1 process / {SKLEARN}"] = rate[f"{update}, 1"] / rate[SKLEARN]
    base = rows["plain, 1"]["objective"]
    ratios["objective: largest distance from plain, 1"] = max(
        abs(rows[f"{update}, {workers}"]["objective"] / base - 1) for update, workers in ways
    )
    table = problem.data.tables[0]
    found_sparsity = problem.data.sparsity()
    return {
        "samples": problem.data.num_samples,
        "features": problem.data.num_features,
        "non_zeros": len(table.values),
        "omega": found_sparsity.omega,
        "delta": found_sparsity.delta,
        "rho_at_most": found_sparsity.rho,
        "rows": rows,
        "ratios": ratios,
    }


def show(name: str, result: dict[str, Any]) -> None:
    print(
        f"\n{name}: {result['samples']} samples, at most {result['omega']} of {result['features']} features"
    )
    for way, row in result["rows"].items():
        spread = f"{min(row['seconds']):.2f} to {max(row['seconds']):.2f} s"
        print(
            f"  {way:20} {row['updates_per_s'] / 1e3:8.1f} k updates/s   "
            f"{row['updates_per_cpu_s'] / 1e3:8.1f} k a CPU second   f = {row['objective']:.4f}, {spread}"
        )
    for what, ratio in result["ratios"].items():
        goal = GOALS.get(what) if name.startswith("sparse") else None
        print(
            f"  {what:45} {ratio:7.3f}"
            + (f"   (goal {goal}: {'met' if ratio >= goal else 'missed'})" if goal else "")
        )


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--samples", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--no-runs", action="store_true", help="without whole runs")
    parser.add_argument("--no-record", action="store_true", help="print only")
    arguments = parser.parse_args()
    environment = node_environment(2)
    if any(os.environ.get(name) != value for name, value in environment.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **environment})
    torch.set_num_threads(1)
    result: dict[str, Any] = {
        "date": now(),
        "commit": git_commit(ROOT),
        **describe_machine(environment),
        "rounds": arguments.rounds,
        "rates": RATES,
    }
    for problem in problems(arguments.samples):
        result[problem.name] = compare(problem, arguments.rounds)
        show(problem.name, result[problem.name])
    runs = (
        {}
        if arguments.no_runs
        else {
            f"{update}, {workers}": statistics.median(
                whole_run(arguments.samples, update, workers) for _ in range(min(3, arguments.rounds))
            )
            for update in ("plain", "atomic")
            for workers in (1, 2)
        }
    )
    result["runs_updates_per_s"] = runs
    print(
        "\nwhole runs, updates a second: "
        + ", ".join(f"{name}: {rate / 1e3:.1f} k" for name, rate in runs.items())
    )
    if not arguments.no_record:
        path = RESULTS / "hogwild.json"
        keep(path, {"earlier": kept(path).get("latest"), "latest": result})


if __name__ == "__main__":
    main()
