"""When is it quicker to divide the linear layers than to exchange their gradients (Krizhevsky, 2014)? On virtual time.

    python studies/hybrid/hybrid.py  # a minute; writes record.json

Each of K workers has b samples. Three ways, on the same machines:

* data parallel: each has the whole model. "beside": the sum of a layer's gradients, by a ring, begins as soon as the
  backward pass has them, and goes on beside it, the best that a data-parallel run can do. "behind": when it is over.
* model parallel: every layer is divided over all workers.
* hybrid: linear layers are divided, in each of the three turns. Convolutions' gradients are exchanged behind the
  backward pass: runs do so.

The networks are AlexNet (one tower, as in the paper), GoogLeNet (2014, without its side classifiers), and convolutions
of AlexNet with linear layers of less and less width, to find the share of weights at which the hybrid turns. The plans
are those of runs; the executor of runs carries them out without tensors, and bytes are counted as they are sent. A
worker computes 2 operations for each weight and place forward, and 4 back. It sends one message at a time, and receives
one at a time. The costs are below, the same for every point.
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradstream.model import Batch, from_torch
from gradstream.pipeline.executor import TensorTransfer
from gradstream.pipeline.hybrid import HYBRIDS, make_turns, run_turns
from gradstream.runtime.virtual import VirtualCluster, VirtualRuntime
from gradstream.split.cut import TorchPlan
from gradstream.split.hybrid_model import EVERYWHERE, plan_hybrid
from gradstream.split.trace import SAMPLES

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))
from common import command_line, keep, origin

RESULT = Path(__file__).with_name("record.json")

FLOPS = 1.4e12
"""Operations a second of a worker: about what a card of the paper's time achieved on its network."""

LINKS = {"6 GB/s": 6e9, "10 Gbit/s": 1.25e9, "1 Gbit/s": 125e6}
"""Bytes a second of a worker, each way. The first is a bus of 2014, as the paper's cards had."""

MESSAGE_S = 50e-6
WORKERS = (2, 4, 8)
SAMPLES_EACH = 128
WIDTHS = (16, 32, 64, 128, 256, 512, 1024, 4096)
TURNING = (32, 128)
"""Samples of a worker where the share of weights is sought at which the hybrid turns."""


