"""HOGWILD! on text-like data: a million features, some hundred thousand updates a second and process.

    python examples/hogwild.py

Two processes train a logistic regression in one vector in shared memory, without locks; then one does, and
then two that lock the whole vector for each update.
"""

from __future__ import annotations

import gradstream as gs
from gradstream import sparse

FEATURES = 1 << 20


def job(update: str = "atomic", workers: int = 2) -> gs.Job:
    """100,000 samples of 50 features each, which are as unevenly frequent as words."""
    return gs.Job(
        model=sparse.linear(FEATURES, loss="logistic", l2=1e-7),
        data=sparse.synthetic(100_000, FEATURES, 50, num_test_samples=5_000, skew=0.8),
        strategy=gs.Hogwild(update=update),
        optimizer=gs.optim.SGD(lr=gs.schedules.StepDecay(2.0, every=1, factor=0.9)),
        workers=workers,
        batch_size=5_000,  # between two looks at the world outside; each sample is an update
        epochs=5,
    )


if __name__ == "__main__":
    for update, workers in (("atomic", 2), ("atomic", 1), ("lock", 2)):
        run = gs.train(job(update, workers))
        rate = run.summary["samples_per_s"] / 1e3
        print(
            f"{update:7} {workers} workers: accuracy {run.evaluate().accuracy:.3f}, {rate:6.0f} k updates/s"
        )
    print(job().data.sparsity())
