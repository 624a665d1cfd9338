"""Detached runs: they go on without a terminal, and end with their launcher; they are stopped from outside."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import gradstream as gs
from gradstream.errors import ConfigError, DataError, DeadlineError, Interrupted, PeerLostError, UserCodeError
from gradstream.run.launcher_lock import holder_of
from gradstream.run.local import LocalCluster
from gradstream.run.local.environment import node_environment
from whole_runs import same, train

JOB = """
import time
from pathlib import Path
import gradstream as gs
from gradstream.testing.runs import least_squares

def job(pause_s=0.005, **options):
    model, data = least_squares(1200, 40, seed=1, whole=False, reduction="mean")
    inner = model.gradient
    def gradient(*given, **more):
        if not Path(__file__).with_name("hurry").exists():
            time.sleep(pause_s)
        return inner(*given, **more)
    model.gradient = gradient
    given = {"workers": 2, "batch_size": 8, "epochs": 8, "chunk_elems": 64, "strategy": "synchronous"}
    return gs.Job(model, data, optimizer=gs.optim.SGD(lr=0.01), **(given | options))

def quick():
    return job(pause_s=0.0, epochs=1)

def lasting():
    return job(pause_s=0.4, epochs=1)

def endless():
    return job(epochs=1000)

def stuck():
    return job(pause_s=600.0)

def broken():
    made = job()
    def gradient(*given, **more):
        raise LookupError("no such thing")
    made.model.gradient = gradient
    return made
