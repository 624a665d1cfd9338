"""What a module keeps from call to call, changes in place or draws: kept when it is split, or refused with its line."""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  its usual name

from gradstream.errors import ConfigError
from gradstream.model import from_torch
from gradstream.split.cut import plan_split
from gradstream.split.part_model import PartModel
from split_stages import Stages, batch_of, whole_gradient, whole_parameters

RNG = np.random.default_rng(0)
INPUTS, CLASSES = RNG.standard_normal((8, 6)), RNG.integers(0, 3, 8)
CALLS = [0]
Between = Callable[..., torch.Tensor]


class Net(nn.Module):
    """Three layers, with what a test puts in between, and something that it keeps."""

    mean: torch.Tensor

    def __init__(self, between: Between = lambda net, x: x, kept: Any = None) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.register_buffer("mean", torch.zeros(6))
        self.between, self.kept = between, kept
        self.shown: Any = None
        self.half: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.third(self.second(self.between(self, self.first(x))))
        return made


def equal(build: Callable[[], nn.Module]) -> None:
    """Compares two steps on 1 to 3 parts with the whole model."""
    batch = batch_of(INPUTS, CLASSES)
    for parts in (1, 2, 3):
        model = from_torch(lambda: build().double(), F.cross_entropy)
        stages = Stages.of(model, batch, parts)
        vectors, whole = stages.init(), whole_parameters(model)
        for _ in range(2):  # the second finds what the first has kept
            _, gradient = stages.gradient(vectors, batch)
            torch.testing.assert_close(gradient, whole_gradient(model, batch, whole)[1], rtol=0, atol=1e-12)


