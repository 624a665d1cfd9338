"""`FileList`: the files of a folder with their SHA-256, by which machines compare their copies of it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from gradstream.errors import ConfigError
from gradstream.job.sources import sha256_of
from gradstream.run.ssh.archives import Expected
from gradstream.untrusted import DocumentError, MismatchError, check_value, escaped, parse_json
from gradstream.untrusted.names import fault_of_path

MAX_BYTES, MAX_VALUES = 1 << 29, 30_000_000
"""Of the list of files of a folder with millions of them."""

_SHA256 = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class FileList:
    """The files of a folder and of the folders in it. Links count as the files to which they lead.

    Args:
        files: length in bytes and SHA-256 of each file, by its name: "deep/numbers".
    """

    files: Mapping[str, tuple[int, str]]

    @classmethod
    def of(cls, folder: Path) -> Self:
        """The list of a folder. Raises ConfigError if a file cannot be read."""
        try:
            found = files_in(folder)
            _check_names(found, f"{folder} has")
            return cls({name: (path.stat().st_size, sha256_of(path)) for name, path in found.items()})
        except OSError as error:
            raise ConfigError(f"cannot read {error.filename}: {error.strerror}") from None

    @classmethod
    def parse(cls, text: str | bytes) -> Self:
        """Reads what `str` has written. Raises ConfigError if it is no such list, or leads out of the folder."""
        try:
            read = parse_json(text, max_bytes=MAX_BYTES, max_values=MAX_VALUES)
            check_value(read, Mapping[str, tuple[int, str]], "its files")
        except (DocumentError, MismatchError) as error:
            raise ConfigError(f"the list of files cannot be read: {error}") from None
        _check_names(read, "the list of files names")
        for name, (length, digest) in read.items():
            if length < 0 or not _SHA256.fullmatch(digest):
                raise ConfigError(
                    f"the list of files gives {name!r} {length} bytes, and {digest[:80]!r} as SHA-256"
                )
        return cls({name: (length, digest) for name, (length, digest) in read.items()})

    def __str__(self) -> str:
        return json.dumps(self.files)

    @property
    def num_bytes(self) -> int:
        """Length of all files together."""
        return sum(length for length, _ in self.files.values())

    @property
    def expected(self) -> Expected:
        """An archive of these files, and of no others."""
        return Expected(
            admits=lambda name, length: self.files.get(name, (-1, ""))[0] == length,
            max_members=len(self.files),
            max_bytes=self.num_bytes,
        )

    def difference(self, folder: Path) -> str:
        """The first difference of a folder from this list; "" if it has these files, and no others."""
        try:
            found = files_in(folder)
            if others := sorted(found.keys() ^ self.files.keys()):
                name = others[0]
                return f"{name} is {'not expected' if name in found else 'missing'}"
            for name, (length, _) in self.files.items():
                if (bytes_there := found[name].stat().st_size) != length:
                    return f"{name} has {bytes_there:,} bytes, expected {length:,}"
            for name, (_, digest) in self.files.items():
                if sha256_of(found[name]) != digest:
                    return f"{name} has another SHA-256"
        except OSError as error:
            return f"{error.filename}: {error.strerror}"
        return ""


def _check_names(names: Iterable[str], where: str) -> None:
    for name in names:
        if fault := fault_of_path(name):
            raise ConfigError(
                f"{where} {escaped(name, 120)!r}, a name that {fault}; give the file another one"
            )


def files_in(folder: Path) -> dict[str, Path]:
    """The files of a folder by name. It follows links to folders, but not back to one in which it is already."""
    found: dict[str, Path] = {}
    pending: list[tuple[str, Path, tuple[Path, ...]]] = [("", folder, (folder.resolve(),))]
    while pending:
        prefix, here, above = pending.pop()
        for entry in here.iterdir():
            if entry.is_file():
                found[prefix + entry.name] = entry
            elif entry.is_dir() and (real := entry.resolve()) not in above:
                pending.append((f"{prefix}{entry.name}/", entry, (*above, real)))
    return dict(sorted(found.items()))
