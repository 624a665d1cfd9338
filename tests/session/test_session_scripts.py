"""The three scripts of examples/own_loop: five lines, the same alone, and really started."""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradstream as gs
from gradstream.job.files import load_job
from gradstream.preflight import CheckResult, dry_run
from gradstream.testing.sessions import loop_in_threads
from small_loops import SETUP

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "examples" / "own_loop"
SHORTER = {
    "language_model": {
        "STEPS, BATCH, LENGTH, WIDTH = 300, 16, 48, 64": "STEPS, BATCH, LENGTH, WIDTH = 12, 8, 16, 16"
    },
    "cnn": {
        "EPOCHS, BATCH = 4, 32": "EPOCHS, BATCH = 1, 50",
        "prepare(images), labels.long()": "prepare(images[:2000]), labels[:2000].long()",
    },
    "logistic": {"EPOCHS, BATCH, RATE = 20, 20, 0.5": "EPOCHS, BATCH, RATE = 4, 20, 0.5"},
}


def environment() -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    return {**kept, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}


def run(*words: str, ok: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, *words], env=environment(), capture_output=True, text=True, check=False, timeout=100
    )
    assert (done.returncode == 0) == ok, done.stderr[-3000:]
    return done


def shorter(name: str) -> str:
    """A script that is done in a second."""
    text = (SCRIPTS / f"{name}.py").read_text()
    for long, quick in SHORTER[name.removesuffix("_before")].items():
        assert text.count(long) == 1
        text = text.replace(long, quick)
    return text


@pytest.fixture
def short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """A copy of a script that is done in a second, in the working directory, as "loops/own/name.py"."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "loops" / "own"
    folder.mkdir(parents=True)
    (tmp_path / "LICENSE").write_text((ROOT / "LICENSE").read_text())

    def copy(name: str) -> str:
        path = folder / f"{name}.py"
        path.write_text(shorter(name))
        return str(path)

    return copy


@pytest.mark.parametrize("name", SHORTER)
def test_a_script_differs_by_five_lines(name: str) -> None:
    before, after = ((SCRIPTS / f"{name}{end}.py").read_text() for end in ("_before", ""))
    check_five_lines(before, after)


@pytest.mark.parametrize(
    ("planted", "why"), [("session.close()\nsession.skip()", "6 <= 5"), ("print()", "4 == 5")]
)
def test_the_counter_notices_a_sixth_line_and_one_about_something_else(planted: str, why: str) -> None:
    before, after = ((SCRIPTS / f"cnn{end}.py").read_text() for end in ("_before", ""))
    with pytest.raises(AssertionError, match=why):
        check_five_lines(before, after.replace("session.close()", planted))


def check_five_lines(before: str, after: str) -> None:
    """A script has at most five lines more than before, all of them about its session."""
    differences = difflib.ndiff(before.splitlines(), after.splitlines())
    lines = [line for line in differences if line[2:].strip()]
    added = [line for line in lines if line.startswith("+ ")]
    removed = [line for line in lines if line.startswith("- ")]
    assert len(added) <= 5, "\n".join(added)
    assert len(removed) <= 2, "\n".join(removed)  # those that two of the five stand for
    assert sum("gradstream" in line or "session" in line for line in added) == len(added)


@pytest.mark.parametrize("name", SHORTER)
def test_alone_a_script_does_what_it_did_before(
    short: Callable[[str], str], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    spoken = []
    for script in (short(name), short(f"{name}_before")):
        if name == "cnn":  # forks, which this process should not
            spoken.append(run(script).stdout)
        else:
            runpy.run_path(script, run_name="__main__")
            spoken.append(capsys.readouterr().out)
    assert spoken[0] == spoken[1] != ""


@pytest.mark.parametrize("strategy", ["synchronous", gs.Downpour(overlap=False), gs.DiLoCo(every=4)])
def test_numpy_accuracy_is_that_of_one_process(strategy: Any) -> None:
    """The logistic regression's loop, as of the script, on two workers."""
    body = compile(shorter("logistic").replace("gradstream.join()", "joined"), "logistic.py", "exec")
    spoken: dict[Any, str] = {}

    def loop(session: gs.Session) -> Any:
        names: dict[str, Any] = {"joined": session, "print": lambda text: spoken.update({session.rank: text})}
        exec(body, names)
        return names["weights"]

    both = loop_in_threads(loop, strategy=strategy)
    np.testing.assert_array_equal(*both)
    accuracy = float(spoken[0].split()[-1])
    exec(body, {"joined": gs.Session(), "print": lambda text: spoken.update(alone=text)})
    alone = float(spoken["alone"].split()[-1])
    assert spoken[0] == spoken[1]
    assert accuracy == pytest.approx(alone, abs=0.02)  # 400 samples: one standard deviation


# ---- really started ---------------------------------------------------------------------


@pytest.mark.limit_s(200)
def test_gradstream_train_runs_a_script_with_loader_processes(short: Callable[[str], str]) -> None:
    done = run("-m", "gradstream", "train", short("cnn"), "--json")
    found = re.search(r"test accuracy (\d\.\d+)\n", done.stderr)  # what worker 0 prints
    assert found, done.stderr
    assert float(found[1]) > 0.3  # 0.1 by chance
    summary = json.loads(done.stdout)["summary"]
    assert summary["samples_accounted"] == 2000
    assert (summary["optimizer"], summary["strategy"], summary["workers"]) == ("adam", "allreduce", 2)
    (run_dir,) = Path("runs").iterdir()
    assert set(gs.Run.load(run_dir).parameters) >= {"0.1.weight", "3.bias"}


