"""A model for hybrids whose parameters count the samples, as those of `gradstream.testing.runs.token_layers`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

import gradstream as gs
from gradstream.run.result import Run
from gradstream.testing import TokenAudit
from gradstream.testing.runs import TOKENS_PER_CHUNK

ROWS = 2


class _Counts(nn.Module):
    """Each sample's number selects an element of every row: in a layer that is data parallel, and in a linear one."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: torch.Tensor
        self.register_buffer("numbers", torch.arange(TOKENS_PER_CHUNK))
        self.common = nn.Parameter(torch.zeros(ROWS, TOKENS_PER_CHUNK))
        self.divided = nn.Linear(TOKENS_PER_CHUNK, ROWS, bias=False)
        nn.init.zeros_(self.divided.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        number = x.unsqueeze(1).eq(self.numbers).float()
        common = (number @ self.common.T).sum(1, keepdim=True)  # first: the linear layer is the last one
        linear: torch.Tensor = self.divided(number).sum(1, keepdim=True)
        return common + linear


def token_hybrid() -> Any:
    """The model. Gradients are the mean over the parts of the sum over their samples: for plain SGD at a rate of K."""
    return gs.from_torch(_Counts, lambda outputs, targets: -outputs.sum())


def audit_of(run: Run, num_samples: int, epochs: int) -> TokenAudit:
    """See `TokenAudit.of`."""
    counts = [array for name, array in run.parameters.items() if name != "numbers"]
    counted: Any = SimpleNamespace(parameters={"tokens": np.concatenate(counts)})
    return TokenAudit.of(counted, num_samples, epochs)
