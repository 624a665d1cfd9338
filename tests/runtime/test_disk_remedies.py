from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

import gradstream as gs
from gradstream.ext.ssh.host import folder_remedy
from gradstream.job.files import load_job
from gradstream.runtime.storage import DISK_ERRORS, disk_remedy


def remedy(number: int) -> str:
    return disk_remedy(OSError(number, os.strerror(number)))


def test_room_helps_only_where_the_disk_is_full() -> None:
    full = {number for number in errno.errorcode if "room" in remedy(number)}
    assert full == {errno.ENOSPC, errno.EDQUOT}
    assert "permission" in remedy(errno.EACCES)
    assert "locks" in remedy(errno.ENOLCK) and "locks" in remedy(errno.EINVAL)
    assert all(remedy(number) != remedy(errno.EXDEV) for number in DISK_ERRORS)
    assert disk_remedy(OSError("of a library")) == "mend what the system says"


def test_a_machine_whose_folder_is_not_writable_needs_no_room() -> None:
    assert "room" in folder_remedy("mkdir: runs: No space left on device")
    assert folder_remedy("mkdir: runs: Permission denied") == "take a --folder in which you may write"


@pytest.mark.parametrize(("number", "says"), [(errno.ENOLCK, "with locks"), (errno.EACCES, "the permission")])
def test_a_run_directory_without_locks_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, says: str
) -> None:
    def lockf(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "lockf", lockf)
    job = load_job(str(Path(__file__).parents[2] / "examples" / "linear_regression.py"))
    with pytest.raises(gs.errors.DiskError, match=f"nothing was started: .*{says}.*, or name another"):
        gs.train(job, run_dir=tmp_path / "run")
