"""The origin of data sets: their makers, their licences, and how a machine gets a copy."""

from __future__ import annotations

import hashlib
import os
import stat
import time
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from gradstream.data.download import RemoteFile, download, machine_lock
from gradstream.errors import ConfigError, DataError
from gradstream.untrusted import tell

# ---- archive -----------------------------------------------------------------------------
# Extracts one file from a zip archive that is not trusted.

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
    matches = []
    for info in opened.infolist():
        mode = info.external_attr >> 16  # 0 if the archive was not made on Unix
        if not is_inside(info.filename) or stat.S_ISLNK(mode) or info.flag_bits & 1:
            raise DataError(
                f"{archive} has the member {info.filename!r}, which is no plain file or folder inside the "
                "archive; do not trust this archive: get it from its publisher"
            )
        if not info.is_dir() and PurePosixPath(info.filename).name == member:
            matches.append(info)
    if len(matches) != 1:
        raise DataError(f"{archive} holds {len(matches)} files called {member}, expected one; get it again")
    return matches[0]


# ---- sources -----------------------------------------------------------------------------

WAIT_S = 1800.0
REPORT_EVERY_S = 2.0


@dataclass(frozen=True, slots=True)
class Packed:
    """A published archive, and the one file in it that is needed.

    Args:
        archive: a zip file.
        member: name of the file in it, which is an archive, too.
        folder: the folder in that archive, which the user may have extracted.
        top: the folder of the zip file that has `member`.
        max_bytes: most bytes of the member.
        md5: published MD5 of the member. Another one is reported and not refused, since the SHA-256 of the archive has
            verified it.
    """

    archive: RemoteFile
    member: str
    folder: str
    top: str
    max_bytes: int
    md5: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSource:
    """The origin of a data set.

    Args:
        name: name in the registry.
        what: description in one line.
        licence: name of the licence.
        citation: citation that its makers ask for.
        page: address of its description.
        packed: the archive to download; None if it is in the package.
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
    """The default folder of caches: $XDG_CACHE_HOME/gradstream, or ~/.cache/gradstream.

    Raises:
        ConfigError: the user has no home directory, as in some containers.
    """
    home = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(home) if home else Path.home() / ".cache") / "gradstream"
    except RuntimeError as error:
        raise ConfigError(f"{error}: set XDG_CACHE_HOME to a folder that you may write to") from error


def stored_at(source: DataSource, home: Path | None = None) -> Path:
    """The path at which `fetch` stores the file of a data set."""
    assert source.packed is not None
    return (home or cache_home()) / "data" / source.name / source.packed.member


def find(source: DataSource, root: str | os.PathLike[str] | None = None) -> Path | None:
    """The archive or the extracted folder of a data set, if this machine has it.

    Args:
        source: a source with an archive to download.
        root: the only place to search: one of the two itself, or a folder that holds one, directly or in a folder with
            the name of the data set or of the zip file. None searches GRADSTREAM_DATA, and then the path of `fetch`.
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
    """The file of a data set, which is downloaded if it is missing.

    One process of a machine downloads it, and the others wait. The SHA-256 of the archive verifies the file.

    Args:
        source: a source with an archive to download.
        home: folder of caches; see `cache_home`.
        url: a mirror of the archive, http or https; it is verified in the same way.
        wait_s: longest time to wait for another process that downloads it, in seconds.
        say: called with lines about progress; None writes them to stderr.
        pause: waits for some seconds between two attempts.

    Raises:
        DataError: the download failed; the message says why, and what to do. The bytes so far are kept for the next
            one.
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
    """Reports progress every few seconds, and at the end."""

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
    tell(line + "\n")
