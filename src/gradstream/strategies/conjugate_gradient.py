"""Nonlinear conjugate gradients on the gradient of the whole data set, with all vectors on the shards.

    β ← max(0, g·(g - g_before) / g_before·g_before)         Polak-Ribière, PR+
    d ← -g + β·d;  t ← line search;  x ← x + t·d

Where d is no direction of descent, d ← -g. The first trial of a search is 2·(f - f_before) / (g·d), which
expects as much of this step as the one before has brought. On a quadratic function of n parameters, with
`line_search_fn="exact"`, it ends after n iterations, as linear conjugate gradients do.

One exchange of commands accepts a trial and returns the dot products of the next direction, which goes with the next
trial. Shards hold 6 vectors besides the parameters.

Reference: Polak, Ribière, 1969; Nocedal, Wright, "Numerical optimization", 2006, algorithm 5.4 with equation 5.45, and
equation 3.60 for the first trial;
c₂ = 0.1, so that the strong Wolfe conditions give directions of descent; Dean et al. 2012, section 4.2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gradstream.server.procedure import CommandRound, State, Steps, add, copy, dot, scale, zero
from gradstream.strategies.batch import BatchMethod
from gradstream.strategies.line_search import Descent, check_descent, search


@dataclass(frozen=True, slots=True)
class ConjugateGradient(Descent, BatchMethod):
    """Nonlinear conjugate gradients; see the module.

    Args:
        lr: first trial of the first line search, times min(1, 1/|g|); > 0.
        max_iter, max_eval, tolerance_grad, tolerance_change, line_search_fn, copies: see `strategies.descent.Descent`.

    Example:
        >>> strategy = gs.strategies.ConjugateGradient()
        >>> run = gs.simulate(model, data, strategy=strategy, workers=2, batch_size=8, epochs=12)
        >>> run.summary["staleness_max"] >= 0
        True
    """

    def __post_init__(self) -> None:
        check_descent(self)

    def vectors(self) -> tuple[str, ...]:
        """The last iterate, its gradient, and the direction."""
        return ("x", "g", "d")

    def begin(self) -> State:
        """`gd` is g·d and `dd` d·d of the direction before, and `beta` the factor of the next one."""
        return {**Descent.begin(self), "gg": 0.0, "gd": 0.0, "dd": 0.0, "beta": 0.0, "change": 0.0}

    def iteration(self, state: State) -> Steps:
        """The pass at the initial parameters, or one iteration."""
        if not state["passes"]:
            state, square = yield from self.first(state)
            return {**state, "gg": square}
        gg, beta = state["gg"], state["beta"]
        slope = -gg + beta * state["gd"]
        if not slope < 0:
            beta, slope = 0.0, -gg
        length = math.sqrt(max(0.0, gg - 2.0 * beta * state["gd"] + beta * beta * state["dd"]))
        first = [scale("d", beta) if beta else zero("d"), add("d", -1.0, "g")]
        found = yield from search(
            self.line_search_fn,
            first,
            state["loss"],
            slope,
            self._trial(state, slope, length),
            c2=0.1,
            most=self.left(state),
        )
        if not found.t:
            return (yield from self.failed(state, found))
        made = [
            dot("sum", "sum"),
            dot("sum", "g"),
            dot("sum", "d"),
            dot("d", "d"),
            copy("x", ""),
            copy("g", "sum"),
        ]
        reply = yield CommandRound([*found.pending, *made])
        square, across, gd, dd = reply.scalars
        step = self.accepted(state, found, math.sqrt(square), found.t * length)
        beta = max(0.0, (square - across) / gg)
        return {**step, "gg": square, "gd": gd, "dd": dd, "beta": beta, "change": found.value - state["loss"]}

    def _trial(self, state: State, slope: float, length: float) -> float:
        """The first t of a line search."""
        if self.line_search_fn is None:
            return self.lr
        if not state["change"] < 0:
            return self.lr * min(1.0, 1.0 / length)
        return float(2.0 * state["change"] / slope)
