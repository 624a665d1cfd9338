"""A network of 10,020,874 parameters on the part of Fashion-MNIST that comes with gradstream, on four machines."""

from __future__ import annotations

from itertools import pairwise

from torch import nn

import gradstream as gs

WIDTH, BATCH, EVERY_S = 2048, 16, 2.0


def network() -> nn.Module:
    """784-2048-2048-2048-10, with ReLU."""
    sizes = (784, WIDTH, WIDTH, WIDTH, 10)
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def job() -> gs.Job:
    """A minibatch has 16 samples on each machine; strategy, codec, rates and length come from the command line."""
    return gs.Job(
        gs.from_torch(network, nn.functional.cross_entropy),
        gs.data.fashion_mnist(),
        workers=4,
        batch_size=BATCH,
        optimizer=gs.optim.SGD(lr=0.02, momentum=0.9),
        epochs=1000,
        checkpoint_every=None,
        record_machine=False,
    )
