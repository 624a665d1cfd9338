"""The user's code of a run: which files it is, and the copy that processes import which start later.

A process that starts while a run goes on reads the job again, and its files may have been edited meanwhile. So a run
directory has a copy of the user's files, and the processes of the run import that copy. The user's files are those
that the job has imported, or may import, outside of the standard library and installed packages. Files that the job
opens are not code.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import inspect
import io
import json
import linecache
import os
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from typing_extensions import override

from gradstream.errors import ConfigError, UnknownNameError
from gradstream.job.sources import file_of, imported_by, is_users
from gradstream.runtime.storage import DiskStorage

# ---- code --------------------------------------------------------------------------------

COPY = "code.zip"
"""The copy in a run directory."""

INDEX = "index.json"
"""In the copy: path and file name of each module, by its name."""

JOB_FILE = "job file"
"""Key of the job's own file, whatever its name."""


@dataclass(frozen=True, slots=True)
class UsersFile:
    """A file of the user's code.

    Args:
        path: where it is on this machine.
        source: its content.
    """

    path: Path
    source: bytes

    @property
    def digest(self) -> str:
        """SHA-256 of the content, in hexadecimal."""
        return hashlib.sha256(self.source).hexdigest()


def users_code(spec: str | None) -> dict[str, UsersFile]:
    """The user's files of a job as they are now, by module; scripts by file name, the job's own as `JOB_FILE`.

    Args:
        spec: place of the job that this process has read (`Job.spec`); None for a job that is in no file.
    """
    file = file_of(spec) if spec else None
    job = file.resolve() if file else None
    imported = {name: path for module in list(sys.modules.values()) for name, path in _place_of(module)}
    main = next(_place_of(sys.modules.get("__main__")), None)
    others = dict[str, Path]()
    if main is not None and main[1] != job:  # for example, a script with several jobs, of which this is one
        others = imported_by({"": main[1]}, _folders()) | dict([main])
    start = {name: path for name, path in imported.items() if name not in others}
    if job is not None:
        start = {name: path for name, path in start.items() if path != job or not name.endswith(".py")}
        start[JOB_FILE] = job
    files = dict[str, UsersFile]()
    for name, path in (start | imported_by({**start, "": job} if job else start, _folders())).items():
        try:
            files[name] = UsersFile(path, path.read_bytes())
        except OSError:
            continue  # a module that was removed after its import
    return files


def keep(code: Mapping[str, UsersFile], run_dir: Path) -> None:
    """Writes the copy into a run directory. Raises OSError if the disk fails."""
    entries = dict[Path, str]()
    for name, file in code.items():
        entry = file.path.name if name == JOB_FILE else f"{name.removesuffix('.py')}.py"
        while file.path not in entries and entry in entries.values():
            entry = f"_{entry}"
        entries.setdefault(file.path, entry)
    index = {name: [str(file.path), entries[file.path]] for name, file in code.items()}
    texts = {entries[file.path]: file.source for file in code.values()}
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as written:
        for entry, text in [*texts.items(), (INDEX, json.dumps(index, indent=2).encode())]:
            # Without the current time: the same code is the same bytes, even if a run starts over.
            written.writestr(zipfile.ZipInfo(entry), text, zipfile.ZIP_DEFLATED)
    DiskStorage(run_dir).write(COPY, archive.getvalue())


def kept_code(run_dir: Path) -> dict[str, UsersFile]:
    """The copy in a run directory; empty if there is none. Raises ConfigError if it is damaged."""
    try:
        with zipfile.ZipFile(run_dir / COPY) as archive:
            index = json.loads(archive.read(INDEX))
            return {name: UsersFile(Path(path), archive.read(entry)) for name, (path, entry) in index.items()}
    except FileNotFoundError:
        return {}
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        raise ConfigError(
            f"{run_dir / COPY} is damaged: {type(error).__name__}: {error}; put it back, or remove it: without it "
            "nobody notices that the job's files were edited"
        ) from None


def changed(before: Mapping[str, UsersFile], now: Mapping[str, UsersFile]) -> list[Path]:
    """The files that have changed. A file on one side only does not count: the file that imports it differs."""
    return [
        now[name].path for name, file in before.items() if name in now and now[name].source != file.source
    ]


