"""Parameter groups: each element has the bits of its own rule, wherever ranges, chunks and shards end."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gradstream as gs
from gradstream._simulate import simulate
from gradstream.data.base import BatchRef
from gradstream.data.plan import RoundPlan
from gradstream.errors import ConfigError, UnknownNameError
from gradstream.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from gradstream.optim.groups import GroupedRule, groups_of
from gradstream.testing.runs import least_squares

RULES: list[Any] = [
    pytest.param(SGD(0.1, weight_decay=0.1), id="sgd"),
    pytest.param(SGD(0.1, momentum=0.9, weight_decay=0.1), id="momentum"),
    pytest.param(Adagrad(0.1, weight_decay=0.1), id="adagrad"),
    pytest.param(Adam(0.1, weight_decay=0.1), id="adam"),
    pytest.param(AdamW(0.1, weight_decay=0.1), id="adamw"),
]


def tensors_of(elems: int, rng: random.Random) -> list[tuple[str, int, int]]:
    """Parameters of random sizes, many of them tiny; every third a bias, some in the head."""
    tensors: list[tuple[str, int, int]] = []
    start = 0
    while start < elems:
        stop = min(elems, start + rng.choice([1, 3, 10, 63, 64, 65, 200, 500]))
        kind, place = ("bias" if len(tensors) % 3 else "weight"), rng.choice(["head", "body"])
        tensors.append((f"{place}{len(tensors)}.{kind}", start, stop))
        start = stop
    return tensors


def state_of(rule: Optimizer, elems: int) -> dict[str, torch.Tensor]:
    return {name: torch.full((elems,), rule.state_init) for name in rule.state_names}


def by_hand(rules: list[tuple[Optimizer, float]], choice: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """Every rule updates the whole vector on its own; each element is taken from its own rule's vector."""
    vectors = []
    for rule, scale in rules:
        vector, state = start.clone(), state_of(rule, len(start))
        for step in range(1, 4):
            gradient = torch.randn(len(start), generator=torch.Generator().manual_seed(step))
            rule.apply(vector, gradient, state, lr=0.1 * scale, step=step)
        vectors.append(vector)
    return torch.stack(vectors)[choice, torch.arange(len(start))]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("chunk", [64, 320, 8192])
def test_each_element_has_the_bits_of_its_own_rule(rule: Any, chunk: int) -> None:
    for seed in range(6):
        rng = random.Random(seed)
        elems = rng.choice([700, 1000, 1024, 1999])
        tensors = tensors_of(elems, rng)
        given = [{"match": "*.bias", "weight_decay": 0.0}, {"match": ["head*"], "lr_scale": 0.25}]
        grouped = GroupedRule(rule, groups_of(given, rule), tensors)
        plain = type(rule)(
            **{f.name: getattr(rule, f.name) for f in dataclasses.fields(rule)} | {"weight_decay": 0.0}
        )
        rules = [(rule, 1.0), (plain, 1.0), (rule, 0.25), (plain, 0.25)]
        choice = torch.zeros(elems, dtype=torch.int64)
        for name, start, stop in tensors:
            choice[start:stop] = name.endswith("bias") + 2 * name.startswith("head")
        begin = torch.randn(elems, generator=torch.Generator().manual_seed(99))
        vector, state = begin.clone(), state_of(rule, elems)
        for step in range(1, 4):
            gradient = torch.randn(elems, generator=torch.Generator().manual_seed(step))
            for first in range(0, elems, chunk):
                cut = slice(first, first + chunk)
                parts = {name: whole[cut] for name, whole in state.items()}
                grouped.apply(first, vector[cut], gradient[cut], parts, lr=0.1, step=step)
        assert torch.equal(vector, by_hand(rules, choice, begin))


def test_groups_that_change_nothing_change_no_bit() -> None:
    model, data = least_squares(60, 300, whole=False)
    options: Any = {"optimizer": gs.optim.Adam(lr=0.01), "workers": 2, "batch_size": 10, "epochs": 2}
    options |= {"chunk_elems": 64, "strategy": "synchronous"}
    plain = simulate(model, data, **options)
    same = simulate(model, data, groups=[{"match": "w", "lr_scale": 1.0, "beta1": 0.9}], **options)
    assert np.array_equal(plain.parameters["w"], same.parameters["w"])


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 13), nn.Tanh(), nn.Linear(13, 3), nn.Tanh(), nn.Linear(3, 2))


