"""Minima by batch size and method, after a small-batch start, of growing batches, and the line between two of them.

All rates η are those of the small batch b. Three methods take at batch B what was best at b: `plain` η, `longer` η for
as many updates as b has (and at b, for as many epochs as the largest B then has), `linear` η·B/b. Three are tuned at
each batch: `sgd`, `lars` and `lamb` take η·√(B/b). All but `plain` and `longer` begin with two epochs of warm-up. A
cosine follows, except where rates are what is compared.
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
from gradstream.errors import GradientError
from gradstream.ext.analysis import FullLoss, sharpness, surface
from gradstream.run.result import flatten
from large_batch.ledger import Key, Row, Rows, Scale, best_rate, mean_sd

MOMENTUM, WARM_UP, PHASES, GROWTH = 0.9, 2, 3, 4
GRID = {
    "plain": (0.01, 0.03, 0.1, 0.3),
    "sgd": (0.01, 0.03, 0.1, 0.3),
    "lars": (1.0, 3.0, 10.0, 30.0),
    "lamb": (0.003, 0.01, 0.03, 0.1),
}
"""Rates, of the small batch, from which those methods choose that are tuned."""
METHODS = ("plain", "linear", "sgd", "lars", "lamb")
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


DEAD = 15.0
"""Accuracy, in percent, of a model that has learned nothing; by chance it is 10."""

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
        for part, batch, cases in _compared(scale):
            for case in cases:
                yield from _tuning(scale, part, model, case, batch)
                if (lr := rate(rows, scale, part, model, case, batch)) is not None:
                    yield from (Key(part, model, case, batch, lr, seed) for seed in scale.seeds)
        if (lr := rate(rows, scale, "batch", model, "longer", scale.large)) is not None:
            yield Key("line", model, "longer", scale.large, lr, scale.seeds[0])


def _compared(scale: Scale) -> Iterator[tuple[str, int, tuple[str, ...]]]:
    """Part, batch size and cases of each comparison; the extremes of the sizes say most."""
    yield "batch", scale.small, ("plain", "lars", "lamb")
    for batch in reversed(scale.batches[1:]):
        yield "batch", batch, METHODS
    yield "growth", scale.small, tuple(GROWTHS)
    yield "start", scale.large, tuple(map(str, STARTS))
    for batch in scale.batches:
        yield "batch", batch, ("longer",)


def _tuning(scale: Scale, part: str, model: str, case: str, batch: int) -> list[Key]:
    """The runs that choose the rate of a case."""
    if part == "start":
        part, case = "batch", "sgd"
    elif case in ("plain", "linear", "longer"):
        case, batch = "plain", scale.small
    grid = GRID["plain" if part == "growth" else case]
    return [Key(part, model, case, batch, lr, seed) for lr in grid for seed in scale.tuning]


def rate(rows: Rows, scale: Scale, part: str, model: str, case: str, batch: int) -> float | None:
    """The rate with the best mean accuracy on held-out images, under tuning seeds; None if it is not known yet.

    Where batches grow, a rate with which one of the seeds learns nothing is not taken: two seeds may not meet that.
    """
    keys = _tuning(scale, part, model, case, batch)
    if part == "growth":
        tried = {key.lr: [key._replace(seed=seed) for seed in scale.seeds] for key in keys}
        dead = {
            lr
            for lr, ran in tried.items()
            if any(rows[key]["accuracy"] <= DEAD for key in ran if key in rows)
        }
        keys = [key for key in keys if key.lr not in dead]
    return best_rate(rows, keys, "accuracy", largest=True, rates=sorted({key.lr for key in keys}))


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
    data = images(scale.samples, scale.samples // 10 if tuning else 0)
    if key.part == "line":
        row: Row = {**key._asdict(), **_line(key, scale, data)}
        return row | {"cpu_s": round(time.process_time() - begun_s, 1)}
    row = {**key._asdict(), "accuracy": CHANCE, "loss": None, "sharpness": None, "updates": 0}
    try:
        run = _run(key, scale, data)
        row |= {"accuracy": 100 * run.evaluate().accuracy, "updates": len(run.history), "failed": False}
        if not tuning:
            row |= _minimum(run, data)
    except GradientError:
        row["failed"] = True
    return row | {"cpu_s": round(time.process_time() - begun_s, 1)}


def _run(key: Key, scale: Scale, data: Any) -> Any:
    return gs.simulate(
        gs.from_torch(MODELS[key.model], nn.functional.cross_entropy),
        data,
        strategy="allreduce",
        workers=1,
        seed=key.seed,
        non_finite="error",
        **options(key, scale),
    )


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
    if key.case in ("plain", "longer"):
        # As many updates as the small batch has; the small batch, as many epochs as the large one then has.
        longer = (key.batch if key.batch > small else scale.large) // small if key.case == "longer" else 1
        optimizer: Any = gs.optim.SGD(schedules.Cosine(key.lr), momentum=MOMENTUM)
        return {"optimizer": optimizer, "batch_size": key.batch, "epochs": scale.epochs * longer}
    ratio = key.batch / small
    peak = schedules.Cosine(key.lr * (ratio if key.case == "linear" else math.sqrt(ratio)))
    start = key.lr if key.case == "linear" or key.part == "start" else None
    warm = schedules.Warmup(peak, WARM_UP, unit="epochs", start=start)
    if key.part == "start":
        phases = [
            gs.Phase(epochs=int(key.case), batch_size=small, lr=key.lr),
            gs.Phase(epochs=scale.epochs, batch_size=key.batch, lr=warm),
        ]
        return {"optimizer": gs.optim.SGD(key.lr, momentum=MOMENTUM), "phases": phases}
    if key.case == "lamb":
        optimizer = gs.optim.LAMB(warm, weight_decay=0.0)
    else:
        rule = gs.optim.LARS if key.case == "lars" else gs.optim.SGD
        optimizer = rule(warm, momentum=MOMENTUM)
    return {"optimizer": optimizer, "batch_size": key.batch, "epochs": scale.epochs}


def _line(key: Key, scale: Scale, data: Any) -> Row:
    """Loss over all training images on the line from the small batch's minimum (0) to the large one's (1)."""
    small = key._replace(part="batch", case="plain", batch=scale.small)
    runs = [_run(one, scale, data) for one in (small, key)]
    found = surface(FullLoss(runs[0].model, data), [_place(run) for run in runs])
    return {"at": found.axes[0].tolist(), "losses": found.losses.tolist()}


def _place(run: Any) -> Any:
    return flatten(run.model, run.parameters).double().numpy()


def _minimum(run: Any, data: Any) -> Row:
    loss, x = FullLoss(run.model, data), _place(run)
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
        for part, batch, cases in sorted(_compared(scale), key=lambda compared: compared[1]):
            by_case = {}
            for case in cases:
                lr = rate(rows, scale, part, model, case, batch)
                keys = [Key(part, model, case, batch, lr or 0.0, seed) for seed in scale.seeds]
                if all(key in rows for key in keys):
                    rates = [key.lr for key in _tuning(scale, part, model, case, batch)]
                    by_case[case] = _of_seeds([rows[key] for key in keys], rates)
            if len(by_case) == len(cases):
                of_model = figures.setdefault(part, {}).setdefault(model, {})
                of_model.setdefault(str(batch), {}).update(by_case)
        for key, row in rows.items():
            if key[:2] == ("line", model):
                figures.setdefault("line", {})[model] = {name: row[name] for name in ("at", "losses")}
    return figures


def _of_seeds(rows: list[Row], rates: list[float]) -> dict[str, Any]:
    lr, whole = rows[0]["lr"], [row for row in rows if not row["failed"]]
    found = {"rate": lr, "at_edge": lr in (min(rates), max(rates)), "seeds": len(rows)}
    found |= {"failed": len(rows) - len(whole), "updates": max(row["updates"] for row in rows)}
    found["accuracy"] = mean_sd((row["accuracy"] for row in rows), 2)
    if whole:
        found["loss"] = mean_sd(row["loss"] for row in whole)
        found["sharpness"] = {name: mean_sd((row["sharpness"][name] for row in whole), 2) for name in BOXES}
    return found
