"""Ways out of a strict saddle: full batches beside minibatches.

A strict saddle is a point where the gradient is 0 and the loss curves downwards somewhere. Descent along the full
gradient that begins there stays; the gradients of minibatches are not 0 unless those of all samples are.

    quartic   f(x, y) = x²/2 - y²/2 + y⁴/4, and a term aᵢ·(x, y) of sample i, aᵢ of mean 0: the saddle is (0, 0)
    near      the same from (0, 1e-6)
    linear    ½·mean |y - W₂W₁x|², a linear network whose 2 hidden units hold the 2nd and the 3rd direction of the
              data instead of the 1st and the 2nd (Baldi, Hornik, 1989)
    zero      the same network at W₁ = W₂ = 0, where the gradient of each sample is 0
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np

import gradstream as gs
from large_batch.ledger import Key, Row, Rows, Scale, mean_sd

SAMPLES, RATE = 1024, 0.1
BATCHES = (1, 8, 64, 512, SAMPLES)
CASES = ("quartic", "near", "linear", "zero")
SPECTRUM = (2.0, 1.0, 0.8, 0.5)
"""Singular values of the map that the linear network learns."""

Array = np.ndarray[Any, np.dtype[np.float64]]
Path = list[dict[str, Array]]


def due(rows: Rows, scale: Scale) -> Iterator[Key]:
    """All runs."""
    for case in CASES:
        for batch in BATCHES:
            yield from (Key("saddle", case, "sgd", batch, RATE, seed) for seed in scale.seeds)


def row_of(key: Key, scale: Scale) -> Row:
    """Descends from a saddle.

    Returns:
        The key's fields, and
        updates: number of updates until the point is outside, None if `scale.exits` were too few.
        cpu_s: what it took of a core.
    """
    begun_s, path = time.process_time(), []
    model, data, outside = (_quartic if key.model in ("quartic", "near") else _linear)(key.model, path)
    gs.simulate(
        model,
        data,
        strategy="allreduce",
        workers=1,
        optimizer=gs.optim.SGD(key.lr),
        batch_size=key.batch,
        steps=scale.exits,
        seed=key.seed,
    )
    points = path[-scale.exits :]
    updates = next((number for number, point in enumerate(points) if outside(point)), None)
    return {**key._asdict(), "updates": updates, "cpu_s": round(time.process_time() - begun_s, 1)}


def found(rows: Rows, scale: Scale) -> dict[str, Any]:
    """By case and batch: mean and deviation of the updates out, and how many runs got out."""
    figures: dict[str, Any] = {}
    for case in CASES:
        for batch in BATCHES:
            some = [row for key, row in rows.items() if key[:4] == ("saddle", case, "sgd", batch)]
            if len(some) == len(scale.seeds):
                left = [row["updates"] for row in some if row["updates"] is not None]
                figures.setdefault(case, {})[str(batch)] = {
                    "left": len(left),
                    "updates": mean_sd(left, 1) if left else None,
                    "samples": mean_sd((batch * count for count in left), 0) if left else None,
                }
    return {"saddle": figures, "saddle_most": scale.exits} if figures else {}


def _quartic(case: str, path: Path) -> tuple[Any, Any, Callable[[dict[str, Array]], bool]]:
    rng = np.random.default_rng(1)
    signs = np.repeat([-0.5, 0.5], SAMPLES // 2)  # sums of them are exact
    terms = np.stack([rng.permutation(signs), rng.permutation(signs)], axis=1)

    def gradients(p: dict[str, Array], noise: Array, _: Array) -> tuple[float, dict[str, Array]]:
        path.append({name: value.copy() for name, value in p.items()})
        (x, y), mean = p["w"], noise.mean(axis=0)
        loss = x * x / 2 - y * y / 2 + y**4 / 4 + mean @ p["w"]
        return float(loss), {"w": np.array([x, y**3 - y]) + mean}

    model = gs.from_functions(
        init=lambda seed: {"w": np.array([0.0, 1e-6 if case == "near" else 0.0])},
        outputs=lambda p, noise: noise @ p["w"],
        gradients=gradients,
        dtype="float64",
    )
    return model, gs.from_arrays(terms, np.zeros(SAMPLES)), lambda point: abs(point["w"][1]) >= 0.5


def _linear(case: str, path: Path) -> tuple[Any, Any, Callable[[dict[str, Array]], bool]]:
    x, y, first = _problem()

    def gradients(p: dict[str, Array], x: Array, y: Array) -> tuple[float, dict[str, Array]]:
        path.append({name: value.copy() for name, value in p.items()})
        hidden = x @ p["w1"].T
        error = hidden @ p["w2"].T - y
        return (
            float((error**2).sum() / 2 / len(x)),
            {"w1": p["w2"].T @ error.T @ x / len(x), "w2": error.T @ hidden / len(x)},
        )

    start = {name: np.zeros_like(value) for name, value in first.items()} if case == "zero" else first
    model = gs.from_functions(
        init=lambda seed: start,
        outputs=lambda p, x: x @ p["w1"].T @ p["w2"].T,
        gradients=gradients,
        dtype="float64",
    )

    def loss(point: dict[str, Array]) -> float:
        return float(((x @ point["w1"].T @ point["w2"].T - y) ** 2).sum() / 2 / len(x))

    # Half of what the first direction is worth in the place of the third, or of the first two in that of none.
    worth = (SPECTRUM[0] ** 2 - SPECTRUM[2] ** 2) if case == "linear" else SPECTRUM[0] ** 2 + SPECTRUM[1] ** 2
    border = loss(start) - worth / 4
    return model, gs.from_arrays(x, y), lambda point: loss(point) < border


@cache
def _problem() -> tuple[Array, Array, dict[str, Array]]:
    """Whitened inputs (n, 4), targets (n, 4), and the saddle."""
    rng, size = np.random.default_rng(2), len(SPECTRUM)
    x = np.linalg.qr(rng.standard_normal((SAMPLES, size)))[0] * SAMPLES**0.5
    left, right = (np.linalg.qr(rng.standard_normal((size, size)))[0] for _ in range(2))
    noise = rng.standard_normal((SAMPLES, size)) * 0.3
    noise -= x @ (x.T @ noise) / SAMPLES  # so the singular values are exact
    y = x @ (right * np.array(SPECTRUM)) @ left.T + noise
    chosen, roots = [1, 2], np.sqrt(SPECTRUM[1:3])
    return x, y, {"w1": (right[:, chosen] * roots).T.copy(), "w2": left[:, chosen] * roots}
