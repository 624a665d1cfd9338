"""Extracts one file from a zip archive that is not trusted."""

from __future__ import annotations

import hashlib
import os
import stat
import zipfile
import zlib
from pathlib import Path, PurePosixPath

from gradstream.errors import DataError

COPY_BYTES = 1 << 20


def is_inside(name: str) -> bool:
    """Whether a member's name stays inside of the archive: it is not absolute, and has no ".." and no backslash."""
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and "\\" not in name and "\0" not in name


def extract_file(archive: Path, member: str, to: Path, *, max_bytes: int) -> str:
    """Extracts the file `member` from any folder of a zip archive.

    Args:
        archive: the zip file.
        member: file name without folder; the archive must have exactly one such file.
        to: path for the file, which is renamed into place when it is complete.
        max_bytes: most bytes of the file.

    Returns:
        The MD5 of its content in hexadecimal, which publishers of old data sets give.

    Raises:
        DataError: the archive is damaged, a member leads outside of it (an absolute name, "..", a link), there is no
        such
            member or more than one, or it is too long. Nothing is left at `to`.
        OSError: `to` cannot be written.
    """
    temporary = to.with_name(f".{to.name}.{os.getpid()}")
    got, digest = 0, hashlib.md5(usedforsecurity=False)
    try:
        with (
            zipfile.ZipFile(archive) as opened,
            opened.open(_find(opened, archive, member)) as source,
            open(temporary, "wb") as target,
        ):
            while data := source.read(COPY_BYTES):
                got += len(data)
                if got > max_bytes:
                    raise DataError(
                        f"{archive}: {member} is longer than the {max_bytes:,} bytes it may have; "
                        "do not trust this archive: get it from its publisher"
                    )
                digest.update(data)
                target.write(data)
            target.flush()
            os.fsync(target.fileno())
        temporary.rename(to)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise DataError(f"{archive} cannot be read ({error}); get it again") from error
    finally:
        temporary.unlink(missing_ok=True)
    return digest.hexdigest()


def _find(opened: zipfile.ZipFile, archive: Path, member: str) -> zipfile.ZipInfo:
    found = []
    for info in opened.infolist():
        mode = info.external_attr >> 16  # 0 if the archive was not made on Unix
        if not is_inside(info.filename) or stat.S_ISLNK(mode) or info.flag_bits & 1:
            raise DataError(
                f"{archive} has the member {info.filename!r}, which is no plain file or folder inside the "
                "archive; do not trust this archive: get it from its publisher"
            )
        if not info.is_dir() and PurePosixPath(info.filename).name == member:
            found.append(info)
    if len(found) != 1:
        raise DataError(f"{archive} holds {len(found)} files called {member}, expected one; get it again")
    return found[0]
