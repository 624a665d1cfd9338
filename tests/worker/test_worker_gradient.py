"""Accumulation over k minibatches and clipping: against one process that does it on paper."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gradstream as gs
from gradstream._simulate import simulate
from gradstream.data.base import BatchRef
from gradstream.data.feed import feed_of
from gradstream.data.plan import JoinedPlan, RoundPlan
from gradstream.errors import ConfigError, GradientError
from gradstream.memory import Vector
from gradstream.runtime.simulation import Cost, Network, SimulationConfig
from gradstream.testing.runs import Tokens, least_squares, numbered
from gradstream.worker.computed import ComputedGradient, SampleBatch
from gradstream.worker.gradient import Clip, Differentiator, hash_seed

STRATEGIES = {
    "synchronous": gs.Synchronous(),
    "one after the other": gs.Synchronous(overlap=False),
    "downpour": gs.Downpour(push_every=2, fetch_every=2, overlap=False),
    "momentum": gs.Downpour(push_every=2, local_momentum=0.5),
}


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_k_minibatches_are_one_of_k_times_the_size(strategy: str, reduction: Any) -> None:
    """Bit for bit where sums are exact. 150 samples: the last step of an epoch is a short one."""
    model, data = least_squares(150, 200, grid=2.0**-10, reduction=reduction)
    if reduction == "mean":
        data = gs.from_arrays(data.inputs[:128], data.targets[:128])  # parts that are powers of two
    options: Any = {"strategy": STRATEGIES[strategy], "optimizer": gs.optim.SGD(lr=2.0**-7), "workers": 1}
    options |= {"epochs": 2, "chunk_elems": 64, "seed": 2}
    small = simulate(model, data, batch_size=4, accumulate=4, **options)
    large = simulate(model, data, batch_size=16, **options)
    assert np.array_equal(small.parameters["w"], large.parameters["w"])
    assert np.abs(large.parameters["w"]).max() > 0
    assert [row["samples"] for row in small.history] == [row["samples"] for row in large.history]
    assert [row["loss"] for row in small.history] == [row["loss"] for row in large.history]


@pytest.mark.parametrize(("strategy", "joined"), [("synchronous", 18), ("downpour", 9)])
def test_every_sample_of_every_part_counts_once(strategy: str, joined: int) -> None:
    """An update is the mean over what it joins: a round of both workers, or the step of one."""
    model = Tokens(3)
    model.reduction = "sum"  # which is what its gradients are
    run = simulate(
        model, numbered(54), strategy=strategy, optimizer=gs.optim.SGD(lr=1.0), workers=2, batch_size=3,
        accumulate=3, epochs=2, chunk_elems=64,
    )  # fmt: skip
    assert np.allclose(run.parameters["tokens"][:, :54], 2 / joined)
    assert run.summary["samples_accounted"] == 108


def test_exchange_overlaps_the_last_part() -> None:
    """Chunks leave during the last part's backprop: the same bits, in less virtual time."""
    model = gs.from_torch(
        lambda: nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 64), nn.Linear(64, 1)), nn.functional.mse_loss
    )
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((64, 8)).astype("float32"), rng.standard_normal((64, 1)).astype("float32")
    config = SimulationConfig(costs={"gradient": Cost(base_s=0.1)}, network=Network(bandwidth_bytes_s=2e5))
    found = []
    for overlap in (True, False):
        run = simulate(
            model, gs.from_arrays(x, y), strategy=gs.Synchronous(overlap=overlap), workers=2, batch_size=4,
            accumulate=4, epochs=2, chunk_elems=64, config=config,
        )  # fmt: skip
        found.append((run.parameters["1.weight"], run.summary["train_s"]))
    assert np.array_equal(found[0][0], found[1][0])
    assert found[0][1] < 0.9 * found[1][1]


@pytest.mark.parametrize("clip", [Clip(), Clip(norm=0.01), Clip(value=0.001)])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("joined", [1, 3])
def test_what_is_reported_is_final(joined: int, reduction: Any, clip: Clip) -> None:
    """Parts are summed up, means formed and bounds kept before an element may leave."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((24, 8)).astype("float32"), rng.standard_normal((24, 1)).astype("float32")
    data = gs.from_arrays(x, y)

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(outputs, targets, reduction=reduction)

    model = gs.from_torch(
        lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)), loss, reduction=reduction
    )
    plan = RoundPlan(24, 8, 1)
    feed = feed_of(data, plan, 0, seed=0)
    source = Differentiator(model, feed, JoinedPlan(plan, joined), rank=0, seed=0, now=lambda: 0, clip=clip)
    parameters = torch.empty(model.layout.elems)
    model.init(0, parameters)
    for mean in (False, True):
        into, sums = torch.full_like(parameters, torch.nan), torch.full_like(parameters, torch.nan)
        seen: list[torch.Tensor] = []
        batch = SampleBatch(BatchRef(0, 0, 0), 8 * joined)
        gradient = ComputedGradient(Vector("into", into), batch, 0.1, mean=mean, sums=Vector("sums", sums))
        source.compute(
            parameters, gradient,
            lambda elems, into=into, seen=seen: seen.append(into[:elems].clone()),  # type: ignore[misc]
        )  # fmt: skip
        assert [len(part) for part in seen] == list(source.milestones(gradient))
        assert all(torch.equal(part, into[: len(part)]) for part in seen)
        assert into.isfinite().all()
        assert len(seen) == (1 if clip or (mean and reduction == "sum") else 4)


@pytest.mark.parametrize("joined", [1, 3])
def test_reading_samples_is_timed_apart_from_computing(joined: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part takes 2 s to read and 5 s to differentiate."""
    model, data = least_squares(24, 4, whole=False, reduction="mean")
    plan, clock_ns = RoundPlan(24, 8, 1), 0
    feed, differentiate = feed_of(data, plan, 0, seed=0), model.gradient

    def slow(what: Any, seconds: int) -> Any:
        def slowed(*given: Any, **named: Any) -> Any:
            nonlocal clock_ns
            clock_ns += seconds * 10**9
            return what(*given, **named)

        return slowed

    monkeypatch.setattr(feed, "read", slow(feed.read, 2))
    monkeypatch.setattr(model, "gradient", slow(differentiate, 5))
    source = Differentiator(model, feed, JoinedPlan(plan, joined), rank=0, seed=0, now=lambda: clock_ns)
    parameters, into, sums = (torch.zeros(model.layout.elems, dtype=model.layout.dtype) for _ in range(3))
    for _ in range(2):
        batch = SampleBatch(BatchRef(0, 0, 0), 8 * joined)
        gradient = ComputedGradient(Vector("into", into), batch, 0.1, mean=True, sums=Vector("sums", sums))
        found = source.compute(parameters, gradient, lambda _: None)
        assert found.read_s == 2.0 * joined
    assert clock_ns == 2 * joined * 7 * 10**9


