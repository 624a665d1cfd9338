"""A job whose processes an engine starts one after the other: training begins with two, and a third comes and goes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import gradstream as gs
from gradstream.testing import TokenAudit

SOURCE = str(Path(gs.__file__).resolve().parents[1])
SAMPLES, EPOCHS = 96, 3
JOB = f"""
import sys
import time
from pathlib import Path
import gradstream as gs
from gradstream.testing import Tokens, numbered

ROUNDS = sys.argv[1] != "downpour"  # a round is the mean over its samples

class Slow(Tokens):
    reduction = "sum" if ROUNDS else "mean"

    def gradient(self, *given, **options):
        if not Path(__file__).with_name("hurry").exists():
            time.sleep(0.2)  # so that the run goes on until all that is to happen has happened
        return super().gradient(*given, **options)

def job():
    return gs.Job(
        Slow(4, {SAMPLES}), numbered({SAMPLES}), strategy=sys.argv[1],
        optimizer=gs.optim.SGD(lr=6.0 if ROUNDS else 1.0), batch_size=2, epochs={EPOCHS}, chunk_elems=64,
    )
"""


class Process:
    """One process of three: `gradstream train job.py`."""

    def __init__(self, folder: Path, rank: int, port: int, strategy: str, *options: str) -> None:
        place = {"NODE": rank, "NODES": 3, "LEAST": 2, "HOST": "127.0.0.1", "PORT": port, "TOKEN": "ab" * 16}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gradstream", "train", "job.py", *options, "--", strategy],
            cwd=folder,
            env={
                **os.environ,
                "PYTHONPATH": SOURCE,
                **{f"GRADSTREAM_{key}": str(value) for key, value in place.items()},
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.said = ""

    def line(self, *words: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said += line
            if all(word in line for word in words):
                return
        raise AssertionError(self.said)

    def end(self) -> tuple[int, str]:
        said, _ = self.process.communicate(timeout=90)
        return self.process.returncode, self.said + said


@pytest.mark.parametrize("strategy", ["downpour", "synchronous", "allreduce"])
def test_others_come_and_go_while_the_first_train(tmp_path: Path, strategy: str) -> None:
    (tmp_path / "job.py").write_text(JOB)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    made: list[Process] = []

    def start(rank: int, *options: str) -> Process:
        made.append(Process(tmp_path, rank, port, strategy, *options))
        return made[-1]

    try:
        lead, second = start(0, "--run-dir", "run"), start(1)
        lead.line("step", "2/3 workers")
        third = start(2)
        lead.line("step", "3/3 workers")
        third.process.send_signal(signal.SIGTERM)
        status, said = third.end()
        assert status == 75, said
        lead.line("step", "2/3 workers")
        (tmp_path / "hurry").touch()
        for one in (lead, second):
            status, said = one.end()
            assert status == 0, said
    finally:
        for one in made:
            one.process.kill()
    run = gs.Run.load(tmp_path / "run")
    assert TokenAudit.of(run, SAMPLES, EPOCHS).exact, TokenAudit.of(run, SAMPLES, EPOCHS)
    assert run.summary["samples_accounted"] == EPOCHS * SAMPLES
    assert run.summary["workers_lost"] == []
    late: list[Any] = [one for one in run.events if one["event"] == "joined" and one["epoch"] > 1]
    assert [one["who"] for one in late] == ["worker-2"]


def test_a_run_that_takes_in_nobody_is_refused_before_it_begins(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    status, said = Process(tmp_path, 0, port, "downpour", "--record").end()
    assert status == 2, said
    assert "least=2: no worker can join this run after its beginning: a recording has one file" in said
