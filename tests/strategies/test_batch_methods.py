"""Batch methods as pure procedures: iterates, numbers of iterations and of exchanges, without a network."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import gradstream as gs
from batch_problems import OneProcess, Softmax, naive_lbfgs, quadratic, rosenbrock
from gradstream.errors import ConfigError
from gradstream.strategies import lbfgs
from gradstream.testing import check_strategy

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("vector_free", [True, False])
@pytest.mark.parametrize("m", [1, 5, 15])
def test_a_quadratic_of_15_takes_15_iterations_with_exact_steps(m: int, vector_free: bool) -> None:
    objective, minimum = quadratic(15, 20.0, seed=0)
    method = gs.LBFGS(
        history_size=m,
        line_search_fn="exact",
        tolerance_grad=1e-8,
        tolerance_change=0.0,
        vector_free=vector_free,
    )
    twin = OneProcess(method, objective, np.zeros(15))
    state = twin.run()
    assert state["iteration"] == 15 and state["norm"] < 1e-8
    assert np.allclose(twin.vectors[""], minimum, rtol=0, atol=1e-9)


def test_conjugate_gradients_end_after_n_exact_steps() -> None:
    objective, _ = quadratic(15, 20.0, seed=1)
    method = gs.strategies.ConjugateGradient(
        line_search_fn="exact", tolerance_grad=1e-8, tolerance_change=0.0
    )
    assert OneProcess(method, objective, np.zeros(15)).run()["iteration"] == 15


@pytest.mark.parametrize("vector_free", [True, False])
@pytest.mark.parametrize("kind", ["softmax", "ridge"])
def test_iterates_are_those_of_a_naive_lbfgs(kind: str, vector_free: bool) -> None:
    problem = Softmax(kind)
    method = gs.LBFGS(
        history_size=4, line_search_fn="armijo", tolerance_change=0.0, max_iter=12, vector_free=vector_free
    )
    twin = OneProcess(method, problem.objective, problem.start)
    twin.run()
    naive = naive_lbfgs(problem.objective, problem.start, m=4, iterations=12)
    assert len(twin.iterates) == len(naive) == 13
    for mine, theirs in zip(twin.iterates[1:], naive[1:], strict=True):
        assert np.linalg.norm(mine - theirs) <= 1e-10 * np.linalg.norm(theirs)


@pytest.mark.parametrize(("search", "rounds"), [("armijo", 3), ("strong_wolfe", 4), (None, 3)])
def test_exchanges_of_an_iteration_do_not_depend_on_m(search: str | None, rounds: int) -> None:
    """One to form d and begin the pass, one for its gradient and all dot products, none besides.

    The twin counts the pass itself as the reply of the first one.
    """
    problem = Softmax()
    for m in (1, 8):
        method = gs.LBFGS(
            history_size=m, line_search_fn=search, lr=0.5 if search is None else 1.0, max_iter=12
        )
        twin = OneProcess(method, problem.objective, problem.start)
        state = twin.run()
        one_trial = [count for count in twin.rounds[1:] if count <= rounds]
        assert one_trial and set(one_trial) == {rounds - 1}
        assert twin.dots[-1] >= 6 * min(m, state["iteration"] - 1)


@pytest.mark.parametrize("search", ["armijo", "strong_wolfe"])
def test_the_valley_of_rosenbrock(search: str) -> None:
    twin = OneProcess(
        gs.LBFGS(line_search_fn=search, tolerance_change=0.0), rosenbrock, np.array([-1.2, 1.0])
    )
    state = twin.run()
    assert np.allclose(twin.vectors[""], [1.0, 1.0], atol=1e-6) and state["passes"] < 80


@pytest.mark.parametrize("method", [gs.LBFGS(), gs.strategies.ConjugateGradient()])
def test_strong_wolfe_steps_meet_both_conditions(method: Any) -> None:
    problem = Softmax()
    twin = OneProcess(method, problem.objective, problem.start)
    twin.run()
    c2 = 0.9 if isinstance(method, gs.LBFGS) else 0.1
    for before, after in zip(twin.iterates, twin.iterates[1:], strict=False):
        (f0, g0), (f1, g1) = problem.objective(before), problem.objective(after)
        way = after - before
        assert f1 <= f0 + 1e-4 * g0 @ way + 1e-14
        assert abs(g1 @ way) <= c2 * abs(g0 @ way) + 1e-14


def wave(w: Any) -> tuple[float, Any]:
    """Its curvature changes its sign, so some steps have s·y ≤ 0."""
    return float(np.cos(w).sum() + 0.01 * (w**2).sum()), -np.sin(w) + 0.02 * w


def curvatures_kept() -> list[float]:
    """s·y of all pairs that L-BFGS has kept on a wave."""
    twin = OneProcess(gs.LBFGS(line_search_fn="armijo", lr=0.5), wave, np.array([0.3, 0.2, 0.1]))
    twin.run()
    return [
        state["dots"][j][len(state["pairs"]) + j] for state in twin.states for j in range(len(state["pairs"]))
    ]


def test_a_pair_without_curvature_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert min(curvatures_kept()) > 0
    monkeypatch.setattr(lbfgs, "CURVATURE", -math.inf)  # planted: every pair is kept
    assert min(curvatures_kept()) <= 0


def test_a_trial_that_is_not_finite_is_shortened() -> None:
    def barrier(w: Any) -> tuple[float, Any]:
        if (w <= 0).any():
            return math.inf, np.zeros_like(w)
        return float((w - np.log(w)).sum()), 1 - 1 / w

    twin = OneProcess(gs.LBFGS(lr=50.0, line_search_fn="armijo"), barrier, np.array([5.0, 0.1]))
    assert np.isfinite(twin.run()["loss"]) and np.allclose(twin.vectors[""], 1.0, atol=1e-3)


@pytest.mark.parametrize("search", [None, "exact", "armijo", "strong_wolfe"])
def test_every_pass_counts(search: Any) -> None:
    objective, _ = quadratic(5, 20.0, seed=0)
    passes = 0

    def counted(w: Any) -> tuple[float, Any]:
        nonlocal passes
        passes += 1
        return objective(w)

    method = gs.strategies.GradientDescent(line_search_fn=search, lr=0.01, max_eval=20)
    assert OneProcess(method, counted, np.zeros(5)).run()["passes"] == passes >= 20


def test_a_search_out_of_passes_goes_back_to_its_best_trial() -> None:
    def valley(w: Any) -> tuple[float, Any]:
        value, slope = {0.0: (0.0, -1.0), 1.0: (-0.5, -0.95)}.get(float(w[0]), (5.0, 1.0))
        return value, np.array([slope])

    twin = OneProcess(
        gs.strategies.GradientDescent(line_search_fn="strong_wolfe", max_eval=3), valley, np.zeros(1)
    )
    state = twin.run()  # passes at 0 and 1, at a third place, and at 1 again
    assert (state["loss"], state["passes"], twin.vectors[""].item()) == (-0.5, 4, 1.0)


def test_conjugate_gradients_try_a_step_that_decreases_f_as_the_last_one_did() -> None:
    objective, _ = quadratic(15, 20.0, seed=1)
    twin = OneProcess(gs.strategies.ConjugateGradient(tolerance_change=1e-6), objective, np.zeros(15))
    twin.run()
    assert len(twin.states) > 5
    for before, after in zip(twin.states, twin.states[1:], strict=False):
        assert after["change"] == after["loss"] - before["loss"] < 0


@pytest.mark.parametrize(
    ("make", "wanted"),
    [
        (lambda: gs.LBFGS(history_size=0), "history_size=0"),
        (lambda: gs.LBFGS(lr=0.0), "lr=0.0"),
        (lambda: gs.LBFGS(line_search_fn="golden"), "line_search_fn of LBFGS"),
        (lambda: gs.strategies.ConjugateGradient(max_iter=0), "max_iter=0"),
        (lambda: gs.strategies.GradientDescent(tolerance_grad=-1.0), "tolerance_grad=-1.0"),
    ],
)
def test_options_out_of_range_are_refused(make: Any, wanted: str) -> None:
    with pytest.raises((ConfigError, Exception), match=wanted):
        make()


def test_check_strategy_refuses_a_batch_method() -> None:
    with pytest.raises(ConfigError, match="hold a batch method to one that runs in one process"):
        check_strategy("lbfgs")


@pytest.mark.parametrize(("seed", "batch_size"), [(0, 32), (0, 128)])
def test_a_search_ends_where_float32_shows_no_decrease_any_more(seed: int, batch_size: int) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((128, 10)).astype(np.float32)
    y = (x[:, :3] + 0.5 * rng.standard_normal((128, 3))).argmax(1)
    model = gs.from_torch(
        lambda: torch.nn.Linear(10, 3),
        lambda module, batch: (
            torch.nn.functional.cross_entropy(module(batch[0]), batch[1])
            + 1e-3 * module.weight.square().sum()
        ),
        loss_of="batch",
    )
    run = gs.simulate(
        model, gs.from_arrays(x, y), strategy="lbfgs", workers=1, batch_size=batch_size, epochs=120, seed=seed
    )
    assert [event["loss"] for event in run.events if event["event"] == "converged"] == [
        pytest.approx(0.418377, abs=1e-6)
    ]