def refused(build: Callable[[], nn.Module], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        plan_split(from_torch(build, F.cross_entropy), batch_of(INPUTS, CLASSES), 1)


class Hooked(Net):
    """Hooks of modules, and one of a parameter that was taken away."""

    def __init__(self) -> None:
        super().__init__()
        self.second.register_forward_hook(lambda module, given, made: made * 3)
        self.third.register_full_backward_hook(lambda module, into, out: (2 * into[0],))  # type: ignore[index]
        self.first.weight.register_hook(lambda gradient: gradient * 0).remove()  # type: ignore[no-untyped-call]


def shows(net: Net, x: torch.Tensor) -> Any:
    if not net.kept:
        net.kept[6] = torch.arange(6.0)
    net.shown, net.half = x, torch.ones(6) / 2
    return x * net.half + net.kept[6]


def keeps_a_mean(net: Net, x: torch.Tensor) -> Any:
    net.mean.mul_(0.9).add_(x.detach().mean(0))
    return x - net.mean


def assigns(net: Net, x: torch.Tensor) -> Any:
    x = x * 1
    a, b = x[:, :3], x[:, 3:]
    a *= 2  # b is a view of the same memory, but of other elements
    x = torch.cat((b, b), 1)
    x += 1
    return x


def assigns_elements(net: Net, x: torch.Tensor) -> Any:
    y = x.clone()
    y[:, 0], y[:, 1:3] = 0.0, x[:, 2:4]
    return y


@pytest.mark.parametrize(
    "build",
    [
        Hooked,
        lambda: Net(shows, {}),
        lambda: Net(keeps_a_mean),
        lambda: Net(assigns),
        lambda: Net(assigns_elements),
    ],
    ids=["hooks of modules", "filled once", "buffer", "augmented", "elements"],
)
def test_is_as_in_the_whole_model(build: Callable[[], nn.Module]) -> None:
    equal(build)


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_gradient_hook_of_a_parameter_is_refused_with_its_line(register: str) -> None:
    def hook(gradient: torch.Tensor) -> None:
        return None

    def build() -> nn.Module:
        net = Net()
        getattr(net.second.weight, register)(hook)
        return net

    line = hook.__code__.co_firstlineno
    refused(build, f"test_split_state.py:{line}: got a gradient hook on parameter 'second.weight'")


def in_list(net: Net, x: torch.Tensor) -> Any:
    net.kept.append(1)
    return x / len(net.kept)


def in_dict(net: Net, x: torch.Tensor) -> Any:
    net.kept["calls"][0] += 1
    return x / net.kept["calls"][0]


def in_set(net: Net, x: torch.Tensor) -> Any:
    net.kept.add(len(net.kept))
    return x


def in_array(net: Net, x: torch.Tensor) -> Any:
    net.kept[-1] += 1
    return x


def in_generator(net: Net, x: torch.Tensor) -> Any:
    return x * net.kept.random()


def in_torch_generator(net: Net, x: torch.Tensor) -> Any:
    net.kept.manual_seed(net.kept.initial_seed() + 1)
    return x


def in_tensor(net: Net, x: torch.Tensor) -> Any:
    net.kept[0].mul_(0.9)
    return x


@pytest.mark.parametrize(
    ("between", "kept"),
    [
        (in_list, list),
        (in_list, deque),
        (in_dict, lambda: {"calls": [0]}),
        (in_set, set),
        (in_array, lambda: np.zeros(40_000)),
        (in_generator, lambda: np.random.default_rng(0)),
        (in_generator, lambda: random.Random(0)),
        (in_torch_generator, torch.Generator),
        (in_tensor, lambda: [torch.ones(6)]),
        (in_tensor, lambda: [torch.ones(2000, 2)]),  # without values while it is traced
    ],
)
def test_state_of_python_in_an_attribute_is_refused(between: Between, kept: Callable[[], Any]) -> None:
    refused(lambda: Net(between, kept()), r"test_split_state.py:\d+: .* it changes its attribute kept")


def in_global(net: Net, x: torch.Tensor) -> Any:
    CALLS[0] += 1
    return x * CALLS[0]


def initialises(net: Net, x: torch.Tensor) -> Any:
    begun, net.kept = net.kept, True
    return x.relu() if begun else x.tanh()


def in_plain_tensor(net: Net, x: torch.Tensor) -> Any:
    net.kept.mul_(0.9).add_(x.detach().mean(0))
    return x - net.kept


def in_new_tensor(net: Net, x: torch.Tensor) -> Any:
    total = torch.zeros(6)
    total += x.detach().mean(0)
    return x - total


def replaces_buffer(net: Net, x: torch.Tensor) -> Any:
    net.mean = net.mean * 0.9 + x.detach().mean(0)
    return x - net.mean


def adds_to_buffer(net: Net, x: torch.Tensor) -> Any:
    net.mean += 1
    return x - net.mean


def makes_a_mask(net: Net, x: torch.Tensor) -> Any:
    if net.kept is None:
        net.kept = torch.ones(6)
    return x * net.kept


def draws_in_numpy(net: Net, x: torch.Tensor) -> Any:
    return x * np.random.rand()  # noqa: NPY002


def hooks_a_result(net: Net, x: torch.Tensor) -> Any:
    x.register_hook(lambda gradient: -gradient)  # type: ignore[no-untyped-call]
    return x


def changes_another_name(net: Net, x: torch.Tensor) -> Any:
    x = x * 1
    y = x
    y += 1
    return x + y


def changes_by_a_view(net: Net, x: torch.Tensor) -> Any:
    x = x * 1
    y = x[:, :4]
    y *= 2
    return x


@pytest.mark.parametrize(
    ("between", "kept", "line", "match"),
    [
        (in_global, None, 2, "something else in a second call.*register_buffer"),
        (initialises, None, 2, "something else in a second call.*register_buffer"),
        (in_plain_tensor, torch.zeros(6), 1, "writes into its attribute kept.*register_buffer"),
        (in_new_tensor, None, 2, "writes into a tensor.*x.new_zeros"),
        (
            replaces_buffer,
            None,
            None,
            r"assigns a computed tensor to its attribute mean.*self.mean.mul_\(0.9\)",
        ),
        (adds_to_buffer, None, None, "assigns a computed tensor to its attribute mean"),
        (makes_a_mask, None, 3, "in a second call.*__init__"),
        (draws_in_numpy, None, None, "draws random numbers of Python or NumPy.*torch.randn_like"),
        (hooks_a_result, None, 1, "register_hook.*torch.autograd.Function"),
        (changes_another_name, None, 3, r"augmented assignment.*h\.add_\(1\)"),
        (changes_by_a_view, None, 3, r"augmented assignment.*h\.add_\(1\)"),
    ],
)
def test_refused_with_line_and_remedy(between: Between, kept: Any, line: int | None, match: str) -> None:
    first = (Net.forward if line is None else between).__code__.co_firstlineno
    build = lambda: Net(between, copy.deepcopy(kept))  # noqa: E731
    if between is draws_in_numpy:
        np.random.rand(2)  # noqa: NPY002  the next draw only moves the position
    refused(build, rf"test_split_state.py:{first + (line or 0)}: .*{match}")


def test_batch_norm_that_counts_minibatches_is_refused_by_name() -> None:
    build = lambda: nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3, momentum=None))  # noqa: E731
    refused(build, r"module '1' \(BatchNorm1d\).*momentum=None.*expected momentum=0.1")


@pytest.mark.parametrize(
    ("between", "match"),
    [
        (lambda net, x: x * x.max().item(), "meta tensors; expected .* do not depend on their values"),
        (lambda net, x: x * float(x.max()), "_Proxy'; expected .* do not depend on their values"),
        (lambda net, x: x @ torch.ones(5, 5), "shapes: change this line$"),
    ],
)
def test_values_are_blamed_only_where_they_are_the_cause(between: Between, match: str) -> None:
    refused(lambda: Net(between), match)


def test_part_0_knows_the_buffers_of_another_part_as_they_were_last_heard() -> None:
    def build() -> nn.Module:
        layers = [module for _ in range(4) for module in (nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh())]
        return nn.Sequential(*layers, nn.Linear(6, 3))

    model = from_torch(build, F.cross_entropy)
    first, second = (PartModel(model, batch_of(INPUTS, CLASSES), 2, part) for part in range(2))
    theirs = list(first.buffers_of_part(1))
    assert len(theirs) > 3 and [*first.buffers()] == [*first.whole_buffers] and [*second.buffers()] == theirs
    second.load_buffers({name: array + i for i, (name, array) in enumerate(second.buffers().items())})
    first.unpack_buffers(1, second.packed_buffers(1))
    for name, array in second.buffers().items():
        assert np.array_equal(first.buffers()[name], array)
