"""Data of a run comes to its machines by way of the first one, where a shell stands for ssh."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import gradstream
from gradstream.ext.ssh.archives import FileList
from gradstream.ext.ssh.data_delivery import DataDelivery
from gradstream.ext.ssh.fleet import Fleet
from gradstream.ext.ssh.host import HostError

SSH = """#!/bin/sh
for last; do :; done
cd "$(dirname "$0")" && HOME=$PWD exec sh -c "$last"
"""
HERE, ALSO_HERE, NOWHERE = "127.0.0.1", "localhost", "nowhere.invalid"


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    source = str(Path(gradstream.__file__).resolve().parents[1])
    monkeypatch.setenv("PYTHONPATH", f"{source}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    (tmp_path / "ssh").write_text(SSH)
    (tmp_path / "ssh").chmod(0o755)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "numbers").write_bytes(os.urandom(1 << 20))
    return tmp_path / "mine"


def fleet(data: Path, *hosts: str, there: str = "~/other") -> Fleet:
    made = Fleet(
        name="run",
        hosts=hosts,
        ssh=[str(data.parent / "ssh")],
        python=sys.executable,
        folder="~/runs",
        port=0,
        job="j.py",
        arguments=[],
        data=there,
    )
    for host in made.machines:
        copy(data, host.name).parent.mkdir(parents=True)
    made.send({})
    return made


def copy(data: Path, host: str) -> Path:
    return data.parent / "runs" / "run" / host / "data"


def test_the_first_machine_gives_it_to_the_others(data: Path) -> None:
    said: list[str] = []
    DataDelivery(fleet(data, HERE, ALSO_HERE), said.append).bring(data)
    assert said == [f"1 MB of data: from here to {HERE}", f"1 MB of data: from {HERE} to {ALSO_HERE}"]
    for host in (HERE, ALSO_HERE):
        assert FileList.of(data).difference(copy(data, host)) == "" and not copy(data, host).is_symlink()


def test_machines_that_do_not_reach_the_first_one_get_it_from_here(data: Path) -> None:
    said: list[str] = []
    DataDelivery(fleet(data, NOWHERE, HERE), said.append).bring(data)
    assert said[2].startswith(f"{HERE}: no data from {NOWHERE} (") and said[2].endswith("it comes from here")
    assert FileList.of(data).difference(copy(data, HERE)) == ""


def test_a_first_machine_that_cannot_serve_is_named_and_all_get_it_from_here(data: Path) -> None:
    said: list[str] = []
    machines = fleet(data, HERE, ALSO_HERE)
    (data.parent / "runs" / "run" / HERE / "token").unlink()
    DataDelivery(machines, said.append).bring(data)
    assert said[2].startswith(f"{HERE}: cannot serve the data: ") and "token" in said[2]
    assert FileList.of(data).difference(copy(data, ALSO_HERE)) == ""


def test_data_that_is_there_is_not_sent(data: Path) -> None:
    said: list[str] = []
    DataDelivery(fleet(data, HERE, ALSO_HERE, there=f"~/{data.name}"), said.append).bring(data)
    assert said == ["1 MB of data: all machines have it"]
    assert {copy(data, host).resolve() for host in (HERE, ALSO_HERE)} == {data}


def test_a_machine_that_comes_later_gets_it_from_the_first_one(data: Path) -> None:
    said: list[str] = []
    machines = fleet(data, HERE, ALSO_HERE)
    DataDelivery(machines, said.append).bring(data)
    host = machines.machines[1]
    host.do(machines.inside(host, "rm -r data data.json"))
    DataDelivery(machines, said.append).bring_anew(host, str(FileList.of(data)).encode())
    assert len(said) == 2 and FileList.of(data).difference(copy(data, ALSO_HERE)) == ""


def test_a_machine_that_comes_later_and_does_not_reach_the_first_one_gets_it_by_way_of_this_one(
    data: Path,
) -> None:
    said: list[str] = []
    machines = fleet(data, NOWHERE, HERE)
    DataDelivery(machines, lambda _: None).bring(data)
    host = machines.machines[1]
    host.do(machines.inside(host, "rm -r data data.json"))
    DataDelivery(machines, said.append).bring_anew(host, str(FileList.of(data)).encode())
    assert len(said) == 1 and "it comes from here" in said[0]
    assert FileList.of(data).difference(copy(data, HERE)) == ""


def test_a_file_that_changes_on_the_way_is_noticed(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = FileList.of(data)
    (data / "numbers").write_bytes(os.urandom(1 << 20))
    monkeypatch.setattr(FileList, "of", lambda _: listed)
    with pytest.raises(
        HostError, match=f"{HERE}: the data did not arrive whole: numbers has another SHA-256"
    ):
        DataDelivery(fleet(data, HERE, ALSO_HERE), lambda _: None).bring(data)


def test_data_that_the_first_machine_has_changed_is_refused_by_one_that_comes_later(data: Path) -> None:
    listed, machines = str(FileList.of(data)).encode(), fleet(data, HERE, ALSO_HERE)
    DataDelivery(machines, lambda _: None).bring(data)
    (copy(data, HERE) / "numbers").write_bytes(os.urandom(1 << 20))
    (copy(data, HERE).parent / "data.json").write_text(str(FileList.of(copy(data, HERE))))
    host = machines.machines[1]
    host.do(machines.inside(host, "rm -r data data.json"))
    with pytest.raises(HostError, match="numbers has another SHA-256"):
        DataDelivery(machines, lambda _: None).bring_anew(host, listed)
