"""Question: does L-BFGS on many workers end where SciPy's and torch's end, after as many passes, and how fast?

Softmax regression with L2 in float64: on the subset of Fashion-MNIST, and on 16 x 16 colour pixels of Caltech-101.
Ours has 2 workers with one thread each, with a shard and in a group; SciPy's L-BFGS-B and torch's LBFGS have two
threads, the whole data as one batch, and the same function. All keep 10 pairs. Ours and theirs take turns.

On virtual time: 4 workers, one of them at a fifth of the speed, beside the time that the four speeds allow, with and
without copies of portions, and in a group with equal and with measured shares; portions that always take as long as
their samples, and as long times an exponential factor.

    python bench/batch_methods.py --data FOLDER    # with caltech101/101_ObjectCategories.tar.gz: six minutes
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import scipy.optimize
import torch
from torch import nn

import gradstream as gs
from common import RESULTS, command_line, keep, origin
from gradstream.job.files import load_job
from gradstream.testing.runs import least_squares

PAIRS, L2, PASSES, TURNS = 10, 1e-3, 60, 3
PORTIONS = 16
"""Portions of a pass."""


class Softmax(nn.Module):
    """Scores (n, classes), and the sum of squares of all weights."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, classes, dtype=torch.float64)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores of each sample, and the squares."""
        return self.linear(inputs), self.linear.weight.square().sum()


