"""Gradients of wide layers as factors: the kept factors, the sent ones, and equal updates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gradstream as gs
from gradstream.errors import ConfigError, GradientError
from gradstream.model import built_module
from gradstream.model.base import Batch
from gradstream.model.factors import FactoredLayer, FactorPair, factored_layers_of
from gradstream.runtime.simulation import Cost, Network, SimulationConfig
from gradstream.strategies import AllReduce
from gradstream.worker.group.sufficient_factors import outside
from whole_runs import same

WIDE, CLASSES, SAMPLES = 72, 4, 48
BUCKET = 1 / 256  # MiB: 1024 elements; the layer has 5184, and begins and ends in the middle of one


@pytest.fixture(autouse=True)
def _wide_is_not_so_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(built_module, "WIDE_ELEMS", WIDE * WIDE)


class Whole(nn.Module):
    """A wide layer between two others, of small integers: all sums are exact."""

    def __init__(self, times: int = 1) -> None:
        super().__init__()
        self.times = times
        self.narrow = nn.Linear(8, WIDE)
        self.wide = nn.Linear(WIDE, WIDE)
        self.last = nn.Linear(WIDE, CLASSES)
        for parameter in self.parameters():
            parameter.data = torch.randint(-1, 2, parameter.shape, dtype=torch.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.narrow(x)
        for _ in range(self.times):
            x = self.wide(x)
        outputs: torch.Tensor = self.last(x)
        return outputs


def linear(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs * targets).sum()


def model_of(**options: Any) -> Any:
    return gs.from_torch(lambda: Whole(**options), linear, reduction="sum")


def data() -> Any:
    rng = np.random.default_rng(0)
    x = rng.integers(-1, 2, (SAMPLES, 8)).astype("float32")
    return gs.from_arrays(x, rng.integers(-1, 2, (SAMPLES, CLASSES)).astype("float32"))


def trained(strategy: Any, sizes: list[int], model: Any = None, **options: Any) -> gs.Run:
    options = {"steps": 1, "optimizer": gs.optim.SGD(lr=1.0), **options}
    return gs.simulate(
        model or model_of(), data(), workers=len(sizes), batch_size=sizes, strategy=strategy, **options
    )


def bytes_of(run: gs.Run) -> int:
    return sum(event["pushed_bytes"] for event in run.events if event["event"] == "exchange")


# ---- kept factors -----------------------------------------------------------------------


def test_a_model_offers_wide_layers_of_their_own_and_keeps_their_factors() -> None:
    model = model_of()
    (layer,) = factored_layers_of(model)
    assert (layer.name, layer.outputs, layer.inputs) == ("wide.weight", WIDE, WIDE)
    flat = torch.empty(model.layout.elems)
    model.init(0, flat)
    batch = Batch(torch.ones(3, 8), torch.ones(3, CLASSES), 3, np.arange(3))
    expected, gradient = torch.empty_like(flat), torch.full_like(flat, 7.0)
    model.gradient(flat, batch, expected, seed=0, report=lambda _: None)
    pair = FactorPair(layer, torch.empty(3, WIDE), torch.empty(3, WIDE))
    model.gradient(flat, batch, gradient, seed=0, report=lambda _: None, factors={layer.name: pair})
    assert pair.state == "kept"
    assert (layer.place(gradient) == 7.0).all()  # left as it was
    layer.place(gradient).copy_(pair.delta.t() @ pair.x)
    assert torch.equal(gradient, expected)


@pytest.mark.parametrize(("times", "rows"), [(2, 3), (1, 4)])
def test_what_is_no_single_product_is_refused_and_formed(times: int, rows: int) -> None:
    model = model_of(times=times)
    (layer,) = factored_layers_of(model)
    flat = torch.empty(model.layout.elems)
    model.init(0, flat)
    batch = Batch(torch.ones(3, 8), torch.ones(3, CLASSES), 3, np.arange(3))
    expected, gradient = torch.empty_like(flat), torch.empty_like(flat)
    model.gradient(flat, batch, expected, seed=0, report=lambda _: None)
    pair = FactorPair(layer, torch.empty(rows, WIDE), torch.empty(rows, WIDE))
    model.gradient(flat, batch, gradient, seed=0, report=lambda _: None, factors={layer.name: pair})
    assert pair.state == "refused"
    torch.testing.assert_close(gradient, expected)


def test_tied_and_narrow_layers_are_not_offered() -> None:
    def tied() -> nn.Module:
        module = nn.Sequential(nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE), nn.Linear(WIDE, 8))
        module[1].weight = module[0].weight
        return module

    assert not factored_layers_of(gs.from_torch(tied, linear))
    assert not factored_layers_of(object())


def test_what_a_bucket_has_besides() -> None:
    layers = [FactoredLayer("a", 10, 5, 4), FactoredLayer("b", 40, 2, 5)]  # [10, 30) and [40, 50)
    assert outside((0, 64), layers) == [(0, 10), (30, 40), (50, 64)]
    assert outside((12, 20), layers) == []
    assert outside((20, 45), layers) == [(30, 40)]
    assert outside((50, 60), layers) == [(50, 60)]


# ---- whole runs -------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [True, False])
def test_the_update_is_that_of_gradients_bit_for_bit_and_fewer_bytes_are_sent(overlap: bool) -> None:
    sizes = [3, 0, 5]  # 8: the weights are exact
    expected = trained(AllReduce(factors=False, overlap=overlap, bucket_mib=BUCKET), sizes)
    found = trained(AllReduce(overlap=overlap, bucket_mib=BUCKET), sizes)
    assert same(found, expected)
    assert same(expected, trained(gs.Synchronous(), sizes))
    (event,) = (event for event in found.events if event["event"] == "factors")
    assert event["layers"] == {"wide.weight": "factors"}
    part = 768  # 5 x (72 + 72), of the largest minibatch, in whole blocks of 64
    assert event["factor_elems"] == {"wide.weight": part}
    assert event["gradient_elems"] == {"wide.weight": WIDE * WIDE}
    assert bytes_of(expected) - bytes_of(found) == 3 * 4 * (WIDE * WIDE - part)


@pytest.mark.parametrize("exchange", ["auto", "torch"])
def test_for_real_too_where_it_is_asked_for(exchange: str, tmp_path: Path) -> None:
    sizes = [3, 5]
    expected = trained(AllReduce(factors=False), sizes)
    strategy = AllReduce(factors=True, exchange=exchange, bucket_mib=BUCKET)
    options: Any = {"workers": 2, "batch_size": sizes, "steps": 1, "optimizer": gs.optim.SGD(lr=1.0)}
    found = gs.train(
        model_of(), data(), strategy=strategy, processes=False, run_dir=tmp_path / "run", **options
    )
    assert same(found, expected)
    (event,) = (event for event in found.events if event["event"] == "factors")
    assert event["layers"] == {"wide.weight": "factors"}


def near(found: gs.Run, expected: gs.Run) -> None:
    """The same but for rounding: of the change, where weights were small integers."""
    changes = {name: np.abs(value - value.round()).max() for name, value in expected.parameters.items()}
    assert 1e-3 < changes["wide.weight"] <= max(changes.values()) < 0.5
    for name, value in expected.parameters.items():
        atol = 1e-6 + 1e-4 * changes[name]
        np.testing.assert_allclose(found.parameters[name], value, rtol=0, atol=atol, err_msg=name)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("sizes", [[7, 2], [2, 7, 3]])
def test_steps_of_several_sizes_go_on_in_the_same_memory(sizes: list[int], reduction: Any) -> None:
    """The last round of an epoch is short; a mean's weights differ from worker to worker."""
    model = gs.from_torch(Whole, linear, reduction=reduction)
    options: Any = {"model": model, "steps": None, "epochs": 2, "optimizer": gs.optim.SGD(lr=2.0**-12)}
    expected = trained(AllReduce(factors=False), sizes, **options)
    near(trained(AllReduce(factors=True, bucket_mib=BUCKET), sizes, **options), expected)


