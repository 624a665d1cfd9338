"""Processes that an engine adds to a run, and takes away, as pods of an indexed Job of Kubernetes that is resized."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import gradstream as gs
from gradstream.testing import TokenAudit
from slow_tokens import SAMPLES, events, job_text

EPOCHS, PODS = 12, 4


class Pods:
    """Starts and ends pods, each a process with the variables of the manifest."""

    def __init__(self, folder: Path) -> None:
        self.run = folder / "mine"
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self._folder = folder
        (folder / "job.py").write_text(job_text(PODS, EPOCHS))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._environment = {
            "GRADSTREAM_NODES": str(PODS),
            "GRADSTREAM_LEAST": "2",
            "GRADSTREAM_HOST": "127.0.0.1",
            "GRADSTREAM_PORT": str(port),
            "GRADSTREAM_RUN": "mine",
            "GRADSTREAM_TOKEN": secrets.token_hex(16),
        }

    def start(self, index: int) -> None:
        words = ["train", "job.py", "--servers-on", "launcher", "--run-dir", str(self.run), "--", "hurry"]
        with self.log(index).open("ab") as log:
            self.processes[index] = subprocess.Popen(
                [sys.executable, "-m", "gradstream", *words],
                cwd=self._folder,
                env={**os.environ, **self._environment, "JOB_COMPLETION_INDEX": str(index)},
                stdout=log,
                stderr=log,
            )

    def log(self, index: int) -> Path:
        return self._folder / f"log{index}"


@pytest.mark.limit_s(120)
def test_pods_that_are_added_join_and_those_that_are_taken_away_hand_in_what_they_have(
    tmp_path: Path,
) -> None:
    pods = Pods(tmp_path)
    for index in (0, 1):
        pods.start(index)
    steps: dict[str, int] = {}
    left = set()
    for event in events(pods.run / "events.jsonl", pods.processes[0]):
        if event["event"] == "step":
            steps[event["node"]] = steps.get(event["node"], 0) + 1
            if steps.get("worker-1", 0) >= 2 and len(pods.processes) == 2:
                for index in (2, 3):
                    pods.start(index)
            if min(steps.get("worker-2", 0), steps.get("worker-3", 0)) == 3:
                for index in (2, 3):
                    pods.processes[index].send_signal(signal.SIGTERM)
                steps["worker-2"] = steps["worker-3"] = 1000
        if event["event"] == "left":
            left.add(event["who"])
        if left == {"worker-2", "worker-3"}:
            (tmp_path / "hurry").touch()
    said = {index: pods.log(index).read_text()[-3000:] for index in pods.processes}
    assert {index: one.wait(timeout=20) for index, one in pods.processes.items()} == {
        0: 0,
        1: 0,
        2: 75,
        3: 75,
    }, said
    run = gs.Run.load(pods.run)
    kinds = [event["event"] for event in run.events]
    assert kinds.count("started") == 1
    assert run.summary["workers_lost"] == []  # they were asked to go
    assert run.summary["samples_accounted"] == EPOCHS * SAMPLES
    assert TokenAudit.of(run, SAMPLES, EPOCHS).exact
