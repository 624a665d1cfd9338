"""Muon: matrices take nearly orthogonal steps, everything else AdamW's, and nobody updates a part of a matrix."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import gradstream as gs
from gradstream.errors import ConfigError, InternalError
from gradstream.memory import Memory
from gradstream.optim import AdamW, Muon
from gradstream.optim.groups import GroupedRule, groups_of
from gradstream.optim.muon import orthogonal
from gradstream.worker.updater import Updater
from split_jobs import difference, run

SHAPES = {"a.weight": (9, 14), "a.bias": (9,), "b.weight": (31, 3), "head.weight": (5, 31)}
BOUNDS = [("a.weight", 0, 126), ("a.bias", 126, 135), ("b.weight", 135, 228), ("head.weight", 228, 383)]
RULE = Muon(0.1, momentum=0.8, weight_decay=0.05)


def random_vector(seed: int, elems: int) -> torch.Tensor:
    return torch.randn(elems, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def grouped_of(rule: Any) -> GroupedRule:
    groups = groups_of([{"match": "head.*", "orthogonal": False, "lr_scale": 0.5}], rule)
    return GroupedRule(rule, groups, BOUNDS, None, SHAPES)


def twin(weights: torch.Tensor, gradients: list[torch.Tensor]) -> torch.Tensor:
    """A matrix under `RULE`, by its singular vectors: Newton and Schulz's iteration acts on singular values alone."""
    w, b = weights.clone(), torch.zeros_like(weights)
    for g in gradients:
        b = 0.8 * b + 0.2 * g
        u, s, v = torch.linalg.svd(0.2 * g + 0.8 * b, full_matrices=False)
        s = s / s.square().sum().sqrt()
        for _ in range(5):
            s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
        w = (1 - 0.1 * 0.05) * w - 0.1 * max(1, len(w) / w.shape[1]) ** 0.5 * (u * s) @ v
    return w


@pytest.mark.parametrize("cuts", [[(0, 383)], [(0, 64), (64, 192), (192, 383)]], ids=["whole", "buckets"])
def test_matrices_equal_the_twin_and_the_rest_adamw(cuts: list[tuple[int, int]]) -> None:
    start, gradients = random_vector(0, 383), [random_vector(step, 383) for step in (1, 2, 3)]
    found = start.clone()
    updater = Updater(Memory().allocate, RULE, grouped_of(RULE), [(0, 383)], torch.float64)
    for step, gradient in enumerate(gradients, start=1):
        updater.update(found, [(first, gradient[first:stop]) for first, stop in cuts], lr=0.1, step=step)
    for name, first, stop in BOUNDS[::2][:2]:
        shape = SHAPES[name]
        expected = twin(start[first:stop].view(shape), [one[first:stop].view(shape) for one in gradients])
        assert torch.allclose(found[first:stop].view(shape), expected, rtol=1e-10, atol=1e-11), name
    for (_, first, stop), lr in ((BOUNDS[1], 0.1), (BOUNDS[3], 0.05)):
        plain, state = (
            start[first:stop].clone(),
            {name: torch.zeros(stop - first).double() for name in RULE.state_names},
        )
        for step, gradient in enumerate(gradients, start=1):
            AdamW(0.1, weight_decay=0.05).apply(plain, gradient[first:stop], state, lr=lr, step=step)
        assert torch.allclose(found[first:stop], plain, rtol=1e-12, atol=1e-13)


def test_without_orthogonal_steps_it_is_adamw_to_the_bit() -> None:
    rule = Muon(0.1, orthogonal=False)
    ours, theirs = (
        (random_vector(0, 383), {name: torch.zeros(383).double() for name in rule.state_names}) for _ in "ab"
    )
    for step in (1, 2, 3):
        GroupedRule(rule, (), BOUNDS, None, SHAPES).apply(
            0, ours[0], random_vector(step, 383), ours[1], lr=0.1, step=step
        )
        AdamW(0.1, weight_decay=0.1).apply(theirs[0], random_vector(step, 383), theirs[1], lr=0.1, step=step)
    assert torch.equal(ours[0], theirs[0])


@pytest.mark.parametrize("shape", [(6, 6), (4, 30), (30, 4)])
def test_steps_are_nearly_orthogonal(shape: tuple[int, int]) -> None:
    values = torch.linalg.svdvals(orthogonal(random_vector(1, shape[0] * shape[1]).view(shape)))
    assert ((values > 0.5) & (values < 1.3)).all()
    assert not orthogonal(torch.zeros(shape)).any()


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch before 2.9 has no Muon")
@pytest.mark.parametrize("shape", [(8, 20), (20, 8)])
def test_torch_takes_the_same_steps_to_the_rounding_of_bfloat16(shape: tuple[int, int]) -> None:
    start = random_vector(0, 160).view(shape).float()
    theirs = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.Muon([theirs], 0.1, weight_decay=0.05, momentum=0.8)
    ours, state = start.clone(), {name: torch.zeros(shape) for name in RULE.state_names}
    for step in (1, 2, 3):
        theirs.grad = random_vector(step, 160).view(shape).float()
        optimizer.step()  # type: ignore[no-untyped-call]
        RULE.apply_matrix(ours, theirs.grad, state, lr=0.1, step=step)
    assert (ours - theirs.detach()).norm() < 0.02 * (ours - start).norm()


def test_workers_of_a_group_and_of_one_process_agree() -> None:
    options: dict[str, Any] = {"optimizer": gs.optim.Muon(lr=0.05), "strategy": "allreduce"}
    alone = run(**options, workers=1, batch_size=12)
    assert difference(run(**options), alone) < 1e-10
    assert difference(run(**{**options, "strategy": gs.AllReduce(bucket_mib=5e-4)}), alone) < 1e-10
    assert difference(run(**options, split=2), alone) < 1e-10


def test_a_part_of_a_matrix_is_refused_at_the_last() -> None:
    state = {name: torch.zeros(64).double() for name in RULE.state_names}
    with pytest.raises(InternalError, match="expected all"):
        grouped_of(RULE).apply(0, random_vector(0, 64), random_vector(1, 64), state, lr=0.1, step=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "synchronous"}, "take strategy='allreduce'"),
        ({"strategy": "downpour"}, "take strategy='allreduce'"),
        ({"strategy": gs.AllReduce(sharded=True)}, "leave sharded out"),
        (
            {"strategy": "allreduce", "split": 2, "pipeline": gs.pipeline.Hybrid("slices")},
            "do not know the whole",
        ),
    ],
)
def test_where_matrices_are_divided_it_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(optimizer=RULE, **options)
