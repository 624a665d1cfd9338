"""Synchronous SGD is one node with the joined batch: bit for bit wherever arithmetic allows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import gradstream as gs
from gradstream._simulate import simulate
from gradstream.data.arrays import ArrayDataset
from gradstream.data.base import BatchRef
from gradstream.data.plan import RoundPlan
from gradstream.model.base import Model
from gradstream.optim.base import Optimizer
from gradstream.runtime.simulation import Cost, Exponential, Link, LogNormal, Network, SimulationConfig
from gradstream.testing.runs import least_squares

LR = 2.0**-7
GRID = 2.0**-10
FEATURES = 300  # 5 chunks of 64 elements, the last one short

MakeTorch = Callable[[list[torch.Tensor]], torch.optim.Optimizer]

RULES: dict[str, tuple[Optimizer, MakeTorch]] = {
    "sgd": (gs.optim.SGD(lr=LR), lambda p: torch.optim.SGD(p, lr=LR, fused=True)),
    "momentum": (gs.optim.Momentum(LR, 0.9), lambda p: torch.optim.SGD(p, lr=LR, momentum=0.9, fused=True)),
    "nesterov": (
        gs.optim.Nesterov(LR, 0.9),
        lambda p: torch.optim.SGD(p, lr=LR, momentum=0.9, nesterov=True, fused=True),
    ),
    "adagrad": (gs.optim.Adagrad(lr=LR), lambda p: torch.optim.Adagrad(p, lr=LR, eps=1e-10, fused=True)),
    "adam": (gs.optim.Adam(lr=LR), lambda p: torch.optim.Adam(p, lr=LR, fused=True)),
    "adamw": (
        gs.optim.AdamW(lr=LR, weight_decay=0.01),
        lambda p: torch.optim.AdamW(p, lr=LR, weight_decay=0.01, fused=True),
    ),
}

SHARES = {1: [16], 2: [13, 3], 3: [7, 0, 9], 5: [7, 1, 0, 8, 0]}


def joined_batches(data: ArrayDataset, sizes: list[int], steps: int, seed: int) -> list[np.ndarray[Any, Any]]:
    """The ids that one node with batch size Σ sizes would go through, step by step."""
    plan = RoundPlan(data.num_samples, sizes, len(sizes), seed=seed)
    rounds = plan.batches_per_epoch(0)
    refs = [divmod(step, rounds) for step in range(steps)]
    return [
        np.concatenate([plan.ids(BatchRef(epoch, rank, batch)) for rank in range(len(sizes))])
        for epoch, batch in refs
    ]


def one_node(
    model: Model,
    data: ArrayDataset,
    batches: list[np.ndarray[Any, Any]],
    make: MakeTorch,
    *,
    divide: bool,
) -> np.ndarray[Any, Any]:
    """The obvious version: a loop of a gradient and a step of torch.optim."""
    w = torch.zeros(model.layout.elems, dtype=model.layout.dtype, requires_grad=True)
    w.grad = torch.zeros_like(w)
    optimizer = make([w])
    with torch.no_grad():
        model.init(0, w)
        for ids in batches:
            model.gradient(w.detach(), data.batch(ids), w.grad, seed=0, report=lambda _: None)
            if divide:
                w.grad.mul_(1 / len(ids))
            optimizer.step()
    return w.detach().numpy()


def simulated(model: Model, data: ArrayDataset, sizes: list[int], **options: Any) -> np.ndarray[Any, Any]:
    options = {"strategy": gs.Synchronous(), "steps": 3, "chunk_elems": 64, **options}
    run = simulate(model, data, workers=len(sizes), batch_size=sizes, **options)
    return run.parameters["w"]


@pytest.mark.parametrize(
    ("workers", "rule"),
    [*((workers, "sgd") for workers in SHARES), *((3, rule) for rule in RULES if rule != "sgd")],
)
def test_equals_the_joined_batch_bit_for_bit(workers: int, rule: str) -> None:
    ours, theirs = RULES[rule]
    model, data = least_squares(64, FEATURES, grid=GRID)
    sizes = SHARES[workers]
    expected = one_node(model, data, joined_batches(data, sizes, 3, seed=5), theirs, divide=True)
    for servers in (1, 2, 7):
        got = simulated(model, data, sizes, servers=servers, optimizer=ours, seed=5)
        assert np.array_equal(got, expected), f"S={servers}: {np.abs(got - expected).max()}"
    assert np.abs(expected).max() > 0


def test_plain_sgd_is_exact_without_a_grid_and_against_numpy() -> None:
    model, data = least_squares(64, 40)
    expected = np.zeros(40)
    for ids in joined_batches(data, [7, 1, 0, 8], 3, seed=0):
        x, y = data.inputs[ids], data.targets[ids]
        expected -= LR * ((x @ expected - y) @ x) / 16
    for overlap in (True, False):
        strategy = gs.Synchronous(overlap=overlap)
        got = simulated(
            model, data, [7, 1, 0, 8], servers=2, optimizer=gs.optim.SGD(lr=LR), strategy=strategy
        )
        assert np.array_equal(got, expected)


def test_mean_gradients_are_weighted_by_samples() -> None:
    model, data = least_squares(64, 100, grid=GRID, reduction="mean")
    sizes = [4, 0, 2, 2]  # means of powers of 2 are exact
    batches = joined_batches(data, sizes, 6, seed=1)
    expected = one_node(model, data, batches, RULES["sgd"][1], divide=False)
    got = simulated(model, data, sizes, servers=2, optimizer=gs.optim.SGD(lr=LR), steps=6, seed=1)
    assert np.array_equal(got, expected)


def test_short_last_round_and_second_epoch() -> None:
    model, data = least_squares(22, 100, grid=GRID)  # rounds of 8, 8 and 6
    batches = joined_batches(data, [5, 3], 6, seed=2)
    assert [len(ids) for ids in batches] == [8, 8, 6] * 2
    assert sorted(np.concatenate(batches[3:])) == list(range(22))
    expected = one_node(model, data, batches, RULES["sgd"][1], divide=True)
    got = simulated(model, data, [5, 3], optimizer=gs.optim.SGD(lr=LR), steps=None, epochs=2, seed=2)
    np.testing.assert_allclose(got, expected, rtol=1e-14, atol=1e-16)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("rule", RULES)
def test_one_worker_has_the_bits_of_a_plain_loop(rule: str, dtype: str) -> None:
    ours, theirs = RULES[rule]
    model, data = least_squares(64, FEATURES, whole=False, dtype=dtype, reduction="mean")
    expected = one_node(model, data, joined_batches(data, [8], 12, seed=3), theirs, divide=False)
    got = simulated(model, data, [8], servers=2, optimizer=ours, steps=12, seed=3)
    assert got.dtype == np.dtype(dtype)
    assert np.array_equal(got, expected)


@pytest.mark.parametrize("rule", ["momentum", "adam"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_worker_has_the_bits_of_a_plain_loop_of_torch(dtype: torch.dtype, rule: str) -> None:
    def build() -> torch.nn.Module:
        # Tensors of a multiple of 64 elements: at others, torch's own kernels round the last few
        # elements of each tensor differently than in the middle of a vector.
        return torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64)).to(dtype)

    ours, theirs = RULES[rule]
    rng = np.random.default_rng(0)
    inputs, targets = rng.standard_normal((48, 8)), rng.integers(0, 4, 48)
    data = gs.from_arrays(inputs.astype(str(dtype).removeprefix("torch.")), targets)
    model = gs.from_torch(build, torch.nn.functional.cross_entropy)
    run = simulate(
        model, data, optimizer=ours, workers=1, servers=2, batch_size=8, steps=10, chunk_elems=64, seed=4
    )

    flat = torch.empty(model.layout.elems, dtype=dtype)
    model.init(4, flat)
    module = build()
    with torch.no_grad():
        for name, view in model.layout.views(flat):
            module.get_parameter(name).copy_(view)
    optimizer = theirs(list(module.parameters()))
    for ids in joined_batches(data, [8], 10, seed=4):
        optimizer.zero_grad()
        outputs = module(torch.from_numpy(data.inputs[ids]))
        loss = torch.nn.functional.cross_entropy(outputs, torch.from_numpy(data.targets[ids]))
        torch.autograd.backward(loss)
        optimizer.step()
    for name, parameter in module.named_parameters():
        assert np.array_equal(run.parameters[name], parameter.detach().numpy()), name


SLOW = SimulationConfig(
    costs={
        "gradient": Cost(base_s=1e-3, per_sample_s=1e-4, jitter=Exponential()),
        "apply": Cost(base_s=1e-4),
    },
    speeds={"worker-1": 0.3},
    network=Network(bandwidth_bytes_s=1e6, link=Link(latency_s=2e-3, jitter_s=5e-3)),
)
UNEVEN = SimulationConfig(
    costs={"gradient": Cost(base_s=1e-2, jitter=LogNormal(0.5))},
    network=Network(cards={"worker-0": 1e5, "shard-0": 1e6}),
)


def test_real_numbers_have_the_same_bits_whatever_the_cluster() -> None:
    model, data = least_squares(64, FEATURES, whole=False)
    sizes = [7, 1, 0, 8]
    ours, theirs = RULES["adam"]
    batches = joined_batches(data, sizes, 8, seed=6)
    expected = one_node(model, data, batches, theirs, divide=True)
    first = simulated(model, data, sizes, optimizer=ours, steps=8, seed=6)
    error = np.abs(first - expected).max() / np.abs(expected).max()
    assert error <= 1e-12
    variants: list[dict[str, Any]] = [
        *({"servers": servers} for servers in (2, 7)),
        *({"chunk_elems": chunk} for chunk in (128, 4096, 1 << 22, None)),
        {"strategy": gs.Synchronous(overlap=False)},
        {"strategy": gs.Synchronous(overlap=False), "servers": 2, "config": SLOW},
        {"config": SLOW},
        {"config": UNEVEN, "servers": 2, "chunk_elems": 128},
    ]
    for variant in variants:
        got = simulated(model, data, sizes, optimizer=ours, steps=8, seed=6, **variant)
        assert got.tobytes() == first.tobytes(), variant


def test_a_sum_in_the_order_of_arrival_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: the server adds up whatever came first."""
    from gradstream.strategies.synchronous import SynchronousRound

    def due(self: SynchronousRound, version: int, parked: Any) -> Any:
        present = [one for one in parked if one.round == version]
        return present if len(present) == self.num_workers else ()

    model, data = least_squares(64, FEATURES, whole=False)

    def bits(config: SimulationConfig) -> bytes:
        ours = gs.optim.SGD(lr=LR)
        return simulated(model, data, [5, 6, 5], optimizer=ours, steps=6, config=config).tobytes()

    assert bits(SLOW) == bits(UNEVEN)
    monkeypatch.setattr(SynchronousRound, "due", due)
    assert bits(SLOW) != bits(UNEVEN)
