"""Data that cannot be indexed: each worker reads its own part where the dataset can be divided, and none is lost."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import gradstream as gs
from gradstream.coordinator.own_loops import EpochParts
from gradstream.data.open_ledger import OpenLedger
from gradstream.errors import ConfigError, RefusedError
from gradstream.session.division import own_part_of
from gradstream.session.loaders import part_of
from gradstream.session.loaders_part import LoaderPart, StreamEnds
from gradstream.testing.sessions import loop_in_threads
from gradstream.wire import v1

SIZES = (7, 1, 4, 0, 2, 3, 3)  # samples of each shard
SAMPLES = sum(SIZES)


def rows(shards: list[int]) -> Iterator[int]:
    for shard in shards:
        yield from range(sum(SIZES[:shard]), sum(SIZES[: shard + 1]))


class Shards(IterableDataset[int]):
    """As `datasets.IterableDataset`: knows its shards, and divides them among the processes of a loader."""

    def __init__(self, shards: list[int], *, shuffle: bool = False) -> None:
        self.shards, self.shuffle, self.epoch = shards, shuffle, 0
        self.was_read: list[int] = []

    @property
    def num_shards(self) -> int:
        return len(self.shards)

    def shard(self, num_shards: int, index: int, contiguous: bool = True) -> Shards:
        return Shards(self.shards[index::num_shards], shuffle=self.shuffle)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        info = torch.utils.data.get_worker_info()
        shards = self.shards if info is None else self.shards[info.id :: info.num_workers]
        for one in rows(shards):
            self.was_read.append(one)
            yield one


class Seeking(Shards):
    """Saves its place, as a dataset of the StatefulDataLoader protocol."""

    def __init__(self, shards: list[int]) -> None:
        super().__init__(shards)
        self.place, self.start = 0, 0

    def shard(self, num_shards: int, index: int, contiguous: bool = True) -> Seeking:
        return Seeking(self.shards[index::num_shards])

    def __iter__(self) -> Iterator[int]:
        self.place, self.start = self.start, 0
        for one in list(rows(self.shards))[self.place :]:
            self.place += 1
            self.was_read.append(one)
            yield one

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["place"]


class Undivided(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(SAMPLES)


def single_node_only(files: Any) -> Any:
    raise ValueError("you need to add an explicit nodesplitter")


class Names:
    """As webdataset's `SimpleShardList`."""

    def __init__(self, urls: list[str]) -> None:
        self.urls = urls

    def __iter__(self) -> Iterator[dict[str, str]]:
        return iter([{"url": url} for url in self.urls])


class Pipeline(IterableDataset[Any]):
    """As webdataset's `DataPipeline`: stages, the first of which lists names of files or is a DataLoader."""

    def __init__(self, *stages: Any) -> None:
        self.pipeline = list(stages)
        self.nsamples = -1

    def __iter__(self) -> Iterator[Any]:
        source: Iterator[Any] = iter(self.pipeline[0])
        for stage in self.pipeline[1:]:
            source = stage(source)
        return source


def opened(files: Any) -> Iterator[int]:
    for file in files:
        yield from rows([int(file["url"].split(".")[0])])


def web() -> Pipeline:
    return Pipeline(Names([f"{shard}.tar" for shard in range(len(SIZES))]), single_node_only, opened)


def part(rank: int, world_size: int, counts: list[int | None] | None = None) -> LoaderPart:
    return LoaderPart(rank, world_size, 7, False, ([] if counts is None else counts).append, True)


DIVIDED: dict[str, Callable[[], Any]] = {
    "shards": lambda: DataLoader(Shards(list(range(len(SIZES)))), 2),
    "web": lambda: DataLoader(web(), 2),
    "web loader": lambda: Pipeline(DataLoader(web(), 2)),
}


