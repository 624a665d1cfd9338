"""Every strategy is in the table of strategies, and every page of one has the same headings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gradstream.job.registry import STRATEGIES

HEADINGS = [
    "Formula",
    "Cost",
    "When to choose it",
    "When it fails",
    "Example",
    "Options",
    "Deaths and returns",
    "Measured",
    "Source",
]
COMPARISONS = {"index"}
PAGES = sorted((Path(__file__).resolve().parents[2] / "docs" / "strategies").glob("*.md"))


def index() -> str:
    return next(page for page in PAGES if page.stem == "index").read_text()


def told_by_name(page: str) -> dict[str, list[str]]:
    """What the rows of a page's table of strategies say, by the names in their first cells."""
    table = page.split("| `strategy=`")[1].split("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    return {name: row[1:] for row in rows for name in re.findall(r"`([\w-]+)`", row[0])}


def test_every_name_is_in_the_table() -> None:
    assert told_by_name(index()).keys() == set(STRATEGIES)


def test_the_readme_says_of_each_what_the_table_says(repository: Path) -> None:
    in_a_line = 1
    told = {name: cells[in_a_line:] for name, cells in told_by_name(index()).items()}
    assert told_by_name((repository / "README.md").read_text()) == told


def test_pages_that_list_the_strategies_have_auto(repository: Path) -> None:
    for name in ("README.md", "docs/choose.md", "docs/strategies/index.md"):
        told = [line for line in (repository / name).read_text().splitlines() if "`auto`" in line]
        assert any("measures the links" in line and "`local-sgd`" in line for line in told), name


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.stem not in COMPARISONS], ids=lambda page: page.stem
)
def test_pages_have_the_same_headings(page: Path) -> None:
    assert re.findall(r"^## (.+)$", page.read_text(), re.MULTILINE) == HEADINGS
    assert f"({page.name})" in index()
