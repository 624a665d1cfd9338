"""Where data sets come from: who made them, under which licence, and how a machine gets its copy."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gradstream.data.archive import extract_file
from gradstream.data.download import RemoteFile, download
from gradstream.data.lock import machine_lock
from gradstream.errors import ConfigError, DataError

__all__ = [
    "CALTECH101",
    "FASHION_MNIST",
    "SOURCES",
    "DataSource",
    "Packed",
    "cache_home",
    "fetch",
    "find",
    "stored_at",
]

WAIT_S = 1800.0
REPORT_EVERY_S = 2.0


@dataclass(frozen=True, slots=True)
class Packed:
    """A published archive, and the one file in it that is wanted.

    Args:
        archive: a zip file.
        member: name of the file inside, an archive too.
        folder: the one folder that this holds, where somebody has extracted it.
        top: the folder of the zip file that `member` is in.
        max_bytes: bound of its length.
        md5: of its content, as published. The SHA-256 of the archive vouches for it already, so that
            another one is said and not refused.
    """

    archive: RemoteFile
    member: str
    folder: str
    top: str
    max_bytes: int
    md5: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSource:
    """A data set's origin.

    Args:
        name: as the registry has it.
        what: one line.
        licence: its name.
        citation: how its makers want to be named.
        page: where it is described.
        packed: what to download; None where it comes with the package.
    """

    name: str
    what: str
    licence: str
    citation: str
    page: str
    packed: Packed | None = None


CALTECH101 = DataSource(
    name="caltech101",
    what="8,677 photographs of objects of 101 categories, 31 to 800 of each",
    licence="CC BY 4.0",
    citation=(
        "Li, F.-F., Andreeto, M., Ranzato, M., Perona, P. (2022). Caltech 101 (1.0). "
        "CaltechDATA. https://doi.org/10.22002/D1.20086"
    ),
    page="https://data.caltech.edu/records/mzrjq-6wc02",
    packed=Packed(
        RemoteFile(
            "https://data.caltech.edu/records/mzrjq-6wc02/files/caltech-101.zip?download=1",
            137_414_764,
            "331234750fc7f77520e50d9565e8b6907b03565e30320da1401130db08c61f91",
        ),
        "101_ObjectCategories.tar.gz",
        "101_ObjectCategories",
        "caltech-101",
        200_000_000,
        "b224c7392d521a49829488ab0f1120d9",
    ),
)

FASHION_MNIST = DataSource(
    name="fashion-mnist",
    what="5,000 + 1,000 grey images of clothes in 10 classes: a subset that comes with the package",
    licence="MIT, (c) 2017 Zalando SE",
    citation=(
        "Xiao, H., Rasul, K., Vollgraf, R. (2017). Fashion-MNIST: a novel image dataset for "
        "benchmarking machine learning algorithms. arXiv:1708.07747"
    ),
    page="https://github.com/zalandoresearch/fashion-mnist",
)

SOURCES = {source.name: source for source in (CALTECH101, FASHION_MNIST)}


def cache_home() -> Path:
    """Where caches go by default: $XDG_CACHE_HOME/gradstream, or ~/.cache/gradstream.

    Raises:
        ConfigError: this user has no home directory, as in some containers.
    """
    home = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(home) if home else Path.home() / ".cache") / "gradstream"
    except RuntimeError as error:
        raise ConfigError(f"{error}: set XDG_CACHE_HOME to a folder that you may write to") from error


def stored_at(source: DataSource, home: Path | None = None) -> Path:
    """Where `fetch` puts the file of a data set."""
    assert source.packed is not None
    return (home or cache_home()) / "data" / source.name / source.packed.member


def find(source: DataSource, root: str | os.PathLike[str] | None = None) -> Path | None:
    """The archive or the extracted folder of a data set, if this machine has it.

    Args:
        source: with something to download.
        root: where to look, and nowhere else: one of the two itself, or a folder that holds one, by itself
            or in a folder of the data set's name or the zip file's. None looks in GRADSTREAM_DATA, then where
            `fetch` puts it.
    """
    packed = source.packed
    assert packed is not None
    named = root if root is not None else os.environ.get("GRADSTREAM_DATA")
    candidates = []
    if named:
        start = Path(named)
        wanted = (packed.member, packed.folder)
        folders = (start, start / source.name, start / packed.top)
        candidates = [start] if start.name in wanted else []
        candidates += [folder / name for folder in folders for name in wanted]
    if root is None:
        candidates.append(stored_at(source))
    return next((place for place in candidates if place.exists()), None)


def fetch(
    source: DataSource,
    *,
    home: Path | None = None,
    url: str | None = None,
    wait_s: float = WAIT_S,
    say: Callable[[str], None] | None = None,
    pause: Callable[[float], None] = time.sleep,
) -> Path:
    """The file of a data set, downloaded unless it is there.

    Of all processes of a machine that ask, one downloads, and the others wait for it. What is
    there afterwards has been verified by the SHA-256 of the archive it was in.

    Args:
        source: with something to download.
        home: folder of caches; see `cache_home`.
        url: a mirror of the archive, http or https; verified likewise.
        wait_s: how long to wait for another process that downloads it.
        say: gets lines about progress; standard error by default.
        pause: waits between two tries.

    Raises:
        DataError: it cannot be had; says why, and what to do. What has come is kept for next time.
    """
    packed, say = source.packed, say or _on_stderr
    assert packed is not None
    place = stored_at(source, home)
    if place.exists():
        return place
    archive = RemoteFile(url or packed.archive.url, packed.archive.num_bytes, packed.archive.sha256)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        doing = f"downloading {source.name}"
        with machine_lock(place.parent / ".lock", doing=doing, wait_s=wait_s, on_wait=say):
            if not place.exists():
                say(
                    f"{source.name}: {source.what}. Licence: {source.licence}. Please cite: {source.citation}"
                )
                zipped = place.parent / "archive.zip"
                if not zipped.exists():
                    progress = _Progress(f"{source.name} from {archive.url.partition('?')[0]}", say)
                    download(archive, zipped, extra_bytes=packed.max_bytes, on_progress=progress, pause=pause)
                try:
                    md5 = extract_file(zipped, packed.member, place, max_bytes=packed.max_bytes)
                except DataError:
                    zipped.unlink()
                    raise
                zipped.unlink()
                if md5 != packed.md5:
                    say(f"{source.name}: {packed.member} has the MD5 {md5}, published is {packed.md5}")
    except OSError as error:
        raise DataError(
            f"{place} cannot be written ({error}); set XDG_CACHE_HOME to a folder that you may write to"
        ) from error
    return place


class _Progress:
    """A line every few seconds, and one at the end."""

    def __init__(self, what: str, say: Callable[[str], None]) -> None:
        self._what = what
        self._say = say
        self._next_s = 0.0

    def __call__(self, done: int, total: int) -> None:
        now_s = time.monotonic()
        if now_s >= self._next_s or done == total:
            self._next_s = now_s + REPORT_EVERY_S
            self._say(f"{self._what}: {done / 1e6:,.1f} of {total / 1e6:,.1f} MB")


def _on_stderr(line: str) -> None:
    sys.stderr.write(line + "\n")
