"""Question: what do norms of whole tensors cost where each worker has a part of the optimizer's state?

LAMB on a transformer's tensors, on one core: updates by S workers, each of its own slices of all buckets, one after the
other, with the exchange of the tensors' sums; divided by updates of the whole vector by one worker. Beside it LAMB and
LARS over AdamW and SGD, on the whole vector. The least of `--repeats` measurements of each, taken by turns.

    python studies/large_batch_rules/large_batch_rules.py  # 12,609,536 float32; writes record.json
    python studies/large_batch_rules/large_batch_rules.py --layers 1 --out ""
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gradstream.collectives.factory import form_group
from gradstream.collectives.group import Buckets, GroupMembers
from gradstream.memory import Memory
from gradstream.optim import LAMB, LARS, SGD, AdamW, Optimizer
from gradstream.optim.groups import GroupedRule, add_up
from gradstream.runtime.real import RealRuntime
from gradstream.transport.base import Identity
from gradstream.transport.socket.tcp import TcpEndpoint
from gradstream.worker.updater import Updater

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))
from common import command_line, origin

WIDTH, BUCKET_ELEMS, WORKERS = 512, 1 << 20, (2, 4, 8)
"""Buckets are those of an allreduce: 4 MiB."""


def tensors_of(layers: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of a transformer."""
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(layers):
        for name, shape in (
            ("qkv", (3 * WIDTH, WIDTH)),
            ("out", (WIDTH, WIDTH)),
            ("up", (4 * WIDTH, WIDTH)),
            ("down", (WIDTH, 4 * WIDTH)),
        ):
            shapes |= {f"{layer}.{name}.weight": shape, f"{layer}.{name}.bias": shape[:1]}
        shapes |= {f"{layer}.norm{one}": (WIDTH,) for one in range(4)}
    return shapes


class Subject:
    """A model's vectors, and updates of them.

    Args:
        shapes: of the tensors, by name.
    """

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        ends = list(itertools.accumulate((math.prod(shape) for shape in shapes.values()), initial=0))
        self._tensors = list(zip(shapes, ends, ends[1:], strict=False))
        self._shapes = shapes
        self.elems, self.num_tensors = ends[-1], len(shapes)
        torch.manual_seed(0)
        self.parameters, self.gradient = torch.randn(self.elems) / 30, torch.randn(self.elems)
        self._memory = Memory()

    def updaters(self, rule: Optimizer, workers: int) -> list[tuple[Updater, list[tuple[int, torch.Tensor]]]]:
        """Each worker's rule, and its gradients."""
        grouped, buckets = (
            GroupedRule(rule, (), self._tensors, None, self._shapes),
            Buckets(self.elems, BUCKET_ELEMS, workers),
        )
        return [
            (
                Updater(self._memory.allocate, rule, grouped, owned, torch.float32),
                [(start, self.gradient[start:stop]) for start, stop in owned],
            )
            for owned in map(buckets.owned, range(workers))
        ]

    def update(self, rule: Optimizer, workers: int) -> Callable[[int], None]:
        """An update of the whole vector, by so many workers one after the other."""
        held = self.updaters(rule, workers)

        def work(step: int) -> None:
            sums = None
            if held[0][0].per_tensor:
                pieces = [one.partial_sums(self.parameters, mine, step=step) for one, mine in held]
                sums = add_up(piece for found in pieces for piece in found)
            for one, mine in held:
                one.update(self.parameters, mine, sums, lr=1e-4, step=step)

        return work


async def exchange_s(num_tensors: int, repeats: int) -> float:
    """Seconds in which two workers add up the sums of all tensors."""
    names = ("worker-0", "worker-1")
    runtimes = [RealRuntime(name) for name in names]
    ends = [
        TcpEndpoint(Identity("bench", one.node, 1, fingerprint=1, secret=b"a" * 32), one) for one in runtimes
    ]
    for end in ends:
        await end.start()
    for end, other, name in zip(ends, ends[::-1], names[::-1], strict=True):
        end.know(name, other.address)
    groups = await asyncio.gather(
        *(
            form_group(runtime, end, GroupMembers(names, rank, 1), "ring")
            for rank, (runtime, end) in enumerate(zip(runtimes, ends, strict=True))
        )
    )
    vectors = [group.allocate(2 * num_tensors, torch.float64, "sums") for group in groups]
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        await asyncio.gather(*(group.allreduce(one.all) for group, one in zip(groups, vectors, strict=True)))
        times.append(time.perf_counter() - begun)
    for group, end, runtime in zip(groups, ends, runtimes, strict=True):
        await group.close()
        await end.close()
        runtime.close()
    return min(times)


def measured(works: dict[str, Callable[[int], None]], repeats: int) -> dict[str, float]:
    """The shortest time of each, in seconds; they are taken by turns."""
    times: defaultdict[str, list[float]] = defaultdict(list)
    for step in range(1, repeats + 1):
        for name, work in works.items():
            begun = time.perf_counter()
            work(step)
            times[name].append(time.perf_counter() - begun)
    return {name: min(found) for name, found in times.items()}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", default=str(Path(__file__).with_name("record.json")))
    options = parser.parse_args()
    torch.set_num_threads(1)
    subject = Subject(tensors_of(options.layers))
    rules: dict[str, Optimizer] = {"sgd": SGD(0.1, 0.9), "lars": LARS(0.1), "adamw": AdamW(), "lamb": LAMB()}
    works = {name: subject.update(rule, 1) for name, rule in rules.items()}
    works |= {f"lamb of {workers}": subject.update(rules["lamb"], workers) for workers in WORKERS}
    seconds = measured(works, options.repeats)
    exchange = asyncio.run(exchange_s(subject.num_tensors, 10 * options.repeats))
    found: dict[str, Any] = {
        "elems": subject.elems,
        "tensors": subject.num_tensors,
        "ms": {name: round(1e3 * one, 2) for name, one in seconds.items()},
        "exchange_of_sums_ms": round(1e3 * exchange, 3),
        "sharded_over_whole": {
            workers: round(
                (seconds[f"lamb of {workers}"] / workers + exchange) / (seconds["lamb"] / workers), 3
            )
            for workers in WORKERS
        },
        **origin(),
    }
    text = json.dumps(found, indent=1)
    print(text)
    if options.out:
        Path(options.out).write_text(text + "\n")


if __name__ == "__main__":
    main()
