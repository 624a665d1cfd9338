"""The files of a job: its own, and the modules that it imports."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from gradstream.errors import ConfigError


def sources_of(job: Path, more: Iterable[Path] = ()) -> dict[str, Path]:
    """The files that a job needs on every machine, by their names there.

    Modules are found as by `imported_by`. Whatever a job finds in another way (a file that it opens) has to be named.

    Args:
        job: the job file.
        more: files and folders to bring along, all inside the job's folder.

    Raises:
        ConfigError: the job file cannot be read or is not Python, or something to bring is not in its folder.
    """
    folder = job.resolve().parent
    try:
        ast.parse(job.read_bytes())
    except (OSError, SyntaxError, ValueError) as error:
        raise ConfigError(f"cannot read {job}: {error}") from None
    paths = [job, *imported_by({"": job.resolve()}, [str(folder)]).values()]
    for path in more:
        if not path.exists():
            raise ConfigError(f"--with {path}: there is no such file or folder")
        paths += [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
    named: dict[str, Path] = {}
    for path in paths:
        try:
            named[path.resolve().relative_to(folder).as_posix()] = path
        except ValueError:
            raise ConfigError(
                f"{path} is not in {folder}, the folder of the job file, so no other machine would find it; move it "
                "there"
            ) from None
    return {name: path for name, path in sorted(named.items()) if "__pycache__" not in name}


_LIBRARIES = [
    os.path.join(os.path.realpath(folder), "")
    for name, folder in sysconfig.get_paths().items()
    if name in ("stdlib", "platstdlib", "purelib", "platlib")
]
_LIBRARIES.append(os.path.join(os.path.realpath(Path(__file__).parents[1]), ""))


@functools.lru_cache(maxsize=1 << 14)
def is_users(path: str | Path) -> bool:
    """Whether a file or folder is the user's: not of the standard library, an installed package, or gradstream."""
    real = os.path.realpath(path)
    installed = {"site-packages", "dist-packages"} & set(real.split(os.sep))
    return not installed and not os.path.join(real, "").startswith(tuple(_LIBRARIES))


def imported_by(files: Mapping[str, Path], folders: Sequence[str]) -> dict[str, Path]:
    """The user's modules in some folders that Python files import, directly or indirectly, by name.

    Import statements are read, not run, so those inside functions count as well. A module whose name the program puts
    together is missed.

    Args:
        files: where to begin, by the names of the modules; "" for a file that is no module.
        folders: where to look for modules, in this order.
    """
    imported, left, seen = dict[str, Path](), list(files.items()), set[str]()
    places = _Places(folders)
    while left:
        module, path = left.pop()
        for name in _imports(path, module):
            if name in seen:  # a program of a thousand modules names each of them many times
                continue
            seen.add(name)
            for new, file in places.of(name):
                if new not in imported and new not in files and is_users(file):
                    imported[new] = file
                    left.append((new, file))
    return imported


def _imports(path: Path, module: str) -> Iterator[str]:
    """The names that a file may import; a name in `from module import name` may or may not be a module."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    try:
        stat = path.stat()
        read = _statements(path, stat.st_mtime_ns, stat.st_size)
    except (OSError, SyntaxError, ValueError):
        return  # whatever imports it gets this error
    for name in read:
        if not name.startswith("."):
            yield name
        elif package:
            try:
                yield importlib.util.resolve_name(name, package)
            except ImportError:
                continue  # beyond the top-level package


@functools.lru_cache(maxsize=4096)
def _statements(path: Path, changed_ns: int, size: int) -> tuple[str, ...]:
    """The names in the import statements of a file at its last change, with the dots of relative imports."""
    del changed_ns, size
    names = []
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            dot = "." if node.module else ""
            names += [module, *(f"{module}{dot}{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                names.append(node.args[0].value)
    return tuple(dict.fromkeys(names))


class _Places:
    """Finds the files of modules in folders. Lists each folder once.

    Args:
        folders: where to look for modules, in this order.
    """

    def __init__(self, folders: Sequence[str]) -> None:
        self._folders = folders
        self._names = dict[str, frozenset[str]]()  # by folder
        self._tops = dict[str, list[str]]()  # folders by the first part of a name

    def of(self, name: str) -> Iterator[tuple[str, Path]]:
        """The user's files of a module and of the packages around it, in these folders."""
        parts = name.split(".")
        if parts[0] not in self._tops:
            self._tops[parts[0]] = self._folders_of(parts[0])
        within = self._tops[parts[0]]
        for number, part in enumerate(parts, 1):
            file = next(filter(None, (self._file(folder, part) for folder in within)), None)
            if file is not None:
                yield ".".join(parts[:number]), Path(file)
            if file is None:
                within = [os.path.join(folder, part) for folder in within if part in self._names_in(folder)]
            elif file.endswith("__init__.py"):
                within = [os.path.dirname(file)]
            else:
                return

    def _folders_of(self, top: str) -> list[str]:
        """The folders that have a package or module of this name; none if the first one is not the user's."""
        if top in sys.stdlib_module_names:
            return []
        has = [folder for folder in self._folders if self._names_in(folder) & {top, f"{top}.py"}]
        file = next(filter(None, (self._file(folder, top) for folder in has)), None)
        return has if file is None or is_users(file) else []

    def _file(self, folder: str, part: str) -> str | None:
        """The file in a folder from which a module of this name would be imported; None if there is none."""
        names = self._names_in(folder)
        package, module = os.path.join(folder, part), os.path.join(folder, f"{part}.py")
        if part in names and "__init__.py" in self._names_in(package):
            return os.path.join(package, "__init__.py")
        return module if f"{part}.py" in names and os.path.isfile(module) else None

    def _names_in(self, folder: str) -> frozenset[str]:
        if folder not in self._names:
            try:
                self._names[folder] = frozenset(os.listdir(folder))
            except OSError:
                self._names[folder] = frozenset()
        return self._names[folder]


def file_of(spec: str) -> Path | None:
    """The file that the spec of a job names; None for a module without one.

    Raises:
        ImportError: a package around the module cannot be imported.
    """
    place, colon, _ = spec.rpartition(":")
    place = place if colon else spec
    if place.endswith(".py"):
        return Path(place)
    module_spec = importlib.util.find_spec(place) if place else None
    return (
        Path(module_spec.origin)
        if module_spec is not None and module_spec.has_location and module_spec.origin
        else None
    )


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal. Raises OSError if it cannot be read."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def working_directory() -> str | None:
    """The working directory of this process; None if it was removed."""
    try:
        return os.getcwd()
    except OSError:
        return None


STARTED_IN = working_directory()
"""The one when this process imported gradstream: a script may change it later, and does so again in each node."""


_FOLDER: list[str] = []


def users_folder() -> str:
    """The folder from which this process imports the user's modules: that of the script, or of `python -m`.

    "" if the process is one of gradstream's own: the folder in which the user typed a command does not count.
    """
    if _FOLDER:
        return _FOLDER[0]
    main = sys.modules["__main__"]
    name, file = getattr(main.__spec__, "name", ""), getattr(main, "__file__", "") or ""
    is_ours = name.partition(".")[0] == "gradstream" or Path(file).parent == Path(sys.executable).parent
    return "" if is_ours or sys.flags.safe_path or not sys.path else os.path.abspath(sys.path[0])


def import_from(folder: str) -> None:
    """Makes this process import the user's modules from this `users_folder`, as the process that began the run did.

    Call it once gradstream's own modules are imported: a user's logging.py must not replace the standard library's.
    """
    if folder:
        _FOLDER[:] = [folder]
        if folder not in sys.path:
            sys.path.insert(0, folder)
