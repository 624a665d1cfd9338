"""Gradient descent with a line search, on the gradient of the whole data set.

    d ← -g;  t ← line search;  x ← x + t·d

The first trial of a search is twice the step before. With `line_search_fn=None` every step has the length `lr`: that
is SGD by one node whose minibatch is the data set. Shards hold 5 vectors besides the parameters.

Reference: Cauchy 1847; Armijo 1966 for the line search; Nocedal, Wright, "Numerical optimization", 2006, chapter 3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gradstream.server.procedure import CommandRound, State, Steps, add, copy, dot, zero
from gradstream.strategies.batch import BatchMethod
from gradstream.strategies.line_search import Descent, check_descent, search


@dataclass(frozen=True, slots=True)
class GradientDescent(Descent, BatchMethod):
    """Gradient descent; see the module.

    Args:
        lr: first trial of the first line search, times min(1, 1/|g|), or the step without one; > 0.
        max_iter: largest number of iterations; None for no limit.
        max_eval: largest number of passes over the data; None for the run's `epochs`.
        tolerance_grad: ends at |g| ≤ this.
        tolerance_change: ends where f, or |t·d|, changes by at most this.
        line_search_fn: "armijo", "strong_wolfe", "exact" (two passes, for quadratic functions), or None.
        copies: see `strategies.descent.Descent`.

    Example:
        >>> run = gs.simulate(model, data, strategy=gs.strategies.GradientDescent(), workers=2, batch_size=8, epochs=12)
        >>> run.summary["staleness_max"] >= 0
        True
    """

    line_search_fn: str | None = "armijo"

    def __post_init__(self) -> None:
        check_descent(self)

    def vectors(self) -> tuple[str, ...]:
        """The last iterate, its gradient, and the direction."""
        return ("x", "g", "d")

    def begin(self) -> State:
        """`gg` is g·g, and `t` the step before."""
        return {**Descent.begin(self), "gg": 0.0, "t": 0.0}

    def iteration(self, state: State) -> Steps:
        """The pass at the initial parameters, or one iteration."""
        if not state["passes"]:
            state, square = yield from self.first(state)
            return {**state, "gg": square}
        gg = state["gg"]
        first, length = [zero("d"), add("d", -1.0, "g")], math.sqrt(gg)
        t = self.lr
        if self.line_search_fn is not None:
            t = 2.0 * state["t"] or self.lr * min(1.0, 1.0 / length)
        found = yield from search(
            self.line_search_fn, first, state["loss"], -gg, t, c2=0.9, most=self.left(state)
        )
        if not found.t:
            return (yield from self.failed(state, found))
        reply = yield CommandRound([*found.pending, dot("sum", "sum"), copy("x", ""), copy("g", "sum")])
        square = reply.scalars[0]
        step = self.accepted(state, found, math.sqrt(square), found.t * length)
        return {**step, "gg": square, "t": found.t}