@pytest.mark.limit_s(200)
def test_torchrun_runs_a_script(short: Callable[[str], str]) -> None:
    script = short("language_model")
    text = Path(script).read_text()
    Path(script).write_text(text.replace("gradstream.join()", 'gradstream.join("downpour", servers=2)'))
    done = run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script)
    assert done.stdout.count("held-out loss") == 2
    assert len(set(done.stdout.splitlines())) == 1  # the same model in both
    (run_dir,) = Path("runs").iterdir()
    made = gs.Run.load(run_dir)
    assert made.summary["samples_accounted"] == 12 * 8
    assert "embed.weight" in made.parameters
    np.testing.assert_array_equal(made.parameters["head.weight"], made.parameters["embed.weight"])  # tied


@pytest.mark.limit_s(200)
def test_an_exception_in_a_script_is_the_last_thing_on_the_screen(tmp_path: Path) -> None:
    path = tmp_path / "faulty.py"
    path.write_text(
        SETUP
        + """
for number in range(1000):
    if session.rank == 1 and number == 3:
        raise LookupError("a fault of mine")
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""
    )
    done = run("-m", "gradstream", "train", str(path), "--run-dir", str(tmp_path / "run"), ok=False)
    assert done.stderr.splitlines()[-1] == "LookupError: a fault of mine"
    assert "worker-1: the script raised LookupError" in done.stderr
    assert f'File "{path}", line' in done.stderr


def test_a_script_that_ends_without_closing_is_closed_before_its_threads_are_waited_for() -> None:
    code = (
        "import threading\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "from gradstream.session.joining import at_the_end\n"
        "closed = threading.Event()\n"
        "ThreadPoolExecutor().submit(closed.wait)\n"  # which Python would wait for, without end
        "at_the_end(lambda: print('closed') or closed.set(), lambda error: print('failed:', error))\n"
        "{}\n"
    )
    assert run("-c", code.format("")).stdout == "closed\n"
    done = run("-c", code.format("raise LookupError('a fault of mine')"), ok=False)
    assert done.stdout.splitlines() == ["failed: a fault of mine", "closed"]
    assert done.stderr.splitlines()[-1] == "LookupError: a fault of mine"


def test_what_a_script_with_its_own_loop_cannot_be_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "own.py"
    path.write_text("import gradstream\ngradstream.join(workers=3)\nraise SystemExit('never reached')\n")
    job = load_job(str(path))
    assert (job.workers, job.spec) == (3, str(path))
    with pytest.raises(gs.errors.ConfigError, match="epochs=3: this script has a training loop of its own"):
        gs.train(job, epochs=3)
    with pytest.raises(gs.errors.ConfigError, match="optimizer='adam': this script"):
        gs.train(job, optimizer="adam")
    with pytest.raises(gs.errors.ConfigError, match="batch_size=32: this script"):
        gs.train(job, batch_size=32)  # the default's value
    with pytest.raises(gs.errors.ConfigError, match="batch_size=32: this script"):
        gs.train(dataclasses.replace(job, origins={"batch_size": "--batch-size"}))
    with pytest.raises(gs.errors.ConfigError, match="cannot be simulated"):
        gs.simulate(job)
    with pytest.raises(gs.errors.ConfigError, match="runs as processes; leave processes out"):
        gs.train(job, processes=False)


LATE = """
import torch
import gradstream

session = gradstream.join("downpour")
model = torch.nn.Linear(3, 1)
model, optimizer = session.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
model(torch.ones(2, 3)).square().mean().backward()
with torch.no_grad():
    model.bias -= model.bias.grad  # in the place of a step
session.close()
"""


def test_an_error_of_close_is_the_runs(tmp_path: Path) -> None:
    path = tmp_path / "late.py"
    path.write_text(LATE)
    done = run(
        "-m", "gradstream", "train", str(path), "--workers", "2", "--run-dir", str(tmp_path / "r"), ok=False
    )
    assert "'bias' was written to in place" in done.stderr


TRIED = (
    SETUP
    + """
for step in range(100_000):
    optimizer.zero_grad()
    model(torch.ones(8, 4)).square().mean().backward()
    {}
    optimizer.step()
"""
)


def tried(folder: Path, line: str) -> list[CheckResult]:
    path = folder / "tried.py"
    path.write_text(TRIED.format(line))
    return dry_run(load_job(str(path)))


def test_a_dry_run_of_a_loop_stops_it_after_its_first_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    findings = tried(tmp_path, "pass")
    assert all(one.ok for one in findings), findings
    details = {one.name: one.detail for one in findings}
    assert details["configuration"] == "allreduce, the script's optimizer, 2 workers, 0 servers"
    assert details["model"] == "5 parameters, exchanged in vectors of 196 B"
    assert re.search(r"\d+ minibatches, \d+ pushes, \d+ fetches", details["processes"])
    assert re.search(r"for the final parameters \+ 3 checkpoints of [\d.]+ kB$", details["disk"])
    assert details["checkpoint"].endswith("verified")
    assert details["pace"].endswith("after each worker's first")
    assert {path.name for path in tmp_path.iterdir()} <= {"tried.py", "__pycache__"}


def test_a_dry_run_of_a_loop_with_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    *_, last = tried(tmp_path, "raise LookupError('a fault of mine')")
    assert (last.name, last.ok) == ("processes", False)
    assert "a fault of mine" in last.detail
    assert "raise LookupError" in last.trace
