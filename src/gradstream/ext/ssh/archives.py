"""Files as tar archives, in which they travel between machines.

Only this file unpacks what another machine has sent, since filters of libraries had holes: of everything that a tar
archive can hold, it accepts files and folders with names that the caller expects, and refuses the rest.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

from gradstream.errors import ConfigError, DataError
from gradstream.job.sources import sha256_of
from gradstream.untrusted import DocumentError, MismatchError, check_value, escaped, parse_json
from gradstream.untrusted.text import fault_of_path

# ---- archives ----------------------------------------------------------------------------

BLOCK_BYTES = 512
PIECE_BYTES = 1 << 20

HEADER_BYTES = 1 << 16
"""Most bytes of a member's preamble: its long name, or its pax values."""

END_BYTES = 1 << 20
"""Most zeros after the last member: tar fills its last record."""

_HARMLESS = {"mtime", "atime", "ctime", "uid", "gid", "uname", "gname"}
"""Pax values that are ignored; `path` and `size` count, and any other value refuses the archive."""


class Source(Protocol):
    """Where an archive comes from: a file, a pipe, a connection."""

    def read(self, size: int, /) -> bytes | None:
        """The next bytes, at most this many; none at the end."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The permitted contents of an archive.

    Args:
        admits: whether a file may have this name and length in bytes.
        max_members: the most files and folders.
        max_bytes: the most bytes of all files together.
    """

    admits: Callable[[str, int], bool]
    max_members: int
    max_bytes: int


def packed(files: Mapping[str, Path], secrets: Mapping[str, bytes]) -> bytes:
    """A tar archive of files, and of small files that only their owner may read."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as archive:
        for name, path in files.items():
            archive.add(path, name, recursive=False)
        for name, content in secrets.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o600
            archive.addfile(entry, io.BytesIO(content))
    return made.getvalue()


def unpacked(archive: Source, into: Path, expected: Expected) -> set[str]:
    """Unpacks an archive from another machine into its own folder, to the end of the stream.

    Only the owner can read the unpacked files. Folders are made only for the files in them.

    Args:
        archive: the bytes; they need not be a tar archive.
        into: the folder; left-overs from earlier are removed.
        expected: the permitted contents.

    Returns:
        Names of the files, relative to `into`.

    Raises:
        DataError: it ended early, or holds something unexpected. The folder is gone.
        OSError: the disk failed. The folder is gone.
    """
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir(mode=0o700)
    try:
        return _unpacked(archive, into, expected)
    except BaseException:
        shutil.rmtree(into, ignore_errors=True)
        raise


def _unpacked(archive: Source, into: Path, expected: Expected) -> set[str]:
    names, folders = set[str](), {""}
    left_bytes = expected.max_bytes
    for count, (name, length, is_file) in enumerate(_members(archive), 1):
        if count > expected.max_members:
            raise DataError(f"the archive has more than {expected.max_members:,} members")
        if not is_file:
            continue
        if not expected.admits(name, length):
            raise DataError(f"the archive has {_shown(name)} of {length:,} bytes, which is not expected")
        if length > left_bytes:
            raise DataError(f"the archive has more than {expected.max_bytes:,} bytes")
        left_bytes -= length
        above = name.rpartition("/")[0]
        _make_folders(above, into, names, folders)
        if name in names or name in folders:
            raise DataError(f"the archive has {_shown(name)} twice")
        names.add(name)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            descriptor = os.open(into / name, flags, 0o600)
        except FileExistsError:
            raise DataError(
                f"the archive has {_shown(name)} twice, as this file system compares names"
            ) from None
        with open(descriptor, "wb") as file:
            for piece in _pieces(archive, length):
                file.write(piece)
        _exactly(archive, -length % BLOCK_BYTES)
    return names


def _make_folders(path: str, into: Path, names: set[str], folders: set[str]) -> None:
    missing = []
    while path not in folders:
        missing.append(path)
        path = path.rpartition("/")[0]
    for folder in reversed(missing):
        if folder in names:
            raise DataError(f"the archive has {_shown(folder)} as a file and as a folder")
        try:
            (into / folder).mkdir(mode=0o700)
        except FileExistsError:
            raise DataError(
                f"the archive has {_shown(folder)} twice, as this file system compares names"
            ) from None
        folders.add(folder)


def _members(archive: Source) -> Iterator[tuple[str, int, bool]]:
    """Name, length and whether it is a file, of each member. The caller reads a file's blocks first."""
    values: dict[str, bytes] = {}
    while any(block := _exactly(archive, BLOCK_BYTES)):
        _check_sum(block)
        kind, length = block[156:157], _number(block[124:136])
        if kind in (b"L", b"x"):
            if (mark := kind.decode()) in values:
                raise DataError("the archive gives a member the same value twice")
            _add_values(values, kind, archive, length)
            values[mark] = b""
            continue
        if kind not in (b"0", b"\0", b"5"):
            raise DataError(
                f"the archive has {_shown(_text(_field(block, 0, 100)))} of kind {kind.decode('latin-1')!a}: "
                "expected files and folders alone, no links and nothing special"
            )
        is_file = kind != b"5"
        name = _text(values.get("path") or _name_in(block))
        length = _digits(values["size"], 10) if "size" in values else length
        values.clear()
        if length and not is_file:
            raise DataError(f"the archive has a folder {_shown(name)} of {length:,} bytes")
        name = name.removeprefix("./") if is_file else name.removeprefix("./").removesuffix("/")
        if (is_file or name not in ("", ".")) and (fault := fault_of_path(name)):
            raise DataError(f"the archive has {_shown(name)}, a name that {fault}")
        yield name, length, is_file
    if values:
        raise DataError("the archive ends after values for a member that is missing")
    left = END_BYTES
    while piece := archive.read(min(PIECE_BYTES, left + 1)):
        left -= len(piece)
        if left < 0 or any(piece):
            raise DataError("the archive goes on after its end")