def test_shares_that_grow_take_memory_that_grows() -> None:
    slow = SimulationConfig(costs={"gradient": Cost(per_sample_s=1e-3)}, speeds={"worker-1": 0.25})
    options: Any = {"steps": None, "epochs": 2, "optimizer": gs.optim.SGD(lr=2.0**-12)}
    expected = trained(AllReduce(factors=False), [4, 4], **options)
    strategy = AllReduce(factors=True, bucket_mib=BUCKET)
    found = trained(strategy, [4, 4], config=slow, shares="measured", **options)
    assert [event["samples"] for event in found.events if event["event"] == "shares"][-1][0] > 4
    near(found, expected)


def test_a_layer_that_no_product_describes_goes_the_usual_way_on_all_workers() -> None:
    options = {"model": model_of(times=2), "optimizer": gs.optim.SGD(lr=2.0**-60), "steps": 2}
    found = trained(AllReduce(bucket_mib=BUCKET), [3, 4], **options)
    (event,) = (event for event in found.events if event["event"] == "factors")
    assert event["layers"] == {"wide.weight": "gradient"}
    expected = trained(AllReduce(factors=False, bucket_mib=BUCKET), [3, 4], **options)
    for name, value in expected.parameters.items():
        np.testing.assert_allclose(found.parameters[name], value, rtol=1e-5, atol=1e-7)


