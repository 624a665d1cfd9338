"""DataLoaders whose sampler or dataset gives each worker its part already: torch's, accelerate's, others.

Such a loader must not be divided once more, or most of its samples would never be seen. What divides
data says so by two attributes: how many processes there are, and which of them it is for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from gradstream.errors import ConfigError
from gradstream.session.loaders_part import LoaderPart

__all__ = ["is_divided"]

_NAMES = (("num_replicas", "rank"), ("num_processes", "process_index"), ("world_size", "rank"))
"""Of torch's and most samplers; of accelerate's; of mmengine's, and of what `datasets` keeps."""


def is_divided(loader: DataLoader[Any], part: LoaderPart) -> bool:
    """Whether the loader gives this worker's part of the data, and not all of it.

    Raises:
        ConfigError: it gives the part of another worker, or of one of another number of workers.
    """
    for divider in _nested(loader):
        for total, which in _NAMES:
            found = getattr(divider, total, None), getattr(divider, which, None)
            if not all(isinstance(number, int) for number in found):
                continue
            if found == (part.world_size, part.rank):
                return True
            raise ConfigError(
                f"shard: the loader's {type(divider).__name__} has {total}={found[0]}, {which}={found[1]}; "
                f"expected {total}={part.world_size}, {which}={part.rank}: "
                + ("every worker would see all samples" if found[0] == 1 else "samples would not be seen")
                + f". Make it with {total}=session.world_size, {which}=session.rank (a process group that "
                "is begun later does not tell it); or give shard a loader without it: shard divides that"
            )
    return False


def _nested(loader: DataLoader[Any]) -> Iterator[Any]:
    """All that may divide the data: samplers inside of samplers, or datasets inside of iterable ones."""
    if isinstance(loader.dataset, IterableDataset):
        seen: list[Any] = [loader.dataset]
        names = ("dataset", "_distributed")  # the latter: datasets.split_dataset_by_node
    else:
        seen, names = [loader.batch_sampler, loader.sampler], ("batch_sampler", "sampler")
    for one in seen:  # grows meanwhile
        yield one
        inner = [getattr(one, name, None) for name in names]
        seen += [found for found in inner if found is not None and not any(found is other for other in seen)]
