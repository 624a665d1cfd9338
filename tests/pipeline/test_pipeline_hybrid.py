"""A hybrid has the gradient of the whole model: data-parallel convolutions, model-parallel linear layers, in turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  its usual name

from gradstream.errors import ConfigError, UnknownNameError
from gradstream.model import Batch, TorchModel, from_torch
from gradstream.pipeline.hybrid import HYBRIDS, Hybrid, make_turns
from gradstream.split import divide as divide_file
from gradstream.split.hybrid_model import plan_hybrid
from hybrid_parts import HybridParts, PartStages
from split_stages import batch_of, whole_gradient, whole_parameters

PARTS = (1, 2, 3, 4)


def network(dropout: float = 0.0) -> Callable[[], nn.Module]:
    """Two convolutions and three linear layers, of which one is wide on one side and one on the other."""

    def build() -> nn.Module:
        convolutions = [nn.Conv2d(2, 5, 3), nn.ReLU(), nn.Conv2d(5, 3, 2), nn.ReLU(), nn.Flatten()]
        linear = [
            nn.Linear(27, 10),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(10, 23),
            nn.ReLU(),
            nn.Linear(23, 4),
        ]
        return nn.Sequential(*convolutions, *linear).double()

    return build


def minibatch(samples: int = 10) -> Batch:
    rng = np.random.default_rng(0)
    return batch_of(rng.standard_normal((samples, 2, 6, 6)), rng.integers(0, 4, samples))


def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().sum()


def integers(samples: int = 8) -> tuple[TorchModel, Batch, Tensor]:
    """A model, a minibatch and parameters of small integers, so that every sum is exact."""
    rng = np.random.default_rng(1)
    model = from_torch(network(), squares, reduction="sum")
    inputs, targets = rng.integers(-1, 2, (samples, 2, 6, 6)), rng.integers(-2, 3, (samples, 4))
    batch = batch_of(inputs.astype(np.float64), targets.astype(np.float64))
    return model, batch, torch.from_numpy(rng.integers(-1, 2, model.layout.elems).astype(np.float64))


@pytest.mark.parametrize("parts", PARTS)
def test_the_gradient_is_that_of_the_whole_model(parts: int) -> None:
    model = from_torch(network(), F.cross_entropy)
    whole, hybrid = whole_parameters(model), HybridParts(model, minibatch(2), parts)
    for samples in (10, 3, 16):
        batch = minibatch(samples)
        expected_loss, expected = whole_gradient(model, batch, whole)
        for schedule in HYBRIDS:
            loss, gradient = hybrid.gradient(schedule, whole, batch)
            assert loss == pytest.approx(expected_loss, abs=1e-12)
            torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("parts", PARTS)
def test_on_integers_the_gradient_has_the_same_bits(parts: int) -> None:
    model, batch, whole = integers()
    expected_loss, expected = whole_gradient(model, batch, whole)
    hybrid = HybridParts(model, batch, parts)
    for schedule in HYBRIDS:
        loss, gradient = hybrid.gradient(schedule, whole, batch)
        assert loss == expected_loss and torch.equal(gradient, expected)


class _Skipping(nn.Module):
    """The features are used again behind the divided layer, and convolutions can be divided too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.wide = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.hidden, self.last = nn.Linear(144, 6), nn.Linear(150, 4)

    def forward(self, x: Tensor) -> Tensor:
        features = torch.relu(self.wide(torch.relu(self.first(x)))).flatten(1)
        return cast(Tensor, self.last(torch.cat([features, torch.tanh(self.hidden(features))], 1)))


@pytest.mark.parametrize(
    "layers", [None, ("hidden",), ("wide", "last"), ("first", "wide", "hidden", "last"), ()]
)
def test_any_layers_may_be_model_parallel(layers: Sequence[str] | None) -> None:
    model, batch = from_torch(lambda: _Skipping().double(), F.cross_entropy), minibatch(7)
    whole, hybrid = whole_parameters(model), HybridParts(model, batch, 3, layers)
    expected_loss, expected = whole_gradient(model, batch, whole)
    for schedule in HYBRIDS:
        loss, gradient = hybrid.gradient(schedule, whole, batch)
        assert loss == pytest.approx(expected_loss, abs=1e-12)
        torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-12)


def test_a_bias_on_every_part_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def added(results: Sequence[Tensor], bias: Tensor, rank: int) -> Tensor:
        return cast(Tensor, sum(result + bias for result in results))

    monkeypatch.setattr(divide_file, "_added", added)
    model, batch, whole = integers()
    loss, gradient = HybridParts(model, batch, 2).gradient("assemble", whole, batch)
    expected_loss, expected = whole_gradient(model, batch, whole)
    assert loss != expected_loss and not torch.equal(gradient, expected)


