"""Updates to a loss by batch size, the critical batch of their trade-off, and the noise scale beside it.

    (S/S_min - 1)(E/E_min - 1) = 1,   E = B·S samples     which is S = S_min + E_min/B
    critical batch = E_min/S_min
    noise scale    = tr Σ / |G|²,     Σ the covariance of the gradients of single samples, G their mean

Source: McCandlish, Kaplan, Amodei and others, "An empirical model of large-batch training", 2018.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from scipy.optimize import least_squares
from torch import nn
from torch.func import functional_call, grad, vmap

import gradstream as gs
from gradstream.errors import GradientError, UserCodeError
from large_batch.ledger import Key, Row, Rows, Scale, best_rate, mean_sd
from large_batch.minima import MODELS, images

RATES = (0.05, 0.07, 0.1, 0.14, 0.2, 0.28, 0.4, 0.56)
POINTS = 20
"""Evaluations on the way."""
AT = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Shares of the way to the target, at which the noise scale is measured."""
NOISE_BATCH = 100
CHUNK = 100


@cache
def seen_again(samples: int) -> Any:
    """The training images, held out as well: each evaluation is the loss of all of them."""
    data = images(samples)
    return gs.from_arrays(data.inputs, data.targets, data.inputs, data.targets, name="train")


def mean_loss(outputs: Any, targets: Any) -> float:
    """The cross-entropy: an evaluation of a classifier has none of its own."""
    return float(nn.functional.cross_entropy(torch.as_tensor(outputs), torch.as_tensor(targets)))


def due(rows: Rows, scale: Scale) -> Iterator[Key]:
    """All runs that can be named: at each rate, then the best one under the other seeds, then the noise."""
    for model in scale.models:
        for batch in scale.counts:
            yield from _tuning(scale, model, batch)
            if (lr := rate(rows, scale, model, batch)) is not None:
                yield from (Key("count", model, "sgd", batch, lr, seed) for seed in scale.seeds)
        yield from _noise(rows, scale, model)


def _noise(rows: Rows, scale: Scale, model: str) -> Iterator[Key]:
    """Where the noise is measured: on the way of runs that were counted."""
    batch = min(scale.counts, key=lambda size: abs(size - NOISE_BATCH))
    lr = rate(rows, scale, model, batch)
    if lr is None:
        return
    for seed in scale.seeds:
        counted = rows.get(Key("count", model, "sgd", batch, lr, seed))
        if counted is not None and counted["updates"] is not None:
            yield Key("noise", model, str(counted["updates"]), batch, lr, seed)


def _tuning(scale: Scale, model: str, batch: int) -> list[Key]:
    return [Key("count", model, "sgd", batch, lr, seed) for lr in RATES for seed in scale.tuning]


def rate(rows: Rows, scale: Scale, model: str, batch: int) -> float | None:
    """The rate that needs the fewest updates, by the mean over tuning seeds; of those with which every seed arrives."""

    def fails(lr: float) -> bool:
        counted = (rows.get(Key("count", model, "sgd", batch, lr, seed)) for seed in scale.seeds)
        return any(row is not None and row["updates"] is None for row in counted)

    rates = [lr for lr in RATES if not fails(lr)]
    tuning = [key for key in _tuning(scale, model, batch) if key.lr in rates]
    return best_rate(rows, tuning, "updates", largest=False, rates=rates)


def row_of(key: Key, scale: Scale) -> Row:
    """Counts the updates to the loss, between two evaluations by a straight line; or measures the noise scale.

    Returns:
        The key's fields, and
        updates: to the target; None if it was not reached within three times what was expected.
        noise: of the part "noise": the noise scale at each of `AT`, measured over all samples.
        cpu_s: what it took of a core.
    """
    begun_s = time.process_time()
    row: Row = {**key._asdict()}
    if key.part == "count":
        row["updates"] = _updates(key, scale)
    else:
        shares = [round(share * float(key.case)) for share in AT]
        row["noise"] = [round(_noise_scale(key, steps, scale), 2) for steps in shares]
    return row | {"cpu_s": round(time.process_time() - begun_s, 1)}


def _updates(key: Key, scale: Scale) -> float | None:
    expected = 50 + 4_000 / key.batch
    every = max(1, round(expected / POINTS))
    enough = gs.until(accuracy=scale.enough)
    try:
        run = _run(key, scale, steps=round(3 * expected), evaluate_every=every, until=enough)
    except (GradientError, UserCodeError):  # also a loss that is no finite number
        return None
    seen = [(0, math.log(10)), *((one["step"], one["metrics"]["loss"]) for one in run.evaluations)]
    index = next((number for number, (_, loss) in enumerate(seen) if loss <= scale.target), None)
    if not index:
        return None
    (before, above), (after, below) = seen[index - 1 : index + 1]
    return round(before + (after - before) * (above - scale.target) / (above - below), 1)


