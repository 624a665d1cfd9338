"""Phases of real processes: the same processes go on, also after kill -9 at a boundary, a stop, and from settings."""

from __future__ import annotations

import sys
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import gradstream as gs
import gradstream._resume  # the name in the face is the function's
from gradstream._train import launch
from gradstream.job.files import load_job
from gradstream.job.settings import apply, from_toml
from gradstream.run.local import LocalCluster
from gradstream.run.local.environment import node_environment
from gradstream.run.planning import plan_run
from gradstream.telemetry.events import EventDict
from gradstream.testing.runs import check_exactly_once
from killing import Killer

resume_module = sys.modules["gradstream._resume"]

JOB = """
import gradstream as gs
from gradstream.testing.runs import Tokens, numbered


class Sums(Tokens):
    reduction = "sum"


def job():
    return gs.Job(
        Sums(num_chunks=3), numbered(24), optimizer=gs.optim.SGD(lr=1.0), workers=2, batch_size=2, chunk_elems=64,
        phases=[
            gs.Phase(epochs=2, strategy="allreduce", lr=4.0),
            gs.Phase(epochs=3, workers=3, servers=2, lr=6.0),
            gs.Phase(epochs=3, strategy=gs.Synchronous(), workers=2, servers=1, batch_size=3, lr=6.0),
        ],
    )
"""


@pytest.fixture
def job(tmp_path: Path) -> gs.Job:
    file = tmp_path / "phased.py"
    file.write_text(JOB)
    return load_job(str(file))


def test_the_same_processes_go_through_all_phases_but_for_one_that_is_killed(
    job: gs.Job, tmp_path: Path
) -> None:
    path = tmp_path / "run"
    path.mkdir()
    pids: defaultdict[str, set[int]] = defaultdict(set)
    with LocalCluster(tmp_path / "logs", node_environment(3)) as cluster:
        killer = Killer(cluster, "phase", 2, "worker-0")

        def watch(event: EventDict) -> None:
            for name, pid in cluster.running.items():
                pids[name].add(pid)
            killer(event)

        run = launch(plan_run(job, "phases"), path, cluster=cluster, on_event=watch)
    check_exactly_once(run, 24, 8)
    assert run.summary["workers_lost"] == ["worker-0"]
    assert all(len(own) == 1 for name, own in pids.items() if name != "worker-0")
    assert pids.keys() == {"coordinator", "shard-0", "shard-1", "worker-0", "worker-1", "worker-2"}
    assert [row["strategy"] for row in run.summary["phases"]] == ["allreduce", "synchronous", "synchronous"]


def test_a_run_that_is_stopped_goes_on_in_its_phase(
    job: gs.Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, phases = tmp_path / "run", 0
    path.mkdir()

    def count(event: EventDict) -> None:
        nonlocal phases
        phases += event["event"] == "phase"

    with LocalCluster(tmp_path / "logs", node_environment(3)) as cluster:
        with pytest.raises(gs.errors.Interrupted):
            launch(plan_run(job, "phases"), path, cluster=cluster, on_event=count, stop=lambda: phases > 1)
        monkeypatch.setattr(resume_module, "launch", partial(launch, cluster=cluster))
        run = gs.resume(path)
    check_exactly_once(run, 24, 8)
    begun = [event["number"] for event in run.events if event["event"] == "phase"]
    assert begun[0] == 1 and begun[-1] == 3 and begun == sorted(begun)


def test_phases_come_from_a_settings_file(job: gs.Job, tmp_path: Path) -> None:
    toml = tmp_path / "fast.toml"
    toml.write_text(
        '[[phases]]\nepochs = 1\nworkers = 1\n[[phases]]\nsteps = 3\nstrategy = "downpour"\nlr = 0.5\n'
        "strategy_options = {push_every = 2}\n"
    )
    changed: Any = apply(job, [from_toml(toml)])
    plan = plan_run(changed, "settings")
    assert [one.job.workers for one in plan.every] == [1, 2]
    assert plan.every[1].strategy == gs.Downpour(push_every=2)
    assert plan.every[1].optimizer == gs.optim.SGD(lr=0.5)
