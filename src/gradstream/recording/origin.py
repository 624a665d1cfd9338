"""The packages, processor and threads that computed a run: besides the job, the bits of its result depend on them."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib import metadata
from typing import Any

import torch

PACKAGES = ("gradstream", "torch", "numpy")


def origin_of(node: str, job: str) -> dict[str, Any]:
    """The header of a node's recording: its name, its job, and the software and processor that it computed with."""
    return {
        "node": node,
        "job": job,
        "arithmetic": {
            "python": platform.python_version(),
            **{package: _version(package) for package in PACKAGES},
            "instructions": torch.backends.cpu.get_cpu_capability(),
        },
        "threads": torch.get_num_threads(),
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The differences between two such sets of versions, such as "torch 2.12.0, here 2.13.0"."""
    return [
        f"{name} {then.get(name, 'unknown')}, here {now.get(name, 'unknown')}"
        for name in {**then, **now}
        if then.get(name) != now.get(name)
    ]
