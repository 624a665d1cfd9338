"""`Headroom`: bounds are never below the elements, and nothing that overflows is missed."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

import gradstream as gs
from gradstream.errors import NonFiniteError
from gradstream.model.base import length
from gradstream.optim.groups import GroupedRule, groups_of
from gradstream.optim.merge import Add, Outer, Replace
from gradstream.server.shard import store
from gradstream.server.shard.store import Headroom

RULES = [
    gs.optim.SGD(lr=0.1),
    gs.optim.SGD(lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.1),
    gs.optim.SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.5),
    gs.optim.Adam(weight_decay=0.1),
    gs.optim.AdamW(lr=3.0, weight_decay=2.0),
    gs.optim.Adagrad(lr=1.0, initial_accumulator=0.5, weight_decay=0.1),
    Add(),
    Replace(states=("momentum_buffer",)),
    Outer(gs.optim.SGD(lr=0.7, momentum=0.9)),
]


class Chunk:
    """A chunk with a rule; counts how often its elements were looked at."""

    def __init__(self, rule: Any, monkeypatch: pytest.MonkeyPatch, groups: Any = None) -> None:
        self.rule, self.looks, self.step = rule, 0, 0
        self.vectors = {
            "": torch.zeros(256),
            **{name: torch.full((256,), rule.state_init) for name in rule.state_names},
        }
        self.headroom = Headroom(rule, groups, torch.float32)

        def counted(tensor: torch.Tensor) -> float:
            self.looks += 1
            return length(tensor)

        monkeypatch.setattr(store, "length", counted)

    def update(self, gradient: torch.Tensor, lr: float = 0.1, bound: float | None = None) -> None:
        self.step += 1
        state = {name: vector for name, vector in self.vectors.items() if name}
        self.rule.apply(self.vectors[""], gradient, state, lr=lr, step=self.step)
        bound = float(gradient.norm()) if bound is None else bound
        self.headroom.updated(0, self.vectors, bound, where="chunk 0", lr=lr, step=self.step)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_no_element_exceeds_its_bound(rule: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    chunk, seed = Chunk(rule, monkeypatch), torch.Generator().manual_seed(0)
    for number in range(3 * store.LOOK_EVERY):
        scale = 10.0 ** (number % 7 - 3)
        chunk.update(torch.randn(256, generator=seed) * scale, lr=(number % 5) / 4)
        for name, bound in chunk.headroom._bounds[0].items():
            assert float(chunk.vectors[name].abs().max()) <= bound, (name, number)
    looked = chunk.looks / len(chunk.vectors)
    assert looked <= 5  # the first time, then after every `LOOK_EVERY` updates


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_an_overflow_is_found_at_once(rule: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    chunk = Chunk(rule, monkeypatch)
    for _ in range(5):
        chunk.update(torch.ones(256))
    if isinstance(rule, Replace | Add | Outer):  # they ignore the rate of a push
        with pytest.raises(NonFiniteError, match="update 6, chunk 0"):
            chunk.update(torch.full((256,), math.inf), bound=math.inf)
        return
    with pytest.raises(NonFiniteError, match="update 6, chunk 0"):
        chunk.update(torch.full((256,), 1e15), lr=3e38)


def test_growth_to_the_limit_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters that double with each update: looked at once they are large, and reported when they overflow."""
    chunk = Chunk(gs.optim.SGD(lr=0.1), monkeypatch)
    for number in range(200):
        before = chunk.vectors[""].clone()
        try:
            chunk.update(-(before + 1), lr=1.0)
        except NonFiniteError:
            break
        assert torch.isfinite(chunk.vectors[""]).all(), number
    assert 100 < chunk.step < 140
    assert torch.isinf(chunk.vectors[""]).all()


def test_what_changes_elements_otherwise_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    chunk = Chunk(gs.optim.SGD(lr=0.1), monkeypatch)
    chunk.update(torch.ones(256))
    chunk.vectors[""].fill_(3e38)
    chunk.headroom.forget(0)
    with pytest.raises(NonFiniteError):
        chunk.update(torch.full((256,), -3e38), lr=1.0, bound=1.0)


def test_an_unknown_length_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    chunk = Chunk(gs.optim.SGD(lr=0.1), monkeypatch)
    for _ in range(10):
        chunk.update(torch.ones(256), bound=math.inf)
    assert chunk.looks == 10


def test_a_subclass_with_its_own_update_is_looked_at_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bounds are those of another update."""

    @dataclasses.dataclass(frozen=True)
    class Squared(gs.optim.SGD):
        def apply(self, parameters: torch.Tensor, gradient: torch.Tensor, *_: Any, **__: Any) -> None:
            parameters.copy_((parameters + gradient) * 1e20)

    chunk = Chunk(Squared(lr=0.1), monkeypatch)
    chunk.update(torch.ones(256))
    with pytest.raises(NonFiniteError):
        chunk.update(torch.ones(256))


def test_groups_take_the_largest_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = gs.optim.SGD(lr=0.1)
    tensors = [("a", 0, 128), ("b", 128, 256)]
    groups = GroupedRule(rule, groups_of([{"match": "b", "lr_scale": 10.0}], rule), tensors)
    chunk = Chunk(rule, monkeypatch, groups)
    for step in range(1, 40):
        gradient = torch.ones(256)
        groups.apply(0, chunk.vectors[""], gradient, {}, lr=0.1, step=step)
        chunk.headroom.updated(0, chunk.vectors, 1.0, where="chunk 0", lr=0.1, step=step)
        assert float(chunk.vectors[""].abs().max()) <= chunk.headroom._bounds[0][""]
    assert chunk.looks == 1
