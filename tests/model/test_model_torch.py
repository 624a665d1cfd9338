"""`from_torch`: a module's own gradient, bit for bit, in the flat vector and in backward order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  its usual name
from torch.utils.checkpoint import checkpoint

from gradstream.errors import ConfigError, GradientError
from gradstream.model import Batch, TorchModel, from_torch
from gradstream.model import built_module as built_module_file


def batch_of(inputs: Any, targets: Any) -> Batch:
    return Batch(inputs, targets, len(targets), np.arange(len(targets)))


def run(model: TorchModel, batch: Batch, seed: int = 0) -> tuple[float, torch.Tensor, list[int]]:
    """Loss, flat gradient and reports at the initial parameters of seed 3."""
    parameters = torch.empty(model.layout.elems, dtype=model.layout.dtype)
    model.init(3, parameters)
    gradient = torch.full_like(parameters, torch.nan)
    reports: list[int] = []
    loss = model.gradient(parameters, batch, gradient, seed=seed, report=reports.append)
    return loss, gradient, reports


def plain(build: Callable[[], nn.Module], loss: Any, batch: Batch) -> tuple[float, dict[str, torch.Tensor]]:
    """The same loss and gradient by PyTorch alone."""
    torch.manual_seed(3)
    module = build()
    value = loss(module(torch.as_tensor(batch.inputs)), torch.as_tensor(batch.targets))
    value.backward()
    found = {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in module.named_parameters()
        if p.requires_grad
    }
    return value.item(), found


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 5), nn.Tanh(), nn.Linear(5, 3))


@pytest.fixture
def classes() -> Batch:
    rng = np.random.default_rng(0)
    return batch_of(rng.standard_normal((8, 6), np.float32), rng.integers(0, 3, 8))


def test_layout_is_in_backward_order() -> None:
    model = from_torch(mlp, F.cross_entropy)
    assert [s.name for s in model.layout.slots] == [
        "4.bias",
        "4.weight",
        "2.bias",
        "2.weight",
        "0.bias",
        "0.weight",
    ]
    assert next(iter(model.tree(torch.zeros(model.layout.elems)))) == "0.weight"


def test_bits_of_plain_torch_and_growing_prefix(classes: Batch) -> None:
    model = from_torch(mlp, F.cross_entropy)
    loss, gradient, reports = run(model, classes)
    expected_loss, expected = plain(mlp, F.cross_entropy, classes)
    assert loss == expected_loss
    for name, view in model.layout.views(gradient):
        assert torch.equal(view, expected[name]), name
    assert reports == sorted(set(reports))
    assert reports[-1] == model.layout.elems
    assert set(reports) <= set(model.layout.milestones)
    assert len(reports) >= 3  # layer by layer, not all at once


def test_prefix_is_final_when_reported(classes: Batch) -> None:
    model = from_torch(mlp, F.cross_entropy)
    parameters = torch.empty(model.layout.elems)
    model.init(3, parameters)
    gradient = torch.empty_like(parameters)
    seen: list[torch.Tensor] = []
    model.gradient(parameters, classes, gradient, seed=0, report=lambda n: seen.append(gradient[:n].clone()))
    assert all(torch.equal(part, gradient[: len(part)]) for part in seen)


def test_init_is_a_function_of_the_seed_and_leaves_the_callers_generator_alone() -> None:
    model = from_torch(mlp, F.cross_entropy)
    first, again, other = (torch.empty(model.layout.elems) for _ in range(3))
    torch.manual_seed(11)
    expected = torch.rand(1)
    torch.manual_seed(11)
    model.init(1, first)
    model.init(2, other)
    model.init(1, again)
    assert torch.equal(torch.rand(1), expected)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_parameters_are_views_and_follow_the_vector(classes: Batch) -> None:
    model = from_torch(mlp, F.cross_entropy)
    one, two = torch.zeros(model.layout.elems), torch.ones(model.layout.elems)
    assert model.outputs(one, classes.inputs).abs().sum() == 0
    assert model.outputs(two, classes.inputs).abs().sum() > 0
    two.zero_()  # in place: no call tells the model
    assert model.outputs(two, classes.inputs).abs().sum() == 0
    model.tree(one)["4.bias"][...] = 1
    assert torch.equal(model.outputs(one, classes.inputs), torch.ones(8, 3))


def test_dropout_is_a_function_of_the_seed(classes: Batch) -> None:
    model = from_torch(
        lambda: nn.Sequential(nn.Linear(6, 40), nn.Dropout(0.5), nn.Linear(40, 3)), F.cross_entropy
    )
    first, again, other = (run(model, classes, seed=s)[1] for s in (5, 5, 6))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("devices", [0, 1])
def test_generators_of_devices_are_seeded_where_there_are_any(
    devices: int, classes: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, seeds = from_torch(mlp, F.cross_entropy), list[int]()
    run(model, classes)
    parameters = torch.zeros(model.layout.elems)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: devices)
    monkeypatch.setattr(torch, "manual_seed", seeds.append)
    model.gradient(parameters, classes, parameters.clone(), seed=7, report=lambda _: None)
    assert seeds == [7] * devices


def test_outputs_are_in_eval_mode_and_buffers_stay_local(classes: Batch) -> None:
    model = from_torch(lambda: nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3)), F.cross_entropy)
    parameters = torch.empty(model.layout.elems)
    model.init(0, parameters)
    before = model.outputs(parameters, classes.inputs)
    assert torch.equal(before, model.outputs(parameters, classes.inputs))
    assert not before.requires_grad
    model.gradient(parameters, classes, torch.empty_like(parameters), seed=0, report=lambda n: None)
    assert not torch.equal(before, model.outputs(parameters, classes.inputs))  # running means moved
    assert [s.name for s in model.layout.slots] == ["1.bias", "1.weight", "0.bias", "0.weight"]


def test_parts_built_in_eval_mode_stay_so(classes: Batch) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(6).eval(), nn.Linear(6, 3))

    model = from_torch(build, F.cross_entropy)
    parameters = torch.empty(model.layout.elems)
    model.init(0, parameters)
    before = model.outputs(parameters, classes.inputs)
    model.gradient(parameters, classes, torch.empty_like(parameters), seed=0, report=lambda n: None)
    assert torch.equal(before, model.outputs(parameters, classes.inputs))


def test_frozen_parameters_are_not_exchanged_and_do_not_depend_on_the_seed(classes: Batch) -> None:
    def build() -> nn.Module:
        module = mlp()
        module[0].requires_grad_(False)  # type: ignore[index]
        return module

    outputs = []
    for seed in (1, 2):
        model = from_torch(build, F.cross_entropy)
        assert all(not s.name.startswith("0.") for s in model.layout.slots)
        model.init(seed, torch.empty(model.layout.elems))
        outputs.append(model.outputs(torch.ones(model.layout.elems), classes.inputs))
    assert torch.equal(*outputs)


class Tied(nn.Module):
    """An embedding whose weight is the output layer's too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.middle = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.middle(self.embedding(tokens)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("wide_from", [1, 1 << 20])
