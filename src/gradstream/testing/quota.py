"""Limits processes to a part of a core, by a cgroup: for tests and measurements of uneven machines."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

PERIOD_US = 10_000
"""Period of the quota, in µs: short, so that it slows down every computation of a process."""


def _root() -> tuple[Path, bool] | None:
    """The folder of cgroups, and whether they are of version 1; None if none can limit CPU time."""
    first = Path("/sys/fs/cgroup/cpu")
    if (first / "cgroup.procs").is_file():
        return first, True
    second = Path("/sys/fs/cgroup")
    control = second / "cgroup.subtree_control"
    return (second, False) if control.is_file() and "cpu" in control.read_text().split() else None


def no_quota() -> str:
    """The reason why `CpuQuota` does not work on this machine; "" if it does."""
    root = _root()
    if root is None:
        return "no cgroups that limit CPU time"
    if not os.access(root[0], os.W_OK):
        return f"{root[0]} is not writable: needs root"
    try:
        with CpuQuota(0.5):
            return ""
    except OSError as error:
        return f"no cgroup can be made: {error}"


class CpuQuota:
    """Limits the CPU time of the processes that `put` adds, together. A context manager.

    Args:
        cores: the limit: 0.5 is half a core; at least 0.1.

    Raises:
        OSError: cgroups cannot be written, see `no_quota`; or `cores` is less than Linux allows.
    """

    def __init__(self, cores: float) -> None:
        found = _root()
        if found is None:
            raise OSError(no_quota())
        self._root, first = found
        self._group = self._root / f"gradstream-{secrets.token_hex(4)}"
        self._group.mkdir()
        quota_us = round(cores * PERIOD_US)
        try:
            if first:
                (self._group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
                (self._group / "cpu.cfs_quota_us").write_text(str(quota_us))
            else:
                (self._group / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")
        except OSError:
            self._group.rmdir()
            raise

    def put(self, pid: int) -> None:
        """Slows a process down, with all of its threads, until the context ends."""
        (self._group / "cgroup.procs").write_text(str(pid))

    def __enter__(self) -> CpuQuota:
        return self

    def __exit__(self, *exception: object) -> None:
        for pid in (self._group / "cgroup.procs").read_text().split():
            try:
                (self._root / "cgroup.procs").write_text(pid)
            except ProcessLookupError:
                pass  # it has ended meanwhile
        self._group.rmdir()