@pytest.mark.parametrize("kind", DIVIDED)
@pytest.mark.parametrize("world_size", [2, 3])
def test_each_worker_reads_only_its_own_part(kind: str, world_size: int) -> None:
    seen: list[int] = []
    for rank in range(world_size):
        counts: list[int | None] = []
        loader = part_of(DIVIDED[kind](), part(rank, world_size, counts))
        for _ in range(2):
            ids = [one for batch in loader for one in batch.tolist()]
        assert sum(count or 0 for count in counts) == 2 * len(ids)
        assert len(ids) < SAMPLES
        seen += ids
    assert sorted(seen) == list(range(SAMPLES))


def test_processes_of_a_loader_divide_the_part_of_their_worker() -> None:
    for make in (DIVIDED["shards"], DIVIDED["web"]):
        seen: list[int] = []
        for rank in range(2):
            loader = make()
            loader = DataLoader(loader.dataset, 2, num_workers=2)
            seen += [one for batch in part_of(loader, part(rank, 2)) for one in batch.tolist()]
        if make is DIVIDED["shards"]:
            assert sorted(seen) == list(range(SAMPLES))
        else:  # it does not look at its process: as without shard
            assert Counter(seen) == Counter(2 * list(range(SAMPLES)))
    few = part_of(DataLoader(web(), 2, num_workers=6), part(0, 3))
    assert few.num_workers == 3  # one for each file


def test_what_has_fewer_files_than_workers_is_read_by_all(capsys: pytest.CaptureFixture[str]) -> None:
    few = Pipeline(Names(["0.tar", "1.tar"]), single_node_only, opened)
    for make in (
        lambda: DataLoader(Shards([0, 1]), 2),
        lambda: DataLoader(few, 2),
        lambda: DataLoader(Undivided(), 2),
    ):
        seen: list[int] = []
        for rank in range(3):
            counts: list[int | None] = []
            for batch in part_of(make(), part(rank, 3, counts)):
                seen += batch.tolist() if counts.pop() else []
        assert len(seen) == len(set(seen))
        assert set(seen) == (set(rows([0, 1])) if len(seen) < SAMPLES else set(range(SAMPLES)))
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 3  # worker 0 alone, for each loader
    assert "reads all of the Undivided" in said[2]
    assert "shard(num_shards, index)" in said[2]


def test_the_epoch_of_the_users_dataset_reaches_the_part() -> None:
    dataset = Shards([0, 1, 2])
    dataset.set_epoch(3)
    loader = part_of(DataLoader(dataset, 2), part(0, 2))
    assert loader.dataset.epoch == 3
    dataset.set_epoch(4)
    assert (dataset.epoch, loader.dataset.epoch) == (4, 4)


def test_a_dataset_shuffled_without_a_seed_is_refused() -> None:
    for seed in (None, 3):
        dataset = Shards([0, 1, 2])
        shuffled = type("Buffer", (), {"generator": np.random.default_rng(seed)})()
        dataset._ex_iterable = type("Mapped", (), {"ex_iterable": shuffled})()  # type: ignore[attr-defined]
        if seed is None:
            with pytest.raises(ConfigError, match=r"shuffle\(seed=0"):
                own_part_of(dataset, 0, 2)
        else:
            assert own_part_of(dataset, 0, 2) is not None


def test_an_epoch_of_a_set_length_is_divided_too() -> None:
    pipeline = web()
    pipeline.nsamples = 11
    own = own_part_of(pipeline, 1, 3)
    assert own is not None
    assert own.dataset.nsamples == 4
    assert pipeline.nsamples == 11
    assert len(pipeline.pipeline[0].urls) == len(SIZES)


def test_names_of_files_are_divided() -> None:
    for names in ([f"a/{n}.tar.gz" for n in range(7)], [Path(f"{n}") for n in range(7)], ["s3://x/y?z"] * 7):
        parts = [part_of(names, part(rank, 3)) for rank in range(3)]
        assert [one for found in zip(*parts, strict=False) for one in found] == names[:6]
        assert [len(one) for one in parts] == [3, 2, 2]
    with pytest.raises(ConfigError, match="at least one for each"):
        part_of(["a.tar"], part(0, 2))
    with pytest.raises(ConfigError, match="list of names"):
        part_of("a-{0..9}.tar", part(0, 2))
    texts = part_of(["Dear Sir.", "hello world"], part(1, 2))  # minibatches of text
    assert list(texts) == ["hello world"]


