"""The user's code of a run: which files it is, and how a copy of it is imported."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import py_compile
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import gradstream as gs
from gradstream.errors import ConfigError
from gradstream.job.code import COPY, JOB_FILE, changed, keep, kept_code, load_module, run_kept, users_code
from gradstream.job.sources import imported_by, sources_of

FILES = {
    "train.py": "import mixed.inner\nimport whole\nimport json, numpy\ndef late():\n    from mixed import later\n"
    "    import importlib\n    return importlib.import_module('named')\n",
    "mixed/inner.py": "X = 1\n",  # a package without __init__.py
    "mixed/later.py": "X = 2\n",
    "mixed/never.py": "X = 3\n",
    "whole/__init__.py": "from . import part\nfrom .part import X\n",
    "whole/part.py": "from .deep import there\nX = 4\n",
    "whole/deep/__init__.py": "from .. import sideways\n",
    "whole/deep/there.py": "",
    "whole/sideways.py": "",
    "named.py": "import broken\n",
    "broken.py": "def (\n",
    "json.py": "raise AssertionError('the standard library comes first')\n",
}
IMPORTED = {
    "mixed.inner",
    "mixed.later",
    "named",
    "broken",
    "whole",
    "whole.part",
    "whole.deep",
    "whole.deep.there",
    "whole.sideways",
}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    path, meta, before = list(sys.path), list(sys.meta_path), set(sys.modules)
    yield tmp_path
    sys.path[:], sys.meta_path[:] = path, meta
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_modules_are_found_by_reading_imports(folder: Path) -> None:
    found = imported_by({"": folder / "train.py"}, [str(folder)])
    assert set(found) == IMPORTED
    assert found["whole.deep"] == folder / "whole" / "deep" / "__init__.py"
    brought = sources_of(folder / "train.py", [folder / "mixed" / "never.py"])
    assert len(brought) == len(IMPORTED) + 2
    assert {"train.py", "mixed/inner.py", "mixed/never.py", "whole/deep/there.py"} <= set(brought)


def test_a_copy_is_imported_whatever_becomes_of_the_files(folder: Path) -> None:
    sys.path.insert(0, str(folder))
    keep(users_code(str(folder / "train.py")), folder)
    kept = kept_code(folder)
    assert {JOB_FILE, *IMPORTED} <= set(kept)
    (folder / "train.py").write_text("raise AssertionError('edited')")
    (folder / "whole" / "part.py").write_text("from .deep import there\nX = 5\n")
    (folder / "mixed" / "later.py").unlink()
    assert changed(kept, users_code(str(folder / "train.py"))) == [
        folder / "train.py",
        folder / "whole" / "part.py",
    ]
    end = run_kept(folder)
    module = load_module(folder / "train.py", "__gradstream_job__")
    assert module.__file__ == str(folder / "train.py")
    assert importlib.import_module("whole.part").X == 4
    assert importlib.import_module("mixed.later").X == 2
    assert "def late" in inspect.getsource(module)  # and so do tracebacks
    end()
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("mixed.never_there")
    (folder / COPY).write_bytes(b"PK and nothing else")
    with pytest.raises(ConfigError, match="is damaged"):
        run_kept(folder)


def test_a_module_of_another_folder_that_a_script_puts_first_is_that_of_the_script(folder: Path) -> None:
    (folder / "named.py").write_text("X = 1\n")
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere" / "named.py").write_text("X = 2\n")
    sys.path.insert(0, str(folder))
    keep(users_code(str(folder / "train.py")), folder)
    run_kept(folder)
    sys.path.insert(0, str(folder / "elsewhere"))
    assert importlib.import_module("named").X == 2
    del sys.modules["named"]
    sys.path.remove(str(folder / "elsewhere"))
    (folder / "named.py").write_text("X = 3\n")
    assert importlib.import_module("named").X == 1


def test_a_stale_compiled_file_is_not_taken_for_the_copy(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python takes a compiled file for a source of the same size and second."""
    sys.path.insert(0, str(folder))
    helper = folder / "named.py"
    helper.write_text("X = 1\n")
    os.utime(helper, (1e9, 1e9))
    py_compile.compile(str(helper))
    helper.write_text("X = 2\n")
    os.utime(helper, (1e9, 1e9))
    keep(users_code(str(folder / "train.py")), folder)
    compiled = [finder for finder in sys.meta_path if type(finder).__name__ != "_Uncompiled"]
    with monkeypatch.context() as patched:
        patched.setattr(sys, "meta_path", compiled)
        assert importlib.import_module("named").X == 1, "the compiled file is not stale"
    del sys.modules["named"]
    run_kept(folder)
    assert importlib.import_module("named").X == 2


def test_what_a_script_with_several_jobs_imports_is_not_the_jobs(tmp_path: Path) -> None:
    (tmp_path / "sweep.py").write_text(
        "import json, ours, both\nfrom gradstream.job.code import users_code\n"
        "from gradstream.job.files import load_job\n"
        "load_job('one.py')\nprint(json.dumps(sorted(users_code('one.py'))))\n"
    )
    (tmp_path / "one.py").write_text(
        "import importlib, both, gradstream as gs\nimportlib.import_module('by_' + 'name')\n"
        "def job(): return gs.Job(None, None, epochs=1)\n"
    )
    for name in ("ours", "both", "by_name"):
        (tmp_path / f"{name}.py").write_text("")
    environment = {**os.environ, "PYTHONPATH": str(Path(gs.__file__).parents[1])}
    run = subprocess.run(
        [sys.executable, "sweep.py"], cwd=tmp_path, env=environment, check=True, capture_output=True
    )
    assert set(json.loads(run.stdout)) - {"warm_start"} == {"both", "by_name", JOB_FILE}
