"""`gradstream train --dry-run`: a little of a run, and what it would need."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner, Result

import gradstream as gs
from gradstream.cli import main
from gradstream.machine.resources import free_memory_bytes
from gradstream.preflight import base, estimate, samples_per_s
from gradstream.preflight import base as job_dry_run
from gradstream.testing.runs import Sized, numbered

JOB = """
import numpy as np
import gradstream as gs

inputs = np.random.default_rng(0).standard_normal((200, 3)).astype("float32")
data = gs.from_arrays(inputs, inputs[:, 0], inputs[:50], inputs[:50, 0])

def gradients(p, x, y):
    return float(np.mean((x @ p["w"] - y) ** 2)), {"w": 2 / len(x) * x.T @ (x @ p["w"] - y)}

def broken(p, x, y):
    raise LookupError("a fault of mine")

class Loud:
    def on_start(self, info):
        open("was told", "w").close()

def job(gradients=gradients, **options):
    model = gs.from_functions(lambda seed: {"w": np.zeros(3)}, lambda p, x: x @ p["w"], gradients)
    options = {"epochs": 1000, "callbacks": [Loud()]} | options
    return gs.Job(model, data, strategy="downpour", optimizer=gs.optim.Adam(lr=0.2), **options)

def bad():
    return job(broken)

def endless():
    return job(epochs=None)
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with the job file, and one for temporary files."""
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(JOB)
    Path("temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return tmp_path


def dry_run(job: str, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["train", job, "--dry-run", *arguments])


def test_a_job_that_will_do(place: Path) -> None:
    result = dry_run("mine.py", "--json")
    assert result.exit_code == 0, result.output
    findings = {one["name"]: one["detail"] for one in json.loads(result.stdout)}
    assert findings["configuration"] == "downpour, Adam, 2 workers, 1 server"
    assert findings["model"] == "3 parameters in 1 tensor, 12 B, exchanged in chunks of 262,144"
    assert findings["data"] == "arrays: 200 samples, 50 held out"
    assert "exp_avg 12 B + exp_avg_sq 12 B" in findings["memory"]
    assert "120 B = 12 B for the final parameters + 3 checkpoints of 36 B" in findings["disk"]
    assert re.search(r"\d+ minibatches, \d+ pushes, \d+ fetches, loss ", findings["processes"])
    assert re.fullmatch(r"[4-6] files, .* verified", findings["checkpoint"])
    assert findings["evaluation"].endswith("of 50 held-out samples")
    assert "samples/s" in findings["time per epoch"]
    assert {path.name for path in place.iterdir()} <= {"mine.py", "temporary", "__pycache__"}
    assert not list((place / "temporary").iterdir())


@pytest.mark.parametrize(("strategy", "size"), [("diloco", "24 B"), ("elastic-averaging", "12 B")])
def test_checkpoints_have_the_state_of_the_shards_rule(strategy: str, size: str) -> None:
    """Where workers carry out the job's Adam, its two vectors are in no checkpoint."""
    result = dry_run("mine.py", "--json", "--strategy", strategy)
    assert result.exit_code == 0, result.output
    findings = {one["name"]: one["detail"] for one in json.loads(result.stdout)}
    assert findings["disk"].endswith(f"for the final parameters + 3 checkpoints of {size}")


def test_a_fault_of_the_users_is_named_and_their_traceback_comes_last_but_one() -> None:
    result = dry_run("mine.py:bad")
    assert result.exit_code == 3
    lines = result.stdout.splitlines()
    assert [line.split()[1] for line in lines] == ["ok"] * 5 + ["FAILED"]
    assert all(re.search(r"  \d+\.\d s  ", line) for line in lines)
    assert "a fault of mine" in lines[-1]
    assert 'raise LookupError("a fault of mine")' in result.stderr
    assert result.stderr.endswith("error: the dry run failed at: processes\n")


def test_a_job_that_is_over_at_once() -> None:
    result = dry_run("mine.py", "--steps", "1", "--json")
    assert result.exit_code == 0, result.output
    findings = {one["name"]: one["detail"] for one in json.loads(result.stdout)}
    assert "over before it could be stopped" in findings["checkpoint"]
    time = findings["time per epoch"]  # one worker may have taken both minibatches
    assert time == "too little data to say" or "over the 1 minibatch after" in time


def test_a_wrong_configuration() -> None:
    result = dry_run("mine.py:endless")
    assert result.exit_code == 3
    assert re.search(r"FAILED +\d+\.\d s  expected exactly one of epochs and steps", result.stdout)
    assert dry_run("nowhere.py").exit_code == 2


@pytest.mark.parametrize(
    ("where", "what", "free"),
    [(job_dry_run, "free_memory_bytes", 600_000_000), (base, "free_disk_bytes", 11)],
)
def test_too_little_memory_or_disk_starts_no_node(
    where: ModuleType, what: str, free: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where, what, lambda *_: free)
    monkeypatch.setattr(base, "launch", None)
    result = dry_run("mine.py")
    assert result.exit_code == 3
    assert "free, too little" in result.stdout or "too little: 11 B free" in result.stdout


def test_memory_is_what_nodes_ask_for() -> None:
    elems, servers = 1_000_000, 2
    model, adam = Sized([elems]), gs.optim.Adam(lr=0.1)
    job = gs.Job(model, numbered(60), strategy="downpour", optimizer=adam, servers=servers, epochs=1)
    need = estimate(job, model)
    vectors = ("parameters", "gradient", "spare", "accumulated")
    assert need["worker-1"] == dict.fromkeys(need["worker-1"], 4 * elems)
    assert set(need["worker-1"]) == set(vectors)
    for name in ("parameters", "exp_avg", "exp_avg_sq"):
        assert sum(need[f"shard-{rank}"][name] for rank in range(servers)) == 4 * elems


def test_the_pace_is_that_after_the_first_minibatch() -> None:
    def step(rank: int, time_s: float, samples: int) -> dict[str, Any]:
        return {"event": "step", "rank": rank, "time_s": time_s, "samples": samples}

    # rank 0: 20 samples in 2 s; rank 1: 30 in 1 s.
    steps = [step(0, 9, 10), step(1, 5, 30), step(0, 10, 10), step(1, 6, 30), step(0, 11, 10)]
    assert samples_per_s(steps) == 10 + 30
    assert samples_per_s(steps[:2]) is None


def test_memory_that_is_free(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 100 kB\nMemAvailable: 50 kB\nHugePages_Total: 0\n")
    inner = tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)
    assert free_memory_bytes(meminfo, inner) == 51_200
    (inner / "memory.max").write_text("max\n")
    (inner / "memory.current").write_text("10\n")
    assert free_memory_bytes(meminfo, inner) == 51_200
    outer = inner.parent
    (outer / "memory.max").write_text("40000\n")
    (outer / "memory.current").write_text("30000\n")
    assert free_memory_bytes(meminfo, inner) == 10_000
    (outer / "memory.stat").write_text("anon 25000\ninactive_file 5000\n")
    assert free_memory_bytes(meminfo, inner) == 15_000
    assert free_memory_bytes(tmp_path / "none", inner) == 15_000
    assert free_memory_bytes(tmp_path / "none", tmp_path) is None
