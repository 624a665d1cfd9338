"""A job that keeps its links full, and times its heartbeats: every step sums whole gradients of 4.9 million parameters.

Every node calls the coordinator as often as it beats, over the connection of its beats, and writes the round trips in
seconds to a file of its own in $BEATS.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from torch import nn

import gradstream as gs
from gradstream.coordinator.client.presence import Heartbeat
from gradstream.coordinator.nodes import COORDINATOR
from gradstream.wire import v1

_watch = Heartbeat.run


async def run(self: Heartbeat) -> None:
    """`Heartbeat.run`, beside the calls."""
    runtime = self._runtime
    calling = runtime.spawn(call(self), name=f"{runtime.node}: timed beats")
    try:
        await _watch(self)
    finally:
        calling.cancel()


async def call(heartbeat: Heartbeat) -> None:
    runtime, beat_s = heartbeat._runtime, heartbeat._deadlines.beat_s
    with (Path(os.environ["BEATS"]) / f"{runtime.node}.jsonl").open("a") as out:
        while True:
            begun = runtime.now()
            await heartbeat._endpoint.call(COORDINATOR, "alive", v1.Body(), v1.Body, silence_s=120.0)
            took_s = (runtime.now() - begun) / 1e9
            out.write(json.dumps([begun / 1e9, took_s]) + "\n")
            out.flush()
            await runtime.sleep(max(0.0, beat_s - took_s))


Heartbeat.run = run  # type: ignore[method-assign]


def network() -> nn.Module:
    """784-2048-1600-10, with ReLU: 4,903,002 parameters."""
    layers = (
        nn.Flatten(),
        nn.Linear(784, 2048),
        nn.ReLU(),
        nn.Linear(2048, 1600),
        nn.ReLU(),
        nn.Linear(1600, 10),
    )
    return nn.Sequential(*layers)


def job() -> gs.Job:
    """Each of three machines has 4 samples a step."""
    return gs.Job(
        gs.from_torch(network, nn.functional.cross_entropy),
        gs.data.fashion_mnist(),
        workers=3,
        batch_size=4,
        strategy=gs.strategies.AllReduce(),
        optimizer=gs.optim.SGD(lr=0.01),
        epochs=1000,
        checkpoint_every=None,
        record_machine=False,
    )
