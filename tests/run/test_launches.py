"""What a run folder says is data: what is executed for it was kept on this machine, or its user has been asked."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import gradstream
from gradstream import _detached
from gradstream.cli.group import main
from gradstream.errors import ConfigError
from gradstream.ext.ssh.fleet import Fleet
from gradstream.job.files import load_job
from gradstream.run.launches import Launch
from gradstream.run.node_spec import NodeSpec
from gradstream.run.planning import plan_run
from gradstream.run.result import job_of_run, spec_of_run

JOB = """
import gradstream as gs
from helper import rows

def job():
    model, data = rows()
    return gs.Job(model, data, optimizer=gs.optim.SGD(lr=0.25), strategy="downpour", batch_size=8, epochs=2)

def another():
    raise SystemExit("was run")
"""
HELPER = """
from gradstream.testing.runs import slow

def rows():
    return slow(40, pause_s=0.0)

def mean(*arrays):
    return 0.0
"""
STATE = os.environ["XDG_STATE_HOME"]
TAKEN = "import pathlib; pathlib.Path(__file__).with_name('taken').touch()\ndef job(): raise SystemExit\n"


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "gradstream"


def fleet(tmp_path: Path, said: str = "mine") -> Fleet:
    """Machines whose client leaves a file behind when it is run."""
    client = tmp_path / f"{said}-ssh"
    client.write_text(f"#!/bin/sh\ntouch {tmp_path}/{said}-was-run\n")
    client.chmod(0o755)
    return Fleet(
        name="run",
        hosts=["a", "b"],
        ssh=[str(client)],
        python="python3",
        folder="~/f",
        port=1,
        job="j.py",
        arguments=[],
    )


def said(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(main, list(words))
    return done.exit_code, done.output


COMMANDS = [["status"], ["logs"], ["attach"], ["stop"], ["add", "c"], ["remove", "b"], ["replace", "b", "c"]]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: words[0])
def test_words_in_a_run_folder_are_not_run(tmp_path: Path, command: list[str]) -> None:
    theirs, run = fleet(tmp_path, "theirs"), tmp_path / "run"
    run.mkdir()
    (run / "hosts.json").write_text(json.dumps(dataclasses.asdict(theirs)))
    status, text = said(command[0], str(run), *command[1:])
    assert status == 2, text
    assert "comes from elsewhere" in text and str(theirs.ssh[0]) in text and "--adopt" in text
    assert not (tmp_path / "theirs-was-run").exists()


@pytest.mark.parametrize("command", COMMANDS[:3], ids=lambda words: words[0])
def test_words_that_were_put_over_ours_are_not_run(tmp_path: Path, command: list[str]) -> None:
    ours, theirs, run = fleet(tmp_path), fleet(tmp_path, "theirs"), tmp_path / "run"
    ours.keep(run, {})
    (run / "hosts.json").write_text(json.dumps(dataclasses.asdict(theirs)))
    said(command[0], str(run), *command[1:])
    assert (tmp_path / "mine-was-run").exists() and not (tmp_path / "theirs-was-run").exists()
    assert Fleet.of(run) == ours
    (run / "hosts.json").unlink()
    assert Fleet.of(run) is None


def test_a_folder_of_elsewhere_is_believed_once_its_user_has_said_so(tmp_path: Path) -> None:
    theirs, run = fleet(tmp_path, "theirs"), tmp_path / "run"
    run.mkdir()
    (run / "hosts.json").write_text(json.dumps(dataclasses.asdict(theirs)))
    status, text = said("status", str(run), "--adopt")
    assert status == 0 and f"commands run {theirs.ssh[0]}" in text, text
    assert (tmp_path / "theirs-was-run").exists() and Fleet.of(run) == theirs
    assert said("status", str(run), "--adopt")[0] == 2
    (moved := tmp_path / "moved").mkdir()
    (run / "hosts.json").rename(moved / "hosts.json")
    with pytest.raises(ConfigError, match="comes from elsewhere"):
        Fleet.of(moved)


def test_what_is_kept_is_the_users_alone(tmp_path: Path, state: Path) -> None:
    run = tmp_path / "run"
    fleet(tmp_path).keep(run, {})
    assert [stat.S_IMODE(path.stat().st_mode) for path in (state, state / "launches", run)] == [0o700] * 3
    (tmp_path / "link").symlink_to(run)
    assert Fleet.of(tmp_path / "link") == Fleet.of(run)
    (state / "launches").chmod(0o777)
    with pytest.raises(ConfigError, match=r"others can write there.*chmod 700"):
        Fleet.of(run)


@pytest.mark.parametrize("where", ["folder", "kept"])
@pytest.mark.parametrize("kind", ["pipe", "link", "folder", "large", "garbage", "fields", "option", "port"])
def test_a_list_of_machines_that_is_none_is_refused_and_nobody_waits(
    tmp_path: Path, where: str, kind: str
) -> None:
    ours, run = fleet(tmp_path), tmp_path / "run"
    if where == "kept":
        ours.keep(run, {})
    run.mkdir(exist_ok=True)
    path = (Launch.at(run).folder if where == "kept" else run) / "hosts.json"
    path.unlink(missing_ok=True)
    good = json.dumps(dataclasses.asdict(ours))
    (tmp_path / "elsewhere.json").write_text(good)
    make: dict[str, Callable[[], Any]] = {
        "pipe": lambda: os.mkfifo(path),
        "link": lambda: path.symlink_to(tmp_path / "elsewhere.json"),
        "folder": path.mkdir,
        "large": lambda: path.write_text(good + " " * (2 << 20)),
        "garbage": lambda: path.write_text("[" * 5000),
        "fields": lambda: path.write_text(good.replace('"port": 1', '"port": "x"')),
        "option": lambda: path.write_text(good.replace('"b"', '"-oProxyCommand=x"')),
        "port": lambda: path.write_text(good.replace('"port": 1', '"port": -5')),
    }
    make[kind]()
    with pytest.raises(ConfigError) as refused:
        Fleet.of(run)
    assert "comes from elsewhere" not in str(refused.value) and not (tmp_path / "mine-was-run").exists()


# ---- the description of the run -----------------------------------------------------------


@pytest.fixture
def collected(tmp_path: Path) -> Path:
    """A run that was launched from here, as its first machine describes it."""
    folder, run = tmp_path / "work", tmp_path / "run"
    folder.mkdir()
    (folder / "j.py").write_text(JOB)
    (folder / "helper.py").write_text(HELPER)
    files = {name: folder / name for name in ("j.py", "helper.py")}
    fleet(tmp_path).keep(run, files)
    (run / "hosts.json").unlink()
    job = load_job(str(folder / "j.py"))
    there = dataclasses.replace(job, spec="/there/j.py")
    spec = NodeSpec.of(plan_run(there, "0123abcd"), Path("/there/runs/run"))
    write(run, dataclasses.asdict(spec))
    (run / "hosts").mkdir()
    for name in files:
        (folder / name).unlink()
    sys.modules.pop("helper")
    return run


def write(run: Path, spec: dict[str, Any]) -> None:
    (run / "nodes.json").write_text(json.dumps(spec))


def test_the_job_of_a_collected_run_is_that_which_was_launched(collected: Path, tmp_path: Path) -> None:
    job = job_of_run(collected)
    assert job.spec == str(Launch.at(collected).folder / "job" / "j.py") and job.epochs == 2
    evil = tmp_path / "run" / "job"
    evil.mkdir()
    (evil / "j.py").write_text(TAKEN)
    (tmp_path / "evil.py").write_text(TAKEN)
    record = json.loads((collected / "nodes.json").read_text())
    for place in (str(tmp_path / "evil.py"), str(evil / "j.py"), "evil:job", "/there/j.py:another"):
        write(collected, {**record, "job": place, "plain": {**record["plain"], "argv": ["j.py", "--evil"]}})
        again = job_of_run(collected)
        assert again.spec == job.spec and again.argv == [job.spec]
    assert not (tmp_path / "taken").exists() and not (evil / "taken").exists()


CODE = {"class": "subprocess:Popen", "fields": {"args": ["touch", "TAKEN"]}}


@pytest.mark.parametrize(
    "change",
    [
        {"strategy": {**CODE, "defaults": {}}},
        {"optimizer": {**CODE, "defaults": {}}},
        {"strategy": {"class": "gradstream.strategies.downpour:Downpour", "fields": {"push_every": CODE}}},
        {"optimizer": {"class": "gradstream.optim.sgd:SGD", "fields": {"lr": {"function": "os:system"}}}},
        {"strategy": {"class": "gradstream.job.code:load_module", "fields": {}}},
        {"strategy": {"class": "gradstream.strategies.nothing:Downpour", "fields": {}}},
        {"strategy": {"class": "TAKEN.py:Mine", "fields": {}}},
        {"plain": {"codec": "os:getcwd"}},
        {"plain": {"codec": CODE}},
        {"plain": {"metrics": {"m": "os:getcwd"}}},
        {"plain": {"phases": [{"strategy": CODE, "steps": 1}]}},
        {"plain": {"phases": [{"optimizer": "antigravity:fly", "steps": 1}]}},
    ],
)
def test_code_that_a_machine_names_is_not_run(
    collected: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    (tmp_path / "TAKEN.py").write_text(TAKEN)
    change = json.loads(json.dumps(change).replace("TAKEN", str(tmp_path / "taken"), 1))
    record = json.loads((collected / "nodes.json").read_text())
    plain = {**record["plain"], **change.pop("plain", {})}
    write(collected, {**record, **change, "plain": plain})
    with pytest.raises(ConfigError, match="neither gradstream's nor in a file of the job"):
        job_of_run(collected)
    assert not (tmp_path / "taken").exists()


def test_classes_and_functions_of_the_job_are_found_in_its_own_files(collected: Path) -> None:
    record = json.loads((collected / "nodes.json").read_text())
    for place in ("helper:mean", "/there/helper.py:mean"):
        write(collected, {**record, "plain": {**record["plain"], "metrics": {"m": place}}})
        kept = Launch.at(collected).folder / "job" / "helper.py"
        assert job_of_run(collected).metrics == {"m": f"{kept}:mean"}
    schedule = {"class": "gradstream.optim.schedules:Cosine", "fields": {}}
    write(collected, {**record, "optimizer": {"class": "x", "fields": {"lr": schedule}, "defaults": {}}})
    assert spec_of_run(collected).optimizer["fields"]["lr"] == schedule


# ---- a folder of elsewhere ----------------------------------------------------------------


def small_job(folder: Path, body: str = "") -> Path:
    """A run of a job in a file, which notes each reading of it in `read`."""
    path = folder / "job.py"
    path.write_text(
        "import pathlib\n"
        "with open(pathlib.Path(__file__).with_name('read'), 'a') as file: file.write('x')\n"
        "import gradstream as gs\n"
        "from gradstream.testing.runs import slow\n"
        "def job():\n"
        "    model, data = slow(40, pause_s=0.0)\n"
        "    return gs.Job(model, data, strategy='synchronous', batch_size=8, steps=2, checkpoint_every=1,\n"
        "                  record=True, workers=1)\n" + body
    )
    return path


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that this user has made; its folder is `run`."""
    folder = tmp_path_factory.mktemp("own")
    status, text = said("train", str(small_job(folder)), "--run-dir", str(folder / "run"))
    assert status == 0, text
    (folder / "read").unlink()
    return folder


