"""Runs where the environment is odd: a full stderr, noise at Python's start, blocked signals, few open files."""

from __future__ import annotations

import dataclasses
import fcntl
import io
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradstream as gs
from gradstream.errors import ConfigError, UserCodeError
from gradstream.job.settings.layers import Setting, apply, from_environment, from_toml
from gradstream.machine import resources
from gradstream.run.followed_events import FollowedEvents
from gradstream.run.local.forkserver import _call
from gradstream.telemetry.events import LeftOverEvent, encode
from gradstream.untrusted import pass_on, say, tell
from small_loops import SETUP

SMALL = """
import numpy as np
import gradstream as gs

def gradients(p, x, y):
    error = x @ p["w"] - y
    return float(error @ error), {"w": error @ x}

def job():
    model = gs.from_functions(lambda seed: {"w": np.zeros(3)}, lambda p, x: x @ p["w"], gradients)
    data = gs.from_arrays(np.ones((32, 3)), np.ones(32))
    return gs.Job(model, data, strategy="synchronous", workers=2, batch_size=4, epochs=1)
"""


def train(folder: Path, text: str, *words: str, **given: Any) -> subprocess.CompletedProcess[str]:
    (folder / "job.py").write_text(text)
    command = [sys.executable, "-m", "gradstream", "train", "job.py", "--run-dir", "run", *words]
    given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **given}
    return subprocess.run(command, cwd=folder, text=True, check=False, timeout=90, **given)


# ---- standard error -----------------------------------------------------------------------


