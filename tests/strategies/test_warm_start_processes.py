"""A warm start by real processes: stopped in the middle, resumed, and robbed of the worker that makes it."""

from __future__ import annotations

import sys
import textwrap
from functools import partial
from pathlib import Path

import pytest

import gradstream as gs
import gradstream._resume  # the name in the face is the function's
from gradstream._train import launch
from gradstream.job.files import load_job
from gradstream.run.local import LocalCluster
from gradstream.run.local.environment import node_environment
from gradstream.run.planning import plan_run
from gradstream.telemetry.events import EventDict
from gradstream.testing.tokens import check_exactly_once
from killing import Killer

resume_module = sys.modules["gradstream._resume"]

JOB = """
import time
import gradstream as gs
from gradstream.testing.tokens import Tokens, numbered

class Slow(Tokens):
    def gradient(self, *given, **options):
        time.sleep(0.02)
        return super().gradient(*given, **options)

def job():
    return gs.Job(
        Slow(num_chunks=3), numbered(24), strategy=gs.Downpour(warm_start="4epochs"),
        optimizer=gs.optim.SGD(lr=1.0), workers=3, servers=2, batch_size=2, epochs=8, chunk_elems=64, max_restarts=0,
    )
"""


def test_a_warm_start_that_is_stopped_resumed_and_robbed_of_its_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, path, steps = tmp_path / "warm.py", tmp_path / "run", 0
    file.write_text(textwrap.dedent(JOB))
    path.mkdir()
    job = load_job(str(file))

    def count(event: EventDict) -> None:
        nonlocal steps
        steps += event["event"] == "step"

    with LocalCluster(tmp_path / "logs", node_environment(3)) as cluster:
        with pytest.raises(gs.errors.Interrupted) as caught:
            launch(plan_run(job, "first"), path, cluster=cluster, on_event=count, stop=lambda: steps > 4)
        assert caught.value.checkpoint
        killer = Killer(cluster, "step", 4, "worker-0")
        monkeypatch.setattr(resume_module, "launch", partial(launch, cluster=cluster))
        run = gs.resume(path, on_event=killer)
    assert run.summary["workers_lost"] == ["worker-0"]
    check_exactly_once(run, 24, 8)
    alone = [event["alone"] for event in run.events if event["event"] == "warm_start"]
    assert alone == ["worker-0", "worker-0", "worker-1", ""]  # the second one is that of the resumed run
    taken_over = next(i for i, event in enumerate(run.events) if event.get("alone") == "worker-1")
    assert {event["rank"] for event in run.events[:taken_over] if event["event"] == "step"} == {0}
