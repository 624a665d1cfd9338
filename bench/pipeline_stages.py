"""Question: how quick is a pipeline of two processes beside torch.distributed.pipelining, with the same stages?

Two processes, one thread each, each with half of a network of linear layers. A minibatch goes through in micro-batches
under 1F1B (and GPipe), once with `gradstream.pipeline` and once with torch's schedules, alternately. Both send by
torch.distributed over gloo, so that the figures compare schedules and executors and not carriers. Gradients are
compared first.

    python bench/pipeline_stages.py [--width 512] [--repeats 15]

Prints, and keeps in bench/results/pipeline-stages.json, seconds of a minibatch as medians, and the median ratio.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from common import RESULTS, ROOT, command_line, keep, now
from gradstream.machine.description import describe_machine, git_commit
from gradstream.pipeline.executor import PipelineExecutor, TensorTransfer
from gradstream.pipeline.schedule import make_schedule
from gradstream.split.plan import SplitPlan
from pipeline_layers import chain_of_layers

LAYERS, SAMPLES, MICRO_BATCHES = 4, 32, 8  # layers of a stage, samples of a micro-batch
TORCHS = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


class ModuleStage:
    """Implements `Stages` for the one stage of a process, an `nn.Module`."""

    def __init__(self, module: nn.Module, stage: int) -> None:
        self._module, self._last = module, stage == 1
        self._saved: dict[int, tuple[Tensor, Tensor]] = {}

    async def forward(
        self, stage: int, micro_batch: int, values: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        """See `Stages.forward`."""
        first, *targets = values.values()
        inputs = first.detach().requires_grad_(self._last)
        out = self._module(inputs)
        if targets:
            out = nn.functional.cross_entropy(out, targets[0]) / MICRO_BATCHES
        self._saved[micro_batch] = inputs, out
        return {} if targets else {"h0": out.detach()}

    async def backward(
        self, stage: int, micro_batch: int, gradients: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        """See `Stages.backward`."""
        inputs, out = self._saved.pop(micro_batch)
        torch.autograd.backward(out, gradients.get("h0"))
        return {} if inputs.grad is None else {"h0": inputs.grad}

    async def weights(self, stage: int, micro_batch: int) -> None:
        """Backwards here are whole."""
        raise NotImplementedError


class GlooChannel:
    """Implements `TensorChannel` by torch.distributed, as torch's schedules send: waits in the thread that computes."""

    def __init__(self, plan: SplitPlan) -> None:
        self._values = {value.name: value for value in plan.values}
        self._numbers = {name: number for number, name in enumerate(self._values)}
        self._sent: list[tuple[Any, Tensor]] = []

    async def send(self, transfer: TensorTransfer, tensor: Tensor) -> None:
        """See `TensorChannel.send`. Nobody writes to these tensors again."""
        tensor = tensor.contiguous()
        self._sent.append((torch.distributed.isend(tensor, transfer.target, tag=self._tag(transfer)), tensor))

    async def receive(self, transfer: TensorTransfer) -> Tensor:
        """See `TensorChannel.receive`."""
        value = self._values[transfer.value]
        tensor = torch.empty(value.shape_of(SAMPLES), dtype=value.dtype)
        torch.distributed.irecv(tensor, transfer.source, tag=self._tag(transfer)).wait()
        return tensor

    def finish(self) -> None:
        """Waits until all is sent."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()

    def _tag(self, transfer: TensorTransfer) -> int:
        return (
            1 + 2 * (MICRO_BATCHES * self._numbers[transfer.value] + transfer.micro_batch) + transfer.gradient
        )


def measured(rank: int, folder: str, name: str, width: int, repeats: int) -> dict[str, float]:
    """One process of the pair."""
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(f"{folder}/{name}", 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    torch.manual_seed(rank)
    module = nn.Sequential(*(m for _ in range(LAYERS) for m in (nn.Linear(width, width), nn.ReLU())))
    inputs, targets = (
        torch.randn(SAMPLES * MICRO_BATCHES, width),
        torch.randint(width, (SAMPLES * MICRO_BATCHES,)),
    )
    torch.distributed.broadcast(inputs, 0)
    torch.distributed.broadcast(targets, 0)

    plan = chain_of_layers([width] * (2 * LAYERS + 1), 2)
    schedule, stage, channel = (
        make_schedule(name, plan, MICRO_BATCHES)[rank],
        ModuleStage(module, rank),
        GlooChannel(plan),
    )
    rows = {"inputs": inputs.split(SAMPLES), "targets": targets.split(SAMPLES)}

    loop = asyncio.Runner()

    def ours() -> None:
        loop.run(
            PipelineExecutor(plan, rank, stage, channel, lambda value, number: rows[value][number]).run(
                schedule
            )
        )
        channel.finish()

    example = (torch.empty(SAMPLES, width),)
    torchs = TORCHS[name](
        PipelineStage(module, rank, 2, torch.device("cpu"), input_args=example),
        MICRO_BATCHES,
        loss_fn=nn.functional.cross_entropy,
    )

    def theirs() -> None:
        torchs.step(target=targets) if rank else torchs.step(inputs)

    assert torch.allclose(gradient_of(module, ours), gradient_of(module, theirs), rtol=1e-4, atol=1e-6)
    times: dict[str, list[float]] = {"ours": [], "torch": []}
    for _ in range(repeats):
        for key, call in (("ours", ours), ("torch", theirs)):
            module.zero_grad()
            torch.distributed.barrier()
            begun = time.perf_counter()
            call()
            torch.distributed.barrier()
            times[key].append(time.perf_counter() - begun)
    loop.close()
    torch.distributed.destroy_process_group()
    ratio = statistics.median(a / b for a, b in zip(times["ours"], times["torch"], strict=True))
    return {f"{key}_s": statistics.median(row) for key, row in times.items()} | {"ratio": ratio}


def gradient_of(module: nn.Module, call: Callable[[], None]) -> Tensor:
    """The gradient that a call leaves."""
    module.zero_grad()
    call()
    return torch.cat(
        [parameter.grad.flatten() for parameter in module.parameters() if parameter.grad is not None]
    )


def main() -> None:
    """Starts the pair for each schedule."""
    parser = command_line(__doc__)
    parser.add_argument("--width", type=int, default=512, help="units of a layer")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--rank", nargs=3, metavar=("RANK", "FOLDER", "SCHEDULE"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank:
        rank, folder, name = asked.rank
        print(json.dumps(measured(int(rank), folder, name, asked.width, asked.repeats)))
        return
    found = {}
    for name in TORCHS:
        with tempfile.TemporaryDirectory() as folder:
            command = [
                sys.executable,
                __file__,
                "--width",
                str(asked.width),
                "--repeats",
                str(asked.repeats),
                "--rank",
            ]
            pair = [
                subprocess.Popen([*command, str(rank), folder, name], stdout=subprocess.PIPE, text=True)
                for rank in range(2)
            ]
            outputs = [process.communicate(timeout=300)[0] for process in pair]
        found[name] = row = json.loads(outputs[0].splitlines()[-1])
        ours, torchs = (f"{1e3 * row[key]:.1f} ms" for key in ("ours_s", "torch_s"))
        print(f"{name}: {ours}, torch {torchs} a minibatch; median ratio {row['ratio']:.2f}")
    record = {
        "question": (__doc__ or "").splitlines()[0],
        "date": now(),
        "commit": git_commit(ROOT),
        **describe_machine({}),
        "width": asked.width,
        "layers": 2 * LAYERS,
        "samples": SAMPLES,
        "micro_batches": MICRO_BATCHES,
        "found": found,
    }
    keep(RESULTS / "pipeline-stages.json", record)


if __name__ == "__main__":
    main()
