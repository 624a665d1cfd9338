"""One run: a method at a rate, under a seed, as a row of figures."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from gradstream._simulate import simulate
from gradstream.errors import GradientError, RefusedError
from gradstream.run.result import Run
from study import subject
from study.methods import Method
from study.scenes import TUNING_SEED, Scene, warm_start

CHANCE = 0.1
"""Accuracy of a run that broke down: ten classes."""


@dataclass(frozen=True, order=True)
class Key:
    """Which run: what its row in the ledger is found by."""

    scene: str
    method: str
    lr: float
    seed: int
    epochs: float


def row_of(scene: Scene, method: Method, key: Key) -> dict[str, Any]:
    """Runs it. A run whose numbers grow beyond all bounds is a result too: accuracy by chance.

    Returns:
        The key's fields, and
        accuracy: of the final parameters, on the held-out samples: `Scene.data`.
        train_loss: mean over the samples of the last epoch, as their gradients were computed.
        curve: [samples gone through, virtual seconds, accuracy] of each evaluation, the last of the final
            parameters; and accuracy on training samples where those are watched.
        virtual_s: from the first gradient to the last receipt.
        updates, staleness_mean, staleness_max: of the shard.
        moved_bytes: pushed and fetched, or sent and received by the group, per gradient.
        failed: why it ended early, or None.
        cpu_s: what this took of a core here.
    """
    begun_cpu_s = time.process_time()
    row: dict[str, Any] = asdict(key)
    events: list[Any] = []
    try:
        run = simulate(
            scene.model(),
            scene.data(key.seed),
            config=scene.config,
            on_event=events.append,
            strategy=method.made(),
            optimizer=method.optimizer(key.lr, key.epochs * scene.long),
            workers=method.workers,
            batch_size=method.batch,
            shares=method.shares,
            codec=method.codec or None,
            **_length(method, key.epochs),
            assignment="partitions"
            if scene.by_label and method.made().partitioning_of_run() == "queue"
            else None,
            evaluate_every=_every(scene, method),
            metrics={"train": subject.train_accuracy} if scene.watched else {},
            seed=key.seed,
            non_finite="error",  # a rate with which a gradient overflows has failed
        )
        row |= {"accuracy": point_of(run.evaluations[-1])[2], "failed": None}
    except (GradientError, RefusedError) as error:
        run = Run(events=events)
        row |= {
            "accuracy": CHANCE,
            "failed": "GradientError" if isinstance(error, GradientError) else type(error).__name__,
        }
    figures = run.summary
    loss, steps = figures["loss"], figures["steps"]
    begin = [warm_start().points["select" if key.seed == TUNING_SEED else "report"]] if scene.watched else []
    return row | {
        "train_loss": loss if loss is not None and math.isfinite(loss) else None,
        "curve": begin + [point_of(evaluation) for evaluation in run.evaluations],
        "virtual_s": figures["train_s"],
        "steps": steps,
        "updates": figures["updates"],
        "staleness_mean": figures["staleness_mean"],
        "staleness_max": figures["staleness_max"],
        "moved_bytes": (figures["pushed_bytes"] + figures["fetched_bytes"]) / max(1, steps),
        "cpu_s": round(time.process_time() - begun_cpu_s, 2),
    }


def _length(method: Method, epochs: float) -> dict[str, int]:
    """Epochs, or steps where they are not whole. A step is a round of `period` minibatches."""
    if epochs == int(epochs):
        return {"epochs": int(epochs)}
    return {"steps": max(1, round(epochs * _steps(method) / method.period))}


def _every(scene: Scene, method: Method) -> int | Literal["epoch"]:
    """Steps of worker 0 between two evaluations; a pass where parameters stay the same for one."""
    if method.passes is not None:
        return max(1, int(_steps(method)))
    return max(1, math.ceil(_steps(method)) // (scene.looks * method.period))


def _steps(method: Method) -> float:
    """In an epoch."""
    return subject.TRAIN_SAMPLES / (method.workers * method.batch)


def point_of(evaluation: Mapping[str, Any]) -> list[float]:
    """Of the curve."""
    seconds, train = round(evaluation["time_s"], 4), evaluation["metrics"].get("train")
    if train is None:
        return [evaluation["samples"], seconds, evaluation["accuracy"]]
    return [evaluation["samples"], seconds, round(2 * evaluation["accuracy"], 4), round(train, 4)]
