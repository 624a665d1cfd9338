"""Parts of data loaders: every sample is seen once by some worker, and all make the same number of steps."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

import gradstream as gs
from gradstream.errors import ConfigError
from gradstream.session.loaders import part_of
from gradstream.session.loaders_part import LoaderPart
from gradstream.session.samples import SampleCount
from gradstream.testing.sessions import loop_in_threads

Taken = list[tuple[list[int], int | None]]  # the samples of each minibatch, and how many it counts


class Ids(Dataset[int]):
    """Sample i is i."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


class Bulk(Ids):
    """Is asked for a whole minibatch."""

    def __getitem__(self, index: Any) -> Any:
        return torch.tensor(index)


class Stream(IterableDataset[int]):
    """Without a length, in an order that it draws from the generators of the process."""

    def __init__(self, size: int, *, shuffle: bool = False) -> None:
        self.size, self.shuffle = size, shuffle

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.size))
        if self.shuffle:
            random.shuffle(order)
            order = [order[place] for place in torch.randperm(self.size).tolist()]
        worker = torch.utils.data.get_worker_info()
        return iter(order if worker is None else order[worker.id :: worker.num_workers])


class Measured(Stream):
    """With a length."""

    def __len__(self) -> int:
        return self.size


class Buckets:
    """A batch sampler: minibatches of any sizes, in an order of numpy's global generator. No length."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        order, place = np.random.permutation(self.size).tolist(), 0  # noqa: NPY002
        while place < self.size:
            length = int(np.random.randint(1, 6))  # noqa: NPY002
            yield tuple(order[place : place + length])
            place += length


class Moved(DataLoader[Any]):
    """A loader class of the user's: does something with each minibatch."""

    device = "none"

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield {"ids": batch, "device": self.device}


def minibatches(samples: int, size: int) -> list[torch.Tensor]:
    return [torch.arange(samples)[start : start + size] for start in range(0, samples, size)]


KINDS: dict[str, Callable[[int], Any]] = {
    "in order": lambda n: DataLoader(Ids(n), batch_size=4),
    "shuffled": lambda n: DataLoader(Ids(n), batch_size=4, shuffle=True),
    "drop_last": lambda n: DataLoader(Ids(n), batch_size=4, shuffle=True, drop_last=True),
    "own generator": lambda n: DataLoader(
        Ids(n), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(3)
    ),
    "weighted": lambda n: DataLoader(
        Ids(n), batch_size=4, sampler=WeightedRandomSampler([1 + i % 3 for i in range(n)], n)
    ),
    "subset": lambda n: DataLoader(Ids(n), batch_size=4, sampler=SubsetRandomSampler(range(0, n, 2))),
    "batch sampler": lambda n: DataLoader(Ids(n), batch_sampler=Buckets(n)),  # type: ignore[arg-type]
    "not collated": lambda n: DataLoader(Ids(n), batch_size=None, shuffle=True),
    "in bulk": lambda n: DataLoader(
        Bulk(n), batch_size=None, sampler=BatchSampler(RandomSampler(range(n)), 4, False)
    ),
    "own class": lambda n: Moved(Ids(n), batch_size=4, shuffle=True),
    "stream": lambda n: DataLoader(Stream(n), batch_size=4),
    "shuffled stream": lambda n: DataLoader(Stream(n, shuffle=True), batch_size=4),
    "stream with a length": lambda n: DataLoader(Measured(n), batch_size=4),
    "minibatches": lambda n: minibatches(n, 4),
    "iterator": lambda n: iter(minibatches(n, 4)),
}


def ids_of(batch: Any) -> list[int]:
    ids = batch["ids"] if isinstance(batch, dict) else batch
    return torch.as_tensor(ids).reshape(-1).tolist()


