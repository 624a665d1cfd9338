"""What is trained, and on which machines.

    mlp   a = relu(x W₁ + b₁)   (n, 128)        scores = a W₂ + b₂   (n, 10)        101,770 parameters
    cnn   two convolutions 5 × 5 at stride 2, of 8 and 16 channels, and a linear layer: 5,994 parameters

The loss is the mean cross-entropy. The functions of the mlp are numpy's, as a user would bring them: a
gradient of 4 samples takes a fraction of a millisecond, which is what lets 30 machines fit into one. The cnn
is torch's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal

import numpy as np
from torch import nn

import gradstream as gs
from gradstream.data.arrays import ArrayDataset
from gradstream.data.base import Ids, PartitionSpec
from gradstream.data.feed import plan_samples
from gradstream.data.plan import EpochPlan, epoch_order
from gradstream.model.base import Model
from gradstream.runtime.simulation import Cost, Link, LogNormal, Network, SimulationConfig
from study.methods import SAMPLES

PIXELS, HIDDEN, CLASSES = 784, 128, 10
TRAIN_SAMPLES = SAMPLES
"""Of 5,000 training images; the other 500 are for choosing rates. Accuracy is reported on 1,000 others."""
SAMPLE_S = 5e-3
"""Seconds of a machine for the gradient of one sample."""
JITTER = 0.05
"""Standard deviation of a gradient's duration, of its mean."""
BANDWIDTH_BYTES_S = 1.25e9
"""10 Gbit/s: the server's card is half busy with 30 workers, and decides nothing."""
SLOW = {**dict.fromkeys(range(15, 25), 0.5), **dict.fromkeys(range(25, 30), 0.2)}
"""Speeds of uneven machines: 15 at full speed, 10 at a half, 5 at a fifth; 21 machines' worth in all."""

Arrays = Mapping[str, np.ndarray[Any, Any]]
Images = Literal["select", "report"]
TRAIN_MARK = CLASSES
"""Held-out samples that are training samples have this added to their target: see `watched`."""
NEVER = -1e9
"""The score that models give to these classes: no sample is of one, and the loss does not see them."""


# Numbers beyond all bounds (`errstate`) are no reason to warn: a run that breaks down is told by its loss.
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
    return np.pad(hidden @ p["w2"] + p["b2"], ((0, 0), (0, CLASSES)), constant_values=NEVER)


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


def mlp(begin: Arrays | None = None) -> Model:
    """The network; it begins with these parameters where any are given, else at random, by the run's seed."""
    given = None if begin is None else {name: np.array(array) for name, array in begin.items()}
    return gs.from_functions(
        init=_init if given is None else lambda seed: given, outputs=_outputs, gradients=_gradients
    )


def cnn() -> Model:
    """The small convolutional network."""
    return gs.from_torch(
        lambda: nn.Sequential(
            nn.Conv2d(1, 8, 5, stride=2),
            nn.ReLU(),
            nn.Conv2d(8, 16, 5, stride=2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(16 * 4 * 4, CLASSES),
            nn.ConstantPad1d((0, CLASSES), NEVER),
        ),
        nn.functional.cross_entropy,
    )


# ---- data -----------------------------------------------------------------------------------


@cache
def data(images: Images = "report", *, by_label: bool = False) -> ArrayDataset:
    """Fashion-MNIST as it comes with the package: 4,500 samples to train on.

    Args:
        images: what is held out: 500 other training images to choose a rate by, or the 1,000 test images.
        by_label: each worker has a part of its own, of a few classes: see `ByLabel`.
    """
    plain = gs.data.fashion_mnist()
    order = epoch_order(plain.num_samples, 0, 0)
    train = plain.batch(order[:TRAIN_SAMPLES])
    test = plain.batch(order[TRAIN_SAMPLES:])
    if images == "report":
        test = plain.test_batch(np.arange(plain.num_test_samples))
    arrays = (np.asarray(train.inputs), np.asarray(train.targets))
    if by_label:
        sorted_ids = np.argsort(arrays[1], kind="stable")
        arrays = (arrays[0][sorted_ids], arrays[1][sorted_ids])
    kind = ByLabel if by_label else ArrayDataset
    return kind("fashion-mnist", *arrays, np.asarray(test.inputs), np.asarray(test.targets))


@cache
def watched(images: Images) -> ArrayDataset:
    """`data` that holds out as many training samples besides, marked by their targets.

    So each evaluation tells of both: `train_accuracy`. The accuracy proper is then of twice as many samples,
    of which the marked ones never count.
    """
    plain = data(images)
    train, count = plain.batch(np.arange(plain.num_samples)), plain.num_test_samples
    test = plain.test_batch(np.arange(count))
    some = np.linspace(0, plain.num_samples - 1, count).astype(int)
    return gs.from_arrays(
        train.inputs,
        train.targets,
        np.concatenate([test.inputs, np.asarray(train.inputs)[some]]),
        np.concatenate([test.targets, np.asarray(train.targets)[some] + TRAIN_MARK]),
        name="fashion-mnist",
    )


def train_accuracy(outputs: Any, targets: Any) -> float:
    """A metric: twice the fraction of right answers among marked samples, half of all; see `watched`."""
    return 2 * float((outputs.argmax(-1) + TRAIN_MARK == targets).double().mean())


class ByLabel(ArrayDataset):
    """Samples sorted by label, which stay with their worker: each of 30 has 150 of one or two classes.

    In each epoch a worker goes through its own in another order. It is the same for a strategy that has
    rounds: a round is everybody's next samples.
    """

    def plan(self, spec: PartitionSpec) -> EpochPlan:
        """Worker i has samples [i·n/W, (i+1)·n/W)."""
        count, workers = self.num_samples // spec.workers, spec.workers
        size = spec.batch_size
        if not isinstance(size, int) or count * workers != self.num_samples:
            raise ValueError(
                f"{self.num_samples} samples in equal parts for {workers} workers of one batch size"
            )

        def order(epoch: int) -> Ids:
            own = [rank * count + epoch_order(count, spec.seed + rank, epoch) for rank in range(workers)]
            if spec.partitioning == "partitions":
                return np.concatenate(own)
            rounds = [part[start : start + size] for start in range(0, count, size) for part in own]
            return np.concatenate(rounds)

        return plan_samples(self.num_samples, spec, order=order)


# ---- machines -------------------------------------------------------------------------------


def cluster(*, shards: int = 1, speeds: Mapping[int, float] | None = None) -> SimulationConfig:
    """Machines on a network that is not what they wait for.

    Args:
        shards: machines of the parameter server, whose cards are one here: streams to each of them
            would be the same bytes at the same time, and cost as many times the simulation.
        speeds: of workers by rank; 1 where missing.
    """
    return SimulationConfig(
        costs={
            "gradient": Cost(per_sample_s=SAMPLE_S, jitter=LogNormal(JITTER)),
            "apply": Cost(per_elem_s=4e-10),
            "copy": Cost(per_elem_s=4e-10),
            "reduce": Cost(per_elem_s=4e-10),
        },
        speeds={f"worker-{rank}": speed for rank, speed in (speeds or {}).items()},
        network=Network(
            bandwidth_bytes_s=BANDWIDTH_BYTES_S,
            link=Link(latency_s=50e-6),
            cards={"shard-0": shards * BANDWIDTH_BYTES_S},
        ),
    )
