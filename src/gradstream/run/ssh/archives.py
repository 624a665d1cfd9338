"""Files as tar archives, as they go from one machine to another."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO


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
