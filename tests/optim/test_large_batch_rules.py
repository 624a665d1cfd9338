"""LARS and LAMB: the papers' formulas, with norms over whole tensors, whoever holds their elements."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from gradstream.errors import ConfigError
from gradstream.optim import LAMB, LARS, SGD, Adam, AdamW, Optimizer
from gradstream.optim.base import BLOCK_ELEMS, square_sum
from gradstream.optim.groups import GroupedRule, add_up, groups_of
from gradstream.optim.merge import Outer

SHAPES = {"a.weight": (7, 30), "a.bias": (7,), "b.weight": (3, 7, 5), "scale": (), "c.weight": (11, 3)}
RATES = (0.1, 0.1, 0.4, 0.2)

LARS_RULE = LARS(0.1, momentum=0.8, weight_decay=0.05, trust_coefficient=0.3)
LAMB_RULE = LAMB(0.1, beta1=0.8, beta2=0.95, eps=1e-3, weight_decay=0.2, norm_max=2.0)


def lars(weights: torch.Tensor, gradients: list[torch.Tensor], vector: bool) -> torch.Tensor:
    """The twin of `LARS_RULE`, by hand."""
    w, b = weights.clone(), torch.zeros_like(weights)
    decay = 0.0 if vector else 0.05
    for g, lr in zip(gradients, RATES, strict=True):
        ratio = 1.0 if vector else 0.3 * w.norm() / (g.norm() + decay * w.norm())
        b = 0.8 * b + ratio * (g + decay * w)
        w = w - lr * b
    return w


def lamb(weights: torch.Tensor, gradients: list[torch.Tensor], vector: bool) -> torch.Tensor:
    """The twin of `LAMB_RULE`, by hand."""
    w, m, v = weights.clone(), torch.zeros_like(weights), torch.zeros_like(weights)
    for t, (g, lr) in enumerate(zip(gradients, RATES, strict=True), start=1):
        m, v = 0.8 * m + 0.2 * g, 0.95 * v + 0.05 * g * g
        r = (m / (1 - 0.8**t)) / ((v / (1 - 0.95**t)).sqrt() + 1e-3)
        if not vector:
            r = r + 0.2 * w
            r = r * min(w.norm().item(), 2.0) / r.norm()
        w = w - lr * r
    return w


TWINS = [pytest.param(LARS_RULE, lars, id="lars"), pytest.param(LAMB_RULE, lamb, id="lamb")]


def random_vector(seed: int, elems: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(elems, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def bounds_of(shapes: Mapping[str, tuple[int, ...]]) -> list[tuple[str, int, int]]:
    ends = list(itertools.accumulate((math.prod(shape) for shape in shapes.values()), initial=0))
    return [(name, *ends[index : index + 2]) for index, name in enumerate(shapes)]  # type: ignore[misc]


def grouped_of(rule: Optimizer, groups: list[dict[str, Any]] | None = None) -> GroupedRule:
    return GroupedRule(rule, groups_of(groups or [], rule), bounds_of(SHAPES), None, SHAPES)


def trained(
    rule: GroupedRule, start: torch.Tensor, state_names: tuple[str, ...], cuts: list[int]
) -> torch.Tensor:
    """The parameters after one update at each rate, of a vector that is held in ranges cut at these places."""
    w, state = start.clone(), {name: torch.zeros_like(start) for name in state_names}
    for step, lr in enumerate(RATES, start=1):
        g = random_vector(step, len(start), start.dtype)
        ranges = [slice(*edges) for edges in itertools.pairwise([0, *cuts, len(start)])]
        held = [(at.start, w[at], g[at], {name: one[at] for name, one in state.items()}) for at in ranges]
        pieces = [piece for one in held for piece in rule.partial_sums(*one, step=step)]
        random.Random(step).shuffle(pieces)
        sums = add_up(pieces)
        for one in held:
            rule.apply(*one, sums, lr=lr, step=step)
    return w


@pytest.mark.parametrize(("rule", "twin"), TWINS)
@pytest.mark.parametrize("cuts", [[], [64], [64, 128, 192, 256, 320]], ids=["whole", "two", "many"])
def test_ranges_of_a_vector_equal_the_twin_of_each_tensor(rule: Any, twin: Any, cuts: list[int]) -> None:
    bounds = bounds_of(SHAPES)
    start = random_vector(0, bounds[-1][2])
    found = trained(grouped_of(rule), start, rule.state_names, cuts)
    for name, first, stop in bounds:
        gradients = [random_vector(step, len(start))[first:stop] for step in range(1, 5)]
        expected = twin(start[first:stop], gradients, len(SHAPES[name]) < 2)
        assert torch.allclose(found[first:stop], expected, rtol=1e-12, atol=1e-13), name


@pytest.mark.parametrize(("rule", "twin"), TWINS)
def test_a_norm_of_a_slice_in_the_place_of_the_tensors_would_be_noticed(
    rule: Any, twin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = random_vector(0, bounds_of(SHAPES)[-1][2])
    right = trained(grouped_of(rule), start, rule.state_names, [64])
    monkeypatch.setitem(globals(), "add_up", lambda pieces: dict(pieces))  # of each tensor, one piece counts
    wrong = trained(grouped_of(rule), start, rule.state_names, [64])
    assert (right - wrong).abs().max() > 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("apart", [False, True], ids=["grouped", "apply"])
@pytest.mark.parametrize(
    ("rule", "plain"),
    [
        (LARS(0.1, 0.9, 0.01, trust_coefficient=None, skip_1d=False), SGD(0.1, 0.9, weight_decay=0.01)),
        (LAMB(0.1, trust=False, skip_1d=False), AdamW(0.1, eps=1e-6)),
        (LARS(0.1, 0.0, 0.0, trust_coefficient=None), SGD(0.1)),
    ],
    ids=["momentum", "adamw", "sgd"],
)
def test_without_trust_ratio_they_are_plain_rules_to_the_bit(
    rule: Any, plain: Any, apart: bool, dtype: torch.dtype
) -> None:
    start = random_vector(0, bounds_of(SHAPES)[-1][2], dtype)
    ours, theirs = (
        (start.clone(), {name: torch.zeros_like(start) for name in rule.state_names}) for _ in "ab"
    )
    for step, lr in enumerate(RATES, start=1):
        gradient = random_vector(step, len(start), dtype)
        plain.apply(theirs[0], gradient, theirs[1], lr=lr, step=step)
        if apart:
            rule.apply(ours[0], gradient, ours[1], lr=lr, step=step)
        else:
            grouped_of(rule).apply(0, ours[0], gradient, ours[1], lr=lr, step=step)
    assert torch.equal(ours[0], theirs[0])


@pytest.mark.parametrize("rule", [LARS_RULE, LAMB_RULE], ids=["lars", "lamb"])
def test_the_ratio_is_1_where_a_norm_is_0(rule: Any) -> None:
    for weights, gradient in ((torch.zeros(4), torch.ones(4)), (torch.zeros(4), torch.zeros(4))):
        state = {name: torch.zeros(4) for name in rule.state_names}
        rule.apply(weights, gradient, state, lr=0.1, step=1)
        assert weights.isfinite().all()
        assert bool(weights.any()) == bool(gradient.any())


def test_groups_set_the_ratio_and_the_decay_by_name() -> None:
    grouped = grouped_of(
        LARS_RULE, [{"match": "c.*", "trust_coefficient": None}, {"match": "b.*", "skip_1d": False}]
    )
    tensors = {one.tensor: one.rule for one in grouped.ranges}
    assert set(tensors) == {0, 2, None}
    assert grouped.ranges[-1].rule == SGD(0.1, 0.8, weight_decay=0.05)
    assert grouped_of(LAMB_RULE).ranges[1].rule == Adam(0.1, 0.8, 0.95, 1e-3)


def test_the_sum_of_squares_does_not_depend_on_threads() -> None:
    vector, before = random_vector(3, BLOCK_ELEMS, torch.float32), torch.get_num_threads()
    found = set()
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        found.add(square_sum(vector))
    torch.set_num_threads(before)
    assert len(found) == 1
    assert found.pop() == pytest.approx(float(vector.double().square().sum()), rel=1e-14)


def test_a_velocity_that_contains_the_rate_needs_the_momentum_correction() -> None:
    """Goyal 2017, remark 3: u ← μ·(η/η_before)·u + η·g, w ← w - u equals PyTorch's form, which `SGD` has."""
    start = random_vector(0, 20)
    ours, state = start.clone(), {"momentum_buffer": torch.zeros(20, dtype=torch.float64)}
    corrected, plain = ((start.clone(), torch.zeros(20, dtype=torch.float64)) for _ in "ab")
    before = RATES[0]
    for step, lr in enumerate(RATES, start=1):
        gradient = random_vector(step, 20)
        SGD(0.1, 0.9).apply(ours, gradient, state, lr=lr, step=step)
        for (weights, velocity), factor in ((corrected, lr / before), (plain, 1.0)):
            velocity.mul_(0.9 * factor).add_(gradient, alpha=lr)
            weights.sub_(velocity)
        before = lr
    assert torch.allclose(ours, corrected[0], rtol=1e-12, atol=1e-13)
    assert (ours - plain[0]).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LARS(0.1, trust_coefficient=0), "LARS: trust_coefficient is 0"),
        (lambda: LARS(0.1, momentum=1.0), "LARS: momentum is 1.0"),
        (lambda: LAMB(norm_max=-1), "LAMB: norm_max is -1"),
        (lambda: LAMB(beta2=1.5), "LAMB: beta2 is 1.5"),
        (lambda: Outer(LAMB()), "needs whole tensors"),
        (lambda: GroupedRule(LAMB(), (), [("w", 0, 4)]), "needs the shapes of tensors"),
    ],
)
def test_what_cannot_be_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
