"""What the rows of `studies/slow_links/slow_links.py` train: three networks, each with its data, on four machines.

| | parameters | data | goal on held-back data |
|---|---|---|---|
| cnn | 304,389 | Caltech-101, 64 x 64 colour images | accuracy |
| small | 10,805,651 | the same, flattened | accuracy |
| text | 9,736,960 | the language reference that comes with Python, by characters | loss of the next character |

A machine's minibatch is small, so that exchanges come as often as machines with faster processors would have them.
"""

from __future__ import annotations

import functools
import pydoc_data.topics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import gradstream as gs

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import caltech101

LENGTH, WIDTH, LAYERS = 32, 512, 3


@dataclass(frozen=True)
class Task:
    """A network and its data.

    Args:
        network: makes the module.
        loss: mean over a minibatch.
        data: makes the data set.
        batch: samples of a machine's minibatch.
        adam: the (inner) rule is AdamW; else SGD with momentum 0.9.
        goal: accuracy or test_loss that ends a row, by name.
    """

    network: Callable[[], nn.Module]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    data: Callable[[], gs.data.Dataset]
    batch: int
    adam: bool
    goal: tuple[str, float]

    def reached(self, score: float) -> bool:
        """Whether a row has its goal with this accuracy or loss."""
        measure, goal = self.goal
        return score >= goal if measure == "accuracy" else score <= goal

    def optimizer(self, parameters: Any, lr: float) -> torch.optim.Optimizer:
        """The rule as torch has it."""
        if self.adam:
            return torch.optim.AdamW(parameters, lr=lr, weight_decay=0.01)
        return torch.optim.SGD(parameters, lr=lr, momentum=0.9)

    def job(self) -> gs.Job:
        """Strategy, codec, rate and length come from the command line."""
        return gs.Job(
            gs.from_torch(self.network, self.loss),
            self.data(),
            workers=4,
            batch_size=self.batch,
            optimizer=gs.optim.AdamW(lr=1e-3, weight_decay=0.01)
            if self.adam
            else gs.optim.SGD(lr=0.02, momentum=0.9),
            epochs=1000,
            checkpoint_every=None,
            record_machine=False,
        )


class Transformer(nn.Module):
    """Of characters: pre-norm, 8 heads, causal."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.place = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH, 0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        """(n, LENGTH) -> (n, 256, LENGTH)."""
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        hidden = self.layers(self.embed(letters.long()) + self.place, mask=mask, is_causal=True)
        return self.head(self.norm(hidden)).transpose(1, 2)


def letters_loss(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean over all characters."""
    return nn.functional.cross_entropy(scores, targets.long())


@functools.cache
def topics() -> gs.data.Dataset:
    """Windows of `LENGTH` characters and the same one further on; the last tenth is held back."""
    texts = pydoc_data.topics.topics
    letters = np.frombuffer(
        "\n".join(texts[name] for name in sorted(texts)).encode("latin-1", "replace"), np.uint8
    )
    count = (len(letters) - 1) // LENGTH
    inputs, targets = (letters[at : at + count * LENGTH].reshape(count, LENGTH) for at in (0, 1))
    held = count // 10
    return gs.data.from_arrays(inputs[:-held], targets[:-held], inputs[-held:][:256], targets[-held:][:256])


@functools.cache
def pictures(held_back: int, flat: bool) -> gs.data.Dataset:
    """Caltech-101 with some of its held-back images, drawn once: evaluations take cores from training."""
    data = gs.data.caltech101(size=64, flat=flat)
    some = np.random.default_rng(0).permutation(data.num_test_samples)[:held_back]
    train, test = data.batch(np.arange(data.num_samples)), data.test_batch(np.sort(some))
    return gs.data.from_arrays(train.inputs, train.targets, test.inputs, test.targets)


TASKS = {
    "cnn": Task(
        caltech101.conv_network,
        caltech101.loss,
        functools.partial(pictures, 512, flat=False),
        32,
        False,
        ("accuracy", 0.4),
    ),
    "small": Task(
        caltech101.small_network,
        caltech101.loss,
        functools.partial(pictures, 1024, flat=True),
        32,
        False,
        ("accuracy", 0.42),
    ),
    "text": Task(Transformer, letters_loss, topics, 4, True, ("test_loss", 2.6)),
}

cnn, small, text = (TASKS[name].job for name in ("cnn", "small", "text"))


def score(task: Task, model: nn.Module, data: gs.data.Dataset) -> float:
    """Accuracy or loss of a module on held-back samples, whichever the goal is."""
    test = data.test_batch(np.arange(data.num_test_samples))
    was, _ = model.training, model.eval()
    with torch.no_grad():
        outputs, targets = model(torch.as_tensor(test.inputs)), torch.as_tensor(test.targets)
        right = (outputs.argmax(1) == targets).float().mean()
        found = right if task.goal[0] == "accuracy" else task.loss(outputs, targets)
    model.train(was)
    return float(found)
