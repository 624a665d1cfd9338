"""Finds the files of a job: its own, and the modules beside it that it imports."""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Iterable, Mapping
from modulefinder import ModuleFinder
from pathlib import Path
from typing import IO

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


def file_sum(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def packed(files: Mapping[str, Path], secrets: Mapping[str, bytes]) -> bytes:
    """A tar archive of files, and of small ones that only their owner may read."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as archive:
        for name, path in files.items():
            archive.add(path, name, recursive=False)
        for name, content in secrets.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o600
            archive.addfile(entry, io.BytesIO(content))
    return made.getvalue()


def unpacked(archive: IO[bytes], into: Path) -> set[str]:
    """Unpacks what a machine has sent: files and folders inside of `into` alone, no links to elsewhere, no devices.

    Returns:
        Names of the files and folders, relative to `into`.
    """
    with tarfile.open(fileobj=archive, mode="r|", bufsize=1 << 20) as opened:
        names = set[str]()

        def taken(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo | None:
            names.add(member.name.removeprefix("./"))
            return tarfile.data_filter(member, path)

        opened.extractall(into, filter=taken)
        return names