def masks(hybrid: HybridParts, schedule: str, samples: int) -> Tensor:
    """What dropout leaves of the activations, which are equal for all samples: (samples, units)."""
    found: list[Tensor] = []
    batch = batch_of(np.ones((samples, 2, 6, 6)), np.zeros(samples, np.int64))
    run = PartStages.forward

    async def forward(
        self: PartStages, stage: int, turn: int, rows: int, values: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        outputs = await run(self, stage, turn, rows, values)
        if self.model.plan.stages[stage].part == -1 and any(
            node.meta["random"] for node in self.model.plan.nodes[stage]
        ):
            found.append(torch.cat([one.flatten(1) for one in outputs.values()], 1))
        return outputs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PartStages, "forward", forward)
        model = hybrid.models[0]
        whole = torch.rand(model.whole.elems, dtype=torch.float64)
        hybrid.gradient(schedule, whole, batch)
    return torch.cat(found)


def different(rows: Tensor) -> int:
    return len({tuple(row) for row in rows.tolist()})


@pytest.mark.parametrize("schedule", HYBRIDS)
def test_every_sample_has_dropout_of_its_own(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = from_torch(network(0.5), F.cross_entropy)
    hybrid = HybridParts(model, minibatch(2), 3)
    drawn = masks(hybrid, schedule, 36)
    assert len(drawn) == 36 and different(drawn) > 30  # of 1,024 masks
    assert 0.35 < float((drawn == 0).double().mean()) < 0.65
    monkeypatch.setattr(PartStages, "seed", lambda self, turn: turn)  # one stream for all parts
    assert schedule == "broadcast" or different(masks(hybrid, schedule, 36)) <= 12


@pytest.mark.parametrize("parts", [2, 3, 4])
def test_the_bytes_are_those_of_the_formula(parts: int) -> None:
    """By columns a sample costs (K - 1) (I + O / K) numbers each way, by rows (K - 1) (I / K + O)."""
    model, batch, whole = integers(144)
    hybrid = HybridParts(model, batch, parts)
    by = {
        piece.name: piece.axis
        for own in hybrid.plan.pieces[2 * parts :]
        for piece in own
        if piece.axis is not None
    }
    assert by == {"5.weight": 1, "8.weight": 0, "8.bias": 0, "10.weight": 1}
    expected = 0.0
    for inputs, outputs, columns in ((27, 10, False), (10, 23, True), (23, 4, False)):
        whole_units, divided = (inputs, outputs) if columns else (outputs, inputs)
        expected += 2 * 8 * 144 * (parts - 1) * (whole_units + divided / parts)
    for schedule in HYBRIDS:
        hybrid.gradient(schedule, whole, batch)
        sent = [(hybrid.plan.value(one.value), one.samples) for one in hybrid.channel.sent]
        bytes_ = sum(value.bytes_of(samples or 0) for value, samples in sent if value.name != "targets")
        assert bytes_ == round(expected)
        assert all((value.name == "targets") <= (schedule == "broadcast") for value, _ in sent)


def test_a_part_holds_the_samples_of_two_turns() -> None:
    """Features of turn t + 1 travel while turn t is computed, and those of no later turn."""
    model, batch, whole = integers(16)
    hybrid = HybridParts(model, batch, 4)
    hybrid.gradient("slices", whole, batch)
    first = [one for one in hybrid.channel.sent if not one.gradient and one.value.startswith("narrow")]
    begun = {
        turn: hybrid.channel.sent.index(next(one for one in first if one.micro_batch == turn))
        for turn in range(4)
    }
    for turn in (2, 3):
        back = [
            n for n, one in enumerate(hybrid.channel.sent) if one.gradient and one.micro_batch == turn - 2
        ]
        assert back and min(back) < begun[turn]


def test_turns_have_each_sample_once() -> None:
    for schedule in HYBRIDS:
        for samples, parts in ((16, 4), (10, 3), (2, 4), (1, 1)):
            turns = make_turns(schedule, samples, parts)
            read = [n for turn in turns for rows in turn.samples for n in range(*rows)]
            assert sorted(read) == list(range(samples))
            assert all(turn.first[-1] == turn.behind[-1] == turn.size > 0 for turn in turns)
    with pytest.raises(UnknownNameError, match="broadcast"):
        Hybrid(cast(Any, "broadcasts"))


def _normed() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(48, 4))


class _Centred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(72, 4)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.last((x - x.mean(0)).flatten(1)))


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(72))
        self.last = nn.Linear(72, 72)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.last(x.flatten(1) * self.scale) * self.scale)


@pytest.mark.parametrize(
    ("build", "layers", "message"),
    [
        (_normed, None, r"joins the samples.*such as GroupNorm"),
        (
            lambda: nn.Sequential(nn.BatchNorm2d(2, track_running_stats=False), _normed()),
            None,
            "joins the samples",
        ),
        (_Centred, None, r"test_pipeline_hybrid.py:\d+: .*joins the samples"),
        (_Tied, ("last",), "has no axis of samples"),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(72, 4), nn.PReLU()), None, r"layers=\.\.\."),
        (network(), ("1",), "names '1', which cannot be divided; expected some of 0, 2, 5"),
    ],
)
def test_what_would_differ_is_refused_with_the_remedy(
    build: Callable[[], nn.Module], layers: Sequence[str] | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_hybrid(from_torch(build, F.cross_entropy), minibatch(2), 2, layers)
