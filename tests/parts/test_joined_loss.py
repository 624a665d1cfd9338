"""A loss that is not what a pipeline makes of its pieces is refused at the first minibatch that shows it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  its usual name
from torch.utils.data import DataLoader, TensorDataset

import gradstream as gs
from gradstream.errors import ConfigError, GradientError
from gradstream.split import stage_model
from gradstream.split.stage_model import JoinedLoss
from split_jobs import CLASSES, FEATURES, difference, net, run

PIPELINES: dict[str, Any] = {"split": 2, "micro_batches": 3, "workers": 1}


def with_spread(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs, targets) + 0.1 * outputs.std()


WRONG: dict[str, Any] = {
    "ignored classes": partial(F.cross_entropy, ignore_index=1),
    "weights of classes": partial(F.cross_entropy, weight=torch.arange(1, 1.0 + CLASSES).double()),
    "a deviation over samples": with_spread,
    "a sum that is not declared": partial(F.cross_entropy, reduction="sum"),
}


@pytest.mark.parametrize("pipeline", ["gpipe", "1f1b", "zero-bubble", "2bw"])
@pytest.mark.parametrize("what", WRONG)
def test_what_is_no_mean_over_samples_is_refused(what: str, pipeline: str) -> None:
    with pytest.raises(
        GradientError, match=r"micro-batches together is .* mean over samples .* micro_batches=1"
    ):
        run(loss=WRONG[what], pipeline=pipeline, **PIPELINES)


@pytest.mark.parametrize("what", ["ignored classes", "a deviation over samples"])
def test_without_pieces_it_is_trained(what: str) -> None:
    whole = run(loss=WRONG[what], workers=1)
    assert difference(run(loss=WRONG[what], split=2, workers=1), whole) < 1e-12


def test_without_the_look_the_result_would_be_another(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(loss=WRONG["ignored classes"], workers=1)
    monkeypatch.setattr("gradstream.worker.parts.pipelined.is_due", lambda step: False)
    assert difference(run(loss=WRONG["ignored classes"], **PIPELINES), whole) > 1e-4


def pairs(outputs: tuple[torch.Tensor, torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs[0], targets) + outputs[1]


class WithLoss(nn.Module):
    """Gives a loss of its own beside its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = net()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        outputs = self.layers(x)
        return outputs, 0.01 * outputs.square().mean()


@pytest.mark.parametrize(
    ("build", "loss"),
    [(net, F.cross_entropy), (WithLoss, pairs), (net, partial(F.cross_entropy, label_smoothing=0.1))],
)
def test_means_pass(build: Any, loss: Any) -> None:
    whole = run(build=build, loss=loss, workers=1)
    assert difference(run(build=build, loss=loss, **PIPELINES), whole) < 1e-12


def test_a_declared_sum_passes() -> None:
    outputs, targets = torch.randn(5, 3), torch.randint(3, (5,))
    loss = partial(F.cross_entropy, reduction="sum")
    joined = JoinedLoss(loss, "sum")
    for rows in (slice(0, 3), slice(3, 5)):
        joined.add(
            outputs[rows], targets[rows], rows.stop - rows.start, float(loss(outputs[rows], targets[rows]))
        )


def test_a_loss_that_draws_is_not_compared_and_a_mean_near_0_is_compared_with_its_pieces() -> None:
    def noisy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return outputs.mean() + torch.rand(())

    def mean(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return outputs.mean()

    outputs = 100 + torch.randn(7, generator=torch.Generator().manual_seed(0))
    pieces = (outputs, 1e-6 - outputs)  # of 1e-6 a float32 sum of hundreds knows nothing
    for loss in (noisy, mean):
        joined = JoinedLoss(loss, "mean")
        for piece in pieces:
            joined.add(piece, piece, 7, float(loss(piece, piece)))


def test_few_minibatches_are_looked_at_and_the_first_ones_are() -> None:
    assert [step for step in range(40) if stage_model.is_due(step)] == [0, 1, 2, 4, 8, 16, 32]


def test_the_size_of_the_loader_counts() -> None:
    inputs, targets = torch.randn(96, FEATURES).double(), torch.randint(CLASSES, (96,))
    for size, micro_batches, fits in ((48, 40, True), (8, 20, False)):
        loader = DataLoader(TensorDataset(inputs, targets), size)
        job = gs.Job(
            gs.from_torch(net, F.cross_entropy),
            gs.from_loader(loader),
            split=2,
            micro_batches=micro_batches,
            workers=1,
            epochs=1,
        )
        if fits:
            assert gs.simulate(job).summary["samples"] == 96
        else:
            with pytest.raises(ConfigError, match="micro_batches=20 of a minibatch of 8 samples"):
                gs.simulate(job)


def test_a_pipeline_without_split_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"pipeline='1f1b' without split: expected split=2"):
        run(pipeline="1f1b")
