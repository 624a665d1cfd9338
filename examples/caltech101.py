"""Caltech-101: the original's two tanh networks, and a small convolutional one.

    export GRADSTREAM_DATA=~/data                # holds caltech101/101_ObjectCategories.tar.gz
    python examples/caltech101.py                           # the small network, 10.8 M parameters
    gradstream train examples/caltech101.py:large           # the large one, 74.8 M parameters
    gradstream train examples/caltech101.py:cnn --strategy synchronous --workers 2

A worker of the large network takes up to 2.5 GB of memory, the parameter server about 1 GB.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn

import gradstream as gs

NUM_CATEGORIES = 101

LARGE = (3 * 128 * 128, 1500, 650, NUM_CATEGORIES)
SMALL = (3 * 64 * 64, 800, 600, 400, 350, 250, NUM_CATEGORIES)

NUM_PARAMETERS = {LARGE: 74_770_901, SMALL: 10_805_651}  # the counts that the original's authors give


def tanh_network(widths: tuple[int, ...]) -> nn.Sequential:
    """Dense layers with tanh between them, and the logarithm of a softmax at the end.

    Weights are uniform with variance 2 / (inputs + outputs), biases 0: signals and gradients then
    keep their size through the layers (Glorot, Bengio, 2010).
    """
    layers: list[nn.Module] = []
    for num_inputs, num_outputs in pairwise(widths):
        linear = nn.Linear(num_inputs, num_outputs)
        nn.init.xavier_uniform_(linear.weight)
        nn.init.zeros_(linear.bias)
        layers += [linear, nn.Tanh()]
    network = nn.Sequential(*layers[:-1], nn.LogSoftmax(dim=1))
    assert sum(p.numel() for p in network.parameters()) == NUM_PARAMETERS[widths]
    return network


def large_network() -> nn.Module:
    """128 x 128 colour images, flattened: 74,770,901 parameters, 299 MB."""
    return tanh_network(LARGE)


def small_network() -> nn.Module:
    """64 x 64 colour images, flattened: 10,805,651 parameters, 43 MB."""
    return tanh_network(SMALL)


def conv_network() -> nn.Module:
    """64 x 64 colour images: four convolutions, each with half the pixels of the one before."""
    widths = (3, 16, 32, 64, 128)
    layers: list[nn.Module] = []
    for num_inputs, num_outputs in pairwise(widths):
        layers += [nn.Conv2d(num_inputs, num_outputs, kernel_size=3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    head = [
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(widths[-1] * 4 * 4, NUM_CATEGORIES),
        nn.LogSoftmax(dim=1),
    ]
    return nn.Sequential(*layers, *head)


def loss(log_probabilities: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean negative log-likelihood."""
    return nn.functional.nll_loss(log_probabilities, targets)


def large() -> gs.Job:
    """The network that took its authors 56 minutes for 10 epochs on one 2-core machine."""
    return gs.Job(
        model=gs.from_torch(large_network, loss),
        data=gs.data.caltech101(size=128, flat=True),
        strategy="synchronous",
        optimizer=gs.optim.SGD(lr=0.01, momentum=0.9, weight_decay=1e-4),
        workers=2,
        batch_size=128,  # of each of 2 workers: 256 a round, as in the original
        epochs=10,
    )


def small() -> gs.Job:
    """The network of the original's scaling figure, trained by Downpour SGD that talks every 10 steps."""
    return gs.Job(
        model=gs.from_torch(small_network, loss),
        data=gs.data.caltech101(size=64, flat=True),
        strategy=gs.Downpour(push_every=10, fetch_every=10, overlap=False),
        optimizer=gs.optim.SGD(lr=0.1, weight_decay=1e-4),
        workers=2,
        batch_size=256,
        epochs=10,
    )


def cnn() -> gs.Job:
    """A convolutional network: fewer parameters, more arithmetic, better."""
    return gs.Job(
        model=gs.from_torch(conv_network, loss),
        data=gs.data.caltech101(size=64),
        strategy="synchronous",
        optimizer=gs.optim.SGD(lr=0.02, momentum=0.9, weight_decay=1e-4),
        workers=2,
        batch_size=32,
        epochs=10,
    )


def job() -> gs.Job:
    """What runs when no other is named."""
    return small()


if __name__ == "__main__":
    run = gs.train(job())
    print(f"test accuracy {run.evaluate().accuracy:.1%}")
