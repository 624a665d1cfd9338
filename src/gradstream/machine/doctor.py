"""`gradstream doctor` without an address: checks whether this machine can train."""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gradstream._version import __version__
from gradstream.machine.description import interfaces, machine_facts
from gradstream.machine.resources import free_memory_bytes

State = Literal["ok", "warning", "failed"]

MIN_MEMORY_BYTES = 1 << 30
MIN_DISK_BYTES = 1 << 30
MIN_FILES = 256
PROBE_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class DoctorResult:
    """The result of one check.

    Args:
        what: the thing checked: "memory", "TLS", ...
        text: its state; if the check fails, also the remedy.
        state: the outcome.
    """

    what: str
    text: str
    state: State = "ok"


def look_here(folder: Path) -> Iterator[DoctorResult]:
    """Checks this machine alone: versions, processor, memory, disk, limits, addresses.

    Args:
        folder: folder for runs.
    """
    facts = machine_facts()
    yield DoctorResult("machine", f"{facts.pop('host')}, {facts.pop('cores')} cores")
    free = facts.pop("free memory")
    yield _all_installed(facts)
    yield _enough("memory", free_memory_bytes() or 0, MIN_MEMORY_BYTES, f"{free} free")
    yield from _look_at_disk(folder)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = soft != resource.RLIM_INFINITY and soft < MIN_FILES
    hint = f"; expected at least {MIN_FILES}: ulimit -n 1024" if few else ""
    yield DoctorResult("open files", f"at most {soft} a process{hint}", "failed" if few else "ok")
    addresses = [f"{ip} ({name})" for name, ip in interfaces().items() if not ip.startswith("127.")]
    yield DoctorResult(
        "addresses", ", ".join(addresses) or "only loopback: no other machine reaches this one"
    )


def _all_installed(versions: Mapping[str, str]) -> DoctorResult:
    """Checks that the packages that every node needs are installed. They are not loaded: that takes a second."""
    text = ", ".join(f"{name} {version}" for name, version in versions.items())
    missing = [
        name for name, version in versions.items() if version == "unknown" and name != "gradstream"
    ]  # it may come from a folder
    if not missing:
        return DoctorResult("versions", text)
    remedy = f"python -m pip install gradstream=={__version__}"
    return DoctorResult("versions", f"{text}: not installed: {', '.join(missing)}; {remedy}", "failed")


def _look_at_disk(folder: Path) -> Iterator[DoctorResult]:
    """Checks free space, and the speed of writing a file and synchronizing it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free_bytes = shutil.disk_usage(folder).free
        yield _enough("disk", free_bytes, MIN_DISK_BYTES, f"{free_bytes / 1e9:.1f} GB free at {folder}")
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-") as file:
            begun = time.monotonic()
            file.write(os.urandom(PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
            speed = megabytes_s(PROBE_BYTES / (time.monotonic() - begun))
            yield DoctorResult("disk speed", f"{speed} written and synced")
    except OSError as error:
        yield DoctorResult("disk", f"cannot write at {folder}: {error.strerror}", "failed")


def _enough(what: str, free: int, least: int, text: str) -> DoctorResult:
    if free >= least:
        return DoctorResult(what, text)
    return DoctorResult(what, f"{text}: a node of a small model takes about {least / 1e9:.0f} GB", "warning")


def megabytes_s(bytes_s: float) -> str:
    """A speed in MB/s."""
    return f"{bytes_s / 1e6:,.0f} MB/s"