class OfFiles(IterableDataset[str]):
    def __init__(self, names: list[str], *, keeps: bool = True) -> None:
        self.names = names if keeps else [f"x{name}" for name in names]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)


def test_what_reads_divided_files_is_not_divided_again() -> None:
    ends = StreamEnds(lambda: None, object, lambda: (0, 1))
    this = replace(part(1, 2), ends=ends)
    names = part_of(["a.tar", "b.tar", "c.tar", "d.tar"], this)
    own = ["b.tar", "d.tar"]
    loading = Pipeline(DataLoader(Pipeline(Names(list(names)), single_node_only), None))
    assert [batch["url"] for batch in part_of(loading, this)] == own
    assert list(part_of(DataLoader(OfFiles(names), None), this)) == own
    pipeline = Pipeline(Names(list(names)), single_node_only)
    assert [batch["url"] for batch in part_of(DataLoader(pipeline, None), this)] == own
    with pytest.raises(ConfigError, match="either the names or the loader"):
        part_of(DataLoader(OfFiles(names, keeps=False), None), this)


class Table:
    """As `datasets.Dataset`, which is no Dataset of torch."""

    def __init__(self, rows: list[int]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> int:
        return self.rows[index]

    def shard(self, num_shards: int, index: int, contiguous: bool = True) -> Table:
        assert not contiguous
        return Table(self.rows[index::num_shards])


def test_a_table_is_divided_by_rows() -> None:
    assert part_of(Table(list(range(6))), part(1, 3)).rows == [1, 4]
    with pytest.raises(ConfigError, match="multiple of the 3"):
        part_of(Table(list(range(7))), part(1, 3))
    seen = [batch.tolist() for batch in part_of(DataLoader(Table(list(range(6))), 2), part(1, 3))]  # type: ignore[arg-type]
    assert seen == [[2, 3]]


# ---- places -----------------------------------------------------------------------------


class Batches:
    """An iterable of minibatches that saves its place."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        start, self.place = self.place, 0
        for self.place in range(start + 1, 8):
            yield torch.tensor([self.place - 1])
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


class Drawn(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        order = list(range(SAMPLES))
        random.shuffle(order)
        yield from order


PLACES: dict[str, Callable[[], Any]] = {
    **DIVIDED,
    "seeks": lambda: DataLoader(Seeking(list(range(len(SIZES)))), 2),
    "undivided": lambda: DataLoader(Undivided(), 2),
    "drawn": lambda: DataLoader(Drawn(), 3),
    "processes": lambda: DataLoader(Shards(list(range(len(SIZES)))), 2, num_workers=2),
    "minibatches": lambda: [torch.arange(n, n + 2) for n in range(9)],
    "saves its place": Batches,
}


@pytest.mark.parametrize("kind", PLACES)
@pytest.mark.parametrize("rank", [0, 2])
def test_a_saved_place_is_where_the_loop_was(kind: str, rank: int) -> None:
    counts: list[int | None] = []

    def made() -> Any:
        return part_of(PLACES[kind](), part(rank, 3, counts))

    def ids(batch: torch.Tensor) -> list[int]:
        return batch.tolist() if counts[-1] else []  # a repeat may be of any minibatch

    whole, states = [], [made().state_dict()]
    loader = made()
    for _ in range(3):
        for batch in loader:
            whole.append(ids(batch))
            states.append(loader.state_dict())
    assert len(whole) >= 6
    step = max(1, len(whole) // 7)
    for place in range(0, len(whole) + 1, step):
        again = made()
        again.load_state_dict(states[place])
        assert again.state_dict() == states[place]
        rest: list[Any] = []
        while len(rest) < len(whole) - place:
            before = len(rest)
            rest += [ids(batch) for batch in again]
            assert len(rest) > before or not before
        assert rest[: len(whole) - place] == whole[place:]


def test_a_dataset_that_seeks_reads_nothing_twice() -> None:
    loader = part_of(DataLoader(Seeking([0, 1, 2]), 2), part(0, 2))
    for _, batch in zip(range(2), loader, strict=False):
        last = batch
    again = part_of(DataLoader(Seeking([0, 1, 2]), 2), part(0, 2))
    again.load_state_dict(loader.state_dict())
    assert next(iter(again))[0] == last[-1] + 1
    assert again.dataset.was_read == [last[-1] + 1, last[-1] + 2]


# ---- the end of an epoch ----------------------------------------------------------------


class Ones(nn.Module):
    """Its parameter's gradient counts each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(SAMPLES, dtype=torch.float64))

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        return -self.w[samples].mean()


def train(session: gs.Session, epochs: int = 2) -> tuple[torch.Tensor, list[list[list[int]]]]:
    """Trains on shards of very different lengths; the rate rises with the epochs."""
    loader = session.shard(DataLoader(Shards(list(range(len(SIZES)))), 2))
    net = Ones()
    model, optimizer = session.wrap(net, torch.optim.SGD(net.parameters(), lr=1.0))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0 + epoch)
    taken: list[list[list[int]]] = []
    for _ in range(epochs):
        taken.append([])
        for batch in loader:
            optimizer.zero_grad()
            model(batch).backward()
            optimizer.step()
            taken[-1].append(batch.tolist())
        model.eval()
        for batch in loader if session.rank == 0 else ():  # a validation on one worker alone
            model(batch)
        model.train()
        scheduler.step()
    session.close()
    return net.w.detach().clone(), taken


