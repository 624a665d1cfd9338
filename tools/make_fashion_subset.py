"""Makes the embedded data set: 500 training and 100 test images of each class of Fashion-MNIST.

Reads the four files of the whole set, as Debian's package `dataset-fashion-mnist` installs them
(or https://github.com/zalandoresearch/fashion-mnist, folder data/fashion), and takes the first
images of each class, in their order in the files. The result is the same on every run.

    python tools/make_fashion_subset.py [--source FOLDER] [--out FILE]
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
from pathlib import Path
from typing import Any

import numpy as np

SOURCE = Path("/usr/share/datasets/fashion-mnist")
OUT = Path(__file__).parents[1] / "src/gradstream/data/fashion_mnist.npz"
NUM_CLASSES = 10

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def read_idx(path: Path) -> Bytes:
    """An array from a gzipped IDX file of unsigned bytes: magic 0 0 8 ndim, big-endian sizes, data."""
    raw = gzip.decompress(path.read_bytes())
    if raw[:3] != b"\0\0\x08":
        raise SystemExit(f"{path} is no IDX file of bytes: it begins with {raw[:4]!r}")
    num_axes = raw[3]
    shape = np.frombuffer(raw, ">u4", count=num_axes, offset=4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * num_axes).reshape(shape)


def subset(source: Path, part: str, per_class: int) -> tuple[Bytes, Bytes]:
    """Images (n, 28, 28) and labels (n,): the first `per_class` of each class, in file order."""
    images = read_idx(source / f"{part}-images-idx3-ubyte.gz")
    labels = read_idx(source / f"{part}-labels-idx1-ubyte.gz")
    firsts = [np.flatnonzero(labels == label)[:per_class] for label in range(NUM_CLASSES)]
    rows = np.sort(np.concatenate(firsts))
    return images[rows], labels[rows]


def main() -> None:
    """Writes the file and prints shape and SHA-256 of its arrays."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", type=Path, default=SOURCE, help="folder of the four .gz files")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    train_images, train_labels = subset(options.source, "train", 500)
    test_images, test_labels = subset(options.source, "t10k", 100)
    np.savez_compressed(
        options.out,
        train_images=train_images,
        train_labels=train_labels,
        test_images=test_images,
        test_labels=test_labels,
    )
    for array in (train_images, train_labels, test_images, test_labels):
        print(array.shape, hashlib.sha256(array.tobytes()).hexdigest())


if __name__ == "__main__":
    main()