def _run(key: Key, scale: Scale, **options: Any) -> Any:
    return gs.simulate(
        gs.from_torch(MODELS[key.model], nn.functional.cross_entropy),
        seen_again(scale.samples),
        strategy="allreduce",
        workers=1,
        optimizer=gs.optim.SGD(key.lr),
        batch_size=key.batch,
        metrics={"loss": mean_loss},
        seed=key.seed,
        non_finite="error",
        **options,
    )


def _noise_scale(key: Key, steps: int, scale: Scale) -> float:
    """The noise scale after so many updates of this run; at least one."""
    run = _run(key, scale, steps=max(1, steps))
    module = MODELS[key.model]()
    weights = {name: torch.tensor(run.parameters[name]) for name, _ in module.named_parameters()}
    data = images(scale.samples)
    return noise_scale(module, weights, torch.as_tensor(data.inputs), torch.as_tensor(data.targets))


def noise_scale(module: nn.Module, weights: Mapping[str, Any], x: Any, y: Any) -> float:
    """Noise scale tr Σ / |G|² of the cross-entropy, from the gradient of each of n samples, without bias.

        mean of |gᵢ|² = |G|² + tr Σ,    |mean of gᵢ|² = |G|² + tr Σ / n

    Args:
        module: the model.
        weights: its parameters, by name.
        x, y: (n, ...) inputs and (n,) targets.
    """

    def loss(weights: Any, x: Any, y: Any) -> Any:
        return nn.functional.cross_entropy(functional_call(module, weights, (x[None],)), y[None])

    each = vmap(grad(loss), in_dims=(None, 0, 0))
    squares, mean = 0.0, {name: torch.zeros_like(value).double() for name, value in weights.items()}
    for begin in range(0, len(x), CHUNK):
        for name, value in each(weights, x[begin : begin + CHUNK], y[begin : begin + CHUNK]).items():
            squares += float(value.square().sum(dtype=torch.float64)) / len(x)
            mean[name] += value.sum(0, dtype=torch.float64) / len(x)
    of_mean = sum(float(value.square().sum()) for value in mean.values())
    variance = (squares - of_mean) * len(x) / (len(x) - 1)
    return variance / (of_mean - variance / len(x))


def fit(batches: Sequence[int], updates: Sequence[float]) -> tuple[float, float]:
    """(S_min, E_min) of S = S_min + E_min/B, by least squares of log S."""
    sizes, counts = np.array(batches, float), np.array(updates, float)

    def off(logs: Any) -> Any:
        least_updates, least_samples = np.exp(logs)
        return np.log(least_updates + least_samples / sizes) - np.log(counts)

    first = np.log([counts.min(), (counts * sizes).min()])
    least_updates, least_samples = np.exp(least_squares(off, first).x)
    return float(least_updates), float(least_samples)


def found(rows: Rows, scale: Scale) -> dict[str, Any]:
    """By model: updates by batch, the fit of each seed and of all, and the noise scale; of models that are done."""
    figures: dict[str, Any] = {}
    for model in scale.models:
        by_batch = {}
        for batch in scale.counts:
            lr = rate(rows, scale, model, batch)
            some = [rows.get(Key("count", model, "sgd", batch, lr or 0.0, seed)) for seed in scale.seeds]
            if all(row is not None and row["updates"] is not None for row in some):
                by_batch[batch] = (lr, [row["updates"] for row in some if row is not None])
        noises = [rows[key]["noise"] for key in _noise(rows, scale, model) if key in rows]
        if len(by_batch) == len(scale.counts) and len(noises) == len(scale.seeds):
            figures[model] = _of_model(by_batch, noises)
    return {"count": figures, "target": scale.target, "at": AT} if figures else {}


def _of_model(by_batch: Mapping[int, Any], noises: Sequence[Sequence[float]]) -> dict[str, Any]:
    batches, columns = list(by_batch), [updates for _, updates in by_batch.values()]
    fits = [fit(batches, updates) for updates in zip(*columns, strict=True)]
    least_updates, least_samples = zip(*fits, strict=True)
    whole = fit(batches, [float(np.mean(updates)) for updates in columns])
    predicted = [whole[0] + whole[1] / batch for batch in batches]
    critical = [samples / updates for updates, samples in fits]
    # Over the way, by the trapezoidal rule.
    means = [float(np.trapezoid(noise, AT)) for noise in noises]
    return {
        "batches": {
            str(batch): {"rate": lr, "at_edge": lr in (RATES[0], RATES[-1]), "updates": mean_sd(updates, 1)}
            | {"samples": mean_sd((batch * count for count in updates), 0), "fit": round(expected, 1)}
            for (batch, (lr, updates)), expected in zip(by_batch.items(), predicted, strict=True)
        },
        "least_updates": mean_sd(least_updates, 1),
        "least_samples": mean_sd(least_samples, 0),
        "critical": mean_sd(critical, 1),
        "noise": [mean_sd(column, 1) for column in zip(*noises, strict=True)],
        "noise_mean": mean_sd(means, 1),
        "critical_over_noise": mean_sd([a / b for a, b in zip(critical, means, strict=True)], 2),
    }
