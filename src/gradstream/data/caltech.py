"""Caltech-101: pictures of objects of 101 categories, from the user's copy or from a download."""

from __future__ import annotations

import os
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from gradstream.data.arrays import check_ids, checksum_of
from gradstream.data.base import Ids
from gradstream.data.image_cache import Bytes, ImageCache, open_cache
from gradstream.data.plan import epoch_order
from gradstream.data.sources import CALTECH101, cache_home, fetch, find, stored_at
from gradstream.errors import ConfigError, DataError
from gradstream.model.base import Batch

BACKGROUND = "BACKGROUND_Google"
FOLDER = "101_ObjectCategories"
ARCHIVE = FOLDER + ".tar.gz"

# Of red, green and blue over all images of the 101 categories, in units where white is 1.
MEAN = (0.546, 0.529, 0.502)
STD = (0.310, 0.304, 0.317)


class ImageDataset:
    """A data set of images, which are bytes on the disk and scaled numbers in a batch. Made by `caltech101`.

    Args:
        name: name for messages and records.
        cache: the images, sorted by category.
        categories: names of the targets, the first ones of the cache.
        train_rows: rows of the cache that are training samples, by sample id.
        test_rows: rows of the cache that are held-out samples.
        flat: whether inputs are (n, 3·s·s) instead of (n, 3, s, s).
    """

    def __init__(
        self,
        name: str,
        cache: ImageCache,
        categories: tuple[str, ...],
        train_rows: Ids,
        test_rows: Ids,
        *,
        flat: bool,
    ) -> None:
        self.name = name
        self.categories = categories
        self.manifest = cache.manifest
        self.num_samples = len(train_rows)
        self.num_test_samples = len(test_rows)
        self._images = cache.images
        self._labels = np.repeat(np.arange(len(cache.manifest.counts)), cache.manifest.counts)
        self._train_rows = train_rows
        self._test_rows = test_rows
        self._flat = flat

    @property
    def checksum(self) -> str:
        """Checksum of pixels and rows, which machines of a run compare; see `checksum_of`."""
        arrays: list[np.ndarray[Any, Any]] = [self._images, self._train_rows, self._test_rows]
        return checksum_of(arrays, str(self.manifest.counts), str(self._flat))

    def batch(self, ids: Ids) -> Batch:
        """The training samples with these ids, in this order. Raises DataError for an unknown id."""
        check_ids(ids, self.num_samples, f"training samples of {self.name}")
        return self._batch(self._train_rows[ids], ids)

    def test_batch(self, ids: Ids) -> Batch:
        """The held-out samples with these ids, in this order. Raises DataError for an unknown id."""
        check_ids(ids, self.num_test_samples, f"test samples of {self.name}")
        return self._batch(self._test_rows[ids], ids)

    def _batch(self, rows: Ids, ids: Ids) -> Batch:
        inputs = _scaled(self._images, rows)
        return Batch(
            inputs.reshape(len(rows), -1) if self._flat else inputs, self._labels[rows], len(rows), ids
        )

    def __repr__(self) -> str:
        counts = f"{self.num_samples} + {self.num_test_samples} samples"
        return f"<{self.name}: {counts}, {len(self.categories)} categories>"