def test_parts_have_dropout_of_their_own() -> None:
    seeds = {hash_seed(1, rank, step, part) for rank in range(4) for step in range(9) for part in range(3)}
    assert len(seeds) == 4 * 9 * 3
    assert hash_seed(1, 2, 3) == hash_seed(1, 2, 3, 0)


# ---- clipping -------------------------------------------------------------------------------------


def reference(clip: Any, workers: int, steps: int, *, lr: float = 0.05) -> torch.Tensor:
    """Each worker's mean gradient, clipped by torch, then the mean over the joined batch."""
    model, data = least_squares(40, 30, whole=False, reduction="mean")
    plan, w = RoundPlan(40, 4, workers), torch.zeros(30, dtype=torch.float64)
    for step in range(steps):
        epoch, batch = divmod(step, plan.batches_per_epoch(0))
        total = torch.zeros_like(w)
        for rank in range(workers):
            gradient = torch.zeros_like(w)
            samples = data.batch(plan.ids(BatchRef(epoch, rank, batch)))
            model.gradient(w, samples, gradient, seed=0, report=lambda _: None)
            parameter = nn.Parameter(torch.zeros_like(w))
            parameter.grad = gradient
            clip(parameter)
            total += gradient / workers
        w -= lr * total
    return w


CLIPS = {
    "norm": ({"clip_norm": 3.0}, lambda p: nn.utils.clip_grad_norm_(p, 3.0)),
    "value": ({"clip_value": 0.5}, lambda p: nn.utils.clip_grad_value_(p, 0.5)),
    "both": (
        {"clip_value": 0.5, "clip_norm": 1.0},
        lambda p: (nn.utils.clip_grad_value_(p, 0.5), nn.utils.clip_grad_norm_(p, 1.0)),
    ),
}


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("kind", CLIPS)
def test_each_worker_clips_as_torch_does(kind: str, workers: int, reduction: Any) -> None:
    options, clip = CLIPS[kind]
    model, data = least_squares(40, 30, whole=False, reduction=reduction)
    run = simulate(
        model, data, optimizer=gs.optim.SGD(lr=0.05), workers=workers, batch_size=4, steps=12, **options  # type: ignore[arg-type]
    )  # fmt: skip
    assert np.allclose(run.parameters["w"], reference(clip, workers, 12).numpy(), rtol=1e-5)
    norms = [row["gradient_norm"] for row in run.history]
    if "clip_norm" in options:
        assert max(norms) > options["clip_norm"]  # there was something to clip
    else:
        assert norms == [None] * len(norms)


def test_clipping_is_the_same_with_overlap_downpour_and_parts() -> None:
    model, data = least_squares(64, 30, whole=False, reduction="mean")
    options: Any = {"optimizer": gs.optim.SGD(lr=0.05), "workers": 1, "steps": 6, "clip_norm": 1.0}
    strategies = [gs.Synchronous(), gs.Synchronous(overlap=False), gs.Downpour(overlap=False)]
    found = [
        simulate(model, data, strategy=strategy, batch_size=8, **options).parameters["w"]
        for strategy in strategies
    ]
    assert np.array_equal(found[0], found[1])
    assert np.array_equal(found[0], found[2])
    parts = simulate(model, data, batch_size=4, accumulate=2, **options).parameters["w"]
    assert np.allclose(found[0], parts)


def test_what_has_no_length_is_not_clipped_to_nothing() -> None:
    with pytest.raises(GradientError, match="the norm of the gradient overflows"):
        Clip(norm=1.0).apply(torch.full((100,), 1e38), 1)
    model, data = least_squares(8, 3)
    broken = gs.from_functions(
        lambda seed: {"w": np.zeros(3)}, lambda p, x: x @ p["w"],
        lambda p, x, y: {"w": np.full(3, np.inf, np.float32)},
    )  # fmt: skip
    del model
    for options in ({"clip_norm": 1.0}, {"clip_value": 1.0}):
        with pytest.raises(GradientError, match="NaN or an infinity"):
            simulate(broken, data, workers=1, batch_size=4, steps=1, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accumulate": 0}, "accumulate=0: expected at least 1"),
        ({"accumulate": 1.5}, "accumulate=1.5: expected a whole number"),
        ({"clip_norm": -1.0}, r"clip_norm=-1.0: expected a finite number > 0"),
        ({"clip_value": True}, r"clip_value=True: expected a finite number > 0"),
    ],
)
def test_bad_options_are_named(options: Any, message: str) -> None:
    model, data = least_squares(8, 3)
    with pytest.raises(ConfigError, match=message):
        simulate(model, data, workers=1, epochs=1, **options)