def objective(outputs: tuple[torch.Tensor, torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy, with L2/2 times the squares."""
    return nn.functional.cross_entropy(outputs[0], targets) + 0.5 * L2 * outputs[1]


def problems(folder: Path | None) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Samples (n, features) float64, of mean 0 and mean square length 1; and classes; by name."""
    sets: dict[str, Any] = {"fashion-mnist": gs.data.fashion_mnist()}
    if folder is not None:
        sets["caltech101"] = gs.data.caltech101(16, flat=True, root=folder)
    found = {}
    for name, data in sets.items():
        batch = data.batch(np.arange(data.num_samples))
        inputs = torch.as_tensor(np.asarray(batch.inputs)).reshape(data.num_samples, -1).double()
        inputs -= inputs.mean(0)
        found[name] = (
            inputs / inputs.square().sum(1).mean().sqrt(),
            torch.as_tensor(np.asarray(batch.targets)),
        )
    return found


def value(module: Softmax, inputs: torch.Tensor, targets: torch.Tensor) -> float:
    """The objective at the module's parameters."""
    with torch.no_grad():
        return float(objective(module(inputs), targets))


def by_scipy(inputs: torch.Tensor, targets: torch.Tensor, passes: int) -> Softmax:
    """SciPy's L-BFGS-B."""
    module = Softmax(inputs.shape[1], int(targets.max()) + 1)
    parameters = list(module.parameters())

    def f(x: Any) -> tuple[float, Any]:
        nn.utils.vector_to_parameters(torch.from_numpy(x.copy()), parameters)
        module.zero_grad()
        loss = objective(module(inputs), targets)
        loss.backward()
        return float(loss.detach()), np.concatenate([p.grad.numpy().ravel() for p in parameters])

    start = nn.utils.parameters_to_vector(parameters).detach().numpy()
    options = {"maxcor": PAIRS, "maxfun": passes, "maxiter": passes, "ftol": 0.0, "gtol": 0.0}
    found = scipy.optimize.minimize(f, start, jac=True, method="L-BFGS-B", options=options)
    nn.utils.vector_to_parameters(torch.from_numpy(found.x), parameters)
    return module


def by_torch(inputs: torch.Tensor, targets: torch.Tensor, passes: int) -> Softmax:
    """torch.optim.LBFGS."""
    module = Softmax(inputs.shape[1], int(targets.max()) + 1)
    optimizer = torch.optim.LBFGS(
        module.parameters(), max_iter=passes, max_eval=passes, history_size=PAIRS, tolerance_grad=0.0,
        tolerance_change=0.0, line_search_fn="strong_wolfe",
    )  # fmt: skip

    def closure() -> float:
        optimizer.zero_grad()
        loss = objective(module(inputs), targets)
        loss.backward()
        return float(loss.detach())

    optimizer.step(closure)  # type: ignore[arg-type]  # it takes numbers too
    return module


def job() -> gs.Job:
    """The job of `by_gradstream`, from the arguments NAME PASSES SERVERS [FOLDER].

    In a group the portions of a worker are summed up before an exchange: a round is a pass.
    """
    name, passes, servers, *folder = sys.argv[1:]
    inputs, targets = problems(Path(folder[0]) if folder else None)[name]
    features, classes = inputs.shape[1], int(targets.max()) + 1
    return gs.Job(
        gs.from_torch(lambda: Softmax(features, classes), objective),
        gs.from_arrays(inputs.numpy(), targets.numpy()),
        strategy=gs.LBFGS(history_size=PAIRS, max_eval=int(passes), tolerance_grad=0.0, tolerance_change=0.0),
        workers=2,
        servers=int(servers),
        batch_size=-(-len(inputs) // PORTIONS),
        accumulate=1 if int(servers) else PORTIONS // 2,
        epochs=int(passes) + 2,
    )


def by_gradstream(
    name: str, folder: Path | None, inputs: torch.Tensor, targets: torch.Tensor, servers: int
) -> tuple[Softmax, float]:
    """Ours in real processes, and its seconds from the first portion on."""
    with tempfile.TemporaryDirectory() as run_dir:
        words = [name, str(PASSES), str(servers), *([] if folder is None else [str(folder)])]
        run = gs.train(load_job(f"{__file__}:job", argv=[__file__, *words]), run_dir=run_dir)
    module = Softmax(inputs.shape[1], int(targets.max()) + 1)
    module.load_state_dict({name: torch.from_numpy(np.array(one)) for name, one in run.parameters.items()})
    return module, run.summary["train_s"]


def measured(name: str, folder: Path | None, inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, Any]:
    """Objectives and seconds of the three, by turns."""
    ours = {"gradstream": 1, "gradstream, in a group": 0}
    seconds: dict[str, list[float]] = {name: [] for name in (*ours, "scipy", "torch")}
    ends: dict[str, float] = {}
    for _ in range(TURNS):
        for other, peer in (("scipy", by_scipy), ("torch", by_torch)):
            begun = time.perf_counter()
            module = peer(inputs, targets, PASSES)
            seconds[other].append(time.perf_counter() - begun)
            ends[other] = value(module, inputs, targets)
        for own, servers in ours.items():
            module, own_s = by_gradstream(name, folder, inputs, targets, servers)
            seconds[own].append(own_s)
            ends[own] = value(module, inputs, targets)
    return {
        "samples": len(inputs),
        "parameters": sum(p.numel() for p in module.parameters()),
        "passes": PASSES,
        "objective": ends,
        "seconds": {name: statistics.median(all_s) for name, all_s in seconds.items()},
    }


def uneven(jitter: gs.sim.Jitter) -> dict[str, dict[str, float]]:
    """Virtual seconds with a worker at a fifth of the speed, divided by what the four speeds allow; by portions."""
    model, data = least_squares(1200, 8, whole=False, reduction="mean")
    costs = {"gradient": gs.sim.Cost(per_sample_s=2e-3, jitter=jitter)}

    def seconds(
        workers: int, size: int, speeds: dict[str, float], *, copies: bool = True, **options: Any
    ) -> float:
        config = gs.sim.SimulationConfig(costs=costs, speeds=speeds)
        method = gs.LBFGS(
            max_eval=10, tolerance_grad=0.0, tolerance_change=0.0, lr=0.1, line_search_fn=None, copies=copies
        )
        run = gs.simulate(
            model,
            data,
            strategy=method,
            workers=workers,
            batch_size=size,
            epochs=12,
            config=config,
            **options,
        )
        return float(run.summary["train_s"])

    found = {}
    for portions in (25, 50, 100, 150):
        size, slow = 1200 // portions, {"worker-3": 0.2}
        allowed_s = seconds(1, size, {}) / 3.2
        found[str(portions)] = {
            "copies": seconds(4, size, slow) / allowed_s,
            "none": seconds(4, size, slow, copies=False) / allowed_s,
            "group": seconds(4, size, slow, servers=0) / allowed_s,
            "group, measured shares": seconds(4, size, slow, servers=0, shares="measured") / allowed_s,
        }
        print(portions, found[str(portions)], flush=True)
    return found


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--data", type=Path, help="folder of Caltech-101; without it, Fashion-MNIST alone")
    given = parser.parse_args()
    torch.set_num_threads(2)
    record = {**origin(), "uneven": uneven(gs.sim.NoJitter()), "unsteady": uneven(gs.sim.Exponential())}
    for name, (inputs, targets) in problems(given.data).items():
        record[name] = measured(name, given.data, inputs, targets)
        print(name, json.dumps(record[name], indent=1))
    keep(RESULTS / "batch-methods.json", record)


if __name__ == "__main__":
    main()
