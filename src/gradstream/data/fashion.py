"""The data set in the package: a stratified subset of Fashion-MNIST."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from gradstream.data.arrays import ArrayDataset, from_arrays

CATEGORIES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
"""The names of the targets 0 to 9."""

# Of the 60,000 training images of the whole data set, in units where white is 1.
MEAN, STD = 0.2860, 0.3530


def fashion_mnist() -> ArrayDataset:
    """Fashion-MNIST, 500 training and 100 test images of each of its 10 classes. Needs no network.

    Inputs are float32 (n, 1, 28, 28): (pixel / 255 - 0.2860) / 0.3530, with mean 0 and standard deviation 1 over the
    whole data set. Targets are int64 (n,); see `CATEGORIES`. The subset has the first images of each class;
    `tools/make_fashion_subset.py` makes it. It takes about 19 MB of memory.

    Reference: Xiao, Rasul, Vollgraf, "Fashion-MNIST: a novel image dataset for benchmarking
    machine learning algorithms", 2017. MIT licence, © 2017 Zalando SE.
    """
    with np.load(Path(__file__).with_name("fashion_mnist.npz"), allow_pickle=False) as stored:
        return from_arrays(
            _scaled(stored["train_images"]),
            stored["train_labels"].astype(np.int64),
            _scaled(stored["test_images"]),
            stored["test_labels"].astype(np.int64),
            name="fashion-mnist",
        )


def _scaled(images: np.ndarray[Any, np.dtype[np.uint8]]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """uint8 (n, 28, 28) → float32 (n, 1, 28, 28)."""
    pixels = images[:, np.newaxis].astype(np.float32)
    pixels *= 1 / (255 * STD)
    pixels -= MEAN / STD
    return pixels
