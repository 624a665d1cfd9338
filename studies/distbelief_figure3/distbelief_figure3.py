"""DistBelief's Figure 3 (Dean et al., 2012): time of a minibatch, divided over more and more machines, on virtual time.

    python studies/distbelief_figure3/distbelief_figure3.py  # some minutes; writes record.json

Two networks, divided by units, each unit's state sent once to each machine that uses it:

* speech: dense, 440 inputs, four layers of 2,560, 8,192 outputs, 42 M parameters. A machine has some units of each
  layer, and needs those of all others for the next one. The paper's peak is 2.2 x on 8 machines.
* images: locally connected, 1.7 billion parameters in three layers of 8 channels. A machine has a tile of the image,
  and needs the edges of its neighbours'. The paper has more than 12 x on 81 machines.

The executor of pipelines carries out one minibatch's passes in order, without tensors. The cost parameters are below,
the same for every point: a machine has 16 cores, as in the paper, the rest are usual figures of 2012. The paper does
not say how many samples a minibatch has, so there are two curves. A machine computes 2 operations for each weight and
sample forward, and 4 back. It sends one message at a time.
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import torch

from gradstream.pipeline.executor import PipelineExecutor, TensorTransfer
from gradstream.pipeline.schedule import StagePass
from gradstream.runtime.virtual import VirtualCluster, VirtualRuntime
from gradstream.split.plan import DATA, SplitPlan, Stage, Value

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))
from common import command_line, keep, origin

RESULT = Path(__file__).with_name("record.json")

CORE_FLOPS = 8e9  # of one core: SSE, float32
CORES = 16
CARD_BYTES_S = 125e6  # 1 Gbit/s
MESSAGE_S = 100e-6  # of a machine, for each message that it sends or receives
SAMPLES = (32, 128)  # of a minibatch: the paper does not say

SPEECH = (440, 2560, 2560, 2560, 2560, 8192)
SPEECH_MACHINES = (1, 2, 4, 8, 16, 32)

IMAGE_SIDE, CHANNELS, LAYERS = 200, 8, 3
FIELD = round(
    math.sqrt(1.7e9 / (LAYERS * IMAGE_SIDE**2 * CHANNELS * CHANNELS))
)  # so that weights are 1.7 billion
IMAGE_MACHINES = (1, 4, 16, 36, 64, 81, 100, 144)

_NOTHING = torch.empty(0)

Flops = Mapping[int, float]
"""Operations of the forward pass of each stage, for one sample."""


def speech(machines: int) -> tuple[SplitPlan, Flops]:
    """The dense network: each layer's units are divided evenly, and everybody needs all of the layer before."""
    stages, values, flops = (
        list[Stage](),
        [Value("inputs", DATA, (SPEECH[0],), torch.float32)],
        dict[int, float](),
    )
    before = ("inputs",)
    for layer, (inputs, outputs) in enumerate(pairwise(SPEECH)):
        last = layer == len(SPEECH) - 2
        names = tuple(f"h{layer}.{machine}" for machine in range(machines))
        for machine in range(machines):
            number = len(stages)
            stages.append(Stage(number, machine, before, () if last else (names[machine],)))
            flops[number] = 2 * inputs * outputs / machines
            if not last:
                values.append(Value(names[machine], number, (outputs // machines,), torch.float32))
        before = names
    return SplitPlan(machines, tuple(stages), tuple(values), 0), flops


def images(machines: int) -> tuple[SplitPlan, Flops]:
    """The locally connected network on a grid of tiles, whose machines need the edges of up to 8 neighbours."""
    grid = math.isqrt(machines)
    tile, halo = IMAGE_SIDE / grid, FIELD // 2
    stages, values = list[Stage](), [Value("inputs", DATA, (CHANNELS, round(tile) ** 2), torch.float32)]
    flops = dict[int, float]()
    for layer in range(LAYERS):
        last = layer == LAYERS - 1
        for machine in range(machines):
            number, row, column = len(stages), *divmod(machine, grid)
            around = [
                (row + down) * grid + column + right
                for down in (-1, 0, 1)
                for right in (-1, 0, 1)
                if (down or right) and 0 <= row + down < grid and 0 <= column + right < grid
            ]
            inputs = tuple(f"h{layer - 1}.{one}>{machine}" for one in around) if layer else ("inputs",)
            outputs = () if last else tuple(f"h{layer}.{machine}>{one}" for one in around)
            stages.append(Stage(number, machine, inputs, outputs))
            flops[number] = 2 * 1.7e9 / LAYERS / machines
            for name, other in zip(outputs, around, strict=False):
                straight = abs(other - machine) in (1, grid)
                units = CHANNELS * halo * (tile if straight else halo)
                values.append(Value(name, number, (round(units),), torch.float32))
    return SplitPlan(machines, tuple(stages), tuple(values), 0), flops


class _Machines:
    """Implements `Stages` and `TensorChannel` of one machine: computing and its card take time."""

    def __init__(
        self,
        plan: SplitPlan,
        part: int,
        runtime: VirtualRuntime,
        flops: Flops,
        arrived: Mapping[TensorTransfer, asyncio.Event],
        samples: int,
    ) -> None:
        self._samples = samples
        self._plan, self._runtime, self._flops, self._arrived = plan, runtime, flops, arrived
        self._card = asyncio.Lock()
        self._values = {value.name: value for value in plan.values}
        self._messages = 0  # that the machine has not paid for yet

    async def _compute(self, stage: int, factor: float) -> None:
        flop = factor * self._flops[stage] * self._samples
        seconds, self._messages = flop / (CORE_FLOPS * CORES) + MESSAGE_S * self._messages, 0
        await self._runtime.sleep(seconds)

    async def forward(
        self, stage: int, micro_batch: int, values: Mapping[str, torch.Tensor]
    ) -> Mapping[str, torch.Tensor]:
        await self._compute(stage, 1)
        return dict.fromkeys(self._plan.stages[stage].outputs, _NOTHING)

    async def backward(
        self, stage: int, micro_batch: int, gradients: Mapping[str, torch.Tensor]
    ) -> Mapping[str, torch.Tensor]:
        await self._compute(stage, 2)
        return dict.fromkeys(self._plan.stages[stage].inputs, _NOTHING)

    async def weights(self, stage: int, micro_batch: int) -> None:
        raise AssertionError

    async def send(self, transfer: TensorTransfer, tensor: torch.Tensor) -> None:
        value, reads = self._values[transfer.value], transfer.value == "inputs"
        async with self._card:  # one message at a time
            if not reads:  # every machine has its own part of the input
                self._messages += 1
                await self._runtime.sleep(value.bytes_of(self._samples) / CARD_BYTES_S)
        self._arrived[transfer].set()

    async def receive(self, transfer: TensorTransfer) -> torch.Tensor:
        await self._arrived[transfer].wait()
        self._messages += transfer.value != "inputs"
        return _NOTHING


def seconds(plan: SplitPlan, flops: Flops, samples: int) -> float:
    """Seconds of one minibatch: all layers forward, then back."""
    cluster = VirtualCluster(0)
    runtime = cluster.runtime("machines")
    arrived: Mapping[TensorTransfer, asyncio.Event] = defaultdict(asyncio.Event)
    machines = [_Machines(plan, part, runtime, flops, arrived, samples) for part in range(plan.parts)]

    async def run() -> None:
        works = []
        for part, machine in enumerate(machines):
            own = [stage.number for stage in plan.stages_of(part)]
            reads = [StagePass("forward", DATA, 0)] if part == 0 else []
            passes = [StagePass("forward", one, 0) for one in own]
            passes += [StagePass("backward", one, 0) for one in own[::-1]]
            works.append(
                PipelineExecutor(plan, part, machine, machine, lambda name, number: _NOTHING).run(
                    [*reads, *passes]
                )
            )
        await runtime.gather(*works)

    cluster.run(run())
    return runtime.now() / 1e9


def speedups(
    make: Callable[[int], tuple[SplitPlan, Flops]], counts: Sequence[int], samples: int
) -> dict[int, tuple[float, float]]:
    """By number of machines: seconds of a minibatch, and how many times as fast as one."""
    found: dict[int, tuple[float, float]] = {}
    for count in counts:
        took_s = seconds(*make(count), samples)
        found[count] = took_s, (found[counts[0]][0] if found else took_s) / took_s
        print(f"{make.__name__}, {samples} samples, {count} machines: {found[count][1]:.2f} x", flush=True)
    return found


def main() -> None:
    command_line(__doc__).parse_args()
    record = {
        "speech": {samples: speedups(speech, SPEECH_MACHINES, samples) for samples in SAMPLES},
        "images": {samples: speedups(images, IMAGE_MACHINES, samples) for samples in SAMPLES},
        "parameters": {
            "core_flops": CORE_FLOPS,
            "cores": CORES,
            "card_bytes_s": CARD_BYTES_S,
            "message_s": MESSAGE_S,
            "field": FIELD,
        },
        **origin(),
    }
    keep(RESULT, record)


if __name__ == "__main__":
    main()