def run_kept(run_dir: Path) -> Callable[[], None]:
    """Makes this process import the copy in a run directory instead of the files, and read scripts from it.

    Modules keep their names and paths. Modules imported before stay.

    Returns:
        A function that undoes this.

    Raises:
        ConfigError: the copy is damaged.
    """
    finder = _Kept(kept_code(run_dir))
    sys.meta_path.insert(0, finder)
    return partial(sys.meta_path.remove, finder)


def loader_of(path: Path, name: str) -> SourceFileLoader:
    """The loader of a script: of its copy, if there is one. Modules that the script imports are compiled anew, too.

    A compiled file keeps sets in an order that depends on the hash seed of the process that compiled it: a job read
    from one would have its labels in another order than processes that compile it themselves.
    """
    if not any(isinstance(finder, _Uncompiled) for finder in sys.meta_path):
        sys.meta_path.insert(sys.meta_path.index(PathFinder), _Uncompiled())  # after the finder of a copy
    for finder in sys.meta_path:
        if isinstance(finder, _Kept) and path in finder.scripts:
            return _CopyLoader(name, finder.scripts[path])
    return _SourceLoader(name, str(path))


class _SourceLoader(SourceFileLoader):
    """Loads a module from its source, and never from `__pycache__`."""

    def path_stats(self, path: str) -> Mapping[str, float]:
        """Pretends to know nothing about the file, so that no compiled file is used for it."""
        raise OSError(f"{path} is read from its source")


class _Uncompiled(MetaPathFinder):
    """Finds the user's modules, and has them loaded from source."""

    def __init__(self) -> None:
        self._others = set(sys.stdlib_module_names)  # packages and modules that are not the user's

    @override
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        top = fullname.partition(".")[0]
        spec = None if top in self._others else PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.origin is None or not isinstance(spec.loader, SourceFileLoader):
            return None
        if not is_users(spec.origin):
            self._others.add(top)
            return None
        spec.loader = _SourceLoader(fullname, spec.origin)
        return spec


class _Kept(MetaPathFinder):
    """Finds modules in a copy of the user's code."""

    def __init__(self, code: Mapping[str, UsersFile]) -> None:
        self._code = code
        self.scripts = {file.path: file for file in code.values()}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See `MetaPathFinder`: finds the copy of the file that Python would import now."""
        del target
        file = self._code.get(fullname)
        if file is None:
            return None
        original = PathFinder.find_spec(fullname, path)
        if (
            original is not None
            and original.origin is not None
            and Path(original.origin).resolve() != file.path.resolve()
        ):
            file = self.scripts.get(Path(original.origin).resolve())
            if file is None:  # no copy: nothing named this module when the run began
                return None
        folder = [str(file.path.parent)] if file.path.name == "__init__.py" else None
        return importlib.util.spec_from_file_location(
            fullname, file.path, loader=_CopyLoader(fullname, file), submodule_search_locations=folder
        )


class _CopyLoader(_SourceLoader):
    """Loads a module from the copy of its file."""

    def __init__(self, name: str, file: UsersFile) -> None:
        super().__init__(name, str(file.path))
        self._source = file.source

    def get_data(self, path: str) -> bytes:
        """The copy. Tracebacks, and tools that compile functions from their source, read the same text."""
        if path != self.path:
            return super().get_data(path)
        lines = importlib.util.decode_source(self._source).splitlines(keepends=True)
        linecache.cache[path] = (len(self._source), None, lines, path)
        return self._source


@functools.lru_cache(maxsize=1 << 14)
def _resolved(file: str) -> Path:
    return Path(file).resolve()


def _place_of(module: ModuleType | None) -> Iterator[tuple[str, Path]]:
    """Name and path of a module of the user; a script has the name of its file."""
    name, file = getattr(module, "__name__", None), getattr(module, "__file__", None)
    if isinstance(name, str) and isinstance(file, str) and file.endswith(".py") and is_users(file):
        path = _resolved(file)
        yield (path.name if name.startswith(("__", "_gradstream_")) else name), path


def _folders() -> list[str]:
    """Folders in which this process finds the user's modules."""
    return [folder for path in sys.path if is_users(folder := path or os.getcwd())]


# ---- places ------------------------------------------------------------------------------
# Finds code by its place, "file.py:name" or "module:name", and the place of code.