def epochs_of(make: Callable[[], Any], rank: int, world_size: int, epochs: int = 1, **options: Any) -> Any:
    """What a worker takes in each epoch. The generators of its process stand anywhere."""
    torch.manual_seed(rank)
    random.seed(rank)
    np.random.seed(rank)  # noqa: NPY002
    counts: list[int | None] = []
    part = part_of(make(), LoaderPart(rank, world_size, 7, options.get("split", False), counts.append, True))
    taken: list[Taken] = []
    for _ in range(epochs):
        taken.append([(ids_of(batch), counts.pop()) for batch in part])
        try:
            assert len(part) == len(taken[-1])
        except TypeError:  # it has none
            pass
    return taken


def counted(taken: Taken) -> list[int]:
    """The samples that count. Each minibatch counts all of its own, or it is a repeat."""
    assert all(count in (len(ids), 0, None) for ids, count in taken)
    return [one for ids, count in taken for one in ids if count != 0]


def check(make: Callable[[], Any], world_size: int, epochs: int = 1, **options: Any) -> list[list[int]]:
    """Holds that workers share the epochs of one process. Returns the samples of each."""
    alone = epochs_of(make, 0, 1, epochs, **options)
    parts = [epochs_of(make, rank, world_size, epochs, **options) for rank in range(world_size)]
    for epoch, whole in enumerate(alone):
        assert len({len(part[epoch]) for part in parts}) == 1
        dealt = 1 if options.get("split") else world_size
        steps = -(-len(whole) // dealt)
        assert len(parts[0][epoch]) == steps
        seen = Counter(one for part in parts for one in counted(part[epoch]))
        assert seen == Counter(counted(whole))
        for number in range(steps):  # round by round
            joined = [one for part in parts for one in counted(part[epoch][number : number + 1])]
            assert Counter(joined) == Counter(counted(whole[number * dealt : (number + 1) * dealt]))
    return [counted(whole) for whole in alone]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20)
@given(size=st.integers(1, 30), world_size=st.integers(2, 3), split=st.booleans())
def test_every_sample_of_an_epoch_is_seen_once_and_all_make_the_same_number_of_steps(
    kind: str, size: int, world_size: int, split: bool
) -> None:
    split = split and kind != "not collated"
    epochs = 1 if kind == "iterator" else 2
    seen = check(lambda: KINDS[kind](size), world_size, epochs, split=split)
    if kind not in ("drop_last", "subset", "weighted"):
        assert all(sorted(epoch) == list(range(size)) for epoch in seen)
    elif kind != "weighted":
        assert all(len(set(epoch)) == len(epoch) for epoch in seen)
    if "shuffled" in kind and size > 12 and kind != "shuffled stream":
        assert seen[0] != seen[1]


