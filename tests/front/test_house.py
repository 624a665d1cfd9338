"""Rules of the code that linters do not know."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from source_files import FILES, SOURCE, fail_with, module_name

HEAVY = ("torch", "numpy", "grpc", "google.protobuf", "safetensors", "PIL", "jax", "rich", "numba")
EXECUTES_WHAT_IT_READS = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}


def name_of(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def reading_faults(where: str, text: str) -> Iterator[str]:
    """Where a source file could execute what it reads."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            for name in {name.split(".")[0] for name in modules} & EXECUTES_WHAT_IT_READS:
                yield f"{where}:{node.lineno}: imports {name}"
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if (spelt := f"{node.value.id}.{node.attr}") in {"torch.load", "torch.save"}:
                yield f"{where}:{node.lineno}: {spelt}"
        elif (
            isinstance(node, ast.keyword)
            and node.arg == "allow_pickle"
            and ast.unparse(node.value) != "False"
        ):
            yield f"{where}:{node.value.lineno}: allow_pickle is not False"


def all_faults(name: str) -> Iterator[str]:
    """Faults of a module's import, or of its `__all__`, which the faces of packages have. ruff checks the order."""
    try:
        module = importlib.import_module(name)
    except Exception as error:
        yield f"{name}: cannot be imported: {error!r}"
        return
    names = getattr(module, "__all__", ())
    yield from (f"{name}: {twice} twice in __all__" for twice in set(names) if names.count(twice) > 1)
    yield from (f"{name}: no {absent}, which __all__ has" for absent in names if not hasattr(module, absent))


def started_modules(where: str, text: str) -> Iterator[str]:
    """Where a process of Python would import modules from the folder in which it is started: `-m` without `-P`."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.List | ast.Tuple):
            continue
        words = [one.value if isinstance(one, ast.Constant) else ast.unparse(one) for one in node.elts]
        yield from (
            f"{where}:{node.lineno}: -m without -P"
            for before, word in itertools.pairwise(words)
            if word in ("-m", "-c") and before != "-P" and before in ("sys.executable", "python")
        )


def test_no_process_imports_from_the_folder_that_it_is_started_in() -> None:
    assert list(started_modules("planted", '[sys.executable, "-m", "x"]'))
    fail_with(fault for path in FILES for fault in started_modules(name_of(path), path.read_text()))


def test_nothing_executes_what_it_reads() -> None:
    fail_with(fault for path in FILES for fault in reading_faults(name_of(path), path.read_text()))


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "import a, joblib.b",
        "from marshal import loads",
        "torch.load(f)",
        "np.load(f, allow_pickle=yes)",
    ],
)
def test_a_line_that_executes_what_it_reads_is_found(line: str) -> None:
    with pytest.raises(AssertionError, match=r"2 faults:\nhere\.py:2: \w+[^\n]*\nthere\.py:2: "):
        fail_with(
            fault for name in ("here.py", "there.py") for fault in reading_faults(name, f"x = 1\n{line}\n")
        )


def test_all_names_of_all_are_there() -> None:
    fail_with(fault for path in FILES if importable(path) for fault in all_faults(module_name(path)))


def importable(path: Path) -> bool:
    """Not a program, nor an integration with something that is not installed."""
    if path.parent.name == "integrations" and path.stem != "__init__":
        return importlib.util.find_spec(path.stem) is not None
    return path.name != "__main__.py"


def test_a_wrong_all_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "wrong_broken.py").write_text("1 / 0")
    (tmp_path / "wrong_list.py").write_text("there = 1\n__all__ = ['there', 'there', 'absent']")
    with pytest.raises(AssertionError) as caught:
        fail_with(fault for name in ("broken", "list") for fault in all_faults(f"wrong_{name}"))
    broken, twice, absent = str(caught.value).splitlines()[1:]
    assert broken == "wrong_broken: cannot be imported: ZeroDivisionError('division by zero')"
    assert twice == "wrong_list: there twice in __all__"
    assert absent == "wrong_list: no absent, which __all__ has"


@pytest.mark.cold
@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["--version"]])
def test_help_is_quick_because_it_imports_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import json, sys\n"
        "from gradstream.cli import main\n"
        "try: main(sys.argv[1:])\n"
        f"finally: print(json.dumps([m for m in {HEAVY!r} if m in sys.modules]), file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip()
    assert json.loads(done.stderr.splitlines()[-1]) == []


@pytest.mark.cold
def test_importing_the_package_imports_nothing_heavy() -> None:
    code = f"import gradstream, sys; print([m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_no_generated_example_depends_on_speed() -> None:
    """A busy machine makes any example slow: hypothesis would call that a failure."""
    assert settings().deadline is None
    assert HealthCheck.too_slow in settings().suppress_health_check


@pytest.mark.cold
@pytest.mark.parametrize("at", [{}, {"CI": "true"}], ids=["at-home", "in-ci"])
def test_generated_examples_are_the_same_in_each_run_unless_others_are_asked_for(at: dict[str, str]) -> None:
    """A change would else fail by what was there before it. `search` is for a workflow, so it draws in CI too."""
    code = (
        "import conftest; from hypothesis import settings as s; "
        "print(s().derandomize, s.get_profile('search').derandomize)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "CI"} | at
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
        cwd=Path(__file__).parents[1],
    )
    assert done.stdout.split() == ["True", "False"]


def help_faults(where: str, text: str) -> Iterator[str]:
    """Of a program that runs at once, whatever it is asked."""
    text = text.replace("command_line(__doc__)", "ArgumentParser(description=__doc__)")  # by bench/common.py
    for part in ("ArgumentParser(", "description=__doc__", ".parse_args()") if "__main__" in text else ():
        if part not in text:
            yield f"{where}: `--help` is to say what it does and to run nothing, but it has no {part}"


def test_a_bench_can_be_asked_what_it_does() -> None:
    fail_with(
        f
        for folder in ("bench", "studies")
        for path in sorted((SOURCE.parents[1] / folder).rglob("*.py"))
        for f in help_faults(path.name, path.read_text())
    )


def test_a_bench_that_cannot_be_asked_is_found() -> None:
    with pytest.raises(AssertionError, match=r"bench\.py: .* it has no description=__doc__"):
        fail_with(help_faults("bench.py", "ArgumentParser().parse_args()\nif __name__ == '__main__': run()"))
