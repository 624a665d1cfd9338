"""A loop of one's own whose parameters tell which uses of each sample are in them."""

import fcntl
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gradstream

folder, samples, epochs = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
session = gradstream.join()


class Used(nn.Module):
    """Each use of a sample has an element of its own in each of two rows, which other chunks hold."""

    def __init__(self) -> None:
        super().__init__()
        self.uses = nn.Parameter(torch.zeros(2, 2 * samples * epochs, dtype=torch.float64))

    def forward(self, uses: torch.Tensor) -> torch.Tensor:  # noqa: D102
        return self.uses[:, uses].sum() / len(uses)


def numbered(ids: torch.Tensor) -> torch.Tensor:
    """The numbers of these uses, which no other process gets. The file has their samples, in this order."""
    with open(folder / "uses", "ab") as uses:
        fcntl.flock(uses, fcntl.LOCK_EX)
        first = os.fstat(uses.fileno()).st_size // 4
        os.write(uses.fileno(), ids.int().numpy().tobytes())
    return torch.arange(first, first + len(ids))


model = Used()
loader = session.shard(DataLoader(TensorDataset(torch.arange(samples)), batch_size=4, shuffle=True))
model, optimizer = session.wrap(model, torch.optim.SGD(model.parameters(), lr=1.0))
for _ in session.epochs(epochs):
    for (ids,) in loader:
        optimizer.zero_grad()
        model(numbered(ids)).backward()
        optimizer.step()
        time.sleep(0.05)
        (folder / f"alive-{os.getpid()}").touch()
session.close()
