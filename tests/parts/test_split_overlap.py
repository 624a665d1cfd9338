"""The pushes of a part begin during its backward pass, and go on while the parts below compute."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gradstream as gs
from gradstream.errors import NonFiniteError
from gradstream.model.base import Batch
from gradstream.split.cut import plan_split
from gradstream.split.graph import minibatch_values
from gradstream.split.part_model import PartModel
from gradstream.split.stage_model import StageModel
from gradstream.worker.parts.gradients import AgreedSource
from split_jobs import CLASSES, EQUAL, FEATURES, difference, net, run

STEPS = 12
BACKWARD_S = 6 * 2e-3
"""Of one part, for the six samples of a minibatch."""

AWAY_S = 10e-3
"""From part 1 to its shard."""


def far(*ends: tuple[str, str]) -> gs.sim.SimulationConfig:
    """Only these links take time."""
    links = {pair: gs.sim.Link(latency_s=AWAY_S) for pair in ends}
    network = gs.sim.Network(bandwidth_bytes_s=math.inf, link=gs.sim.Link(latency_s=0), links=links)
    return gs.sim.SimulationConfig(costs=EQUAL.costs, network=network)


def trained(config: gs.sim.SimulationConfig, **options: Any) -> gs.Run:
    given = {"strategy": "synchronous", "workers": 1, "split": 2, "config": config, **options}
    return run(**given)


def late(patch: pytest.MonkeyPatch) -> None:
    """All parts wait for one another before they push, as they have to where the gradient is clipped by its length."""
    patch.setattr(AgreedSource, "_leaves_early", lambda self, gradient: False)


def test_a_part_pushes_while_the_part_below_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    config = far(("part1-0", "shard-1"))
    early = trained(config)
    late(monkeypatch)
    waited = trained(config)
    assert difference(early, waited) == 0.0
    # Its push and the fetch behind it take 20 ms. They begin one backward pass of the part below earlier.
    saved_s = waited.info["virtual_s"] - early.info["virtual_s"]
    assert saved_s == pytest.approx(STEPS * BACKWARD_S, rel=0.02)


def test_a_gradient_that_is_clipped_by_its_length_waits_for_all_parts() -> None:
    config = far(("part1-0", "shard-1"))
    saved_s = trained(config, clip_norm=1e9).info["virtual_s"] - trained(config).info["virtual_s"]
    assert saved_s == pytest.approx(STEPS * BACKWARD_S, rel=0.02)


def test_elements_leave_during_the_backward_pass_and_are_final() -> None:
    torch.manual_seed(0)
    model = gs.from_torch(net, nn.functional.cross_entropy)
    x, y = torch.randn(6, FEATURES, dtype=torch.float64), torch.arange(6) % CLASSES
    batch = Batch(x, y, 6, np.arange(6))
    plan = plan_split(model, batch, 1)
    stage = StageModel(model, plan, 0)
    parameters, gradient = torch.empty(plan.elems).double(), torch.empty(plan.elems).double()
    stage.init(0, parameters)
    values = minibatch_values(plan.graph, batch)
    reported = list[tuple[int, torch.Tensor]]()

    def note(elems: int) -> None:
        reported.append((elems, gradient[:elems].clone()))

    _, saved = stage.forward(parameters, values, seed=0, samples=6)
    stage.backward(saved, {}, gradient, report=note)
    ends = [elems for elems, _ in reported]
    assert len(set(ends)) > 4 and ends == sorted(ends) and ends[-1] == plan.elems
    assert all(torch.equal(found, gradient[:elems]) for elems, found in reported)


def test_a_loss_that_is_no_number_leaves_nothing_in_any_part() -> None:
    whole, parts = (spoilt(split=split) for split in (1, 3))
    for one in (whole, parts):
        assert [event["samples"] for event in one.events if event["event"] == "gradient_refused"] == [6]
    assert difference(whole, parts) < 1e-12
    with pytest.raises(NonFiniteError, match="loss is nan"):
        spoilt(split=3, non_finite="error")


def test_zeros_in_the_place_of_unknown_gradients_show(monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = PartModel.unknown

    def zeros(self: PartModel, number: int, samples: int) -> dict[str, torch.Tensor]:
        return {name: torch.zeros_like(one) for name, one in unknown(self, number, samples).items()}

    monkeypatch.setattr(PartModel, "unknown", zeros)
    assert difference(spoilt(split=1), spoilt(split=3)) > 1e-9


def spoilt(**options: Any) -> gs.Run:
    """A run in which one sample makes the loss of its minibatch NaN."""
    rng = np.random.default_rng(5)
    x, y = rng.standard_normal((36, FEATURES)), np.arange(36) % CLASSES
    y[7] = CLASSES
    model = gs.from_torch(net, unbounded)
    given = {"workers": 1, "batch_size": 6, "epochs": 1, "strategy": "synchronous", "micro_batches": 2}
    if options["split"] == 1:
        del given["micro_batches"]
    return gs.simulate(model, gs.from_arrays(x, y), **{**given, **options})


def unbounded(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The loss of a class that does not exist is no number."""
    loss = nn.functional.cross_entropy(outputs, targets % CLASSES)
    return loss * torch.nan if (targets == CLASSES).any() else loss
