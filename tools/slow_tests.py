"""Lists the slow tests, from how long all tests took: `make test-fast` leaves them out.

    pytest --junitxml all.xml
    python tools/slow_tests.py all.xml > tests/slow.txt

All tests that start processes are printed. Of the others the quickest stay, as many as fit into the budget. The seconds
are those that all cases of a test took together: `make test` begins with the files of slow tests.
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
    parser.add_argument("--budget", type=float, default=80.0, help="seconds, of one core (default: 80)")
    arguments = parser.parse_args()
    seconds: dict[str, float] = {}
    for junit in arguments.junit:
        for name, longer in seconds_of(junit).items():
            seconds[name] = max(longer, seconds.get(name, 0.0))
    left, quick = arguments.budget, without_processes()
    for name in sorted(seconds, key=lambda name: (seconds[name], name)):
        left -= seconds[name] if name in quick else 0.0
        if left < 0 or name not in quick:
            print(f"{seconds[name]:6.1f} {name}")


if __name__ == "__main__":
    main()
