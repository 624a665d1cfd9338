"""What is trained, and on which machines: a network of 101,770 parameters, on equal virtual machines.

    a = relu(x W₁ + b₁)   (n, 128)        scores = a W₂ + b₂   (n, 10)        loss = mean cross-entropy

The functions are numpy's, as a user would bring them: a gradient of 4 samples takes a fraction of a
millisecond, which is what lets 30 machines fit into one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np

import gradstream as gs
from gradstream.data.arrays import ArrayDataset
from gradstream.model.base import Model
from gradstream.runtime.world import Cost, Link, LogNormal, Network, World

__all__ = ["BANDWIDTH_BYTES_S", "HIDDEN", "JITTER", "SAMPLE_S", "cluster", "data", "model", "train_accuracy"]

PIXELS, HIDDEN, CLASSES = 784, 128, 10
SAMPLE_S = 5e-3
"""Seconds of a machine for the gradient of one sample."""
JITTER = 0.05
"""Standard deviation of a gradient's duration, of its mean."""
BANDWIDTH_BYTES_S = 1.25e9
"""10 Gbit/s: the server's card is half busy with 30 workers, and decides nothing."""

Arrays = Mapping[str, np.ndarray[Any, Any]]
# Numbers beyond all bounds (`errstate`) are no reason to warn: a run that breaks down is told by its loss.
TRAIN_MARK = CLASSES
"""Held-out samples that are training samples have this added to their target: see `data`."""


def _init(seed: int) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(seed)
    return {
        "w1": rng.normal(0.0, math.sqrt(2 / PIXELS), (PIXELS, HIDDEN)),
        "b1": np.zeros(HIDDEN),
        "w2": rng.normal(0.0, math.sqrt(1 / HIDDEN), (HIDDEN, CLASSES)),
        "b2": np.zeros(CLASSES),
    }


@np.errstate(over="ignore", invalid="ignore")
def _outputs(p: Arrays, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    hidden = np.maximum(x.reshape(len(x), PIXELS) @ p["w1"] + p["b1"], 0)
    return np.asarray(hidden @ p["w2"] + p["b2"])


@np.errstate(over="ignore", invalid="ignore")
def _gradients(p: Arrays, x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> tuple[float, Arrays]:
    x = x.reshape(len(x), PIXELS)
    hidden = np.maximum(x @ p["w1"] + p["b1"], 0)
    scores = hidden @ p["w2"] + p["b2"]
    scores -= scores.max(axis=1, keepdims=True)
    shares = np.exp(scores)
    shares /= shares.sum(axis=1, keepdims=True)
    rows = np.arange(len(x))
    loss = -float(np.log(shares[rows, y] + 1e-30).mean())
    shares[rows, y] -= 1
    shares /= len(x)
    back = (shares @ p["w2"].T) * (hidden > 0)
    return loss, {"w1": x.T @ back, "b1": back.sum(0), "w2": hidden.T @ shares, "b2": shares.sum(0)}


def model(begin: Arrays | None = None) -> Model:
    """The network; it begins with these parameters where any are given, else at random, by the run's seed."""
    given = None if begin is None else {name: np.array(array) for name, array in begin.items()}
    return gs.from_functions(
        init=_init if given is None else lambda seed: given, outputs=_outputs, gradients=_gradients
    )


@cache
def data(*, watched: bool = False) -> ArrayDataset:
    """Fashion-MNIST as it comes with the package: 5,000 samples to train on, 1,000 held out.

    Args:
        watched: hold out 1,000 of the training samples besides, marked by their targets, so that each
            evaluation tells of both: `train_accuracy`. The accuracy proper is then of all 2,000, of which
            the marked ones never count.
    """
    plain = gs.fashion_mnist()
    if not watched:
        return plain
    train = plain.batch(np.arange(plain.num_samples))
    test = plain.test_batch(np.arange(plain.num_test_samples))
    some = np.arange(0, plain.num_samples, plain.num_samples // plain.num_test_samples)
    return gs.from_arrays(
        train.inputs,
        train.targets,
        np.concatenate([test.inputs, np.asarray(train.inputs)[some]]),
        np.concatenate([test.targets, np.asarray(train.targets)[some] + TRAIN_MARK]),
        name="fashion-mnist",
    )


def train_accuracy(outputs: Any, targets: Any) -> float:
    """A metric: twice the fraction of right answers among marked samples, half of all; see `data`."""
    return 2 * float((outputs.argmax(-1) + TRAIN_MARK == targets).double().mean())


def cluster(*, shards: int = 1) -> World:
    """Equal machines on a network that is not what they wait for.

    Args:
        shards: machines of the parameter server, whose cards are one here: streams to each of them
            would be the same bytes at the same time, and cost as many times the simulation.
    """
    return World(
        costs={
            "gradient": Cost(per_sample_s=SAMPLE_S, spread=LogNormal(JITTER)),
            "apply": Cost(per_elem_s=4e-10),
            "copy": Cost(per_elem_s=4e-10),
        },
        network=Network(
            bandwidth_bytes_s=BANDWIDTH_BYTES_S,
            link=Link(latency_s=50e-6),
            cards={"shard-0": shards * BANDWIDTH_BYTES_S},
        ),
    )
