"""Tensors of a module besides trained parameters (buffers, frozen, tied), and losses of other shapes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  its usual name

from gradstream.checkpoint.format import load, save
from gradstream.errors import ConfigError
from gradstream.model import Batch, TorchModel, average_buffers, from_torch
from gradstream.model.buffers import arrays_of, buffers_of, load_buffers, same_bits, set_tensor


class Net(nn.Module):
    """One of everything: BatchNorm, a tied pair, a frozen layer, buffers kept and not kept."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.first = nn.Linear(4, 4, bias=False)
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.first.weight
        self.frozen = nn.Linear(4, 3).requires_grad_(False)
        self.scale: torch.Tensor
        self.register_buffer("scale", torch.full((2,), 0.5, dtype=torch.bfloat16))
        self.register_buffer("scratch", torch.zeros(9), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.tied(self.first(self.norm(x)))) * self.scale[0]  # type: ignore[no-any-return]


@pytest.fixture
def batch() -> Batch:
    rng = np.random.default_rng(0)
    return Batch(rng.standard_normal((8, 4), np.float32), rng.integers(0, 3, 8), 8, np.arange(8))


def step(model: TorchModel, batch: Batch, seed: int = 0) -> tuple[float, torch.Tensor]:
    parameters = torch.empty(model.layout.elems)
    model.init(3, parameters)
    gradient = torch.empty_like(parameters)
    return model.gradient(parameters, batch, gradient, seed=seed, report=lambda n: None), gradient


def test_a_saved_model_has_every_name_of_the_module(batch: Batch) -> None:
    model = from_torch(Net, F.cross_entropy)
    step(model, batch)
    flat = torch.arange(model.layout.elems, dtype=torch.float32)
    saved = {**model.tree(flat), **model.buffers()}
    assert sum(slot.stop - slot.start for slot in model.layout.slots) == 4 + 4 + 16 + 4  # tied once
    module = Net()
    assert saved.keys() == module.state_dict().keys()
    module.load_state_dict({name: torch.from_numpy(np.array(array)) for name, array in saved.items()})
    assert np.array_equal(saved["tied.weight"], saved["first.weight"])
    assert torch.equal(module.tied.weight, module.first.weight)
    module.eval()
    with torch.no_grad():
        assert torch.equal(module(torch.as_tensor(batch.inputs)), model.outputs(flat, batch.inputs))


def test_buffers_are_copies_and_can_be_loaded(batch: Batch) -> None:
    model, other = from_torch(Net, F.cross_entropy), from_torch(Net, F.cross_entropy)
    fresh = model.buffers()
    step(model, batch)
    trained = model.buffers()
    assert list(trained) == ["scale", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]
    assert fresh["norm.num_batches_tracked"] == 0  # as it was
    assert trained["norm.num_batches_tracked"] == 1
    assert trained["scale"].dtype == np.float32  # numpy has no bfloat16
    other.load_buffers({**trained, "and something else": np.zeros(2)})
    flat = torch.ones(model.layout.elems)
    assert torch.equal(model.outputs(flat, batch.inputs), other.outputs(flat, batch.inputs))
    copied = copy.deepcopy(model)  # a simulated worker's
    step(copied, batch)
    assert np.array_equal(model.buffers()["norm.running_mean"], trained["norm.running_mean"])
    with pytest.raises(ConfigError, match=r"buffer 'scale': got shape \(3,\), expected shape \(2,\)"):
        other.load_buffers({**trained, "scale": np.zeros(3)})
    with pytest.raises(ConfigError, match="buffer 'scale': got nothing"):
        other.load_buffers({})


def test_floats_are_averaged_by_samples_and_of_integers_the_largest_counts() -> None:
    one: Any = {"mean": np.array([1, 2], np.float32), "count": np.array(3), "flag": np.array([True, False])}
    two: Any = {"mean": np.array([5, 2], np.float32), "count": np.array(7), "flag": np.array([False, False])}
    found = average_buffers([(30, one), (10, two)])
    assert (found["mean"].tolist(), found["mean"].dtype) == ([2.0, 2.0], np.float32)
    assert (found["count"].tolist(), found["flag"].tolist()) == (7, [True, False])
    assert average_buffers([(0, one), (0, two)])["mean"].tolist() == [3.0, 2.0]
    third: Any = {"mean": np.array([1 / 3], np.float64)}
    assert average_buffers([(7, third)])["mean"].tobytes() == third["mean"].tobytes()
    assert average_buffers([]) == {}


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex64])
def test_equal_elements_are_no_means_and_replicas_without_samples_do_not_count(dtype: Any) -> None:
    mask = np.triu(np.full((3, 3), -np.inf, dtype), 1)
    one: Any = {"mask": mask, "part": np.array([0.1, 3], dtype)}
    two: Any = {"mask": mask.copy(), "part": np.array([0.1, 5], dtype)}
    wrong: Any = {"mask": np.full((3, 3), np.nan, dtype), "part": np.full(2, np.inf, dtype)}
    found = average_buffers([(3, one), (0, wrong), (7, two)])
    assert np.array_equal(found["mask"], mask)
    assert found["part"][0] == one["part"][0]
    assert found["part"][1] == pytest.approx(4.4)
    assert found["part"].dtype == dtype


