"""What a module may do and still be cut into stages, and what is refused, with its line."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  its usual name
from torch.utils.checkpoint import checkpoint

from gradstream.errors import ConfigError
from gradstream.model import from_torch
from gradstream.split import operations
from gradstream.split.cut import plan_split
from split_stages import Stages, batch_of, whole_gradient, whole_parameters

RNG = np.random.default_rng(0)
INPUTS, CLASSES = RNG.standard_normal((8, 6)), RNG.integers(0, 3, 8)


class Net(nn.Module):
    """Three layers, with what a test puts in between."""

    seen: torch.Tensor

    def __init__(self, between: Callable[..., Any] = lambda net, x: x) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("long", torch.arange(6.0))
        self.between = between
        self.calls = 0

    def forward(self, x: torch.Tensor) -> Any:
        return self.third(self.between(self, self.second(self.between(self, self.first(x)))))


def equal(
    build: Callable[[], nn.Module], inputs: Any = INPUTS, targets: Any = CLASSES, **options: Any
) -> Stages:
    """Compares stages on 1 to 3 parts with the whole model. Returns those of the last."""
    loss = options.pop("loss", F.cross_entropy)
    batch = batch_of(inputs, targets)
    for parts in (1, 2, 3):
        model = from_torch(lambda: build().double(), loss, **options)
        stages = Stages.of(model, batch, parts)
        vectors, whole = stages.init(), whole_parameters(model)
        assert torch.equal(stages.joined(vectors), whole)
        for _ in range(2):  # the second finds buffers that the first has changed
            value, gradient = stages.gradient(vectors, batch)
            expected_value, expected = whole_gradient(model, batch, whole)
            assert value == pytest.approx(expected_value, abs=1e-12)
            torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-12)
        results = stages.evaluate(vectors, batch)
        torch.testing.assert_close(results["outputs"], model.outputs(whole, batch.inputs), rtol=0, atol=1e-12)
        assert float(results["loss"]) == pytest.approx(model.held_out_loss(whole, batch), abs=1e-12)
        own = [stage.buffers() for stage in stages.models]
        assert {name for buffers in own for name in buffers} == set(model.buffers())
        for buffers in own:
            for name, array in buffers.items():
                np.testing.assert_allclose(array, model.buffers()[name], rtol=0, atol=1e-12)
    return stages


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return -gradient


def without_gradient(net: Net, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        shift = x.abs() * 2
    return x + shift


def by_shape(net: Net, x: torch.Tensor) -> torch.Tensor:
    b, f = x.shape
    assert x.dim() == 2 and len(x.shape) == 2 and x.size(-1) == f
    parts = list(x.view(b, 2, f // 2).unbind(1))
    return (
        torch.cat(parts[::-1], 1).reshape(b * 2, -1).view(b, -1)
        + torch.arange(f)
        + x.new_zeros(b, f)
        + torch.arange(b)[:, None] * torch.ones(b, f)
    )


def counting(net: Net, x: torch.Tensor) -> torch.Tensor:
    net.seen.add_(1)
    return x


def written(net: Net, x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[:, :2].mul_(2)
    y.add_(x)
    return y.relu_()


@pytest.mark.parametrize(
    "between",
    [
        lambda net, x: Reversed.apply(x),  # type: ignore[no-untyped-call]
        lambda net, x: checkpoint(torch.tanh, x, use_reentrant=False),
        lambda net, x: x + net.long * (2 if net.training else 3),
        lambda net, x: x * (x > 0),
        lambda net, x: x.max(dim=1, keepdim=True).values + x.topk(6).indices.detach() + x.T.flip(0).T,
        without_gradient,
        by_shape,
        written,
    ],
    ids=["function", "checkpoint", "mode", "bool", "tuples", "no_grad", "shapes", "in place"],
)
def test_a_module_may(between: Callable[..., Any]) -> None:
    equal(lambda: Net(between))


def test_a_map_may_send_integers_and_booleans_over_a_cut() -> None:
    class Masked(Net):
        def forward(self, x: torch.Tensor) -> Any:
            x = self.first(x)
            positive, order = x > 0, x.argsort(1)
            return self.third(self.second(x).gather(1, order) * positive)

    model = from_torch(lambda: Masked().double(), F.cross_entropy)
    batch = batch_of(INPUTS, CLASSES)
    stages = Stages.of(model, batch, 2, map={"first": 0, "second": 1})
    crossing = {value.dtype: value for value, _ in stages.plan.crossings()}
    assert torch.float64 in crossing
    stages = Stages.of(model, batch, 2, map={"first": 0, "argsort": 0, "second": 1})
    assert {v.dtype for v, _ in stages.plan.crossings()} >= {torch.float64, torch.int64, torch.bool}
    assert [v.has_gradient for v, _ in stages.plan.crossings() if v.dtype == torch.bool] == [False]
    _, gradient = stages.gradient(stages.init(), batch)
    torch.testing.assert_close(
        gradient, whole_gradient(model, batch, whole_parameters(model))[1], rtol=0, atol=1e-12
    )


def test_buffers_and_frozen_parameters_are_the_whole_models() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(
                nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.BatchNorm1d(6)
            )
            self.frozen = nn.Linear(6, 2000).requires_grad_(False)
            self.head = nn.Linear(2000, 3)

        def forward(self, x: torch.Tensor) -> Any:
            return self.head(self.frozen(self.layers(x)))

    stages = equal(Normed)
    model = from_torch(lambda: Normed().double(), F.cross_entropy)
    found = {name: array for stage in stages.models for name, array in stage.fixed().frozen.items()}
    assert found.keys() == model.fixed().frozen.keys()
    for name, array in found.items():
        np.testing.assert_array_equal(array, model.fixed().frozen[name])
    with pytest.raises(ConfigError, match="running_mean"):
        next(s for s in stages.models if s.buffers()).load_buffers({})


def test_trees_of_inputs_targets_and_outputs_have_names() -> None:
    class Two(Net):
        def forward(  # type: ignore[override]
            self, a: torch.Tensor, b: torch.Tensor, mask: torch.Tensor | None = None
        ) -> Any:
            x = self.second(self.first(a) + b)
            return self.third(x if mask is None else x * mask)

    def loss(outputs: torch.Tensor, targets: Any) -> torch.Tensor:
        return F.cross_entropy(outputs, targets["y"])

    model = from_torch(lambda: Two().double(), loss, spread=True)
    batch = batch_of({"b": INPUTS, "a": INPUTS * 2}, {"y": CLASSES}, 8)
    stages = Stages.of(model, batch, 2)
    assert {v.name for v in stages.plan.values if v.source == -1} == {"inputs.a", "inputs.b", "targets.y"}
    _, gradient = stages.gradient(stages.init(), batch)
    torch.testing.assert_close(
        gradient, whole_gradient(model, batch, whole_parameters(model))[1], rtol=0, atol=1e-12
    )


def decides(net: Net, x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.shape[0] > 100 else x


def draws(net: Net, x: torch.Tensor) -> torch.Tensor:
    return x + torch.randn(6)


def draws_in_python(net: Net, x: torch.Tensor) -> torch.Tensor:
    return x * random.random()


def counts_calls(net: Net, x: torch.Tensor) -> torch.Tensor:
    net.calls += 1
    return x * net.calls


def casts(net: Net, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return x @ x.T @ x


def by_mode(net: Net, x: torch.Tensor) -> torch.Tensor:
    return x.tanh() if net.training else x.relu()


@pytest.mark.parametrize("between", [decides, draws, draws_in_python, counts_calls, casts, by_mode])
def test_refused_with_file_and_line(between: Any) -> None:
    model = from_torch(lambda: Net(between), F.cross_entropy)
    with pytest.raises(ConfigError, match=r"test_split_graph.py:\d+: "):
        plan_split(model, batch_of(INPUTS, CLASSES), 1)


def test_a_module_that_is_called_twice_and_changes_its_buffers_stays_in_one_stage() -> None:
    def build() -> nn.Module:
        norm = nn.BatchNorm1d(6)
        ends = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        return nn.Sequential(nn.Linear(6, 6), norm, nn.Linear(6, 6), norm, *ends)

    equal(build)


def test_a_buffer_that_one_stage_changes_and_another_uses_is_refused() -> None:
    class Counting(Net):
        def forward(self, x: torch.Tensor) -> Any:
            return self.third(self.second(counting(self, self.first(x)))) * self.seen

    model = from_torch(Counting, F.cross_entropy)
    with pytest.raises(ConfigError, match=r"changes buffer 'seen', which stages \[0, 1\] use"):
        plan_split(model, batch_of(INPUTS, CLASSES), 2)


def test_a_loss_that_calls_the_module_is_refused() -> None:
    model = from_torch(Net, lambda net, batch: net(batch[0]).sum(), loss_of="batch")
    with pytest.raises(ConfigError, match='loss_of="batch"'):
        plan_split(model, batch_of(INPUTS, CLASSES), 1)


def test_writing_the_minibatch_is_refused() -> None:
    model = from_torch(lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 3)), F.cross_entropy)
    with pytest.raises(ConfigError, match="writes 'inputs' in place"):
        plan_split(model, batch_of(INPUTS, CLASSES), 1)


def test_samples_of_another_shape_are_refused() -> None:
    model = from_torch(Net, F.cross_entropy)
    stages = Stages.of(model, batch_of(INPUTS, CLASSES), 2)
    with pytest.raises(ConfigError, match="inputs: got"):
        stages.gradient(stages.init(), batch_of(INPUTS[:, :5], CLASSES))


def masks(seed: int, map_: dict[str, int] | None = None) -> list[torch.Tensor]:
    """Which elements of a row of ones each of two dropouts keeps."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(1, 4000), nn.Dropout(0.25), nn.Linear(4000, 4000), nn.Dropout(0.25))

    model = from_torch(build, lambda out, to: out.sum())
    stages = Stages.of(model, batch_of(np.ones((1, 1)), np.zeros(1)), 2, map=map_ or {"0": 0, "2": 1})
    vectors = [torch.zeros(stage.layout.elems) for stage in stages.models]
    for stage, vector in zip(stages.models, vectors, strict=True):
        dict(stage.layout.views(vector))[stage.layout.slots[0].name.replace("weight", "bias")].fill_(1)
    _, gradient = stages.gradient(vectors, batch_of(np.ones((1, 1)), np.zeros(1)), seed=seed)
    views = dict(model.layout.views(gradient))
    return [views["2.bias"] > 0, views["2.weight"][int(views["2.bias"].argmax())] > 0]


def masks_differ(seed: int) -> None:
    second, first = masks(seed)
    for mask in (first, second):
        assert abs(mask.float().mean() - 0.75) < 0.03
    assert abs((first & second).float().mean() - 0.75**2) < 0.03  # independent


def test_each_dropout_has_its_own_stream_wherever_the_cut_is(monkeypatch: pytest.MonkeyPatch) -> None:
    masks_differ(5)
    assert not torch.equal(masks(5)[0], masks(6)[0])
    for ours, others in zip(masks(5), masks(5, {"0": 1, "2": 0}), strict=True):
        assert torch.equal(ours, others)
    monkeypatch.setattr(operations, "_stream", lambda seed, name: seed)
    with pytest.raises(AssertionError):
        masks_differ(5)  # the check finds a stream that is shared
