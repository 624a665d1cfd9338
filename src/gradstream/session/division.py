"""Divides iterable datasets that say how: each worker then reads only its own part.

    shard(num_shards=, index=)   `datasets.IterableDataset`, and any dataset with such a method
    pipeline of named files      `webdataset.WebDataset` and other pipelines that begin with a list of `urls`
    names of files               a list of names or paths

A dataset is not divided by `torch.utils.data.get_worker_info()`, as if the processes of all workers were those of one
loader: one that does not ask for it would be read whole by each worker, and one that divides by `session.rank` too
would lose samples, both silently. It does see the processes of its own worker, and may divide its part among them.
"""

from __future__ import annotations

import copy
import inspect
import os
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch.utils.data import DataLoader

from gradstream.errors import ConfigError

SEED_LIMIT = 1 << 64
"""numpy draws the entropy of generators without a seed from 128 bits."""

SPLITTERS = ("single_node_only", "split_by_node")
"""Stages of webdataset that refuse several workers, or divide the files by RANK and WORLD_SIZE."""

_FILE = re.compile(r"\S+\.\w{1,16}|\S+://\S+|pipe:.+")


class OwnPart(NamedTuple):
    """A worker's part of a dataset.

    Args:
        dataset: a dataset that yields only this part.
        files: number of files of the part, if each process that reads needs one; else None.
        most: the most parts into which the dataset can be divided; None if it does not say.
    """

    dataset: Any
    files: int | None = None
    most: int | None = None

    def processes(self, number: int) -> int:
        """How many of so many processes of a loader read the part: those beyond the files would take it for empty."""
        return min(number, max(1, self.files or number))


def own_part_of(dataset: Any, rank: int, world_size: int) -> OwnPart | None:
    """A worker's part of a dataset; None if the dataset cannot say how it is divided, or into so many parts.

    Raises:
        ConfigError: workers would divide it in different ways.
    """
    if _can_shard(dataset):
        shards = getattr(dataset, "num_shards", None)
        most = shards if isinstance(shards, int) else None
        if most is not None and most < world_size:
            return None
        _check_seeds(dataset)
        part = dataset.shard(num_shards=world_size, index=rank)
        _follow_epochs(dataset, part)
        return OwnPart(part, most=most)
    stages = getattr(dataset, "pipeline", None)
    if isinstance(stages, list) and stages:
        return _part_of_pipeline(dataset, stages, rank, world_size)
    return None


def _can_shard(dataset: Any) -> bool:
    try:
        names = inspect.signature(dataset.shard).parameters.keys()
    except (AttributeError, TypeError, ValueError):
        return False
    return {"num_shards", "index"} <= names


def _check_seeds(dataset: Any) -> None:
    """Checks that a dataset of `datasets` was shuffled with a seed: each worker has drawn the order of its files."""
    inner = [getattr(dataset, "_ex_iterable", None)]
    for stage in inner:  # grows meanwhile
        bits = getattr(getattr(stage, "generator", None), "bit_generator", None)
        entropy = getattr(getattr(bits, "seed_seq", None), "entropy", None)
        if isinstance(entropy, int) and entropy >= SEED_LIMIT:
            raise ConfigError(
                "session.shard: the dataset was shuffled without a seed, so each worker has another order of its "
                "files: some would be read twice and others never. Shuffle it with a seed: dataset.shuffle(seed=0)"
            )
        if stage is not None:
            inner += [getattr(stage, "ex_iterable", None), *getattr(stage, "ex_iterables", ())]


def _follow_epochs(dataset: Any, part: Any) -> None:
    """Lets the script call `dataset.set_epoch(epoch)`, which sets the order of the next iteration, as before."""
    whole, own = getattr(dataset, "set_epoch", None), getattr(part, "set_epoch", None)
    if whole is None or own is None:
        return
    if isinstance(epoch := getattr(dataset, "epoch", None), int):
        own(epoch)

    def set_epoch(epoch: int) -> None:
        whole(epoch)
        own(epoch)

    dataset.set_epoch = set_epoch


