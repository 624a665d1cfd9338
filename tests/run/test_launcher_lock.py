"""The launcher's lock and the control pipe of a detached run: what the kernel says, and what a file may say."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gradstream.coordinator.durable import STORE, StateStore
from gradstream.errors import ConfigError, DataError
from gradstream.run.launcher_lock import FILE, LauncherRecord, holder_of, launcher_lock, signal_launcher

HOLDER = """
import signal, subprocess, sys
from pathlib import Path
from gradstream.run.launcher_lock import LauncherRecord, launcher_lock

with launcher_lock(Path(sys.argv[1]), LauncherRecord.here(events_from=7)):
    child = subprocess.Popen(["sleep", "60"])  # has no part in the lock
    signal.signal(signal.SIGTERM, lambda *_: print("told", flush=True))
    print(child.pid, flush=True)
    while True:
        signal.pause()
"""


@contextmanager
def holder(run_dir: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock, and has a child."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(HOLDER), str(run_dir)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    child = int(process.stdout.readline())
    try:
        yield process
    finally:
        process.kill()
        os.kill(child, signal.SIGKILL)
        process.communicate()


def test_one_launcher_at_a_time_and_the_kernel_names_it(tmp_path: Path) -> None:
    assert holder_of(tmp_path) is None and not signal_launcher(tmp_path, signal.SIGTERM)
    with holder(tmp_path) as process:
        assert process.stdout is not None
        assert holder_of(tmp_path) == process.pid
        record = LauncherRecord.here(events_from=0)
        with pytest.raises(DataError, match=f"process {process.pid} runs"), launcher_lock(tmp_path, record):
            pass
        found = LauncherRecord.read(tmp_path)
        assert found is not None and found.events_from == 7
        (tmp_path / FILE).write_text(json.dumps({"pid": 1}))  # what the file says moves no signal elsewhere
        assert signal_launcher(tmp_path, signal.SIGTERM)
        assert process.stdout.readline() == "told\n"
        process.kill()
        process.wait()
        assert holder_of(tmp_path) is None  # although its child lives
        with launcher_lock(tmp_path, record):
            assert holder_of(tmp_path) == os.getpid()
            with pytest.raises(DataError, match="this process"), launcher_lock(tmp_path, record):
                pass
            with pytest.raises(ConfigError, match="this process"):
                LauncherRecord.read(tmp_path)
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b"[]",
        b"{}",
        b'{"host":1,"events_from":0}',
        b'{"host":"a","events_from":-1}',
        b'{"host":"a","events_from":0,"more":0}',
        b"[" * 100_000,
    ],
)
def test_an_altered_record_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(ConfigError, match="launcher is damaged"):
        LauncherRecord.read(tmp_path)


def test_a_record_that_the_disk_did_not_take_is_none(tmp_path: Path) -> None:
    assert LauncherRecord.read(tmp_path) is None
    (tmp_path / FILE).touch()
    assert LauncherRecord.read(tmp_path) is None


STRANGER = """
import fcntl, os, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
got = []
for name in sys.argv[2:]:
    path = os.path.join(sys.argv[1], name)
    assert os.stat(path)  # it is there, and its folder can be looked at
    for way in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR):
        try:
            file = os.open(path, way | os.O_NONBLOCK)
        except PermissionError:
            continue
        got.append((name, way))
print(got)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user takes root")
def test_other_users_reach_nothing_by_which_a_run_is_led() -> None:
    """Who could open them might hold their locks, give orders, or read what members prove themselves by."""
    with tempfile.TemporaryDirectory() as folder:  # pytest's own folders are closed to others anyhow
        os.chmod(folder, 0o755)
        run_dir = Path(folder)
        store = StateStore(run_dir / STORE, "job")
        store.rule()
        with launcher_lock(run_dir, LauncherRecord.here(events_from=0)):
            led_by = [FILE, STORE, f"{STORE}-wal", f"{STORE}-shm"]
            asked = [sys.executable, "-c", STRANGER, folder, *led_by]
            done = subprocess.run(asked, capture_output=True, text=True, check=True)
            assert done.stdout == "[]\n"
            os.chmod(run_dir / STORE, 0o644)  # planted
            done = subprocess.run(asked, capture_output=True, text=True, check=True)
            assert done.stdout == f"[('{STORE}', 0)]\n"
        store.close()
