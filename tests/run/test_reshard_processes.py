"""The shards of real runs change, from outside, and processes are killed meanwhile."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import gradstream as gs
from gradstream.errors import ConfigError, exit_code
from gradstream.job.files import load_job
from gradstream.testing import TokenAudit

JOB = """
import time
from pathlib import Path
import gradstream as gs
from gradstream.testing import Tokens, numbered


def job(**options):
    model = Tokens(8)
    inner = model.gradient
    def gradient(*given, **more):
        if not Path(__file__).with_name("hurry").exists():
            time.sleep(0.4)  # so that the run goes on until all that is to happen has happened
        return inner(*given, **more)
    model.gradient = gradient
    given = {"workers": 2, "servers": 2, "batch_size": 2, "epochs": 6, "chunk_elems": 64, "strategy": "downpour"}
    return gs.Job(model, numbered(64), optimizer=gs.optim.SGD(lr=1.0), **(given | options))


def logged():
    return job(acknowledge="logged")


def recorded():
    return job(record=True)
"""

WAIT_S = 60.0


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "job.py").write_text(JOB)
    return tmp_path / "job.py"


def started(job: Path, name: str) -> Path:
    """Starts a detached run, and returns its directory once it trains."""
    run_dir = job.parent / name
    gs.train(load_job(f"{job}:{name}"), run_dir=run_dir, detach=True)
    return run_dir


def pid_of(run_dir: Path, name: str) -> int:
    """The newest process of a node, by its log."""
    log = (run_dir / "logs" / f"{name}.log").read_text()
    return int(re.findall(rf"^{name}: pid (\d+)", log, re.MULTILINE)[-1])


def kill(pid: int) -> None:
    """Kills a process, and returns when it is gone."""
    process = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    assert select.select([process], [], [], WAIT_S)[0]
    os.close(process)


def has_begun(run_dir: Path) -> bool:
    events = run_dir / "events.jsonl"
    return events.is_file() and b'"event":"step"' in events.read_bytes()


@pytest.mark.limit_s(240)
def test_a_run_changes_its_shards_and_loses_one(job: Path) -> None:
    run_dir = started(job, "logged")
    wait_for(run_dir)
    said = gs.runs.reshard(run_dir, servers=3)
    assert "shard-2, shard-3, shard-4 hold the parameters" in said
    kill(pid_of(run_dir, "shard-3"))
    assert "shard-5 hold the parameters" in gs.runs.reshard(run_dir, servers=1)
    (job.parent / "hurry").touch()
    run = gs.runs.attach(run_dir)
    assert TokenAudit.of(run, 64, 6).exact
    joined = Counter(event["who"] for event in run.events if event["event"] == "joined")
    assert {name for name in joined if name.startswith("shard")} == {f"shard-{rank}" for rank in range(6)}
    assert joined["shard-3"] >= 2
    assert sorted(os.listdir(run_dir / "backups")) == ["shard-5.log"]


@pytest.mark.limit_s(180)
def test_the_command_changes_the_shards_and_names_what_it_cannot(job: Path) -> None:
    run_dir = started(job, "job")
    wait_for(run_dir)
    command = [sys.executable, "-m", "gradstream", "reshard", str(run_dir), "--servers"]
    done = subprocess.run([*command, "4"], capture_output=True, text=True, timeout=WAIT_S)
    assert "shard-2, shard-3, shard-4, shard-5 hold the parameters" in done.stdout, done.stderr
    done = subprocess.run([*command, "4"], capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == exit_code(ConfigError(""))
    assert "has this number of shards already" in done.stderr or "has ended" in done.stderr
    (job.parent / "hurry").touch()
    assert TokenAudit.of(gs.runs.attach(run_dir), 64, 6).exact
    with pytest.raises(ConfigError, match="has ended: it has finished; no shard is left to change"):
        gs.runs.reshard(run_dir, servers=2)


@pytest.mark.limit_s(120)
def test_a_recorded_run_keeps_its_shards(job: Path) -> None:
    run_dir = started(job, "recorded")
    wait_for(run_dir)
    with pytest.raises(ConfigError, match="a recording has one file for each shard"):
        gs.runs.reshard(run_dir, servers=3)
    gs.runs.stop(run_dir, now=True)


SCRIPT = """
from pathlib import Path

import torch
from torch import nn

import gradstream

session = gradstream.join("downpour", servers=2)
model = nn.Linear(4, 1, bias=False)
nn.init.zeros_(model.weight)
model, optimizer = session.wrap(model, torch.optim.SGD(model.parameters(), lr=0.5))
steps = 0
while not Path("resharded").exists():
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    steps += 1
print(f"steps {steps}\\n", end="", flush=True)  # one write: those of two processes would mix
"""


@pytest.mark.limit_s(180)
def test_a_run_of_torchrun_changes_its_shards(tmp_path: Path) -> None:
    """Each step adds -1 to every weight: what is lost or counted twice shows."""
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "script.py",
    ]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as torchrun:
        assert torchrun.stdout is not None
        said = next((line for line in torchrun.stdout if "2 workers by torchrun" in line), "")
        assert said
        (run_dir,) = (tmp_path / "runs").iterdir()
        wait_for(run_dir)
        changed = gs.runs.reshard(run_dir, servers=3)
        (tmp_path / "resharded").touch()
        said += torchrun.communicate(timeout=WAIT_S)[0]
    assert "shard-2, shard-3, shard-4 hold the parameters" in changed
    assert torchrun.returncode == 0, said
    steps = [int(one) for one in re.findall(r"steps (\d+)", said)]
    assert len(steps) == 2, said
    assert gs.Run.load(run_dir).parameters["weight"].tolist() == [[-sum(steps)] * 4]


def wait_for(run_dir: Path) -> None:
    """Returns when the run trains."""

    class Trains(Exception):
        pass

    def on_event(event: object) -> None:
        if has_begun(run_dir):
            raise Trains

    with pytest.raises(Trains):
        gs.runs.attach(run_dir, on_event=on_event)
