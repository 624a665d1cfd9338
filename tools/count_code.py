"""Counts what a reader of the source meets: files, lines of code, classes, imports, and functions that only pass on.

    python tools/count_code.py                # src/gradstream of this checkout
    python tools/count_code.py FOLDER         # the package in another folder, such as that of an older checkout

A line of code is no blank one, comment or docstring. Generated code is left out.
"""

from __future__ import annotations

import ast
import re
import statistics
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SMALL_LINES = 60
PACKAGE = Path(__file__).parents[1] / "src/gradstream"
FEATURES = {
    "participation": r"participation",
    "phases": r"phase",
    "quorum": r"quorum",
    "stand-ins": r"stand_in|StandIn",
    "orphaned pushes": r"orphan|estate",
    "resharding": r"reshard",
}
"""Features of several layers, by a word that the files have which know of them."""


@dataclass
class Module:
    """One file: its syntax tree, and the numbers of its lines of code."""

    path: Path

    def __post_init__(self) -> None:
        self.text = self.path.read_text()
        self.tree = ast.parse(self.text)
        quoted = {
            number
            for one in docstrings(self.tree)
            for number in range(one.lineno, (one.end_lineno or one.lineno) + 1)
        }
        lines = enumerate(self.text.splitlines(), 1)
        self.code = {number for number, line in lines if line.strip()[:1] not in ("", "#")} - quoted

    def of(self, *kinds: type[ast.AST]) -> list[ast.AST]:
        """All nodes of these kinds."""
        return [node for node in ast.walk(self.tree) if isinstance(node, kinds)]


def docstrings(tree: ast.Module) -> Iterator[ast.Expr]:
    """Strings that are statements: docstrings of modules, classes, functions and attributes."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield node


def own_imports(module: Module) -> int:
    """Number of modules of the package that a module imports."""
    imports = [node for node in module.of(ast.ImportFrom) if isinstance(node, ast.ImportFrom)]
    return len({node.module for node in imports if (node.module or "").startswith("gradstream")})


def passes_on(function: ast.AST) -> bool:
    """Whether a function does nothing but call another one with its own arguments, in their order."""
    assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
    body = [
        one
        for one in function.body
        if not (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant))
    ]
    if len(body) != 1 or function.decorator_list or not isinstance(body[0], ast.Return | ast.Expr):
        return False
    call = body[0].value.value if isinstance(body[0].value, ast.Await) else body[0].value
    if not isinstance(call, ast.Call):
        return False
    arguments = [
        one.arg for one in (*function.args.args, *function.args.kwonlyargs) if one.arg not in ("self", "cls")
    ]
    given = [one.id if isinstance(one, ast.Name) else "" for one in call.args]
    given += [one.value.id if isinstance(one.value, ast.Name) else "" for one in call.keywords]
    return bool(arguments) and given == arguments


def main() -> None:
    """Prints the figures."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else PACKAGE
    modules = [
        Module(path)
        for path in sorted(folder.rglob("*.py"))
        if not path.name.endswith(("_pb2.py", "_grpc.py"))
    ]
    files = [module for module in modules if module.path.name != "__init__.py"]
    functions = [node for module in modules for node in module.of(ast.FunctionDef, ast.AsyncFunctionDef)]
    lengths = [len(ast.unparse(node).splitlines()) for node in functions]
    print(f"files                          {len(modules):7,}")
    print(f"lines of code                  {sum(len(module.code) for module in modules):7,}")
    print(f"lines of code a file           {statistics.mean(len(module.code) for module in modules):7.0f}")
    print(
        f"files with under {SMALL_LINES} of them     {sum(len(one.code) < SMALL_LINES for one in files):7,}"
    )
    print(f"classes                        {sum(len(one.of(ast.ClassDef)) for one in modules):7,}")
    print(f"functions                      {len(functions):7,}")
    print(f"their mean length              {statistics.mean(lengths):7.1f}")
    print(f"functions that only pass on    {sum(map(passes_on, functions)):7,}")
    print(f"own modules imported by a file {statistics.mean(map(own_imports, modules)):7.1f}")
    for schema in folder.rglob("*.proto"):
        print(f"lines of {schema.name:<21} {len(schema.read_text().splitlines()):7,}")
    known = Counter(
        {name: sum(bool(re.search(word, one.text)) for one in modules) for name, word in FEATURES.items()}
    )
    print("files that know of " + ", ".join(f"{name}: {count}" for name, count in known.most_common()))


if __name__ == "__main__":
    main()
