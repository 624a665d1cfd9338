"""Chooses the tests that `make test-fast` leaves out, from how long all tests took.

    pytest --junitxml all.xml
    python tools/slow_tests.py all.xml > tests/slow.txt

The quickest tests stay, as many as fit into the budget; the others are printed, with the seconds that all
cases of each took together. Tests that start processes are left out anyway.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from pathlib import Path


def seconds_of(junit: Path) -> dict[str, float]:
    """Seconds by test, its cases together: "tests/memory/test_memory.py::test_loans"."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for case in ElementTree.parse(junit).iter("testcase"):
        file = case.attrib["classname"].replace(".", "/")
        name, _, _ = case.attrib["name"].partition("[")
        seconds[f"{file}.py::{name}"] += float(case.attrib["time"])
    return seconds


def without_processes() -> set[str]:
    """Tests that are marked `unit` or `sim`."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "not process"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return {line.partition("[")[0] for line in done.stdout.splitlines() if "::" in line}


def main() -> None:
    """Prints the list."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("junit", type=Path, nargs="+", help="junit XML of runs; the longest time counts")
    parser.add_argument("--budget", type=float, default=100.0, help="seconds, of one core (default: 100)")
    arguments = parser.parse_args()
    seconds: dict[str, float] = {}
    for junit in arguments.junit:
        for name, longer in seconds_of(junit).items():
            seconds[name] = max(longer, seconds.get(name, 0.0))
    left = arguments.budget
    for name in sorted(without_processes() & seconds.keys(), key=lambda name: (seconds[name], name)):
        left -= seconds[name]
        if left < 0:
            print(f"{seconds[name]:6.1f} {name}")


if __name__ == "__main__":
    main()
