"""Checks that processes have the same data set: they compare checksums of arrays, or drawn samples.

Each process makes its data anew. Data that depends on the order of a set or of a folder, or on random numbers without a
seed, then differs between processes.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from gradstream.data.base import Dataset
from gradstream.data.isolation import Isolated, seeded
from gradstream.model.base import Batch, leaves_of

NUM_DRAWN = 8
"""Number of samples to draw, of those for training and of those held out."""

DRAWING_S = 1.0
"""Time after which no more samples are drawn, if a sample takes long."""

RANDOM = "random"
"""Replaces parts that differ between two readings of a sample in one process."""

SHOWN_ELEMS = 4
"""A part of a sample with at most this many elements is shown, rather than its checksum."""

NUMBER = "number of samples"
"""The check of the length."""

_DRAWN = "sample "
"""Part of the name of each check of a drawn sample."""


def checks_of(data: Dataset) -> dict[str, str]:
    """The properties of a data set that processes compare, by name; `differences` compares them.

    A data set may provide them as `quick_checks`; others are asked for some samples, each twice. Streams have no
    samples to ask for. A data set whose loader has its own processes is asked in such a process: files that it opens at
    the first sample must not be open when others are forked.
    """
    if not hasattr(data, "test_batch"):
        return {}  # a user's own loop has its own data
    checks = {NUMBER: f"{data.num_samples} and {data.num_test_samples} held out"}
    own = getattr(data, "quick_checks", None)
    if own is not None:
        return {**checks, **own}
    loader: DataLoader[Any] | None = getattr(data, "loader", None)
    if loader is None or not loader.num_workers:
        return checks | _drawn(data)
    context = loader.multiprocessing_context
    if context is not None and context.get_start_method() != "fork":
        return checks  # a new process takes seconds
    process = DataLoader(
        _Drawing(data),
        batch_size=None,
        num_workers=1,
        multiprocessing_context="fork",
        worker_init_fn=Isolated(loader.worker_init_fn),
        timeout=loader.timeout,
    )
    try:
        with seeded(0):
            drawn: dict[str, str] = next(iter(process))
    except Exception:
        return checks  # the training meets the same error, and says where
    return checks | drawn


def differences(here: Mapping[str, str], there: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """(name, value here, value there) of each check that differs.

    Random values, and values that were not drawn by both, do not count as different.
    """
    for name in {**there, **here}:
        mine, other = here.get(name, "none"), there.get(name, "none")
        passed = _DRAWN in name and "none" in (mine, other)
        if mine != other and RANDOM not in (mine, other) and not passed:
            yield name, mine, other


class _Drawing(TorchDataset[dict[str, str]]):
    """A data set of one item: the samples drawn from another one."""

    def __init__(self, data: Dataset) -> None:
        self._data = data

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> dict[str, str]:
        return _drawn(self._data)


def _drawn(data: Dataset) -> dict[str, str]:
    """The checks of drawn samples, alternating between those for training and those held out."""
    checks, until_s = dict[str, str](), time.monotonic() + DRAWING_S
    sides = [
        (_DRAWN, data.batch, data.num_samples),
        (f"held-out {_DRAWN}", data.test_batch, data.num_test_samples),
    ]
    ids = [np.random.default_rng(0).permutation(count or 0)[:NUM_DRAWN] for _, _, count in sides]
    for numbers in zip_longest(*ids):
        for (side, read, _), number in zip(sides, numbers, strict=True):
            if number is None or time.monotonic() > until_s:
                continue
            try:
                once, again = (_parts(read, number) for _ in range(2))
            except Exception:
                continue  # it may not support being read alone; the training meets other errors, and says where
            for part, check in once.items():
                checks[f"{side}{number}, {part}"] = check if again.get(part) == check else RANDOM
    return checks


def _parts(read: Any, number: int) -> dict[str, str]:
    with seeded(0, int(number)):
        batch: Batch = read(np.array([number], dtype=np.int64))
    named = [*leaves_of(batch.inputs, "inputs"), *leaves_of(batch.targets, "targets")]
    return {path: found for path, leaf in named if (found := _described(leaf))}


def _described(leaf: Any) -> str:
    """A part of a sample in few words; "" if it is not an array."""
    if isinstance(leaf, torch.Tensor):
        leaf = leaf.detach().cpu()
        array = leaf.view(torch.uint8).numpy() if leaf.dtype == torch.bfloat16 else leaf.numpy()
    elif isinstance(leaf, np.ndarray | np.generic | bool | int | float | str):
        array = np.asarray(leaf)
    else:
        return ""
    if array.dtype.hasobject:
        return ""
    if array.size <= SHOWN_ELEMS:
        return f"{array.tolist()}"
    content = zlib.crc32(np.ascontiguousarray(array).view(np.uint8).data)
    return f"{array.shape} {array.dtype}, content {content:08x}"