@pytest.mark.parametrize("kind", ["shuffled", "stream"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_the_same_with_loader_processes_that_stay(kind: str, world_size: int) -> None:
    def make() -> Any:
        data: Any = Stream(23) if kind == "stream" else Ids(23)
        return DataLoader(
            data, batch_size=4, num_workers=2, persistent_workers=True, prefetch_factor=3,
            shuffle=None if kind == "stream" else True,
        )  # fmt: skip

    first, second = check(make, world_size, 2)
    assert sorted(first) == sorted(second) == list(range(23))
    assert (first != second) == (kind == "shuffled")


def of_process(samples: list[int]) -> tuple[list[int], int]:
    return samples, os.getpid()


def test_loader_processes_and_settings_are_kept() -> None:
    loader = DataLoader(
        Ids(12), 2, shuffle=True, num_workers=1, persistent_workers=True, collate_fn=of_process, timeout=60
    )
    part = part_of(loader, LoaderPart(0, 2, 7, False, lambda count: None, True))
    whole = [list(part) for _ in range(2)]
    list(zip(part, range(1), strict=False))  # stopped early
    whole.append(list(part))
    assert len({pid for epoch in whole for _, pid in epoch}) == 1
    plain = part_of(
        DataLoader(Ids(12), 2, shuffle=True), LoaderPart(0, 2, 7, False, lambda count: None, True)
    )
    plain.batch_sampler.set_epoch(0)  # epochs are the same ones without processes
    without = [[batch.tolist() for batch in plain] for _ in range(4)]
    assert [[ids for ids, _ in epoch] for epoch in whole] == [*without[:2], without[3]]
    assert isinstance(part, DataLoader)
    for name in (
        "dataset",
        "sampler",
        "num_workers",
        "prefetch_factor",
        "collate_fn",
        "timeout",
    ):
        assert getattr(part, name) is getattr(loader, name)
    assert part.batch_sampler.batch_size == 2  # type: ignore[union-attr]  # as theirs has
    assert len(loader) == 6
    assert loader._iterator is None  # theirs is not ours


def test_two_iterations_of_a_loader_can_go_on_beside_each_other() -> None:
    counts: list[int | None] = []
    part = part_of(DataLoader(Ids(9), 2), LoaderPart(1, 2, 7, False, counts.append, True))
    both = [(one.tolist(), other.tolist()) for one, other in zip(part, part, strict=True)]
    assert both == [([2, 3], [2, 3]), ([6, 7], [6, 7]), ([6, 7], [6, 7])]
    assert counts == [2, 2, 2, 2, 0, 0]


def test_an_endless_sampler_is_drawn_as_it_is_needed() -> None:
    class Endless(SequentialSampler):
        def __iter__(self) -> Iterator[int]:
            while True:
                yield from super().__iter__()

    loader = DataLoader(Ids(3), 2, sampler=Endless(Ids(3)))
    part = part_of(loader, LoaderPart(1, 2, 7, False, lambda count: None, True))
    assert [batch.tolist() for batch, _ in zip(part, range(2), strict=False)] == [[2, 0], [0, 1]]


def test_without_rounds_nobody_repeats() -> None:
    for data in (DataLoader(Ids(9), 2), minibatches(9, 2)):
        for split, expected in ((False, [[0, 1], [4, 5], [8]]), (True, [[0], [2], [4], [6], [8]])):
            parts = [part_of(data, LoaderPart(rank, 2, 0, split, lambda count: None)) for rank in range(2)]
            taken = [[batch.tolist() for batch in part] for part in parts]
            assert taken[0] == expected
            assert taken[1] == ([[1], [3], [5], [7]] if split else [[2, 3], [6, 7]])


def test_a_repeat_is_one_of_the_workers_own() -> None:
    taken = [epochs_of(lambda: DataLoader(Ids(9), 2), rank, 3)[0] for rank in range(3)]
    assert taken[2] == [([4, 5], 2), ([4, 5], 0)]
    short = [epochs_of(lambda: DataLoader(Ids(3), 2), rank, 3)[0] for rank in range(3)]
    assert short == [[([0, 1], 2)], [([2], 1)], [([0, 1], 0)]]
    split = [epochs_of(lambda: DataLoader(Ids(4), 3), rank, 3, split=True)[0] for rank in range(3)]
    assert split[1:] == [[([1], 1), ([3], 0)], [([2], 1), ([3], 0)]]


def test_samples_are_counted_by_their_numbers_not_by_the_shape_of_tensors() -> None:
    def time_first(samples: list[int]) -> torch.Tensor:
        return torch.tensor(samples).expand(7, len(samples))  # (T, B)

    counts: list[int | None] = []
    loader = DataLoader(Ids(10), 4, collate_fn=time_first, num_workers=1)
    list(part_of(loader, LoaderPart(0, 2, 0, False, counts.append, True)))
    assert counts == [4, 2]


# ---- data that the user has divided -----------------------------------------------------


class Shard:
    """As accelerate's BatchSamplerShard."""

    def __init__(self, batch_sampler: Any, num_processes: int, process_index: int) -> None:
        self.batch_sampler = batch_sampler
        self.num_processes, self.process_index = num_processes, process_index

    def __iter__(self) -> Any:
        return iter(list(self.batch_sampler)[self.process_index :: self.num_processes])


class OfNode(Stream):
    """As an iterable data set that divides itself."""

    def __init__(self, size: int, rank: int, world_size: int, *, inside: bool = False) -> None:
        super().__init__(size)
        self.of = slice(rank, None, world_size)
        if inside:  # as datasets.distributed.split_dataset_by_node
            self._distributed = type("Config", (), {"rank": rank, "world_size": world_size})()
        else:
            self.rank, self.num_replicas = rank, world_size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.size)[self.of])