@pytest.fixture
def own(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, with the key that it was made with, and its job's file where it was."""
    monkeypatch.setenv("XDG_STATE_HOME", STATE)
    shutil.copytree(finished / "run", tmp_path / "run")
    (finished / "read").unlink(missing_ok=True)
    return tmp_path / "run"


def alter(run: Path, **changes: Any) -> None:
    record = json.loads((run / "nodes.json").read_text())
    (run / "nodes.json").write_text(json.dumps(record | changes))


READERS = [["evaluate"], ["resume"], ["replay"]]


@pytest.mark.parametrize("command", READERS, ids=lambda words: words[0])
@pytest.mark.parametrize(
    "attack", ["job", "beside", "class", "arguments", "code", "unsealed", "key", "inside"]
)
def test_a_copied_folder_that_was_altered_is_not_executed(
    own: Path,
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    attack: str,
    command: list[str],
) -> None:
    (tmp_path / "evil.py").write_text(TAKEN)
    (own / "evil.py").write_text(TAKEN)
    handler = {
        "class": "logging:FileHandler",
        "fields": {"filename": str(tmp_path / "taken")},
        "defaults": {},
    }
    attacks: dict[str, Callable[[], Any]] = {
        "job": lambda: alter(own, job=str(tmp_path / "evil.py")),
        "inside": lambda: alter(own, job=str(own / "evil.py"), run_dir=str(own)),
        "beside": lambda: alter(own, script=str(own.parent / "evil.py")),
        "class": lambda: alter(own, strategy=handler),
        "arguments": lambda: alter(own, plain={"argv": ["job.py", "--evil"]}),
        "code": lambda: (own / "code.zip").write_bytes(b"another"),
        "unsealed": lambda: alter(own, seal=""),
        "key": lambda: monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another")),
    }
    attacks[attack]()
    for checkpoint in (own / "final.safetensors", own / "model.safetensors"):
        checkpoint.unlink(missing_ok=True)
    status, text = said(command[0], str(own), *command[1:])
    assert status == 2 and "comes from elsewhere" in text and "--adopt" in text, text
    assert not [path for path in (tmp_path / "taken", own / "taken", finished / "read") if path.exists()]


def test_a_run_of_ones_own_may_move(own: Path, finished: Path) -> None:
    _, text = said("evaluate", str(own))
    assert "no held-out samples" in text, text
    assert (finished / "read").exists()


def test_an_adopted_folder_is_believed_as_it_was_then(own: Path, tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text(TAKEN)
    alter(own, job=str(tmp_path / "evil.py"), strategy={"class": "logging:FileHandler", "fields": {}})
    status, text = said("status", str(own), "--adopt")
    assert status == 0 and f"{tmp_path}/evil.py" in text and "logging:FileHandler" in text, text
    assert not (tmp_path / "taken").exists()
    with pytest.raises(SystemExit):
        job_of_run(own)
    assert "known here" in said("status", str(own), "--adopt")[1]
    alter(own, job=str(tmp_path / "another.py"))
    with pytest.raises(ConfigError, match="comes from elsewhere"):
        job_of_run(own)


def test_a_detached_launcher_executes_no_folder_of_elsewhere(own: Path, tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text(TAKEN)
    alter(own, job=str(tmp_path / "evil.py"))
    with pytest.raises(ConfigError, match="comes from elsewhere"):
        _detached._plan(own)
    assert not (tmp_path / "taken").exists()


def test_a_key_that_others_can_read_is_none(own: Path) -> None:
    key = Path(os.environ["XDG_STATE_HOME"]) / "gradstream" / "key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    key.chmod(0o644)
    try:
        with pytest.raises(ConfigError, match="others can read it; chmod 600"):
            spec_of_run(own)
    finally:
        key.chmod(0o600)


def test_without_a_place_for_the_key_a_run_is_made_and_asks_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file" / "below"))
    status, text = said("train", str(small_job(tmp_path)), "--run-dir", str(tmp_path / "run"))
    assert status == 0 and "set XDG_STATE_HOME to a folder of yours" in text, text
    status, text = said("evaluate", str(tmp_path / "run"))
    assert status == 2 and ("comes from elsewhere" in text or "XDG_STATE_HOME" in text), text


def test_a_machine_that_comes_later_gets_the_job_that_was_launched(tmp_path: Path) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\nfor last; do :; done\ncd "$(dirname "$0")" && HOME=$PWD exec sh -c "$last"\n')
    ssh.chmod(0o755)
    (tmp_path / "j.py").write_text(JOB)
    machines, run = dataclasses.replace(fleet(tmp_path), ssh=[str(ssh)]), tmp_path / "run"
    machines.keep(run, {"j.py": tmp_path / "j.py"})
    for host in machines.machines:
        (tmp_path / "f" / "run" / host.name).mkdir(parents=True)
    first, second = (tmp_path / "f" / "run" / host.name for host in machines.machines)
    (first / "j.py").write_text(TAKEN)
    (first / "token").write_text("0123456789abcdef" * 2 + "\n")
    machines.send_to(machines.machines[1], Launch.at(run).files())
    assert (second / "j.py").read_text() == JOB and (second / "token").read_text() == (
        first / "token"
    ).read_text()
    (first / "token").write_text("$(touch x)")
    with pytest.raises(gradstream.errors.GradstreamError, match="a: its file token is none"):
        machines.send_to(machines.machines[1], Launch.at(run).files())