"""

WAIT_S = 60.0


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "job.py").write_text(JOB)
    return tmp_path / "job.py"


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> gs.Run:
    """A run like `lasting` in which nobody dies."""
    folder = tmp_path_factory.mktemp("quiet")
    (folder / "job.py").write_text(JOB)
    with LocalCluster(folder / "logs", node_environment(2), shards=True) as cluster:
        return train(f"{folder / 'job.py'}:quick", folder / "run", cluster)


def detached(job: Path, name: str, *options: str) -> Path:
    """Starts a detached run by the command, and returns its directory."""
    run_dir = job.parent / name
    command = [sys.executable, "-m", "gradstream", "train", f"{job}:{name}", "--detach"]
    done = subprocess.run(
        [*command, "--run-dir", str(run_dir), *options], capture_output=True, text=True, timeout=WAIT_S
    )
    assert done.returncode == 0, done.stderr
    assert f"gradstream attach {run_dir}" in done.stdout
    return run_dir


class Interrupts:
    """Stands for Ctrl-C after so many events of a kind.

    Attributes:
        seen: the kinds of all events.
    """

    def __init__(self, kind: str, count: int = 1) -> None:
        self._kind, self._count = kind, count
        self.seen: list[str] = []

    def __call__(self, event: Mapping[str, Any]) -> None:
        self.seen.append(event["event"])
        if self.seen.count(self._kind) == self._count:
            raise KeyboardInterrupt


def pid_of(run_dir: Path, name: str) -> int:
    """The process of a node, by the latest beginning of its log."""
    lines = (run_dir / "logs" / f"{name}.log").read_text().splitlines()
    begin = f"{name}: pid "
    return int([line for line in lines if line.startswith(begin)][-1].removeprefix(begin))


def launcher(run_dir: Path) -> int:
    """The process of the launcher, which there is."""
    pid = holder_of(run_dir)
    assert pid is not None
    return pid


def kill(pid: int) -> None:
    """Kills a process, and returns when it is gone."""
    process = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    assert select.select([process], [], [], WAIT_S)[0]
    os.close(process)


@pytest.mark.parametrize("victim", ["worker-1", "coordinator"])
def test_nodes_that_die_come_back_and_the_bits_stay(
    job: Path, victim: str, tmp_path: Path, quiet: gs.Run
) -> None:
    """The run is slow until the victim is back: its end does not come before."""
    run_dir = detached(job, "lasting")
    assert os.getsid(launcher(run_dir)) != os.getsid(0)
    with pytest.raises(KeyboardInterrupt, match=r"goes on without this terminal; gradstream attach"):
        gs.runs.attach(run_dir, on_event=Interrupts("step", 10))
    with pytest.raises(DataError, match="goes on"):
        gs.resume(run_dir)
    kill(pid_of(run_dir, victim))
    told: list[str] = []

    def on_event(event: Mapping[str, Any]) -> None:
        told.append(event["event"])
        if told[-1] == "coordinator" or (told[-1] == "joined" and event["epoch"] > 1):
            (tmp_path / "hurry").touch()

    run = gs.runs.attach(run_dir, on_event=on_event)
    assert told.count("step") == len(run.history) and told.count("finished") == 1
    assert run.summary["samples_accounted"] == 1200
    log = (run_dir / "logs" / f"{victim}.log").read_text()
    assert log.count(f"{victim}: pid ") == 2  # started again once
    assert holder_of(run_dir) is None
    if victim == "worker-1":
        assert [event["who"] for event in run.events if event["event"] == "joined"].count(victim) == 2
    else:
        assert [event["ruling"] for event in run.events if event["event"] == "coordinator"] == [2]
    assert same(quiet, run)


def test_nodes_end_with_their_launcher_and_the_run_is_resumed(job: Path) -> None:
    run_dir = detached(job, "job", "--epochs", "2", "--set", "checkpoint_every=20")
    with pytest.raises(KeyboardInterrupt):
        gs.runs.attach(run_dir, on_event=Interrupts("checkpoint"))
    nodes = [pid_of(run_dir, name) for name in ("coordinator", "shard-0", "worker-0", "worker-1")]
    ends = [os.pidfd_open(pid) for pid in nodes]
    kill(launcher(run_dir))
    for end in ends:
        assert select.select([end], [], [], WAIT_S)[0]
        os.close(end)
    with pytest.raises(PeerLostError, match="has not finished") as lost:
        gs.runs.attach(run_dir)
    assert f"gradstream resume {run_dir}" in lost.value.__notes__[0]
    (job.parent / "hurry").touch()
    assert gs.resume(run_dir).summary["samples_accounted"] == 2400


def test_a_run_is_stopped_from_outside_and_resumed(job: Path) -> None:
    run_dir = detached(job, "endless")
    with pytest.raises(KeyboardInterrupt):
        gs.runs.attach(run_dir, on_event=Interrupts("step", 60))
    assert "the run was stopped; it resumes from checkpoints/step-" in gs.runs.stop(run_dir)
    with pytest.raises(Interrupted) as stopped:
        gs.runs.attach(run_dir)
    assert stopped.value.checkpoint and stopped.value.code == 75
    assert "had ended before: the run was stopped" in gs.runs.stop(run_dir)

    assert gs.resume(run_dir, detach=True).path == run_dir
    follower = Interrupts("step", 60)
    with pytest.raises(KeyboardInterrupt):
        gs.runs.attach(run_dir, on_event=follower)
    assert (
        follower.seen.count("resumed") == 1 and "stopped" not in follower.seen
    )  # what was before is not this part's
    assert "the run was stopped; it resumes from checkpoints/step-" in gs.runs.stop(run_dir)


def test_a_run_is_ended_at_once(job: Path) -> None:
    run_dir = detached(job, "stuck")
    with pytest.raises(KeyboardInterrupt):
        gs.runs.attach(run_dir, on_event=Interrupts("started"))
    worker = os.pidfd_open(pid_of(run_dir, "worker-0"))
    with pytest.raises(DeadlineError, match=r"gradstream stop --now"):
        gs.runs.stop(run_dir, wait_s=0.0)
    assert "was ended at once; no checkpoint was made yet" in gs.runs.stop(run_dir, now=True)
    assert select.select([worker], [], [], 0)[0]
    os.close(worker)
    with pytest.raises(PeerLostError, match="has not finished"):
        gs.runs.attach(run_dir)


def test_what_a_detached_run_fails_with_is_raised_where_it_is_followed(job: Path) -> None:
    run_dir = detached(job, "broken")
    with pytest.raises(UserCodeError, match="no such thing") as failed:
        gs.runs.attach(run_dir)
    assert "LookupError" in failed.value.traceback_text
    assert f"run directory: {run_dir}" in failed.value.__notes__


def test_what_cannot_be_attached_to_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="expected the directory of a run"):
        gs.runs.attach(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"nodes\.json"):
        gs.runs.attach(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(ConfigError, match="only its user"):
        gs.runs.stop(tmp_path)


@pytest.mark.parametrize("wrong", [{"processes": False}, {"listen": "127.0.0.1"}, {"on_event": print}])
def test_what_cannot_be_detached_is_refused(job: Path, wrong: dict[str, Any]) -> None:
    from gradstream.job.files import load_job

    with pytest.raises(ConfigError, match="detach"):
        gs.train(load_job(f"{job}:job"), detach=True, **wrong)
