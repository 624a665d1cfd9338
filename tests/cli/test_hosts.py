"""Machines of a launch that are silent, say too much, or say what a terminal would obey."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from gradstream.cli.group import main
from gradstream.ext.ssh import host, run_files
from gradstream.ext.ssh.fleet import Fleet
from gradstream.ext.ssh.host import HostError

EVIL = b"\x1b]0;title\x07\x1b[2J\xe2\x80\xae\xff\x9b31m plain\n"
SSH = """#!/bin/sh
for last; do :; done
case "$last" in
{cases}
*) exit 0 ;;
esac
"""


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "evil").write_bytes(EVIL)


def fleet(tmp_path: Path, **cases: str) -> Path:
    """The local folder of a run whose machines answer a script with a word in it by another script."""
    client = tmp_path / "ssh"
    lines = "\n".join(f'*"{word.replace("_", " ")}"*) {script} ;;' for word, script in cases.items())
    client.write_text(SSH.format(cases=lines))
    client.chmod(0o755)
    run = tmp_path / "run"
    Fleet(
        name="run",
        hosts=["a", "b"],
        ssh=[str(client)],
        python="python3",
        folder="~/f",
        port=1,
        job="j.py",
        arguments=[],
    ).keep(run, {})
    return run


def command(*words: str) -> tuple[int, bytes]:
    """A command in a process of its own: what programs that it starts inherit counts too."""
    done = subprocess.run(
        [sys.executable, "-m", "gradstream", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=60,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize("stream", ["1", "2"])
@pytest.mark.parametrize(
    "words",
    [["logs"], ["logs", "a"], ["status"], ["attach"], ["stop"], ["remove", "b"], ["replace", "b", "b"]],
    ids=" ".join,
)
def test_nothing_that_a_terminal_obeys_comes_of_what_a_machine_says(
    tmp_path: Path, words: list[str], stream: str
) -> None:
    evil = f"cat {tmp_path}/evil >&{stream}"
    run = fleet(
        tmp_path,
        **{
            "cat log": evil,
            "tail -n 1 ": evil,
            "tail -n +1": f"{evil}; exit 1",
            "run.json": "echo begun",
            "gradstream stop": evil,
            "tar ": f"{evil}; exit 2",
            "rm -rf": f"{evil}; exit 255",
            "kill": f"{evil}; exit 255",
            "mkdir": f"{evil}; exit 255",
        },
    )
    _, said = command(words[0], str(run), *words[1:])
    assert said.decode().replace("\n", "").isprintable(), said
    if words[0] not in ("remove", "replace") and stream == "1":
        assert b"plain" in said, said


def test_a_machine_that_is_silent_while_it_is_collected_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "SILENCE_S", 0.5)
    run = fleet(tmp_path, **{"gradstream stop": 'echo "$last" >&2; echo stopped', "tar ": "exec sleep 1000"})
    begun_s = time.monotonic()
    done = CliRunner().invoke(main, ["stop", str(run)])
    assert done.exit_code == 3 and time.monotonic() - begun_s < 30.0
    assert f"a: silent for 0.5 s while its files came; try `{tmp_path}/ssh a true`" in done.output, (
        done.output
    )
    assert (run / "hosts.json").is_file()  # the next stop tries again


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("while :; do printf x; sleep 0.1; done", "not done in time"),
        ("printf x; exec sleep 1000", "silent for 0.5 s"),
        ("exec 1>&-; exec sleep 1000", "the archive broke off"),
        ("yes >&2", "its files did not come|broke off"),
    ],
)
def test_a_log_that_does_not_come_costs_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, said: str
) -> None:
    monkeypatch.setattr(host, "SILENCE_S", 0.5)
    monkeypatch.setattr(run_files, "LOG_S", 1.0)
    run = fleet(tmp_path, **{"tar ": script})
    machines = Fleet.of(run)
    assert machines is not None
    begun_s = time.monotonic()
    why = run_files.bring_log(machines, run, machines.machines[0])
    assert why.startswith("a: ") and any(one in why for one in said.split("|")), why
    assert time.monotonic() - begun_s < 20.0
    assert os.listdir(run / "hosts") == []


@pytest.mark.parametrize("stream", ["1", "2"])
def test_an_answer_without_an_end_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: str
) -> None:
    monkeypatch.setattr(host, "ANSWER_BYTES", 1 << 20)
    run = fleet(tmp_path, true=f"exec yes >&{stream}")
    machines = Fleet.of(run)
    assert machines is not None
    with pytest.raises(HostError, match="a: it says more than 1,048,576 bytes"):
        machines.machines[0].ask("true")


def test_an_answer_that_does_not_come_is_given_up_with_children_that_hold_its_pipes(tmp_path: Path) -> None:
    run = fleet(tmp_path, true="sleep 1000 & sleep 1000")
    machines = Fleet.of(run)
    assert machines is not None
    begun_s = time.monotonic()
    with pytest.raises(HostError, match=r"a: no answer within 0\.3 s; try"):
        machines.machines[0].ask("true", timeout_s=0.3)
    assert time.monotonic() - begun_s < 20.0


def test_a_line_without_an_end_is_shown_in_pieces(tmp_path: Path) -> None:
    run = fleet(tmp_path, **{"cat log": "head -c 100000 /dev/zero; echo; printf 'a\\tb\\r\\n'"})
    done = CliRunner().invoke(main, ["logs", str(run), "a"])
    assert done.exit_code == 0 and done.output.endswith("a       b\n")
    assert max(map(len, done.output.splitlines())) <= 8192
