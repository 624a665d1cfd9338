"""Names that become part of a path stay in their folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import gradstream as gs
from gradstream.cli import main
from gradstream.errors import ConfigError
from gradstream.run.remote.members import MachineMembers
from gradstream.testing.runs import least_squares
from gradstream.untrusted.text import check_name
from gradstream.wire import v1

BAD = ["", ".", "..", "../..", "a/b", "/etc", "..\\..", "a\nb", "a\x00b", "\x1b[2J", "x" * 101, "é" * 51]
GOOD = ["net", "my job (2)", "größe", "v1.2-rc_3", "...", "x" * 100]


@pytest.mark.parametrize("name", BAD)
def test_a_name_that_leaves_its_folder_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"name \(--name\) is .*: expected 1 to 100 bytes of printable"):
        check_name(name, "name (--name)")


@pytest.mark.parametrize("name", GOOD)
def test_a_name_like_other_names_is_taken(tmp_path: Path, name: str) -> None:
    (tmp_path / check_name(name, "name")).mkdir()
    assert [path.name for path in tmp_path.iterdir()] == [name]


@given(st.text())
def test_an_accepted_name_stays_in_the_folder(name: str) -> None:
    try:
        check_name(name, "name")
    except ConfigError:
        return
    inside = Path("/runs") / f"20260101-000000-{name}"
    assert inside.parent == Path("/runs")
    assert (Path("/runs") / name).resolve().parent == Path("/runs")


@pytest.mark.parametrize("name", ["../..", "a/../../b", ".."])
def test_a_run_is_not_kept_outside_of_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    inner = tmp_path / "one" / "two"
    inner.mkdir(parents=True)
    monkeypatch.chdir(inner)
    model, data = least_squares(8, 4)
    options: dict[str, Any] = {"steps": 1, "optimizer": gs.optim.SGD(lr=0.1), "name": name}
    with pytest.raises(ConfigError, match="becomes part of a path"):
        gs.train(model, data, processes=False, **options)
    with pytest.raises(ConfigError, match="becomes part of a path"):
        gs.simulate(model, data, **options)
    assert list(tmp_path.rglob("*")) == [tmp_path / "one", inner]


def test_the_message_of_the_command_line_has_the_given_and_the_expected_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(main, ["new", "line"]).exit_code == 0
    (tmp_path / "config.toml").write_text('name = "../.."\n')
    result = CliRunner().invoke(main, ["train", "line.py", "--config", "config.toml"])
    assert result.exit_code == 2
    assert "'../..': expected" in result.stderr.replace("\n", " ")
    assert not (tmp_path / "runs").exists()


def test_a_job_file_whose_name_cannot_be_part_of_a_path_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(main, ["new", "line"]).exit_code == 0
    file = tmp_path / ("x" * 150 + ".py")
    (tmp_path / "line.py").rename(file)
    result = CliRunner().invoke(main, ["train", str(file)])
    assert result.exit_code == 2
    assert "of 150 bytes: expected 1 to 100" in result.stderr.replace("\n", " ")


def test_a_machine_with_an_invalid_name_does_not_get_in() -> None:
    members = MachineMembers("a", machines=2, workers_per_machine=1, facts={})
    for name in ("../..", "a/b", "\x1b[2J"):
        refused = members.enrol(v1.Enrol(machine=name))
        assert isinstance(refused, v1.Refuse)
        assert refused.code == v1.BAD_REQUEST
        assert "the machine's name (--name) is" in refused.message
    assert members.missing == 1
    assert not isinstance(members.enrol(v1.Enrol(machine="b")), v1.Refuse)


def test_a_machine_does_not_join_under_an_invalid_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(main, ["new", "line"]).exit_code == 0
    words = ["join", "127.0.0.1:9", "line.py", "--token", "0" * 32, "--insecure", "--name", "../../x"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 2
    assert "this machine's name (--name) is '../../x'" in result.output
