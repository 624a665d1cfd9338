"""Describes this machine, and sets up the environment of the nodes on it."""

from __future__ import annotations

import fcntl
import os
import platform
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

SWITCH_INTERVAL_S = 2e-4
"""Seconds for which a computing thread keeps Python's GIL while the event loop waits for it.

With the default of 5 ms, nearly every hop of a message would take 5 ms longer.
"""

SIOCGIFADDR = 0x8915
"""Linux: the request for the IPv4 address of a network interface."""

PACKAGES = ("gradstream", "torch", "numpy", "grpcio", "protobuf", "safetensors")

# Vectors of hundreds of MB are allocated and freed at every step. If they went back to the kernel each time,
# it would zero their pages again: at 75 M parameters that costs the plain loop 13 %.
KEEP_PAGES = {
    # A thread's own arena keeps no more than 64 MiB: on the arithmetic thread the pages of a step would be
    # taken from the system anew each time (a convolutional network: 0.42 s a step instead of 0.26 s).
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 40),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_TOP_PAD_": str(64 << 20),
}

# Arithmetic threads wait for each other by spinning, which is best where each has a core. A shard and a worker
# together have more threads than cores: one then spins on the core that another needs (a worker and a shard
# on two cores, over TCP: 460 samples/s spinning, 830 yielding; a worker alone: 3,400 and 2,750).
YIELD = {"OMP_WAIT_POLICY": "PASSIVE"}

# gRPC's own preparations for a fork end the processes that a data loader forks from a node. They use no gRPC.
NO_FORK_HANDLERS = {"GRPC_ENABLE_FORK_SUPPORT": "0"}


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def interfaces() -> dict[str, str]:
    """IPv4 addresses of this machine's network interfaces, by name; interfaces without one are left out."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


def node_environment(workers: int, *, shards: bool = False) -> dict[str, str]:
    """Variables that must be set before a node loads numpy, torch or gRPC.

    Each worker gets an equal part of the cores for arithmetic threads, at least one. Variables that the user
    has set are kept.

    Args:
        workers: number of workers that share the cores of this machine.
        shards: whether shards of the server share them too.
    """
    threads = str(max(1, num_cores() // max(1, workers)))
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
    wanted = dict.fromkeys(names, threads) | KEEP_PAGES | NO_FORK_HANDLERS | (YIELD if shards else {})
    return {name: os.environ.get(name, value) for name, value in wanted.items()}


def versions() -> dict[str, str]:
    """Versions of python and of the packages that results depend on."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "unknown"
    return found


def git_commit(folder: Path) -> str | None:
    """The commit that `folder` has checked out, with "+" where files differ; None outside of git."""
    commit = _git(folder, "rev-parse", "HEAD")
    if not commit:
        return None
    return commit + ("+" if _git(folder, "status", "--porcelain", "--untracked-files=no") else "")


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            check=True,
            timeout=5,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def describe_machine(environment: Mapping[str, str]) -> dict[str, Any]:
    """Versions, processor, memory, and the environment of the nodes: the figures of a run depend on them."""
    return {
        "versions": versions(),
        "argv": sys.argv,
        "machine": {
            "system": f"{platform.system()} {platform.machine()}",
            "processor": _processor(),
            "cores": num_cores(),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        },
        "node_environment": dict(environment),
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
