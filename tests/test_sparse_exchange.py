"""Only what has changed is exchanged: the same bits as whole chunks, over seeds, networks and stops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gradstream as gs
from gradstream.run import Run
from gradstream.strategies.base import RowExchange

VOCABULARY, WIDTH = 700, 5


@dataclass(frozen=True)
class Whole(gs.Downpour):
    """Downpour that exchanges whole chunks, whatever the model."""

    def rows(self, tables: bool) -> RowExchange | None:
        """Never."""
        return None


def model() -> Any:
    """Two tables, of rows that fit no chunk's edge, and layers before, between and behind them."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Embedding(VOCABULARY, WIDTH, sparse=True)
            self.middle = nn.Linear(WIDTH, 3)
            self.second = nn.EmbeddingBag(90, 3, sparse=True)
            self.last = nn.Linear(3, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.middle(self.first(x[:, :2]).sum(1)) + self.second(x[:, 2:] % 90)
            out: torch.Tensor = self.last(torch.tanh(hidden))
            return out

    return gs.from_torch(Net, nn.functional.cross_entropy)


def data() -> Any:
    rng = np.random.default_rng(1)
    return gs.from_arrays(rng.integers(0, VOCABULARY, (96, 4)), rng.integers(0, 4, 96))


def run_of(strategy: gs.Strategy, **options: Any) -> Run:
    job: dict[str, Any] = {
        "workers": 3,
        "servers": 2,
        "batch_size": 4,
        "epochs": 2,
        "chunk_elems": 256,
        "optimizer": gs.SGD(lr=0.3),
    }
    return gs.simulate(model(), data(), strategy=strategy, **(job | options))


def same(one: Run, other: Run) -> bool:
    return all(
        np.array_equal(array, other.parameters[name], equal_nan=True)
        for name, array in one.parameters.items()
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overlap": False},
        {"push_every": 3, "fetch_every": 2},
        {"push_every": 2, "fetch_every": 3, "overlap": False, "local_lr": 0.1},
    ],
    ids=str,
)
@pytest.mark.parametrize("optimizer", [gs.SGD(lr=0.3), gs.Adagrad(lr=0.1, initial_accumulator=0.01)])
def test_one_worker_has_the_bits_of_whole_chunks(options: dict[str, Any], optimizer: Any) -> None:
    runs = [
        run_of(strategy(**options), workers=1, optimizer=optimizer, seed=3)
        for strategy in (gs.Downpour, Whole)
    ]
    assert same(*runs)
    sent, whole = (run.summary["pushed_bytes"] + run.summary["fetched_bytes"] for run in runs)
    assert sent < whole / 2
