"""Minima by batch size and method, after a small-batch start, and of batches that grow: accuracy and sharpness.

All rates are those of the small batch b. `linear` takes η·B/b at batch B, `lars` and `lamb` η·√(B/b), each after two
epochs of warm-up; `plain` keeps η. A cosine follows, except where rates are what is compared.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
from torch import nn

import gradstream as gs
from gradstream.analysis import FullLoss, sharpness
from gradstream.errors import GradientError
from gradstream.run.result import flatten
from large_batch.ledger import Key, Row, Rows, Scale, best_rate, mean_sd

MOMENTUM, WARM_UP, PHASES, GROWTH = 0.9, 2, 3, 4
GRID = {
    "plain": (0.01, 0.03, 0.1, 0.3),
    "linear": (0.01, 0.03, 0.1, 0.3),
    "lars": (0.3, 1.0, 3.0, 10.0),
    "lamb": (0.001, 0.003, 0.01, 0.03),
}
"""Rates at the small batch."""
STARTS = (1, 2, 4, 8)
"""Epochs of a small-batch start."""
GROWTHS = {
    "batch constant, rate constant": (1, 1),
    "batch constant, rate annealed": (1, GROWTH),
    "batch growing, rate constant": (GROWTH, 1),
    "batch growing, rate annealed": (GROWTH, GROWTH),
}
"""Factor of the batch, and divisor of the rate, from one third of the run to the next."""
BOXES: dict[str, dict[str, Any]] = {
    "full space, 1e-3": {"epsilon": 1e-3},
    "full space, 5e-4": {"epsilon": 5e-4},
    "100 directions, 1e-3": {"epsilon": 1e-3, "subspace": 100},
    "100 directions, 5e-4": {"epsilon": 5e-4, "subspace": 100},
}
CHANCE = 10.0
"""Accuracy of a run that broke down, in percent."""


def dense() -> nn.Module:
    """784-32-32-10: 26,506 parameters."""
    layers = (nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))
    return nn.Sequential(nn.Flatten(), *layers)


def cnn() -> nn.Module:
    """Two convolutions of stride 2 and a dense layer: 9,226 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 5, stride=2, padding=2),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 7 * 7, 10),
    )


MODELS = {"dense": dense, "cnn": cnn}


@cache
def images(samples: int, held_out: int = 0) -> Any:
    """So many training images, and the 1,000 of the test, or some of the training images to choose rates by."""
    data, order = gs.data.fashion_mnist(), np.random.default_rng(0).permutation(5000)[:samples]
    train, test = data.batch(order[held_out:]), data.test_batch(np.arange(data.num_test_samples))
    if held_out:
        test = data.batch(order[:held_out])
    return gs.from_arrays(train.inputs, train.targets, test.inputs, test.targets, name="fashion-mnist")


# ---- what is to be run ----------------------------------------------------------------------------------


def due(rows: Rows, scale: Scale) -> Iterator[Key]:
    """All runs that can be named: those that tune, and those at rates that are chosen."""
    for model in scale.models:
        for batch in (scale.small, *reversed(scale.batches[1:])):  # the extremes say most
            for method in _methods(batch, scale):
                yield from _of_batch(rows, scale, model, method, batch)
        for part, cases, method, batch in (
            ("start", [str(epochs) for epochs in STARTS], "linear", scale.large),
            ("growth", list(GROWTHS), "plain", scale.small),
        ):
            lr = rate(rows, scale, model, method, batch)
            for case in cases if lr is not None else ():
                yield from (Key(part, model, case, batch, lr, seed) for seed in scale.seeds)


def _of_batch(rows: Rows, scale: Scale, model: str, method: str, batch: int) -> Iterator[Key]:
    if method != "plain" or batch == scale.small:
        yield from _tuning(scale, model, method, batch)
    lr = rate(rows, scale, model, method, batch)
    if lr is not None:
        yield from (Key("batch", model, method, batch, lr, seed) for seed in scale.seeds)


def _tuning(scale: Scale, model: str, method: str, batch: int) -> list[Key]:
    return [Key("batch", model, method, batch, lr, seed) for lr in GRID[method] for seed in scale.tuning]


def rate(rows: Rows, scale: Scale, model: str, method: str, batch: int) -> float | None:
    """The rate with the best mean accuracy on held-out images, under tuning seeds; None if it is not known yet."""
    tuned = scale.small if method == "plain" else batch
    keys = _tuning(scale, model, method, tuned)
    return best_rate(rows, keys, "accuracy", largest=True, rates=GRID[method])


# ---- a run ----------------------------------------------------------------------------------------------