def test_tied_weights_add_up(wide_from: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(built_module_file, "WIDE_ELEMS", wide_from)
    rng = np.random.default_rng(0)
    batch = batch_of(rng.integers(0, 7, 10), rng.integers(0, 7, 10))
    model = from_torch(Tied, F.cross_entropy)
    assert [s.name for s in model.layout.slots] == ["middle.bias", "middle.weight", "embedding.weight"]
    _, gradient, reports = run(model, batch)
    _, expected = plain(Tied, F.cross_entropy, batch)
    for name, view in model.layout.views(gradient):
        torch.testing.assert_close(view, expected[name])
    assert reports[-1] == model.layout.elems


class Unused(nn.Module):
    """One layer that the loss does not depend on, between two that it does."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.unused, self.b = nn.Linear(6, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))  # type: ignore[no-any-return]


def test_a_parameter_without_gradient_gets_zeros(classes: Batch) -> None:
    model = from_torch(Unused, F.cross_entropy)
    _, gradient, reports = run(model, classes)
    views = dict(model.layout.views(gradient))
    assert views["unused.weight"].abs().sum() == 0
    assert views["a.weight"].abs().sum() > 0
    assert reports[-1] == model.layout.elems
    # nothing behind the missing tensor is claimed before the end
    assert reports[-2] == model.layout.slots[1].stop


def test_float64_model_casts_inputs(classes: Batch) -> None:
    model = from_torch(lambda: mlp().double(), F.cross_entropy)
    assert model.layout.dtype == torch.float64
    loss, gradient, _ = run(model, classes)
    assert gradient.dtype == torch.float64
    narrow = run(from_torch(mlp, F.cross_entropy), classes)[0]
    assert loss == pytest.approx(narrow, rel=1e-1)


def test_float32_model_takes_numpys_default_dtype() -> None:
    rng = np.random.default_rng(0)
    batch = batch_of(rng.standard_normal((4, 6)), rng.standard_normal((4, 3)))
    assert run(from_torch(mlp, F.mse_loss), batch)[1].isfinite().all()


def test_read_only_inputs_do_not_warn(classes: Batch, recwarn: pytest.WarningsRecorder) -> None:
    classes.inputs.flags.writeable = False
    run(from_torch(mlp, F.cross_entropy), classes)
    assert not recwarn.list


def test_runs_in_another_thread(classes: Batch) -> None:
    model = from_torch(mlp, F.cross_entropy)
    expected = run(model, classes)[1]
    found: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: found.append(run(model, classes)[1]))
    thread.start()
    thread.join()
    assert torch.equal(found[0], expected)


def test_no_samples_no_gradient(classes: Batch) -> None:
    model = from_torch(mlp, F.cross_entropy)
    loss, gradient, reports = run(model, batch_of(classes.inputs[:0], classes.targets[:0]))
    assert (loss, gradient.abs().sum().item(), reports) == (0.0, 0.0, [model.layout.elems])


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda o, t: F.cross_entropy(o, t, reduction="none"), "shape .8,., expected a scalar"),
        (lambda o, t: F.cross_entropy(o, t) * torch.inf, "loss is inf"),
        (lambda o, t: F.cross_entropy(o, t).detach(), "does not depend on any parameter"),
        (lambda o, t: F.cross_entropy(o, t).item(), "loss is a float"),
    ],
)
def test_unusable_losses(loss: Any, words: str, classes: Batch) -> None:
    model = from_torch(mlp, loss)
    with pytest.raises(GradientError, match=words):
        run(model, classes)


def test_a_failure_leaves_nothing_behind(classes: Batch) -> None:
    broken = [True]

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if broken:
            raise RuntimeError("mine")
        return F.cross_entropy(outputs, targets)

    model = from_torch(mlp, loss)
    with pytest.raises(RuntimeError, match="mine"):
        run(model, classes)
    broken.clear()
    assert torch.equal(run(model, classes)[1], run(from_torch(mlp, F.cross_entropy), classes)[1])


def test_reentrant_checkpoint_is_refused_not_wrong(classes: Batch) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.requires_grad_()
            for _ in range(2):
                x = checkpoint(self.layer, x, use_reentrant=True)
            return self.head(x)  # type: ignore[no-any-return]

    with pytest.raises(GradientError, match=r"layer.*use_reentrant=False"):
        run(from_torch(Twice, F.cross_entropy), classes)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (nn.Linear(2, 2), "build is a module, Linear; expected a function"),
        (lambda: 3, "returned int, expected a torch.nn.Module"),
        (lambda: nn.Tanh(), "nothing to train"),
        (lambda: mlp().half(), "float16.*call .float"),
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double()), "expected one dtype"),
    ],
)
def test_unusable_modules(build: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        from_torch(build, F.mse_loss).layout  # noqa: B018  building is what fails


def test_wrong_flat_vector_is_refused(classes: Batch) -> None:
    model = from_torch(mlp, F.cross_entropy)
    with pytest.raises(ConfigError, match="take length and dtype from the model's layout"):
        model.outputs(torch.zeros(5), classes.inputs)
    with pytest.raises(ConfigError, match="reduction"):
        from_torch(mlp, F.cross_entropy, reduction="avg")  # type: ignore[arg-type]
