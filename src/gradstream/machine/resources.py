"""Free memory and disk space of this machine."""

from __future__ import annotations

import resource
import shutil
from pathlib import Path

from gradstream.errors import ConfigError
from gradstream.machine.control_group import fields_of, left_bytes, own_groups

MOST_FILES, FILES, FILES_PER_NODE = 1 << 16, 48, 4
"""Open files: the most that are asked for, and what a node needs: measured over shm with 6 workers it has 20."""


def free_memory_bytes(meminfo: Path = Path("/proc/meminfo"), group: Path | None = None) -> int | None:
    """Bytes of memory that new processes can use without swapping; None if the system does not tell.

    The least of the machine's available memory and the rest of each limit of this process's control groups.
    """
    found = [_available(meminfo), *left_bytes(own_groups() if group is None else [group])]
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
    fields = fields_of(meminfo)
    return 1024 * fields["MemAvailable:"] if "MemAvailable:" in fields else None
