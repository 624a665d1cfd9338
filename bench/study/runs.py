"""One run: a method at a rate, under a seed, as a row of figures."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass
from typing import Any

from gradstream.errors import GradientError, RefusedError
from gradstream.run import Run
from gradstream.simulate import simulate
from study import subject
from study.methods import Method

__all__ = ["CHANCE", "Key", "row_of"]

CHANCE = 0.1
"""Accuracy of a run that broke down: ten classes."""


@dataclass(frozen=True, order=True)
class Key:
    """Which run: what its row in the ledger is found by."""

    method: str
    lr: float
    seed: int
    epochs: int


def row_of(method: Method, key: Key) -> dict[str, Any]:
    """Runs it. A run whose numbers grow beyond all bounds is a result too: accuracy by chance.

    Returns:
        The key's fields, and
        accuracy: of the final parameters, on the 1,000 held-out samples.
        train_loss: mean over the samples of the last epoch, as their gradients were computed.
        curve: [samples gone through, virtual seconds, accuracy] after each epoch and at the end.
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
            subject.model(),
            subject.data(),
            world=subject.cluster(),
            on_event=events.append,
            strategy=method.made(),
            optimizer=method.optimizer(key.lr, key.epochs),
            workers=method.workers,
            batch_size=method.batch,
            epochs=key.epochs,
            evaluate_every="epoch",
            seed=key.seed,
        )
        row |= {"accuracy": run.evaluations[-1]["accuracy"], "failed": None}
    except (GradientError, RefusedError) as error:
        run = Run(events=events)
        row |= {"accuracy": CHANCE, "failed": type(error).__name__}
    figures = run.summary
    loss, steps = figures["loss"], figures["steps"]
    return row | {
        "train_loss": loss if loss is not None and math.isfinite(loss) else None,
        "curve": [[e["samples"], round(e["time_s"], 4), e["accuracy"]] for e in run.evaluations],
        "virtual_s": figures["train_s"],
        "steps": steps,
        "updates": figures["updates"],
        "staleness_mean": figures["staleness_mean"],
        "staleness_max": figures["staleness_max"],
        "moved_bytes": (figures["pushed_bytes"] + figures["fetched_bytes"]) / max(1, steps),
        "wall_s": round(time.perf_counter() - begun, 2),
    }
