"""The table of docs/day-one.md: what it names as evidence exists."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import click
import pytest

import gradstream
from gradstream.cli import main

ROOT = Path(__file__).resolve().parents[2]
ROW = re.compile(r"^\| (\d+) \| (.+?) \| (yes|partly|not yet) \| (.+?) \|$", re.MULTILINE)
ROWS = ROW.findall((ROOT / "docs/day-one.md").read_text())
FILE = re.compile(r"((?:tests|docs|examples|bench)/[\w./]+|README\.md|CITATION\.cff)(?:::(\w+))?")


def spans(evidence: str) -> list[str]:
    return re.findall(r"`([^`]+)`", evidence)


def check_file(path: str, test: str) -> None:
    """The file is there, and the test in it."""
    assert (ROOT / path).is_file(), f"there is no {path}"
    if test:
        tree = ast.parse((ROOT / path).read_text())
        names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert test in names, f"{path} has no {test}"


def check_command(words: list[str]) -> None:
    """The command is there, with the options that are named; RUN, JOB and the like are the reader's."""
    command: click.Command | None = main
    rest = words[1:]
    while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
        command, rest = command.get_command(click.Context(command), rest[0]), rest[1:]
    assert command is not None, f"there is no command {shlex.join(words)}"
    with click.Context(command, help_option_names=["-h", "--help"]) as context:
        known = {option for parameter in command.get_params(context) for option in parameter.opts}
    for word in rest:
        assert not word.startswith("-") or word in known, f"{shlex.join(words)}: no option {word}"


def check_name(dotted: str) -> None:
    """`gs.Run.evaluate` is there."""
    found: object = gradstream
    for part in dotted.split(".")[1:]:
        assert hasattr(found, part) or part in getattr(found, "__dataclass_fields__", {}), dotted
        found = getattr(found, part, None)


def check_span(span: str) -> bool:
    """Whether a span is evidence that can be looked at; fails where it is none."""
    if file := FILE.fullmatch(span):
        check_file(file[1], file[2] or "")
    elif span.startswith("gradstream "):
        check_command(shlex.split(span))
    elif name := re.match(r"gs(\.\w+)+", span):
        check_name(name[0])
    else:
        return False
    return True


def test_there_are_25_rows_and_18_are_kept() -> None:
    assert [int(number) for number, *_ in ROWS] == list(range(1, 26))
    kept = sum(state == "yes" for _, _, state, _ in ROWS)
    assert kept >= 18
    text = (ROOT / "docs/day-one.md").read_text()
    assert f"**{kept} of 25**" in text


@pytest.mark.parametrize("row", ROWS, ids=[f"row-{row[0]}" for row in ROWS])
def test_the_evidence_exists(row: tuple[str, str, str, str]) -> None:
    number, _, state, evidence = row
    looked_at = [span for span in spans(evidence) if check_span(span)]
    if state == "yes":
        assert any(span.startswith("tests/") for span in looked_at), f"row {number} names no test"
    if state != "yes":
        assert "Missing:" in evidence, f"row {number} does not say what is missing"


@pytest.mark.parametrize(
    "span",
    [
        "tests/test_none.py",
        "tests/front/test_day_one.py::test_none",
        "gradstream trane",
        "gradstream train --no-such",
        "gs.no_such",
    ],
)
def test_what_is_not_there_is_noticed(span: str) -> None:
    with pytest.raises(AssertionError):
        check_span(span)