def row_of(key: Key, scale: Scale) -> Row:
    """Trains a model.

    Returns:
        The key's fields, and
        accuracy: in percent: of held-out images if the seed is one of tuning, else of the test.
        loss, sharpness: over all training images, the latter by name of its box; None for runs that tune.
        updates: number of updates.
        failed: whether a number left the range of float32.
        cpu_s: what it took of a core.
    """
    begun_s, tuning = time.process_time(), key.seed in scale.tuning
    model, data = (
        gs.from_torch(MODELS[key.model], nn.functional.cross_entropy),
        images(scale.samples, scale.samples // 10 if tuning else 0),
    )
    row: Row = {**key._asdict(), "accuracy": CHANCE, "loss": None, "sharpness": None, "updates": 0}
    try:
        run = gs.simulate(
            model,
            data,
            strategy="allreduce",
            workers=1,
            seed=key.seed,
            non_finite="error",
            **options(key, scale),
        )
        row |= {"accuracy": 100 * run.evaluate().accuracy, "updates": len(run.history), "failed": False}
        if not tuning:
            row |= _minimum(run, data)
    except GradientError:
        row["failed"] = True
    return row | {"cpu_s": round(time.process_time() - begun_s, 1)}


def options(key: Key, scale: Scale) -> dict[str, Any]:
    """What a run differs in from the others."""
    schedules, small = gs.schedules, scale.small
    if key.part == "growth":
        factor, divisor = GROWTHS[key.case]
        phases = [
            gs.Phase(epochs=scale.epochs // PHASES, accumulate=factor**n, lr=key.lr / divisor**n)
            for n in range(PHASES)
        ]
        return {"optimizer": gs.optim.SGD(key.lr, momentum=MOMENTUM), "batch_size": small, "phases": phases}
    peak, ramp = key.lr, {"length": WARM_UP, "unit": "epochs"}
    if key.part == "start" or key.case == "linear":
        scaled = schedules.linear_scaling(key.lr, samples=key.batch, per=small)
        linear = schedules.Warmup(schedules.Cosine(scaled), start=key.lr, **ramp)
        if key.part == "start":
            phases = [
                gs.Phase(epochs=int(key.case), batch_size=small, lr=key.lr),
                gs.Phase(epochs=scale.epochs, batch_size=key.batch, lr=linear),
            ]
            return {"optimizer": gs.optim.SGD(key.lr, momentum=MOMENTUM), "phases": phases}
        optimizer: Any = gs.optim.SGD(linear, momentum=MOMENTUM)
    elif key.case == "plain":
        optimizer = gs.optim.SGD(schedules.Cosine(peak), momentum=MOMENTUM)
    else:
        scaled = peak * math.sqrt(key.batch / small)
        warm = schedules.Warmup(schedules.Cosine(scaled), **ramp)
        optimizer = (
            gs.optim.LARS(warm, momentum=MOMENTUM)
            if key.case == "lars"
            else gs.optim.LAMB(warm, weight_decay=0.0)
        )
    return {"optimizer": optimizer, "batch_size": key.batch, "epochs": scale.epochs}


def _minimum(run: Any, data: Any) -> Row:
    loss = FullLoss(run.model, data)
    x = flatten(run.model, run.parameters).double().numpy()
    found = {name: sharpness(loss, x, **box) for name, box in BOXES.items()}
    return {
        "loss": next(iter(found.values())).loss,
        "sharpness": {name: one.value for name, one in found.items()},
    }


# ---- figures --------------------------------------------------------------------------------------------


def found(rows: Rows, scale: Scale) -> dict[str, Any]:
    """By part, model, batch size and case: mean and deviation over seeds. A comparison is whole, or left out."""
    figures: dict[str, Any] = {}
    for model in scale.models:
        compared = [("batch", batch, _methods(batch, scale)) for batch in scale.batches]
        compared += [("start", scale.large, tuple(map(str, STARTS))), ("growth", scale.small, tuple(GROWTHS))]
        for part, batch, cases in compared:
            by_case = {case: _reported(rows, scale, part, model, case, batch) for case in cases}
            if all(len(some) == len(scale.seeds) for some in by_case.values()):
                figures.setdefault(part, {}).setdefault(model, {})[str(batch)] = {
                    case: _of_seeds(some, GRID.get(case)) for case, some in by_case.items()
                }
    return figures


def _methods(batch: int, scale: Scale) -> tuple[str, ...]:
    return tuple(
        method for method in GRID if method != "linear" or batch > scale.small
    )  # there it is the plain one


def _reported(rows: Rows, scale: Scale, part: str, model: str, case: str, batch: int) -> list[Row]:
    method = case if part == "batch" else "linear" if part == "start" else "plain"
    lr = rate(rows, scale, model, method, batch)
    keys = [Key(part, model, case, batch, lr, seed) for seed in scale.seeds] if lr is not None else []
    return [rows[key] for key in keys if key in rows]


def _of_seeds(rows: list[Row], grid: tuple[float, ...] | None) -> dict[str, Any]:
    lr, whole = rows[0]["lr"], [row for row in rows if not row["failed"]]
    found = {"rate": lr, "at_edge": grid is not None and lr in (grid[0], grid[-1])}
    found |= {"seeds": len(rows), "failed": len(rows) - len(whole), "updates": rows[0]["updates"]}
    found["accuracy"] = mean_sd((row["accuracy"] for row in rows), 2)
    if whole:
        found["loss"] = mean_sd(row["loss"] for row in whole)
        found["sharpness"] = {name: mean_sd((row["sharpness"][name] for row in whole), 2) for name in BOXES}
    return found
