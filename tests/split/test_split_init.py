"""A stage's first parameters are the whole model's, to the bit, in a process that never holds the whole."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  its usual name

from gradstream.errors import ConfigError
from gradstream.model import from_torch
from gradstream.split.partial_build import Blueprint
from split_stages import Stages, batch_of, whole_parameters

WIDTH, LAYERS, PARTS = 768, 12, 4
MEASURED = """
import sys
import numpy as np, torch
from torch import nn
from gradstream.model import Batch, from_torch
from gradstream.split.cut import plan_split
from gradstream.split.stage_model import StageModel

torch.set_num_threads(1)
width, layers, parts, *measured = map(int, sys.argv[1:])

def build():
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))

def peak():  # KiB
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM"))

def now():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS"))

model = from_torch(build, nn.functional.mse_loss)
example = np.zeros((2, width), np.float32)
batch = Batch(example, example, 2, np.arange(2))
StageModel(model, plan_split(model, batch, parts), 0)  # what is imported on the way is no part of the measurement
torch.empty(1 << 20).uniform_()
for part in measured:
    held = stages = None
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak is now what is held now
    before = now()
    if part < 0:
        held = torch.empty(model.layout.elems)
        model.init(3, held)
    else:
        plan = plan_split(model, batch, parts)
        stages = [StageModel(model, plan, stage.number) for stage in plan.stages_of(part)]
        held = [torch.empty(stage.layout.elems) for stage in stages]
        for stage, vector in zip(stages, held):
            stage.init(3, vector)
    print((peak() - before) * 1024)
"""


def peak_bytes(*parts: int) -> list[int]:
    """Of a process that makes the first parameters of one part after the other; of the whole model for -1."""
    command = [sys.executable, "-c", MEASURED, *map(str, (WIDTH, LAYERS, PARTS, *parts))]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}  # what is freed is given back
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return [int(line) for line in done.stdout.splitlines()]


@pytest.mark.cold
def test_a_part_needs_memory_for_its_own_parameters_and_one_other_tensor() -> None:
    tensor = 4 * WIDTH * WIDTH
    total = LAYERS * (tensor + 4 * WIDTH)
    bound = total / PARTS + tensor + (4 << 20)
    part, whole = peak_bytes(1, -1)
    assert part < bound
    assert whole > 1.5 * bound  # the whole model: the measurement sees what it is to see


def tricks() -> nn.Module:
    """Ways of filling parameters: draws that depend on values, products, ties, a row that is set."""

    class Tricks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(60, 40, padding_idx=0)
            layers = [nn.Linear(40, 40) for _ in range(6)]
            self.layers = nn.ModuleList(layers)
            nn.init.trunc_normal_(layers[0].weight, std=0.02)
            nn.init.trunc_normal_(layers[1].weight, std=3.0)
            nn.init.orthogonal_(layers[2].weight)
            nn.init.sparse_(layers[3].weight, 0.5)
            with torch.no_grad():
                layers[4].weight.copy_(layers[0].weight * 2 + torch.rand(40, 40))
                layers[5].weight[3:, 2] = torch.linspace(0, 1, 37)
            self.scale = nn.Parameter(torch.randn(40, 50).softmax(1) * 0.1)
            self.head = nn.Linear(40, 60, bias=False)
            self.head.weight = self.words.weight
            self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 6)]
            self.apply(self.again)

        @staticmethod
        def again(module: nn.Module) -> None:
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.normal_(module.bias, std=0.01)

        def forward(self, ids: torch.Tensor) -> Any:
            x = self.words(ids).mean(1)
            for layer, rate in zip(self.layers, self.rates, strict=True):
                x = x + layer(x) * rate
            return self.head(x @ self.scale @ self.scale.T)

    return Tricks()


@pytest.mark.parametrize("parts", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_first_parameters_have_the_whole_models_bits(dtype: torch.dtype, parts: int) -> None:
    model = from_torch(lambda: tricks().to(dtype), F.cross_entropy)
    ids = np.random.default_rng(0).integers(0, 60, (4, 5))
    stages = Stages.of(model, batch_of(ids, ids[:, 0]), parts)
    for seed in (0, 3):
        assert torch.equal(stages.joined(stages.init(seed)), whole_parameters(model, seed))


def test_tensors_of_others_have_no_memory() -> None:
    module = Blueprint(tricks).part(["layers.4.weight"], 3)
    with_values = {
        name for name, p in module.named_parameters() if p.device.type == "cpu" and p.numel() > 1024
    }
    assert with_values == {"layers.4.weight", "layers.0.weight"}  # the one is computed from the other


def reads_values() -> nn.Module:
    layer = nn.Linear(100, 100)
    with torch.no_grad():
        layer.weight /= layer.weight.norm().item()
    return layer


def grows() -> Callable[[], nn.Module]:
    calls = []

    def build() -> nn.Module:
        calls.append(0)
        return nn.Sequential(*(nn.Linear(4, 4) for _ in calls))

    return build


def test_a_build_that_cannot_be_done_in_part_is_refused() -> None:
    with pytest.raises(ConfigError, match="reads values of a tensor while it builds"):
        Blueprint(reads_values)
    with pytest.raises(ConfigError, match="expected the same at each call"):
        Blueprint(grows()).part([], 0)
