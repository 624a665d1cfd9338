"""A batch method in real processes, of which some are killed in a pass: a shard and then a worker, or two workers."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import batch_problems
import gradstream as gs
from batch_problems import OneProcess, Softmax
from gradstream.job.files import load_job

pytestmark = pytest.mark.process

JOB = """
import gradstream as gs
from batch_problems import Softmax

def job():
    problem, strategy = Softmax(classes=3, features=20), gs.LBFGS(tolerance_change=1e-13)
    return gs.Job(
        problem.model(), problem.data(), strategy=strategy, workers=WORKERS, batch_size=10, epochs=100, OTHERS
    )
"""


@pytest.mark.parametrize(
    ("workers", "others", "victims"),
    [
        (2, 'servers=2, acknowledge="replicated"', ("shard-1", "worker-1")),
        (3, "servers=0", ("worker-0", "worker-1")),
    ],
    ids=["servers", "a group"],
)
def test_killed_processes_change_nothing(
    tmp_path: Path, workers: int, others: str, victims: tuple[str, str]
) -> None:
    (tmp_path / "job.py").write_text(JOB.replace("WORKERS", str(workers)).replace("OTHERS", others))
    (tmp_path / "batch_problems.py").write_text(Path(batch_problems.__file__).read_text())
    killed: list[int] = []

    def on_event(event: Mapping[str, Any]) -> None:
        due = len(killed) < 2 and event["event"] == "step" and event["node"] == f"worker-{workers - 1}"
        if due and event["step"] == 20 * len(killed) + 10:
            victim = victims[len(killed)]
            log = tmp_path / "run" / "logs" / f"{victim}.log"
            killed.append(int(re.findall(rf"{victim}: pid (\d+)", log.read_text())[-1]))
            os.kill(killed[-1], signal.SIGKILL)

    run = gs.train(load_job(f"{tmp_path / 'job.py'}:job"), run_dir=tmp_path / "run", on_event=on_event)
    problem = Softmax(classes=3, features=20)
    twin = OneProcess(gs.LBFGS(tolerance_grad=1e-11, tolerance_change=0.0), problem.objective, problem.start)
    twin.run()
    assert len(killed) == 2
    loss = problem.objective(np.asarray(run.parameters["w"]).ravel())[0]
    assert loss - problem.objective(twin.vectors["x"])[0] <= 1e-12