class Doubting(Whole):
    """Goes through its wide layer twice where it has four samples."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.times = 2 if len(x) == 4 else 1
        return super().forward(x)


@pytest.mark.parametrize("sizes", [[3, 4], [4, 3], [2, 3, 4]])
def test_one_worker_that_has_no_product_decides_for_all(sizes: list[int]) -> None:
    model = gs.from_torch(Doubting, linear, reduction="sum")
    options: Any = {"model": model, "optimizer": gs.optim.SGD(lr=2.0**-12), "steps": 3}
    found = trained(AllReduce(bucket_mib=BUCKET), sizes, **options)
    (event,) = (event for event in found.events if event["event"] == "factors")
    assert event["layers"] == {"wide.weight": "gradient"}
    near(found, trained(AllReduce(factors=False), sizes, **options))


class Turning(Whole):
    """Goes through its wide layer twice from the third minibatch on."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = getattr(self, "seen", 0) + 1
        self.times = 2 if self.seen > 2 else 1
        return super().forward(x)


def test_a_layer_that_is_a_product_no_more_is_an_error_that_says_what_to_do() -> None:
    model = gs.from_torch(Turning, linear, reduction="sum")
    with pytest.raises(GradientError, match=r"wide.weight: its gradient was one product.*factors=False"):
        trained(AllReduce(), [3, 4], model=model, optimizer=gs.optim.SGD(lr=2.0**-60), steps=4)


class Bursting(Whole):
    """Only the factors of its wide layer are not finite."""

    def __init__(self) -> None:
        super().__init__()
        self.wide.bias = None  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.wide(self.narrow(x).detach())
        x.register_hook(lambda gradient: gradient * torch.inf)  # type: ignore[no-untyped-call]
        outputs: torch.Tensor = self.last(x)
        return outputs


@pytest.mark.parametrize("factors", [None, False])
def test_factors_that_are_not_finite_are_a_gradient_that_is_not(factors: bool | None) -> None:
    model = gs.from_torch(Bursting, linear, reduction="sum")
    with pytest.raises(GradientError, match="gradient has a NaN or an infinity"):
        trained(AllReduce(factors=factors), [3, 5], model=model)


def test_bytes_decide_and_one_machine_does_not() -> None:
    wide, strategy = FactoredLayer("fc", 0, 8000, 9216), AllReduce()
    assert wide.elems == 73_728_000
    assert wide.factor_elems(256) == 4_407_296
    assert strategy.as_factors(wide, 256, workers=2, near=False)
    assert strategy.as_factors(wide, 256, workers=33, near=False)
    assert not strategy.as_factors(wide, 256, workers=34, near=False)  # 34·4,407,296 > 2·73,728,000
    assert not strategy.as_factors(wide, 256, workers=2, near=True)
    assert AllReduce(factors=True).as_factors(wide, 256, workers=2, near=True)
    assert not AllReduce(factors=False).as_factors(wide, 1, workers=2, near=False)


def test_a_shape_only_runs_no_backward_pass_that_would_tell_but_can_be_told() -> None:
    config = SimulationConfig(network=Network(bandwidth_bytes_s=1e6), shape_only=True)
    told, guessed, plain = (
        trained(AllReduce(factors=factors), [4, 4], config=config) for factors in (True, None, False)
    )
    assert bytes_of(guessed) == bytes_of(plain) > bytes_of(told)
    assert not [event for event in guessed.events if event["event"] == "factors"]
    assert told.info["virtual_s"] < plain.info["virtual_s"]


def test_what_cannot_go_as_factors_is_said() -> None:
    with pytest.raises(ConfigError, match="factors=True, sharded=True"):
        AllReduce(factors=True, sharded=True)
    with pytest.raises(ConfigError, match="no layer of this model can be exchanged as factors: gradients"):
        trained(AllReduce(factors=True), [3, 4], clip_norm=1.0)
