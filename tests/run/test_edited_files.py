"""Files of a job that are edited while its run goes on, between its parts, or differ between machines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import gradstream as gs
from gradstream.run.remote.members import difference

JOB = """
import time
import numpy as np
import gradstream as gs
import scaled

def gradients(parameters, inputs, targets):
    import scaled_late
    time.sleep(0.005)
    error = inputs @ parameters["w"] - targets * scaled.BY * scaled_late.BY
    return {"w": (2 / len(inputs) * inputs.T @ error).astype("f4")}

def outputs(parameters, inputs):
    import scaled_last
    return inputs @ parameters["w"] * scaled_last.BY

def job():
    inputs = np.random.default_rng(0).normal(size=(400, 3)).astype("f4")
    targets = inputs @ np.array([1, 2, 3], "f4")
    return gs.Job(
        gs.from_functions(lambda seed: {"w": np.zeros(3, "f4")}, outputs, gradients),
        gs.from_arrays(inputs, targets, inputs, targets),
        strategy="downpour", optimizer=gs.optim.SGD(lr=0.05), workers=2, batch_size=10, steps=400,
    )
"""
HELPERS = ("scaled", "scaled_late", "scaled_last")


def write(folder: Path, **by: float) -> Path:
    (folder / "job.py").write_text(JOB)
    for name in HELPERS:
        (folder / f"{name}.py").write_text(f"BY = {by.get(name, 1.0)}\n")
    return folder / "job.py"


def command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(gs.__file__).parents[1])}
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


TRAIN = """
import json, re, signal, sys, os
from pathlib import Path
import gradstream as gs
from gradstream.job.files import load_job
from gradstream.run.failures import evaluate

struck = []

def on_event(event):
    if event["event"] == "step" and event["step"] == 20 and not struck:
        struck.append(event)
        Path("scaled.py").write_text("BY = 5.0")
        Path("scaled_late.py").unlink()
        Path("scaled_last.py").write_text("BY = 5.0")
        Path("job.py").write_text("raise SystemExit('edited')")
        for name in ("worker-1", "coordinator"):
            log = Path(f"run/logs/{name}.log").read_text()
            os.kill(int(re.findall(rf"{name}: pid (\\d+)", log)[-1]), signal.SIGKILL)

run = gs.train(load_job("job.py"), run_dir=Path("run"), on_event=on_event)
found = evaluate(run)
restarts = Path("run/logs/worker-1.log").read_text().count(": pid ")
again = Path("run/logs/coordinator.log").read_text().count(": pid ")
print(json.dumps([run.parameters["w"].tolist(), found.loss, restarts, again]))
"""


def test_a_run_ends_with_the_code_that_it_has_begun_with(tmp_path: Path) -> None:
    """A worker and the coordinator start anew after the edits, and modules are imported for the first time."""
    write(tmp_path)
    (tmp_path / "sweep.py").write_text(TRAIN)
    ended = command(tmp_path, "sweep.py")
    assert ended.returncode == 0, ended.stderr
    weights, loss, restarts, again = json.loads(ended.stdout.splitlines()[-1])
    assert restarts >= 2  # it may die once more with the coordinator
    assert again == 2
    np.testing.assert_allclose(weights, [1, 2, 3], atol=1e-3)
    assert loss < 1e-5


def stopped(folder: Path) -> Path:
    """A run that was stopped after some steps."""
    write(folder)

    code = (
        "import gradstream as gs, sys; from gradstream.job.files import load_job; from pathlib import Path\n"
        "import os, signal\n"
        "def stop(event):\n    if (event['event'], event.get('step'), event['node']) == ('step', 10, 'worker-0'):\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "gs.train(load_job('job.py'), run_dir=Path('run'), on_event=stop)\n"
    )
    assert "the run was stopped" in command(folder, "-c", code).stderr
    return folder / "run"


@pytest.mark.parametrize("edited", ["scaled_late.py", "job.py"])
def test_a_resumed_run_refuses_code_that_was_edited(tmp_path: Path, edited: str) -> None:
    run = stopped(tmp_path)
    before = (tmp_path / edited).read_text()
    (tmp_path / edited).write_text(before + "\n# edited\n")
    refused = command(tmp_path, "-m", "gradstream", "resume", "run")
    assert refused.returncode == 2
    assert f"edited since {run} has begun: {tmp_path / edited};" in refused.stderr
    assert "--allow-changed" in refused.stderr
    if edited == "job.py":  # and goes on where it was put back, or that is allowed
        allowed = command(tmp_path, "-m", "gradstream", "resume", "run", "--allow-changed")
        assert allowed.returncode == 0, allowed.stderr
        assert f"{tmp_path / edited}; the run goes on with" in allowed.stderr
    else:
        (tmp_path / edited).write_text(before)
        assert command(tmp_path, "-m", "gradstream", "resume", "run").returncode == 0


def test_machines_compare_what_the_job_imports(tmp_path: Path) -> None:
    facts = []
    for machine, by in (("a", 1.0), ("b", 2.0)):
        (tmp_path / machine).mkdir()
        write(tmp_path / machine, scaled_late=by)
        code = (
            "import json\nfrom gradstream.job.files import load_job\n"
            "from gradstream.run.remote.members import facts_of\n"
            "print(json.dumps(facts_of(load_job('job.py'))))"
        )
        facts.append(json.loads(command(tmp_path / machine, "-c", code).stdout))
    found = difference(facts[0], facts[1], "b")
    assert found is not None
    assert found.message.startswith("module scaled_late differs: b has scaled_late.py sha256:")
    assert difference(facts[0], facts[0], "b") is None