def alexnet(width: int = 4096) -> nn.Module:
    """The network of the paper, one tower; 61 M parameters, 96 % of them in linear layers."""
    pool = [nn.ReLU(), nn.MaxPool2d(3, 2)]
    convolutions = [nn.Conv2d(3, 64, 11, 4, 2), *pool, nn.Conv2d(64, 192, 5, padding=2), *pool]
    convolutions += [
        nn.Conv2d(192, 384, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(384, 256, 3, padding=1),
        nn.ReLU(),
    ]
    linear = [nn.Linear(9216, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1000)]
    return nn.Sequential(*convolutions, nn.Conv2d(256, 256, 3, padding=1), *pool, nn.Flatten(), *linear)


class _Inception(nn.Module):
    def __init__(
        self, units: int, ones: int, threes: Sequence[int], fives: Sequence[int], pooled: int
    ) -> None:
        super().__init__()
        self.ones, self.pooled = nn.Conv2d(units, ones, 1), nn.Conv2d(units, pooled, 1)
        self.threes = nn.Sequential(
            nn.Conv2d(units, threes[0], 1),
            nn.ReLU(),
            nn.Conv2d(*threes, 3, padding=1),  # type: ignore[misc]
        )
        self.fives = nn.Sequential(
            nn.Conv2d(units, fives[0], 1),
            nn.ReLU(),
            nn.Conv2d(*fives, 5, padding=2),  # type: ignore[misc]
        )
        self.pool = nn.MaxPool2d(3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        branches = [self.ones(x), self.threes(x), self.fives(x), self.pooled(self.pool(x))]
        return torch.relu(torch.cat(branches, 1))


def googlenet() -> nn.Module:
    """GoogLeNet: 7 M parameters, 15 % of them in its one linear layer."""

    def pool() -> nn.Module:
        return nn.MaxPool2d(3, 2, ceil_mode=True)

    return nn.Sequential(
        *(nn.Conv2d(3, 64, 7, 2, 3), nn.ReLU(), pool(), nn.Conv2d(64, 64, 1), nn.ReLU()),
        *(nn.Conv2d(64, 192, 3, padding=1), nn.ReLU(), pool()),
        *(
            _Inception(192, 64, (96, 128), (16, 32), 32),
            _Inception(256, 128, (128, 192), (32, 96), 64),
            pool(),
        ),
        *(_Inception(480, 192, (96, 208), (16, 48), 64), _Inception(512, 160, (112, 224), (24, 64), 64)),
        *(_Inception(512, 128, (128, 256), (24, 64), 64), _Inception(512, 112, (144, 288), (32, 64), 64)),
        *(_Inception(528, 256, (160, 320), (32, 128), 128), pool()),
        *(_Inception(832, 256, (160, 320), (32, 128), 128), _Inception(832, 384, (192, 384), (48, 128), 128)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1024, 1000)),
    )


def plan_of(build: Callable[[], nn.Module], workers: int, layers: Sequence[str] | None) -> TorchPlan:
    """The plan of a run with these layers divided."""
    example = Batch(np.zeros((1, 3, 224, 224), np.float32), np.zeros(1, np.int64), 1, np.arange(1))
    return plan_hybrid(from_torch(build, nn.functional.cross_entropy), example, workers, layers)


def weighted(plan: TorchPlan) -> list[tuple[int, float, int]]:
    """(stage, operations forward for each sample, elements) of each layer or piece of one."""
    found = []
    for stage, nodes in zip(plan.stages, plan.nodes, strict=True):
        for node in nodes:
            weights = [piece for piece in plan.graph.tensors_of(node) if piece.name.endswith("weight")]
            if node.op == "call_function" and len(node.args) > 1 and hasattr(node.args[1], "meta"):
                weight: Any = node.args[1]
                shape = tuple(weight.meta["values"][0].shape) if "piece" in weight.meta else ()
            elif weights:
                shape = next(slot.shape for slot in plan.graph.layout.slots if slot.name == weights[0].name)
            else:
                continue
            if len(shape) > 1:
                places = node.meta["values"][0].numel() / SAMPLES[0]
                found.append((stage.number, 2 * places * math.prod(shape[1:]), math.prod(shape)))
    return found


class _Worker:
    """Implements `HybridStages` and `TensorChannel` of one worker: computing and its card take time."""

    def __init__(self, cluster: _Cluster, part: int) -> None:
        self._cluster, self._part = cluster, part

    async def forward(
        self, stage: int, turn: int, samples: int, values: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        await self._cluster.compute(self._part, stage, samples)
        return {name: torch.empty(samples, 0) for name in self._cluster.plan.stages[stage].outputs}

    async def backward(
        self, stage: int, turn: int, samples: int, gradients: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        await self._cluster.compute(self._part, stage, 2 * samples)
        return {name: torch.empty(samples, 0) for name in self._cluster.plan.stages[stage].inputs}

    async def send(self, transfer: TensorTransfer, tensor: Tensor) -> None:
        bytes_ = self._cluster.plan.value(transfer.value).bytes_of(len(tensor))
        self._cluster.send(self._part, transfer.target, bytes_, transfer)

    async def receive(self, transfer: TensorTransfer) -> Tensor:
        await self._cluster.arrived[transfer].wait()
        return torch.empty(transfer.samples or 0, 0)


class _Cluster:
    """Workers on virtual time. A worker's card sends its messages in order, each when the other's can receive."""

    def __init__(self, plan: TorchPlan, runtime: VirtualRuntime, bytes_s: float) -> None:
        self.plan, self._runtime, self._bytes_s = plan, runtime, bytes_s
        self.arrived: dict[object, asyncio.Event] = defaultdict(asyncio.Event)
        self.bytes = [0] * plan.parts
        self._outs, self._ins = ([asyncio.Lock() for _ in range(plan.parts)] for _ in range(2))
        self._flops = defaultdict[int, float](float)
        for stage, flops, _ in weighted(plan):
            self._flops[stage] += flops

    async def compute(self, part: int, stage: int, samples: int) -> None:
        """Takes the time of a pass."""
        await self._runtime.sleep(self._flops[stage] * samples / FLOPS)

    def send(self, source: int, target: int, size: int, what: object) -> None:
        """Sends a message, after those before it."""
        self.bytes[source] += size

        async def go() -> None:
            async with self._outs[source], self._ins[target]:
                await self._runtime.sleep(MESSAGE_S + size / self._bytes_s)
            self.arrived[what].set()

        self._runtime.spawn(go(), name=f"{what}")

    async def shares(self, part: int, half: str) -> None:
        """One half of an allreduce of the data-parallel layers: every worker sends every other one a part of them."""
        count, elems = self.plan.parts, [sum(b - a for a, b in s.ranges) for s in self.plan.stages]
        for step in range(1, count):
            other = (part + step) % count
            self.send(part, other, 4 * elems[part if half == "gather" else other], (half, part, other))
        for other in range(count):
            if other != part:
                await self.arrived[half, other, part].wait()


def turns_s(plan: TorchPlan, turns: str, samples: int, bytes_s: float) -> tuple[float, int]:
    """Seconds of a step, and the most bytes that a worker sends."""
    virtual = VirtualCluster(0)
    runtime = virtual.runtime("workers")
    cluster = _Cluster(plan, runtime, bytes_s)

    async def work(part: int) -> None:
        worker = _Worker(cluster, part)
        await cluster.shares(part, "gather")
        await run_turns(
            plan,
            part,
            make_turns(turns, samples * plan.parts, plan.parts),
            worker,
            worker,
            lambda name, rows: torch.empty(rows[1] - rows[0], 0),
        )
        await cluster.shares(part, "scatter")

    async def all_parts() -> None:
        await runtime.gather(*map(work, range(plan.parts)))

    virtual.run(all_parts())
    return runtime.now() / 1e9, max(cluster.bytes)


def data_parallel_s(plan: TorchPlan, workers: int, samples: int, bytes_s: float) -> tuple[float, float]:
    """The same of a data-parallel step: backprop, and the exchange of each layer beside it."""
    layers = [(flops * samples / FLOPS, 4 * elems) for _, flops, elems in weighted(plan)]
    now = sum(seconds for seconds, _ in layers)
    sent_s, total = 0.0, 0.0
    for seconds, size in reversed(layers):
        now += 2 * seconds
        sent = 2 * (workers - 1) / workers * size
        total += sent
        sent_s = max(now, sent_s) + sent / bytes_s + 2 * (workers - 1) * MESSAGE_S
    return max(now, sent_s), total


def linear_share(plan: TorchPlan) -> float:
    """The share of weights that are in divided layers."""
    pieces = [stage for stage in plan.stages[plan.parts :] if stage.part != EVERYWHERE]
    return sum(b - a for stage in pieces for a, b in stage.ranges) / plan.elems


def compare(
    build: Callable[[], nn.Module], workers: int, samples: int, whole: TorchPlan
) -> list[dict[str, Any]]:
    """All ways for one number of workers, over each link."""
    hybrid = plan_of(build, workers, None)
    names = [name for name, module in build_names(build) if isinstance(module, nn.Linear | nn.Conv2d)]
    divided, alike = plan_of(build, workers, names), plan_of(build, workers, ())
    alone_s = 3 * sum(flops for _, flops, _ in weighted(whole)) * samples / FLOPS
    rows = []
    for link, bytes_s in LINKS.items():
        ways = {
            "data parallel, beside": data_parallel_s(whole, workers, samples, bytes_s),
            "data parallel, behind": turns_s(alike, "assemble", samples, bytes_s),
            "model parallel": turns_s(divided, "assemble", samples, bytes_s),
        }
        ways |= {f"hybrid, {turns}": turns_s(hybrid, turns, samples, bytes_s) for turns in HYBRIDS}
        rows.append(
            {
                "workers": workers,
                "link": link,
                "linear_share": linear_share(hybrid),
                "speedup": {way: workers * alone_s / seconds for way, (seconds, _) in ways.items()},
                "sent_mb": {way: bytes_ / 1e6 for way, (_, bytes_) in ways.items()},
            }
        )
    return rows


def turning(workers: int) -> list[dict[str, Any]]:
    """By width of the linear layers: their share of the weights, bytes, and seconds over each link."""
    rows = []
    for width in WIDTHS:

        def build(width: int = width) -> nn.Module:
            return alexnet(width)

        plan, whole, alike = plan_of(build, workers, None), plan_of(build, 1, ()), plan_of(build, workers, ())
        for samples, (link, bytes_s) in product(TURNING, LINKS.items()):
            ways = {
                "data parallel, beside": data_parallel_s(whole, workers, samples, bytes_s),
                "data parallel, behind": turns_s(alike, "assemble", samples, bytes_s),
                "hybrid": turns_s(plan, "assemble", samples, bytes_s),
            }
            rows.append(
                {
                    "workers": workers,
                    "samples": samples,
                    "link": link,
                    "width": width,
                    "linear_share": linear_share(plan),
                    "seconds": {way: seconds for way, (seconds, _) in ways.items()},
                    "sent_mb": {way: bytes_ / 1e6 for way, (_, bytes_) in ways.items()},
                }
            )
    return rows


def build_names(build: Callable[[], nn.Module]) -> list[tuple[str, nn.Module]]:
    """The modules by name, without memory."""
    with torch.device("meta"):
        return list(build().named_modules())


def main() -> None:
    command_line(__doc__).parse_args()
    networks = {}
    for name, build in (("AlexNet", alexnet), ("GoogLeNet", googlenet)):
        whole = plan_of(build, 1, ())
        flop = sum(flops for _, flops, _ in weighted(whole))
        print(f"{name}: {whole.elems:,} parameters, {flop / 1e9:.2f}e9 operations forward")
        rows = [row for workers in WORKERS for row in compare(build, workers, SAMPLES_EACH, whole)]
        networks[name] = {"elems": whole.elems, "forward_flop": flop, "rows": rows}
        for row in rows:
            speedups = {way: round(factor, 2) for way, factor in row["speedup"].items()}
            print(f"{name}, {row['workers']} workers, {row['link']}: {speedups}", flush=True)
    turned = [row for workers in WORKERS for row in turning(workers)]
    record = {
        "networks": networks,
        "turning": turned,
        "parameters": {
            "flops": FLOPS,
            "links_bytes_s": LINKS,
            "message_s": MESSAGE_S,
            "samples_each": SAMPLES_EACH,
        },
        **origin(),
    }
    keep(RESULT, record)


if __name__ == "__main__":
    main()
