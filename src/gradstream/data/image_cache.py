"""A cache of resized images in a memory-mapped file, made from an archive that is read and never extracted.

A cache is a folder with `images.npy`, uint8 (n, 3, size, size) sorted by category and file name, and `manifest.json`.
It is made beside its place and renamed into it, under a lock: readers see all of it or nothing, and if several
processes need it, one makes it while the others wait.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import tarfile
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from gradstream.data.download import machine_lock
from gradstream.data.sources import is_inside
from gradstream.errors import DataError
from gradstream.runtime.storage import disk_remedy

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

FINGERPRINT_BYTES = 1 << 16
MAX_FILE_BYTES = 1 << 26
WAIT_S = 600.0


@dataclass(frozen=True, slots=True)
class ImageManifest:
    """The source and the content of a cache.

    Args:
        source: name of the file or folder from which it was made.
        source_bytes: size of the archive, or of all files of the folder.
        source_sha256: SHA-256 of the archive, or of the folder's list of names and sizes.
        size: pixels of each side.
        categories: names of the categories, by label; rows are sorted by label, then by file name.
        counts: number of images of each category.
        skipped: names of files that are no images.
        pillow: version of Pillow; another version may differ in the last bit of a pixel.
    """

    source: str
    source_bytes: int
    source_sha256: str
    size: int
    categories: tuple[str, ...]
    counts: tuple[int, ...]
    skipped: tuple[str, ...]
    pillow: str


@dataclass(frozen=True, slots=True)
class ImageCache:
    """An open cache. `images` is uint8 (n, 3, size, size), memory-mapped for reading."""

    manifest: ImageManifest
    images: Bytes


def open_cache(
    source: Path, *, size: int, home: Path, name: str, last: str, wait_s: float = WAIT_S
) -> ImageCache:
    """Opens the cache of `source` at `size`, and makes it first if there is none.

    Args:
        source: a .tar.gz of TOP/<category>/<image>.jpg, or the folder TOP.
        size: pixels of each side; images are squashed to a square, with antialiasing.
        home: folder of caches.
        name: name of the data set, the first part of the cache's name.
        last: a category that is sorted after all others.
        wait_s: longest time to wait for another process that makes it, in seconds.

    Raises:
        DataError: the source is damaged, unsafe or without images; the cache cannot be written or read; or another
            process takes too long. No incomplete cache is left.
    """
    try:
        folder = home / f"{name}-{_fingerprint(source)}-{size}px"
    except OSError as error:
        raise DataError(f"{source} cannot be read ({error})") from error
    if not folder.exists():
        try:
            home.mkdir(parents=True, exist_ok=True)
            with machine_lock(
                home / f"{folder.name}.lock", doing=f"making the image cache {folder}", wait_s=wait_s
            ):
                if not folder.exists():
                    _make(folder, source, size, last)
        except OSError as error:
            raise DataError(
                f"the image cache {folder} cannot be written ({error}); {disk_remedy(error)}, or name another "
                "folder: cache="
            ) from error
    try:
        manifest = _read_manifest(folder / "manifest.json")
        images = np.load(folder / "images.npy", mmap_mode="r", allow_pickle=False)
        if images.shape != (sum(manifest.counts), 3, size, size) or images.dtype != np.uint8:
            raise ValueError(f"images are {images.dtype} {images.shape}")
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(
            f"the image cache {folder} is damaged ({error}); delete it and start again"
        ) from error
    return ImageCache(manifest, images)


def _make(folder: Path, source: Path, size: int, last: str) -> None:
    """Makes the cache in a temporary folder beside `folder`, and renames it. The caller holds the lock."""
    for stale in folder.parent.glob(f".{folder.name}.*"):
        shutil.rmtree(stale)  # left by a process that was killed, since this one holds the lock
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        manifest = _fill(temporary / "images.npy", source, size, last)
        with open(temporary / "manifest.json", "w", encoding="utf-8") as file:
            json.dump(asdict(manifest), file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _fill(path: Path, source: Path, size: int, last: str) -> ImageManifest:
    """Decodes every image of `source` into its row of a new .npy file."""
    rows, skipped = {}, []
    for name, _ in _files(source, contents=False):
        if _is_image(name):
            rows[name] = 0
        else:
            skipped.append(name)
    if not rows:
        raise DataError(f"{source} has no images; expected files <category>/<image>.jpg, got {skipped[:3]}")
    counts = Counter(name.partition("/")[0] for name in rows)
    categories = sorted(counts, key=lambda category: (category == last, category))
    place = {category: label for label, category in enumerate(categories)}
    order = sorted(rows, key=lambda name: (place[name.partition("/")[0]], name))
    rows = {name: row for row, name in enumerate(order)}
    images = np.lib.format.open_memmap(path, mode="w+", dtype=np.uint8, shape=(len(rows), 3, size, size))
    for name, data in _files(source, contents=True):
        if name in rows:
            images[rows[name]] = _decoded(data, size, f"{source}: {name}")
    images.flush()  # msync: on disk before the rename that makes it visible
    source_bytes, source_sha256 = _identity(source)
    return ImageManifest(
        source=source.name,
        source_bytes=source_bytes,
        source_sha256=source_sha256,
        size=size,
        categories=tuple(categories),
        counts=tuple(counts[category] for category in categories),
        skipped=tuple(skipped),
        pillow=_pillow_version(),
    )


def _decoded(data: bytes, size: int, where: str) -> Bytes:
    """A JPEG, grey or coloured, as uint8 (3, size, size)."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data), formats=("JPEG",)) as image:
            image.draft("RGB", (size, size))  # lets the JPEG decoder scale down, never below `size`
            pixels = image.convert("RGB").resize((size, size), Image.Resampling.BILINEAR)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"{where} cannot be decoded as JPEG ({error}); get the data again") from error
    return np.asarray(pixels).transpose(2, 0, 1)  # (rows, columns, colours) → (colours, rows, columns)


