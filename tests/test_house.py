"""The house rules that linters do not know."""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

SOURCE = Path(__file__).resolve().parents[1] / "src" / "gradstream"
FILES = sorted(path for path in SOURCE.rglob("*.py") if "_pb2" not in path.name)
HEAVY = ("torch", "numpy", "grpc", "google.protobuf", "safetensors", "PIL", "jax", "rich", "numba")
EXECUTES_WHAT_IT_READS = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def name_of(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_nothing_executes_what_it_reads(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported = {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported = {(node.module or "").split(".")[0]}
        else:
            imported = set()
        assert not imported & EXECUTES_WHAT_IT_READS, f"line {node.lineno}"  # type: ignore[attr-defined]
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            spelt = f"{node.value.id}.{node.attr}"
            assert spelt not in {"torch.load", "torch.save"}, f"line {node.lineno}: {spelt}"
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            assert isinstance(node.value, ast.Constant), f"line {node.value.lineno}"
            assert node.value.value is False, f"line {node.value.lineno}"


@pytest.mark.parametrize("path", [p for p in FILES if p.name != "__main__.py"], ids=name_of)
def test_all_is_importable(path: Path) -> None:
    if path.parent.name == "integrations" and path.stem != "__init__":
        pytest.importorskip(path.stem, reason=f"needs pip install 'gradstream[{path.stem}]'")
    module = importlib.import_module(module_name(path))
    names = getattr(module, "__all__", None)
    assert names is not None, "a module says what it offers: __all__"
    assert len(names) == len(set(names))  # ruff holds their order
    missing = [name for name in names if not hasattr(module, name)]
    assert not missing


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


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = f"import gradstream, sys; print([m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_no_generated_example_depends_on_speed() -> None:
    """A busy machine makes any example slow: hypothesis would call that a failure."""
    assert settings().deadline is None
    assert HealthCheck.too_slow in settings().suppress_health_check


@pytest.mark.parametrize(
    "path", sorted((SOURCE.parents[1] / "bench").glob("*.py")), ids=lambda path: path.name
)
def test_a_bench_can_be_asked_what_it_does(path: Path) -> None:
    """`--help` says it, and runs nothing."""
    text = path.read_text()
    if "__main__" in text:
        assert "ArgumentParser(" in text and "description=__doc__" in text and ".parse_args()" in text
