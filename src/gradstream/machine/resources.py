"""Free memory and disk space of this machine."""

from __future__ import annotations

import resource
import shutil
from pathlib import Path

from gradstream.errors import ConfigError

MOST_FILES, FILES, FILES_PER_NODE = 1 << 16, 48, 4
"""Open files: the most that are asked for, and what a node needs: measured over shm with 6 workers it has 20."""

CGROUPS = Path("/sys/fs/cgroup")


def free_memory_bytes(meminfo: Path = Path("/proc/meminfo"), group: Path | None = None) -> int | None:
    """Bytes of memory that new processes can use without swapping; None if the system does not tell.

    The least of the machine's available memory and the rest of each limit of this process's control groups.
    """
    found = [_available(meminfo), *_left_in_groups(group or _own_group())]
    known = [size for size in found if size is not None]
    return min(known, default=None)


def free_disk_bytes(folder: Path) -> int:
    """Bytes that can be written into a folder, or into the nearest one above it that exists."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def allow_open_files(nodes: int) -> None:
    """Lets this process, and those that it starts, open as many files as the system allows, 65,536 at most.

    Args:
        nodes: number of nodes of the run, each of which may have connections to all others.

    Raises:
        ConfigError: the system allows fewer than a node of such a run needs.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if most > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if max(soft, most) < (needed := FILES + FILES_PER_NODE * nodes):
        raise ConfigError(
            f"a process may have {max(soft, most):,} open files here, and one of a run of {nodes:,} nodes needs "
            f"{needed:,}; nothing was started: raise the limit (ulimit -n {max(1024, needed)}), or take fewer workers"
        )


def _available(meminfo: Path) -> int | None:
    fields = _fields(meminfo)
    return 1024 * fields["MemAvailable:"] if "MemAvailable:" in fields else None


def _own_group() -> Path:
    """The folder of this process's control group (version 2)."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return CGROUPS
    return CGROUPS / next((line[3:].lstrip("/") for line in lines if line.startswith("0::")), "")


def _left_in_groups(group: Path) -> list[int]:
    """Bytes that each limit from a control group up to the root leaves. Cached files count as free."""
    left = []
    for folder in (group, *group.parents):
        try:
            limit = int((folder / "memory.max").read_text())
            used = int((folder / "memory.current").read_text())
        except (OSError, ValueError):  # none here, or "max"
            continue
        left.append(max(0, limit - used + _fields(folder / "memory.stat").get("inactive_file", 0)))
    return left


def _fields(path: Path) -> dict[str, int]:
    """Lines of the form "name number …"."""
    try:
        lines = [line.split() for line in path.read_text(encoding="utf-8").splitlines()]
    except OSError:
        return {}
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}
