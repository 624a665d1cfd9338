"""Problems of batch methods, a naive L-BFGS, and shards in one process: the twins of the tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import gradstream as gs
from gradstream.server.procedure import LOW, SUM, Procedure, Reply, State
from gradstream.strategies import BatchMethod
from gradstream.wire import v1

Array = np.ndarray[Any, np.dtype[np.float64]]
Objective = Callable[[Array], tuple[float, Array]]


def quadratic(n: int, condition: float, seed: int) -> tuple[Objective, Array]:
    """½·w·Aw - b·w with eigenvalues of 1 to `condition`, and its minimum."""
    rng = np.random.default_rng(seed)
    turn, _ = np.linalg.qr(rng.standard_normal((n, n)))
    matrix = turn @ np.diag(np.linspace(1.0, condition, n)) @ turn.T
    right = rng.standard_normal(n)
    return lambda w: (0.5 * w @ matrix @ w - right @ w, matrix @ w - right), np.linalg.solve(matrix, right)


def rosenbrock(w: Array) -> tuple[float, Array]:
    """(1 - x)² + 100·(y - x²)²."""
    x, y = w
    slope = np.array([-2 * (1 - x) - 400 * x * (y - x * x), 200 * (y - x * x)])
    return (1 - x) ** 2 + 100 * (y - x * x) ** 2, slope


@dataclass
class Softmax:
    """Softmax regression with L2 regularisation in the loss, or ridge regression; in float64."""

    kind: str = "softmax"
    samples: int = 120
    features: int = 70
    classes: int = 8
    l2: float = 1e-2

    def __post_init__(self) -> None:
        rng = np.random.default_rng(3)
        self.inputs = rng.standard_normal((self.samples, self.features))
        truth = rng.standard_normal((self.features, self.classes))
        noise = rng.gumbel(size=(self.samples, self.classes))
        scores = self.inputs @ truth + 2.0 * noise
        self.targets = scores.argmax(1) if self.kind == "softmax" else scores

    def gradients(self, p: dict[str, Array], x: Array, y: Any) -> tuple[float, dict[str, Array]]:
        w, out = p["w"], x @ p["w"]
        if self.kind == "softmax":
            out = out - out.max(1, keepdims=True)
            shares = np.exp(out) / np.exp(out).sum(1, keepdims=True)
            rows = np.arange(len(x))
            loss = -np.log(shares[rows, y]).mean()
            shares[rows, y] -= 1.0
        else:
            shares = out - y
            loss = 0.5 * (shares**2).sum(1).mean()
        return loss + 0.5 * self.l2 * (w**2).sum(), {"w": x.T @ shares / len(x) + self.l2 * w}

    def objective(self, w: Array) -> tuple[float, Array]:
        loss, slope = self.gradients({"w": w.reshape(self.features, -1)}, self.inputs, self.targets)
        return loss, slope["w"].ravel()

    @property
    def start(self) -> Array:
        return np.zeros(self.features * self.classes)

    def model(self) -> Any:
        shape = self.features, self.classes
        return gs.from_functions(
            init=lambda seed: {"w": np.zeros(shape)},
            outputs=lambda p, x: x @ p["w"],
            gradients=self.gradients,
            dtype="float64",
        )

    def data(self) -> Any:
        return gs.from_arrays(self.inputs, self.targets)


def naive_lbfgs(objective: Objective, w: Array, *, m: int, iterations: int) -> list[Array]:
    """L-BFGS with two loops and Armijo's backtracking, as in a textbook: the iterates."""
    f, g = objective(w)
    pairs: list[tuple[Array, Array]] = []
    iterates = [w]
    for number in range(iterations):
        q, weights = g.copy(), []
        for s, y in reversed(pairs):
            weights.append((s @ q) / (y @ s))
            q -= weights[-1] * y
        if pairs:
            s, y = pairs[-1]
            q *= (s @ y) / (y @ y)
        for (s, y), a in zip(pairs, reversed(weights), strict=True):
            q += (a - (y @ q) / (y @ s)) * s
        d, t = -q, 1.0
        slope = g @ d
        if number == 0:
            t = min(1.0, 1.0 / float(np.linalg.norm(d)))
        while True:
            new_f, new_g = objective(w + t * d)
            if new_f <= f + 1e-4 * t * slope:
                break
            minimum = float(-slope * t * t / (2.0 * (new_f - f - t * slope)))
            t = min(max(minimum, 0.1 * t), 0.5 * t)
        s, y = t * d, new_g - g
        if s @ y > 1e-10 * np.linalg.norm(s) * np.linalg.norm(y):
            pairs = [*pairs, (s, y)][-m:]
        w, f, g = w + t * d, new_f, new_g
        iterates.append(w)
    return iterates


@dataclass
class OneProcess:
    """All shards of a method as numpy vectors: carries out its rounds, and passes of one portion."""

    method: BatchMethod
    objective: Objective
    start: Array
    iterates: list[Array] = field(default_factory=list)
    states: list[State] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)  # by iteration
    dots: list[int] = field(default_factory=list)

    def run(self, most: int = 1000) -> State:
        """Runs iterations until the method ends. Returns its last state."""
        procedure: Procedure = self.method
        self.vectors = {name: np.zeros_like(self.start) for name in (SUM, LOW, *self.method.vectors())}
        self.vectors[""] = self.start.copy()
        state = procedure.begin()
        while not state["done"] and len(self.iterates) < most:
            steps, reply = procedure.iteration(state), None
            self.rounds.append(0)
            self.dots.append(0)
            while True:
                try:
                    asked = next(steps) if reply is None else steps.send(reply)
                except StopIteration as stop:
                    state = stop.value
                    break
                self.rounds[-1] += 1
                scalars = [value for one in asked.commands for value in self._do(one)]
                reply = Reply(scalars)
                if asked.evaluate:
                    loss, slope = self.objective(self.vectors[""])
                    self.vectors[SUM] += slope
                    reply = Reply(scalars, loss, 1)
            self.states.append(state)
            self.iterates.append(self.vectors["x"].copy())
        return state

    def _do(self, one: v1.Command) -> list[float]:
        vectors, kind = self.vectors, v1.Command
        match one.kind:
            case kind.DOT:
                self.dots[-1] += 1
                return [float(vectors[one.x] @ vectors[one.y])]
            case kind.ZERO:
                vectors[one.out][:] = 0.0
            case kind.COPY:
                vectors[one.out][:] = vectors[one.x]
            case kind.SCALE:
                vectors[one.out] *= one.alpha
            case kind.ADD:
                vectors[one.out] += one.alpha * vectors[one.x]
            case _:
                raise AssertionError(one)
        return []
