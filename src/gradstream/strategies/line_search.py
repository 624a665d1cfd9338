"""Line searches of batch methods: a step length t along a direction d, from values and slopes of φ(t) = f(x + t·d).

Each trial is one pass over the data. Trials are generators of rounds, see `server/procedure.py`: pure, without a
network. The sum of a pass is in vector "sum", and becomes the mean gradient at the trial.

    armijo         φ(t) ≤ φ(0) + c₁·t·φ'(0)                          halves t, or less by interpolation
    strong_wolfe   the same, and |φ'(t)| ≤ c₂·|φ'(0)|                bracket, then zoom
    exact          t = -φ'(0) / (φ'(1) - φ'(0))                      the minimum, where f is quadratic

c₁ = 1e-4, and c₂ = 0.9 for quasi-Newton methods, 0.1 for conjugate gradients.

Reference: Nocedal, Wright, "Numerical optimization", 2006, algorithms 3.5 and 3.6, and equation 3.59; the cubic
interpolation is that of `torch.optim.LBFGS`.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace

from gradstream.errors import ConfigError, UnknownNameError
from gradstream.server.procedure import (
    LOW,
    SUM,
    CommandRound,
    Reply,
    State,
    Steps,
    add,
    copy,
    dot,
    scale,
    zero,
)
from gradstream.strategies.base import check_count, check_flag, check_not_negative
from gradstream.wire import v1

# ---- line search -------------------------------------------------------------------------

C1 = 1e-4
MOST_TRIALS = 25

LINE_SEARCHES = ("armijo", "strong_wolfe", "exact")


@dataclass(frozen=True, slots=True)
class Trial:
    """φ at one t: its value, and its slope where it is known."""

    t: float
    value: float
    slope: float = math.nan


@dataclass(frozen=True, slots=True)
class Found:
    """A step that was accepted. The parameters are x + t·d, and "sum" has the mean gradient there.

    Args:
        t: step length; 0 if no trial was good enough: the parameters are undefined then.
        value: φ(t).
        passes: number of trials.
        pending: commands that make the gradient of "sum"; the next round begins with them.
    """

    t: float
    value: float
    passes: int
    pending: Sequence[v1.Command] = ()


Trials = Generator[CommandRound, Reply, Trial]
Search = Generator[CommandRound, Reply, Found]


def evaluate(t: float, first: Sequence[v1.Command] = ()) -> Search:
    """One pass at x + t·d; at the current parameters where t is 0. It is accepted unless f is infinite there."""
    move = [copy("", "x"), add("", t, "d")] if t else []
    reply = yield CommandRound([*first, *move, zero(SUM), zero(LOW)], evaluate=True)
    if not math.isfinite(reply.loss):
        return Found(0.0, math.inf, 1)
    return Found(t, reply.loss, 1, (add(SUM, 1.0, LOW), scale(SUM, 1.0 / reply.samples)))


def _trial(t: float, first: Sequence[v1.Command] = ()) -> Trials:
    """φ(t) and φ'(t)."""
    found = yield from evaluate(t, first)
    if not math.isfinite(found.value):
        return Trial(t, math.inf)
    reply = yield CommandRound([*found.pending, dot(SUM, "d")])
    return Trial(t, found.value, reply.scalars[0])


def search(
    kind: str | None,
    first: Sequence[v1.Command],
    value: float,
    slope: float,
    t: float,
    *,
    c2: float,
    most: int = MOST_TRIALS,
) -> Search:
    """A step length along d.

    Args:
        kind: one of `LINE_SEARCHES`; None takes `t` as it is.
        first: commands that make d, which go with the first trial.
        value: φ(0).
        slope: φ'(0), below 0.
        t: the first trial.
        c2: c₂ of the strong Wolfe conditions.
        most: largest number of trials, at least 1.
    """
    match kind:
        case "armijo":
            return (yield from _armijo(first, value, slope, t, most))
        case "strong_wolfe":
            return (yield from _strong_wolfe(first, Trial(0.0, value, slope), t, c2, most))
        case "exact":
            return (yield from _exact(first, slope, t))
        case _:
            return (yield from evaluate(t, first))


