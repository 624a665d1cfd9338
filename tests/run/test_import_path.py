"""What processes of a run import: the user's modules from where they are meant, none from where a command is typed."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from gradstream.errors import ConfigError
from gradstream.job.files import load_job
from gradstream.job.registry import find_strategy

SHADOWS = ("logging", "html", "types", "random", "secrets", "sqlite3", "selectors", "email")
"""Modules of the standard library that users' folders have files of, by accident or not."""


SCRIPT = """
import sys
import numpy as np
import gradstream as gs
from helpers_of_mine import SCALE

def gradients(p, x, y):
    error = x @ p["w"] - y
    return float(error @ error), {"w": SCALE * error @ x}

model = gs.from_functions(lambda seed: {"w": np.zeros(3)}, lambda p, x: x @ p["w"], gradients)
data = gs.from_arrays(np.ones((16, 3)), np.ones(16))
run = gs.train(model, data, strategy="synchronous", workers=2, batch_size=4, epochs=1, run_dir=sys.argv[1])
print("trained", run.summary["samples_accounted"])
"""


def shadowed(folder: Path) -> Path:
    """A folder with files of these names, which leave a mark when they are imported."""
    folder.mkdir()
    for name in SHADOWS:
        (folder / f"{name}.py").write_text(f"open({str(folder / name)!r}, 'w').close()\n")
    return folder


def marks(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name in SHADOWS)


def environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}


@pytest.mark.cold
def test_nothing_is_imported_from_the_folder_in_which_a_command_is_typed(tmp_path: Path) -> None:
    elsewhere, source = shadowed(tmp_path / "elsewhere"), tmp_path / "mine.py"
    (tmp_path / "helpers_of_mine.py").write_text("SCALE = 2.0\n")
    source.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-P", str(source), str(tmp_path / "run")],
        cwd=elsewhere,
        env={**environment(), "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "trained 16" in done.stdout
    assert not marks(elsewhere)


@pytest.mark.cold
def test_a_script_finds_the_modules_beside_it_from_any_folder(tmp_path: Path) -> None:
    elsewhere, folder = shadowed(tmp_path / "elsewhere"), tmp_path / "project"
    folder.mkdir()
    (folder / "helpers_of_mine.py").write_text("SCALE = 2.0\n")
    (folder / "mine.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(folder / "mine.py"), str(tmp_path / "run")],
        cwd=elsewhere,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not marks(elsewhere)


@pytest.mark.cold
@pytest.mark.parametrize("detach", [False, True])
def test_a_module_of_a_package_that_runs_as_main_finds_its_package(tmp_path: Path, detach: bool) -> None:
    package = tmp_path / "project" / "mypackage"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "helpers.py").write_text("SCALE = 2.0\n")
    source = SCRIPT.replace("from helpers_of_mine", "from mypackage.helpers")
    if detach:
        source = source.replace("run = gs.train(", "gs.train(").replace("run_dir=", "detach=True, run_dir=")
        source = (
            source[: source.index("print(")]
            + "print(gs.runs.attach(sys.argv[1]).summary['samples_accounted'])\n"
        )
    (package / "train.py").write_text(source)
    done = subprocess.run(
        [sys.executable, "-m", "mypackage.train", str(tmp_path / "run")],
        cwd=tmp_path / "project",
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and done.stdout.split()[-1] == "16", done.stderr


def test_a_module_that_is_not_found_is_told_where_it_lies_and_where_was_looked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "lost_package" / "jobs"
    folder.mkdir(parents=True)
    (folder / "one.py").write_text("import not_installed_here\n")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    with pytest.raises(ConfigError) as caught:
        load_job("lost_package.jobs.one:job")
    assert f"PYTHONPATH={tmp_path} before the command" in str(caught.value)
    assert f"name the file: {folder / 'one.py'}:job" in str(caught.value)
    with pytest.raises(
        ConfigError, match=rf"PYTHONPATH=/nowhere.*not in {folder} either: `cd` to the folder"
    ):
        load_job("lost_package.jobs.two:job")
    with pytest.raises(
        ConfigError, match=rf"strategy 'lost_package.jobs.one:Mine': .*PYTHONPATH={tmp_path} before"
    ):
        find_strategy("lost_package.jobs.one:Mine", {})
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=r"No module named 'not_installed_here'$"):
        load_job("lost_package.jobs.one:job")  # it was found, and lacks another one


@pytest.mark.cold
def test_a_script_shows_its_progress_at_a_terminal_and_writes_none_into_a_file(tmp_path: Path) -> None:
    source = tmp_path / "mine.py"
    (tmp_path / "helpers_of_mine.py").write_text("SCALE = 2.0\n")
    source.write_text(SCRIPT)
    ours, theirs = pty.openpty()
    terminal = bytearray()

    def read() -> None:  # as it comes: a terminal that nobody reads takes 4 KB
        with suppress(OSError):  # nobody writes any more
            while data := os.read(ours, 4096):
                terminal.extend(data)

    reader = threading.Thread(target=read)
    reader.start()
    errors = []
    for name, stderr in (("terminal", theirs), ("file", subprocess.PIPE)):
        done = subprocess.run(
            [sys.executable, str(source), str(tmp_path / name)],
            stdout=subprocess.PIPE,
            stderr=stderr,
            env={**environment(), "TERM": "xterm"},
            text=True,
            check=True,
        )
        assert "trained 16" in done.stdout
        errors.append(done.stderr)
    os.close(theirs)
    reader.join()
    os.close(ours)
    assert "step 2/2" in terminal.decode()
    assert "step " not in errors[1]