DIVIDED: dict[str, Callable[[int, int, int], DataLoader[Any]]] = {
    "DistributedSampler": lambda n, r, w: DataLoader(Ids(n), 2, sampler=DistributedSampler(Ids(n), w, r)),
    "in a batch sampler": lambda n, r, w: DataLoader(
        Ids(n), batch_sampler=BatchSampler(DistributedSampler(Ids(n), w, r, shuffle=False), 2, False)
    ),
    "BatchSamplerShard": lambda n, r, w: DataLoader(
        Ids(n),
        batch_sampler=Shard(BatchSampler(RandomSampler(range(n)), 2, False), w, r),
    ),
    "stream": lambda n, r, w: DataLoader(OfNode(n, r, w), 2),
    "datasets": lambda n, r, w: DataLoader(OfNode(n, r, w, inside=True), 2),
}


@pytest.mark.parametrize("kind", DIVIDED)
@pytest.mark.parametrize("world_size", [2, 3])
def test_what_the_user_has_divided_is_not_divided_again(kind: str, world_size: int) -> None:
    size = 4 * world_size
    for split in (False, True):
        parts = [
            epochs_of(partial(DIVIDED[kind], size, rank, world_size), rank, world_size, 2, split=split)
            for rank in range(world_size)
        ]
        for epoch in range(2):
            assert sorted(one for part in parts for one in counted(part[epoch])) == list(range(size))
            assert {len(part[epoch]) for part in parts} == {2}


@pytest.mark.parametrize("kind", DIVIDED)
def test_what_is_divided_for_others_is_refused(kind: str) -> None:
    for rank, world_size, match in (
        (0, 1, "every worker would see all"),
        (0, 4, "not be seen"),
        (1, 2, "not be"),
    ):
        with pytest.raises(ConfigError, match=match):
            part_of(DIVIDED[kind](8, rank, world_size), LoaderPart(0, 2, 0, False, lambda count: None, True))


def test_the_epoch_reaches_the_users_own_sampler() -> None:
    sampler: DistributedSampler[int] = DistributedSampler(Ids(8), num_replicas=2, rank=0)
    part = part_of(
        DataLoader(Ids(8), 2, sampler=sampler), LoaderPart(0, 2, 0, False, lambda count: None, True)
    )
    part.batch_sampler.set_epoch(5)
    assert sampler.epoch == 5


# ---- refused ----------------------------------------------------------------------------


def test_what_cannot_be_divided_is_refused_with_a_remedy() -> None:
    def shard(data: Any, *, split: bool = False) -> Any:
        return part_of(data, LoaderPart(0, 2, 0, split, lambda count: None, True))

    class Repeating(DataLoader[Any]):
        """As those that keep their processes by an iterator of their own."""

        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            self.kept = iter(super().__iter__())

        def __iter__(self) -> Any:
            return self.kept

    with pytest.raises(ConfigError, match="call shard once"):
        shard(shard(DataLoader(Ids(4))))
    with pytest.raises(ConfigError, match="call shard once"):
        shard(shard(["a", "b"]))
    with pytest.raises(ConfigError, match="from an iterator made before shard"):
        list(shard(Repeating(Ids(4))))
    with pytest.raises(ConfigError, match="in_order=True"):
        shard(DataLoader(Stream(4), in_order=False))
    with pytest.raises(ConfigError, match="split=False"):
        list(shard(DataLoader(Ids(4), batch_size=None), split=True))
    with pytest.raises(ConfigError, match="leave out 1 samples"):
        shard(TensorDataset(torch.arange(5)))
    assert len(shard(TensorDataset(torch.arange(6)))) == 3


