"""Recommendation: which items a user likes, from two embeddings of which a minibatch touches few rows.

    python examples/embeddings.py

4,000 users and 1,000 items have a vector of 8 numbers each; a user likes an item as much as their vectors
agree. The embeddings are sparse (`sparse=True`), so a gradient is the rows of the users and items of its
minibatch, at most 128 of 5,000, and no more than these rows is pushed; a fetch brings the rows that
anybody has changed since the last. The data are synthetic, and made of vectors that are to be found again.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

import gradstream as gs

USERS, ITEMS, WIDTH = 4_000, 1_000, 8


class Liking(nn.Module):
    """(n, 2) numbers of a user and an item to (n,) how much that user likes it."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(USERS, WIDTH, sparse=True)
        self.items = nn.Embedding(ITEMS, WIDTH, sparse=True)
        self.bias = nn.Parameter(torch.zeros(()))
        for table in (self.users, self.items):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, pairs: torch.Tensor) -> torch.Tensor:
        """How far their vectors agree."""
        users: torch.Tensor = self.users(pairs[:, 0])
        return (users * self.items(pairs[:, 1])).sum(1) + self.bias


def ratings(num_samples: int, seed: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Pairs (n, 2), and how much they like each other. Few users and items make up most of them."""
    truth = np.random.default_rng(0)
    users, items = (truth.standard_normal((n, WIDTH)) / WIDTH**0.5 for n in (USERS, ITEMS))
    rng = np.random.default_rng(seed)
    pairs = np.stack([(n * rng.random(num_samples) ** 3).astype(np.int64) for n in (USERS, ITEMS)], axis=1)
    return pairs, (users[pairs[:, 0]] * items[pairs[:, 1]]).sum(1).astype(np.float32)


def job() -> gs.Job:
    """2 workers, 1 parameter server; Adagrad, whose rate falls row by row as rows are seen."""
    return gs.Job(
        model=gs.from_torch(Liking, nn.functional.mse_loss),
        data=gs.from_arrays(*ratings(200_000, 1), *ratings(20_000, 2)),
        strategy="downpour",
        optimizer=gs.optim.Adagrad(lr=0.1),
        workers=2,
        batch_size=64,
        epochs=2,
    )


if __name__ == "__main__":
    run = gs.train(job())
    summary = run.summary
    for way in ("pushed", "fetched"):
        sent, whole = summary[f"{way}_bytes"], summary[f"whole_{way}_bytes"]
        print(f"{way:7} {sent / 1e6:8.1f} MB, of {whole / 1e6:,.0f} MB with all rows")
    print(f"loss on held-out pairs {run.evaluate().loss:.4f}; {summary['samples_per_s']:,.0f} samples/s")