def caltech101(
    size: int = 64,
    *,
    flat: bool = False,
    background: bool = False,
    test_fraction: float = 0.2,
    seed: int = 0,
    download: bool = False,
    root: str | os.PathLike[str] | None = None,
    cache: str | os.PathLike[str] | None = None,
) -> ImageDataset:
    """Caltech-101: 8,677 images of 101 categories, 31 to 800 of each.

    The first call squashes the images to size × size colour pixels and writes them to a memory-mapped file of bytes
    under `cache`, which takes half a minute (449 MB at 128, 112 MB at 64). Inputs are float32 (n, 3, size, size):
    (byte / 255 - mean) / standard deviation of the colour over the data set. Targets are int64 (n,): the number of
    the category in alphabetical order.

    Args:
        size: pixels of each side, 8 to 512.
        flat: whether inputs are (n, 3·size·size), in the same order of elements.
        background: whether to add `BACKGROUND_Google`, 467 images of no category, as target 101.
        test_fraction: share of each category that is held out, in [0, 1). It is rounded to whole images, at least one
            (unless 0), and at least one is left for training. The choice depends only on `seed` and the category.
        seed: seed of that choice.
        download: whether to download the archive (137 MB) if it is not found: into the user's cache folder, verified,
            once for all processes of the machine. Licence and citation go to stderr.
        root: a folder with `caltech101/101_ObjectCategories.tar.gz`, the archive, or the extracted
            `101_ObjectCategories`; or one of these two itself. Default: the environment variable GRADSTREAM_DATA, then
            the downloaded archive.
        cache: folder for the resized images. Default: $XDG_CACHE_HOME/gradstream or ~/.cache/gradstream.

    Raises:
        ConfigError: an argument is out of range.
        DataError: there is no data (the message says where it was searched and how to get it), it is damaged, or the
            cache cannot be written.

    Reference: Li, Andreeto, Ranzato, Perona, "Caltech 101", CaltechDATA, doi 10.22002/D1.20086,
    CC BY 4.0.
    """
    if not 8 <= size <= 512:
        raise ConfigError(f"caltech101(size={size}): expected 8 to 512 pixels a side")
    if not 0 <= test_fraction < 1:
        raise ConfigError(f"caltech101(test_fraction={test_fraction}): expected at least 0 and below 1")
    images = open_cache(
        _find(root, download=download),
        size=size,
        home=Path(cache) if cache is not None else cache_home(),
        name="caltech101",
        last=BACKGROUND,  # so that targets are the same with and without it
    )
    categories = images.manifest.categories
    if not background:
        categories = tuple(category for category in categories if category != BACKGROUND)
    train_rows, test_rows = _split(images.manifest.counts[: len(categories)], test_fraction, seed)
    return ImageDataset(f"caltech101-{size}", images, categories, train_rows, test_rows, flat=flat)


def _find(root: str | os.PathLike[str] | None, *, download: bool) -> Path:
    """The archive or the extracted folder. Raises DataError if there is none."""
    place = find(CALTECH101, root)
    if place is not None:
        return place
    if download and root is None:
        return fetch(CALTECH101)
    named = root if root is not None else os.environ.get("GRADSTREAM_DATA")
    where = f"in {Path(named).absolute()}" if named else "but neither root= nor GRADSTREAM_DATA is given"
    elsewhere = "" if root is not None else f", and for {stored_at(CALTECH101)}"
    raise DataError(
        f"Caltech-101 was not found: looked for caltech101/{ARCHIVE}, {ARCHIVE} and {FOLDER}/ {where}"
        f"{elsewhere}. To download its 137 MB: gradstream data get caltech101, or download=True. "
        f"Or get it by hand from {CALTECH101.page} ({CALTECH101.licence}), unzip it, and name its folder "
        "with root= or the environment variable GRADSTREAM_DATA"
    )


def _split(counts: tuple[int, ...], test_fraction: float, seed: int) -> tuple[Ids, Ids]:
    """(training rows, test rows), chosen in each category; both ascending."""
    train, test = [], []
    for label, (start, stop) in enumerate(pairwise(accumulate(counts, initial=0))):
        rows = start + epoch_order(stop - start, seed, label)
        num_test = min(max(1, round(len(rows) * test_fraction)), len(rows) - 1) if test_fraction else 0
        test.append(np.sort(rows[:num_test]))
        train.append(np.sort(rows[num_test:]))
    return np.concatenate(train), np.concatenate(test)


def _scaled(images: Bytes, rows: Ids) -> np.ndarray[Any, np.dtype[np.float32]]:
    """uint8 (·, 3, s, s) at `rows` → float32 (n, 3, s, s): (byte / 255 - mean) / std of each colour."""
    scale = np.array([1 / (255 * std) for std in STD], np.float32)[:, np.newaxis, np.newaxis]
    shift = np.array([mean / std for mean, std in zip(MEAN, STD, strict=True)], np.float32)
    shift = shift[:, np.newaxis, np.newaxis]
    scaled = np.empty((len(rows), *images.shape[1:]), np.float32)
    # One image at a time, so that it stays in the processor's cache while it is scaled and shifted.
    for row, image in zip(rows, scaled, strict=True):
        np.multiply(images[row], scale, out=image)
        image -= shift
    return scaled
