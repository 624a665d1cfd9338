"""Question: with which rate does each family of methods need the fewest minibatches to the goals of `slow_links.py`?

One process computes what four machines would: gradients of joined minibatches (family "joined"), averages of four
models every 20 minibatches ("local"), or DiLoCo's outer steps on them ("outer", ν = 0.7, μ = 0.9). No link is in it,
so the rates suit gradstream and its peers alike. A rate is given up at twice the minibatches of the best one so far.

    python studies/slow_links/rates.py  # about half an hour of one core
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))
from common import command_line, keep_part, kept, origin
from tasks import TASKS, Task, score

WORKERS, PERIOD, LOOK = 4, 20, 10
FAMILIES = ("joined", "local", "outer")
GRID = {"cnn": (0.02, 0.05, 0.1), "small": (0.01, 0.02, 0.04), "text": (2e-4, 5e-4, 1e-3)}
MOST = {"cnn": 400, "small": 400, "text": 800}
RECORD = Path(__file__).with_name("record.json")


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--task", choices=[*TASKS, ""], default="")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    record: dict[str, Any] = {"rows": {}} | kept(RECORD).get("rates", {})
    record |= {"question": (__doc__ or "").splitlines()[0], **origin()}
    for name, task in TASKS.items():
        for family in FAMILIES if given.task in ("", name) else ():
            best, row = MOST[name], record["rows"].setdefault(f"{name}, {family}", {})
            for rate in GRID[name]:
                if str(rate) not in row:
                    row[str(rate)] = minibatches(task, family, rate, min(MOST[name], 2 * best))
                best = min(best, row[str(rate)] or best)
                print(name, family, rate, row[str(rate)], flush=True)
                keep_part(RECORD, "rates", record)


def minibatches(task: Task, family: str, rate: float, most: int) -> int | None:
    """Until the goal is reached, of each worker; None where it is not."""
    torch.manual_seed(0)
    data, first = task.data(), task.network()
    models = [first] if family == "joined" else [first, *(copy.deepcopy(first) for _ in range(WORKERS - 1))]
    inner = [task.optimizer(model.parameters(), rate) for model in models]
    outer = None
    if family == "outer":
        start = copy.deepcopy(first)
        outer = start, torch.optim.SGD(start.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    look = LOOK if family == "joined" else PERIOD
    for step, ids in enumerate(_minibatches(data.num_samples, task.batch * WORKERS), 1):
        for model, optimizer, own in zip(models, inner, np.split(ids, len(models)), strict=True):
            batch = data.batch(own)
            optimizer.zero_grad()
            task.loss(model(torch.as_tensor(batch.inputs)), torch.as_tensor(batch.targets)).backward()
            optimizer.step()
        if family != "joined" and step % PERIOD == 0:
            _exchange(models, outer)
        if step % look == 0 and task.reached(score(task, first, data)):
            return step
        if step >= most:
            break
    return None


def _minibatches(samples: int, size: int) -> Iterator[np.ndarray[Any, Any]]:
    rng = np.random.default_rng(0)
    while True:
        order = rng.permutation(samples)
        for first in range(0, samples - size + 1, size):
            yield order[first : first + size]


@torch.no_grad()
def _exchange(models: list[nn.Module], outer: tuple[nn.Module, torch.optim.Optimizer] | None) -> None:
    """All models become their mean, or what the outer rule makes of it."""
    start = outer[0].parameters() if outer else models[0].parameters()
    for first, *own in zip(start, *(model.parameters() for model in models), strict=True):
        mean = torch.stack(own).mean(0)
        first.grad = first - mean if outer else None
        if not outer:
            first.copy_(mean)
    if outer:
        outer[1].step()
    for first, *own in zip(
        outer[0].parameters() if outer else models[0].parameters(),
        *(model.parameters() for model in models),
        strict=True,
    ):
        for one in own:
            one.copy_(first)


if __name__ == "__main__":
    main()
