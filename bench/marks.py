"""Tables, and the places between two marks on a page where they stand."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def filled(text: str, places: Mapping[str, str]) -> str:
    """The text of a page, with what stands between `<!-- begin: name -->` and `<!-- end: name -->` replaced.

    Raises:
        LookupError: the page has no such place, or has it twice.
    """
    for name, content in places.items():
        mark = re.compile(rf"(<!-- begin: {name} -->\n).*?(<!-- end: {name} -->)", re.DOTALL)
        text, found = mark.subn(lambda marks, content=content: f"{marks[1]}{content}\n{marks[2]}", text)
        if found != 1:
            raise LookupError(f"the page has {found} places {name!r}, expected one between two marks")
    return text


def put(page: Path, places: Mapping[str, str]) -> bool:
    """Fills the places of a page; whether that changed it. Raises LookupError as `filled` does."""
    before = page.read_text()
    after = filled(before, places)
    page.write_text(after)
    return after != before
