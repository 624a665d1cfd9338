"""What benchmarks have in common: how they read their options, and what a record says of its origin."""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gradstream.machine.description import describe_machine, git_commit

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"


def command_line(about: str | None) -> argparse.ArgumentParser:
    """A parser of options, whose help says what the benchmark is about, in the lines of its docstring."""
    return argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)


def now() -> str:
    """The date and the time of a record, in UTC."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def origin(environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """When, from which commit and on which machine a record was made.

    Args:
        environment: of the nodes. With one, the record also names the versions of packages.
    """
    machine = describe_machine(environment or {})
    return {
        "date": now(),
        "commit": git_commit(ROOT),
        "machine": machine["machine"] if environment is None else machine,
    }