# ---- how many samples are behind a gradient ---------------------------------------------


def test_minibatches_count_before_what_the_model_is_called_with() -> None:
    count = SampleCount()
    assert count.take() == 1
    count.see(5)
    assert count.take() == 5
    count.note(8)
    count.note(4)  # accumulated
    count.see(7)
    assert count.take() == 12
    count.note(None)
    count.see(7)
    assert count.take() == 7
    count.note(8)
    count.set(3)
    assert count.take() == 3
    count.note(8)
    count.clear()
    with torch.no_grad():
        count.note(100)  # of a validation
    count.see(2)
    assert count.take() == 8  # the same minibatch
    count.note(6)
    count.over()  # next(iter(loader)): its minibatch counts once
    count.see(2)
    assert count.take() == 6
    count.see(2)
    assert count.take() == 2


def test_a_repeat_counts_nothing_whatever_is_said_of_it() -> None:
    count = SampleCount()
    count.note(0)
    count.set(3)
    count.see(3)
    assert [count.take() for _ in range(2)] == [0, 0]  # twice, as for two losses of one minibatch
    count.note(5)
    count.note(0)
    assert count.take() == 5
    count.see(3)
    assert count.take() == 3  # minibatches were taken ahead of their steps


def test_minibatches_of_time_and_sample_make_the_steps_of_one_process() -> None:
    """The last round has 8 samples of one worker and 4 of the other, or only those of one."""

    def train(session: gs.Session, size: int, batch_size: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(size, 3, 4, generator=generator).double()  # (samples, T, F)
        model = nn.Linear(4, 1).double()
        nn.init.constant_(model.weight, 0.5)
        nn.init.zeros_(model.bias)

        def time_first(samples: list[torch.Tensor]) -> torch.Tensor:
            return torch.stack(samples, 1)

        loader = session.shard(DataLoader(list(x), batch_size, collate_fn=time_first))  # type: ignore[arg-type]
        model, optimizer = session.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(2):
            for batch in loader:
                optimizer.zero_grad()
                (model(batch) - batch.sum(2, keepdim=True)).square().mean().backward()
                optimizer.step()
        session.close()
        return model.weight.detach().clone()

    for size in (60, 56):
        both = loop_in_threads(lambda session, size=size: train(session, size, 8))  # type: ignore[misc]
        assert torch.equal(*both)
        torch.testing.assert_close(both[0], train(gs.Session(), size, 16), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"iterator", "minibatches", "batch sampler"}))
@pytest.mark.parametrize("split", [False, True])
def test_a_saved_place_is_where_the_loop_was(kind: str, split: bool) -> None:
    if split and kind == "not collated":
        return
    counts: list[int | None] = []
    this = LoaderPart(1, 2, 7, split, counts.append, True)

    def epochs(loader: Any, number: int, states: list[Any]) -> list[list[int]]:
        taken = []
        for _ in range(number):
            for batch in loader:
                states.append(loader.state_dict())
                taken.append(ids_of(batch) if counts[-1] else [])  # a repeat may be of any minibatch
        return taken

    states: list[Any] = []
    whole = epochs(part_of(KINDS[kind](13), this), 3, states)
    for place in range(0, len(whole) - 1, 2):
        again = part_of(KINDS[kind](13), this)
        again.load_state_dict(states[place])
        with torch.no_grad():
            list(again)  # a validation
        assert epochs(again, 3, [])[: len(whole) - place - 1] == whole[place + 1 :]


def test_a_place_of_another_number_of_workers_is_refused() -> None:
    two, three = (part_of(DataLoader(Ids(9), 2), LoaderPart(0, n, 7, False, print)) for n in (2, 3))
    with pytest.raises(ConfigError, match="2 workers"):
        three.load_state_dict(two.state_dict())
