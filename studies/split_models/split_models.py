"""A transformer and a ResNet, split over 2 and over 4 processes: do they train to the loss of the unsplit run?

    python studies/split_models/split_models.py  # some minutes; writes record.json
    sudo python studies/split_models/split_models.py --apart  # the second part: two machines with cards of 100 Mbit/s

* transformer: characters of the licence, 2 blocks of 4 heads, 64 wide, its output tied to its embedding; Adam.
* resnet: 3 stages of 2 convolutions with BatchNorm and a shortcut, on the images that come with gradstream; SGD.

Real processes, allreduce, one replica. With `--apart`: a network of dense layers, split over two machines under
`1f1b` with 4 micro-batches, and the same network data parallel on the same two machines, the same samples a step.
Machines are network namespaces that share this one's cores.
"""

from __future__ import annotations

import itertools
import os
import shlex
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import gradstream as gs
from gradstream.job.files import load_job
from gradstream.job.job import Job

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))
from common import ROOT, command_line, invitation, keep, kept, origin, start
from kit.machines import Machines, unavailable

RESULT = Path(__file__).with_name("record.json")
CONTEXT, WIDTH, HEADS, BLOCKS = 32, 64, 4, 2
UNITS, LAYERS, SAMPLES = 1024, 4, 64


class Block(nn.Module):
    """One block of a transformer, normalised before each half."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(samples, CONTEXT, WIDTH) -> the same."""
        q, k, v = (
            one.unflatten(-1, (HEADS, -1)).transpose(1, 2) for one in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """Predicts each next character; the output layer is the embedding."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, WIDTH)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.position = nn.Parameter(0.02 * torch.randn(CONTEXT, WIDTH))
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(samples, CONTEXT) -> (samples, characters, CONTEXT)."""
        found = self.norm(self.blocks(self.embedding(x) + self.position))
        return nn.functional.linear(found, self.embedding.weight).transpose(1, 2)


class Shortcut(nn.Module):
    """Two convolutions with BatchNorm, and the input added."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, out, 3, stride, 1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(),
            nn.Conv2d(out, out, 3, 1, 1, bias=False),
            nn.BatchNorm2d(out),
        )
        self.past = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(samples, channels, H, W) -> (samples, out, H / stride, W / stride)."""
        return nn.functional.relu(self.body(x) + self.past(x))


def resnet() -> nn.Module:
    """Three stages and a linear layer."""
    stages = [Shortcut(1, 8, 1), Shortcut(8, 16, 2), Shortcut(16, 32, 2)]
    return nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def transformer_job() -> Job:
    """The transformer on the licence's characters: sequences of CONTEXT, one every 8."""
    text = np.frombuffer((ROOT / "LICENSE").read_bytes(), np.uint8)
    known, numbers = np.unique(text, return_inverse=True)
    windows = np.lib.stride_tricks.sliding_window_view(numbers.astype(np.int64), CONTEXT + 1)[::8]
    data = gs.from_arrays(windows[:, :-1].copy(), windows[:, 1:].copy())
    model = gs.from_torch(lambda: Transformer(len(known)), nn.functional.cross_entropy)
    return Job(model, data, strategy="allreduce", optimizer=gs.optim.Adam(lr=3e-3), workers=1, batch_size=32)


def resnet_job(dtype: torch.dtype = torch.float32) -> Job:
    """The ResNet on the subset of Fashion-MNIST."""
    ids, as_dtype = np.arange(5000), torch.empty(0, dtype=dtype).numpy().dtype
    images = gs.data.fashion_mnist().batch(ids)
    data = gs.from_arrays(np.asarray(images.inputs).astype(as_dtype), np.asarray(images.targets))
    model = gs.from_torch(lambda: resnet().to(dtype), nn.functional.cross_entropy)
    optimizer = gs.optim.SGD(lr=0.05, momentum=0.9)
    return Job(model, data, strategy="allreduce", optimizer=optimizer, workers=1, batch_size=32)


def resnet64_job() -> Job:
    """The same in float64: in float32 even a plain loop parts from itself with another number of threads."""
    return resnet_job(torch.float64)


def dense_job() -> Job:
    """Dense layers: 4 M parameters, 16 MB of gradient, and cuts of 1,024 units."""
    layers = [nn.Linear, nn.Tanh] * LAYERS
    rng = np.random.default_rng(0)
    data = gs.from_arrays(rng.standard_normal((4096, UNITS), dtype=np.float32), rng.integers(0, 10, 4096))

    def build() -> nn.Module:
        units = (layer(UNITS, UNITS) if layer is nn.Linear else layer() for layer in layers)
        return nn.Sequential(*units, nn.Linear(UNITS, 10))

    model = gs.from_torch(build, nn.functional.cross_entropy)
    return Job(model, data, strategy="allreduce", workers=1, batch_size=SAMPLES)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--steps", type=int, default=300, help="of each model")
    parser.add_argument("--apart", action="store_true")
    parser.add_argument("--rate", default="100mbit", help="of each card, with --apart")
    given = parser.parse_args()
    found: dict[str, Any] = kept(RESULT)
    found |= apart(given.rate) if given.apart else together(given.steps)
    found |= {
        **origin(),
        "load": os.getloadavg()[0],
    }
    keep(RESULT, found)


def together(steps: int) -> dict[str, Any]:
    """Losses of both models with 1, 2 and 4 processes."""
    found: dict[str, Any] = {"steps": steps}
    for name in ("transformer", "resnet", "resnet64"):
        job = load_job(f"{Path(__file__).resolve()}:{name}_job")
        whole: list[float] = []
        for split in (1, 2, 4):
            with tempfile.TemporaryDirectory() as folder:
                run = gs.train(job, steps=steps, epochs=None, split=split, run_dir=Path(folder) / "run")
                losses = [row["loss"] for row in run.history]
            whole = whole or losses
            found[f"{name}, {split}"] = {
                "first": losses[0],
                "last": statistics.mean(losses[-20:]),
                "apart_10": max(abs(a - b) for a, b in itertools.islice(zip(losses, whole, strict=True), 10)),
                "apart": max(abs(a - b) for a, b in zip(losses, whole, strict=True)),
            }
            print(name, split, found[f"{name}, {split}"], flush=True)
    return found


def apart(rate: str) -> dict[str, Any]:
    """Seconds of a step on two machines: split, and data parallel."""
    reason = unavailable()
    if reason:
        raise SystemExit(reason)
    half = str(SAMPLES // 2)
    ways = {
        "split": ["--workers", "1", "--split", "2", "--set", "micro_batches=4", "--set", "pipeline=1f1b"],
        "gradients": ["--workers", "2", "--batch-size", half],
    }
    found: dict[str, Any] = {"rate": rate}
    for name, options in ways.items():
        with tempfile.TemporaryDirectory() as folder, Machines(2, rate=rate) as machines:
            found[name] = step_s(machines, Path(folder), *options)
        print(name, found[name], flush=True)
    return found


def step_s(machines: Machines, folder: Path, *options: str) -> float:
    """Median seconds of a step of the dense network on two machines."""
    first, second, job = machines[0], machines[1], f"{Path(__file__).resolve()}:dense_job"
    listen = ["--listen", first.address, "--wait", "2", "--run-dir", str(folder / "run")]
    launcher = start(first, folder, "train", job, *listen, "--insecure", "--steps", "20", *options)
    words = shlex.split(invitation(launcher))
    own = ["--name", second.name, "--run-dir", str(folder / second.name)]
    joined = start(second, folder, *words[:2], job, *words[3:], *own)
    if any(process.wait(600) for process in (joined, launcher)):
        raise SystemExit("a machine has failed")
    times = [row["time_s"] for row in gs.Run.load(folder / "run").history if row["rank"] == 0]
    return statistics.median(b - a for a, b in itertools.pairwise(times))


if __name__ == "__main__":
    main()
