"""The documentation does what it says: its Python blocks run, its command lines parse, quick ones run.

In README.md, CONTRIBUTING.md and docs/, a comment on the line before a fence says what becomes of its block:

    <!-- file: job.py -->                      written to this file; all blocks but those before it may use it
    <!-- not run: starts processes -->         compiled only

All other Python blocks of a page run one after the other, in one namespace, in an empty folder.
"""

from __future__ import annotations

import doctest
import inspect
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import gradstream as gs
from gradstream.cli import main

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(
    r"^(?:<!-- (?P<note>[^\n]*) -->\n)?```(?P<kind>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
JOBS = {"JOB.py", "job.py"}
QUICK = {"config show", "data info", "new", "plugins", "simulate"}
OTHER_COMMANDS = {
    "(umask",
    "bash",
    "cd",
    "docker",
    "sky",
    "eval",
    "export",
    "git",
    "kubectl",
    "make",
    "node",
    "pip",
    "pytest",
    "python",
    "ray",
    "sbatch",
    "scp",
    "ssh",
    "torchrun",
}


FRONT = (gs, gs.optim, gs.schedules, gs.sim)
"""Public modules whose classes all have an example."""
CLASSES = sorted(
    {
        one
        for module in FRONT
        for one in (getattr(module, name) for name in module.__all__)
        if inspect.isclass(one)
    },
    key=lambda one: one.__qualname__,
)


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


@pytest.mark.process  # as far as pages do
@pytest.mark.usefixtures("few_seeds")
@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in files_of(page):
        assert name not in files_of_others(page), f"{name}: another page has a file of this name"
    for name, text in files_of_others(page).items():
        Path(name).write_text(text)
    names: dict[str, object] = {"__name__": "page"}
    for block in blocks(page, "python"):
        # Blank lines before it make the lines of a traceback those of the page.
        code = compile("\n" * block.line + block.text, str(page), "exec", dont_inherit=True)
        what, _, about = block.note.partition(": ")
        if what == "file":
            Path(about).write_text(block.text)
        elif what != "not run":
            exec(code, names)


def command_lines(page: Path) -> list[list[str]]:
    """Lines of the page's console blocks, as words; what the reader sees after a prompt is typed."""
    texts = [line for block in blocks(page, "console") for line in block.text.splitlines()]
    words = [shlex.split(text.removeprefix("$ "), comments=True) for text in texts]
    return [line for line in words if line]


def files_of(*pages: Path) -> dict[str, str]:
    """What pages tell the reader to write, by file name."""
    found = [block for page in pages for block in blocks(page, "python") if block.note.startswith("file: ")]
    return {block.note.removeprefix("file: "): block.text for block in found}


def files_of_others(page: Path) -> dict[str, str]:
    """What the other pages tell the reader to write."""
    return files_of(*(other for other in PAGES if other != page))


def parsed(words: list[str]) -> str:
    """The name of the command of a line, "data get" for example. Raises for an option that there is not."""
    command: click.Command | None = main
    names: list[str] = []
    while isinstance(command, click.Group):
        rest = words[1 + len(names) :]
        assert rest, f"{shlex.join(words)}: which command of {' '.join(names)}?"
        names.append(rest[0])
        command = command.get_command(click.Context(command), rest[0])
    assert command is not None, shlex.join(words)
    command.make_context(shlex.join(words), words[1 + len(names) :])
    return " ".join(names)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_command_lines_parse(page: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for words in command_lines(page):
        if words[0] != "gradstream":
            assert words[0] in OTHER_COMMANDS, shlex.join(words)
            assert words[0] != "make" or words[1] in targets, shlex.join(words)
            continue
        parsed(words)
        # A job is a module, a file of the repository, or the reader's own.
        for job in (word for word in words[2:] if ".py" in word and "=" not in word):
            file = job.partition(":")[0]
            known = file in files_of(*PAGES) or file in JOBS or (ROOT / file).is_file()
            made = ["gradstream", "new", file.removesuffix(".py")]
            assert known or any(line[:3] == made for line in command_lines(page)), shlex.join(words)


@pytest.mark.process  # as far as pages do
@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_quick_command_lines_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = {f"{words[2]}.py" for words in command_lines(page) if words[:2] == ["gradstream", "new"]}
    for name, text in files_of(*PAGES).items():
        if name not in made:
            Path(name).write_text(text)
    for words in command_lines(page):
        if words[0] != "gradstream" or parsed(words) not in QUICK:
            continue
        if any((ROOT / word).is_file() for word in words):
            continue  # the repository's own examples take longer, and have tests of their own
        done = CliRunner().invoke(main, words[1:])
        assert done.exit_code == 0, f"{shlex.join(words)}\n{done.output}\n{done.exception!r}"


def test_a_command_line_that_is_wrong_is_noticed() -> None:
    with pytest.raises(click.NoSuchOption):
        parsed(["gradstream", "train", "job.py", "--strategi", "downpour"])
    with pytest.raises(AssertionError, match="which command of data"):
        parsed(["gradstream", "data"])
    with pytest.raises(AssertionError, match="trane"):
        parsed(["gradstream", "trane", "job.py"])


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_is_of_a_kind_that_is_looked_at(page: Path) -> None:
    text = page.read_text()
    kinds = [found["kind"] for found in BLOCK.finditer(text)]
    assert set(kinds) <= {"python", "console", "toml", "json"}
    assert len(re.findall(r"^ *(?:```|~~~)", text, re.MULTILINE)) == 2 * len(kinds)
    for block in blocks(page, "toml"):
        tomllib.loads(block.text)
    for block in blocks(page, "json"):
        json.loads(block.text)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_notes_are_of_the_two_kinds(page: Path) -> None:
    for block in blocks(page, "python"):
        assert re.fullmatch(r"|file: \w+\.py|not run: .+", block.note), f"line {block.line}: {block.note}"


@pytest.mark.sim
@pytest.mark.parametrize("public", CLASSES, ids=lambda one: one.__name__)
def test_each_public_class_has_an_example_that_runs(
    public: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    texts = [inspect.getdoc(one) or "" for one in (gs, public)]
    parser, runner = doctest.DocTestParser(), doctest.DocTestRunner()
    names: dict[str, object] = {}
    for text in texts:
        test = parser.get_doctest(text, names, public.__name__, None, None)
        assert test.examples, f"{public.__name__} has no example"
        assert runner.run(test, clear_globs=False).failed == 0
        names = test.globs
