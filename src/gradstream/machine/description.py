"""Describes this machine: processor, memory, versions, addresses."""

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

from gradstream.machine.resources import free_memory_bytes

SIOCGIFADDR = 0x8915
"""Linux: the request for the IPv4 address of a network interface."""

PACKAGES = ("gradstream", "torch", "numpy", "grpcio", "protobuf", "safetensors")


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def interfaces() -> dict[str, str]:
    """IPv4 addresses of this machine's network interfaces, by name; interfaces without an address are skipped."""
    addresses = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue
            addresses[name] = socket.inet_ntoa(answer[20:24])
    return addresses


def versions() -> dict[str, str]:
    """Versions of python and of the packages that results depend on."""
    known = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            known[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            known[package] = "unknown"
    return known


def git_commit(folder: Path) -> str | None:
    """The commit checked out in `folder`, with "+" if files differ; None outside of git."""
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


def machine_facts() -> dict[str, str]:
    """Describes this machine, to find out why two machines do not work together."""
    known = versions()
    return {
        "host": socket.gethostname(),
        "cores": str(num_cores()),
        "free memory": f"{(free_memory_bytes() or 0) / 1e9:.1f} GB",
        **{name: known[name] for name in ("python", "gradstream", "torch", "grpcio", "protobuf")},
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
