"""Each update rule: the same bits in chunks as in one piece, and the same bits as torch.optim."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gradstream.errors import ConfigError
from gradstream.optim import SGD, Adagrad, Adam, AdamW, Momentum, Nesterov, Optimizer
from gradstream.optim.schedules import nominal_rate

Reference = Callable[[list[torch.Tensor]], torch.optim.Optimizer]

RULES: list[Any] = [
    pytest.param(SGD(0.1), lambda p: torch.optim.SGD(p, 0.1, fused=True), id="sgd"),
    pytest.param(
        SGD(0.1, momentum=0.9, dampening=0.3, weight_decay=0.01),
        lambda p: torch.optim.SGD(p, 0.1, 0.9, 0.3, 0.01, fused=True),
        id="momentum",
    ),
    pytest.param(
        Nesterov(0.05, weight_decay=0.01),
        lambda p: torch.optim.SGD(p, 0.05, 0.9, weight_decay=0.01, nesterov=True, fused=True),
        id="nesterov",
    ),
    pytest.param(
        Adagrad(0.02, initial_accumulator=0.1, weight_decay=0.01),
        lambda p: torch.optim.Adagrad(p, 0.02, weight_decay=0.01, initial_accumulator_value=0.1, fused=True),
        id="adagrad",
    ),
    pytest.param(
        Adam(0.01, weight_decay=0.01),
        lambda p: torch.optim.Adam(p, 0.01, weight_decay=0.01, fused=True),
        id="adam",
    ),
    pytest.param(AdamW(0.01), lambda p: torch.optim.AdamW(p, 0.01, fused=True), id="adamw"),
]


def gradient_at(step: int, elems: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(elems, dtype=dtype, generator=torch.Generator().manual_seed(step))


def new_state(rule: Optimizer, parameters: torch.Tensor) -> dict[str, torch.Tensor]:
    return {name: torch.full_like(parameters, rule.state_init) for name in rule.state_names}


def run_in_chunks(rule: Optimizer, start: torch.Tensor, chunk: int, steps: int) -> list[torch.Tensor]:
    """Parameters and state after `steps` updates carried out range by range."""
    parameters = start.clone()
    state = new_state(rule, parameters)
    for step in range(1, steps + 1):
        gradient = gradient_at(step, len(start), start.dtype)
        for first in range(0, len(start), chunk):
            cut = slice(first, first + chunk)
            parts = {name: vector[cut] for name, vector in state.items()}
            rule.apply(parameters[cut], gradient[cut], parts, lr=nominal_rate(rule.lr), step=step)
    return [parameters, *state.values()]


@pytest.mark.parametrize(("rule", "reference"), RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("elems", [1, 63, 64, 1000, 4097])
def test_chunks_have_the_bits_of_the_whole(
    rule: Optimizer, reference: Reference, dtype: torch.dtype, elems: int
) -> None:
    start = gradient_at(0, elems, dtype)
    whole = run_in_chunks(rule, start, elems, steps=4)
    for num_shards in (2, 7):
        chunk = max(64, math.ceil(elems / num_shards / 64) * 64)
        cut = run_in_chunks(rule, start, chunk, steps=4)
        assert all(torch.equal(a, b) for a, b in zip(whole, cut, strict=True))


@pytest.mark.parametrize(("rule", "reference"), RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bits_of_torch_optim(rule: Optimizer, reference: Reference, dtype: torch.dtype) -> None:
    start = gradient_at(0, 777, dtype)
    theirs = torch.nn.Parameter(start.clone())
    optimizer = reference([theirs])
    for step in range(1, 6):
        theirs.grad = gradient_at(step, 777, dtype)
        optimizer.step()
    ours = run_in_chunks(rule, start, 128, steps=5)[0]
    assert torch.equal(ours, theirs.detach())


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
@pytest.mark.parametrize(("rule", "reference"), RULES)
def test_gradient_is_read_only(rule: Optimizer, reference: Reference) -> None:
    data = gradient_at(1, 200, torch.float32).numpy().tobytes()
    before = bytes(bytearray(data))
    parameters = torch.zeros(200)
    gradient = torch.frombuffer(data, dtype=torch.float32)
    rule.apply(parameters, gradient, new_state(rule, parameters), lr=0.1, step=1)
    assert data == before
    assert parameters.abs().sum() > 0


@pytest.mark.parametrize(("rule", "reference"), RULES)
def test_learning_rate_of_the_request_counts(rule: Optimizer, reference: Reference) -> None:
    start, gradient = torch.zeros(64), torch.ones(64)
    small, large = start.clone(), start.clone()
    rule.apply(small, gradient, new_state(rule, start), lr=0.5, step=1)
    rule.apply(large, gradient, new_state(rule, start), lr=1.0, step=1)
    assert torch.allclose(large, 2 * small)


def test_momentum_by_hand() -> None:
    rule = Momentum(0.5, 0.5)
    parameters, state = torch.zeros(1), {"momentum_buffer": torch.zeros(1)}
    for step in (1, 2, 3):
        rule.apply(parameters, torch.ones(1), state, lr=0.5, step=step)
    # velocities 1, 1.5, 1.75
    assert parameters.item() == -0.5 * (1 + 1.5 + 1.75)


def test_rules_are_values() -> None:
    assert Momentum(0.1) == SGD(0.1, momentum=0.9)
    assert hash(Adam()) == hash(Adam())
    assert Adam() != AdamW()


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: SGD(0.0), "SGD: lr is 0.0"),
        (lambda: SGD(math.nan), "SGD: lr is nan"),
        (lambda: SGD("0.1"), "SGD: lr is '0.1'"),  # type: ignore[arg-type]
        (lambda: SGD(0.1, momentum=1.0), "momentum is 1.0"),
        (lambda: SGD(0.1, nesterov=True), "> 0 with nesterov=True"),
        (lambda: SGD(0.1, momentum=0.9, dampening=0.1, nesterov=True), "dampening is 0.1"),
        (lambda: Adagrad(eps=0.0), "Adagrad: eps"),
        (lambda: Adagrad(weight_decay=-1.0), "Adagrad: weight_decay"),
        (lambda: AdamW(beta2=1.0), "AdamW: beta2"),
    ],
)
def test_bad_hyper_parameters(build: Callable[[], object], words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace("(", r"\(")):
        build()
