"""Question: what does a step on a GPU cost beside torch's own, when the parameters stay in main memory?

gradstream copies the parameters to the GPU and the gradient back in each step. By turns, in one process, medians:

    torch        forward, backward and SGD with momentum, all of them on the GPU: what one GPU alone would take
    copies       the parameters to the GPU and as many bytes back, from and to pinned memory, with nothing else
    by hand      parameters to the GPU, forward, backward, then the gradient back from pinned memory, one after another
    gradstream   `gradient` of the model: the same copies, while the GPU computes

The bound of "gradstream" is copies to the GPU + max(computing, copies back): the gradient can hide behind backward,
parameters cannot.

    python bench/device_step.py                # takes a GPU; writes bench/results/device-step.json
"""

from __future__ import annotations

import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import gradstream as gs
from common import RESULTS, ROOT, command_line, keep, origin
from gradstream.model import Batch
from gradstream.model.device_model import on_device

sys.path.insert(0, str(ROOT / "examples"))
import caltech101

Build = Callable[[], nn.Module]


def transformer() -> nn.Module:
    """Eight blocks of width 1,024: 102 million parameters, and a score for each of 101 classes."""
    block = nn.TransformerEncoderLayer(1024, 16, 4096, 0.0, batch_first=True, norm_first=True)
    blocks = nn.TransformerEncoder(block, 8, enable_nested_tensor=False)
    return nn.Sequential(
        nn.Unflatten(1, (48, 1024)), blocks, nn.Flatten(), nn.Linear(48 * 1024, 101), nn.LogSoftmax(1)
    )


NETWORKS: dict[str, tuple[Build, int]] = {
    "large": (caltech101.large_network, 128),
    "transformer": (transformer, 64),
}


def steps(build: Build, size: int) -> dict[str, Callable[[], None]]:
    """What is timed; each has ended, on the GPU too, when it returns."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((size, 3 * 128 * 128), np.float32), rng.integers(0, 101, size)
    batch = Batch(x, y, size, np.arange(size))
    module = build().cuda()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
    model = on_device(gs.from_torch(build, caltech101.loss), "cuda")
    elems = model.layout.elems
    there = torch.zeros(elems, device="cuda")
    parameters, gradient = torch.zeros(elems), torch.zeros(elems)
    model.init(0, parameters)
    pinned = parameters.clone().pin_memory(), gradient.clone().pin_memory()

    def computed() -> None:
        inputs, targets = torch.as_tensor(x).cuda(), torch.as_tensor(y).cuda()
        optimizer.zero_grad()
        caltech101.loss(module(inputs), targets).backward()

    def own() -> None:
        computed()
        optimizer.step()

    def copies(*, compute: bool = False) -> None:
        there.copy_(pinned[0], non_blocking=True)
        if compute:
            computed()
        pinned[1].copy_(there, non_blocking=True)

    def ours() -> None:
        model.gradient(parameters, batch, gradient, seed=0, report=lambda elems: None)

    named = {
        "torch": own,
        "copies": copies,
        "by hand": functools.partial(copies, compute=True),
        "gradstream": ours,
    }
    return {name: functools.partial(_ended, step) for name, step in named.items()}


def _ended(step: Callable[[], None]) -> None:
    step()
    torch.cuda.synchronize()


def measured(build: Build, size: int, rounds: int) -> dict[str, Any]:
    """Median milliseconds of each, and their ratios."""
    found: dict[str, list[float]] = {}
    timed = steps(build, size)
    for number in range(rounds + 5):
        for name, step in timed.items():
            began = time.perf_counter()
            step()
            if number >= 5:
                found.setdefault(name, []).append(1e3 * (time.perf_counter() - began))
    medians = {name: statistics.median(times) for name, times in found.items()}
    one_way = medians["copies"] / 2
    bound = one_way + max(medians["torch"], one_way)
    return {
        "parameters": sum(one.numel() for one in build().parameters()),
        "batch_size": size,
        "median_ms": medians,
        "bound_ms": bound,
        "share_of_bound": bound / medians["gradstream"],
        "by_hand_over_gradstream": medians["by hand"] / medians["gradstream"],
        "torch_over_gradstream": medians["torch"] / medians["gradstream"],
    }


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--out", default=str(RESULTS / "device-step.json"), help='the record; "" for nowhere')
    given = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("torch has no CUDA device on this machine")
    rows = {name: measured(*network, given.rounds) for name, network in NETWORKS.items()}
    record = {
        "question": (__doc__ or "").splitlines()[0],
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "rows": rows,
        **origin(),
    }
    print(json.dumps(record, indent=1))
    if given.out:
        keep(Path(given.out), record)


if __name__ == "__main__":
    main()