def test_a_full_stderr_loses_its_lines_and_nothing_else(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        done = train(tmp_path, SMALL, stderr=full)
    assert done.returncode == 0 and "run directory" in done.stdout
    assert b'"event":"failed"' not in (tmp_path / "run" / "events.jsonl").read_bytes()


def test_a_full_stdout_loses_the_figures_and_nothing_else(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        done = train(tmp_path, SMALL, stdout=full)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "stdout: No space left on device: what was to be printed is lost, and nothing else" in done.stderr
    assert b'"event":"finished"' in (tmp_path / "run" / "events.jsonl").read_bytes()


def test_a_run_trains_where_all_standard_streams_are_closed(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(SMALL)
    words = f"{sys.executable} -m gradstream train job.py --run-dir run <&- >&- 2>&-"
    assert subprocess.run(["sh", "-c", words], cwd=tmp_path, check=False, timeout=90).returncode == 0
    assert b'"event":"finished"' in (tmp_path / "run" / "events.jsonl").read_bytes()


@pytest.mark.parametrize("broken", ["full", "closed", "none"])
def test_a_stderr_that_takes_nothing_is_left(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stream: Any = None if broken == "none" else open("/dev/full", "w")  # noqa: SIM115
    if broken == "closed":
        stream.close()
    monkeypatch.setattr(sys, "stderr", stream)
    say("one")
    tell("two")
    if stream is not None:
        assert sys.stderr is not stream
        print("more", file=sys.stderr, flush=True)
        if broken == "full":
            with pytest.raises(OSError, match="No space"):
                stream.close()


def test_an_error_of_a_callback_is_no_missing_file(tmp_path: Path) -> None:
    """It was taken for one: the event, and all behind it in the file, were passed over."""

    def full(event: Mapping[str, Any]) -> None:
        raise OSError(28, "No space left on device")

    line = encode(LeftOverEvent(who="worker-0", steps=1, missing=1, message="x"), node="launcher", time_s=0.0)
    events = FollowedEvents(tmp_path, full)
    events.read()  # no file yet
    (tmp_path / "events.jsonl").write_bytes(line)
    with pytest.raises(OSError, match="No space"):
        events.read()
    assert events.read_bytes == len(line)


def test_what_worker_0_prints_is_on_stdout(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(LOOP)
    done = subprocess.run(
        [sys.executable, "-m", "gradstream", "train", "job.py", "--workers", "2", "--run-dir", "run"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=90,
    )
    assert done.returncode == 0, done.stderr
    assert "printed by the loop" in done.stdout and "printed by the loop" not in done.stderr


LOOP = f"""{SETUP}
for _ in range(2):
    optimizer.zero_grad()
    model(torch.ones(4, 4)).sum().backward()
    optimizer.step()
if session.rank == 0:
    print("printed by the loop")
"""


@pytest.mark.parametrize("broken", ["full", "closed", "none"])
def test_a_stdout_that_takes_nothing_ends_no_run(
    broken: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a loop prints goes through the launcher: `gradstream train loop.py | head` must not end it."""
    stream: Any = None if broken == "none" else open("/dev/full", "w")  # noqa: SIM115
    if broken == "closed":
        stream.close()
    monkeypatch.setattr(sys, "stdout", stream)
    pass_on("one")
    pass_on("two")
    assert capsys.readouterr().err.count("standard output takes nothing any more") == (broken != "none")


def test_what_stdout_cannot_spell_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    pass_on("größe")
    assert sys.stdout is stream and stream.buffer.getvalue() == b"gr\\xf6\\xdfe"


# ---- processes ----------------------------------------------------------------------------


@pytest.mark.cold
def test_what_pythons_start_prints_is_no_reply_of_a_forkserver(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("print('environment loaded', flush=True)\n")
    path = os.pathsep.join([str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")])
    done = train(tmp_path, SMALL, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    assert "environment loaded" in (tmp_path / "run" / "logs" / "forkserver.log").read_text()


@pytest.mark.cold
def test_signals_that_are_blocked_where_a_run_is_started_are_not_in_its_nodes(tmp_path: Path) -> None:
    """A mask is inherited: with SIGCHLD in it no end of a process was noticed, and the run never returned."""
    blocked = {signal.SIGCHLD, signal.SIGTERM}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    try:
        done = train(tmp_path, SMALL)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert done.returncode == 0, done.stderr


CHANGES = SMALL.replace(
    "def gradients", "import os\nos.chdir('data')\nROWS = np.load('rows.npy')\n\ndef gradients"
)


@pytest.mark.parametrize("detach", [False, True])
def test_a_job_file_may_change_the_working_directory(tmp_path: Path, detach: bool) -> None:
    (tmp_path / "data").mkdir()
    np.save(tmp_path / "data" / "rows.npy", np.ones((32, 3)))
    done = train(tmp_path, CHANGES, *(["--detach"] if detach else []))
    assert done.returncode == 0, done.stderr
    if detach:
        assert gs.runs.attach(tmp_path / "run").summary["samples_accounted"] == 32


def test_a_script_may_change_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    np.save(tmp_path / "data" / "rows.npy", np.ones((32, 3)))
    ends = "if __name__ == '__main__':\n"
    ends += f"    print(gs.train(job(), run_dir={str(tmp_path / 'run')!r}).summary['steps'])\n"
    (tmp_path / "script.py").write_text(CHANGES + ends)
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=90
    )
    assert done.returncode == 0 and done.stdout.split()[-1] == "8", done.stderr


# ---- sys.exit in a user's function --------------------------------------------------------


class Exits:
    """A data set whose sample 7 ends the process."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        if index == 7:
            sys.exit("label file is missing")
        return np.ones(3), np.float64(1)


def leaves(*_: Any) -> Any:
    sys.exit("giving up on it")


def good(p: Mapping[str, Any], x: Any, y: Any) -> tuple[float, dict[str, Any]]:
    return 0.0, {"w": np.zeros(3, np.float32)}


@pytest.mark.parametrize("where", ["gradients", "data", "metric"])
def test_words_of_sys_exit_in_a_users_function_end_the_run_with_them(where: str) -> None:
    init = lambda seed: {"w": np.zeros(3)}  # noqa: E731
    model = gs.from_functions(init, lambda p, x: x @ p["w"], leaves if where == "gradients" else good)
    rows = gs.from_arrays(np.ones((16, 3)), np.ones(16), np.ones((4, 3)), np.ones(4))
    data = gs.from_dataset(Exits()) if where == "data" else rows
    given: Any = {"metrics": {"m": leaves}} if where == "metric" else {}
    words = "label file is missing" if where == "data" else "giving up on it"
    with pytest.raises(UserCodeError, match=f"SystemExit: {words}"):
        gs.simulate(
            model, data, strategy="synchronous", workers=2, batch_size=4, epochs=1, **given
        ).evaluate()


@pytest.mark.parametrize(("code", "status"), [("words", 1), (3, 3), (None, 0)])
def test_words_of_an_exit_of_a_node_are_in_its_log(
    code: Any, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "leaves", lambda argv: sys.exit(code))
    assert _call(f"{__name__}:leaves", []) == status
    assert capsys.readouterr().err == ("words\n" if code == "words" else "")


@pytest.mark.parametrize("error", ["SystemExit('the words')", "KeyboardInterrupt('the words')"])
def test_a_node_that_is_ended_from_its_job_says_by_what(tmp_path: Path, error: str) -> None:
    """In the job file, which a node reads behind the launcher."""
    text = f"import os\ntry:\n    os.mkdir({str(tmp_path / 'read')!r})\nexcept OSError:\n    raise {error} from None\n"
    done = train(tmp_path, text + SMALL)
    assert done.returncode != 0 and "the words" in done.stderr and error.partition("(")[0] in done.stderr


# ---- variables, files of settings, open files ---------------------------------------------

OF_KUBERNETES = {
    "GRADSTREAM_SERVICE_HOST": "10.96.0.1",
    "GRADSTREAM_SERVICE_PORT": "80",
    "GRADSTREAM_SERVICE_PORT_HTTP": "80",
    "GRADSTREAM_PORT": "tcp://10.96.0.1:80",
    "GRADSTREAM_PORT_80_TCP": "tcp://10.96.0.1:80",
    "GRADSTREAM_PORT_80_TCP_PROTO": "tcp",
    "GRADSTREAM_PORT_80_TCP_PORT": "80",
    "GRADSTREAM_PORT_80_TCP_ADDR": "10.96.0.1",
    "GRADSTREAM_WORKERS_SERVICE_HOST": "10.96.0.2",
    "GRADSTREAM_WORKERS_PORT": "udp://10.96.0.2:80",
    "GRADSTREAM_WORKERS_PORT_80_UDP_ADDR": "10.96.0.2",
}


def test_variables_of_a_service_of_kubernetes_are_no_settings() -> None:
    found = from_environment({**OF_KUBERNETES, "GRADSTREAM_WORKERS": "4", "GRADSTREAM_WORKER": "3"})
    assert [setting.key for setting in found] == ["worker", "workers"]


def small() -> gs.Job:
    model = gs.from_functions(lambda seed: {"w": np.zeros(3)}, lambda p, x: x @ p["w"], good)
    return gs.Job(
        model, gs.from_arrays(np.ones((16, 3)), np.ones(16)), strategy="downpour", batch_size=4, epochs=1
    )


@pytest.mark.parametrize("key", ["workerss", "strategy.push_evry", "push_evry"])
def test_a_misspelt_key_is_named_although_a_strategy_is_typed(key: str) -> None:
    weak, strong = Setting(key, 4, "GRADSTREAM_X"), Setting("strategy", "allreduce", "--strategy")
    with pytest.raises(ConfigError, match=r"did you mean `(workers|strategy.push_every)`\?.*GRADSTREAM_X"):
        apply(small(), [[weak], [strong]])


def test_an_option_of_the_strategy_before_is_dropped_with_it() -> None:
    weak, strong = Setting("strategy.push_every", 4, "file"), Setting("strategy", "allreduce", "--strategy")
    assert apply(small(), [[weak], [strong]]).strategy == "allreduce"


def test_a_misspelt_option_of_another_strategy_is_told_by_its_name() -> None:
    with pytest.raises(ConfigError, match=r"did you mean `strategy\.push_every`"):
        apply(
            dataclasses.replace(small(), strategy="allreduce"), [[Setting("strategy.push_evry", 4, "--set")]]
        )


@pytest.mark.cold
def test_settings_are_utf_8_in_any_locale(tmp_path: Path) -> None:
    path = tmp_path / "gradstream.toml"
    path.write_bytes('name = "größe"\n'.encode())
    assert from_toml(path)[0].value == "größe"
    code = "import pathlib, sys; from gradstream.job.settings.layers import from_toml\n"
    code += "print(ascii(from_toml(pathlib.Path(sys.argv[1]))[0].value))"
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.strip() == "'gr\\xf6\\xdfe'"


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], list[tuple[int, int]]]:
    """Sets what the system says of open files. Returns the limits that are asked for."""

    def of(soft: int, hard: int) -> list[tuple[int, int]]:
        asked: list[tuple[int, int]] = []
        monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, hard))
        monkeypatch.setattr(resource, "setrlimit", lambda which, values: asked.append(values))
        return asked

    return of


def test_a_limit_of_open_files_is_raised_or_named(limit: Callable[[int, int], list[tuple[int, int]]]) -> None:
    asked = limit(24, 4096)
    resources.allow_open_files(6)
    assert asked == [(4096, 4096)]
    limit(24, 24)
    with pytest.raises(
        ConfigError, match=r"24 open files here, and one of a run of 6 nodes needs 72; .*ulimit -n"
    ):
        resources.allow_open_files(6)
    asked = limit(1024, resource.RLIM_INFINITY)
    resources.allow_open_files(200)
    assert asked == [(1 << 16, resource.RLIM_INFINITY)]
    asked = limit(resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    resources.allow_open_files(1 << 20)
    assert asked == []


def test_a_command_gets_the_files_of_high_numbers_that_it_is_to_keep() -> None:
    """Also where a process of these tests starts it by a fork."""
    read, write = os.pipe()
    high = fcntl.fcntl(write, fcntl.F_DUPFD_CLOEXEC, 700)
    os.close(write)
    code = "import os, sys; os.write(int(sys.argv[1]), b'here')"
    subprocess.run([sys.executable, "-c", code, str(high)], pass_fds=[high], check=True, timeout=60)
    os.close(high)
    with os.fdopen(read, "rb") as found:
        assert found.read() == b"here"