def _add_values(values: dict[str, bytes], kind: bytes, archive: Source, length: int) -> None:
    """Reads a member's preamble: a long GNU name, or pax values."""
    if length > HEADER_BYTES:
        raise DataError(
            f"the archive has {length:,} bytes before a member, expected at most {HEADER_BYTES:,}"
        )
    data = _exactly(archive, length)
    _exactly(archive, -length % BLOCK_BYTES)
    added = {"path": data.removesuffix(b"\0")} if kind == b"L" else dict(_pax_values(data))
    if added.keys() & values.keys():
        raise DataError("the archive gives a member the same value twice")
    values |= added
    if any(not value for value in added.values()):
        raise DataError("the archive has an empty value before a member")


def _pax_values(data: bytes) -> Iterator[tuple[str, bytes]]:
    seen = set[str]()
    while data:
        digits, space, _ = data[:8].partition(b" ")
        size = _digits(digits, 10) if space else 0
        record, data = data[:size], data[size:]
        key, equal, value = record[len(digits) + 1 : -1].partition(b"=")
        name = _text(key)
        if not equal or len(record) != size or record[-1:] != b"\n" or name in seen:
            raise DataError("the archive has values before a member that cannot be read")
        seen.add(name)
        if name in ("path", "size"):
            yield name, value
        elif name not in _HARMLESS:
            raise DataError(f"the archive gives a member {_shown(name)}, which is not expected")


def _name_in(block: bytes) -> bytes:
    prefix = _field(block, 345, 155) if block[257:263] == b"ustar\0" else b""
    return prefix + b"/" * bool(prefix) + _field(block, 0, 100)


def _field(block: bytes, begin: int, size: int) -> bytes:
    return block[begin : begin + size].partition(b"\0")[0]


def _check_sum(block: bytes) -> None:
    if sum(block) - sum(block[148:156]) + 8 * ord(" ") != _number(block[148:156]):
        raise DataError("the archive is damaged, or is none: a checksum is wrong")


def _number(field: bytes) -> int:
    """A number of a header: in octal digits, or, since GNU, as bytes after 0x80."""
    return int.from_bytes(field[1:]) if field[0] == 0x80 else _digits(field.strip(b" \0") or b"0", 8)


def _digits(text: bytes, base: int) -> int:
    if not re.fullmatch(rb"[0-7]{1,20}" if base == 8 else rb"[0-9]{1,20}", text):
        raise DataError("the archive has a number that cannot be read")
    return int(text, base)


def _text(name: bytes) -> str:
    try:
        return name.decode()
    except UnicodeDecodeError:
        raise DataError(f"the archive has the name {name[:80]!a}, which is not UTF-8") from None


def _shown(name: str) -> str:
    return repr(escaped(name, 120))


def _pieces(archive: Source, length: int) -> Iterator[bytes]:
    while length:
        piece = archive.read(min(length, PIECE_BYTES))
        if not piece:
            raise DataError("the archive broke off")
        length -= len(piece)
        yield piece


def _exactly(archive: Source, length: int) -> bytes:
    return b"".join(_pieces(archive, length))


# ---- file list ---------------------------------------------------------------------------
# `FileList`: the files of a folder with their SHA-256, by which machines compare their copies of it.

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
            files = files_in(folder)
            _check_names(files, f"{folder} has")
            return cls({name: (path.stat().st_size, sha256_of(path)) for name, path in files.items()})
        except OSError as error:
            raise ConfigError(f"cannot read {error.filename}: {error.strerror}") from None

    @classmethod
    def parse(cls, text: str | bytes) -> Self:
        """Reads the text that `str` wrote. Raises ConfigError if it is not such a list, or leads out of the folder."""
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
            present = files_in(folder)
            if others := sorted(present.keys() ^ self.files.keys()):
                name = others[0]
                return f"{name} is {'not expected' if name in present else 'missing'}"
            for name, (length, _) in self.files.items():
                if (bytes_there := present[name].stat().st_size) != length:
                    return f"{name} has {bytes_there:,} bytes, expected {length:,}"
            for name, (_, digest) in self.files.items():
                if sha256_of(present[name]) != digest:
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
    """The files of a folder by name. It follows links to folders, unless they lead back to an enclosing folder."""
    files: dict[str, Path] = {}
    pending: list[tuple[str, Path, tuple[Path, ...]]] = [("", folder, (folder.resolve(),))]
    while pending:
        prefix, here, above = pending.pop()
        for entry in here.iterdir():
            if entry.is_file():
                files[prefix + entry.name] = entry
            elif entry.is_dir() and (real := entry.resolve()) not in above:
                pending.append((f"{prefix}{entry.name}/", entry, (*above, real)))
    return dict(sorted(files.items()))