def _armijo(first: Sequence[v1.Command], value: float, slope: float, t: float, most: int) -> Search:
    for count in range(1, most + 1):
        found = yield from evaluate(t, first)
        if found.value <= value + C1 * t * slope:
            return replace(found, passes=count)
        curved = 2.0 * (found.value - value - t * slope)
        minimum = -slope * t * t / curved if math.isfinite(curved) else 0.0
        first, t = (), min(max(minimum, 0.1 * t), 0.5 * t)
    return Found(0.0, value, most)


def _exact(first: Sequence[v1.Command], slope: float, t: float) -> Search:
    trial = yield from _trial(t, first)
    if not trial.slope > slope:
        return Found(0.0, math.inf, 1)
    found = yield from evaluate(-slope * t / (trial.slope - slope))
    return replace(found, passes=2)


def _strong_wolfe(first: Sequence[v1.Command], start: Trial, t: float, c2: float, most: int) -> Search:
    before, count = start, 0
    while count < most:
        new = yield from _trial(t, first)
        first, count = (), count + 1
        if _too_high(start, new) or (count > 1 and new.value >= before.value):
            return (yield from _zoom(start, before, new, new, c2, count, most))
        if abs(new.slope) <= -c2 * start.slope:
            return Found(t, new.value, count)
        if new.slope >= 0:
            return (yield from _zoom(start, new, before, new, c2, count, most))
        t, before = _cubic(before, new, t + 0.01 * (t - before.t), 10.0 * t), new
    return Found(before.t, before.value, count)  # f still falls at the last trial


def _zoom(start: Trial, low: Trial, high: Trial, last: Trial, c2: float, count: int, most: int) -> Search:
    """Narrows a bracket: `low` is the best trial with enough decrease, and there is a good t between it and `high`."""
    while count < most:
        width = abs(high.t - low.t)
        least = min(low.t, high.t)
        new = yield from _trial(_cubic(low, high, least + 0.1 * width, least + 0.9 * width))
        count, last = count + 1, new
        if _too_high(start, new) or new.value >= low.value:
            high = new
            continue
        if abs(new.slope) <= -c2 * start.slope:
            return Found(new.t, new.value, count)
        if new.slope * (high.t - low.t) >= 0:
            high = low
        low = new
    if low is last or not low.t:
        return Found(low.t, low.value, count)
    found = yield from evaluate(low.t)  # again: the parameters are those of a later trial
    return replace(found, passes=count + 1)


def _too_high(start: Trial, new: Trial) -> bool:
    return not new.value <= start.value + C1 * new.t * start.slope


def _cubic(one: Trial, two: Trial, least: float, most: float) -> float:
    """The minimum of the cubic through both values and slopes, within bounds; the middle if there is none."""
    if not (math.isfinite(one.value) and math.isfinite(two.value)):
        return (least + most) / 2
    a, b = sorted((one, two), key=lambda trial: trial.t)
    if a.t == b.t:  # rounding hides what is between them
        return a.t
    d1 = a.slope + b.slope - 3.0 * (a.value - b.value) / (a.t - b.t)
    square = d1 * d1 - a.slope * b.slope
    if not square >= 0:
        return (least + most) / 2
    d2 = math.sqrt(square)
    below = b.slope - a.slope + 2.0 * d2
    t = b.t - (b.t - a.t) * ((b.slope + d2 - d1) / below) if below else math.nan
    return min(max(t, least), most) if math.isfinite(t) else (least + most) / 2


# ---- descent -----------------------------------------------------------------------------
# Options of the batch methods, and the criteria by which they end.


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
        """Why the method ends here; "" if it continues."""
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
