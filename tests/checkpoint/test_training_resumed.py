"""Training options in a run that is stopped and goes on: the same bits as if it had never been."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gradstream as gs
from gradstream._simulate import simulate
from gradstream.errors import Interrupted
from gradstream.run.simulated import SimulatedCluster
from gradstream.runtime.simulation import Cost, SimulationConfig
from gradstream.runtime.storage import MemoryStorage
from gradstream.testing.runs import least_squares

WORLD = SimulationConfig(costs={"gradient": Cost(base_s=0.01), "evaluate": Cost(base_s=0.005)})


def stop_at(seconds: float) -> Any:
    async def script(cluster: SimulatedCluster) -> None:
        await cluster.virtual.runtime("director").sleep(seconds)
        cluster.stop()

    return script


@pytest.mark.parametrize("seconds", [0.03, 0.12, 0.24])
def test_rates_groups_clipping_and_parts_go_on_where_they_were(seconds: float) -> None:
    model, data = least_squares(100, 200, whole=False)
    data = gs.from_arrays(data.inputs[:80], data.targets[:80], data.inputs[80:], data.targets[80:])
    job: Any = {
        "optimizer": gs.optim.SGD(lr=gs.schedules.Warmup(gs.schedules.Cosine(0.05), 5), momentum=0.9),
        "groups": [{"match": "w", "weight_decay": 0.1}],
        "accumulate": 2,
        "clip_norm": 2.0,
        "evaluate_every": 3,
        "workers": 2,
        "batch_size": 5,
        "epochs": 6,
        "chunk_elems": 64,
        "config": WORLD,
    }
    whole = simulate(model, data, **job)
    storage = MemoryStorage()
    with pytest.raises(Interrupted):
        simulate(model, data, storage=storage, script=stop_at(seconds), **job)
    resumed = simulate(model, data, storage=storage, resume=True, **{**job, "servers": 2})
    assert np.array_equal(whole.parameters["w"], resumed.parameters["w"])
    rates = {row["step"]: row["lr"] for row in whole.history}
    assert resumed.history
    assert all(row["lr"] == rates[row["step"]] for row in resumed.history)
    steps = {row["step"]: row["loss"] for row in whole.evaluations}
    assert all(row["loss"] == steps[row["step"]] for row in resumed.evaluations)
    assert resumed.evaluations[-1]["step"] == 24
