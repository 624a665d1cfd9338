"""Large runs on virtual time: the original system's scaling figure, and 64 replicas of its model."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys

import pytest

import gradstream as gs
from gradstream._simulate import simulate
from gradstream.runtime.simulation import Cost, Exponential, Link, Network, SimulationConfig
from gradstream.testing.runs import Sized, numbered

# The original on Caltech-101: seconds of a worker for a minibatch, of the one server for a push,
# minibatches an epoch. The queue has no scale of its own: a hundredth of the times keeps the
# nodes' once-a-second reports few.
WORK_S, SERVER_S, BATCHES = 2.74, 1.44, 29
SCALE = 0.01


def closed_queue_epoch_s(workers: int) -> float:
    """Mean value analysis (Reiser, Lavenberg 1980) of W customers: a delay, then one exponential server."""
    waiting = rate = 0.0
    for customers in range(1, workers + 1):
        response_s = SERVER_S * (1 + waiting)
        rate = customers / (WORK_S + response_s)
        waiting = rate * response_s
    return BATCHES / rate


def simulated_epoch_s(workers: int, *, epochs: int, work: float = WORK_S) -> float:
    """Mean seconds for as many minibatches as the original's epoch has."""
    config = SimulationConfig(
        costs={
            "gradient": Cost(base_s=work * SCALE, jitter=Exponential()),
            "apply": Cost(base_s=SERVER_S * SCALE, jitter=Exponential()),
        },
        network=Network(bandwidth_bytes_s=math.inf, link=Link(latency_s=0.0)),
        shape_only=True,
    )
    # Every worker gets 29 minibatches of each data epoch: that is W epochs of the original.
    run = simulate(
        Sized([64]),
        numbered(BATCHES * workers),
        config=config,
        strategy=gs.Downpour(overlap=False),
        workers=workers,
        batch_size=1,
        epochs=epochs // workers + 2,
        chunk_elems=64,
        seed=1,
    )
    ends_s = [event["time_s"] for event in run.events if event["event"] == "ledger"]
    return float(ends_s[-1] - ends_s[0]) / (len(ends_s) - 1) / workers / SCALE


def test_mean_value_analysis_gives_the_known_figures() -> None:
    figures = [round(closed_queue_epoch_s(instances - 1), 1) for instances in (2, 4, 8, 16)]
    assert figures == [121.2, 51.9, 41.9, 41.8]


@pytest.mark.parametrize("instances", [4, 8])
def test_scaling_figure_of_the_original(instances: int) -> None:
    """One of the instances is the server: it saturates, and more workers do not help."""
    expected_s = closed_queue_epoch_s(instances - 1)
    assert simulated_epoch_s(instances - 1, epochs=40) == pytest.approx(expected_s, rel=0.05)


def test_another_system_would_not_have_this_figure() -> None:
    """With half the work on workers, four instances are off the figure by far more than 5 %."""
    assert simulated_epoch_s(3, epochs=20, work=WORK_S / 2) < 0.9 * closed_queue_epoch_s(3)


SHAPE_ONLY = """
import json, pathlib, time
import gradstream as gs
from gradstream.runtime.simulation import SimulationConfig
from gradstream._simulate import simulate
from gradstream.testing.runs import Sized
from gradstream.testing.runs import numbered

layers = [650 * 101 + 101, 1500 * 650 + 650, 49152 * 1500 + 1500]
assert sum(layers) == 74_770_901
run = simulate(
    Sized(layers), numbered(6400), config=SimulationConfig(shape_only=True), strategy="synchronous",
    workers=64, servers=4, batch_size=4, steps=1, chunk_elems=4_194_304,
)
print(json.dumps({
    # not ru_maxrss, in which what the process had before it became this program counts: the tests' memory
    "peak_bytes": 1024 * int(pathlib.Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]),
    "cpu_s": time.process_time(),
    "virtual_s": run.info["virtual_s"],
    "pushed_bytes": sum(e["pushed_bytes"] for e in run.events if e["event"] == "exchange"),
}))
"""


@pytest.mark.cold
def test_64_replicas_of_75_million_parameters_fit() -> None:
    """In a round the servers hold the pushes of all: without rounds they hold fewer."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", SHAPE_ONLY],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    figures = json.loads(done.stdout)
    print(figures)
    assert figures["peak_bytes"] < 2 << 30
    assert figures["cpu_s"] < 60
    # and yet every byte travelled: 64 replicas, 4 bytes a parameter (and the initial ones)
    assert figures["pushed_bytes"] == (64 + 1) * 4 * 74_770_901
    one_way_s = 64 * 4 * 74_770_901 / 4 / 1.25e9
    assert figures["virtual_s"] > one_way_s
