"""Reports of random numbers that were alike where they should differ, or differed where they should be alike."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import gradstream as gs
from gradstream._simulate import simulate
from gradstream.session.loaders import part_of
from gradstream.session.loaders_part import LoaderPart

NUM_SAMPLES = 12


class Augmented(Dataset[Any]):
    """Sample i is (i, a number of each of the three global generators), as an augmentation would draw them."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[np.ndarray[Any, Any], float]:
        drawn = [random.random(), float(np.random.rand()), float(torch.rand(()))]  # noqa: NPY002
        return np.array([index, *drawn]), 0.0


def seen_in_a_run(data: gs.data.Dataset, **options: Any) -> list[list[float]]:
    """The inputs (index and drawn numbers) of all samples of a run, sorted."""
    seen: list[list[float]] = []

    def gradients(parameters: Any, x: Any, y: Any) -> Any:
        seen.extend(np.asarray(x).tolist())
        return 0.0, {"w": np.zeros(4, x.dtype)}

    model = gs.from_functions(
        init=lambda seed: {"w": np.zeros(4)}, outputs=lambda p, x: x @ p["w"], gradients=gradients
    )
    given: dict[str, Any] = {"strategy": "synchronous", "workers": 2, "epochs": 2}
    simulate(model, data, optimizer=gs.optim.SGD(lr=0.1), **{**given, **options})
    return sorted(seen)


def test_no_two_workers_and_no_two_epochs_draw_the_same() -> None:
    """pytorch/pytorch#5059: numpy's generator had one state in all processes, which augmented alike."""
    seen = seen_in_a_run(gs.from_dataset(Augmented()), batch_size=2)
    assert [row[0] for row in seen] == [float(index // 2) for index in range(2 * NUM_SAMPLES)]
    for column in (1, 2, 3):
        assert len({row[column] for row in seen}) == 2 * NUM_SAMPLES


def parts(make: Any, epochs: int, workers: int = 2) -> list[list[list[Any]]]:
    """Minibatches by epoch and worker of a loop's own DataLoader. Each script has seeded its generators alike."""
    found = []
    for rank in range(workers):
        torch.manual_seed(3)
        np.random.seed(3)  # noqa: NPY002
        random.seed(3)
        part = part_of(make(), LoaderPart(rank, workers, 7, split=False, note=lambda samples: None))
        found.append([[batch[0].tolist() for batch in part] for _ in range(epochs)])
    return [[found[rank][epoch] for rank in range(workers)] for epoch in range(epochs)]


def test_loader_processes_of_two_workers_draw_different_numbers() -> None:
    """facebookresearch/fastMRI#123: loader processes of all ranks had the same seeds, and made the same masks.

    xingyizhou/CenterNet#233: numpy's were the same in each process, and again in each epoch.
    """
    epochs = parts(lambda: DataLoader(Augmented(), batch_size=3, shuffle=True, num_workers=1), epochs=2)
    rows = [row for epoch in epochs for worker in epoch for batch in worker for row in batch]
    assert sorted(row[0] for row in rows) == sorted([*range(NUM_SAMPLES)] * 2)
    for column in (1, 2, 3):
        assert len({row[column] for row in rows}) == len(rows)


def test_each_epoch_has_an_order_of_its_own_without_being_told() -> None:
    """pytorch/pytorch#31771: unless a loop told the sampler each epoch's number, all epochs had the same order."""
    epochs = parts(
        lambda: DataLoader(list(range(NUM_SAMPLES)), batch_size=1, shuffle=True, collate_fn=_kept),  # type: ignore[arg-type]
        epochs=4,
    )
    orders = [
        [number for pair in zip(*epoch, strict=True) for one in pair for number in one] for epoch in epochs
    ]
    assert all(sorted(order) == list(range(NUM_SAMPLES)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4


@pytest.mark.parametrize("own", [False, True], ids=["global generator", "own generator"])
def test_worker_0_and_the_order_of_all_are_those_of_torch(own: bool) -> None:
    """A sibling of the last but one: nothing but what the processes of other workers draw is another."""

    def make() -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(5) if own else None
        return DataLoader(Augmented(), batch_size=3, shuffle=True, num_workers=1, generator=generator)

    def order(epochs: list[list[list[Any]]]) -> list[Any]:
        return [
            [row[0] for batches in zip(*epoch, strict=True) for one in batches for row in one]
            for epoch in epochs
        ]

    alone, two = parts(make, epochs=2, workers=1), parts(make, epochs=2)
    assert order(two) == order(alone)
    torch.manual_seed(3)
    expected = torch.rand(()) if own else (torch.empty((), dtype=torch.int64).random_(), torch.rand(()))[1]
    torch.manual_seed(3)
    taken = iter(part_of(make(), LoaderPart(1, 2, 7, split=False, note=lambda samples: None)))
    assert torch.rand(()) == expected  # the script's own numbers go on as behind torch's loader
    assert len(list(taken)) == 2  # through with it, the loader ends its process


class Moved(DataLoader[Any]):
    """A loader class of the user's, whose iteration begins with its first minibatch."""

    def __iter__(self) -> Any:
        yield from super().__iter__()


def test_loader_classes_of_the_users_are_seeded_likewise() -> None:
    """Another sibling."""
    epochs = parts(lambda: Moved(Augmented(), batch_size=3, num_workers=1), epochs=2)
    rows = [row for epoch in epochs for worker in epoch for batch in worker for row in batch]
    assert len({row[3] for row in rows}) == len(rows) == 2 * NUM_SAMPLES


def _kept(samples: list[int]) -> list[torch.Tensor]:
    return [torch.tensor(samples)]


@pytest.mark.parametrize("strategy", ["synchronous", "allreduce"])
def test_dropout_leaves_out_other_elements_on_each_worker_and_step(strategy: str) -> None:
    """huggingface/transformers#31412: where all processes set one seed, dropout had the same mask in each of them."""
    masks: list[tuple[bool, ...]] = []

    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dropout, self.line = nn.Dropout(0.5), nn.Linear(24, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept = self.dropout(x)
            if self.training:
                masks.extend(map(tuple, (kept != 0).tolist()))
            out: torch.Tensor = self.line(kept)
            return out

    data = gs.from_arrays(np.ones((24, 24), "float32"), np.ones((24, 1), "float32"))
    model = gs.from_torch(Dropped, nn.functional.mse_loss)
    simulate(
        model, data, strategy=strategy, optimizer=gs.optim.SGD(lr=0.1), workers=3, batch_size=2, epochs=2
    )
    assert len(masks) == len(set(masks)) == 48


class Shuffled(IterableDataset[int]):
    """Draws its order from the generators of its process."""

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.permutation(NUM_SAMPLES).tolist())  # noqa: NPY002


def test_a_stream_that_shuffles_itself_is_divided_in_one_order() -> None:
    """Lightning-AI/pytorch-lightning#15734: each process shuffled by itself, and parts overlapped."""
    found = []
    for rank in range(2):
        np.random.seed(rank)  # noqa: NPY002  # the processes are not seeded alike
        part = part_of(
            DataLoader(Shuffled(), batch_size=2),
            LoaderPart(rank, 2, 7, split=False, note=lambda samples: None),
        )
        found.append([number for batch in part for number in batch.tolist()])
    assert sorted(found[0] + found[1]) == list(range(NUM_SAMPLES))
