"""What import-linter does not see: cycles of modules, and names of modules in strings."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from functools import cache

import pytest

from source_files import FILES, SOURCE, fail_with, module_name

ROOT = SOURCE.name
NAME = re.compile(rf"({ROOT}(?:\.\w+)*)(:\w+)?")
CODE = re.compile(rf"^\s*(?:from|import)\s+({ROOT}(?:\.\w+)*)", re.MULTILINE)
BEGUN = re.compile(rf"{ROOT}\.(\w+\.)*")

Sources = Mapping[str, str]


@cache
def sources() -> Sources:
    return {module_name(path): path.read_text() for path in FILES}


@cache
def parsed(text: str) -> ast.Module:
    return ast.parse(text)


@cache
def layers() -> Mapping[str, int]:
    """The height of each part of the package, by the contract "layers"; the package itself is the highest."""
    text = (SOURCE.parents[1] / "pyproject.toml").read_text()
    (contract,) = tomllib.loads(text)["tool"]["importlinter"]["contracts"]
    rows = [[name.strip() for name in row.split("|")] for row in contract["layers"]]
    return {ROOT: len(rows)} | {name: len(rows) - at for at, row in enumerate(rows, 1) for name in row}


def height_of(module: str) -> int:
    return layers()[".".join(module.split(".")[:2])]


def imported(tree: ast.AST, modules: Iterable[str]) -> Iterator[str]:
    """The modules that a file imports anywhere: in functions and under TYPE_CHECKING too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for name in (f"{node.module}.{alias.name}" for alias in node.names):
                yield name if name in modules else node.module


def named(tree: ast.AST, modules: Iterable[str]) -> Iterator[tuple[int, str]]:
    """The line and the module, for each string that is the name of a module or code that imports one.

    A name that an f-string begins, and that something else ends, counts as the package that it begins with.
    """
    texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
    pieces = {
        id(node.values[0]) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) and node.values
    }
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Constant) and isinstance(node.value, str)) or id(node) in texts:
            continue
        if id(node) in pieces and BEGUN.fullmatch(node.value):
            yield node.lineno, node.value.removesuffix(".")
        whole = NAME.fullmatch(node.value)
        for name in [whole[1]] if whole else CODE.findall(node.value):
            while name not in modules:
                name = name.rpartition(".")[0]
            if name != ROOT or (whole and whole[2]):
                yield node.lineno, name


def graph_of(files: Sources) -> dict[str, set[str]]:
    """The modules that each module imports, and the packages that are imported with them."""
    graph: dict[str, set[str]] = {}
    for module, text in files.items():
        found = set(imported(parsed(text), files))
        parents = {name.rpartition(".")[0] for name in found}
        outside = {parent for parent in parents if not f"{module}.".startswith(f"{parent}.")}
        graph[module] = (found | outside) & files.keys() - {module}
    return graph


def cycle_faults(files: Sources) -> Iterator[str]:
    """A cycle of modules, if there is one."""
    left = graph_of(files)
    while free := [module for module, found in left.items() if not found & left.keys()]:
        for module in free:
            del left[module]
    if not left:
        return
    way = [min(left)]
    while way[-1] not in way[:-1]:
        way.append(min(left[way[-1]] & left.keys()))
    yield " -> ".join(way[way.index(way[-1]) :])


REGISTRIES = {("gradstream._train", "gradstream.ext.ray.engine")}
"""(module, member) of registries by which the core reaches what is in `gradstream.ext`, when a user names it."""


def string_faults(files: Sources) -> Iterator[str]:
    """Strings that name a module of a higher layer, which no import may reach; a registry may name its members."""
    for module, text in files.items():
        for line, name in named(parsed(text), files):
            if height_of(name) > height_of(module) and (module, name) not in REGISTRIES:
                yield f"{module}:{line}: names {name}, which lies above it"


def test_modules_form_no_cycle() -> None:
    fail_with(cycle_faults(sources()))


def test_no_string_names_a_module_of_a_higher_layer() -> None:
    fail_with(string_faults(sources()))


@pytest.mark.parametrize(
    "back",
    [
        "import gradstream.run.b",
        "from gradstream.run import b",
        "if TYPE_CHECKING:\n    from gradstream.run.b import B",
        "def late():\n    from gradstream.run.b import B",
    ],
)
def test_a_cycle_is_found(back: str) -> None:
    files = {"gradstream": "", "gradstream.run": "", "gradstream.run.a": back}
    files |= {"gradstream.run.b": "import gradstream.run.c", "gradstream.run.c": "import gradstream.run.a"}
    ring = "gradstream.run.a -> gradstream.run.b -> gradstream.run.c -> gradstream.run.a"
    with pytest.raises(AssertionError, match=ring):
        fail_with(cycle_faults(files))
    fail_with(cycle_faults({**files, "gradstream.run.a": "MAIN = 'gradstream.run.b:main'"}))


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("LATER = 'gradstream.session.script:main'", "gradstream.session"),
        ("import_module('gradstream.session')", "gradstream.session"),
        ("CODE = 'from gradstream.session import join'", "gradstream.session"),
        ("LATER = 'gradstream:train'", "gradstream"),
        ("import_module(f'gradstream.{part}')", "gradstream"),
    ],
)
def test_a_string_that_names_a_higher_layer_is_found(line: str, name: str) -> None:
    files = {"gradstream": "", "gradstream.session": "", "gradstream.run": f"import sys\n{line}"}
    with pytest.raises(AssertionError, match=f"gradstream.run:2: names {name}, which lies above it"):
        fail_with(string_faults(files))
    fail_with(string_faults({**files, "gradstream.run": "raise ValueError('use gradstream.session.join')"}))
