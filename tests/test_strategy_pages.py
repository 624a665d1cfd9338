"""Every strategy is in the table of strategies, and every page of one has the same headings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gradstream.registry import STRATEGIES

HEADINGS = [
    "Formula",
    "What theory promises",
    "Cost",
    "When to choose it",
    "When it fails",
    "Measured",
    "Source",
]
COMPARISONS = {"index", "study", "distbelief"}
PAGES = sorted((Path(__file__).resolve().parents[1] / "docs" / "strategies").glob("*.md"))


def index() -> str:
    return next(page for page in PAGES if page.stem == "index").read_text()


def test_every_name_is_in_the_table() -> None:
    table = [line for line in index().splitlines() if line.startswith("| ")]
    first_cells = [line.split("|")[1] for line in table[1:]]
    named = {name for cell in first_cells for name in re.findall(r"`([\w-]+)`", cell)}
    assert named == set(STRATEGIES)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.stem not in COMPARISONS], ids=lambda page: page.stem
)
def test_pages_have_the_same_headings(page: Path) -> None:
    assert re.findall(r"^## (.+)$", page.read_text(), re.MULTILINE) == HEADINGS
    assert f"({page.name})" in index()
