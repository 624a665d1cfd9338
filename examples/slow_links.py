"""Two laptops at home: a small network that is trained over a slow link, by local SGD and a codec.

On the first, which the other one can reach at 192.168.0.10:

    gradstream train examples/slow_links.py --listen 192.168.0.10 --wait 2

It prints a line to type on the other. What the same run would take over another link:

    gradstream simulate examples/slow_links.py

Each trains alone for 20 minibatches. Then they exchange how far they have come, in half a byte a parameter: 2.7 MB
for the 20, where their gradients would be 412 MB.
"""

from __future__ import annotations

from torch import nn

import gradstream as gs


def network() -> nn.Module:
    """784-2048-1536-256-10, with ReLU: 5,150,986 parameters."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(784, 2048),
        nn.ReLU(),
        nn.Linear(2048, 1536),
        nn.ReLU(),
        nn.Linear(1536, 256),
        nn.ReLU(),
        nn.Linear(256, 10),
    )


def job() -> gs.Job:
    """2 workers, one on each machine, and no server."""
    return gs.Job(
        model=gs.from_torch(network, nn.functional.cross_entropy),
        data=gs.data.fashion_mnist(),
        strategy=gs.LocalSGD(every=20),
        codec="float4",
        optimizer=gs.optim.SGD(lr=0.02, momentum=0.9),
        workers=2,
        batch_size=16,
        epochs=4,
        evaluate_every="epoch",
        shares="measured",
    )
