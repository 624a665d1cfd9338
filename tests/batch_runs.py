"""Runs of batch methods on virtual time, and small models for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import gradstream as gs
from batch_problems import Softmax

ITERATIONS = 6
METHOD = gs.LBFGS(history_size=3, line_search_fn="armijo", max_iter=ITERATIONS, tolerance_change=0.0)
HICCUPS = gs.sim.Trace((0.7, 1.3, 1.0, 0.8, 12.0))
"""A fifth of the gradients take so long that other workers compute them, too."""
COSTS = {"gradient": gs.sim.Cost(base_s=1e-3, per_sample_s=1e-3, jitter=HICCUPS)}
SLOW = {"worker-1": 0.05}
ROUGH = gs.sim.Network(link=gs.sim.Link(latency_s=1e-4, jitter_s=2e-3, loss=0.002, duplicate=0.05))


def run_of(
    problem: Softmax,
    strategy: Any = METHOD,
    *,
    workers: int = 3,
    servers: int | None = 2,
    network: Any = None,
    script: Any = None,
    **options: Any,
) -> gs.Run:
    speeds = SLOW if workers > 1 else {}
    config = gs.sim.SimulationConfig(costs=COSTS, speeds=speeds, network=network or gs.sim.Network())
    settings: dict[str, Any] = {"batch_size": 10, "epochs": 60, "chunk_elems": 64, **options}
    return gs.simulate(
        problem.model(),
        problem.data(),
        strategy=strategy,
        workers=workers,
        servers=servers,
        config=config,
        script=script,
        **settings,
    )


def end_of(run: gs.Run) -> Any:
    return np.asarray(run.parameters["w"]).ravel()


def at(seconds: float, what: Callable[[Any], Any]) -> Any:
    """A script that does something to a cluster at an instant of virtual time."""

    async def script(cluster: Any) -> None:
        await cluster.virtual.runtime("director").sleep(seconds)
        what(cluster)

    return script


INPUTS = np.random.default_rng(0).standard_normal((64, 3))


def model_of(gradients: Any, start: Sequence[float] = (0.0, 0.0, 0.0)) -> gs.Model:
    return gs.from_functions(
        lambda seed: {"w": np.array(start)}, lambda w, inputs: inputs @ w["w"], gradients, dtype="float64"
    )


def squares(w: Any, inputs: Any, targets: Any) -> tuple[float, Any]:
    residual = inputs @ w["w"] - targets
    return float((residual**2).mean()), {"w": 2 * inputs.T @ residual / len(targets)}
