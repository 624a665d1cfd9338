"""What scripts do on a machine, where a shell stands for ssh."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradstream.run.ssh.fleet import Fleet
from gradstream.run.ssh.host import HostError
from gradstream.run.ssh.inspection import inspect

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