GROUPS = [{"match": "*.bias", "weight_decay": 0.0}, {"match": "4.*", "lr_scale": 4.0}]


def small() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((48, 5)).astype("float32"), rng.standard_normal((48, 2)).astype("float32")
    return gs.from_torch(build, nn.functional.mse_loss), gs.from_arrays(x, y)


def in_one_process(optimizer: Any) -> dict[str, torch.Tensor]:
    """torch.optim with parameter groups on the joined batches."""
    model, data = small()
    flat = torch.zeros(model.layout.elems)
    model.init(7, flat)
    module = build()
    module.load_state_dict({name: view.clone() for name, view in model.layout.views(flat)})
    named = dict(module.named_parameters())
    parts = [
        {"params": [named[f"{i}.{kind}"]], "weight_decay": 0.0 if kind == "bias" else 0.1,
         "lr": 0.02 * (4.0 if i == 4 else 1.0)}
        for i in (0, 2, 4) for kind in ("weight", "bias")
    ]  # fmt: skip
    theirs = optimizer(parts)
    plan = RoundPlan(48, 8, 2, seed=7)
    for step in range(9):
        epoch, batch = divmod(step, plan.batches_per_epoch(0))
        ids = np.concatenate([plan.ids(BatchRef(epoch, rank, batch)) for rank in range(2)])
        samples = data.batch(ids)
        theirs.zero_grad()
        outputs = module(torch.from_numpy(samples.inputs))
        loss = nn.functional.mse_loss(outputs, torch.from_numpy(samples.targets))
        loss.backward()  # type: ignore[no-untyped-call]
        theirs.step()
    return {name: parameter.detach() for name, parameter in named.items()}


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (gs.optim.SGD(0.02, momentum=0.9, weight_decay=0.1), lambda p: torch.optim.SGD(p, 0.02, 0.9)),
        (gs.optim.AdamW(0.02, weight_decay=0.1), lambda p: torch.optim.AdamW(p, 0.02)),
    ],
)
def test_a_run_is_that_of_torch_with_any_number_of_shards(ours: Any, theirs: Any) -> None:
    expected = in_one_process(theirs)
    found = []
    for servers in (1, 2, 3):
        model, data = small()
        run = simulate(
            model, data, strategy="synchronous", optimizer=ours, groups=GROUPS, workers=2, batch_size=8,
            servers=servers, steps=9, seed=7, chunk_elems=64,
        )  # fmt: skip
        found.append(run.parameters)
    for name, value in expected.items():
        assert np.allclose(found[0][name], value.numpy(), atol=1e-5), name
        assert np.array_equal(found[0][name], found[1][name])
        assert np.array_equal(found[0][name], found[2][name])


def test_held_still_with_downpour_too() -> None:
    model, data = small()
    run = simulate(
        model, data, strategy="downpour", optimizer=gs.optim.SGD(0.05), groups=[{"match": "0.*", "lr_scale": 0.0}],
        workers=2, batch_size=8, epochs=2, seed=7,
    )  # fmt: skip
    flat = torch.zeros(model.layout.elems)
    model.init(7, flat)
    for name, view in model.layout.views(flat):
        assert np.array_equal(run.parameters[name], view.numpy()) == name.startswith("0."), name


BAD: list[tuple[Any, str]] = [
    ([{"weight_decay": 0.0}], r"groups\[0\] is .*expected a table"),
    ([{"match": 3}], r"groups\[0\]: match is 3"),
    ([{"match": "*", "weigth_decay": 0.0}], "did you mean 'weight_decay'"),
    ([{"match": "*", "lr": 0.1}], "set lr_scale"),
    ([{"match": "*", "lr_scale": -1.0}], "lr_scale is -1.0"),
    ([{"match": "*", "weight_decay": -1.0}], r"groups\[0\]: SGD: weight_decay is -1.0"),
    ([{"match": "*", "momentum": 0.9}], "must be the same for all parameters"),
    ([{"match": "4.wieght", "lr_scale": 2.0}], r"groups\[0\].match '4.wieght' \(did you mean '4.weight'\?\)"),
]


@pytest.mark.parametrize(("groups", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_groups_are_named(groups: Any, message: str) -> None:
    model, data = small()
    with pytest.raises(ConfigError, match=message) as caught:
        simulate(model, data, optimizer=gs.optim.SGD(0.1), groups=groups, workers=1, batch_size=8, steps=1)
    assert ("did you mean" in message) == isinstance(caught.value, UnknownNameError)
