"""Streams of the libraries themselves, where they are installed: none is needed for the suite, see `test_streams`."""

from __future__ import annotations

import io
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from gradstream.errors import ConfigError
from gradstream.session.loaders import part_of
from gradstream.session.loaders_part import LoaderPart

SHARDS, SAMPLES = 7, 45


def rows(shards: list[int]) -> Iterator[dict[str, int]]:
    for shard in shards:
        yield from ({"x": one} for one in range(shard * SAMPLES // SHARDS, (shard + 1) * SAMPLES // SHARDS))


def part(rank: int, world_size: int = 3) -> LoaderPart:
    return LoaderPart(rank, world_size, 7, False, lambda count: None)


def ids(batches: Any) -> list[int]:
    return [int(one) for batch in batches for one in (batch["x"] if isinstance(batch, dict) else batch)]


# ---- datasets ---------------------------------------------------------------------------


def stream(**options: Any) -> Any:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    made = datasets.IterableDataset.from_generator(rows, gen_kwargs={"shards": list(range(SHARDS))})
    return made.shuffle(buffer_size=4, **options).with_format("torch")


@pytest.mark.parametrize("processes", [0, 2])
def test_a_stream_of_datasets_is_read_in_parts_in_the_order_of_the_epoch(processes: int) -> None:
    epochs: list[list[list[int]]] = []
    for rank in range(3):
        dataset = stream(seed=5)
        loader = part_of(DataLoader(dataset, 4, num_workers=processes), part(rank))
        epochs.append([])
        for epoch in range(2):
            dataset.set_epoch(epoch)
            epochs[-1].append(ids(loader))
    for epoch in range(2):
        assert sorted(one for worker in epochs for one in worker[epoch]) == list(range(SAMPLES))
    assert epochs[0][0] != epochs[0][1]


def test_a_stream_of_datasets_without_a_seed_is_refused() -> None:
    with pytest.raises(ConfigError, match="without a seed"):
        part_of(DataLoader(stream(), 4), part(0))


def test_a_stream_that_is_split_by_node_stays_as_it_is() -> None:
    distributed = pytest.importorskip("datasets.distributed", reason="datasets is not installed")
    streams = [distributed.split_dataset_by_node(stream(seed=1), rank, 3) for rank in range(3)]
    parts = [part_of(DataLoader(one, 4), part(rank)) for rank, one in enumerate(streams)]
    assert sorted(ids([batch for loader in parts for batch in loader])) == list(range(SAMPLES))


def test_tables_of_datasets_are_divided_by_rows() -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    table = datasets.Dataset.from_dict({"x": list(range(45))}).with_format("torch")
    own = part_of(table, part(1))
    assert own["x"][:].tolist() == list(range(1, 45, 3))
    loaders = [part_of(DataLoader(table, 4, shuffle=True), part(rank)) for rank in range(3)]
    assert sorted(ids([batch for loader in loaders for batch in loader])) == list(range(45))


# ---- torchdata --------------------------------------------------------------------------


class Shards(IterableDataset[int]):
    def __init__(self, shards: list[int]) -> None:
        self.shards, self.place, self.start = shards, 0, 0

    def shard(self, num_shards: int, index: int) -> Shards:
        return Shards(self.shards[index::num_shards])

    def __iter__(self) -> Iterator[int]:
        info = torch.utils.data.get_worker_info()
        shards = self.shards if info is None else self.shards[info.id :: info.num_workers]
        self.place, self.start = self.start, 0
        for row in list(rows(shards))[self.place :]:
            self.place += 1
            yield row["x"]

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["place"]


KINDS: dict[str, Callable[[], Any]] = {
    "own": lambda: Shards(list(range(SHARDS))),
    "datasets": lambda: pytest.importorskip("datasets").IterableDataset.from_generator(
        rows, gen_kwargs={"shards": list(range(SHARDS))}
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("processes", "stateful"), [(0, False), (0, True), (2, True)])
def test_a_loader_continues_where_its_state_was_saved(kind: str, processes: int, stateful: bool) -> None:
    made: Any = DataLoader
    if stateful:
        reason = "torchdata is not installed"
        made = pytest.importorskip("torchdata.stateful_dataloader", reason=reason).StatefulDataLoader

    def loader() -> Any:
        return part_of(made(KINDS[kind](), 4, num_workers=processes), part(1))

    this, whole, states = loader(), list[list[int]](), list[Any]()
    for _ in range(2):
        for batch in this:
            states.append(this.state_dict())
            whole.append(ids([batch]))
    assert isinstance(this, made)
    assert len(whole) >= 6
    for place in (0, 1, len(whole) // 2 - 1, len(whole) // 2):
        again = loader()
        again.load_state_dict(states[place])
        rest = [ids([batch]) for _ in range(3) for batch in again]
        assert rest[: len(whole) - place - 1] == whole[place + 1 :]


@pytest.mark.parametrize("processes", [0, 2])
@pytest.mark.parametrize("seed", [None, 4])
def test_a_stateful_loader_of_a_table_draws_one_order_and_keeps_its_place(
    processes: int, seed: int | None
) -> None:
    reason = "torchdata is not installed"
    made = pytest.importorskip("torchdata.stateful_dataloader", reason=reason).StatefulDataLoader

    def loader(rank: int, begun: int) -> Any:
        torch.manual_seed(begun)  # processes stand anywhere
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        data: Any = list(range(40))
        whole = made(data, 3, shuffle=True, num_workers=processes, generator=generator)
        return part_of(whole, part(rank))

    loaders, epochs, states = [loader(rank, rank) for rank in range(3)], list[Any](), list[Any]()
    for _ in range(2):
        epochs.append([[]])
        for batch in loaders[0]:
            epochs[-1][0].append(batch.tolist())
            states.append(loaders[0].state_dict())
        epochs[-1] += [[batch.tolist() for batch in one] for one in loaders[1:]]
        assert sorted(x for one in epochs[-1] for batch in one for x in batch) == list(range(40))
    whole = [batch for epoch in epochs for batch in epoch[0]]
    assert whole[: len(whole) // 2] != whole[len(whole) // 2 :]
    for place in (0, 3, 4, 6):
        again = loader(0, 99)
        again.load_state_dict(states[place])
        rest = [batch.tolist() for _ in range(2) for batch in again]
        assert rest[: len(whole) - place - 1] == whole[place + 1 :]


# ---- webdataset -------------------------------------------------------------------------


@pytest.fixture
def urls(tmp_path: Path) -> list[str]:
    pytest.importorskip("webdataset", reason="webdataset is not installed")
    for shard in range(SHARDS):
        with tarfile.open(tmp_path / f"{shard}.tar", "w") as archive:
            for row in rows([shard]):
                data = str(row["x"]).encode()
                member = tarfile.TarInfo(f"{row['x']:04d}.cls")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    return [str(tmp_path / f"{shard}.tar") for shard in range(SHARDS)]


@pytest.mark.parametrize("kind", ["loader", "web loader", "few files", "by node", "names"])
def test_files_of_webdataset_are_divided(kind: str, urls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    webdataset = pytest.importorskip("webdataset", reason="webdataset is not installed")
    seen: list[int] = []
    few = kind == "few files"
    for rank in range(3):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "3")
        names = part_of(urls, part(rank)) if kind == "names" else urls[:2] if few else urls
        options = {"nodesplitter": webdataset.split_by_node} if kind in ("by node", "few files") else {}
        dataset = (
            webdataset.WebDataset(names, shardshuffle=False, **options).shuffle(5).decode().to_tuple("cls")
        )
        dataset = dataset.map(lambda row: {"x": torch.tensor(row[0])}).batched(4)
        made = webdataset.WebLoader if kind == "web loader" else DataLoader
        this = replace(part(rank), aligned=False)
        seen += ids(part_of(made(dataset, batch_size=None, num_workers=2 * (kind == "loader")), this))
    expected = [row["x"] for row in rows([0, 1] if few else list(range(SHARDS)))]
    if few:  # each worker shuffles in its own order, of which webdataset draws the seed
        assert len(seen) == len(expected)
        return
    assert Counter(seen) == Counter(expected)
