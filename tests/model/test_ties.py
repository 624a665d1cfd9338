"""Tensors that share memory: tied where they are the same, refused where they are not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import gradstream as gs
from gradstream.errors import ConfigError
from gradstream.model.built_module import shared


class Two(nn.Module):
    """Two layers, whose memory `share` makes one, and a third that has its own."""

    def __init__(self, share: Callable[[Two], object]) -> None:
        super().__init__()
        self.a, self.b, self.o = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False), nn.Linear(6, 1)
        share(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.o(self.b(torch.tanh(self.a(x))))  # type: ignore[no-any-return]


def same(net: Two) -> None:
    net.b.weight.data = net.a.weight.data


def with_another_parameter(net: Two) -> None:
    net.b.weight = nn.Parameter(net.a.weight.data)


def transposed(net: Two) -> None:
    net.b.weight.data = net.a.weight.data.T


def in_part(net: Two) -> None:
    memory = torch.randn(9, 6)
    net.a.weight.data, net.b.weight.data = memory[:6], memory[3:]


def with_gaps(net: Two) -> None:
    memory = torch.randn(6, 13)
    net.a.weight.data, net.b.weight.data = memory[:, :6], memory[:, 5:11]


def with_a_buffer(net: Two) -> None:
    net.register_buffer("kept", net.a.weight.data[0])


def with_a_frozen_one(net: Two) -> None:
    net.b.weight = nn.Parameter(net.a.weight.data, requires_grad=False)


def apart(net: Two) -> None:
    """In one memory, as a flat buffer of all has them."""
    memory = torch.randn(6, 12)
    net.a.weight.data, net.b.weight.data = memory[:, ::2], memory[:, 1::2]
    net.o.weight = nn.Parameter(net.o.weight.detach())


TIED = (same, with_another_parameter)
REFUSED = (transposed, in_part, with_gaps, with_a_buffer, with_a_frozen_one)
DATA = np.random.default_rng(0).normal(size=(32, 6)).astype("float32"), np.ones((32, 1), "float32")


@pytest.mark.parametrize("share", [*TIED, *REFUSED, apart])
def test_tensors_with_common_memory_are_found(share: Callable[[Two], object]) -> None:
    net = Two(share)
    found = list(shared((*net.named_parameters(), *net.named_buffers())))
    assert len(found) == (share is not apart)


@pytest.mark.parametrize("strategy", ["synchronous", "downpour", "diloco"])
@pytest.mark.parametrize("share", TIED)
def test_parameters_of_the_same_memory_stay_tied(share: Callable[[Two], object], strategy: str) -> None:
    def build(share: Callable[[Two], object]) -> Two:
        torch.manual_seed(0)
        return Two(share)

    def tied(net: Two) -> None:
        net.b.weight = net.a.weight

    runs = [
        gs.simulate(
            gs.from_torch(partial(build, how), nn.functional.mse_loss),
            DATA,
            strategy=strategy,
            workers=2,
            batch_size=4,
            epochs=1,
            optimizer=gs.optim.SGD(lr=0.05, momentum=0.9),
        )
        for how in (share, tied)
    ]
    for run in runs:
        assert np.array_equal(run.parameters["a.weight"], run.parameters["b.weight"])
        assert np.array_equal(run.parameters["a.weight"], runs[1].parameters["a.weight"])


@pytest.mark.parametrize("share", REFUSED)
def test_other_common_memory_is_refused(share: Callable[[Two], object]) -> None:
    model = gs.from_torch(lambda: Two(share), nn.functional.mse_loss)
    with pytest.raises(ConfigError, match=r"'a\.weight'.* share memory .*one Parameter"):
        model.layout  # noqa: B018


def test_memory_that_is_not_common_is_trained() -> None:
    model = gs.from_torch(lambda: Two(apart), nn.functional.mse_loss)
    assert model.layout.elems == 79
