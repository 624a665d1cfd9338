"""Job files whose processes an engine has started, one a machine; here two beside each other, with what Slurm sets."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import gradstream as gs
from gradstream.job.files import load_job
from gradstream.run.place import Place
from gradstream.run.result import FINAL_MODEL
from gradstream.session import torchrun
from gradstream.transport.socket.unix import host_id

SOURCE = str(Path(gs.__file__).resolve().parents[1])
TOKEN = "0123456789abcdef0123456789abcdef"
JOB = """
import os, time
import numpy as np
import gradstream as gs

def outputs(parameters, inputs):
    return inputs @ parameters["w"]

def gradients(parameters, inputs, targets):
    time.sleep(float(os.environ.get("PAUSE", "0")))
    error = outputs(parameters, inputs) - targets
    return float((error**2).mean()), {"w": (2 * inputs.T @ error / len(error)).astype(np.float32)}

def job():
    inputs = np.random.default_rng(0).normal(size=(400, 3)).astype(np.float32)
    model = gs.from_functions(lambda seed: {"w": np.zeros(3, np.float32)}, outputs, gradients)
    data = gs.from_arrays(inputs, inputs @ np.array([1, 2, 3], np.float32))
    return gs.Job(model, data, batch_size=20, epochs=10, optimizer=gs.optim.SGD(lr=0.1))
"""


class Process:
    """One process of a step of Slurm: `gradstream train job.py`."""

    def __init__(self, folder: Path, rank: int, port: int, *options: str, **more: str) -> None:
        (folder / "job.py").write_text(JOB)
        step = {
            "SLURM_PROCID": str(rank),
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_STEP_NODELIST": "localhost",
            "SLURM_JOB_ID": "17",
            "GRADSTREAM_PORT": str(port),
        }
        environment: dict[str, str] = {**os.environ, "PYTHONPATH": SOURCE, **step, **more}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gradstream", "train", "job.py", "--wait-s", "60", *options],
            cwd=folder,
            env={key: value for key, value in environment.items() if value},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def line(self, word: str) -> None:
        assert self.process.stdout is not None
        said = ""
        for line in self.process.stdout:
            said += line
            if word in line:
                return
        raise AssertionError(said)

    def end(self) -> tuple[int, str]:
        said, _ = self.process.communicate(timeout=90)
        return self.process.returncode, said


def family(pid: int) -> list[int]:
    """A process and all that descend from it."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(one for child in children for one in family(int(child)))]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.process
@pytest.mark.limit_s(300)
@pytest.mark.parametrize("other_rate", [False, True], ids=["as before", "by other options"])
def test_a_job_that_is_preempted_goes_on_when_it_is_started_again(tmp_path: Path, other_rate: bool) -> None:
    port, secret = free_port(), {"GRADSTREAM_TOKEN": TOKEN}
    first = [Process(tmp_path, rank, port, **secret, PAUSE="0.05") for rank in range(2)]
    first[0].line("step 2")
    for pid in [pid for one in first for pid in family(one.process.pid)]:  # Slurm signals nodes, too
        os.kill(pid, signal.SIGTERM)
    ended = [process.end() for process in first]
    assert [status for status, _ in ended] == [75, 75], ended

    changed = ("--lr", "0.05") if other_rate else ()
    again = [Process(tmp_path, rank, port, *changed, **secret, SLURM_RESTART_COUNT="1") for rank in range(2)]
    ended = [process.end() for process in again]
    assert [status for status, _ in ended] == [0, 0], ended
    assert "the run goes on from checkpoints/step-" in ended[0][1]
    said = [line for line in ended[0][1].splitlines() if "from here on" in line]
    assert said == ["from here on: optimizer.lr = 0.05, before 0.1"] * other_rate
    run = gs.Run.load(tmp_path / "runs" / "slurm-17")
    assert run.summary["samples_accounted"] == 4000
    assert run.path is not None and (run.path / FINAL_MODEL).is_file()
    steps = [json.loads(line) for line in (run.path / "events.jsonl").read_text().splitlines()]
    assert {event["node"] for event in steps if event["event"] == "step"} == {"worker-0", "worker-1"}


def test_a_job_that_has_finished_is_not_begun_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []

    class Alone:
        def __init__(self, *_: object) -> None:
            self.say = said.append
            self.say_where = print

        def token(self) -> str:
            return TOKEN

        def others(self) -> list[dict[str, str]]:
            return [{"host": host_id(), "address": "127.0.0.1"}]

    monkeypatch.setattr(torchrun, "StoreRendezvous", Alone)
    for name in ("run.json", FINAL_MODEL):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "job.py").write_text(JOB)
    job = dataclasses.replace(load_job(str(tmp_path / "job.py")), run_dir=tmp_path)
    place = Place(engine="Slurm", rank=0, size=2, host="localhost", port=1)
    with pytest.raises(gs.errors.ConfigError, match="has finished, so nothing is left to do"):
        torchrun.Together(place=place).lead(job, workers=None)
    assert "has finished" in said[0]["error"]


@pytest.mark.process
@pytest.mark.parametrize(
    ("options", "more", "message"),
    [
        (
            (),
            {"GRADSTREAM_TOKEN": "", "GRADSTREAM_TOKEN_FILE": ""},
            "GRADSTREAM_TOKEN_FILE=$PWD/gradstream.token srun",
        ),
        (("--insecure",), {"GRADSTREAM_TOKEN": TOKEN}, "--insecure in a process that Slurm has started"),
        ((), {"SLURM_PROCID": "2"}, "process 2 of 2, by Slurm; expected a number from 0 to 1"),
    ],
    ids=["no token", "plain text", "a wrong number"],
)
def test_what_cannot_be_is_refused_in_a_line(
    tmp_path: Path, options: tuple[str, ...], more: dict[str, Any], message: str
) -> None:
    status, said = Process(tmp_path, 0, free_port(), *options, **more).end()
    assert status == 2, said
    assert message in said
    assert not (tmp_path / "runs").exists()
