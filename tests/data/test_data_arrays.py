"""Data sets from arrays, and the embedded one."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradstream.data import Dataset, fashion_mnist, from_arrays
from gradstream.errors import DataError


def test_batches_are_the_rows_asked_for() -> None:
    inputs, targets = np.arange(12.0).reshape(6, 2), np.arange(6)
    data: Dataset = from_arrays(inputs, targets, inputs[:2] + 100, targets[:2], name="toy")
    ids = np.array([4, 0, 4])
    batch = data.batch(ids)
    np.testing.assert_array_equal(batch.inputs, inputs[[4, 0, 4]])
    assert batch.targets.tolist() == [4, 0, 4]
    assert (batch.num_samples, batch.ids.tolist()) == (3, [4, 0, 4])
    assert data.test_batch(np.array([1])).inputs.tolist() == [[102.0, 103.0]]
    assert (data.num_samples, data.num_test_samples, data.name) == (6, 2, "toy")
    assert data.batch(np.array([], np.int64)).inputs.shape == (0, 2)


def test_memory_mapped_arrays_stay_on_disk(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(20.0).reshape(10, 2))
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    data = from_arrays(mapped, np.arange(10))
    assert isinstance(data.inputs, np.memmap)
    batch = data.batch(np.array([9, 1]))
    batch.inputs[:] = 0  # a copy: the file is only read
    assert mapped[9, 0] == 18


def test_lists_will_do() -> None:
    assert from_arrays([[1.0], [2.0]], [0, 1]).num_test_samples == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1, 2], [1]), "2 inputs and 1 targets"),
        (([], []), "has no samples"),
        ((["a"], [1]), "inputs have dtype <U1"),
        (([1.0], [object()]), "targets have dtype object"),
        (([[1], [1, 2]], [1, 2]), "all samples must have the same shape"),
        ((1.0, [1]), "inputs are a single number"),
        (([1], [1], [1]), "lacks test_targets"),
        (([1], [1], None, [1]), "lacks test_inputs"),
        (([1], [1], [1, 2], [1]), "2 test_inputs and 1 test_targets"),
        (([[1]], [1], [[1, 2]], [1]), r"samples of test_inputs have shape \(2,\)"),
        (([1], [1], [1], [1.5]), "dtype float64; expected .* int64, as in targets"),
    ],
)
def test_errors(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(DataError, match=message):
        from_arrays(*arguments)


@pytest.mark.parametrize("wrong", [-1, 3])
def test_unknown_ids(wrong: int) -> None:
    data = from_arrays([1, 2, 3], [1, 2, 3], [1, 2, 3], [1, 2, 3])
    for batch in (data.batch, data.test_batch):
        with pytest.raises(DataError, match="since there are 3"):
            batch(np.array([0, wrong]))


def test_fashion_mnist_is_stratified_and_scaled() -> None:
    data = fashion_mnist()
    assert (data.num_samples, data.num_test_samples) == (5000, 1000)
    assert np.bincount(data.targets).tolist() == [500] * 10
    assert np.bincount(data.test_targets).tolist() == [100] * 10
    batch = data.batch(np.arange(7))
    assert batch.inputs.shape == (7, 1, 28, 28)
    assert (batch.inputs.dtype, batch.targets.dtype) == (np.float32, np.int64)
    assert abs(data.inputs.mean()) < 0.01
    assert abs(data.inputs.std() - 1) < 0.01


def test_the_script_makes_the_embedded_data(repository: Path) -> None:
    spec = importlib.util.spec_from_file_location("make", repository / "tools/make_fashion_subset.py")
    assert spec is not None
    assert spec.loader is not None
    make = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make)
    if not make.SOURCE.is_dir():
        pytest.skip(f"no {make.SOURCE}: install Debian's dataset-fashion-mnist")
    images, labels = make.subset(make.SOURCE, "t10k", 100)
    with np.load(repository / "src/gradstream/data/fashion_mnist.npz", allow_pickle=False) as stored:
        np.testing.assert_array_equal(stored["test_images"], images)
        np.testing.assert_array_equal(stored["test_labels"], labels)
