"""Checks what the documentation promises. Prints one line per fault; exit status 1 if any.

* every public symbol (without an underscore, and public methods of public classes) has a docstring;
* links in README.md and docs/ lead to files, and to headings that exist;
* Python blocks in them compile;
* every Python file that a page, a docstring or a comment names in backticks is there;
* every module that a docstring or a comment names as `package.module` is there;
* pages use the words of the glossary, and no clause that begins with "who" or "what" is a subject;
* no file names a directory of somebody's machine;
* tables that say what goes with what are those of `trait_tables.py`.
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import trait_tables

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
NAMED_FILE = re.compile(r"`((?:[\w.-]+/)*\w+\.py)`")
NAMED_MODULE = re.compile(r"`(?!session\.|\w+\.(?:html|json|new|py)`)(\w+)\.(\w+)[\w.]*`")
"""Not of the package `session`: docstrings name methods of the user's session alike."""
WRITTEN_FILE = re.compile(r"<!-- file: (\w+\.py) -->")
BLOCK = re.compile(r"^```(?:python|py)\s*\n(.*?)^```", re.MULTILINE | re.DOTALL)
OLD_WORDS = re.compile(
    r"\b(conductor|desks?|enrol\w*|held back|inbox|latecomers|outbox|phantom|roster|vitals|the house)\b",
    re.IGNORECASE,
)
"""Words for which the glossary has others."""
METHOD_NAME = re.compile(r"`Enrol\.?\w*`|`enrol\w*`")
"""Names in the protocol."""
CLAUSE_AS_SUBJECT = re.compile(r"(?:^|[.:;|] )(?:Who|What) [a-z][^?|]*?[.|](?: |$)")
"""At the start of a sentence, unless it asks."""
# Spelt in pieces, so that this file does not find itself.
MACHINE_PATH = re.compile(
    "(?<![\\w.])/(?:" + "|".join(["home/\\w", "work/\\w", "Users/\\w", "root/\\w"]) + ")"
)


def undocumented() -> Iterator[str]:
    """Public symbols without a docstring. Reads the source, imports nothing."""
    for path in sorted((ROOT / "src").rglob("*.py")):
        if "_pb2" in path.name:
            continue
        tree = ast.parse(path.read_text())
        where = path.relative_to(ROOT)
        if not ast.get_docstring(tree):
            yield f"{where}: the module has no docstring"
        for node in tree.body:
            if isinstance(
                node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
            ) and not node.name.startswith("_"):
                yield from (f"{where}:{line}: {name} has no docstring" for name, line in faults(node))


def faults(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[tuple[str, int]]:
    """(name, line) of a symbol and of its public methods that override nothing, where they lack a docstring."""
    if not ast.get_docstring(node):
        yield node.name, node.lineno
    for inner in node.body if isinstance(node, ast.ClassDef) else []:
        if not isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef) or inner.name.startswith("_"):
            continue
        overrides = any(ast.unparse(decorator) == "override" for decorator in inner.decorator_list)
        if not ast.get_docstring(inner) and not overrides:
            yield f"{node.name}.{inner.name}", inner.lineno


def pages() -> list[Path]:
    """The documentation's pages."""
    folders = [page for name in ("docs", "studies") for page in sorted((ROOT / name).rglob("*.md"))]
    return [*sorted(ROOT.glob("*.md")), *folders]


def anchors(page: Path) -> set[str]:
    """The fragments that a page's headings can be linked by, as GitHub spells them."""
    heads = re.findall(r"^#+ +(.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.strip().lower()).replace(" ", "-") for head in heads}


def broken_links() -> Iterator[str]:
    """Links of pages to files or headings that are not there."""
    for page in pages():
        for found in LINK.finditer(page.read_text()):
            link = found[1] or found[2]
            if re.match(r"[a-z]+:", link):
                continue
            file, _, fragment = link.partition("#")
            target = (page.parent / file).resolve() if file else page
            if not target.exists() or (
                fragment and target.suffix == ".md" and fragment not in anchors(target)
            ):
                yield f"{page.relative_to(ROOT)}: the link {link!r} leads nowhere"


def missing_files() -> Iterator[str]:
    """Python files that pages and sources name by the end of their path, and that neither exist nor a page writes."""
    sources = (path for path in (ROOT / "src").rglob("*.py") if "_pb2" not in path.name)
    texts = {path: path.read_text() for path in (*pages(), *sources)}
    written = {f"/{name}" for text in texts.values() for name in WRITTEN_FILE.findall(text)}
    there = [
        path
        for name in ("bench", "examples", "src", "studies", "tests", "tools")
        for path in (ROOT / name).rglob("*.py")
    ]
    known = [*written, *(f"/{path.relative_to(ROOT).as_posix()}" for path in there)]
    for page, text in texts.items():
        for number, line in enumerate(text.splitlines(), 1):
            for name in NAMED_FILE.findall(line):
                if not any(path.endswith(f"/{name}") for path in known):
                    yield f"{page.relative_to(ROOT)}:{number}: there is no file {name}"


def missing_modules() -> Iterator[str]:
    """Modules that docstrings and comments name in backticks, `package.module`, and that do not exist."""
    source = ROOT / "src/gradstream"
    packages = {path.parent.name: path.read_text() for path in source.glob("*/__init__.py")}
    for path in sorted(source.rglob("*.py")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            for package, name in NAMED_MODULE.findall(line):
                at = source / package / name
                known = at.is_dir() or at.with_suffix(".py").exists() or package not in packages
                if not known and not re.search(rf"\b{name}\b", packages[package]):
                    yield f"{path.relative_to(ROOT)}:{number}: there is no module {package}.{name}"


def odd_words() -> Iterator[str]:
    """Lines of pages with a word that the glossary has replaced, or a sentence whose subject is a clause."""
    for page in pages():
        for number, line in enumerate(page.read_text().splitlines(), 1):
            where = f"{page.relative_to(ROOT)}:{number}"
            if found := OLD_WORDS.search(METHOD_NAME.sub("", line)):
                yield f"{where}: {found[0]!r}: see docs/glossary.md"
            if not line.startswith("#") and (found := CLAUSE_AS_SUBJECT.search(line)):
                yield f"{where}: a clause is the subject: {found[0].strip()[:60]!r}"


def broken_blocks() -> Iterator[str]:
    """Python blocks of pages that do not compile."""
    for page in pages():
        for block in BLOCK.finditer(page.read_text()):
            try:
                compile(block[1], str(page), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            except SyntaxError as error:
                line = page.read_text()[: block.start()].count("\n") + 1 + (error.lineno or 0)
                yield f"{page.relative_to(ROOT)}:{line}: {error.msg}"


def machine_paths() -> Iterator[str]:
    """Lines of tracked text files that name a directory of somebody's machine."""
    if shutil.which("git") is None:
        return  # nobody knows which files are meant
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False).stdout
    for name in filter(None, listed.decode().split("\0")):
        path = ROOT / name
        if path.suffix in {".npz", ".png", ".jpg"} or not path.is_file():
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if MACHINE_PATH.search(line):
                yield f"{name}:{number}: a path of one machine: {line.strip()[:80]}"


def main() -> int:
    """Runs every check."""
    found = [
        *undocumented(),
        *broken_links(),
        *missing_files(),
        *missing_modules(),
        *odd_words(),
        *broken_blocks(),
        *machine_paths(),
        *trait_tables.outdated(),
    ]
    print("\n".join(found) or "documentation: nothing to complain about")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
