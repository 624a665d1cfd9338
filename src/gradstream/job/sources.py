"""The files of a job: its own, and the modules beside it that it imports."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from modulefinder import ModuleFinder
from pathlib import Path

from gradstream.errors import ConfigError


def sources_of(job: Path, more: Iterable[Path] = ()) -> dict[str, Path]:
    """The files that a job needs on every machine, by their names there.

    Modules are found by reading import statements, without running them. What a job finds in another way (a module that
    it imports by a name that it puts together, a file that it opens) has to be named.

    Args:
        job: the job file.
        more: files and folders to bring along; each lies in the job's folder.

    Raises:
        ConfigError: the job file cannot be read or is no Python, or something to bring is not in its folder.
    """
    folder = job.resolve().parent
    finder = ModuleFinder(path=[str(folder)])
    try:
        finder.run_script(str(job))
    except (OSError, SyntaxError, ValueError) as error:
        raise ConfigError(f"cannot read {job}: {error}") from None
    files = [getattr(one, "__file__", None) for one in finder.modules.values()]
    found = [job, *(Path(one) for one in files if one)]
    for path in more:
        if not path.exists():
            raise ConfigError(f"--with {path}: there is no such file or folder")
        found += [one for one in path.rglob("*") if one.is_file()] if path.is_dir() else [path]
    named: dict[str, Path] = {}
    for path in found:
        try:
            named[path.resolve().relative_to(folder).as_posix()] = path
        except ValueError:
            raise ConfigError(
                f"{path} is not in {folder}, the folder of the job file, so no other machine would find it; move it "
                "there"
            ) from None
    return {name: path for name, path in sorted(named.items()) if "__pycache__" not in name}


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal. Raises OSError if it cannot be read."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
