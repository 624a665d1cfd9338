"""Users' own data: numbered samples, loaders, streams; what each setting means with several workers."""

from __future__ import annotations

import os
import random
import re
import signal
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
)

import gradstream as gs
from gradstream.data.base import BatchRef, PartitionSpec
from gradstream.data.base import Dataset as AnyData
from gradstream.data.feed import feed_of, plan_of
from gradstream.data.isolation import Generators, seeded, seeded_iterator
from gradstream.errors import ConfigError, DataError, UserCodeError


def spec_of(**changes: Any) -> PartitionSpec:
    fields: dict[str, Any] = {"partitioning": "partitions", "batch_size": 32, "workers": 2, "seed": 3}
    fields |= {"shares": None, "epochs": 2, "steps": None}
    return PartitionSpec(**(fields | changes))


def read_all(data: AnyData, spec: PartitionSpec, *, epochs: int = 1) -> dict[BatchRef, Any]:
    """Every minibatch of all workers, by name."""
    plan = plan_of(data, spec)
    found = {}
    for rank in range(spec.workers):
        feed = feed_of(data, plan, rank, spec.seed)
        for epoch in range(epochs):
            for batch in range(plan.batches_per_epoch(rank)):
                ref = BatchRef(epoch, rank, batch)
                if plan.size(ref) != 0:
                    found[ref] = feed.read(ref)
    return found


def flat(lists: list[list[int]]) -> list[int]:
    return [number for one in lists for number in one]


def numbers(batches: dict[BatchRef, Any]) -> list[list[int]]:
    return [np.asarray(batch.inputs).ravel().astype(int).tolist() for batch in batches.values()]


