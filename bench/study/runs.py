"""One run: a method at a rate, under a seed, as a row of figures."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from gradstream.errors import GradientError, RefusedError
from gradstream.run import Run
from gradstream.runtime.world import World
from gradstream.simulate import simulate
from study import subject
from study.methods import Method

__all__ = ["CHANCE", "Key", "Setting", "row_of"]

CHANCE = 0.1
"""Accuracy of a run that broke down: ten classes."""


@dataclass(frozen=True, order=True)
class Key:
    """Which run: what its row in the ledger is found by."""

    method: str
    lr: float
    seed: int
    epochs: int


@dataclass(frozen=True)
class Setting:
    """What is the same for all runs of a study.

    Args:
        world: machines and network.
        begin: first parameters; None for random ones, by the seed.
        watched: look at training samples as well; see `subject.data`.
        looks: evaluations an epoch, about.
        long: share of the epochs at the full rate; the rest goes at a tenth of it.
    """

    world: World
    begin: Mapping[str, np.ndarray[Any, Any]] | None = None
    watched: bool = False
    looks: int = 1
    long: float = 0.8

    def every(self, method: Method) -> int | Literal["epoch"]:
        """Steps of a worker between two evaluations."""
        if self.looks == 1:
            return "epoch"
        samples = subject.data().num_samples / method.workers
        return max(1, math.ceil(samples / method.batch) // self.looks)


def row_of(method: Method, key: Key, setting: Setting) -> dict[str, Any]:
    """Runs it. A run whose numbers grow beyond all bounds is a result too: accuracy by chance.

    Returns:
        The key's fields, and
        accuracy: of the final parameters, on the 1,000 held-out samples.
        train_loss: mean over the samples of the last epoch, as their gradients were computed.
        curve: [samples gone through, virtual seconds, accuracy] of each evaluation, the last of the final
            parameters; and accuracy on training samples where those are watched.
        virtual_s: from the first gradient to the last receipt.
        updates, staleness_mean, staleness_max: of the shard.
        moved_bytes: pushed and fetched, per gradient of 4 samples (or of what the batch is).
        failed: why it ended early, or None.
        wall_s: what this took here.
    """
    begun = time.perf_counter()
    row: dict[str, Any] = asdict(key)
    events: list[Any] = []
    try:
        run = simulate(
            subject.model(setting.begin),
            subject.data(watched=setting.watched),
            world=setting.world,
            on_event=events.append,
            strategy=method.made(),
            optimizer=method.optimizer(key.lr, key.epochs * setting.long),
            workers=method.workers,
            batch_size=method.batch,
            epochs=key.epochs,
            evaluate_every=setting.every(method),
            metrics={"train": subject.train_accuracy} if setting.watched else {},
            seed=key.seed,
        )
        row |= {"accuracy": _point(run.evaluations[-1])[2], "failed": None}
    except (GradientError, RefusedError) as error:
        run = Run(events=events)
        row |= {"accuracy": CHANCE, "failed": type(error).__name__}
    figures = run.summary
    loss, steps = figures["loss"], figures["steps"]
    return row | {
        "train_loss": loss if loss is not None and math.isfinite(loss) else None,
        "curve": [_point(evaluation) for evaluation in run.evaluations],
        "virtual_s": figures["train_s"],
        "steps": steps,
        "updates": figures["updates"],
        "staleness_mean": figures["staleness_mean"],
        "staleness_max": figures["staleness_max"],
        "moved_bytes": (figures["pushed_bytes"] + figures["fetched_bytes"]) / max(1, steps),
        "wall_s": round(time.perf_counter() - begun, 2),
    }


def _point(evaluation: Mapping[str, Any]) -> list[float]:
    """Of the curve."""
    seconds, train = round(evaluation["time_s"], 4), evaluation["metrics"].get("train")
    if train is None:
        return [evaluation["samples"], seconds, evaluation["accuracy"]]
    return [evaluation["samples"], seconds, round(2 * evaluation["accuracy"], 4), round(train, 4)]
