"""Data sets that give one sample at a time: torch's map-style ones, lists, anything with len and []."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, default_collate

from gradstream.data.arrays import check_ids
from gradstream.data.base import BatchPlan, BatchRef, Dataset, Feed, Ids
from gradstream.data.collated import check_targets, collated
from gradstream.data.feed import IdFeed
from gradstream.data.randomness import seeded
from gradstream.errors import ConfigError, DataError
from gradstream.model.batch import Batch, Tree

__all__ = ["Collate", "MapDataset", "SeededFeed", "check_mapped", "from_dataset", "held_out_of"]

Collate = Callable[[list[Any]], Tree]


class MapDataset:
    """Samples by number, put together by a collate function. Made by `from_dataset`, which checks them.

    Args:
        name: for messages and records.
        dataset: the samples to train on.
        collate: list of samples to a batch.
        targets: key of the targets in a batch that is a dict.
        test: held-out samples: those that this data set trains on.
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
        if hasattr(self.dataset, "__getitems__"):  # torch's protocol: many at once
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
        """Reads minibatches, each under a seed of its own: see `SeededFeed`."""
        return SeededFeed(self, plan, seed)

    def __repr__(self) -> str:
        return f"<{self.name}: {self.num_samples} + {self.num_test_samples} samples>"


class SeededFeed(IdFeed):
    """Reads samples by id, with the global generators seeded by (seed, minibatch).

    So what a sample is augmented to depends on the minibatch and not on who reads it.
    """

    def __init__(self, data: Dataset, plan: BatchPlan, seed: int) -> None:
        super().__init__(data, plan)
        self._seed = seed

    def read(self, ref: BatchRef) -> Batch:
        """See `Feed`."""
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
    """A data set from one that gives a sample at a time: `dataset[i]` for 0 ≤ i < `len(dataset)`.

    torch's map-style data sets are such, and a list of samples, and others that follow the two.
    Samples are read when their minibatch is computed, in an order that the run's seed decides.
    Python's, numpy's and torch's global generators are seeded by (run seed, minibatch) meanwhile, so
    that augmentation is reproducible, whichever worker does it.

    A batch is what `collate` makes of a list of samples. A pair is (inputs, targets), and each may
    be any tree (dicts, tuples, lists) of arrays or tensors; anything else is all inputs, but for the
    entry named by `targets`. For samples of varying length give a `collate` that pads them, or one
    that returns lists of arrays.

    Args:
        dataset: the samples to train on.
        collate: list of samples to a batch; None takes torch's `default_collate`, which stacks.
        test: held-out samples, collated likewise: another such data set, or one of gradstream's,
            whose training samples are then the held-out ones.
        targets: key of the targets where batches are dicts.
        name: for messages and records.

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
    """What a user gives as held-out samples, as a data set whose training samples they are."""
    if test is None:
        return None
    if isinstance(test, DataLoader):
        if isinstance(test.dataset, IterableDataset):
            raise ConfigError(
                f"test data of {name!r}: a DataLoader over an IterableDataset has no numbered samples"
            )
        test, collate = test.dataset, test.collate_fn
    if hasattr(test, "batch") and hasattr(test, "num_test_samples"):
        if test.num_samples is None:
            raise ConfigError(f"test data of {name!r}: {test.name!r} is a stream; expected numbered samples")
        held: Dataset = test
        return held
    check_mapped(test, f"{name}, held out")
    return MapDataset(f"{name}, held out", test, collate, targets, None)


def check_mapped(dataset: Any, name: str) -> None:
    """Raises unless it is numbered and not empty."""
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
