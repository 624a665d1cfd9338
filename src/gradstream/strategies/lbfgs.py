"""L-BFGS on the gradient of the whole data set, with all vectors on the shards (Sandblaster L-BFGS).

    q ← g                                                     s_j = x_{j+1} - x_j,  y_j = g_{j+1} - g_j
    for the newest pair j to the oldest:  a_j ← s_j·q / y_j·s_j;  q ← q - a_j·y_j
    q ← (s·y / y·y)·q                                         of the newest pair
    for the oldest pair to the newest:    b ← y_j·q / y_j·s_j;  q ← q + (a_j - b)·s_j
    d ← -q;  t ← line search;  x ← x + t·d

    vector-free: with b = (s_1 … s_m, y_1 … y_m, g), the same recursion on the coefficients δ of q = Σ δ_i·b_i.
    It needs the dot products b_i·b_j alone, of which 6m + 6 are new in an iteration.

The vector-free form takes two exchanges of commands in an iteration, whatever m is: one accepts the trial and returns
all new dot products, and one forms d and the first trial. (The strong Wolfe conditions take one more for the slope of
each trial.) The form with two loops takes 2m + 2 exchanges besides. Both are the same method; their bits differ by
rounding.

A pair with s·y ≤ 1e-10·|s|·|y| is skipped. Shards hold 2m + 8 vectors besides the parameters. Bytes of an iteration
do not depend on m, but for the scalars.

Reference: Nocedal, "Updating quasi-Newton matrices with limited storage", 1980; Nocedal, Wright, "Numerical
optimization", 2006, algorithm 7.4; Chen, Wang, Zhou, "Large-scale L-BFGS using MapReduce", NIPS 2014 (vector-free);
Dean et al. 2012, section 4.2. Options and tolerances as in `torch.optim.LBFGS`, whose norms are max |g_i| and max
|t·d_i|, and whose first step has 1/Σ|g_i|; here all three are Euclidean, and larger than those.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradstream.server.procedure import CommandRound, Reply, State, Steps, add, combine, copy, dot, scale
from gradstream.strategies.base import check_count, check_flag
from gradstream.strategies.batch import BatchMethod
from gradstream.strategies.line_search import Descent, check_descent, search

CURVATURE = 1e-10
"""Smallest cosine of the angle between s and y of a pair that is kept."""


@dataclass(frozen=True, slots=True)
class LBFGS(Descent, BatchMethod):
    """L-BFGS; see the module.

    Args:
        lr, max_iter, max_eval, tolerance_grad, tolerance_change, line_search_fn, copies: see
            `strategies.descent.Descent`.
        history_size: m, number of pairs, at least 1.
        vector_free: True is the form on coefficients; False has two loops over the pairs.

    Example:
        >>> run = gs.simulate(model, data, strategy=gs.LBFGS(), workers=2, batch_size=8, epochs=12)
        >>> run.summary["staleness_max"] >= 0
        True
    """

    history_size: int = 10
    vector_free: bool = True

    def __post_init__(self) -> None:
        check_descent(self)
        check_count("LBFGS", "history_size", self.history_size, "pairs")
        check_flag("LBFGS", "vector_free", self.vector_free)

    def vectors(self) -> tuple[str, ...]:
        """One slot more than pairs: a new pair may turn out to be one that is skipped."""
        slots = range(self.history_size + 1)
        return ("x", "g", "d", *(f"s{slot}" for slot in slots), *(f"y{slot}" for slot in slots))

    def begin(self) -> State:
        """No pair, no gradient. `pairs` has the slots from the oldest to the newest, `dots` the products b_i·b_j."""
        return {**Descent.begin(self), "pairs": [], "dots": [], "t": 0.0}

    def iteration(self, state: State) -> Steps:
        """The pass at the initial parameters, or one iteration."""
        if not state["passes"]:
            state, square = yield from self.first(state)
            return {**state, "dots": [[square]]}
        pairs, dots = list(state["pairs"]), state["dots"]
        coefficients = direction(dots)
        slope, length = self._measures(coefficients, dots)
        if not slope < 0:
            pairs, dots, coefficients = [], [[dots[-1][-1]]], [-1.0]  # steepest descent
            slope, length = self._measures(coefficients, dots)
        first = combine("d", list(zip(coefficients, _names(pairs), strict=True)))
        if not self.vector_free and pairs:
            slope, length = yield from _two_loops(pairs, dots)
            first = []
        t = self.lr * (min(1.0, 1.0 / length) if state["iteration"] == 0 and self.line_search_fn else 1.0)
        found = yield from search(
            self.line_search_fn, first, state["loss"], slope, t, c2=0.9, most=self.left(state)
        )
        if not found.t:
            return (yield from self.failed(state, found))
        free = next(slot for slot in range(self.history_size + 1) if slot not in pairs)
        s, y, kept = f"s{free}", f"y{free}", _names(pairs)[:-1]
        made = [
            copy(s, "d"),
            scale(s, found.t),
            copy(y, "sum"),
            add(y, -1.0, "g"),
            copy("x", ""),
            copy("g", "sum"),
        ]
        products = [(new, old) for new in (s, y, "g") for old in kept]
        products += [(s, s), (s, y), (y, y), ("g", s), ("g", y), ("g", "g")]
        reply = yield CommandRound([*found.pending, *made, *(dot(one, two) for one, two in products)])
        known = dict(zip(products, reply.scalars, strict=True))
        known.update({(a, b): dots[i][j] for i, a in enumerate(kept) for j, b in enumerate(kept)})
        if known[s, y] > CURVATURE * math.sqrt(known[s, s] * known[y, y]):
            pairs = [*pairs, free][-self.history_size :]
        step = self.accepted(state, found, math.sqrt(known["g", "g"]), found.t * length)
        return {**step, "pairs": pairs, "dots": _table(_names(pairs), known)}

    @staticmethod
    def _measures(coefficients: Sequence[float], dots: Sequence[Sequence[float]]) -> tuple[float, float]:
        """g·d and |d|, from the coefficients of d."""
        slope = math.fsum(a * b for a, b in zip(coefficients, dots[-1], strict=True))
        square = math.fsum(
            a * b * dots[i][j] for i, a in enumerate(coefficients) for j, b in enumerate(coefficients)
        )
        return slope, math.sqrt(max(square, 0.0))


def direction(dots: Sequence[Sequence[float]]) -> list[float]:
    """The coefficients δ (2m + 1,) of d = Σ δ_i·b_i = -H·g, from the table (2m + 1, 2m + 1) of all b_i·b_j.

    b = (s_1 … s_m, y_1 … y_m, g), the oldest pair first, and H is the approximate inverse Hessian (Chen et al. 2014).
    """
    m = len(dots) // 2
    q = [0.0] * (2 * m) + [1.0]

    def product(i: int) -> float:
        return math.fsum(a * b for a, b in zip(q, dots[i], strict=True))

    a = [0.0] * m
    for j in reversed(range(m)):
        a[j] = product(j) / dots[j][m + j]
        q[m + j] -= a[j]
    if m:
        gamma = dots[m - 1][2 * m - 1] / dots[2 * m - 1][2 * m - 1]
        q = [gamma * value for value in q]
    for j in range(m):
        q[j] += a[j] - product(m + j) / dots[j][m + j]
    return [-value for value in q]


def _names(pairs: Sequence[int]) -> list[str]:
    """The vectors of the basis."""
    return [*(f"s{slot}" for slot in pairs), *(f"y{slot}" for slot in pairs), "g"]


def _table(names: Sequence[str], known: Mapping[tuple[str, str], float]) -> list[list[float]]:
    return [[known[(a, b) if (a, b) in known else (b, a)] for b in names] for a in names]


def _two_loops(
    pairs: Sequence[int], dots: Sequence[Sequence[float]]
) -> Generator[CommandRound, Reply, tuple[float, float]]:
    """Forms d on the shards, pair by pair. Returns g·d and |d|."""
    m = len(pairs)
    curvature = [dots[j][m + j] for j in range(m)]
    a = [0.0] * m
    before: list[Any] = [copy("d", "g")]
    for j in reversed(range(m)):
        reply = yield CommandRound([*before, dot(f"s{pairs[j]}", "d")])
        a[j] = reply.scalars[0] / curvature[j]
        before = [add("d", -a[j], f"y{pairs[j]}")]
    before.append(scale("d", curvature[-1] / dots[2 * m - 1][2 * m - 1]))
    for j in range(m):
        reply = yield CommandRound([*before, dot(f"y{pairs[j]}", "d")])
        before = [add("d", a[j] - reply.scalars[0] / curvature[j], f"s{pairs[j]}")]
    reply = yield CommandRound([*before, scale("d", -1.0), dot("g", "d"), dot("d", "d")])
    return reply.scalars[0], math.sqrt(reply.scalars[1])