def place_of(function: Callable[..., Any]) -> str:
    """The place by which every node finds a function or a class: "file.py:name" or "module:name".

    Raises:
        ConfigError: it has no place: it is a lambda or a method, or is defined inside another function.
    """
    name = getattr(function, "__qualname__", type(function).__name__)
    module = sys.modules.get(getattr(function, "__module__", ""))
    if module is None or getattr(module, name, None) is not function:
        raise ConfigError(
            f"other processes cannot import {name!r}: define it at the top level of a file, not inside a "
            "function or class"
        )
    if _is_script(module):
        return f"{Path(str(module.__file__)).resolve()}:{name}"
    return f"{module.__name__}:{name}"


def place_of_class(cls: type) -> str:
    """Module or file of a class; "" if it is defined in the running script."""
    module = sys.modules.get(cls.__module__)
    if module is None or cls.__module__.startswith("__"):
        return ""
    return str(module.__file__) if cls.__module__.startswith("_gradstream_") else cls.__module__


def find_function(place: str) -> Callable[..., Any]:
    """The function at a place. Does not run a file again that this process has already run.

    Raises:
        ConfigError, UnknownNameError: no such file, module or function.
    """
    file, colon, name = place.rpartition(":")
    if not colon:
        raise ConfigError(f"function {place!r}: expected 'file.py:function' or 'module:function'")
    if file.endswith(".py"):
        path = Path(file).resolve()
        module = next((there for there in _scripts(path) if hasattr(there, name)), None) or load_module(path)
    else:
        module = import_module("function", place, file)
    function = getattr(module, name, None)
    if not callable(function):
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise UnknownNameError(f"function in {file}", name, functions)
    return cast(Callable[..., Any], function)


def load_module(path: Path, name: str | None = None) -> ModuleType:
    """Runs a Python file as a module, once per name, and makes its folder importable.

    Args:
        path: the file.
        name: its `__name__`; None makes one from the path.

    Raises:
        ConfigError: there is no such file. Errors that the file itself raises are passed on.
    """
    path = path.resolve()
    if not path.is_file():
        raise ConfigError(f"no such file: {path}")
    name = name or f"_gradstream_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules and sys.modules[name].__file__ == str(path):
        return sys.modules[name]
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader_of(path, name))
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is not a Python file; expected a name that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception:
        del sys.modules[name]
        raise
    return module


def import_module(kind: str, spec: str, module: str) -> ModuleType:
    """Imports a module that a user names. Raises ConfigError if there is none."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{kind} {spec!r}: {error}{where_it_lies(spec, module, error)}") from error
    except (ValueError, TypeError) as error:  # not the name of a module
        raise ConfigError(
            f"{kind} {spec!r}: there is no module {module!r}; name a file with .py: file.py:Class"
        ) from error


def where_it_lies(spec: str, place: str, error: ModuleNotFoundError) -> str:
    """Where to find a module that could not be imported; "" if it was found, and itself lacks another module.

    Args:
        spec: what the user named, "module:name".
        place: its module.
        error: the error of the import.
    """
    if error.name is None or not f"{place}.".startswith(f"{error.name}."):
        return ""
    here, own = Path(os.getcwd()), place.split(".")
    for folder in (here, *here.parents):
        for file in (folder.joinpath(*own).with_suffix(".py"), folder.joinpath(*own, "__init__.py")):
            if file.is_file():
                return (
                    f". It is in {folder}, where modules are not looked for by themselves: PYTHONPATH={folder} before "
                    f"the command, or name the file: {file}:{spec.rpartition(':')[2]}"
                )
    path = os.environ.get("PYTHONPATH", "")
    return (
        f". Looked in {f'PYTHONPATH={path}' if path else 'no folder of yours (PYTHONPATH is not set)'} and in the "
        f"installed packages; it is not in {here} either: `cd` to the folder that has it, or set PYTHONPATH to that "
        "folder, or name the file: FOLDER/file.py:function"
    )


def _scripts(path: Path) -> list[ModuleType]:
    """The modules of a file that this process has run as the main script, or under one of our names."""
    return [
        module
        for module in list(sys.modules.values())
        if _is_script(module) and Path(str(module.__file__)) == path
    ]


def _is_script(module: ModuleType) -> bool:
    """Whether a module has no name by which another process could import it."""
    special = str(getattr(module, "__name__", "")).startswith(
        ("__", "_gradstream_")
    )  # modules may be any object
    return special and str(getattr(module, "__file__", "")).endswith(".py")