def _part_of_pipeline(dataset: Any, stages: list[Any], rank: int, world_size: int) -> OwnPart | None:
    """A worker's part of a pipeline: a copy with its part of the files or, behind a DataLoader, of that loader."""
    head = stages[0]
    files: int | None = None
    if is_loading_pipeline(dataset):
        inner = own_part_of(head.dataset, rank, world_size)
        if inner is None:
            return None
        made: Any = object.__new__(type(head))
        processes, most = inner.processes(head.num_workers), inner.most
        vars(made).update(
            {**vars(head), "dataset": inner.dataset, "num_workers": processes, "_iterator": None}
        )
    else:
        urls = getattr(head, "urls", None)
        if not isinstance(urls, list) or "Resampled" in type(head).__name__ or len(urls) < world_size:
            return None
        made = copy.copy(head)
        made.urls = urls[rank::world_size]
        files, most = len(made.urls), len(urls)
    part = without_splitters(dataset)
    part = copy.copy(dataset) if part is dataset else part
    part.pipeline = [made, *part.pipeline[1:]]
    for name in ("nsamples", "size"):  # of an epoch, as the user has set it
        if isinstance(number := getattr(dataset, name, None), int) and number > 0:
            setattr(part, name, -(-number // world_size))
    return OwnPart(part, files, most)


def without_splitters(dataset: Any) -> Any:
    """A pipeline without stages that divide its files among workers, or refuse to: `shard` does that."""
    stages = getattr(dataset, "pipeline", None)
    if not isinstance(stages, list) or not any(_name_of(stage) in SPLITTERS for stage in stages):
        return dataset
    made = copy.copy(dataset)
    made.pipeline = [stage for stage in stages if _name_of(stage) not in SPLITTERS]
    return made


def is_loading_pipeline(data: Any) -> bool:
    """Whether this is a pipeline behind a DataLoader, such as `webdataset.WebLoader`: it yields minibatches."""
    stages = getattr(data, "pipeline", None)
    return isinstance(stages, list) and bool(stages) and isinstance(stages[0], DataLoader)


def _name_of(stage: Any) -> str:
    return str(getattr(getattr(stage, "func", stage), "__name__", ""))


def are_file_names(data: Any) -> bool:
    """Whether this is a list of names of files, as opposed to minibatches of text."""
    if not isinstance(data, list) or not data:
        return False
    if all(isinstance(name, os.PathLike) for name in data):
        return True
    return all(isinstance(name, str) and _FILE.fullmatch(name) for name in data)


class OwnName(str):
    """The name of a file in this worker's part, so that a dataset that keeps it is not divided again."""

    __slots__ = ()


class OwnFiles(list[Any]):
    """This worker's part of the names of files."""


def own_files(names: Sequence[Any], rank: int, world_size: int) -> OwnFiles:
    """A worker's part of the names of files.

    Raises:
        ConfigError: there are fewer files than workers.
    """
    if len(names) < world_size:
        raise ConfigError(
            f"session.shard: got {len(names)} files for {world_size} workers; expected at least one for each: divide "
            "the data into more files, or shard a DataLoader that reads all of them"
        )
    own = names[rank::world_size]
    return OwnFiles(OwnName(name) if isinstance(name, str) else name for name in own)


def reads_own_files(dataset: Any) -> bool:
    """Whether a dataset, or the first stage of its pipeline, keeps names of files of `own_files`."""
    stages = getattr(dataset, "pipeline", None)
    holders = [dataset, *(stages[:1] if isinstance(stages, list) else ())]
    values = [value for holder in holders for value in getattr(holder, "__dict__", {}).values()]
    return any(
        isinstance(value, OwnFiles | OwnName)
        or (isinstance(value, list | tuple) and len(value) > 0 and isinstance(value[0], OwnName))
        for value in values
    )


def own_rows(table: Any, rank: int, world_size: int) -> Any:
    """A worker's rows of a table that can be divided, such as `datasets.Dataset`: every W-th."""
    names = inspect.signature(table.shard).parameters
    every = {"contiguous": False} if "contiguous" in names else {}
    return table.shard(num_shards=world_size, index=rank, **every)


def is_table(data: Any) -> bool:
    """Whether this is a table that can be divided, such as `datasets.Dataset`, which is no `Dataset` of torch."""
    return _can_shard(data) and hasattr(data, "__len__") and hasattr(data, "__getitem__")