def test_buffers_without_a_mean_are_those_of_the_first_replica_with_samples() -> None:
    one, two, three = (np.arange(n, dtype=np.float32) for n in (0, 2, 3))
    states: Any = [(0, {"a": one}), (4, {"a": two, "only here": one}), (4, {"a": three, "and here": one})]
    found = average_buffers(states)
    assert found.keys() == {"a", "only here"}
    assert found["a"] is two


ODD: dict[str, Callable[[], torch.Tensor]] = {
    "bfloat16": lambda: torch.ones(3).bfloat16() / 3,
    "float8": lambda: torch.tensor([0.5, 2, 3]).to(torch.float8_e4m3fn),
    "float8 scale": lambda: torch.tensor([0.5, 2, 4]).to(torch.float8_e8m0fnu),
    "float4": lambda: torch.arange(3, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
    "half": lambda: torch.ones(3).half() / 3,
    "complex": lambda: torch.polar(torch.ones(3), torch.arange(3.0)),
    "complex, double": lambda: torch.polar(torch.ones(3).double(), torch.arange(3.0).double()),
    "conjugate": lambda: torch.polar(torch.ones(3), torch.arange(3.0)).conj(),
    "expanded": lambda: torch.tensor(0.5).expand(3),
    "transposed": lambda: torch.arange(6.0).view(2, 3).T,
    "scalar": lambda: torch.tensor(3),
    "bool": lambda: torch.tensor([True, False]),
    "uint16": lambda: torch.arange(3).to(torch.uint16),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "sparse, bfloat16": lambda: torch.eye(3).bfloat16().to_sparse(),
    "sparse rows": lambda: torch.eye(3).to_sparse_csr(),
    "sparse columns": lambda: torch.eye(3).to_sparse_csc(),
    "sparse blocks": lambda: torch.eye(4).to_sparse_bsr((2, 2)),
    "quantized": lambda: torch.quantize_per_tensor(torch.arange(3.0), 0.1, 3, torch.qint8),
    "quantized by channel": lambda: torch.quantize_per_channel(
        torch.ones(2, 3), torch.tensor([0.1, 0.2]), torch.tensor([0, 1]), 0, torch.qint8
    ),
}


@pytest.mark.filterwarnings("ignore:.*deprecated", "ignore:Sparse", "ignore:ComplexHalf")
@pytest.mark.parametrize("kind", ODD)
def test_tensors_of_any_kind_go_into_a_file_and_back(kind: str) -> None:
    before = ODD[kind]()
    arrays = load(save(arrays_of("b", before)))
    assert all(one.dtype != np.dtype(object) for one in arrays.values())
    tensor = ODD[kind]()
    set_tensor("b", tensor, arrays)  # it has them
    assert tensor.stride() == before.stride() if tensor.layout is torch.strided else True
    if kind != "bool":
        tensor = zero_like(before)
        assert str(tensor) != str(before)
    set_tensor("b", tensor, arrays)
    assert (str(tensor), tensor.dtype, tensor.layout) == (str(before), before.dtype, before.layout)
    found = arrays_of("b", tensor)
    assert found.keys() == arrays.keys()
    assert all(same_bits(found[name], arrays[name]) for name in arrays)


def zero_like(tensor: torch.Tensor) -> torch.Tensor:
    """Another tensor of its kind, and of its shape."""
    if tensor.dtype == torch.float4_e2m1fn_x2:
        return torch.zeros(3, dtype=torch.uint8).view(tensor.dtype)
    if tensor.dtype == torch.float8_e8m0fnu:
        return torch.ones(3).to(tensor.dtype)
    if tensor.layout is torch.sparse_coo:
        return torch.sparse_coo_tensor(
            torch.tensor([[0], [1]]), torch.ones(1, dtype=tensor.dtype), tensor.shape
        )
    other = tensor.clone()
    if tensor.layout is not torch.strided:
        other.values().zero_()
    elif tensor.is_quantized:
        other.copy_(torch.zeros(tensor.shape))
    elif tensor.stride() == (0,):
        other = torch.tensor(0.25).expand(3)
    else:
        other.zero_()
    return other


def test_a_tensor_takes_values_of_another_shape() -> None:
    tensor = torch.zeros(0)
    set_tensor("b", tensor, {"b": np.ones((2, 3), np.float32)})
    assert tensor.tolist() == [[1.0] * 3] * 2
    set_tensor("b", tensor, {"c": np.zeros(2)})
    assert tensor.shape == (2, 3)


def test_a_module_that_makes_its_buffers_anew_takes_those_of_another_shape() -> None:
    class Seen(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 3)
            self.seen: torch.Tensor
            self.register_buffer("seen", torch.zeros(1, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen = torch.cat([self.seen, x.detach()])
            return super().forward(x)

    model = from_torch(Seen, F.cross_entropy)
    with pytest.raises(ConfigError, match="buffer 'seen'"):
        model.load_buffers({"seen": np.zeros((9, 4), np.float32)})
    model.outputs(torch.zeros(model.layout.elems), torch.zeros(5, 4))
    model.load_buffers({"seen": np.ones((9, 4), np.float32)})
    assert model.buffers()["seen"].sum() == 36


def test_models_without_buffers_have_none() -> None:
    assert buffers_of(object()) == {}
    load_buffers(object(), {"a": np.zeros(1)})


def test_a_loss_of_the_batch_may_call_the_module_as_it_likes(batch: Batch) -> None:
    def build() -> nn.Module:
        return nn.Linear(4, 3)

    plain = step(from_torch(build, F.cross_entropy), batch)
    of_batch = from_torch(
        build, lambda module, pair: F.cross_entropy(module(pair[0]), pair[1]), loss_of="batch"
    )
    found = step(of_batch, batch)
    assert (found[0], found[1].tolist()) == (plain[0], plain[1].tolist())

    all_inputs = Batch({"x": batch.inputs, "labels": batch.targets}, None, 8, batch.ids)
    of_dict = from_torch(build, lambda m, b: F.cross_entropy(m(b["x"]), b["labels"]), loss_of="batch")
    assert step(of_dict, all_inputs)[0] == plain[0]


def test_autocast_inside_of_the_loss(batch: Batch) -> None:
    def loss(module: nn.Module, pair: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            outputs = module(pair[0])
            assert outputs.dtype == torch.bfloat16
            return F.cross_entropy(outputs, pair[1])

    wide = step(from_torch(lambda: nn.Linear(4, 3), F.cross_entropy), batch)
    narrow = step(from_torch(lambda: nn.Linear(4, 3), loss, loss_of="batch"), batch)
    assert narrow[1].dtype == torch.float32
    assert not torch.equal(narrow[1], wide[1])
    torch.testing.assert_close(narrow[1], wide[1], atol=0.02, rtol=0.05)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return self.layer(left - right)  # type: ignore[no-any-return]


def test_inputs_are_one_argument_or_spread(batch: Batch) -> None:
    left, right = batch.inputs, batch.inputs[::-1].copy()
    flat = torch.ones(15)
    model = from_torch(Two, F.cross_entropy, spread=True)
    by_name = model.outputs(flat, {"right": right, "left": left})
    assert torch.equal(by_name, model.outputs(flat, (left, right)))
    step(model, Batch({"left": left, "right": right}, batch.targets, 8, batch.ids))
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'right'"):
        from_torch(Two, F.cross_entropy).outputs(flat, (left, right))


def test_dropout_depends_on_the_seed_alone_whatever_was_drawn_before(batch: Batch) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 40), nn.Dropout(0.5), nn.Linear(40, 3))

    model = from_torch(build, F.cross_entropy)
    first = step(model, batch, seed=5)[1]
    torch.rand(7)
    assert torch.equal(step(model, batch, seed=5)[1], first)
    assert not torch.equal(step(model, batch, seed=6)[1], first)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: from_torch(lambda: nn.LazyLinear(3), F.mse_loss).layout, "lazy parameters.*their sizes"),
        (lambda: from_torch(Net, F.mse_loss, loss_of="all"), "loss_of is 'all'"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_trained(make: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()
