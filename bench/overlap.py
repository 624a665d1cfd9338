"""Question: what does wait-free backprop win for a deep network, for real?

Two workers of one thread each, as two machines on a network of 1 Gbit/s (namespaces of this one, `tc tbf`),
train a CNN of 24 equal convolutions, 3.5 million parameters: the gradient of a step takes about as long to be
computed as to be exchanged. One run goes through windows of steps, in which buckets leave by turns during
backprop and after it: two neighbours are a round, so both see the same machine. Takes root, `ip` and `tc`.

    python bench/overlap.py            # two minutes on two cores

On virtual time the seconds of a step are those of a recursion, exactly (`tests/collectives/test_allreduce_time.py`).
Here the sums and the sending take a part of the same two cores, which no overlap can win back. Prints figures, and
keeps them with machine, commit and date in bench/results/overlap.json.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import gradstream as gs
from common import RESULTS, ROOT, command_line, keep, now, run_on
from gradstream.machine.description import describe_machine, git_commit
from gradstream.run.result import Run
from gradstream.strategies import AllReduce
from kit.machines import Machines, unavailable

WORKERS, BATCH, CLASSES = 2, 16, 10
LAYERS, CHANNELS, PIXELS = 24, 128, 8
WARM = 6  # steps


# ---- what is trained --------------------------------------------------------------------------------


def deep_network() -> nn.Module:
    """24 convolutions of 128 channels on 8 x 8 pixels: 0.6 MB of gradient each."""
    layers: list[nn.Module] = [nn.Conv2d(3, CHANNELS, 3, padding=1), nn.ReLU()]
    for _ in range(LAYERS - 1):
        layers += [nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(CHANNELS * PIXELS * PIXELS, CLASSES))


def job() -> gs.Job:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1024, 3, PIXELS, PIXELS), dtype=np.float32)
    return gs.Job(
        model=gs.from_torch(deep_network, nn.functional.cross_entropy),
        data=gs.from_arrays(x, rng.integers(0, CLASSES, 1024)),
        workers=WORKERS,
        batch_size=BATCH,
        optimizer=gs.optim.SGD(lr=1e-3),
    )


@dataclass(frozen=True, slots=True)
class Alternating(AllReduce):
    """AllReduce that overlaps in every other window of steps, after those that warm up."""

    window: int = 8

    async def train(self, worker: Any) -> None:
        """See `Strategy.train`."""
        ways = [replace(self, overlap=True), replace(self, overlap=False)]
        steps = worker.batches()
        first = _Window(worker, steps, WARM)
        await AllReduce.train(ways[0], first)
        for number in range(1 << 30):
            one = _Window(worker, steps, self.window)
            await AllReduce.train(ways[number % 2], one)
            if one.ended:
                return


class _Window:
    """A worker whose minibatches end after some steps, and go on in the next window."""

    def __init__(self, worker: Any, steps: AsyncIterator[Any], length: int) -> None:
        self._worker = worker
        self._steps = steps
        self._length = length
        self.ended = False

    async def batches(self) -> AsyncIterator[Any]:
        """See `strategies.api.Worker`."""
        for _ in range(self._length):
            try:
                yield await anext(self._steps)
            except StopAsyncIteration:
                self.ended = True
                return

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)


# ---- two machines -----------------------------------------------------------------------------------


def trained(given: argparse.Namespace, machines: Machines, folder: Path) -> Run:
    """The run, from the launcher's first word to the last."""
    steps = WARM + 2 * given.rounds * given.steps
    options = ["--strategy", f"{__file__}:Alternating", "--steps", str(steps), "--json", "--insecure"]
    options += ["--set", f"strategy.window={given.steps}", "--set", f"strategy.bucket_mib={given.bucket_mib}"]
    options += ["--servers-on", "launcher"]  # one card carries everybody's bytes
    return run_on(machines, folder, f"{__file__}:job", *options)


# ---- figures ----------------------------------------------------------------------------------------


def rounds_of(run: Run, given: argparse.Namespace) -> list[dict[str, float]]:
    """Median seconds of a step of both workers, by way; the first step of a window is left out."""
    out: list[dict[str, float]] = []
    for number in range(given.rounds):
        row = {}
        for place, way in enumerate(("overlapped", "serial")):
            first = WARM + (2 * number + place) * given.steps
            inside = range(first + 1, first + given.steps)
            steps = [event for event in run.events if event["event"] == "step" and event["step"] in inside]
            row[f"{way}_s"] = statistics.median(event["compute_s"] + event["wait_s"] for event in steps)
            row[f"{way}_compute_s"] = statistics.median(event["compute_s"] for event in steps)
        out.append(row | {"ratio": row["serial_s"] / row["overlapped_s"]})
    return out


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=8, help="of a window")
    parser.add_argument("--rate", default="1gbit", help="of each network card")
    parser.add_argument("--bucket-mib", type=float, default=1.0)
    given = parser.parse_args()
    if reason := unavailable():
        raise SystemExit(reason)
    with tempfile.TemporaryDirectory() as folder, Machines(WORKERS, rate=given.rate) as machines:
        run = trained(given, machines, Path(folder))
    rounds = rounds_of(run, given)
    middle = {name: statistics.median(row[name] for row in rounds) for name in rounds[0]}
    hidden_s = middle["serial_s"] - middle["overlapped_s"]
    waited_s = middle["serial_s"] - middle["serial_compute_s"]
    print(
        f"{run.summary['num_parameters']:,} parameters in {LAYERS} convolutions, {given.rate}, by "
        f"{run.summary['group']}\n"
        f"a step takes {1e3 * middle['serial_s']:.0f} ms with the exchange after backprop "
        f"({1e3 * waited_s:.0f} ms of it) and {1e3 * middle['overlapped_s']:.0f} ms with the exchange beside "
        f"it: {middle['ratio']:.2f} times faster, {hidden_s / waited_s:.0%} of the exchange is hidden"
    )
    record = {
        "parameters": run.summary["num_parameters"],
        "group": run.summary["group"],
        "median": middle,
        "rounds": rounds,
        "asked": {"batch": BATCH, "warm": WARM, **vars(given)},
        "date": now(),
        "commit": git_commit(ROOT),
        "torch": torch.__version__,
        "machine": describe_machine({})["machine"],
    }
    keep(RESULTS / "overlap.json", record)


if __name__ == "__main__":
    main()