@pytest.mark.parametrize("strategy", ["allreduce", "local-sgd", "downpour"])
def test_workers_with_uneven_parts_end_their_epochs_together(strategy: str) -> None:
    both = loop_in_threads(train, 3, strategy=strategy)
    assert all(torch.equal(w, both[0][0]) for w, _ in both)
    assert float(both[0][0].min()) > 0
    for epoch in range(2):
        lengths = [len(taken[epoch]) for _, taken in both]
        own = [-(-sum(SIZES[rank::3]) // 2) for rank in range(3)]
        assert lengths == (own if strategy == "downpour" else 3 * [max(own)])
        first = [batch for (_, taken), size in zip(both, own, strict=True) for batch in taken[epoch][:size]]
        assert sorted(one for batch in first for one in batch) == list(range(SAMPLES))
    if strategy != "allreduce":
        return
    expected = torch.zeros(SAMPLES, dtype=torch.float64)
    for epoch in range(2):
        for step in range(max(own)):
            pieces = [taken[epoch][step] for (_, taken), size in zip(both, own, strict=True) if step < size]
            joined = [one for piece in pieces for one in piece]
            expected[joined] += (1.0 + epoch) / len(joined)
    torch.testing.assert_close(both[0][0], expected, rtol=1e-12, atol=1e-12)


def test_a_loop_that_leaves_an_epoch_early_stops_nobody() -> None:
    def loop(session: gs.Session) -> int:
        loader = session.shard(DataLoader(Shards(list(range(len(SIZES)))), 2))
        net = Ones()
        model, optimizer = session.wrap(net, torch.optim.SGD(net.parameters(), lr=1.0))
        steps = 0
        for epoch in range(2):
            for batch in loader:
                optimizer.zero_grad()
                model(batch).backward()
                optimizer.step()
                steps += 1
                if session.rank == 0 and epoch == 1:
                    break
        session.close()
        return steps

    assert loop_in_threads(loop, 2) == [8 + 1, 8 + 2]  # worker 1 has two minibatches of its own


def going_on() -> Any:
    return SimpleNamespace(over=False)


def test_a_worker_asks_whether_others_go_on() -> None:
    parts, worker = EpochParts(OpenLedger(2, rounds=True), going_on()), v1.Node(name="worker-0")
    other = v1.Node(name="worker-1", role="worker", rank=1)

    def ask(node: v1.Node, taken: int, done: bool = False) -> bool | None:
        request = v1.EpochPart(loader=1, epoch=4, taken=taken, done=done)
        parts.on_request(node, request, 0.0)
        answer = parts.answer(node, request, 0.0)
        assert answer is None or isinstance(answer, v1.EpochGoesOn)
        return None if answer is None else answer.more

    assert ask(worker, 1) is None  # nobody is done
    assert ask(other, 2) is None
    assert ask(worker, 2, done=True) is None
    assert ask(other, 2) is True  # now it tells each
    assert ask(other, 3) is True
    assert ask(worker, 2, done=True) is True
    assert ask(worker, 3, done=True) is None
    assert ask(other, 4) is True
    assert ask(other, 0) is True  # it was a validation
    assert ask(worker, 3, done=True) is None
    assert ask(other, 3, done=True) is False
    assert ask(worker, 3, done=True) is False
    with pytest.raises(RefusedError, match="impossible"):
        ask(worker, 1 << 60)
    for epoch in range(200):
        parts.on_request(worker, v1.EpochPart(loader=1, epoch=epoch), 0.0)
    assert len(parts._taken) == len(parts._done) == EpochParts.MOST_EPOCHS


def test_nobody_waits_for_a_lost_worker() -> None:
    ledger, worker = OpenLedger(2, rounds=True), v1.Node(name="worker-0")
    parts = EpochParts(ledger, going_on())
    request = v1.EpochPart(taken=2, done=True)
    parts.on_request(worker, request, 0.0)
    parts.on_request(v1.Node(name="worker-1", rank=1), v1.EpochPart(taken=5), 0.0)
    assert parts.answer(worker, request, 0.0) == v1.EpochGoesOn(more=True)
    request.taken = 6
    assert parts.answer(worker, request, 0.0) is None
    ledger.lost(1)
    assert parts.answer(worker, request, 0.0) == v1.EpochGoesOn()


def test_the_epochs_after_a_loss_are_divided_among_the_others() -> None:
    """Also among more workers than shards: some have no part."""
    present, part_of_worker = [0, 1, 2], part(2, 3)
    ends = StreamEnds(lambda: None, object, lambda: present)
    loader = part_of(DataLoader(Shards([0, 2, 4, 5]), 20), replace(part_of_worker, ends=ends))
    assert [batch.tolist() for batch in loader] == [list(rows([4]))]
    present = [0, 2]
    assert [batch.tolist() for batch in loader] == [list(rows([2, 5]))]
    present = [2]
    assert [batch.tolist() for batch in loader] == [list(rows([0, 2, 4, 5]))]
    present = [0, 1, 3, 4, 2, 5]
    assert list(loader) == []
    present = [0, 1]
    assert list(loader) == []
    present = [0, 1, 2]
    assert [batch.tolist() for batch in loader] == [list(rows([4]))]


def test_a_worker_that_was_stopped_in_its_repeats_goes_on_with_them() -> None:
    """All save their places when worker 0 has two minibatches left, and worker 1 none."""
    at, states = 6, [dict[str, Any](), dict[str, Any]()]

    def loop(session: gs.Session, resumes: bool) -> list[int]:
        loader = session.shard(DataLoader(Shards(list(range(len(SIZES)))), 2))
        if resumes:
            loader.load_state_dict(states[session.rank])
        net = Ones()
        model, optimizer = session.wrap(net, torch.optim.SGD(net.parameters(), lr=1.0))
        steps = []
        for _ in range(2):
            steps.append(0)
            for batch in loader:
                optimizer.zero_grad()
                model(batch).backward()
                optimizer.step()
                steps[-1] += 1
                if not resumes and steps == [at]:
                    states[session.rank] = loader.state_dict()
        session.close()
        return steps

    assert loop_in_threads(partial(loop, resumes=False), 2) == [[8, 8], [8, 8]]
    assert [state["over"] for state in states] == [False, True]
    assert loop_in_threads(partial(loop, resumes=True), 2) == [[2, 8], [2, 8]]
