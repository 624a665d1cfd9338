"""Data sets that return one sample at a time: torch's map-style ones, lists, anything with len and []."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, IterableDataset, default_collate
from typing_extensions import override

from gradstream.data.arrays import check_ids
from gradstream.data.base import BatchPlan, BatchRef, Dataset, Feed, Ids
from gradstream.data.feed import IdFeed
from gradstream.data.isolation import seeded
from gradstream.errors import ConfigError, DataError
from gradstream.model.base import Batch, Tree

# ---- collated ----------------------------------------------------------------------------
# Turns a user's batch into a `Batch`: finds its targets, and counts its samples.

NO_IDS: Ids = np.empty(0, dtype=np.int64)
NO_IDS.flags.writeable = False


def check_targets(targets: str | None) -> None:
    """Raises DataError unless it is a key, or None."""
    if targets is not None and not isinstance(targets, str):
        raise DataError(f"targets={targets!r}: expected the key of the targets in a batch that is a dict")


def collated(
    tree: Tree, targets: str | None, where: str, ids: Ids | None = None, *, lists_are_parts: bool = False
) -> Batch:
    """The `Batch` of a user's batch.

    Args:
        tree: a `Batch`, which is returned as it is; a pair (inputs, targets); or another tree, which is all inputs
            except for the entry `targets` of a dict.
        targets: key of the targets if batches are dicts.
        where: name of the batch, for messages.
        ids: ids of the samples; None if they have none. The number of samples is then the length of the first axis.
        lists_are_parts: whether a list has the parts of a sample, as from torch's collate function; otherwise it has an
            entry for each sample, of any length.

    Raises:
        DataError: the tree has no array or no such key, or its parts have different lengths.
    """
    if isinstance(tree, Batch):
        return tree
    inputs, held = _parts(tree, targets, where)
    if ids is not None:
        return Batch(inputs, held, len(ids), ids)
    lengths = [*_lengths(inputs, "inputs", lists_are_parts), *_lengths(held, "targets", lists_are_parts)]
    return Batch(inputs, held, _agreed(lengths, inputs, where), NO_IDS)


def _parts(tree: Tree, targets: str | None, where: str) -> tuple[Tree, Tree]:
    if targets is not None:
        if not isinstance(tree, Mapping) or targets not in tree:
            got = f"a dict of {sorted(map(str, tree))}" if isinstance(tree, Mapping) else type(tree).__name__
            raise DataError(f"{where} is {got}; expected a dict with the key {targets!r}, as targets= says")
        return {key: part for key, part in tree.items() if key != targets}, tree[targets]
    if isinstance(tree, tuple | list) and len(tree) == 2:
        return tree[0], tree[1]
    return tree, None


def _lengths(tree: Tree, path: str, lists_are_parts: bool) -> Iterator[tuple[str, int]]:
    """(path, number of samples) of each part of a tree that has a length."""
    if isinstance(tree, list) and tree and not lists_are_parts:
        yield path, len(tree)
    elif isinstance(tree, Mapping):
        for key, branch in tree.items():
            yield from _lengths(branch, f"{path}[{key!r}]", lists_are_parts)
    elif isinstance(tree, tuple | list):
        for index, branch in enumerate(tree):
            yield from _lengths(branch, f"{path}[{index}]", lists_are_parts)
    elif getattr(tree, "shape", ()):
        yield path, len(tree)


def _agreed(lengths: list[tuple[str, int]], inputs: Tree, where: str) -> int:
    if not lengths:
        raise DataError(
            f"{where} has no arrays in it: got {_kind(inputs)}; expected samples along a first axis"
        )
    if len({count for _, count in lengths}) > 1:
        shown = ", ".join(f"{name}: {count}" for name, count in lengths[:6])
        raise DataError(
            f"{where} has parts of several lengths ({shown}); expected one entry per sample in each. "
            "If this is intended, yield gradstream.model.Batch(inputs, targets, num_samples, ids)"
        )
    return lengths[0][1]


def _kind(tree: Any) -> str:
    return f"{type(tree).__name__} of {len(tree)}" if isinstance(tree, Mapping | tuple | list) else repr(tree)


# ---- mapped ------------------------------------------------------------------------------

Collate = Callable[[list[Any]], Tree]


class MapDataset:
    """Samples by id, from which a collate function makes batches. Made by `from_dataset`, which checks it.

    Args:
        name: name for messages and records.
        dataset: the training samples.
        collate: function from a list of samples to a batch.
        targets: key of the targets in a batch that is a dict.
        test: data set whose training samples are the held-out samples.
    """

    def __init__(
        self, name: str, dataset: Any, collate: Collate, targets: str | None, test: Dataset | None
    ) -> None:
        self.name = name
        self.dataset = dataset
        self.collate = collate
        self.num_samples = len(dataset)
        self.num_test_samples = (test.num_samples or 0) if test is not None else 0
        self.targets = targets
        self._test = test

    def batch(self, ids: Ids) -> Batch:
        """The training samples with these ids, in this order. Raises DataError for an unknown id."""
        check_ids(ids, self.num_samples, f"training samples of {self.name}")
        numbers = ids.tolist()
        if hasattr(self.dataset, "__getitems__"):  # torch's protocol for many samples at once
            samples = self.dataset.__getitems__(numbers)
        else:
            samples = [self.dataset[number] for number in numbers]
        return collated(self.collate(samples), self.targets, f"a batch of {self.name}", ids)

    def test_batch(self, ids: Ids) -> Batch:
        """The held-out samples with these ids, in this order. Raises DataError for an unknown id."""
        check_ids(ids, self.num_test_samples, f"test samples of {self.name}")
        assert self._test is not None
        return self._test.batch(ids)

    def feed(self, plan: BatchPlan, rank: int, seed: int) -> Feed:
        """A feed that seeds the global generators for each minibatch; see `SeededFeed`."""
        return SeededFeed(self, plan, seed)

    def __repr__(self) -> str:
        return f"<{self.name}: {self.num_samples} + {self.num_test_samples} samples>"


class SeededFeed(IdFeed):
    """Reads samples by id, with the global generators seeded by (seed, minibatch).

    So the augmentation of a sample depends on the minibatch, and not on the worker that reads it.
    """

    def __init__(self, data: Dataset, plan: BatchPlan, seed: int) -> None:
        super().__init__(data, plan)
        self._seed = seed

    @override
    def read(self, ref: BatchRef) -> Batch:
        with seeded(self._seed, ref.epoch, ref.partition, ref.batch):
            return super().read(ref)


def from_dataset(
    dataset: Any,
    collate: Collate | None = None,
    test: Any = None,
    *,
    targets: str | None = None,
    name: str | None = None,
) -> MapDataset:
    """A data set from an object that returns one sample at a time: `dataset[i]` for 0 ≤ i < `len(dataset)`.

    This holds for torch's map-style data sets, for lists of samples, and for others like them. Samples are read when
    their minibatch is computed, in an order that depends on the run's seed. Meanwhile Python's, numpy's and torch's
    global generators are seeded by (run seed, minibatch), so that augmentation is reproducible on any worker.

    `collate` makes a batch from a list of samples. A pair is (inputs, targets), each any tree (dicts, tuples, lists) of
    arrays or tensors. Any other batch is all inputs, except for the entry named by `targets`. For samples of varying
    length pass a `collate` that pads them, or one that returns lists of arrays.

    Args:
        dataset: the training samples.
        collate: function from a list of samples to a batch; None takes torch's `default_collate`, which stacks them.
        test: held-out samples, collated in the same way: another such data set, or a gradstream data set, whose
            training samples are then the held-out ones.
        targets: key of the targets if batches are dicts.
        name: name for messages and records.

    Raises:
        DataError: there are no samples.
        ConfigError: `dataset` has no length or cannot be indexed.

    Example:
        >>> samples = [(np.ones(3), 0), (np.zeros(3), 1)]
        >>> from_dataset(samples).batch(np.array([1, 0])).targets.tolist()
        [1, 0]
    """
    name = name or type(dataset).__name__
    check_mapped(dataset, name)
    check_targets(targets)
    collate = collate or default_collate
    return MapDataset(name, dataset, collate, targets, held_out_of(test, collate, targets, name))


def held_out_of(test: Any, collate: Collate, targets: str | None, name: str) -> Dataset | None:
    """The user's held-out samples as a data set, which has them as its training samples."""
    if test is None:
        return None
    if isinstance(test, DataLoader):
        if isinstance(test.dataset, IterableDataset):
            raise ConfigError(
                f"test data of {name!r}: a DataLoader over an IterableDataset has no numbered samples; expected a "
                "map-style data set, or a loader over one"
            )
        test, collate = test.dataset, test.collate_fn
    if hasattr(test, "batch") and hasattr(test, "num_test_samples"):
        if test.num_samples is None:
            raise ConfigError(
                f"test data of {name!r}: {test.name!r} is a stream; expected a map-style data set, or a loader over one"
            )
        held: Dataset = test
        return held
    check_mapped(test, f"{name}, held out")
    return MapDataset(f"{name}, held out", test, collate, targets, None)


def check_mapped(dataset: Any, name: str) -> None:
    """Raises ConfigError unless samples have numbers, and DataError if there are none."""
    numbered = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if isinstance(dataset, IterableDataset) or (isinstance(dataset, Iterable) and not numbered):
        raise ConfigError(
            f"data set {name!r} is iterable and has no numbered samples: use "
            "gradstream.from_loader(DataLoader(...)) or gradstream.from_stream"
        )
    if not numbered:
        raise ConfigError(
            f"data set {name!r} is {type(dataset).__name__}; expected one with len() and [index]"
        )
    if not len(dataset):
        raise DataError(f"data set {name!r} has no samples")
