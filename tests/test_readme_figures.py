"""What README says was measured is what the records of the benchmark say."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

RESULTS = "bench/results/caltech101-*.json"


def cells(readme: str, column: str) -> Iterator[str]:
    """What stands under this heading, in every table that has it."""
    for table in re.findall(r"(?:^\|.*\n)+", readme, re.MULTILINE):
        rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in table.splitlines(True)]
        if column in rows[0]:
            place = rows[0].index(column)
            yield from (row[place] for row in rows[2:])


def recorded(repository: Path, field: str) -> set[float]:
    rows = [json.loads(path.read_text())["rows"].values() for path in repository.glob(RESULTS)]
    return {row[field] for group in rows for row in group if field in row}


def test_rates_and_accuracies_are_the_recorded_ones(repository: Path) -> None:
    readme = (repository / "README.md").read_text()
    rates = {f"{rate:,.0f}" for rate in recorded(repository, "samples_per_s")}
    accuracies = {f"{100 * accuracy:.1f}" for accuracy in recorded(repository, "accuracy")}
    said = [number for cell in cells(readme, "samples/s") for number in re.findall(r"\d[\d,]*", cell)]
    assert said, "README has no column samples/s"
    assert set(said) <= rates
    said = [number for cell in cells(readme, "test accuracy") for number in re.findall(r"\d[\d.]*", cell)]
    assert set(said) <= accuracies


def test_where_and_when_is_said(repository: Path) -> None:
    readme = (repository / "README.md").read_text()
    record = json.loads((repository / "bench/results/caltech101-large.json").read_text())
    assert f"**{record['machine']['machine']['cores']} cores**" in readme
    assert record["date"][:10] in readme
