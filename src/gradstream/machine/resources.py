"""Free memory and disk space of this machine."""

from __future__ import annotations

import resource
import shutil
from dataclasses import dataclass
from pathlib import Path

from gradstream.errors import ConfigError

# ---- control group -----------------------------------------------------------------------
# Memory in this process's control groups (versions 1 and 2): their limits, and kills by Linux in them.

CGROUPS = Path("/sys/fs/cgroup")

NO_LIMIT_BYTES = 1 << 60
"""Version 1 says "no limit" by a number near 2⁶³."""


@dataclass(frozen=True, slots=True)
class _Files:
    """Names of the files of a version, and of the field of memory.stat with cached files that can be given up."""

    limit: str
    used: str
    kills: str
    cached: str


_VERSION_2 = _Files("memory.max", "memory.current", "memory.events", "inactive_file")
_VERSION_1 = _Files(
    "memory.limit_in_bytes", "memory.usage_in_bytes", "memory.oom_control", "total_inactive_file"
)


def own_groups(listing: Path = Path("/proc/self/cgroup"), root: Path = CGROUPS) -> list[Path]:
    """Folders of this process's control groups that may limit memory, one for each version in use.

    A container may see the name that its group has outside, and a folder that does not exist: its parents then count.
    """
    try:
        lines = [line.split(":", 2) for line in listing.read_text(encoding="utf-8").splitlines()]
    except OSError:
        return [root]
    folders = []
    for number, controllers, path in (line for line in lines if len(line) == 3):
        if number == "0":
            folders.append(root / path.lstrip("/"))
        elif "memory" in controllers.split(","):
            folders.append(root / "memory" / path.lstrip("/"))
    return folders or [root]


def left_bytes(groups: list[Path]) -> list[int]:
    """Bytes that each limit of some control groups, and of all above them, leaves. Cached files count as free."""
    return [
        max(0, limit - used + fields_of(folder / "memory.stat").get(files.cached, 0))
        for folder, files, limit in _limits(groups)
        if (used := _number(folder / files.used)) is not None
    ]


def limit_bytes(groups: list[Path]) -> int | None:
    """The least limit of memory of some control groups, and of all above them; None without one."""
    return min((limit for _, _, limit in _limits(groups)), default=None)


class MemoryKills:
    """Tells whether Linux has killed a process of this process's control groups because memory ran out.

    The count of kills does not say whom they hit, so a count that has grown when a child was killed by SIGKILL
    is attributed to that child.

    Args:
        groups: folders of the control groups; None takes those of this process.
    """

    def __init__(self, groups: list[Path] | None = None) -> None:
        self._groups = own_groups() if groups is None else groups
        self._known = self._count()

    def cause(self) -> str:
        """Why a process that has just ended by SIGKILL was killed, in words; "" if no control group counts it."""
        if self._count() <= self._known:
            self._known = self._count()
            return ""
        self._known += 1  # two may have been killed since the last check
        limit = limit_bytes(self._groups)
        if limit is None:
            return "Linux killed it because the memory of this machine ran out"
        return (
            f"Linux killed it for memory: its control group (container, job or pod) may have {limit / 2**30:,.2f} GiB "
            "in all: raise that limit, or take fewer workers in it, or smaller minibatches"
        )

    def _count(self) -> int:
        return sum(map(_kills, self._groups))


def _kills(group: Path) -> int:
    """The count of the nearest group that has one."""
    for folder in (group, *group.parents):
        for files in (_VERSION_2, _VERSION_1):
            count = fields_of(folder / files.kills).get("oom_kill")
            if count is not None:
                return count
    return 0


def _limits(groups: list[Path]) -> list[tuple[Path, _Files, int]]:
    folders = {folder for group in groups for folder in (group, *group.parents)}
    return [
        (folder, files, limit)
        for folder in folders
        for files in (_VERSION_2, _VERSION_1)
        if (limit := _number(folder / files.limit)) is not None and limit < NO_LIMIT_BYTES
    ]


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # none here, or "max"
        return None


def fields_of(path: Path) -> dict[str, int]:
    """Lines of the form "name number …" of a file; {} if there is none."""
    try:
        lines = [line.split() for line in path.read_text(encoding="utf-8").splitlines()]
    except OSError:
        return {}
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}


# ---- resources ---------------------------------------------------------------------------

MOST_FILES, FILES, FILES_PER_NODE = 1 << 16, 48, 4
"""Open files: the most that are asked for, and what a node needs: measured over shm with 6 workers it has 20."""


def free_memory_bytes(meminfo: Path = Path("/proc/meminfo"), group: Path | None = None) -> int | None:
    """Bytes of memory that new processes can use without swapping; None if the system does not report it.

    The least of the machine's available memory and the rest of each limit of this process's control groups.
    """
    limits_bytes = [_available(meminfo), *left_bytes(own_groups() if group is None else [group])]
    known = [size for size in limits_bytes if size is not None]
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
