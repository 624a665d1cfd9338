"""Files of a run directory that are no files, or not what a run has written; and who may look at them."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gradstream._train import _new_run_dir
from gradstream.checkpoint.format import load_file
from gradstream.checkpoint.manifest import Manifest, seal_of
from gradstream.data.base import DataProgress
from gradstream.errors import ConfigError, DataError
from gradstream.job.job import Job
from gradstream.run.files import read_config, read_record
from gradstream.run.local.environment import python_environment
from gradstream.run.result import Run
from gradstream.runtime.storage import DiskStorage
from gradstream.telemetry.event_lines import read_events
from gradstream.testing.runs import least_squares
from gradstream.untrusted import read_regular

MANIFEST = Manifest(
    step=4,
    rounds=4,
    steps={"worker-0": 4},
    done=DataProgress(),
    versions=[4, -1],
    model={"fingerprint": 1 << 63},
    optimizer="SGD",
    strategy="synchronous",
    seed=-3,
    workers=1,
    servers=1,
    num_samples=16,
    software="0",
    samples={"worker-0": 16},
    dropped={"0": 1},
)


@pytest.mark.limit_s(20)
@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_events_that_only_look_like_a_file_are_refused(kind: str, tmp_path: Path) -> None:
    """A report of such a run was empty, without a word."""
    path = tmp_path / "events.jsonl"
    assert read_events(path) == []
    os.mkfifo(path) if kind == "pipe" else path.mkdir()
    with pytest.raises(ConfigError, match=r"events\.jsonl cannot be read"):
        read_events(path)


@pytest.mark.limit_s(20)
@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_what_only_looks_like_a_file_is_refused_at_once(kind: str, tmp_path: Path) -> None:
    """A pipe without a writer would be waited for, for ever."""
    path = tmp_path / "state.json"
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case _:
            path.mkdir()
    storage = DiskStorage(tmp_path)
    for read in (
        lambda: read_regular(path),
        lambda: storage.read("state.json"),
        lambda: storage.read_at("state.json", 0, 8),
        lambda: load_file(path),
    ):
        with pytest.raises(OSError, match="no regular file"):
            read()
    for refuse in (read_record, read_config):
        with pytest.raises(ConfigError, match="no regular file"):
            refuse(path)


def test_a_file_that_is_too_long_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "long").write_bytes(bytes(11))
    with pytest.raises(OSError, match="11 bytes, expected at most 10"):
        read_regular(tmp_path / "long", 10)


@pytest.mark.parametrize(
    "altered",
    [
        {"rounds": -5},
        {"step": 1 << 60},
        {"workers": -1},
        {"steps": {"worker-0": -1}},
        {"samples": {"worker-0": -16}},
        {"shares": [4, -4]},
        {"phase": {"number": -1}},
        {"files": {"model.safetensors": {"size_bytes": -1, "sha256": "0"}}},
    ],
)
def test_counts_that_are_impossible_are_refused(altered: dict[str, Any]) -> None:
    assert Manifest.decode(MANIFEST.encode()).encode() == MANIFEST.encode()
    record = json.loads(MANIFEST.encode()) | altered
    del record["sha256"]
    body = json.dumps(record, indent=1).encode()[2:] + b"\n"
    with pytest.raises(DataError, match=f"{next(iter(altered))} .*expected 0 to"):
        Manifest.decode(seal_of(body) + body)


def test_a_run_folder_is_its_owners_alone(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        DiskStorage(tmp_path / "runs" / "one").append("events.jsonl", b"{}\n")
        DiskStorage(tmp_path / "runs" / "two").write("checkpoints/step-1/state.json", b"")
        DiskStorage(tmp_path / "runs" / "three").mkdir("checkpoints")
    finally:
        os.umask(before)
    for name in ("one", "two", "three"):
        assert stat.S_IMODE((tmp_path / "runs" / name).stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "runs").stat().st_mode) == 0o755


def test_nodes_do_not_inherit_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADSTREAM_TOKEN", "0123456789abcdef")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    environment = python_environment({"A": "1"})
    assert "GRADSTREAM_TOKEN" not in environment
    assert environment["A"] == "1" and environment["OMP_NUM_THREADS"] == "3"


def test_a_report_replaces_a_link(tmp_path: Path) -> None:
    """A run folder of somebody else's may have a link at the place of the report."""
    victim, report = tmp_path / "victim", tmp_path / "report.html"
    victim.write_text("mine")
    report.symlink_to(victim)
    Run(events=[]).trace(report)
    assert victim.read_text() == "mine"
    assert not report.is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "victim"]


@pytest.mark.cold
def test_a_report_is_utf8_whatever_the_locale(tmp_path: Path) -> None:
    code = (
        "import locale, sys; from pathlib import Path; from gradstream.run.result import _written; "
        "assert locale.getpreferredencoding(False) != 'UTF-8'; _written(Path(sys.argv[1]), 'W \\u2265 2')"
    )
    ascii_only = {**os.environ, "LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "report.html")], env=ascii_only, check=True)
    assert (tmp_path / "report.html").read_bytes() == "W ≥ 2".encode()


def test_a_run_makes_its_folder_for_its_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = os.umask(0o022)
    try:
        for run_dir in (None, tmp_path / "named"):
            model, data = least_squares(4, 2)
            made = _new_run_dir(Job(model, data, run_dir=run_dir))
            assert stat.S_IMODE(made.stat().st_mode) == 0o700
    finally:
        os.umask(before)
