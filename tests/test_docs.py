"""The documentation does what it says: its Python blocks run, its command lines parse.

In README.md and docs/*.md, a comment on the line before a fence says what becomes of its block:

    <!-- file: job.py -->                      written to this file; blocks behind it may use it
    <!-- not run: starts processes -->         compiled only

All other Python blocks of a page run one after the other, in one namespace, in an empty folder.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import pytest

from gradstream.cli import main

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(
    r"^(?:<!-- (?P<note>[^\n]*) -->\n)?```(?P<kind>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
JOBS = {"JOB.py", "job.py"}


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the comment before it, where it begins, and what it says."""

    kind: str
    note: str
    line: int
    text: str


def blocks(page: Path, kind: str) -> Iterator[Block]:
    text = page.read_text()
    for found in BLOCK.finditer(text):
        if found["kind"] == kind:
            line = text[: found.start("text")].count("\n")
            yield Block(kind, found["note"] or "", line, found["text"])


def name_of(page: Path) -> str:
    return page.name


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "page"}
    for block in blocks(page, "python"):
        # Blank lines before it make the lines of a traceback those of the page.
        code = compile("\n" * block.line + block.text, str(page), "exec", dont_inherit=True)
        what, _, about = block.note.partition(": ")
        if what == "file":
            Path(about).write_text(block.text)
        elif what != "not run":
            exec(code, names)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_command_lines_parse(page: Path) -> None:
    lines = [line for block in blocks(page, "console") for line in block.text.splitlines()]
    for line in lines:
        words = shlex.split(line, comments=True)
        if words[:1] != ["gradstream"]:
            continue
        command: click.Command | None = main
        rest = words[1:]
        while isinstance(command, click.Group):
            command, rest = command.get_command(click.Context(command), rest[0]), rest[1:]
        assert command is not None, line
        command.make_context(line, rest)
        # A job is a module, a file of the repository, or the reader's own.
        for job in (word for word in words[2:] if ".py" in word and "=" not in word):
            file = job.partition(":")[0]
            written = f"<!-- file: {file} -->" in page.read_text()
            made = f"gradstream new {file.removesuffix('.py')} " in "\n".join(lines)
            assert written or made or file in JOBS or (ROOT / file).is_file(), line


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_notes_are_of_the_two_kinds(page: Path) -> None:
    for block in blocks(page, "python"):
        assert re.fullmatch(r"|file: \w+\.py|not run: .+", block.note), f"line {block.line}: {block.note}"
