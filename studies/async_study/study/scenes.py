"""Which methods meet, and where: a scene has machines, a model, data, and one budget for all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np

from gradstream._simulate import simulate
from gradstream.data.arrays import ArrayDataset
from gradstream.model.base import Model
from gradstream.runtime.simulation import SimulationConfig
from study import subject
from study.methods import BATCH, BY_NAME, MEASURED, METHODS, PAPER, POWERS, Method, downpour, sandblaster

RATES = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
LOW_RATES = (0.00003, 0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1)
TUNING_SEED = 0
SHARDS = 10
"""Machines of DistBelief's parameter server: 200 replicas would wait for the card of one."""
COUNTS = (1, 5, 20, 60, 200)
BATCH_COUNTS = (*COUNTS, 2000)
FIGURE_4 = (
    downpour(1, adagrad=False),
    downpour(20, adagrad=False),
    downpour(20, adagrad=True),
    downpour(200, adagrad=True),
    sandblaster(60, 6),
)
"""The paper's lines."""
WARM_RATE, WARM_SEED = 0.01, 99


@dataclass(frozen=True)
class Scene:
    """Where methods are compared.

    Args:
        name: in records.
        title: of its table.
        methods: that are compared.
        epochs: passes over the data.
        timed: names of methods that get a run more, as long as `clock` takes for `epochs`: slower ones.
        clock: whose time that is.
        rates: the grid of learning rates.
        rungs: (share of the epochs, rates that are kept): successive halving under one seed. Schedules
            shrink with the runs. Jamieson and Talwalkar, 2016.
        best: what a rate is chosen by: accuracy at the end, or the least time to the target.
        borrowed: name of the method whose best rate all take; None where each has its own.
        seeds: under which the best rate is reported.
        looks: evaluations an epoch, about.
        long: share of the epochs at the full rate; the rest goes at a tenth of it.
        watched: look at training samples as well, from a warm start: DistBelief's figures.
        by_label: see `subject.data`.
        cnn: the model; else the mlp.
        uneven: machines of `subject.SLOW`.
        same: name of the scene whose runs of methods without a rate are this one's, too.
    """

    name: str
    title: str
    methods: tuple[Method, ...]
    epochs: float = 10.0
    timed: tuple[str, ...] = ()
    clock: str = "downpour"
    rates: tuple[float, ...] = RATES
    rungs: tuple[tuple[float, int], ...] = ((0.1, 3), (0.5, 1))
    best: Literal["accuracy", "time"] = "accuracy"
    borrowed: str | None = None
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    looks: int = 4
    long: float = 0.8
    watched: bool = False
    by_label: bool = False
    cnn: bool = False
    uneven: bool = False
    same: str | None = None

    @property
    def config(self) -> SimulationConfig:
        """Its machines and network."""
        shards = SHARDS if self.watched else 1
        return subject.cluster(shards=shards, speeds=subject.SLOW if self.uneven else None)

    def model(self) -> Model:
        """A new one."""
        if self.cnn:
            return subject.cnn()
        return subject.mlp(warm_start().parameters if self.watched else None)

    def data(self, seed: int) -> ArrayDataset:
        """Other images are held out to choose a rate than to report on it."""
        images: subject.Images = "select" if seed == TUNING_SEED else "report"
        return subject.watched(images) if self.watched else subject.data(images, by_label=self.by_label)


@dataclass(frozen=True)
class Warm:
    """Where DistBelief's lines begin: parameters, and as a point of curves, by held-out images."""

    parameters: Mapping[str, np.ndarray[Any, Any]]
    points: Mapping[str, list[float]]


@cache
def warm_start() -> Warm:
    """One replica alone has gone through the data once."""
    run = simulate(
        subject.mlp(),
        subject.data("select"),
        strategy="downpour",
        strategy_options={"overlap": False},
        optimizer=BY_NAME["downpour"].optimizer(WARM_RATE, 2.0),
        workers=1,
        batch_size=BATCH,
        epochs=1,
        metrics={"train": subject.train_accuracy},
        seed=WARM_SEED,
    )
    points = {}
    images: tuple[subject.Images, ...] = ("select", "report")
    for one in images:
        found = run.evaluate(subject.watched(one))
        points[one] = [0, 0.0, 2 * (found.accuracy or 0.0), found.metrics["train"]]
    return Warm(dict(run.parameters), points)


def _chosen(*names: str) -> tuple[Method, ...]:
    return tuple(BY_NAME[name] for name in names)


_FEW = ("allreduce", "downpour", "softsync-30-aware", "ssp", "elastic", "averaging", "diloco")
_SLOWER = ("synchronous", "allreduce", "synchronous-momentum", "single", "single-4")


def _replicas(*counts: int) -> tuple[Method, ...]:
    return tuple(downpour(count, adagrad=adagrad) for adagrad in (False, True) for count in counts)


FIGURE_5 = Scene(
    "figure-5",
    "DistBelief's Figure 5",
    (*_replicas(*COUNTS), *(sandblaster(count, 6 if count < 200 else 3) for count in BATCH_COUNTS)),
    1.5,
    rates=LOW_RATES,
    rungs=((1.0, 1),),
    best="time",
    long=1.0,
    looks=40,
    watched=True,
)


SCENES: tuple[Scene, ...] = (
    Scene("equal", "Equal machines", METHODS, timed=_SLOWER),
    FIGURE_5,
    Scene(
        "figure-4",
        "DistBelief's Figure 4",
        FIGURE_4,
        6.0,
        rates=LOW_RATES,
        long=1.0,
        looks=6,
        watched=True,
        same="figure-5",
    ),
    Scene(
        "uneven",
        "Uneven machines",
        (*_chosen(*_FEW), *MEASURED),
        5.0,
        timed=("allreduce", "allreduce-measured", "ssp", "ssp-measured", "averaging", "diloco"),
        uneven=True,
    ),
    Scene(
        "by-label",
        "Each machine has its own classes",
        _chosen(*_FEW),
        5.0,
        timed=("allreduce",),
        by_label=True,
    ),
    Scene("paper", "α/τ in its paper's setting", PAPER, 5.0, borrowed="single-momentum"),
    Scene(
        "cnn",
        "A convolutional network",
        _chosen("allreduce", "downpour", "softsync-30-aware", "diloco"),
        5.0,
        timed=("allreduce",),
        cnn=True,
    ),
    Scene("exponents", "Other exponents", POWERS),
)
