"""A worker in JavaScript takes part in a run like any other."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from machine_command import Command, Here

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/javascript"
JOB = (EXAMPLE / "job.py").read_text()
NPM_S = 120.0


@pytest.fixture(scope="module")
def worker() -> str:
    """The worker's file, once npm has brought its packages."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None or shutil.which("openssl") is None:
        pytest.skip("needs node, npm and openssl")
    installed = EXAMPLE / "node_modules/.package-lock.json"
    if not installed.exists() or installed.stat().st_mtime < (EXAMPLE / "package-lock.json").stat().st_mtime:
        argv = [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--fetch-retries=0"]
        try:
            subprocess.run(argv, cwd=EXAMPLE, check=True, capture_output=True, text=True, timeout=NPM_S)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            pytest.skip(f"npm has not brought the packages of the worker: {str(error.stderr)[-200:]}")
        installed.touch()
    return str(EXAMPLE / "worker.mjs")


class Pair:
    """A launcher with a worker in Python, and the line that a worker in JavaScript takes."""

    def __init__(self, folder: Path, job: str, *options: str) -> None:
        here, self.there = folder / "here", folder / "there"
        address = ["--listen", "127.0.0.1", "--wait", "2", "--servers-on", "launcher"]
        self.launcher = Command(Here(), here, "train", "job.py", *address, *options, job=job)
        self.line = self.launcher.line("gradstream join (.*)")[1].split()
        self.there.mkdir()
        for path in (here / "job.py", *here.glob("*.npy")):
            shutil.copy(path, self.there)

    def join(self, worker: str, line: Sequence[str] | None = None) -> subprocess.Popen[str]:
        argv = ["node", worker, *(line or self.line)]
        return subprocess.Popen(argv, cwd=self.there, stderr=subprocess.PIPE, text=True)

    def events(self) -> list[dict[str, object]]:
        (path,) = self.there.parent.glob("here/runs/*/events.jsonl")
        return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.process
def test_it_is_counted_like_any_other(worker: str, tmp_path: Path) -> None:
    job = JOB.replace("epochs=3,", "epochs=1, chunk_elems=64, checkpoint_every=20,")
    pair = Pair(tmp_path, job, "--servers", "2")
    stranger = pair.join(worker, [*pair.line[:3], "another token, as long", *pair.line[4:]])
    _, said = stranger.communicate(timeout=60)
    assert stranger.returncode == 1
    assert said == "worker.mjs: the token is not this run's: copy the line again\n"
    (pair.there / "targets.npy").rename(pair.there / "kept")
    np.save(pair.there / "targets.npy", np.zeros(4000, np.uint8))
    other = pair.join(worker)
    assert "data checksum differs" in other.communicate(timeout=60)[1]
    (pair.there / "kept").rename(pair.there / "targets.npy")

    javascript = pair.join(worker)
    _, said = javascript.communicate(timeout=60)
    status, shown = pair.launcher.end()
    assert (status, javascript.returncode) == (0, 0), shown + said
    events = pair.events()
    samples, receipts = Counter[object](), Counter[object]()
    for event in events:
        if event["event"] == "step":
            samples[event["node"]] += event["samples"]  # type: ignore[operator]
            receipts[event["node"]] += 1
    assert samples["worker-0"] + samples["worker-1"] == 4000
    assert samples["worker-1"] == 20 * receipts["worker-1"] > 0
    assert not [event for event in events if event["event"] in ("refused_events", "damaged", "failed")]
    assert "in the model   4,000 samples" in shown
    assert [event for event in events if event["event"] == "checkpoint"]
    (traffic,) = (one for one in events if one["event"] == "exchange" and one["node"] == "worker-1")
    assert (traffic["pushes"], traffic["retries"]) == (receipts["worker-1"], 0)
    (found,) = (event["accuracy"] for event in events if event["event"] == "evaluated" and event["final"])
    status, shown = Command(
        Here(), tmp_path / "python", "train", "job.py", job=JOB.replace("epochs=3", "epochs=1")
    ).end()
    assert status == 0, shown
    two = re.search(r"test accuracy +([\d.]+)%", shown)
    assert two is not None
    assert found == pytest.approx(float(two[1]) / 100, abs=0.015)


@pytest.mark.process
@pytest.mark.parametrize(
    ("sent", "status", "word"),
    [(signal.SIGTERM, 75, "was asked to go"), (signal.SIGKILL, -signal.SIGKILL, "lost worker-1")],
    ids=["asked-to-go", "killed"],
)
def test_the_run_goes_on_without_it(
    worker: str, tmp_path: Path, sent: signal.Signals, status: int, word: str
) -> None:
    pair = Pair(tmp_path, JOB)
    javascript = pair.join(worker)
    pair.launcher.line("^step [1-9]")
    javascript.send_signal(sent)
    _, said = javascript.communicate(timeout=60)
    ended, shown = pair.launcher.end()
    assert (ended, javascript.returncode) == (0, status), shown + said
    assert word in shown
    assert "in the model   12,000 samples" in shown