class Numbered(Dataset[Any]):
    """Sample i is (i, i + noise); the noise is drawn from all three global generators."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[np.ndarray[Any, Any], float]:
        noise = random.random() + float(np.random.rand()) + float(torch.rand(1))  # noqa: NPY002
        return np.full(1, float(index)), index + noise


# ---- trees --------------------------------------------------------------------------------


def test_arrays_may_be_trees() -> None:
    x = {"left": np.arange(6), "right": (np.ones((6, 2)), [10.0, 11, 12, 13, 14, 15])}
    data = gs.from_arrays(x, {"y": np.arange(6)}, x, {"y": np.arange(6)})
    batch = data.batch(np.array([4, 1]))
    assert batch.inputs["left"].tolist() == [4, 1]
    assert batch.inputs["right"][1].tolist() == [14, 11]
    assert (batch.targets["y"].tolist(), batch.num_samples, data.num_test_samples) == ([4, 1], 2, 6)
    assert gs.from_arrays(np.ones(3)).batch(np.array([0])).targets is None
    assert "scalar int64" in repr(data)
    assert data.checksum == gs.from_arrays(x, {"y": np.arange(6)}, x, {"y": np.arange(6)}).checksum
    assert data.checksum != gs.from_arrays(x, {"z": np.arange(6)}, x, {"z": np.arange(6)}).checksum


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (({"a": [1, 2], "b": [1]},), re.escape("2 inputs and 1 inputs['b']")),
        (({"a": [1, 2]}, {"y": [1]}), re.escape("2 inputs and 1 targets['y']")),
        (({},), "empty dict"),
        (({"a": ["x"]},), re.escape("inputs['a'] have dtype <U1")),
        (({"a": [1]}, None, {"b": [1]}), re.escape("test_inputs have the parts [\"inputs['b']\"]")),
        (([1], None, [1], [1]), "lacks targets"),
        (([[1], [1, 2]],), "from_dataset"),
    ],
)
def test_trees_that_do_not_fit(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(DataError, match=message):
        gs.from_arrays(*arguments)


# ---- numbered samples ---------------------------------------------------------------------


def test_samples_are_collated_and_every_one_comes_once() -> None:
    data = gs.from_dataset(Numbered(21), test=Numbered(5))
    batches = read_all(data, spec_of(batch_size=4))
    assert sorted(flat(numbers(batches))) == list(range(21))
    assert isinstance(next(iter(batches.values())).inputs, torch.Tensor)
    assert data.test_batch(np.array([4, 0])).inputs.tolist() == [[4.0], [0.0]]
    assert repr(data) == "<Numbered: 21 + 5 samples>"


def test_random_numbers_of_a_minibatch_depend_on_its_name_alone() -> None:
    data, spec = gs.from_dataset(Numbered(8)), spec_of(batch_size=2)
    plan = plan_of(data, spec)
    own, others = feed_of(data, plan, 0, 3), feed_of(data, plan, 1, 3)
    refs = [BatchRef(epoch, 0, batch) for epoch in (0, 1) for batch in (0, 1)]
    in_order = [own.read(ref).targets.tolist() for ref in refs]
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    assert [others.read(ref).targets.tolist() for ref in refs[::-1]] == in_order[::-1]
    assert torch.equal(torch.rand(1), expected)  # the caller's own generators are left alone
    assert feed_of(data, plan, 0, 4).read(refs[0]).targets.tolist() != in_order[0]


def test_dicts_name_their_targets_and_samples_may_vary_in_length() -> None:
    tokens = [np.arange(1, 1 + n) for n in (3, 1, 2)]
    samples = [{"tokens": line, "label": len(line)} for line in tokens]

    def as_lists(samples: list[Any]) -> dict[str, Any]:
        return {"tokens": [s["tokens"] for s in samples], "label": np.array([s["label"] for s in samples])}

    data = gs.from_dataset(samples, as_lists, targets="label")
    batch = data.batch(np.array([2, 0]))
    assert [line.tolist() for line in batch.inputs["tokens"]] == [[1, 2], [1, 2, 3]]
    assert batch.targets.tolist() == [2, 3]
    with pytest.raises(DataError, match=r"a dict of \['label', 'tokens'\]; expected a dict with the key 'y'"):
        gs.from_dataset(samples, as_lists, targets="y").batch(np.array([0]))


def test_data_that_is_not_numbered_is_sent_elsewhere() -> None:
    class Lines(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            yield 1

    for wrong in (Lines(), (n for n in range(3))):
        with pytest.raises(ConfigError, match="from_stream"):
            gs.from_dataset(wrong)
    with pytest.raises(ConfigError, match="is int; expected one with len"):
        gs.from_dataset(3)
    with pytest.raises(DataError, match="has no samples"):
        gs.from_dataset([])


# ---- loaders over numbered samples --------------------------------------------------------


@pytest.mark.parametrize("partitioning", ["rounds", "partitions"])
def test_a_loaders_batch_size_order_and_drop_last_are_kept(partitioning: Any) -> None:
    loader = DataLoader(Numbered(22), batch_size=4, shuffle=False, drop_last=True)
    batches = read_all(gs.from_loader(loader), spec_of(partitioning=partitioning))
    expected = {
        "rounds": [[0, 1, 2, 3], [8, 9, 10, 11], [4, 5, 6, 7], [12, 13, 14, 15]],
        "partitions": [[0, 1, 2, 3], [4, 5, 6, 7], [11, 12, 13, 14], [15, 16, 17, 18]],
    }
    assert numbers(batches) == expected[partitioning]
    shuffled = gs.from_loader(DataLoader(Numbered(22), batch_size=4, shuffle=True))
    two = numbers(read_all(shuffled, spec_of(partitioning=partitioning), epochs=2))
    assert Counter(flat(two)) == dict.fromkeys(range(22), 2)
    assert two == numbers(read_all(shuffled, spec_of(partitioning=partitioning), epochs=2))
    with pytest.raises(ConfigError, match="batch_size=5, but the DataLoader of 'Numbered' has batch_size=4"):
        plan_of(shuffled, spec_of(batch_size=5))


def test_a_sampler_of_ones_own_is_drawn_in_each_epoch_and_alike_everywhere() -> None:
    sampler = SubsetRandomSampler([1, 3, 5, 7, 9])
    loader = DataLoader(Numbered(10), batch_size=2, sampler=sampler)
    batches = read_all(gs.from_loader(loader), spec_of(), epochs=2)
    orders = [flat(numbers({r: b for r, b in batches.items() if r.epoch == e})) for e in (0, 1)]
    assert [sorted(order) for order in orders] == [[1, 3, 5, 7, 9]] * 2
    assert orders[0] != orders[1]


class Epochs:
    """A sampler that notes which data epoch it is told, and draws as many samples as it says, or more."""

    def __init__(self, says: int, draws: int) -> None:
        self.says, self.draws, self.told = says, draws, [-1]

    def __len__(self) -> int:
        return self.says

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.draws))

    def set_epoch(self, epoch: int) -> None:
        self.told.append(epoch)


def test_samplers_get_the_epoch_and_must_keep_their_length() -> None:
    sampler = Epochs(6, 6)
    read_all(gs.from_loader(DataLoader(Numbered(6), sampler=sampler)), spec_of(), epochs=2)
    assert sampler.told == [-1, 0, 1, 0, 1][: len(sampler.told)]
    with pytest.raises(DataError, match=r"drew samples of shape \(7,\) in data epoch 0; expected \(6,\)"):
        read_all(gs.from_loader(DataLoader(Numbered(7), sampler=Epochs(6, 7))), spec_of())


def test_a_distributed_sampler_is_refused() -> None:
    sampler: Any = DistributedSampler(Numbered(6), num_replicas=2, rank=0)
    for options in ({"sampler": sampler}, {"batch_sampler": BatchSampler(sampler, 2, False)}):
        with pytest.raises(ConfigError, match="DistributedSampler"):
            gs.from_loader(DataLoader(Numbered(6), **options))
    with pytest.raises(ConfigError, match="got list, expected a torch"):
        gs.from_loader([1])  # type: ignore[arg-type]


def test_a_context_whose_processes_cannot_import_the_job_file_is_refused() -> None:
    class Mine(Numbered):
        pass

    Mine.__module__ = "__gradstream_job__"
    for dataset, fine in ((Mine(6), False), (Numbered(6), True)):
        loader = DataLoader(dataset, num_workers=1, multiprocessing_context="spawn")
        if fine:
            gs.from_loader(loader)
            continue
        with pytest.raises(ConfigError, match=r"'spawn' context cannot import .*Mine.* module of its own"):
            gs.from_loader(loader)


def tag_process(worker: int) -> None:
    global tag
    tag = worker + 1


tag = 0


class Tagged(Numbered):
    def __getitem__(self, index: int) -> Any:
        if index == 99:
            raise KeyError("no such sample of mine")
        return np.full(1, float(index)), float(tag)


@pytest.mark.parametrize("persistent", [False, True])
def test_loader_processes_read_ahead_and_any_place_can_be_gone_to(persistent: bool) -> None:
    loader = DataLoader(
        Tagged(12),
        batch_size=2,
        num_workers=2,
        worker_init_fn=tag_process,
        persistent_workers=persistent,
        multiprocessing_context="fork",
    )
    data = gs.from_loader(loader)
    plan = plan_of(data, spec_of())
    feed = feed_of(data, plan, 0, 3)
    refs = [BatchRef(0, 0, 0), BatchRef(0, 0, 1), BatchRef(0, 1, 2), BatchRef(0, 0, 2), BatchRef(1, 0, 1)]
    batches = [feed.read(ref) for ref in refs]
    assert numbers(dict(zip(refs, batches, strict=True))) == [[0, 1], [2, 3], [10, 11], [4, 5], [2, 3]]
    assert [batch.targets[0].item() for batch in batches] == [1, 2, 0, 1, 1]  # a process, or this one


def test_an_error_in_a_loaders_process_has_the_users_traceback() -> None:
    loader = DataLoader(Tagged(100), batch_size=25, num_workers=1, multiprocessing_context="fork")
    with pytest.raises(UserCodeError, match="raised KeyError: 'no such sample of mine'") as raised:
        read_all(gs.from_loader(loader), spec_of(workers=1))
    assert "in __getitem__" in raised.value.traceback_text
    assert "Caught" not in str(raised.value)


class Dying(Numbered):
    def __getitem__(self, index: int) -> Any:
        if torch.utils.data.get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def test_a_loaders_process_that_dies_is_noticed() -> None:
    loader = DataLoader(Dying(10), num_workers=1, multiprocessing_context="fork")
    with pytest.raises(RuntimeError, match=r"DataLoader worker .*(killed|exited)"):
        read_all(gs.from_loader(loader), spec_of(workers=1))


# ---- numbered batches ---------------------------------------------------------------------


@pytest.mark.parametrize("partitioning", ["rounds", "partitions"])
def test_batches_of_a_batch_sampler_are_dealt_out(partitioning: Any) -> None:
    sampler = [[0, 1, 2], [3], [4, 5], [6, 7], [8, 9]]
    data = gs.from_loader(DataLoader(Numbered(10), batch_sampler=sampler))
    plan = plan_of(data, spec_of(partitioning=partitioning))
    assert [plan.batches_per_epoch(rank) for rank in (0, 1)] == [3, 3 if partitioning == "rounds" else 2]
    batches = read_all(data, spec_of(partitioning=partitioning))
    assert numbers(batches) == [[0, 1, 2], [4, 5], [8, 9], [3], [6, 7]]
    assert [batch.num_samples for batch in batches.values()] == [3, 2, 2, 1, 2]
    random_one = BatchSampler(RandomSampler(range(9)), 4, drop_last=False)
    dealt = numbers(read_all(gs.from_loader(DataLoader(Numbered(9), batch_sampler=random_one)), spec_of()))
    assert sorted(flat(dealt)) == list(range(9))
    with pytest.raises(ConfigError, match="workers=6, but 'Numbered' has 5 batches"):
        plan_of(data, spec_of(workers=6))


def test_samples_that_are_batches() -> None:
    class Batches(Numbered):
        def __getitem__(self, index: int) -> Any:
            return np.full((index + 1, 1), index), np.zeros(index + 1)

    data = gs.from_loader(DataLoader(Batches(4), batch_size=None))
    assert [b.num_samples for b in read_all(data, spec_of()).values()] == [1, 3, 2, 4]


class Range(IterableDataset[float]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[float]:
        yield from map(float, torch.randperm(self.size))


class SizedRange(Range):
    def __init__(self, size: int, says: int) -> None:
        super().__init__(size)
        self.says = says

    def __len__(self) -> int:
        return self.says


def test_an_iterable_data_set_is_gone_through_by_all_and_kept_in_turn() -> None:
    data = gs.from_loader(DataLoader(SizedRange(10, 10), batch_size=2))
    epochs = numbers(read_all(data, spec_of(), epochs=2))
    assert Counter(flat(epochs)) == dict.fromkeys(range(10), 2)
    with pytest.raises(
        ConfigError, match="epochs=2: the number of batches in an epoch of 'Range' is unknown"
    ):
        plan_of(gs.from_loader(DataLoader(Range(10))), spec_of())


def test_the_error_of_a_loader_that_ends_early_names_rank_and_batch() -> None:
    data = gs.from_loader(DataLoader(SizedRange(6, 10), batch_size=1))
    with pytest.raises(DataError, match=r"of rank 0 ended after 3 of its 5 batches \(data epoch 0\)"):
        read_all(data, spec_of())


# ---- streams ------------------------------------------------------------------------------


def counting(rank: int, world: int, epoch: int, seed: int) -> Iterator[Any]:
    for batch in range(3):
        yield np.array([[rank, epoch, batch, seed]]), np.random.rand(1)  # noqa: NPY002


def test_a_stream_is_gone_to_by_name() -> None:
    data = gs.from_stream(counting, batches=3, test=gs.from_arrays([1.0, 2.0], [1.0, 2.0]))
    batches = read_all(data, spec_of(), epochs=2)
    assert [b.inputs[0].tolist() for b in batches.values()] == [
        [ref.partition, ref.epoch, ref.batch, 3] for ref in batches
    ]
    other = feed_of(data, plan_of(data, spec_of()), 1, 3)  # makes up for worker 0, out of order
    for ref in (BatchRef(1, 0, 2), BatchRef(1, 0, 1), BatchRef(0, 0, 2)):
        found = other.read(ref)
        assert found.inputs[0].tolist() == [0, ref.epoch, ref.batch, 3]
        assert found.targets == batches[ref].targets  # the generators are seeded by what is read
    assert data.test_batch(np.array([1])).targets.tolist() == [2.0]


def test_a_stream_of_unknown_length_goes_on_into_its_next_epoch() -> None:
    plan = plan_of(gs.from_stream(counting), spec_of(epochs=None, steps=7))
    feed = feed_of(gs.from_stream(counting), plan, 1, 0)
    assert plan.batches_per_epoch(0) == 7
    found = [feed.read(BatchRef(0, 1, batch)).inputs[0].tolist()[1:3] for batch in (0, 1, 4, 6, 2)]
    assert found == [[0, 0], [0, 1], [1, 1], [2, 0], [0, 2]]


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        (lambda *_: iter(()), "no batches for rank 0 in data epoch 1"),
        (lambda *_: 7, "returned int for rank 0, data epoch 0; expected an iterator"),
        (lambda *_: iter([("a", "b")]), r"batch 0 of '<lambda>' \(rank 0, data epoch 0\) has no arrays"),
        (lambda *_: iter([(np.ones(2), np.ones(3))]), r"several lengths \(inputs: 2, targets: 3\)"),
    ],
)
def test_streams_that_make_no_sense(stream: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_all(gs.from_stream(stream), spec_of(epochs=None, steps=1))


def test_number_of_samples_in_a_batch_of_a_stream() -> None:
    yields: list[Any] = [
        (np.ones((4, 2)), np.ones(4)),
        {"tokens": [np.ones(3), np.ones(5), np.ones(1)]},
        ({"a": torch.ones(2, 9)}, [torch.ones(5), torch.ones(5)]),
        gs.model.Batch(np.ones(7), None, 5, np.empty(0, np.int64)),
    ]
    data = gs.from_stream(lambda *_: iter(yields), batches=4)
    assert [b.num_samples for b in read_all(data, spec_of(workers=1)).values()] == [4, 3, 2, 5]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: gs.from_stream(3), "int is no function"),  # type: ignore[arg-type]
        (lambda: gs.from_stream(counting, batches=0), "batches=0"),
        (lambda: plan_of(gs.from_stream(counting, batches=1), spec_of(shares=(1, 2))), "leave out shares"),
        (
            lambda: gs.from_stream(counting, test=gs.from_stream(counting)),
            "is a stream; expected a map-style",
        ),
    ],
)
def test_streams_asked_for_wrongly(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


# ---- generators ---------------------------------------------------------------------------


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(1))  # noqa: NPY002


def test_generators_are_kept_between_and_put_back() -> None:
    with seeded(9):
        straight = [draw(), draw()]
    random.seed(1)
    before = draw()
    generators, found = Generators(9), []
    for _ in range(2):
        with generators:
            found.append(draw())
        draw()
    assert found == straight
    assert list(seeded_iterator(lambda: (draw() for _ in range(2)), 9)) == straight
    assert draw() != before
