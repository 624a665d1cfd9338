"""Options of the batch methods, and the criteria by which they end."""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass

from gradstream.errors import ConfigError, UnknownNameError
from gradstream.server.procedure import CommandRound, Reply, State, Steps, copy, dot
from gradstream.strategies.checks import check_count, check_flag, check_not_negative
from gradstream.strategies.line_search import LINE_SEARCHES, MOST_TRIALS, Found, evaluate


@dataclass(frozen=True, slots=True)
class Descent:
    """Options of a method that goes down along directions.

    Args:
        lr: first trial of each line search, and the step without one; > 0.
        max_iter: largest number of iterations; None for no limit.
        max_eval: largest number of passes over the data; None for the run's `epochs`.
        tolerance_grad: ends at |g| ≤ this.
        tolerance_change: ends where f, or |t·d|, changes by at most this.
        line_search_fn: "armijo", "strong_wolfe" or "exact" (two passes, for quadratic functions); None takes `lr`.
        copies: whether an idle worker computes a portion that another one has, if it is expected to be done sooner.
    """

    lr: float = 1.0
    max_iter: int | None = None
    max_eval: int | None = None
    tolerance_grad: float = 1e-7
    tolerance_change: float = 1e-9
    line_search_fn: str | None = "strong_wolfe"
    copies: bool = True

    def begin(self) -> State:
        """No pass and no iteration yet. `loss` is f, and `norm` |g|, at x."""
        return {"done": "", "iteration": 0, "passes": 0, "loss": math.inf, "norm": math.inf}

    def first(self, state: State) -> Generator[CommandRound, Reply, tuple[State, float]]:
        """The pass at the initial parameters. Returns the next state, and g·g."""
        found = yield from evaluate(0.0)
        if not math.isfinite(found.value):
            return {**state, "done": "the loss of the initial parameters is not finite", "passes": 1}, 0.0
        reply = yield CommandRound([*found.pending, copy("x", ""), copy("g", "sum"), dot("g", "g")])
        square = reply.scalars[0]
        new = {**state, "loss": found.value, "norm": math.sqrt(square), "passes": 1}
        return {**new, "done": self._reason(new)}, square

    def left(self, state: State) -> int:
        """Passes that a line search may still make."""
        return (
            MOST_TRIALS
            if self.max_eval is None
            else max(1, min(MOST_TRIALS, self.max_eval - state["passes"]))
        )

    def accepted(self, state: State, found: Found, norm: float, length: float) -> State:
        """The state after a step of this length, |t·d|; `norm` is |g| at its end."""
        new = {
            **state,
            "iteration": state["iteration"] + 1,
            "passes": state["passes"] + found.passes,
            "loss": found.value,
            "norm": norm,
        }
        change = abs(state["loss"] - found.value)
        small = min(change, length) <= self.tolerance_change
        reason = self._reason(new) or (f"the change is at most {self.tolerance_change:g}" if small else "")
        return {**new, "done": reason}

    def failed(self, state: State, found: Found) -> Steps:
        """Ends at the last iterate: no trial was good enough."""
        yield CommandRound([copy("", "x")])
        return {
            **state,
            "done": "no step along the direction decreases f",
            "passes": state["passes"] + found.passes,
        }

    def _reason(self, state: State) -> str:
        """Why the method ends here; "" if it goes on."""
        if state["norm"] <= self.tolerance_grad:
            return f"the gradient is at most {self.tolerance_grad:g}"
        if self.max_iter is not None and state["iteration"] >= self.max_iter:
            return f"{self.max_iter} iterations"
        if self.max_eval is not None and state["passes"] >= self.max_eval:
            return f"{self.max_eval} passes"
        return ""


def check_descent(method: Descent) -> None:
    """Raises ConfigError if an option is out of its range."""
    name = type(method).__name__
    check_not_negative(name, "lr", method.lr)
    if not method.lr:
        raise ConfigError(f"{name}(lr={method.lr!r}): expected a number above 0")
    for option in ("max_iter", "max_eval"):
        if getattr(method, option) is not None:
            check_count(name, option, getattr(method, option), "times", other=", or None")
    check_flag(name, "copies", method.copies)
    for option in ("tolerance_grad", "tolerance_change"):
        check_not_negative(name, option, getattr(method, option))
    if method.line_search_fn is not None and method.line_search_fn not in LINE_SEARCHES:
        raise UnknownNameError(f"line_search_fn of {name}", str(method.line_search_fn), LINE_SEARCHES)
