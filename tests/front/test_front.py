"""Names: those of the public API, of classes and packages, and how many words the glossary needs."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

import gradstream

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "gradstream"
FILES = sorted(path for path in SOURCE.rglob("*.py") if "_pb2" not in path.name)
MAX_PUBLIC_NAMES = 30
MAX_GLOSSARY_ENTRIES = 45
MAX_FILES_OF_A_GRADIENT = 20
MAX_FILES_TO_READ = 10


def used_twice(sources: dict[str, str]) -> list[str]:
    """Public class names that several modules define, each with these modules."""
    modules_of: dict[str, list[str]] = defaultdict(list)
    for module, text in sources.items():
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                modules_of[node.name].append(module)
    return [f"{name}: {', '.join(modules)}" for name, modules in modules_of.items() if len(modules) > 1]


def packages_of_design() -> Iterator[str]:
    """Names in the first column of the table of packages, row by row."""
    table = (ROOT / "docs" / "design.md").read_text().partition("\n| package |")[2].partition("\n\n")[0]
    for row in table.splitlines()[2:]:
        yield from re.findall(r"`(\w+)`", row.split("|")[1])


def test_no_public_class_name_is_used_twice() -> None:
    assert used_twice({path.relative_to(SOURCE).as_posix(): path.read_text() for path in FILES}) == []


def test_a_class_name_that_is_used_twice_is_found() -> None:
    sources = {"a.py": "class A: ...\nclass _B: ...\n", "b.py": "class A: ...\nclass _B: ...\n"}
    assert used_twice(sources) == ["A: a.py, b.py"]


def test_at_most_30_names_are_public() -> None:
    assert len(set(gradstream.__all__)) <= MAX_PUBLIC_NAMES


def test_no_module_is_hidden_by_a_public_function() -> None:
    modules = {path.stem for path in SOURCE.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert modules.isdisjoint(gradstream.__all__)


def test_the_table_of_packages_has_the_order_of_the_layers() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = (contract["layers"] for contract in contracts if contract["id"] == "layers")
    names = [name.removeprefix("gradstream.") for layer in layers for name in layer.split(" | ")]
    assert list(packages_of_design()) == [name for name in names if name != "__main__"]


def section_of_design(heading: str) -> str:
    return (ROOT / "docs" / "design.md").read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize(
    ("walk", "most"), [("a gradient", MAX_FILES_OF_A_GRADIENT), ("a sum", 13), ("a call", 12)]
)
def test_the_walks_enter_few_files_and_each_once(walk: str, most: int) -> None:
    rows = re.findall(
        r"^\| (\d+) \| `([\w/]+\.py)` \|", section_of_design(f"The way of {walk}"), re.MULTILINE
    )
    assert [int(number) for number, _ in rows] == list(range(1, len(rows) + 1))
    assert 0 < len({file for _, file in rows}) == len(rows) <= most
    assert all((SOURCE / file).is_file() for _, file in rows)


def test_few_files_are_to_be_read_first() -> None:
    files = re.findall(r"^\d+\. `([\w/]+\.py)`", section_of_design("Reading order"), re.MULTILINE)
    assert 0 < len(files) <= MAX_FILES_TO_READ
    assert all((SOURCE / file).is_file() for file in files)


def test_the_glossary_is_short_and_sorted() -> None:
    rows = (ROOT / "docs" / "glossary.md").read_text().partition("|---|---|\n")[2].splitlines()
    words = [row.split("|")[1].strip() for row in rows]
    assert 0 < len(words) <= MAX_GLOSSARY_ENTRIES
    assert words == sorted(words, key=str.casefold)


def test_the_reference_has_all_public_modules() -> None:
    modules = {f"gradstream.{name}" for name in gradstream._FACES.values()}
    listed = re.search(
        r"PUBLIC_MODULES := \$\(addprefix gradstream\.,([^)]*)\)", (ROOT / "Makefile").read_text()
    )
    assert listed is not None
    assert modules <= {f"gradstream.{name}" for name in listed[1].replace("\\", " ").split()}
