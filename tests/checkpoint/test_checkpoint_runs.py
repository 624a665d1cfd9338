"""Real processes: killed at any instant and resumed, or stopped by Ctrl-C, a run ends with the same bytes."""

from __future__ import annotations

import random
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import gradstream as gs
import gradstream._resume  # the name in the face is the function's
from gradstream._train import launch
from gradstream.checkpoint import newest
from gradstream.run.local import LocalCluster
from gradstream.run.local.environment import node_environment
from gradstream.run.result import FINAL_MODEL
from gradstream.runtime.storage import DiskStorage
from whole_runs import train

resume_module = sys.modules["gradstream._resume"]

JOB = """
import time
import numpy as np
import gradstream as gs

rng = np.random.default_rng(0)
X = rng.standard_normal((120, 300)).astype("float32")
Y = X @ rng.standard_normal(300).astype("float32")

def gradients(p, x, y):
    time.sleep(0.005)
    error = x @ p["w"] - y
    return float(error @ error) / len(y), {"w": 2 * error @ x / len(y)}

def job(steps=100):
    model = gs.from_functions(
        init=lambda seed: {"w": np.zeros(300)}, outputs=lambda p, x: x @ p["w"], gradients=gradients
    )
    return gs.Job(
        model, gs.from_arrays(X, Y), workers=2, servers=1, batch_size=8, steps=steps, chunk_elems=64,
        optimizer=gs.optim.Adam(lr=gs.schedules.Cosine(0.05)), checkpoint_every=4,
        deadlines=gs.Deadlines(lease_s=2.0),  # a new coordinator waits so long for nodes that are dead too
    )

def long():
    return job(100_000)
"""


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    path = tmp_path / "linear.py"
    path.write_text(textwrap.dedent(JOB))
    return path


@pytest.fixture
def warm(tmp_path: Path) -> Iterator[LocalCluster]:
    """One forkserver for many runs: what takes time is to import torch."""
    with LocalCluster(tmp_path / "logs", node_environment(2)) as cluster:
        yield cluster


class Killer:
    """SIGKILL to every node, a number of events after the start drawn from a seed."""

    def __init__(self, cluster: LocalCluster, events: int) -> None:
        self._cluster = cluster
        self._left = events

    def __call__(self, event: Any) -> None:
        self._left -= 1
        if self._left == 0:
            for name in list(self._cluster.running):
                self._cluster.signal(name, signal.SIGKILL)

    def bury(self) -> None:
        """Hears of every death, so that the next run does not."""
        while self._cluster.message(0.2) is not None or self._cluster.running:
            pass


def test_killed_again_and_again_and_resumed_a_run_ends_with_the_same_bytes(
    job_file: Path, tmp_path: Path, warm: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resume_module, "launch", partial(launch, cluster=warm))
    whole = train(job_file, tmp_path / "whole", warm)
    assert whole.summary["steps"] == 200
    rng = random.Random(7)
    path, kills = tmp_path / "killed", 0
    go: Callable[..., gs.Run] = partial(train, job_file, path, warm)
    while kills < 3:  # before the first checkpoint, between two, and in the middle of one
        killer = Killer(warm, rng.randrange(1, 60))
        try:
            go(on_event=killer)
        except gs.errors.PeerLostError:
            kills += 1
            killer.bury()
        if (path / FINAL_MODEL).is_file():  # it got there: another one, with other kill points
            assert (path / FINAL_MODEL).read_bytes() == (tmp_path / "whole" / FINAL_MODEL).read_bytes()
            path = tmp_path / f"killed-{kills}"
            go = partial(train, job_file, path, warm)
            continue
        servers = rng.choice([1, 2])
        go = partial(gs.resume, path, servers=servers)
    run = go()
    assert (path / FINAL_MODEL).read_bytes() == (tmp_path / "whole" / FINAL_MODEL).read_bytes()
    assert run.summary["failed"] is None
    assert run.summary["steps"] == 200  # steps that were computed twice count once
    assert [row["step"] for row in run.history if row["rank"] == 0] == list(range(100))


def wait_for(text: str, path: Path) -> None:
    deadline = time.monotonic() + 90
    while not path.is_file() or text not in path.read_text():
        assert time.monotonic() < deadline, f"{text} never came"
        time.sleep(0.05)


def start(job_file: Path, path: Path) -> subprocess.Popen[str]:
    code = f"import gradstream as gs\nfrom gradstream.job.files import load_job\nimport signal\n" \
        f"signal.signal(signal.SIGINT, signal.default_int_handler)\n" \
        f"gs.train(load_job({str(job_file) + ':long'!r}), run_dir={str(path)!r})\n"  # fmt: skip
    return subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_keeps_a_checkpoint_and_says_what_resumes_the_run(
    job_file: Path, tmp_path: Path, number: int
) -> None:
    path = tmp_path / "run"
    process = start(job_file, path)
    wait_for('"event":"step"', path / "events.jsonl")
    process.send_signal(number)
    _, said = process.communicate(timeout=90)
    assert process.returncode == 75, said
    assert re.search(rf"resumes from checkpoints/step-\d+: gradstream resume {path}", said)
    assert newest(DiskStorage(path), lambda error: pytest.fail(str(error))) is not None
    assert not [name for name in (path / "checkpoints").iterdir() if name.name.startswith(".")]
    assert gs.Run.load(path).summary["failed"] is None


def test_twice_means_now(job_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    process = start(job_file, path)
    wait_for('"event":"step"', path / "events.jsonl")
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode in (-signal.SIGINT, 130, 143, 1)
