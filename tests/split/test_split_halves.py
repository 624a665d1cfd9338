"""The second half of a backward pass: weights' gradients of wide layers add up without a tensor of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import nn

from gradstream.model.base import Batch
from gradstream.model.torch_module import from_torch
from gradstream.split.operations import Operations, Use
from split_stages import Stages, batch_of


class Overwritten(nn.Module):
    """Writes to what a wide layer has read."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.wide, self.last = nn.Linear(6, 1100), nn.Linear(1100, 1000), nn.Linear(1000, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        result = self.wide(hidden)
        hidden.add_(1.0)
        last: torch.Tensor = self.last(result)
        return last


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 1100), nn.Tanh(), nn.Linear(1100, 1000), nn.Tanh(), nn.Linear(1000, 3))


def stages_of(build: Callable[[], nn.Module], parts: int) -> tuple[Stages, Batch]:
    rng = np.random.default_rng(0)
    batch = batch_of(rng.standard_normal((8, 6)), rng.integers(0, 3, 8))
    return Stages.of(from_torch(lambda: build().double(), nn.functional.cross_entropy), batch, parts), batch


@pytest.mark.parametrize("parts", [1, 2])
def test_both_halves_are_the_whole(parts: int) -> None:
    stages, batch = stages_of(wide, parts)
    loss, whole = stages.gradient(stages.init(), batch)
    found: list[torch.Tensor | None] = []
    plain = Operations._wide_input

    def noted(self: Operations, *given: Any) -> torch.Tensor | None:
        found.append(plain(self, *given))
        return found[-1]

    with patch.object(Operations, "_wide_input", noted):
        assert stages.gradient(stages.init(), batch, halves=True)[0] == loss
    assert sum(one is not None for one in found) == (parts == 1), "one layer is wide, and two parts divide it"
    # Adding a product to a gradient may round once less than making it first, as without AVX-512.
    halves = stages.gradient(stages.init(), batch, halves=True)[1]
    torch.testing.assert_close(halves, whole, rtol=1e-13, atol=1e-16)


def test_what_is_written_between_the_halves_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    stages, batch = stages_of(Overwritten, 1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stages.gradient(stages.init(), batch, halves=True)

    # Without a look at the version it would be another gradient.
    monkeypatch.setattr(Use, "is_product", property(lambda self: self.inputs is not None))
    stages.gradient(stages.init(), batch, halves=True)
