"""The user's code of a run: which files it is, and the copy that processes run which start later.

A process that starts while a run goes on reads the job again, and files may have been edited meanwhile. So a run
directory has a copy of the user's files, and the processes of the run import these. The user's files are those that the
job has imported, or may import, outside of the standard library and installed packages. Files that the job opens are no
code.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
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

from gradstream.errors import ConfigError
from gradstream.job.sources import file_of, imported_by, is_users
from gradstream.runtime.storage import DiskStorage

COPY = "code.zip"
"""The copy in a run directory."""

INDEX = "index.json"
"""In the copy: the path and the entry of each module, by its name."""

JOB_FILE = "job file"
"""The name of the job's own file, whatever it is called."""


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
        spec: place of the job, which this process has read (`Job.spec`); None for a job that is in no file.
    """
    file = file_of(spec) if spec else None
    job = file.resolve() if file else None
    imported = {name: path for module in list(sys.modules.values()) for name, path in _place_of(module)}
    main = next(_place_of(sys.modules.get("__main__")), None)
    others = dict[str, Path]()
    if main is not None and main[1] != job:  # a script with several jobs, say, of which this is one
        others = imported_by({"": main[1]}, _folders()) | dict([main])
    start = {name: path for name, path in imported.items() if name not in others}
    if job is not None:
        start = {name: path for name, path in start.items() if path != job or not name.endswith(".py")}
        start[JOB_FILE] = job
    found = dict[str, UsersFile]()
    for name, path in (start | imported_by({**start, "": job} if job else start, _folders())).items():
        try:
            found[name] = UsersFile(path, path.read_bytes())
        except OSError:
            continue  # a module that was removed after its import
    return found


def keep(code: Mapping[str, UsersFile], run_dir: Path) -> None:
    """Writes the copy into a run directory. Raises OSError if the disk does not take it."""
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
            # Without the time of now: the same code is the same bytes, also where a run is begun again.
            written.writestr(zipfile.ZipInfo(entry), text, zipfile.ZIP_DEFLATED)
    DiskStorage(run_dir).write(COPY, archive.getvalue())


def kept_code(run_dir: Path) -> dict[str, UsersFile]:
    """The copy in a run directory; empty without one. Raises ConfigError if it is damaged."""
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
    """The files that are others than before. What only one of the two has does not count: its importer differs."""
    return [
        now[name].path for name, file in before.items() if name in now and now[name].source != file.source
    ]


def run_kept(run_dir: Path) -> Callable[[], None]:
    """Lets this process import the copy in a run directory instead of the files, and read scripts from it.

    Modules keep their names and paths. What was imported before stays.

    Returns:
        A function that ends this.

    Raises:
        ConfigError: the copy is damaged.
    """
    finder = _Kept(kept_code(run_dir))
    sys.meta_path.insert(0, finder)
    return partial(sys.meta_path.remove, finder)


def loader_of(path: Path, name: str) -> SourceFileLoader:
    """The loader of a script: of its copy, if there is one. Modules that the script imports are compiled anew, too.

    A compiled file has sets in the order of the process that has compiled it, with its hash seed: a job that is read
    from one would have its labels in another order than in processes that compile it.
    """
    if not any(isinstance(finder, _Uncompiled) for finder in sys.meta_path):
        sys.meta_path.insert(sys.meta_path.index(PathFinder), _Uncompiled())  # behind a copy
    for finder in sys.meta_path:
        if isinstance(finder, _Kept) and path in finder.scripts:
            return _CopyLoader(name, finder.scripts[path])
    return _SourceLoader(name, str(path))


class _SourceLoader(SourceFileLoader):
    """Loads a module from its source, and never from `__pycache__`."""

    def path_stats(self, path: str) -> Mapping[str, float]:
        """Says that nothing is known of the file, so that no compiled one is taken for it."""
        raise OSError(f"{path} is read from its source")


class _Uncompiled(MetaPathFinder):
    """Finds the user's modules, and has them loaded from their sources."""

    def __init__(self) -> None:
        self._others = set(sys.stdlib_module_names)  # packages and modules that are not the user's

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See `MetaPathFinder`."""
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
        """See `MetaPathFinder`."""
        del path, target
        file = self._code.get(fullname)
        if file is None:
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
        """The copy. Tracebacks, and what compiles functions from their source, read the same."""
        if path != self.path:
            return super().get_data(path)
        lines = importlib.util.decode_source(self._source).splitlines(keepends=True)
        linecache.cache[path] = (len(self._source), None, lines, path)
        return self._source


@functools.lru_cache(maxsize=1 << 14)
def _resolved(file: str) -> Path:
    return Path(file).resolve()


def _place_of(module: ModuleType | None) -> Iterator[tuple[str, Path]]:
    """Name and path of a module of the user's; a script is called as its file."""
    name, file = getattr(module, "__name__", None), getattr(module, "__file__", None)
    if isinstance(name, str) and isinstance(file, str) and file.endswith(".py") and is_users(file):
        path = _resolved(file)
        yield (path.name if name.startswith(("__", "_gradstream_")) else name), path


def _folders() -> list[str]:
    """Where this process finds modules of the user's."""
    return [folder for path in sys.path if is_users(folder := path or os.getcwd())]
