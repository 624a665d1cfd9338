"""Workers join a job beyond its number, and leave it: on virtual time, at drawn moments."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

import gradstream as gs
from gradstream.job.losses import losses_of
from gradstream.run.planning import plan_run
from gradstream.testing import TokenAudit, Tokens, numbered
from gradstream.testing.runs import QUICK, least_squares

SAMPLES, EPOCHS = 120, 3


def grown(strategy: str, seed: int) -> gs.Run:
    """A run that begins with two workers. Up to three more come, and any may die and come back."""
    draw = random.Random(seed)
    coming = [(draw.uniform(0.2, 2.5), f"worker-{2 + number}") for number in range(draw.randint(1, 3))]
    dying = [
        (draw.uniform(0.3, 3), f"worker-{draw.randrange(2 + len(coming))}") for _ in range(draw.randint(0, 2))
    ]
    again = [(time_s + draw.uniform(0.1, 0.6), name) for time_s, name in dying if draw.random() < 0.5]
    due = sorted([(*one, "come") for one in coming + again] + [(*one, "die") for one in dying])
    there = {"worker-0", "worker-1"}

    async def script(cluster: Any) -> None:
        director, now_s = cluster.virtual.runtime("director"), 0.0
        for time_s, name, what in due:
            await director.sleep(time_s - now_s)
            now_s = time_s
            if what == "come" and name not in there:
                there.add(name)
                await cluster.restart(name)
            elif what == "die" and name in there and len(there) > 1:
                there.remove(name)
                cluster.kill(name)

    job = gs.Job(
        Tokens(4, SAMPLES),
        numbered(SAMPLES),
        strategy=strategy,
        optimizer=gs.optim.SGD(lr=1.0),
        workers=2,
        servers=draw.choice([1, 2]),
        batch_size=draw.choice([1, 2, 3]),
        epochs=EPOCHS,
        chunk_elems=draw.choice([64, 128]),
        seed=seed,
        deadlines=QUICK,
    )
    return gs.simulate(
        job, config=gs.sim.SimulationConfig(costs={"gradient": gs.sim.Cost(base_s=0.05)}), script=script
    )


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("strategy", ["downpour", "asysg"])
def test_each_sample_is_in_the_model_once_an_epoch_whoever_comes_and_goes(strategy: str, seed: int) -> None:
    run = grown(strategy, seed)
    assert TokenAudit.of(run, SAMPLES, EPOCHS).exact, TokenAudit.of(run, SAMPLES, EPOCHS)
    assert run.summary["samples_accounted"] == EPOCHS * SAMPLES
    made = {event["node"] for event in run.events if event["event"] == "step"}
    assert made >= {"worker-0", "worker-1"} and len(made) > 2


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"strategy": "synchronous"}, "data of a job is divided"),
        ({"strategy": "ssp"}, "data of a job is divided"),
        ({"strategy": "lbfgs"}, "data of a job is divided"),
        ({"strategy": "allreduce"}, "data of a job is divided"),
        ({"workers": 1}, "--wait 2"),
        ({"batch_size": [2, 4]}, r"batch_size=\[2, 4\]"),
        ({"assignment": "partitions"}, "data of a job is divided"),
        ({"phases": [gs.Phase(epochs=1), gs.Phase(epochs=1)], "epochs": None}, "Leave the phases out"),
    ],
)
def test_a_job_that_takes_no_further_worker_says_why(options: dict[str, Any], why: str) -> None:
    model, data = least_squares(64, 5)
    plain = {"strategy": "downpour", "workers": 2, "batch_size": 4, "epochs": 2}
    plan = plan_run(gs.Job(model, data, **{**plain, **options}), "run")
    losses = losses_of(plan)
    assert not losses.grows
    assert re.search(why, losses.stays), losses.stays