def _pillow_version() -> str:
    try:
        import PIL
    except ImportError as error:
        raise DataError("decoding images takes Pillow: pip install 'gradstream[images]'") from error
    return str(PIL.__version__)


def _files(source: Path, *, contents: bool) -> Iterator[tuple[str, bytes]]:
    """(<category>/<file>, its bytes or b"") of an archive or a folder. Nothing is extracted.

    Raises:
        DataError: the archive is damaged, or a member is no plain file inside of it: it has an absolute path or "..",
        or is
            a link or a device.
    """
    try:
        if source.is_dir():
            for path in sorted(source.glob("*/*")):
                if path.is_file():
                    yield f"{path.parent.name}/{path.name}", path.read_bytes() if contents else b""
            return
        with tarfile.open(source, "r:*") as archive:
            for member in archive:
                name = _safe_name(member, source)
                if member.isreg():
                    _check_size(member, source)
                    file = archive.extractfile(member) if contents else None
                    yield name, file.read() if file else b""
    except (tarfile.TarError, zlib.error, EOFError, OSError) as error:
        raise DataError(f"{source} cannot be read ({error}); is it complete? Get it again") from error


def _safe_name(member: tarfile.TarInfo, source: Path) -> str:
    """A member's name below the top folder of the archive. Raises DataError if it leads outside."""
    path = PurePosixPath(member.name)
    if not is_inside(member.name) or not (member.isreg() or member.isdir()):
        raise DataError(
            f"{source} has the member {member.name!r}, which is no plain file or folder inside the archive; "
            "do not trust this archive: get it from its publisher"
        )
    return "/".join(path.parts[1:]) or member.name


def _check_size(member: tarfile.TarInfo, source: Path) -> None:
    """Raises DataError for a file that is too large for memory, and so no photograph."""
    if member.size > MAX_FILE_BYTES:
        raise DataError(
            f"{source}: {member.name} has {member.size:,} bytes, expected at most {MAX_FILE_BYTES:,}; "
            "do not trust this archive: get it from its publisher"
        )


def _is_image(name: str) -> bool:
    parts = PurePosixPath(name).parts
    return len(parts) == 2 and not parts[1].startswith(".") and parts[1].lower().endswith((".jpg", ".jpeg"))


def _fingerprint(source: Path) -> str:
    """16 hex digits that distinguish sources without reading them whole.

    For an archive they depend on its size and last 64 KiB (a .gz ends with a CRC of its content), for a folder on the
    names and sizes of its files.
    """
    if source.is_dir():
        return _identity(source)[1][:16]
    with open(source, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - FINGERPRINT_BYTES))
        return hashlib.sha256(b"%d:" % size + file.read()).hexdigest()[:16]


def _identity(source: Path) -> tuple[int, str]:
    """(bytes, SHA-256) of an archive; for a folder, bytes of all files, and SHA-256 of their names and sizes."""
    if not source.is_dir():
        with open(source, "rb") as file:
            return source.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()
    sizes = {f"{path.parent.name}/{path.name}": path.stat().st_size for path in sorted(source.glob("*/*"))}
    return sum(sizes.values()), hashlib.sha256(json.dumps(sizes).encode()).hexdigest()


def _read_manifest(path: Path) -> ImageManifest:
    fields = json.loads(path.read_text(encoding="utf-8"))
    lists = {key: tuple(value) for key, value in fields.items() if isinstance(value, list)}
    return ImageManifest(**{**fields, **lists})
