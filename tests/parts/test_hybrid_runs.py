"""Runs whose replicas are hybrids, on virtual time, beside the same runs whose replicas are one process."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from torch import nn

import gradstream as gs
from gradstream._simulate import simulate
from gradstream.errors import ConfigError
from gradstream.pipeline.hybrid import HYBRIDS
from gradstream.runtime.storage import MemoryStorage
from gradstream.split import operations
from gradstream.testing.runs import QUICK
from gradstream.worker.parts.gradients import PartSource
from gradstream.worker.parts.hybrid import HybridGradients
from split_jobs import CLASSES, difference


def images() -> nn.Module:
    """A network with convolutions, and with linear layers that are divided by rows and by columns."""
    convolutions = [nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Conv2d(4, 3, 2), nn.Tanh(), nn.Flatten()]
    return nn.Sequential(
        *convolutions, nn.Linear(27, 9), nn.ReLU(), nn.Linear(9, 16), nn.Tanh(), nn.Linear(16, CLASSES)
    ).double()


def run(build: Any = images, storage: MemoryStorage | None = None, **options: Any) -> Any:
    rng = np.random.default_rng(5)
    x, y = rng.standard_normal((46, 1, 6, 6)), rng.integers(0, CLASSES, 46)
    data = gs.from_arrays(x[:36], y[:36], test_inputs=x[36:], test_targets=y[36:])
    given = {
        "workers": 1,
        "batch_size": 10,
        "epochs": 2,
        "chunk_elems": 64,
        "deadlines": QUICK,
        "strategy": "allreduce",
    }
    return simulate(
        gs.from_torch(build, nn.functional.cross_entropy), data, storage=storage, **{**given, **options}
    )


@cache
def whole_run() -> Any:
    """The run whose replica is one process."""
    return run(evaluate_every=2)


@pytest.mark.parametrize(("turns", "split"), [("assemble", 4), ("broadcast", 3), ("slices", 2)])
def test_a_hybrid_trains_as_one_process_with_the_same_minibatch(turns: Any, split: int) -> None:
    whole = whole_run()
    parts = run(split=split, pipeline=gs.pipeline.Hybrid(turns), evaluate_every=2)
    assert difference(whole, parts) < 1e-12
    for mine, theirs in zip(parts.evaluations, whole.evaluations, strict=True):
        assert mine["accuracy"] == theirs["accuracy"] and mine["step"] == theirs["step"]
    steps = [[one["loss"] for one in each.events if one["event"] == "step"] for each in (whole, parts)]
    assert steps[1] == pytest.approx(steps[0], abs=1e-12)


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "synchronous", "workers": 2, "servers": 2, "clip_norm": 0.05, "clip_value": 0.04},
        {"strategy": "downpour", "workers": 1},
    ],
    ids=lambda options: "-".join(map(str, options)),
)
def test_replicas_of_any_strategy_may_be_hybrids(options: dict[str, Any]) -> None:
    whole, parts = run(**options), run(**options, split=3, pipeline=gs.pipeline.Hybrid("slices", ("2", "7")))
    assert difference(whole, parts) < 1e-12


def test_a_checkpoint_of_a_hybrid_resumes_otherwise() -> None:
    whole = run(optimizer="adam", epochs=3)
    for before, after in ((3, 1), (1, 2)):
        storage = MemoryStorage()
        ways = [
            {"split": count, "pipeline": gs.pipeline.Hybrid() if count > 1 else "gpipe"}
            for count in (before, after)
        ]
        run(optimizer="adam", storage=storage, checkpoint_every=2, **ways[0])
        assert any(name.startswith("step-") for name in storage.names("checkpoints"))
        resumed = run(
            optimizer="adam", epochs=3, storage=storage, resume=True, checkpoint_every=None, **ways[1]
        )
        assert difference(whole, resumed) < 1e-12


def dropped() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Dropout(0.5), nn.Linear(36, 8), nn.Dropout(0.5), nn.Linear(8, CLASSES)
    ).double()


def streams(monkeypatch: pytest.MonkeyPatch, turns: Any) -> list[tuple[int, str]]:
    """The seeds from which dropout draws in a run: (seed, operation) of each draw."""
    found: list[tuple[int, str]] = []
    stream = operations._stream

    def note(seed: int, name: str) -> int:
        if name.startswith(("dropout", "_1", "_3")):
            found.append((seed, name))
        return stream(seed, name)

    monkeypatch.setattr(operations, "_stream", note)
    run(build=dropped, split=3, pipeline=gs.pipeline.Hybrid(turns))
    return found


@pytest.mark.parametrize("turns", HYBRIDS)
def test_no_two_parts_draw_from_one_stream(turns: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = streams(monkeypatch, turns)
    assert len(found) == len(set(found)) >= 2 * 3 * 8  # two layers, three parts, eight steps


def test_a_stream_that_parts_share_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = PartSource.stage_seed
    monkeypatch.setattr(HybridGradients, "stage_seed", inner)
    found = streams(monkeypatch, "assemble")
    assert len(found) > len(set(found))


def test_a_loss_that_is_not_finite_in_one_part_is_left_out_in_all() -> None:
    x, y = np.random.default_rng(0).standard_normal((12, 1, 6, 6)), np.arange(12) % CLASSES
    x[3] = np.inf
    given: dict[str, Any] = {
        "workers": 1,
        "batch_size": 6,
        "epochs": 1,
        "deadlines": QUICK,
        "strategy": "downpour",
    }
    model = gs.from_torch(images, nn.functional.cross_entropy)
    ways: list[dict[str, Any]] = [{}, {"split": 3, "pipeline": gs.pipeline.Hybrid()}]
    runs = [simulate(model, gs.from_arrays(x, y), **given, **way) for way in ways]
    for one in runs:
        assert [event["samples"] for event in one.events if event["event"] == "gradient_refused"] == [6]
    assert difference(*runs) < 1e-12


def normed() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(48, CLASSES)).double()


@pytest.mark.parametrize(
    ("build", "options", "message"),
    [
        (normed, {"split": 2}, "such as GroupNorm"),
        (images, {}, "without split"),
        (images, {"split": 2, "micro_batches": 2}, "pipeline=Hybrid.* with micro_batches=2"),
        (
            images,
            {"split": 2, "pipeline": gs.pipeline.Hybrid(layers=("1",))},
            "names '1'.*expected some of 0, 2, 5",
        ),
    ],
)
def test_what_cannot_be_a_hybrid_is_refused_with_the_remedy(
    build: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run(build=build, **{"pipeline": gs.pipeline.Hybrid(), **options})
