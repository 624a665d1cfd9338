"""What holds of each strategy of the registry, whoever has added it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

import gradstream as gs
from gradstream._simulate import simulate
from gradstream.errors import ConfigError, GradstreamError
from gradstream.job.registry import STRATEGIES, find_strategy
from gradstream.strategies.base import ServerStrategy, SharedMemoryStrategy
from gradstream.testing.runs import kill_at, least_squares
from gradstream.testing.sessions import loop_in_threads
from small_loops import DEADLINES, momentum, net, steps

TRAINS = [name for name in STRATEGIES if not find_strategy(name).in_passes]
ON_VIRTUAL_TIME = [name for name in TRAINS if not isinstance(find_strategy(name), SharedMemoryStrategy)]
"""Those whose nodes a simulation can kill."""

NUM_SAMPLES, EPOCHS = 96, 4
COSTS = gs.sim.SimulationConfig(costs={"gradient": gs.sim.Cost(base_s=0.01)})


def of(name: str, **options: Any) -> gs.Run:
    served: dict[str, Any] = {"servers": 2} if isinstance(find_strategy(name), ServerStrategy) else {}
    model, data = least_squares(NUM_SAMPLES, 8, whole=False, reduction="mean")
    return simulate(
        model,
        data,
        strategy=name,
        optimizer=gs.optim.SGD(lr=0.02),
        workers=3,
        batch_size=4,
        epochs=EPOCHS,
        **served,
        **options,
    )


@pytest.mark.parametrize("name", TRAINS)
def test_each_goes_through_every_sample_and_learns(name: str) -> None:
    run = of(name)
    assert run.summary["samples_accounted"] == EPOCHS * NUM_SAMPLES
    first, last = ([r["loss"] for r in run.history if r["epoch"] == epoch] for epoch in (0, EPOCHS - 1))
    assert np.mean(last) < np.mean(first)


@pytest.mark.parametrize("name", ON_VIRTUAL_TIME)
def test_a_death_is_survived_or_the_error_says_what_to_do(name: str) -> None:
    killed: dict[str, Any] = {"script": kill_at("worker-1", 0.05), "config": COSTS}
    if not find_strategy(name).survives_worker_loss:
        with pytest.raises(GradstreamError, match="worker-1"):
            of(name, **killed)
        return
    run = of(name, **killed)
    assert run.summary["workers_lost"] == ["worker-1"]
    dropped = run.summary["samples_dropped"]
    assert run.summary["samples_accounted"] + dropped == EPOCHS * NUM_SAMPLES


REFUSED = [name for name in STRATEGIES if name not in ON_VIRTUAL_TIME]
"""In loops of one's own: passes over all data, and memory that workers write sample by sample."""


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_loop_of_ones_own_trains_alike_on_all_workers_or_is_refused_with_a_remedy(name: str) -> None:
    def loop(session: gs.Session) -> Mapping[str, torch.Tensor]:
        model = net()
        _, optimizer = session.wrap(model, momentum(model))
        list(steps(model, optimizer, range(session.rank, 5 + session.rank)))
        session.close()
        return {key: value.detach().clone() for key, value in model.named_parameters()}

    if name in REFUSED:
        with pytest.raises(ConfigError, match=r"training loop.*; "):
            loop_in_threads(loop, strategy=name, deadlines=DEADLINES)
        return
    first, second = loop_in_threads(loop, strategy=name, deadlines=DEADLINES)
    for key, value in first.items():
        assert torch.equal(value, second[key]) and torch.isfinite(value).all()
