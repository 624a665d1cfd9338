"""Lists the slow tests, from how long all tests took: `make test-fast` leaves them out, `make test` the long ones.

    pytest --junitxml all.xml
    python tools/slow_tests.py all.xml > tests/slow.txt

All tests that start processes are printed. Of the others the quickest stay, as many as fit into the budget. The seconds
are those that all cases of a test took together, and their number comes next: `make test` begins with the files of slow
tests.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict
from pathlib import Path


def seconds_of(junit: Path) -> dict[str, tuple[float, int]]:
    """(seconds of all cases, number of cases) by test: "tests/memory/test_memory.py::test_loans"."""
    seconds, cases = defaultdict[str, float](float), Counter[str]()
    for case in ElementTree.parse(junit).iter("testcase"):
        file = case.attrib["classname"].replace(".", "/")
        name, _, _ = case.attrib["name"].partition("[")
        seconds[f"{file}.py::{name}"] += float(case.attrib["time"])
        cases[f"{file}.py::{name}"] += 1
    return {name: (seconds[name], cases[name]) for name in seconds}


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
    parser.add_argument("--budget", type=float, default=80.0, help="seconds, of one core (default: 80)")
    arguments = parser.parse_args()
    found: dict[str, tuple[float, int]] = {}
    for junit in arguments.junit:
        for name, longer in seconds_of(junit).items():
            found[name] = max(longer, found.get(name, (0.0, 0)))
    left, quick = arguments.budget, without_processes()
    for name, (seconds, cases) in sorted(found.items(), key=lambda item: (item[1], item[0])):
        left -= seconds if name in quick else 0.0
        if left < 0 or name not in quick:
            print(f"{seconds:6.1f} {cases:3d} {name}")


if __name__ == "__main__":
    main()
