"""What scripts do on a machine, where a shell stands for ssh."""

from __future__ import annotations

import signal
import subprocess
import threading
from pathlib import Path

import pytest

from gradstream.ext.ssh.fleet import Fleet
from gradstream.ext.ssh.host import HostError
from gradstream.ext.ssh.places import inspect

SSH = """#!/bin/sh
for last; do :; done
cd "$(dirname "$0")/home" && HOME=$PWD exec sh -c "$last"
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "ssh").write_text(SSH)
    (tmp_path / "ssh").chmod(0o755)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "precious").write_text("kept")
    return tmp_path / "home"


def fleet(home: Path, folder: str = "~/some where") -> Fleet:
    ssh = [str(home.parent / "ssh")]
    return Fleet(
        name="mine",
        hosts=["a", "b"],
        ssh=ssh,
        python="python3",
        folder=folder,
        port=1,
        job="j.py",
        arguments=[],
    )


def test_cleaning_removes_the_folder_of_the_run_and_nothing_where_there_is_none(home: Path) -> None:
    machines = fleet(home)
    for name in ("a", "b"):
        (home / "some where" / "mine" / name).mkdir(parents=True)
        (home / "some where" / "mine" / name / "log").write_text("")
    assert machines.clean([machines.machines[0]]) == []
    assert [path.name for path in (home / "some where" / "mine").iterdir()] == ["b"]
    for _ in range(2):
        assert machines.clean() == []
        assert sorted(path.name for path in home.iterdir()) == ["precious", "some where"]
        assert list((home / "some where").iterdir()) == []


def running(home: Path, *words: str) -> subprocess.Popen[bytes]:
    """A program in the place of machine a's process of the run."""
    process = subprocess.Popen(words, start_new_session=True)
    folder = home / "some where" / "mine" / "a"
    folder.mkdir(parents=True)
    (folder / "group").write_text(f"{process.pid}\n")
    return process


def test_what_does_not_end_by_itself_is_killed(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradstream.ext.ssh.fleet.END_S", 0.2)
    process = running(home, "sleep", "1000")
    machines = fleet(home)
    assert machines.clean([machines.machines[0]]) == []
    assert process.wait(timeout=10) == -signal.SIGKILL


def test_a_machine_that_is_to_leave_gets_sigterm_and_some_time(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradstream.ext.ssh.fleet.LEAVE_S", 0.5)
    deaf = running(home, "sh", "-c", "trap '' TERM; while :; do sleep 0.05; done")
    machines = fleet(home)
    assert not machines.leave(machines.machines[0])
    deaf.kill()
    deaf.wait()
    (home / "some where" / "mine" / "a" / "group").unlink()
    (home / "some where" / "mine" / "a").rmdir()
    monkeypatch.setattr("gradstream.ext.ssh.fleet.LEAVE_S", 10.0)
    process = running(home, "sleep", "1000")
    killed = threading.Thread(target=process.wait)  # else it stays, as a zombie
    killed.start()
    assert machines.leave(machines.machines[0])
    killed.join()
    assert process.returncode == -signal.SIGTERM


def test_another_run_of_that_name_is_left_alone(home: Path) -> None:
    theirs = home / "some where" / "mine" / "a"
    theirs.mkdir(parents=True)
    (theirs / "log").write_text("theirs")
    with pytest.raises(HostError, match="a: ~/some where/mine/a is there, from another run of that name"):
        inspect(fleet(home))
    assert (theirs / "log").read_text() == "theirs"
    assert [path.name for path in theirs.parent.iterdir()] == ["a"]


def test_a_script_runs_in_its_folder_or_not_at_all(home: Path) -> None:
    machines = fleet(home)
    (host, _) = machines.machines
    done = host.ask(machines.inside(host, "false; touch made"))
    assert done.returncode and sorted(path.name for path in home.iterdir()) == ["precious"]
